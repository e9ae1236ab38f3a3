"""One timer for the deadlines of all calls; the pause before a restart."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from txbroker.net.timers import Deadlines, RestartPause

LONG_S = 60.0


async def test_deadlines_are_reported_when_due() -> None:
    loop = asyncio.get_running_loop()
    reported: list[tuple[int, float]] = []
    all_overdue = asyncio.Event()

    def overdue(number: int) -> None:
        reported.append((number, loop.time()))
        if len(reported) == 3:
            all_overdue.set()

    deadlines = Deadlines(0.02, overdue)
    began = {}
    for number in (7, 3, 5):
        began[number] = loop.time()
        deadlines.begin(number)
        await asyncio.sleep(0.005)
    async with asyncio.timeout(LONG_S):
        await all_overdue.wait()
    assert [number for number, _ in reported] == [7, 3, 5]
    assert all(at - began[number] >= 0.019 for number, at in reported)


async def test_ended_deadline_is_not_reported() -> None:
    reported: list[int] = []
    one_overdue = asyncio.Event()

    def overdue(number: int) -> None:
        reported.append(number)
        one_overdue.set()

    deadlines = Deadlines(0.01, overdue)
    deadlines.begin(1)
    deadlines.begin(2)
    deadlines.end(1)
    deadlines.end(1)
    async with asyncio.timeout(LONG_S):
        await one_overdue.wait()
    assert reported == [2]


async def test_deadline_after_idle_time_is_reported() -> None:
    reported: asyncio.Queue[int] = asyncio.Queue()
    deadlines = Deadlines(0.005, reported.put_nowait)
    async with asyncio.timeout(LONG_S):
        for number in range(3):
            deadlines.begin(number)
            assert await reported.get() == number
            deadlines.begin(100 + number)
            deadlines.end(100 + number)


async def test_callback_may_begin_again() -> None:
    reported: asyncio.Queue[int] = asyncio.Queue()

    def overdue(number: int) -> None:
        reported.put_nowait(number)
        if number < 2:
            deadlines.begin(number + 1)

    deadlines = Deadlines(0.005, overdue)
    deadlines.begin(0)
    async with asyncio.timeout(LONG_S):
        assert [await reported.get() for _ in range(3)] == [0, 1, 2]


async def test_closed_deadlines_report_nothing() -> None:
    reported: list[int] = []
    deadlines = Deadlines(0.005, reported.append)
    deadlines.begin(1)
    deadlines.close()
    other: asyncio.Queue[int] = asyncio.Queue()
    later = Deadlines(0.01, other.put_nowait)
    later.begin(2)
    async with asyncio.timeout(LONG_S):
        await other.get()
    assert not reported


@pytest.mark.parametrize(
    ("healthy_s", "expected"),
    [(59.0, [1.0, 0.1, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]), (61.0, [1.0, 0.1, 1.0, 1.0])],
)
async def test_restart_pause_grows_until_a_minute_without_failures(
    healthy_s: float, expected: list[float]
) -> None:
    """A failure follows `healthy_s` after each pause; the second one does not count."""
    loop = asyncio.get_running_loop()
    now_s = 1000.0
    pauses: list[float] = []

    def call_later(pause_s: float, _call: object) -> asyncio.TimerHandle:
        pauses.append(pause_s)
        return asyncio.TimerHandle(0.0, lambda: None, (), loop)

    pause = RestartPause(lambda: None)
    with patch.object(loop, "call_later", call_later), patch.object(loop, "time", lambda: now_s):
        for number in range(len(expected)):
            pause.begin(0.1 if number == 1 else None)
            now_s += pauses[-1] + healthy_s
    assert pauses == expected


async def test_restart_pause_ends_once() -> None:
    ended: list[str] = []
    pause = RestartPause(lambda: ended.append("ended"))
    pause.begin(60.0)
    pause.begin(0.001)
    assert not ended
    async with asyncio.timeout(LONG_S):
        while pause.active:
            await asyncio.sleep(0)
    pause.begin(60.0)
    pause.cancel()
    assert not pause.active
    assert ended == ["ended"]
