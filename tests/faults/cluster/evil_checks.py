"""Check endpoints of every evil kind, and clients that leave their transactions to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.faults.cluster.rough_clients import Caller
from tests.faults.judge import Asked
from tests.kit.workload import Recorder

SLOW_S, TOO_LATE_S, HANGING_S = 1.0, 3.0, 30.0
HUGE_BYTES = 100 << 20
_BLOCK = b" " * (1 << 16)

Json = dict[str, Any]
Answer = Callable[["EvilChecks", web.Request, Json], Awaitable[web.StreamResponse]]


async def _slow(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    await asyncio.sleep(SLOW_S)
    return checks.answer(asked, "commit")


async def _too_late(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    answer = checks.answer(asked, "commit")
    await asyncio.sleep(TOO_LATE_S)
    return answer


async def _hanging(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    checks.note(asked, "unknown")
    await asyncio.sleep(HANGING_S)
    return web.Response(status=500)


def _status(status: int, **headers: str) -> Answer:
    async def answer(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
        checks.note(asked, "unknown")
        return web.Response(status=status, headers=headers)

    return answer


def _text(text: bytes) -> Answer:
    async def answer(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
        checks.note(asked, "unknown")
        return web.Response(body=text, content_type="application/json")

    return answer


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


async def _not_handled(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    """By contract the attempt is given back, as after a deliberate "not yet"."""
    checks.note(asked, "not yet")
    return web.Response(status=503)


async def _unknown(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    return checks.answer(asked, "unknown")


async def _not_yet(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    checks.note(asked, "not yet")
    return web.json_response({"decision": "unknown", "ask_again_s": 2})


async def _changing(checks: EvilChecks, request: web.Request, asked: Json) -> web.StreamResponse:
    """Alternate between commit and rollback."""
    return checks.answer(asked, ("commit", "rollback")[next(checks.turns) % 2])


KINDS: dict[str, Answer] = {
    "slow": _slow,
    "too-late": _too_late,
    "hanging": _hanging,
    "500": _status(500),
    "404": _status(404),
    "503": _not_handled,
    "redirect": _status(302, location="http://127.0.0.1:1/elsewhere"),
    "garbage": _text(b"\xff\x00{]"),
    "other-decision": _text(b'{"decision": "maybe"}'),
    "cut-off": _cut_off,
    "huge": _huge,
    "unknown": _unknown,
    "not-yet": _not_yet,
    "changing": _changing,
}


class EvilChecks:
    """The endpoints: one path, and one group, for each kind.

    Attributes:
        good: at the end all of them answer as they should.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._runner: web.AppRunner | None = None
        self.good = False
        self.turns = itertools.count()
        self.url = ""

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_post("/{kind}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=512).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Listen no more."""
        assert self._runner is not None
        await self._runner.cleanup()

    def note(self, asked: Json, answer: str) -> None:
        """Record the question and the answer."""
        found = Asked(str(asked["id"]), time.time(), answer, int(asked["attempt"]))
        self._recorder.history.asked.append(found)

    def answer(self, asked: Json, decision: str) -> web.StreamResponse:
        """Answer with a decision."""
        self.note(asked, decision)
        return web.json_response({"decision": decision})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if self.good:
            return self.answer(asked, "commit")
        return await KINDS[request.match_info["kind"]](self, request, asked)


def group_of(kind: str) -> str:
    """The group whose checks are of this kind."""
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
            id = await caller.prepare(token, group, topic, check_after_s=0.5)
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
    await caller.decide(*decided)
