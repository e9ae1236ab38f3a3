"""Two proxies of one installation that can be made to fail at named moments, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.faults.forks import Forge
from tests.faults.judge import Asked
from tests.kit.fleet import owned_by
from tests.kit.http_calls import GIVE_UP_S, Caller, listening
from tests.kit.proxies import ProxyProcess
from tests.kit.until import unique, until
from tests.kit.workload import Recorder
from txbroker.errors import AlreadyDecided

PARTITIONS = 2
SESSION_S = 2.0
CALL_S = 1.0
"""Timeout of a call, seconds; then the client retries."""
HEAL_S = GIVE_UP_S
_PAUSE_S = 0.15
FINAL = ("promoted", "rolled_back", "parked")


class FailingProxy(ProxyProcess):
    """A proxy whose moments can be armed."""

    def __init__(self, bootstrap: str, forge: Forge, armed: Path, **settings: Any) -> None:
        super().__init__(bootstrap, **settings)
        self._forge = forge
        self._armed = armed

    async def _spawn(self, environment: Mapping[str, str]) -> Any:
        return await self._forge.fork([str(self._armed), "proxy"], environment)

    async def owned(self) -> list[int]:
        """Return the partitions that it reports as owned; none without an answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return await owned_by(self)
        except TimeoutError:
            return []


class Pair:
    """Two proxies, the clients of both, and what these did."""

    def __init__(self, bootstrap: str, forge: Forge, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.prefix = unique("crash")
        self.armed = folder / f"{self.prefix}.armed"
        self.fired = self.armed.with_suffix(".fired")
        self.recorder = Recorder()
        self.decisions: dict[str, str] = {}
        """Answers to check-backs, by token; unknown by default."""
        self._stack = contextlib.AsyncExitStack()
        self.rows: list[str] = []
        self.topics: list[str] = []
        self.gave_up: list[str] = []
        self._arms = itertools.count()
        self.proxies = [
            FailingProxy(
                bootstrap,
                forge,
                self.armed,
                instance=f"proxy-{number}",
                topic_prefix=self.prefix,
                partitions=PARTITIONS,
                session_timeout_s=SESSION_S,
                check_after_s=0.3,
                check_interval_s=0.3,
                check_attempts_max=3,
                check_timeout_s=1.0,
                snapshot_records_min=20,
                log_level="warning",
            )
            for number in range(2)
        ]

    # --- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/check", self._check)
        url = await self._stack.enter_async_context(listening(app))
        for proxy in self.proxies:
            await proxy.launch()
        await self.whole()
        first = self.proxies[0]
        self.topics = [await first.topic(2), await first.topic(1)]
        await first.call("PUT", "/v1/groups/shop", {"check_url": f"{url}/check"})

    async def close(self) -> None:
        """End both; their terminals must be clean."""
        await self._stack.aclose()
        for proxy in self.proxies:
            await proxy.close()

    async def whole(self) -> None:
        """Wait until both are ready, and own all partitions, each one its own."""

        async def owned() -> bool:
            ready = [await proxy.is_ready() for proxy in self.proxies]
            found = [await proxy.owned() for proxy in self.proxies]
            return all(ready) and [len(each) for each in found] == [1, 1]

        await until(owned, HEAL_S)

    async def _check(self, request: web.Request) -> web.Response:
        asked = await request.json()
        token = dict(asked["messages"][0]["headers"])["token"]
        decision = self.decisions.get(token, "unknown")
        answered = Asked(asked["id"], time.time(), decision, asked["attempt"])
        self.recorder.history.asked.append(answered)
        return web.json_response({"decision": decision})

    # --- trouble -------------------------------------------------------------------------

    def arm(self, *steps: tuple[str, int, str]) -> None:
        """Arm moments, one after the other: name, how often it is passed before, action."""
        self.fired.unlink(missing_ok=True)
        steps = [
            {"point": point, "skip": skip, "action": action, "token": str(next(self._arms))}
            for point, skip, action in steps
        ]
        new = self.armed.with_suffix(".new")
        new.write_text(json.dumps(steps))
        new.rename(self.armed)

    async def went_off(self, count: int) -> FailingProxy:
        """Wait until `count` steps were taken; return the proxy that took the last."""

        async def done() -> list[str]:
            with contextlib.suppress(FileNotFoundError):
                lines = self.fired.read_text().splitlines()
                return lines if len(lines) >= count else []
            return []

        lines = await until(done, HEAL_S)
        step = json.loads(lines[-1])
        self.recorder.note(step["action"], f"{step['point']} {step['pid']}")
        return next(proxy for proxy in self.proxies if proxy.pid == step["pid"])

    def mend(self) -> None:
        """Disarm, and wake paused proxies."""
        self.armed.unlink(missing_ok=True)
        for proxy in self.proxies:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                proxy.resume()

    def other(self, proxy: FailingProxy) -> FailingProxy:
        return next(each for each in self.proxies if each is not proxy)

    async def taken_over(self, by: FailingProxy) -> None:

        async def all_of_it() -> bool:
            return len(await by.owned()) == PARTITIONS

        await until(all_of_it, HEAL_S)


class Client:
    """One transaction of a service without the SDK."""

    def __init__(self, pair: Pair, http: aiohttp.ClientSession, token: str, outcome: str) -> None:
        self._pair = pair
        urls = [proxy.url for proxy in pair.proxies]
        self._caller = Caller(http, urls, pair.recorder, random.Random(token))
        self.token = token
        self.outcome = outcome
        self.id = ""

    async def prepare(self, *topics: str, business: bool = False) -> None:
        token = self.token
        self.id = await self._caller.prepare(
            token, "shop", *topics, business=business, dedup_key=token
        )
        if business and self.outcome == "commit":
            self._pair.rows.append(self.id)

    async def decide(self, *, by_operator: bool = False) -> None:
        """Send commit or rollback; without a decision the check decides."""
        if self.outcome != "unknown":
            group = "" if by_operator else "shop"
            await self._caller.decide(self.outcome, self.token, self.id, group)

    async def contradict(self) -> None:
        """Send the contrary decision, which every proxy must refuse."""
        what = "rollback" if self.outcome == "commit" else "commit"
        with contextlib.suppress(AlreadyDecided):
            await self._caller.decide(what, self.token, self.id, "shop")

    async def ends(self, *states: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while True:
            shown = await self._caller.until_answered("show", self.token, self.id, None)
            if shown["state"] in states:
                return
            assert time.monotonic() < end, f"{self.token} stays {shown}"
            await asyncio.sleep(_PAUSE_S)
