"""Room for calls: who waits for it, and who gives up."""

from __future__ import annotations

import asyncio

from txbroker.sdk.limits import InFlightLimit


async def rounds() -> None:
    """Let everything go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_concurrently_cancelled_waiters_leave_no_trace() -> None:
    """Cancelled in one round, who had the room passed those by who waited; these then failed with
    a ValueError, and a decision that was made was not sent."""
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
