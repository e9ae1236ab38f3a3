"""Turns wait for one another only while that is worth while, and never for long."""

from __future__ import annotations

import asyncio

import pytest

from txbroker.proxy.partition.clock import TurnPace, UnderWay

LONG_S = 60.0


async def begun(asked: asyncio.Task[UnderWay]) -> bool:
    """Say whether a turn begins without anything else happening."""
    for _ in range(5):
        await asyncio.sleep(0)
    return asked.done()


async def test_nobody_waits_while_few_are_under_way() -> None:
    pace = TurnPace(at_once=2, wait_max_s=LONG_S)
    for _ in range(2):
        assert await begun(asyncio.create_task(pace.begin()))


async def test_one_that_is_over_lets_the_first_of_those_that_wait_begin() -> None:
    pace = TurnPace(at_once=2, wait_max_s=LONG_S)
    first, _ = await pace.begin(), await pace.begin()
    waiting = [asyncio.create_task(pace.begin()) for _ in range(3)]
    assert not await begun(waiting[0])
    first.over()
    assert await begun(waiting[0])
    assert not await begun(waiting[1])
    first.over()  # said again, it lets nobody in
    assert not await begun(waiting[1])
    waiting[0].result().over()
    assert await begun(waiting[1])
    assert not await begun(waiting[2])
    waiting[2].cancel()


async def test_a_turn_that_does_not_come_through_holds_others_for_a_moment_only() -> None:
    pace = TurnPace(at_once=1, wait_max_s=0.001)
    stuck = await pace.begin()
    async with asyncio.timeout(LONG_S):
        second = await pace.begin()
    second.over()
    pace._wait_max_s = LONG_S
    assert await begun(asyncio.create_task(pace.begin()))
    # It counts no more, and lets nobody in when it is over at last.
    stuck.over()
    asked = asyncio.create_task(pace.begin())
    assert not await begun(asked)
    asked.cancel()


async def test_behind_a_slow_turn_all_begin_at_the_same_time() -> None:
    pace = TurnPace(at_once=1, wait_max_s=0.05)
    slow = await pace.begin()
    waiting = [asyncio.create_task(pace.begin()) for _ in range(20)]
    assert not await begun(waiting[0])
    pace._wait_max_s = LONG_S  # those that begin now would hold the next ones up for long
    async with asyncio.timeout(LONG_S / 2):
        turns = await asyncio.gather(*waiting)
    slow.over()
    asked = asyncio.create_task(pace.begin())
    for turn in turns[1:]:
        turn.over()
        assert not await begun(asked)
    turns[0].over()
    assert await begun(asked)


async def test_nobody_overtakes_one_that_was_called() -> None:
    pace = TurnPace(at_once=1, wait_max_s=LONG_S)
    first = await pace.begin()
    called = asyncio.create_task(pace.begin())
    assert not await begun(called)
    first.over()
    late = asyncio.create_task(pace.begin())
    assert await begun(called)
    assert not await begun(late)
    called.result().over()
    assert await begun(late)


async def test_one_that_gives_up_waiting_takes_nobodys_place() -> None:
    pace = TurnPace(at_once=1, wait_max_s=LONG_S)
    first = await pace.begin()
    gone, next_one = (asyncio.create_task(pace.begin()) for _ in range(2))
    assert not await begun(gone)
    assert not await begun(next_one)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    first.over()
    assert await begun(next_one)


async def test_one_that_is_called_and_gives_up_at_once_passes_its_place_on() -> None:
    pace = TurnPace(at_once=1, wait_max_s=LONG_S)
    first = await pace.begin()
    gone, next_one = (asyncio.create_task(pace.begin()) for _ in range(2))
    assert not await begun(next_one)
    first.over()
    gone.cancel()
    assert await begun(next_one)
