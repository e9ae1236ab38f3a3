"""Parts of the SDK without a proxy: a session's calls, limits, the first dial, imports."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any, cast

import pytest

from txbroker.contract.frames import Prepare, Status, Welcome, decode_from_producer
from txbroker.core.records import Message, State
from txbroker.errors import OwnerUnavailable
from txbroker.sdk.calls import InFlightLimit
from txbroker.sdk.router import Router
from txbroker.sdk.session import Session, SessionLost
from txbroker.sdk.types import Limits

M = Message("payments", value=b"body")


class Losses:
    def __init__(self) -> None:
        self.why: list[str] = []

    def session_lost(self, session: Session, why: str) -> None:
        self.why.append(why)


def opened() -> Session:
    """Return a session that neither reads nor writes."""
    welcome = Welcome(1, 1_700_000_000_000, 1, ("http://p",), "http://p", 120.0, 1 << 20)
    return Session(cast(Any, None), welcome, "http://p", cast(Any, Losses()))


def prepare(number: int) -> Prepare:
    return Prepare(number, f"{number:026}", (M,))


def sent(session: Session) -> list[int]:
    frame = session._next_frame()
    if frame is None:
        return []
    return [cast(Prepare, operation).call for operation in decode_from_producer(frame)]


async def test_forgotten_call_is_not_sent() -> None:
    session = opened()
    due_s = asyncio.get_running_loop().time() + 60
    answers = [session.send(prepare(number), 0, due_s) for number in range(4)]
    session.forget(1)
    session.forget(3)
    assert sent(session) == [0, 2]
    session.forget(0)
    assert not session.quiet
    session._take([Status(2, f"{2:026}", State.PENDING)])
    assert answers[2].result().call == 2
    assert session.quiet
    session.send(prepare(4), 0, due_s)
    session.forget(4)
    assert sent(session) == []


async def test_each_call_has_its_own_deadline() -> None:
    session = opened()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    late = session.send(prepare(1), 0, began_s + 60)
    second = session.send(prepare(2), 0, began_s + 0.1)
    first = session.send(prepare(3), 0, began_s + 0.02)
    assert sent(session) == [1, 2, 3]
    for answer, due_s in ((first, 0.02), (second, 0.1)):
        with pytest.raises(SessionLost, match="did not answer") as lost:
            await answer
        assert lost.value.sent
        assert loop.time() - began_s >= due_s
    assert not late.done()
    session._lose("broken")
    with pytest.raises(SessionLost, match="broken"):
        await late
    assert session.quiet


async def test_lost_session_reports_sent_calls() -> None:
    session = opened()
    due_s = asyncio.get_running_loop().time() + 60
    left = session.send(prepare(1), 0, due_s)
    assert sent(session) == [1]
    kept = session.send(prepare(2), 0, due_s)
    session._lose("broken")
    sent_flags = [cast(SessionLost, answer.exception()).sent for answer in (left, kept)]
    assert sent_flags == [True, False]
    with pytest.raises(SessionLost) as lost:
        session.send(prepare(3), 0, due_s)
    assert not lost.value.sent


async def test_unexpected_connect_error_is_logged_and_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "txbroker.sdk")
    dialled: list[str] = []

    async def dial(address: str) -> Session:
        dialled.append(address)
        raise AttributeError("unexpected")

    router = Router(["http://127.0.0.1:1"], dial, lambda session, check: None, Limits())
    try:
        with pytest.raises(OwnerUnavailable, match="AttributeError"):
            await router.start(0.5)
    finally:
        await router.close()
    assert 1 <= len(dialled) < 20
    assert len(caplog.records) == len(dialled)


# --- calls in flight ---------------------------------------------------------------------------


async def rounds() -> None:
    """Let everything go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_concurrently_cancelled_waiters_leave_no_trace() -> None:
    room = InFlightLimit(calls_max=1, bytes_max=100)

    async def call() -> None:
        if not room.enter(10):
            await room.wait(10)
        try:
            await asyncio.Event().wait()
        finally:
            room.leave(10)

    calls = [asyncio.create_task(call()) for _ in range(4)]
    await rounds()
    assert room.calls == 1
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    assert [each.cancelled() for each in calls] == [True] * 4
    assert room.calls == 0
    assert room.enter(100)
    assert room.calls == 1


async def test_waiter_cancelled_on_admission_passes_room_on() -> None:
    room = InFlightLimit(calls_max=1, bytes_max=100)
    assert room.enter(10)
    assert not room.enter(10)
    gone, next_one = (asyncio.create_task(room.wait(10)) for _ in range(2))
    await rounds()
    room.leave(10)
    gone.cancel()
    await asyncio.wait([gone, next_one])
    assert gone.cancelled()
    assert room.calls == 1
    room.leave(10)
    assert room.calls == 0


async def test_later_call_waits_after_a_large_one() -> None:
    room = InFlightLimit(calls_max=5, bytes_max=100)
    assert room.enter(60)
    large, small = (asyncio.create_task(room.wait(size)) for size in (70, 10))
    await rounds()
    assert not room.enter(10)
    assert not large.done()
    assert not small.done()
    room.leave(60)
    await asyncio.wait([large, small])
    assert room.calls == 2


def test_sdk_imports_neither_kafka_nor_spark() -> None:
    program = (
        "import sys, txbroker.sdk\n"
        "heavy = ('aiokafka', 'pyspark', 'kafka', 'txbroker.kafka', 'txbroker.proxy',"
        " 'txbroker.embedded', 'txbroker.checkers', 'txbroker.cli')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    import txbroker.sdk

    missing = [name for name in txbroker.sdk.__all__ if not hasattr(txbroker.sdk, name)]
    assert missing == []
