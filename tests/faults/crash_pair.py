"""Two proxies of one installation that can be made to fail at named moments, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.faults.forks import Forge
from tests.faults.judge import Asked, Body, Call, History, Note
from tests.kit.fleet import owned_by
from tests.kit.http_calls import error_of
from tests.kit.proxies import ProxyProcess
from tests.kit.until import unique, until
from txbroker.errors import AlreadyDecided, RequestError

PARTITIONS = 2
SESSION_S = 2.0
CALL_S = 1.0
"""Timeout of a call, seconds; then the client retries."""
HEAL_S = GIVE_UP_S = 120.0
"""How long a pair may take to be whole again, or a call to be answered, on a busy machine."""
_PAUSE_S = 0.15
FINAL = ("promoted", "rolled_back", "parked")

Json = dict[str, Any]


class FailingProxy(ProxyProcess):
    """A proxy whose moments can be armed."""

    def __init__(self, bootstrap: str, forge: Forge, armed: Path, **settings: Any) -> None:
        super().__init__(bootstrap, **settings)
        self._forge = forge
        self._armed = armed

    async def _spawn(self, environment: Mapping[str, str]) -> Any:
        return await self._forge.fork([str(self._armed), "proxy"], environment)

    async def again(self) -> None:
        """Start it again; it has been killed, or is killed now."""
        await self.kill()
        await self.launch()

    async def owned(self) -> list[int]:
        """Return the partitions that it reports as owned; none without an answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return await owned_by(self)
        except TimeoutError:
            return []


class Answers:
    """The check endpoint of the business, with answers set in advance by token."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.decisions: dict[str, str] = {}
        self.url = ""

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_post("/check", self._check)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/check"

    async def close(self) -> None:
        """Listen no more."""
        await self._runner.cleanup()

    async def _check(self, request: web.Request) -> web.Response:
        asked = await request.json()
        token = dict(asked["messages"][0]["headers"])["token"]
        decision = self.decisions.get(token, "unknown")
        self._history.asked.append(Asked(asked["id"], time.time(), decision, asked["attempt"]))
        return web.json_response({"decision": decision})


class Pair:
    """Two proxies, the clients of both, and what these did."""

    def __init__(self, bootstrap: str, forge: Forge, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.prefix = unique("crash")
        self.armed = folder / f"{self.prefix}.armed"
        self.fired = self.armed.with_suffix(".fired")
        self.history = History()
        self.answers = Answers(self.history)
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
        """Start both and register the group."""
        await self.answers.start()
        for proxy in self.proxies:
            await proxy.launch()
        await self.whole()
        first = self.proxies[0]
        self.topics = [await first.topic(2), await first.topic(1)]
        await first.call("PUT", "/v1/groups/shop", {"check_url": self.answers.url})

    async def close(self) -> None:
        """End both; their terminals must be clean."""
        await self.answers.close()
        for proxy in self.proxies:
            await proxy.close()

    async def whole(self) -> None:
        """Wait until both are ready, and own all partitions, each one its own."""

        async def owned() -> bool:
            ready = [await proxy.is_ready() for proxy in self.proxies]
            found = [await proxy.owned() for proxy in self.proxies]
            return all(ready) and [len(each) for each in found] == [1, 1]

        await until(owned, HEAL_S)

    def note(self, what: str, who: str = "") -> None:
        """Write down what happened."""
        self.history.notes.append(Note(time.time(), what, who))

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
        self.note(step["action"], f"{step['point']} {step['pid']}")
        return next(proxy for proxy in self.proxies if proxy.pid == step["pid"])

    def mend(self) -> None:
        """Disarm, and wake paused proxies."""
        self.armed.unlink(missing_ok=True)
        for proxy in self.proxies:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                proxy.resume()

    def other(self, proxy: FailingProxy) -> FailingProxy:
        """Return the other one of the two."""
        return next(each for each in self.proxies if each is not proxy)

    async def taken_over(self, by: FailingProxy) -> None:
        """Wait until one proxy owns everything."""

        async def all_of_it() -> bool:
            return len(await by.owned()) == PARTITIONS

        await until(all_of_it, HEAL_S)


class Client:
    """One transaction of a service without the SDK: each call goes to any proxy of the pair, and
    is sent again until it is answered."""

    _turns = itertools.count()

    def __init__(self, pair: Pair, http: aiohttp.ClientSession, token: str, outcome: str) -> None:
        self._pair = pair
        self._http = http
        self.token = token
        self.outcome = outcome
        self.id = ""

    async def prepare(self, *topics: str, business: bool = False) -> None:
        """Prepare a message for each topic."""
        token = self.token
        headers = (("token", token.encode()),)
        self._pair.history.sent[token] = tuple(
            Body(topic, token.encode(), b"%d" % number, headers)
            for number, topic in enumerate(topics)
        )
        if business:
            self._pair.history.business.add(token)
        messages = [
            {"topic": topic, "key": token, "value": str(number), "headers": {"token": token}}
            for number, topic in enumerate(topics)
        ]
        body = {"group": "shop", "messages": messages, "dedup_key": token}
        answer = await self._ask("prepare", "/v1/transactions", body)
        self.id = str(answer["id"])
        if business and self.outcome == "commit":
            self._pair.rows.append(self.id)

    async def decide(self, *, by_operator: bool = False) -> None:
        """Send commit or rollback; without a decision the check decides."""
        if self.outcome != "unknown":
            body = {} if by_operator else {"group": "shop"}
            path = f"/v1/transactions/{self.id}/{self.outcome}"
            await self._ask(self.outcome, path, body)

    async def contradict(self) -> None:
        """Send the contrary decision, which every proxy must refuse."""
        what = "rollback" if self.outcome == "commit" else "commit"
        with contextlib.suppress(AlreadyDecided):
            await self._ask(what, f"/v1/transactions/{self.id}/{what}", {"group": "shop"})

    async def ends(self, *states: str) -> None:
        """Wait until any proxy reports one of these states."""
        end = time.monotonic() + GIVE_UP_S
        while True:
            answer = await self._ask("show", f"/v1/transactions/{self.id}")
            if answer["state"] in states:
                return
            assert time.monotonic() < end, f"{self.token} stays {answer}"
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, what: str, path: str, body: Json | None = None) -> Json:
        """Send a call until it is answered.

        Raises:
            RequestError: it can never be.
        """
        end = time.monotonic() + GIVE_UP_S
        while True:
            proxy = self._pair.proxies[next(self._turns) % 2]
            answer: Json = {}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                with _recorded(self._pair.history, what, self.token, self.id) as call:
                    answer = await self._once(proxy, path, body, call)
                return answer
            assert time.monotonic() < end, f"{what} {self.token} is not answered"
            await asyncio.sleep(_PAUSE_S)

    async def _once(self, proxy: ProxyProcess, path: str, body: Json | None, call: Call) -> Json:
        """Send it once; what may be tried again is a TimeoutError."""
        method = "GET" if body is None else "POST"
        async with self._http.request(method, proxy.url + path, json=body) as response:
            answer = dict(await response.json())
            status = response.status
        if "error" not in answer:
            call.id = str(answer["id"])
            call.state = str(answer["state"])
            return answer
        error = error_of(status, answer)
        call.code, call.id = error.code, call.id or str(error.details.get("id", ""))
        call.decision = str(error.details.get("decision", ""))
        if error.retryable:
            raise TimeoutError
        raise error


@contextmanager
def _recorded(history: History, what: str, token: str, id: str) -> Iterator[Call]:
    """Write a call down, and how it ended."""
    call = Call(what, token, time.time(), id)
    history.calls.append(call)
    call.result = "unknown"
    try:
        yield call
    except RequestError:
        call.result = "fail"
        raise
    else:
        call.result = "ok"
    finally:
        call.ended = time.time()
