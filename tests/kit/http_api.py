"""A real aiohttp server on a free port, round a service in memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.kit.fake_service import FakeService, FakeStore
from txbroker.checkers.groups import Groups
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.settings import Settings
from txbroker.proxy.http import make_app, serve
from txbroker.proxy.http.api import CONTEXT
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.process import make_checks

JSON = {"content-type": "application/json"}


@dataclass
class Api:
    """A running server with its service, and a client for it."""

    url: str
    service: FakeService
    store: FakeStore
    sessions: SessionRegistry
    settings: Settings
    metrics: Metrics
    app: web.Application
    client: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def in_flight(self) -> int:
        return self.app[CONTEXT].limits.in_flight.bytes

    async def call(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str
    ) -> tuple[int, Any]:
        sent: dict[str, str] = {} if method == "GET" else dict(JSON)
        sent.update({name.replace("_", "-"): value for name, value in headers.items()})
        options: dict[str, Any] = {"data": raw} if raw is not None else {}
        if body is not None:
            options["data"] = aiohttp.JsonPayload(body)
        async with self.client.request(
            method, self.url + path, headers=sent, skip_auto_headers=["content-type"], **options
        ) as answer:
            return answer.status, await answer.json()

    async def prepare(self, **fields: Any) -> str:
        status, answer = await self.call("POST", "/v1/transactions", transaction(**fields))
        assert status == 201, answer
        return str(answer["id"])


def memory_bytes() -> int:
    """Return what this process takes of the machine's memory now; its peak may be older."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def transaction(**fields: Any) -> dict[str, Any]:
    return {"group": "orders", "messages": [{"topic": "payments", "value": "42"}], **fields}


@asynccontextmanager
async def running_api(*, public: bool = False, **options: Any) -> AsyncIterator[Api]:
    """Run a server with these settings; a public one believes that it listens everywhere."""
    settings = Settings(listen="0.0.0.0:0" if public else "127.0.0.1:0", **options)
    service, store, sessions, metrics = FakeService(), FakeStore(), SessionRegistry(), Metrics()
    urls: list[str] = []
    checks = make_checks(settings, lambda: urls)
    groups = Groups(store, checks.unusable)
    await groups.load()
    app = make_app(service, groups, sessions, settings, metrics, checks=checks)
    app.on_cleanup.append(lambda _: checks.close())
    async with serve(app, "127.0.0.1:0") as url, aiohttp.ClientSession() as client:
        urls.append(url)
        yield Api(url, service, store, sessions, settings, metrics, app, client)
