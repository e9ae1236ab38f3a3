"""Calls of the HTTP API: of a proxy's harness, and of clients without the SDK."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
from aiohttp import web

from tests.kit.until import until
from tests.kit.workload import Recorder
from txbroker.contract.json import message_to_json
from txbroker.errors import RequestError, request_errors
from txbroker.sdk import Message

Json = dict[str, Any]
T = TypeVar("T")
GIVE_UP_S = 120.0
"""How long a call may take to be answered, on a busy machine."""
_PAUSE_S = 0.1


class HttpCalls:
    """Calls about single transactions."""

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        """Return status and answer, of errors too."""
        raise NotImplementedError

    async def checked(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        """Return status and answer of a call that succeeds.

        Raises:
            RequestError: the error of the answer, with its fields as `details`.
        """
        status, answer = await self.request(method, path, body)
        if "error" in answer:
            raise error_of(status, answer)
        return status, answer

    async def act(self, id: str, what: str, **fields: Any) -> Json:
        """POST `commit`, `rollback`, `check` or `revive`; return the answer."""
        return (await self.checked("POST", f"/v1/transactions/{id}/{what}", fields))[1]

    async def show(self, id: str, *, bodies: bool = False, trace: bool = False) -> Json:
        query = "&".join(["bodies=true"] * bodies + ["trace=true"] * trace)
        return (await self.checked("GET", f"/v1/transactions/{id}?{query}"))[1]

    async def search(self, **terms: object) -> tuple[list[Json], int]:
        """Return the transactions of all pages of a search, each once, and the number of pages."""
        found: dict[str, Json] = {}
        pages, cursor = 0, None
        while pages == 0 or cursor:
            query = {**terms, **({"cursor": cursor} if cursor else {})}
            page = (await self.checked("GET", f"/v1/search?{urlencode(query)}"))[1]
            assert 0 <= page["done"] <= 1
            assert page["next_cursor"] is not None or page["done"] == 1
            found |= {shown["id"]: shown for shown in page["transactions"]}
            pages, cursor = pages + 1, page["next_cursor"]
        return list(found.values()), pages

    async def reaches(self, id: str, state: str) -> Json:
        async def there() -> Json | None:
            shown = await self.show(id)
            return shown if shown["state"] == state else None

        return dict(await until(there))


def error_of(status: int, answer: Json) -> RequestError:
    """Return the error that an answer names; it must be a known one with its own status."""
    fields = dict(answer["error"])
    error = request_errors()[fields.pop("code")](fields.pop("message"), **fields)
    assert status == error.status
    return error


class Caller:
    """A service without the SDK: each call goes to any proxy, is recorded, and is sent again until
    it is answered.

    Args:
        fate: chooses the proxies.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        urls: Sequence[str],
        recorder: Recorder,
        fate: random.Random,
    ) -> None:
        self._http = http
        self._urls = urls
        self._recorder = recorder
        self._fate = fate

    async def prepare(
        self,
        token: str,
        group: str,
        *topics: str,
        key: str = "",
        value: str = "",
        business: bool = False,
        **fields: Any,
    ) -> str:
        headers = (("token", token.encode()),)
        key, value = key or token, value or token
        messages = [Message(topic, key.encode(), value.encode(), headers) for topic in topics]
        self._recorder.means(token, messages, business=business)
        body = {"group": group, "messages": list(map(message_to_json, messages)), **fields}
        return str((await self.until_answered("prepare", token, "", body))["id"])

    async def decide(self, decision: str, token: str, id: str, group: str) -> None:
        body = {"group": group} if group else {}
        await self.until_answered(decision, token, id, body)

    async def until_answered(self, what: str, token: str, id: str, body: Json | None) -> Json:
        """Send a call until it is answered; return the answer.

        Raises:
            RequestError: it was refused.
            TimeoutError: there was no answer.
        """
        end = time.monotonic() + GIVE_UP_S
        while time.monotonic() < end:
            try:
                return await self.once(what, token, id, body)
            except RequestError as error:
                if not error.retryable:
                    raise
                if not id and body is not None and "id" in error.details:
                    # The 503 of a prepare has its id, by which the repeated one is the same.
                    body["id"] = error.details["id"]
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_PAUSE_S)
        raise TimeoutError(f"{what} {token} is not answered")

    async def once(self, what: str, token: str, id: str, body: Json | None) -> Json:
        """Send a call once; without a body, show a transaction.

        Raises:
            RequestError: that was the answer.
            ClientError, TimeoutError: there was none.
        """
        path = "/v1/transactions" + (f"/{id}" if id else "")
        path += f"/{what}" if id and body is not None else ""
        method = "GET" if body is None else "POST"
        url = self._fate.choice(self._urls) + path
        with self._recorder.call(what, token, id) as call:
            async with self._http.request(method, url, json=body) as response:
                answer = dict(await response.json())
                if "error" in answer:
                    raise error_of(response.status, answer)
            call.id, call.state = str(answer["id"]), str(answer["state"])
            return answer


async def attempted(call: Awaitable[T]) -> T | None:
    """Await a call; return None if it was refused or not answered."""
    with suppress(RequestError, TimeoutError):
        return await call
    return None


@asynccontextmanager
async def calling(
    urls: Sequence[str], recorder: Recorder, fate: random.Random, timeout_s: float = 5.0
) -> AsyncIterator[Caller]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        yield Caller(http, urls, recorder, fate)


@asynccontextmanager
async def listening(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """Serve an application on a free port; yield its URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, **options)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=512).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
