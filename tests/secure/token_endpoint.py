"""The token endpoint of an identity provider, with TLS."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

from aiohttp import web

from tests.secure.secure_world import CLIENT_ID, CLIENT_SECRET, USER, Issuer

START_TIMEOUT_S = 30.0


class TokenEndpoint:
    """Returns tokens for the right secret; tests may change its answers.

    Attributes:
        asked: the form of each call.
        life_s: the lifetime that it returns.
        answer: status and body in place of a token.
    """

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.life_s = 3600.0
        self.answer: tuple[int, str] | None = None

    @contextmanager
    def served(self, cert: Path, key: Path) -> Iterator[TokenEndpoint]:
        """Listen until the block is left, also while the test waits for a process."""
        listening, loop = threading.Event(), asyncio.new_event_loop()
        over = asyncio.Event()

        async def main() -> None:
            async with self._serve(cert, key):
                listening.set()
                await over.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
        thread.start()
        try:
            assert listening.wait(START_TIMEOUT_S)
            yield self
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
            loop.close()

    @asynccontextmanager
    async def _serve(self, cert: Path, key: Path) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/token", self._token)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}/token"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _token(self, request: web.Request) -> web.Response:
        self.asked.append(dict(await request.post()))
        if self.answer is not None:
            status, body = self.answer
            return web.Response(status=status, text=body)
        kind, _, pair = request.headers.get("authorization", "").partition(" ")
        name, _, secret = base64.b64decode(pair).decode().partition(":")
        if (kind, unquote_plus(name), unquote_plus(secret)) != ("Basic", CLIENT_ID, CLIENT_SECRET):
            return web.json_response({"error": "invalid_client"}, status=401)
        token = self._issuer.token(USER, self.life_s)
        return web.json_response({"access_token": token, "expires_in": self.life_s})
