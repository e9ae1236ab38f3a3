"""Turns wait for one another only while that is worth while, and never for long."""

from __future__ import annotations

import asyncio

import pytest

from txbroker.proxy.partition.clock import Slot, TxnLimiter

LONG_S = 60.0


async def begun(asked: asyncio.Task[Slot]) -> bool:
    """Return whether an admission is immediate."""
    for _ in range(5):
        await asyncio.sleep(0)
    return asked.done()


async def test_admission_is_immediate_below_limit() -> None:
    limiter = TxnLimiter(at_once=2, wait_max_s=LONG_S)
    for _ in range(2):
        assert await begun(asyncio.create_task(limiter.begin()))


async def test_release_admits_first_waiting() -> None:
    limiter = TxnLimiter(at_once=2, wait_max_s=LONG_S)
    first, _ = await limiter.begin(), await limiter.begin()
    waiting = [asyncio.create_task(limiter.begin()) for _ in range(3)]
    assert not await begun(waiting[0])
    first.release()
    assert await begun(waiting[0])
    assert not await begun(waiting[1])
    first.release()  # repeated: admits none
    assert not await begun(waiting[1])
    waiting[0].result().release()
    assert await begun(waiting[1])
    assert not await begun(waiting[2])
    waiting[2].cancel()


async def test_slow_promotion_delays_others_briefly() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=0.001)
    stuck = await limiter.begin()
    async with asyncio.timeout(LONG_S):
        second = await limiter.begin()
    second.release()
    limiter._wait_max_s = LONG_S
    assert await begun(asyncio.create_task(limiter.begin()))
    # It no longer counts, and its release admits none.
    stuck.release()
    asked = asyncio.create_task(limiter.begin())
    assert not await begun(asked)
    asked.cancel()


async def test_slow_promotion_admits_all_waiting() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=0.05)
    slow = await limiter.begin()
    waiting = [asyncio.create_task(limiter.begin()) for _ in range(20)]
    assert not await begun(waiting[0])
    limiter._wait_max_s = LONG_S  # those that begin now would hold the next ones up for long
    async with asyncio.timeout(LONG_S / 2):
        turns = await asyncio.gather(*waiting)
    slow.release()
    asked = asyncio.create_task(limiter.begin())
    for turn in turns[1:]:
        turn.release()
        assert not await begun(asked)
    turns[0].release()
    assert await begun(asked)


async def test_admitted_one_is_not_overtaken() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=LONG_S)
    first = await limiter.begin()
    called = asyncio.create_task(limiter.begin())
    assert not await begun(called)
    first.release()
    late = asyncio.create_task(limiter.begin())
    assert await begun(called)
    assert not await begun(late)
    called.result().release()
    assert await begun(late)


async def test_cancelled_wait_takes_no_slot() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=LONG_S)
    first = await limiter.begin()
    gone, next_one = (asyncio.create_task(limiter.begin()) for _ in range(2))
    assert not await begun(gone)
    assert not await begun(next_one)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    first.release()
    assert await begun(next_one)


async def test_cancelled_admission_passes_slot_on() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=LONG_S)
    first = await limiter.begin()
    gone, next_one = (asyncio.create_task(limiter.begin()) for _ in range(2))
    assert not await begun(next_one)
    first.release()
    gone.cancel()
    assert await begun(next_one)
