"""What the tests of check-backs share: calls, fake owners and fake finders."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.http_answers import LOOPBACK, answering, ask
from txbroker.checkers.base import CheckCall, CheckResult, Unreached
from txbroker.checkers.group_secrets import GroupSecrets
from txbroker.checkers.http import HttpChannel, HttpChecks, HttpLimits
from txbroker.core.records import CheckReason, Message


@pytest.fixture
def call() -> CheckCall:
    """A question of two messages, one of them a tombstone with bytes that are no text."""
    return CheckCall(
        id="0V3R7K2M5N8P1Q4S6T9W0X2Y4Z",
        group="orders",
        attempt=3,
        attempts_max=15,
        reason=CheckReason.DUE,
        prepared_at_ms=1_770_091_506_789,
        messages=(
            Message("payments", b"42", b"paid", (("trace", b"a"), ("trace", None)), 0),
            Message("audit", b"\xff\xfe", None, (("bin", b"\x80"),), 3, 12),
        ),
        round=2,
        number=7,
        timeout_s=5.0,
    )


@pytest.fixture
async def checks(tmp_path: Path) -> AsyncIterator[HttpChecks]:
    """The HTTP side as a proxy uses it, with short patience for connections."""
    checks = HttpChecks(
        guard=LOOPBACK,
        secrets=GroupSecrets(tmp_path, ["ORDERS_SECRET", "NO_SECRET"]),
        limits=HttpLimits(connect_timeout_s=2.0, idle_s=60.0),
        now_s=lambda: 1_770_091_600.5,
    )
    yield checks
    await checks.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait, turn by turn of the event loop, until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Served:
    """A local server whose handler a test chooses."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None) -> None:
        self._handler = handler
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://localhost:{self.port}/check"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[Served] = []

    async def start(handler: Handler, tls: ssl.SSLContext | None = None) -> Served:
        server = Served(handler, tls)
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()


class HttpHarness:
    """A local server, and the checks that call it."""

    def __init__(self, serve: Serve, checks: HttpChecks, call: CheckCall) -> None:
        self._serve = serve
        self._used = [checks]
        self.call = call
        self.server: Served

    @property
    def checks(self) -> HttpChecks:
        return self._used[-1]

    def use(self, **options: Any) -> None:
        """Replace the checks."""
        self._used.append(HttpChecks(guard=LOOPBACK, **options))

    async def serve(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.server = await self._serve(handler, tls)

    async def reply(
        self, *raw: bytes, then_close: bool = False, tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve these answers; see `answering`."""
        await self.serve(answering(*raw, then_close=then_close), tls)

    async def ask(self, call: CheckCall | None = None, timeout_s: float = 5.0) -> CheckResult:
        return await ask(self.checks, self.server.url, call or self.call, timeout_s)

    async def channel(self, query: str = "", **options: Any) -> HttpChannel:
        channel = await self.checks.acquire("orders", self.server.url + query, **options)
        assert isinstance(channel, HttpChannel), channel
        return channel

    async def unreached(self, url: str) -> str:
        """Return why a URL is not reached."""
        result = await self.checks.acquire("orders", url)
        assert isinstance(result, Unreached), result
        return result.detail

    async def close(self) -> None:
        for checks in self._used:
            await checks.close()


@pytest.fixture
async def http(serve: Serve, checks: HttpChecks, call: CheckCall) -> AsyncIterator[HttpHarness]:
    made = HttpHarness(serve, checks, call)
    yield made
    await made.close()
