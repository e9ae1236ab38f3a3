"""Hostile clients over plain HTTP, which repeat calls ten times, contradict themselves and send
poison; and evil check endpoints of every kind, with clients that leave transactions to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from tests.faults.judge import Asked
from tests.kit.http_calls import Caller, attempted, listening
from tests.kit.workload import Recorder
from txbroker.errors import AlreadyDecided, RequestError

CALL_S = 3.0
TIMES = 10
SMALL_BYTES = 20_000
"""The largest message that the small topic takes."""


class Rough:
    """One client that does all that a decent one does not.

    Args:
        topics: of the installation: an ordinary one, and one that takes only small messages.
    """

    def __init__(
        self, name: str, caller: Caller, topics: tuple[str, str], fate: random.Random
    ) -> None:
        self._name = name
        self._caller = caller
        self._topic, self._small = topics
        self._fate = fate

    async def run(self, over: asyncio.Event) -> None:
        ways = (
            self._ten_times,
            self._both_at_once,
            self._the_contrary,
            self._too_large,
            self._large_together,
            self._nowhere,
        )
        for number in itertools.count():
            if over.is_set():
                return
            await self._fate.choice(ways)(f"{self._name}/{number}")
            await asyncio.sleep(self._fate.uniform(0.05, 0.5))

    async def _ten_times(self, token: str) -> None:
        """The same decision from ten connections to all proxies."""
        if id := await self._prepare(token, self._topic):
            decision = self._fate.choice(["commit", "rollback"])
            await asyncio.gather(*[self._decide(decision, token, id) for _ in range(TIMES)])
            await self._settle(decision, token, id)

    async def _both_at_once(self, token: str) -> None:
        if id := await self._prepare(token, self._topic, self._small):
            both = self._fate.sample(["commit", "rollback"], 2)
            await asyncio.gather(*[self._decide(decision, token, id) for decision in both])
            await self._settle(both[0], token, id)

    async def _the_contrary(self, token: str) -> None:
        if id := await self._prepare(token, self._topic):
            first, second = self._fate.sample(["commit", "rollback"], 2)
            await self._settle(first, token, id)
            await self._decide(second, token, id)

    async def _too_large(self, token: str) -> None:
        """One message that its target takes not, with one that it would take, and a good one of
        the same key after it."""
        await self._commit(token, (self._small, self._topic), "x" * SMALL_BYTES)
        await self._commit(f"{token}/good", (self._small,), "good")

    async def _large_together(self, token: str) -> None:
        """Each message fits, all together do not, as one batch."""
        await self._commit(token, (self._small,) * 5, "x" * (SMALL_BYTES // 3))
        await self._commit(f"{token}/good", (self._small,), "good")

    async def _nowhere(self, token: str) -> None:
        await self._commit(token, (f"{self._topic}-not-there",), "lost")

    async def _commit(self, token: str, topics: Sequence[str], value: str) -> None:
        if id := await self._prepare(token, *topics, value=value):
            await self._settle("commit", token, id)

    async def _prepare(self, token: str, *topics: str, value: str = "") -> str | None:
        call = self._caller.prepare(token, "rough", *topics, value=value, dedup_key=token)
        return await attempted(call)

    async def _settle(self, decision: str, token: str, id: str) -> None:
        await attempted(self._caller.decide(decision, token, id, "rough"))

    async def _decide(self, decision: str, token: str, id: str) -> None:
        """Send a decision once, with any answer."""
        try:
            await self._caller.once(decision, token, id, {"group": "rough"})
        except (AlreadyDecided, aiohttp.ClientError, TimeoutError):
            pass
        except RequestError as error:
            if not error.retryable:
                raise


# --- check endpoints ---------------------------------------------------------------------------

SLOW_S, TOO_LATE_S, HANGING_S = 1.0, 3.0, 30.0
HUGE_BYTES = 100 << 20
_BLOCK = b" " * (1 << 16)

Json = dict[str, Any]
Answer = Callable[["EvilChecks", web.Request, Json], Awaitable[web.StreamResponse]]


def _after(answer: str, *, before_s: float = 0.0, after_s: float = 0.0) -> Answer:
    """Answer late; the answer is recorded `after_s` before it goes out."""

    async def late(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
        await asyncio.sleep(before_s)
        response = checks.answer(asked, answer)
        await asyncio.sleep(after_s)
        return response

    return late


def _fixed(noted: str, status: int = 200, body: bytes = b"", **headers: str) -> Answer:
    """Answer with these bytes; a status of 503 and "ask again" give back the attempt."""

    async def fixed(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
        checks.note(asked, noted)
        return web.Response(
            status=status,
            body=body.replace(b"ASKED", str(asked["id"]).encode()),
            headers=headers,
            content_type="application/json",
        )

    return fixed


async def _hanging(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    checks.note(asked, "unknown")
    await asyncio.sleep(HANGING_S)
    return web.Response(status=500)


async def _huge(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    checks.note(asked, "unknown")
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(HUGE_BYTES // len(_BLOCK)):
            await response.write(_BLOCK)
    return response


async def _cut_off(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    checks.note(asked, "unknown")
    response = web.StreamResponse(headers={"content-length": "100"})
    await response.prepare(request)
    await response.write(b'{"decision": "com')
    assert request.transport is not None
    request.transport.close()
    return response


async def _changing(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    return checks.answer(asked, ("commit", "rollback")[next(checks.turns) % 2])


KINDS: dict[str, Answer] = {
    "slow": _after("commit", before_s=SLOW_S),
    "too-late": _after("commit", after_s=TOO_LATE_S),
    "hanging": _hanging,
    "500": _fixed("unknown", 500),
    "404": _fixed("unknown", 404),
    # By contract the attempt is given back, as after a deliberate "not yet".
    "503": _fixed("not yet", 503),
    "redirect": _fixed("unknown", 302, location="http://127.0.0.1:1/elsewhere"),
    "garbage": _fixed("unknown", body=b"\xff\x00{]"),
    "other-decision": _fixed("unknown", body=b'{"id": "ASKED", "decision": "maybe"}'),
    "cut-off": _cut_off,
    "huge": _huge,
    "unknown": _after("unknown"),
    "not-yet": _fixed("not yet", body=b'{"id": "ASKED", "decision": "unknown", "ask_again_s": 2}'),
    "nameless": _fixed("unknown", body=b'{"decision": "commit"}'),
    "changing": _changing,
}


class EvilChecks:
    """The endpoints: one path, and one group, for each kind.

    Attributes:
        good: at the end all of them answer as they should.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stack = contextlib.AsyncExitStack()
        self.good = False
        self.turns = itertools.count()
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/{kind}", self._answer)
        serving = listening(app, handler_cancellation=True)
        self.url = await self._stack.enter_async_context(serving)

    async def close(self) -> None:
        await self._stack.aclose()

    def note(self, asked: Json, answer: str) -> None:
        found = Asked(str(asked["id"]), time.time(), answer, int(asked["attempt"]))
        self._recorder.history.asked.append(found)

    def answer(self, asked: Json, decision: str) -> web.StreamResponse:
        self.note(asked, decision)
        return web.json_response({"id": asked["id"], "decision": decision})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if self.good:
            return self.answer(asked, "commit")
        return await KINDS[request.match_info["kind"]](self, request, asked)


def group_of(kind: str) -> str:
    return f"evil-{kind}"


async def leave_to_checks(caller: Caller, name: str, topic: str, over: asyncio.Event) -> None:
    """Prepare one transaction after the other and leave it to its group's endpoint; some clients
    decide, after the check has answered or the transaction is parked."""
    fate = random.Random(name)
    async with asyncio.TaskGroup() as late:
        for number in itertools.count():
            if over.is_set():
                return
            group = group_of(fate.choice(list(KINDS)))
            token = f"{name}/{number}"
            call = caller.prepare(token, group, topic, dedup_key=token, check_after_s=0.5)
            id = await attempted(call)
            if id and fate.random() < 0.3:
                after_s, decision = fate.uniform(0, 20), fate.choice(["commit", "rollback"])
                late.create_task(_decide_late(caller, over, after_s, decision, token, id, group))
            await asyncio.sleep(fate.uniform(0.1, 0.6))


async def _decide_late(
    caller: Caller,
    over: asyncio.Event,
    after_s: float,
    *decided: str,
) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), after_s)
    await attempted(caller.decide(*decided))
