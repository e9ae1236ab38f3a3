"""Schedules that once lost an answer, a check or a whole partition."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tests.rules.fakes import Gate, Held, ScriptedDoor, raising
from tests.rules.harness import (
    QUICK,
    Harness,
    answered,
    asked,
    attempt,
    commit,
    known,
    message,
    settled,
    until,
)
from txbroker.checkers.base import Answered
from txbroker.contract.service import (
    DecideRequest,
    PrepareRequest,
    execute,
)
from txbroker.core.records import (
    Cause,
    CheckPolicy,
    CheckReason,
    Decision,
    MarkerKind,
    Message,
    Record,
    State,
)
from txbroker.core.routing import parse_id
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import (
    Appended,
    AppendRefused,
    Assignment,
    Log,
    LogTruncated,
    NotVisible,
    PromotionTxn,
    PromotionTxnHandle,
    TargetFacts,
)
from txbroker.door.writing import Fenced, Unknown
from txbroker.errors import InvariantBroken, KafkaUnavailable, OwnerUnavailable
from txbroker.proxy.partition.quarantine import RetryQueue, note_invisible
from txbroker.testing.door import MemoryPartitionDoor

# --- appending -----------------------------------------------------------------------------------


async def refused(_log: Log, _records: Sequence[Record]) -> Appended:
    raise AppendRefused("one of them is poison")


async def test_batch_split_during_close_answers_all(harness: Harness) -> None:
    owner = await harness.owner()
    before, gate = Gate(), Gate()
    harness.partition.half.script.extend([before.append, refused, gate.append])
    first = asyncio.create_task(harness.prepared(owner))
    await before.reached.wait()
    batch = [asyncio.create_task(harness.prepared(owner)) for _ in range(3)]
    await settled()
    before.open()
    await gate.reached.wait()
    await owner.close()
    done, waiting = await asyncio.wait([first, *batch], timeout=1)
    for task in waiting:
        task.cancel()
    assert not waiting
    assert [type(task.exception()) for task in batch] == [OwnerUnavailable] * 3
    assert first in done


async def test_lookups_of_unknown_ids_share_one_read(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.partition.half
    gate = Gate()
    half.script.append(gate.append)
    writing = asyncio.create_task(harness.prepared(owner))
    await gate.reached.wait()
    unknown = [harness.half().id for _ in range(100)]
    looks = [asyncio.create_task(owner.api.get(id)) for id in unknown]
    await settled()
    before = harness.partition.calls.count("half.bounds")
    gate.open()
    await asyncio.wait(looks)
    assert harness.partition.calls.count("half.bounds") - before <= 3
    assert {type(look.exception()).__name__ for look in looks} == {"NotFound"}
    await writing


async def test_truncated_end_stops_partition_at_next_append(harness: Harness) -> None:
    owner = await harness.owner()
    for _ in range(3):
        await harness.prepared(owner)

    async def from_the_start(log: Log, records: Sequence[Record]) -> Appended:
        stored = await log.append(records)
        return Appended(0, stored.timestamp_ms)

    harness.partition.half.script.append(from_the_start)
    with pytest.raises(OwnerUnavailable):
        await harness.prepared(owner)
    await harness.stopped(LogTruncated)


# --- checks --------------------------------------------------------------------------------------


async def test_requested_check_survives_previous_answer(harness: Harness) -> None:
    owner = await harness.owner()
    policy = CheckPolicy(after_s=0.0, interval_s=30.0, attempts_max=5, timeout_s=5.0)
    id = await harness.prepared(owner, policy=policy)
    await until(lambda: harness.runner.due_now)
    call = await asked(owner.checks, id, CheckReason.DUE)
    owner.checks.ask(known(owner, id))
    # The answer to the attempt before comes now, and moves the transaction to its regular time.

    await answered(owner.checks, call, Answered(Decision.UNKNOWN))
    harness.runner.due_now.clear()
    harness.advance(1.1)
    owner.checks.look_again()
    await until(lambda: harness.runner.due_now, 2)
    assert await attempt(owner.checks, id, CheckReason.DUE) is not None
    assert [m.reason for m in harness.markers() if m.kind is MarkerKind.CHECK] == ["due", "asked"]


# --- promotion -----------------------------------------------------------------------------------


class SlowTargets:
    """Facts that are out of date as soon as the next topic was asked about."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.last = ""
        self.broken: set[str] = set()

    def known(self, topic: str) -> TargetFacts | Cause | None:
        return self.inner.known(topic) if topic == self.last else None

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        self.last = topic
        if topic in self.broken:
            raise KafkaUnavailable(f"no answer about {topic}")
        found: TargetFacts | Cause = await self.inner.examine(topic, create=create)
        return found

    def forget(self, topic: str) -> None:
        self.inner.forget(topic)


async def test_plan_is_made_with_more_targets_than_facts_last(harness: Harness) -> None:
    owner = harness.make()
    owner._promoter._targets = SlowTargets(harness.door.targets)  # type: ignore[assignment]
    await owner.open()
    id = await harness.committed(owner, message("a"), message("b", "u"))
    await until(lambda: known(owner, id).state is State.PROMOTED, 2)


async def test_unexamined_target_delays_only_its_own(harness: Harness) -> None:
    owner = harness.make()
    targets = SlowTargets(harness.door.targets)
    targets.broken.add("u")
    owner._promoter._targets = targets  # type: ignore[assignment]
    await owner.open()
    stuck = await harness.committed(owner, message("stuck", "u", b"x"))
    id = await harness.committed(owner, message("a"))
    await until(lambda: known(owner, id).state is State.PROMOTED, 2)
    assert known(owner, stuck).state is State.COMMITTED
    targets.broken.clear()
    await until(lambda: known(owner, stuck).state is State.PROMOTED, 2)


async def test_invisible_promotion_does_not_stop_partition(harness: Harness) -> None:
    """Another client's transaction is open in a target, and a later promotion is lost."""
    owner = await harness.owner()
    await harness.committed(owner)
    hanging = hold_back(harness, "u")
    unseen = await harness.committed(owner, message("unseen", "u", b"x"))
    await settled()
    harness.partition.writes.append(raising(Unknown("silence")))
    id = await harness.committed(owner, message("a"))
    await until(lambda: known(owner, id).state is State.PROMOTED, 2)
    assert known(owner, unseen).state is State.COMMITTED
    harness.kafka.end(hanging, committed=False)
    await until(lambda: known(owner, unseen).state is State.PROMOTED, 2)
    assert harness.visible("u") == ["unseen"]


def hold_back(harness: Harness, topic: str) -> Any:
    """Open a stranger's transaction in a target; return it."""
    stranger = object()
    harness.kafka.fence("stranger", stranger)
    transaction = harness.kafka.begin("stranger")
    harness.kafka.write(topic, 0, [Record(None, b"strange")], transaction)
    return transaction


async def test_silent_leader_delays_only_its_own(harness: Harness) -> None:
    owner = await harness.owner()
    silent = True

    async def write(inner: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        harness.partition.writes.append(write)
        if silent and any(target.topic == "u" for target in turn.promoted):
            cause = Cause("no_answer", "u-0 does not answer", "u", 0, passing=True)
            raise Unknown("u-0 does not answer", cause)
        return await inner.write(turn)

    harness.partition.writes.append(write)
    stuck = await harness.committed(owner, message("stuck", "u", b"x"))
    await until(lambda: known(owner, stuck).cause is not None, 2)
    id = await harness.committed(owner, message("a"))
    await until(lambda: known(owner, id).state is State.PROMOTED, 2)
    silent = False
    await until(lambda: known(owner, stuck).state is State.PROMOTED, 2)


@pytest.mark.rule(17)
async def test_target_with_open_txn_is_quarantined(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.unaware.add(("u", 0))
    stuck = await harness.committed(owner, message("stuck", "u", b"x"))
    await until(lambda: known(owner, stuck).cause is not None, 5)
    id = await harness.committed(owner, message("a"))
    await until(lambda: known(owner, id).state is State.PROMOTED, 5)
    found = known(owner, stuck)
    assert found.state is State.COMMITTED
    assert found.cause is not None
    assert found.cause.code == "hanging"
    assert all(target.topic != "u" for turn in harness.partition.turns for target in turn.promoted)
    held = Held(visible=False)
    harness.partition.writes.append(held.write)
    harness.kafka.unaware.clear()
    # It no longer waits, so its promotion does not look old.
    await until(lambda: known(owner, stuck).cause is None, 5)
    assert known(owner, stuck).state is State.COMMITTED
    held.at_visible.open()
    await until(lambda: known(owner, stuck).state is State.PROMOTED, 5)
    assert harness.visible("u") == ["stuck"]


@pytest.mark.rule(17)
async def test_plan_verifies_slow_target_once(harness: Harness) -> None:
    owner = await harness.owner()
    prove, take_due = harness.partition.inner.verify_no_open_txn, RetryQueue.take_due
    plans, asked = 0, []

    def planned(retries: RetryQueue, in_flight: Collection[str]) -> list[Transaction]:
        nonlocal plans
        plans += 1
        return take_due(retries, in_flight)

    async def noted(places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        asked.append(plans)
        if len(asked) > 2:
            harness.kafka.unaware.clear()
        return await prove(places)

    harness.monkeypatch.setattr(RetryQueue, "take_due", planned)
    harness.monkeypatch.setattr(harness.partition, "verify_no_open_txn", noted)
    # By the time that there is an answer the pause is over.
    harness.monkeypatch.setattr("txbroker.proxy.partition.quarantine.RETRY_FIRST_S", 0.0)
    harness.kafka.unaware.add(("u", 0))
    id = await harness.committed(owner, message("kept off", "u", b"x"))
    await until(lambda: known(owner, id).state is State.PROMOTED, 5)
    assert len(asked) == len(set(asked)) == 3


async def test_rejecting_own_topic_stops_partition(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=QUICK)
    harness.kafka.topics["txbroker.parked"].authorized = False
    for number in range(3):
        await until(lambda n=number: len(harness.runner.due_now) > n)  # type: ignore[misc]
        await until(lambda: owner.clock.now_ms() >= known(owner, id).next_check_ms())
        while await attempt(owner.checks, id, CheckReason.DUE) is None:
            await asyncio.sleep(0.001)
        owner.checks.touch(known(owner, id))
    await harness.stopped(InvariantBroken)
    assert "txbroker.parked" in str(harness.stops[0])


async def test_wait_ends_when_claim_finds_refusal(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.topics["t"].authorized = False
    id = await harness.prepared(owner)

    async def unheard(inner: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        await (await inner.write(turn)).committed()
        raise Unknown("the answer was lost")

    harness.partition.writes.append(unheard)
    async with asyncio.timeout(2):
        standing = await commit(owner, id, wait=True)
    assert standing.state is State.REFUSED


async def test_cancelled_wait_is_forgotten(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.topics["t"].leaderless = frozenset({0})
    id = await harness.committed(owner)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await commit(owner, id, wait=True)
    assert not list(owner._context.visible)


async def test_wait_at_closed_owner_fails(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.topics["t"].leaderless = frozenset({0})
    id = await harness.committed(owner)
    await owner.close()
    with pytest.raises(OwnerUnavailable):
        async with asyncio.timeout(1):
            await commit(owner, id, wait=True)


# --- clocks --------------------------------------------------------------------------------------


async def test_prepares_continue_after_clock_jumps_back(harness: Harness) -> None:
    broker = await harness.new_broker()
    request = PrepareRequest("g", (Message("t", b"k", b"v"),))
    await execute(broker, request)
    harness.clock.advance(-3600)
    for _ in range(5):
        harness.time.ahead_s += 100
        harness.clock.advance(100)
        await execute(broker, request)


@pytest.mark.parametrize("topic", ["txbroker.half", "txbroker.op"])
async def test_prepares_continue_after_one_clock_jumps_forward(
    harness: Harness, topic: str
) -> None:
    broker = await harness.new_broker()
    request = PrepareRequest("g", (Message("t", b"k", b"v"),))
    await execute(broker, request)
    appends = harness.kafka.topics[topic].partitions[0].append

    def a_day_ahead(records: Sequence[Record], now_ms: int, *rest: Any) -> int:
        return appends(records, now_ms + 86_400_000, *rest)

    harness.kafka.topics[topic].partitions[0].append = a_day_ahead  # type: ignore[method-assign]
    # An append returns the time of the log.
    inner = harness.kafka.append

    async def append(name: str, partition: int, records: Sequence[Record]) -> Appended:
        where = await inner(name, partition, records)
        ahead_ms = 86_400_000 if name == topic else 0
        return Appended(where.base_offset, where.timestamp_ms + ahead_ms)

    harness.kafka.append = append  # type: ignore[method-assign]
    for _ in range(3):
        standing = await execute(broker, request)
        await execute(broker, DecideRequest(standing.id, Decision.COMMIT, wait=True))
    # And sessions make ids by the clock of the half topic's broker.
    last = parse_id(standing.id).time_ms
    assert abs(broker.now_ms() - last) < 60_000


# --- the broker ----------------------------------------------------------------------------------


async def test_partition_lost_during_claim_opens_when_reassigned(harness: Harness) -> None:
    door = ScriptedDoor(harness.kafka, half_partitions=1, facts_ttl_s=0.01)
    callbacks: list[Any] = []
    join = door.membership.join

    async def joined(url: str, assigned: Any, lost: Any, **urls: str) -> None:
        callbacks.append(assigned)
        await join(url, assigned, lost, **urls)

    async def still_ours(_partition: int) -> bool:
        # As on Kafka: the group has removed us, which is reported before the negative answer.
        callbacks[0](Assignment(frozenset(), ("http://other",), (), 1))
        return False

    async def fenced(_inner: MemoryPartitionDoor, _claim: Any) -> Any:
        raise Fenced("a timeout")

    def script(partition: Any) -> None:
        partition.claims.append(fenced)
        door.prepare_partition = lambda _: None

    door.membership.join = joined  # type: ignore[method-assign]
    door.membership.still_ours = still_ours  # type: ignore[method-assign]
    door.prepare_partition = script
    broker = await harness.broker(door)
    await until(lambda: broker.readiness().partitions[0] == "elsewhere", 2)
    await settled()
    callbacks[0](Assignment(frozenset({0}), ("",), (), 1))
    await until(lambda: len(broker.mine()) == 1, 2)


async def test_cause_of_refusal_is_kept(harness: Harness) -> None:
    """Refused ones are counted by the topic of their cause, also while they are tried again."""
    owner = await harness.owner()
    hold_back(harness, "u")
    unseen = known(owner, await harness.committed(owner, message("unseen", "u", b"x")))
    refused = known(owner, await harness.committed(owner, message("refused", "u", b"x")))
    refused.state, refused.cause = State.REFUSED, Cause("too_large", "too large", "t", 0)
    note_invisible([unseen, refused], NotVisible("committed", [("u", 0)]))
    assert unseen.cause is not None
    assert unseen.cause.code == "not_visible"
    assert refused.cause == Cause("too_large", "too large", "t", 0)
