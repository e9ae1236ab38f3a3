"""One timer for the deadlines of all calls."""

from __future__ import annotations

import asyncio

from txbroker.net.deadlines import Deadlines

LONG_S = 60.0


async def test_each_is_told_of_when_it_is_due_and_no_sooner() -> None:
    loop = asyncio.get_running_loop()
    told: list[tuple[int, float]] = []
    all_told = asyncio.Event()

    def overdue(number: int) -> None:
        told.append((number, loop.time()))
        if len(told) == 3:
            all_told.set()

    deadlines = Deadlines(0.02, overdue)
    began = {}
    for number in (7, 3, 5):
        began[number] = loop.time()
        deadlines.begin(number)
        await asyncio.sleep(0.005)
    async with asyncio.timeout(LONG_S):
        await all_told.wait()
    assert [number for number, _ in told] == [7, 3, 5]
    assert all(at - began[number] >= 0.019 for number, at in told)


async def test_what_has_ended_is_not_told_of_and_holds_up_nobody_behind_it() -> None:
    told: list[int] = []
    one_told = asyncio.Event()

    def overdue(number: int) -> None:
        told.append(number)
        one_told.set()

    deadlines = Deadlines(0.01, overdue)
    deadlines.begin(1)
    deadlines.begin(2)
    deadlines.end(1)
    deadlines.end(1)
    async with asyncio.timeout(LONG_S):
        await one_told.wait()
    assert told == [2]


async def test_one_that_begins_when_nobody_waited_any_more_is_told_of() -> None:
    told: asyncio.Queue[int] = asyncio.Queue()
    deadlines = Deadlines(0.005, told.put_nowait)
    async with asyncio.timeout(LONG_S):
        for number in range(3):
            deadlines.begin(number)
            assert await told.get() == number
            deadlines.begin(100 + number)
            deadlines.end(100 + number)


async def test_who_is_told_may_begin_anew() -> None:
    told: asyncio.Queue[int] = asyncio.Queue()

    def overdue(number: int) -> None:
        told.put_nowait(number)
        if number < 2:
            deadlines.begin(number + 1)

    deadlines = Deadlines(0.005, overdue)
    deadlines.begin(0)
    async with asyncio.timeout(LONG_S):
        assert [await told.get() for _ in range(3)] == [0, 1, 2]


async def test_closed_it_tells_nobody() -> None:
    told: list[int] = []
    deadlines = Deadlines(0.005, told.append)
    deadlines.begin(1)
    deadlines.close()
    other: asyncio.Queue[int] = asyncio.Queue()
    later = Deadlines(0.01, other.put_nowait)
    later.begin(2)
    async with asyncio.timeout(LONG_S):
        await other.get()
    assert not told
