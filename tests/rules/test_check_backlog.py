"""A crowd of due checks whose group takes no more: it waits without being looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.rules.fakes import FakeRunner
from tests.rules.harness import BodiesHarness, settled, until
from txbroker.core import index
from txbroker.core.index import Schedule
from txbroker.core.records import CheckReason
from txbroker.core.transaction import Transaction
from txbroker.proxy.partition import checkback

CROWD = 5000


class StepTime:
    """A clock that a test moves, also for `CheckBack.run`."""

    def __init__(self, small: BodiesHarness) -> None:
        self.small = small

    async def second(self) -> None:
        """Let a second pass, and everything that is due in it."""
        self.small.clock.advance(1.0)
        self.small.checks.look_again()
        await settled()


@pytest.fixture
async def small() -> AsyncIterator[BodiesHarness]:
    made = BodiesHarness()
    made.proxy.share = 1 << 30
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the schedule does: an entry for each heap operation."""
    work: list[str] = []
    push, pop = index.heapq.heappush, index.heapq.heappop

    class Counting:
        heapify = staticmethod(index.heapq.heapify)

        @staticmethod
        def heappush(heap: list[object], item: object) -> None:
            work.append("push")
            push(heap, item)

        @staticmethod
        def heappop(heap: list[object]) -> object:
            work.append("pop")
            return pop(heap)

    monkeypatch.setattr(index, "heapq", Counting)
    return work


async def crowd(small: BodiesHarness, count: int = CROWD, group: str = "g") -> list[Transaction]:
    return list(await asyncio.gather(*[small.prepare(group=group) for _ in range(count)]))


async def test_full_group_costs_one_retry_per_second(
    small: BodiesHarness, counted: list[str]
) -> None:
    small.runner.room = 10
    made = await crowd(small)
    small.clock.advance(6.1)
    running = asyncio.create_task(small.checks.run())
    await until(lambda: small.checks._schedule.next_ms() != small.clock.now_ms())
    await until(lambda: len(small.checks._backlog._group_of) == CROWD - 10)
    time = StepTime(small)
    small.runner.offers.clear()
    counted.clear()
    for _ in range(20):
        await time.second()
    # One offer and one look of the crowd's own schedule, however many wait.
    assert small.runner.offers == [made[10].id] * 20
    assert len(counted) <= 20 * 4
    running.cancel()


async def test_free_room_goes_to_longest_waiting(small: BodiesHarness) -> None:
    small.runner.room = 10
    made = await crowd(small)
    small.clock.advance(6.1)
    running = asyncio.create_task(small.checks.run())
    await until(lambda: len(small.checks._backlog._group_of) == CROWD - 10)
    time = StepTime(small)
    taken = [each.id for each in made[:10]]
    for _ in range(3):
        small.runner.taken.clear()
        small.runner.room = 1200
        await time.second()
        await until(lambda: len(small.runner.taken) == 1200)
        taken += small.runner.taken
    assert taken == [each.id for each in made[: len(taken)]]
    small.runner.room = 1 << 30
    await time.second()
    await until(lambda: len(small.runner.taken) == CROWD - 10 - 2 * 1200)
    assert not small.checks._backlog._group_of
    running.cancel()


async def test_full_group_delays_no_other(small: BodiesHarness) -> None:
    class OneFull(FakeRunner):
        def due(
            self, owner: checkback.CheckBack, id: str, group: str, prefer: str, reason: CheckReason
        ) -> bool:
            self.room = 0 if group == "full" else 1 << 30
            return super().due(owner, id, group, prefer, reason)

    runner = OneFull()
    small.checks._runner = runner
    full = await crowd(small, 1500, "full")
    others = await crowd(small, 3, "other")
    small.clock.advance(6.1)
    running = asyncio.create_task(small.checks.run())
    await until(lambda: len(runner.taken) == 3)
    assert list(runner.taken) == [each.id for each in others]
    assert runner.offers.count(full[0].id) == 1
    late = await small.prepare(group="full")
    small.clock.advance(6.1)
    small.checks.look_again()
    await until(lambda: runner.offers.count(full[0].id) == 2)
    await settled()
    assert late.id not in runner.offers
    running.cancel()


async def test_decided_transaction_leaves_backlog(small: BodiesHarness) -> None:
    small.runner.room = 0
    made = await crowd(small, 20)
    small.clock.advance(6.1)
    running = asyncio.create_task(small.checks.run())
    await until(lambda: len(small.checks._backlog._group_of) == 20)
    for each in made[:19]:
        await small.mark("rollback", each)
    small.runner.offers.clear()
    small.runner.room = 5
    await StepTime(small).second()
    assert small.runner.offers == [made[19].id]
    await small.mark("rollback", made[19])
    await StepTime(small).second()
    assert small.runner.offers == [made[19].id]
    # The group starts again, like one that was not tried yet.
    again = await small.prepare()
    small.clock.advance(6.1)
    small.checks.look_again()
    await until(lambda: again.id in small.runner.taken)
    running.cancel()


def test_backlog_holds_each_transaction_once() -> None:
    waiting = index.CheckBacklog()
    waiting.add("g", "a")
    waiting.look("g", 5)
    waiting.add("g", "a")
    assert (waiting.first("g"), waiting.next_ms(), waiting.due(5)) == ("a", 5, ["g"])
    waiting.look("g", 9)
    waiting.remove("a")
    assert (waiting.first("g"), waiting.next_ms(), "g" in waiting) == (None, None, False)
    waiting.look("g", 9)
    assert waiting.next_ms() is None
    assert isinstance(waiting._retries, Schedule)
