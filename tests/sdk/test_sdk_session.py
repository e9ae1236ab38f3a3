"""A session's calls without a socket: frames and deadlines."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from txbroker.contract.frames import Prepare, Status, Welcome, decode_from_producer
from txbroker.core.records import Message, State
from txbroker.sdk.session import Session, SessionLost

M = Message("payments", value=b"body")


class Losses:
    """Takes note of sessions that end."""

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
    """Return the numbers of the calls in the next frame."""
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
    """Calls of one session may differ in how long their answers may take."""
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
