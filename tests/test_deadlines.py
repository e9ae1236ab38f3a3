"""One timer for the deadlines of all calls."""

from __future__ import annotations

import asyncio

from txbroker.net.timers import Deadlines

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
