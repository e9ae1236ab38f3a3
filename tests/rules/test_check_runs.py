"""Rule 21: what happens to one check of a run neither costs nor delays the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.rules.fakes import FakeRunner, Gate, as_it_is
from tests.rules.harness import NOW, BodiesHarness, Harness, settled, until
from txbroker.checkers.base import AttemptRequest, CheckCall
from txbroker.core import index
from txbroker.core.index import Schedule
from txbroker.core.records import CheckPolicy, CheckReason, Record, State
from txbroker.core.transaction import Transaction
from txbroker.errors import KafkaUnavailable, OwnerUnavailable
from txbroker.proxy.partition import appender, checkback

DUE = CheckReason.DUE


def run_of(transactions: Sequence[Transaction]) -> list[AttemptRequest]:
    return [AttemptRequest(each.id, DUE, "http://g") for each in transactions]


async def copy_out_of_reach(small: BodiesHarness) -> Transaction:
    """Return a transaction whose only messages lie in a parked topic that does not answer."""
    transaction = await small.prepare(policy=NOW)
    small.keep(transaction)
    await until(lambda: transaction.kept_at)
    small.delete_half(transaction.offset + 1)

    async def silent(offsets: Sequence[int]) -> Sequence[Record]:
        raise KafkaUnavailable("the parked topic is silent")

    small.monkeypatch.setattr(small.door, "pick_parked", silent)
    return transaction


@pytest.mark.rule(21)
@pytest.mark.parametrize("together", [True, False])
async def test_unreadable_messages_delay_no_other_check(
    small: BodiesHarness, together: bool
) -> None:
    unread = await copy_out_of_reach(small)
    made = [await small.prepare(policy=NOW, group=f"g{n}") for n in range(3)] + [unread]
    running = asyncio.create_task(small.checks.run())
    await until(lambda: len(small.runner.taken) == 4)
    runs = [made] if together else [[each] for each in made]
    found = await asyncio.gather(*[small.checks.attempt(run_of(run)) for run in runs])
    *rest, failed = [each for answers in found for each in answers]
    assert all(isinstance(each, CheckCall) for each in rest)
    assert isinstance(failed, OwnerUnavailable)
    assert failed.details == {"id": unread.id}
    assert unread.checks.attempts == ()
    # Only the unread one is offered again after a second.
    small.runner.offers.clear()
    small.clock.advance(1.0)
    small.checks.look_again()
    await settled()
    assert small.runner.offers == [unread.id]
    running.cancel()


async def test_transaction_is_shown_though_another_is_unreadable(small: BodiesHarness) -> None:
    unread = await copy_out_of_reach(small)
    made = [await small.prepare(), await small.prepare(), unread]
    # The first is read alone, the others together after it.
    shown = [small.bodies.show(each) for each in made]
    *rest, failed = await asyncio.gather(*shown, return_exceptions=True)
    assert rest == [None, None]
    assert isinstance(failed, OwnerUnavailable)
    assert failed.details == {"id": unread.id}


@pytest.mark.parametrize("copies", [True, False])
async def test_callers_share_reads_of_silent_topic(small: BodiesHarness, copies: bool) -> None:
    made = [await small.prepare(policy=NOW) for _ in range(12)]
    if copies:
        small.keep(*made)
        await until(lambda: all(each.kept_at for each in made))
        small.delete_half(made[-1].offset + 1)
    for each in made:
        small.ledger.index.evict(each)
    reads = []

    async def silent(offsets: Sequence[int]) -> Sequence[Record]:
        reads.append(len(offsets))
        await asyncio.sleep(0)
        raise KafkaUnavailable("the topic is silent")

    if copies:
        small.monkeypatch.setattr(small.door, "pick_parked", silent)
    else:
        small.monkeypatch.setattr(small.door.half, "pick", silent)
    callers = [made[:1], made[1:2], made[2:]]
    found = await asyncio.gather(*[small.checks.attempt(run_of(each)) for each in callers])
    assert all(isinstance(each, OwnerUnavailable) for answers in found for each in answers)
    assert len(reads) <= len(callers) + 1


async def test_parking_waits_for_answer_in_flight(harness: Harness) -> None:
    owner = await harness.owner()
    last = CheckPolicy(after_s=0.0, attempts_max=1, timeout_s=150.0)
    id = await harness.prepared(owner, policy=last)
    (call,) = await owner.checks.attempt(run_of([owner.ledger.index.transactions[id]]))
    assert isinstance(call, CheckCall)
    harness.partition.calls.clear()
    for _ in range(2):
        # Handed out long ago: it would be offered again.
        harness.advance(61.0)
        owner.checks.look_again()
        await settled()
    assert "op.append" not in harness.partition.calls
    harness.advance(30.0)
    owner.checks.look_again()
    await until(lambda: owner.ledger.index.transactions[id].state is State.PARKED)


@pytest.mark.rule(22)
async def test_run_is_asked_before_any_is_parked(harness: Harness) -> None:
    harness.monkeypatch.setattr(appender, "BATCH_RECORDS_MAX", 2)
    owner = await harness.owner()
    last = CheckPolicy(after_s=0.0, attempts_max=1, timeout_s=5.0)
    ids = [await harness.prepared(owner, policy=last) for _ in range(5)]
    made = [owner.ledger.index.transactions[id] for id in ids]
    gate = Gate()
    harness.partition.op.script += [as_it_is, gate.append]
    attempting = asyncio.create_task(owner.checks.attempt(run_of(made)))
    await gate.reached.wait()
    assert [len(each.checks.attempts) for each in made] == [1, 1, 0, 0, 0]
    harness.advance(6.0)
    owner.checks.look_again()
    await settled()
    gate.open()
    calls = await attempting
    assert [each.id for each in calls if isinstance(each, CheckCall)] == ids
    assert {each.state for each in made} == {State.PENDING}


# --- a crowd of due checks -----------------------------------------------------------------------

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
    small.proxy.share = 1 << 30
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
