"""Rules 8 to 12, 16, 26 and 27: how an owner begins, goes on after doubt, and stops."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest
from msgspec import structs

from tests.rules.fakes import Gate, ScriptedDoor, ScriptedPartition, after, raising
from tests.rules.harness import (
    GROUP,
    Harness,
    commit,
    known,
    marker,
    message,
    prepare,
    settled,
    until,
)
from txbroker.contract.service import (
    DecideRequest,
    ListRequest,
    PrepareRequest,
    execute,
)
from txbroker.core.decoding import decode_checkpoint
from txbroker.core.encoding import encode_half, encode_marker, encode_progress
from txbroker.core.records import (
    RECORD_VERSION,
    Claim,
    Decision,
    MarkerKind,
    Message,
    Record,
    State,
)
from txbroker.core.routing import make_id, parse_id
from txbroker.door.protocols import Assignment, Claimed, LogTruncated
from txbroker.door.writing import Fenced, Unknown
from txbroker.errors import ConfigurationError, InvariantBroken, KafkaUnavailable, OwnerUnavailable
from txbroker.kafka.protocol.batch import batch_body, encode_batch
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.testing.door import MemoryPartitionDoor
from txbroker.testing.topics import LostReply

_NUMBERS = itertools.count()


@pytest.mark.rule(8)
async def test_owner_claims_before_reading_or_writing(harness: Harness) -> None:
    await (await harness.owner()).close()
    await harness.owner()
    calls = harness.partition.calls
    assert calls[0] == "claim"
    assert "half.append" not in calls
    assert "op.append" not in calls


@pytest.mark.rule(8)
async def test_lost_claim_is_retried_while_assigned(harness: Harness) -> None:
    owner = harness.make()
    harness.partition.claims.extend([_fenced, _fenced])
    await owner.open()
    assert harness.partition.calls.count("claim") == 3
    id = await harness.committed(owner)
    await until(lambda: harness.visible() == [id])


@pytest.mark.rule(8)
async def test_lost_claim_of_moved_partition_is_abandoned(harness: Harness) -> None:
    owner = harness.make()
    harness.proxy.ours = False
    harness.partition.claims.append(_fenced)
    with pytest.raises(Fenced):
        await owner.open()
    assert harness.partition.calls[-1] == "claim"
    assert harness.partition.calls.count("claim") == 1


@pytest.mark.rule(8)
async def test_each_claim_has_a_unique_id(harness: Harness) -> None:
    for _ in range(2):
        await (await harness.owner()).close()
    records = harness.kafka.visible("txbroker.checkpoint")
    claims = [each for each in map(decode_checkpoint, records) if isinstance(each, Claim)]
    assert len({each.claim for each in claims}) == 2


@pytest.mark.rule(9)
async def test_hanging_claim_is_shown_and_retried(harness: Harness) -> None:
    hangs = True

    async def claim(inner: MemoryPartitionDoor, claim: Claim) -> Claimed:
        if hangs:
            raise KafkaUnavailable("a hanging transaction hides the progress")
        return await inner.claim(claim)

    def script(partition: ScriptedPartition) -> None:
        partition.claims.append(claim)

    broker = await broker_on(harness, 2, script)
    await until(lambda: broker.readiness().partitions[0].startswith("claiming: "))
    assert "hides the progress" in broker.readiness().partitions[0]
    assert not broker.readiness().ready
    hangs = False
    await until(lambda: broker.readiness().ready)


@pytest.mark.rule(10)
async def test_every_promotion_carries_checkpoint(harness: Harness) -> None:
    owner = await harness.owner()
    for count in (1, 2, 3):
        id = await harness.committed(owner)
        await until(lambda: id in harness.events.promotions)  # noqa: B023
        progress = harness.progress()
        assert (progress.op, progress.half) == (count, count)
        assert progress.op_anchor is not None
        assert progress.op_anchor.offset == count - 1
        assert progress.half_anchor is not None
        assert progress.half_anchor.timestamp_ms == known(owner, id).prepared_at_ms
        assert progress.claim == harness.markers()[-1].claim


@pytest.mark.rule(11, 12)
async def test_records_below_checkpoint_have_no_effect(harness: Harness) -> None:
    owner = await harness.owner()
    ids = [await harness.committed(owner) for _ in range(3)]
    await until(lambda: harness.events.promotions == ids)
    again = await harness.restarted(owner)
    later = await harness.committed(again)
    await until(lambda: later in harness.events.promotions)
    assert harness.visible() == [*ids, later]
    assert harness.events.promotions == [*ids, later]
    assert [known(again, id).state for id in ids] == [State.PROMOTED] * 3
    assert harness.runner.due_now == []


@pytest.mark.rule(12)
async def test_next_owner_promotes_committed_transactions(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.set_leaderless("t", 0)
    id = await harness.committed(owner)
    await settled()
    await owner.close()
    harness.kafka.set_leaderless("t")
    again = await harness.owner()
    await until(lambda: known(again, id).state is State.PROMOTED)
    assert harness.visible() == [id]


@pytest.mark.rule(10)
async def test_marker_before_half_is_not_covered_by_checkpoint(harness: Harness) -> None:
    owner = await harness.owner()
    late = harness.half(message("late"))
    harness.zombie_mark(MarkerKind.COMMIT, late.id, group=GROUP)
    await until(lambda: owner.ledger.op_position == 1)
    first = await harness.committed(owner)
    await until(lambda: harness.events.promotions == [first])
    assert (harness.progress().op, harness.progress().half) == (2, 1)
    await owner.close()
    harness.zombie_half(late)
    await harness.owner()
    await until(lambda: harness.events.promotions == [first, late.id])
    assert harness.visible() == [first, "late"]


@pytest.mark.rule(12)
async def test_attempts_count_across_restart(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.half()
    await prepare(owner, half)
    for number in (1, 2):
        harness.advance(40.0)
        harness.zombie_mark(MarkerKind.CHECK, half.id, round=1, number=number, reason="due")
    await until(lambda: known(owner, half.id).checks.number == 2)
    before = known(owner, half.id).checks.counted_ms
    again = await harness.restarted(owner)
    assert known(again, half.id).checks.counted_ms == before
    assert known(again, half.id).checks.number == 2


@pytest.mark.rule(10)
async def test_truncated_or_recreated_topic_stops_one_partition(harness: Harness) -> None:
    broker = await broker_on(harness, 2)
    await until(lambda: broker.readiness().ready)
    for partition in (0, 1):
        await through(broker, harness, partition)
    await until(lambda: len(harness.events.promotions) == 2)
    await broker.close()
    harness.kafka.truncate("x.op", 0, end=0)
    broker = await broker_on(harness, 2)
    await until(lambda: broker.readiness().partitions[1] == "owned")
    await until(lambda: broker.readiness().partitions[0].startswith("truncated"))
    assert not broker.readiness().ready
    assert any("truncated or recreated" in problem for problem in broker.readiness().problems)
    await through(broker, harness, 1)
    with pytest.raises(OwnerUnavailable):
        await through(broker, harness, 0)


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", ["half", "op"])
async def test_log_ending_before_checkpoint_is_refused(harness: Harness, topic: str) -> None:
    owner = await harness.owner()
    await harness.promoted(owner, 3)
    await owner.close()
    harness.kafka.truncate(f"txbroker.{topic}", end=2)
    await harness.truncated("it ends at")


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", ["half", "op"])
async def test_recreated_log_past_checkpoint_is_refused(harness: Harness, topic: str) -> None:
    owner = await harness.owner()
    await harness.promoted(owner, 3)
    await owner.close()
    old = harness.kafka.visible(f"txbroker.{topic}")
    harness.kafka.truncate(f"txbroker.{topic}", end=0)
    harness.advance(10.0)
    log = harness.kafka.topics[f"txbroker.{topic}"].partitions[0]
    bare = [structs.replace(record, timestamp_ms=-1) for record in old * 2]
    log.append(bare, harness.clock.now_ms())
    with pytest.raises(LogTruncated):
        await harness.owner()


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", ["half", "op"])
async def test_log_ending_before_last_read_record_is_refused(harness: Harness, topic: str) -> None:
    """A checkpoint may be below the records read at the time: the rest must be read."""
    owner = await harness.owner()
    ids = [await harness.committed(owner) for _ in range(2)]
    await until(lambda: harness.visible() == ids)
    await owner.close()
    # As of a promotion without room for the second transaction, though it was read.
    progress = encode_progress(structs.replace(harness.progress(), op=1, half=1))
    harness.kafka.transact("txbroker.checkpoint", 0, [progress], transactional_id="txbroker.half-0")
    harness.kafka.truncate(f"txbroker.{topic}", end=1)
    await harness.truncated("it ends at")


@pytest.mark.rule(10)
async def test_truncation_stops_owned_partition(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    harness.kafka.truncate("txbroker.half", before=1)
    harness.zombie_half(harness.half())
    harness.kafka.truncate("txbroker.half", before=2)
    await harness.stopped(LogTruncated)


@pytest.mark.rule(10)
async def test_refused_transactions_survive_restart_with_cause(harness: Harness) -> None:
    owner = await harness.owner()
    id = await harness.refused(owner)
    decided_at_ms = known(owner, id).verdict.at_ms
    again = await harness.restarted(owner)
    assert known(again, id).state is State.REFUSED
    cause = known(again, id).cause
    assert cause is not None
    assert (cause.code, cause.topic, cause.partition) == ("too_large", "t", 0)
    assert known(again, id).verdict.at_ms == decided_at_ms
    assert harness.visible() == []


@pytest.mark.rule(10)
async def test_damaged_copy_of_refused_stops_partition(harness: Harness) -> None:
    """It would count as promoted: after a lost turn, and with the next owner."""
    owner = await harness.owner()
    harness.kafka.set_message_bytes_max("u", 200)
    messages = (message("small"), message("x" * 500, topic="u"))
    id = await harness.committed(owner, *messages)
    await until(lambda: known(owner, id).state is State.REFUSED)
    # An operator deletes half of it.
    harness.kafka.truncate("txbroker.parked", before=1)
    harness.partition.writes.append(raising(Unknown()))
    await harness.committed(owner)
    await harness.stopped(InvariantBroken)
    assert id not in harness.events.promotions
    await owner.close()
    with pytest.raises(InvariantBroken, match="parked topic is damaged"):
        await harness.owner()


@pytest.mark.rule(10)
async def test_revived_refused_transaction_is_retried(harness: Harness) -> None:
    owner = await harness.owner()
    id = await harness.refused(owner)
    owner._promoter._retries._retries.set(id, None)
    assert (await owner.api.revive(id, "ops", "again")).state is State.REFUSED
    assert known(owner, id).checks.round == 1
    harness.kafka.set_message_bytes_max("t", 1000)
    await owner.api.revive(id, "ops", "raised")
    await until(lambda: harness.visible() == ["big" * 100])
    await until(lambda: harness.parked()[-1] == (f"{id}/0".encode(), False))
    await owner.close()
    assert known(await harness.owner(), id).state is State.PROMOTED


@pytest.mark.rule(16)
async def test_fenced_owner_drops_moved_partition(harness: Harness) -> None:
    owner = await harness.owner()
    harness.proxy.ours = False
    harness.partition.writes.append(raising(Fenced()))
    id = await harness.committed(owner)
    await harness.stopped(Fenced)
    assert harness.partition.calls.count("claim") == 1
    assert harness.visible() == []
    assert known(owner, id).state is State.COMMITTED


@pytest.mark.rule(16)
@pytest.mark.parametrize("error", [Fenced(), Unknown(), KafkaUnavailable()])
async def test_owner_in_doubt_reclaims_and_continues(harness: Harness, error: Exception) -> None:
    owner = await harness.owner()
    harness.partition.writes.append(raising(error))
    ids = [await harness.committed(owner) for _ in range(2)]
    await until(lambda: harness.visible() == ids)
    assert harness.partition.calls.count("claim") == 2
    later = await harness.committed(owner)
    await until(lambda: harness.visible() == [*ids, later])
    assert harness.stops == []


@pytest.mark.rule(16)
@pytest.mark.parametrize("outcome", [LostReply.DONE, LostReply.NOT_DONE])
async def test_unknown_commit_is_promoted_exactly_once(
    harness: Harness, outcome: LostReply
) -> None:
    owner = await harness.owner()
    harness.kafka.lose_answer_of_next_commit(outcome)
    waiting = asyncio.create_task(harness.committed(owner))
    id = await waiting
    await until(lambda: harness.events.promotions == [id])
    later = await harness.committed(owner)
    await until(lambda: harness.events.promotions == [id, later])
    assert harness.visible() == [id, later]
    assert harness.partition.calls.count("claim") == 2


@pytest.mark.rule(16)
async def test_heartbeat_comes_before_reclaim(harness: Harness) -> None:
    owner = await harness.owner()
    asked: list[int] = []

    async def still_ours(partition: int) -> bool:
        asked.append(harness.partition.calls.count("claim"))
        return True

    harness.proxy.still_ours = still_ours  # type: ignore[method-assign]
    harness.partition.writes.append(raising(Unknown()))
    id = await harness.committed(owner)
    await until(lambda: harness.visible() == [id])
    assert asked == [1]


@pytest.mark.rule(3)
async def test_zombie_answers_correctly_and_promotes_nothing(harness: Harness) -> None:
    zombie = await harness.owner()
    id = await harness.prepared(zombie)
    heir = await harness.owner()
    await commit(heir, id)
    await until(lambda: harness.visible() == [id])
    harness.proxy.ours = False
    assert (await commit(zombie, id)).decision == "commit"
    mine = await harness.committed(zombie)
    await until(lambda: len(harness.visible()) == 2)
    await harness.stopped(Fenced)
    assert harness.visible() == [id, mine]


@pytest.mark.rule(26)
async def test_assignment_does_not_wait_for_recovery(harness: Harness) -> None:
    async def claim(inner: MemoryPartitionDoor, claim: Claim) -> Claimed:
        await opened.wait()
        return await inner.claim(claim)

    opened = asyncio.Event()
    broker = await broker_on(harness, 2, lambda partition: partition.claims.append(claim))
    assert set(broker.readiness().partitions.values()) == {"claiming"}
    started = time.monotonic()
    broker.partitions._assigned(Assignment(frozenset(), ("http://other",) * 2, (), 1))
    assert set(broker.readiness().partitions.values()) == {"elsewhere"}
    broker.partitions._assigned(Assignment(frozenset({0, 1}), ("",) * 2, (), 1))
    assert time.monotonic() - started < 1.0
    opened.set()
    await until(lambda: set(broker.readiness().partitions.values()) == {"owned"})


async def test_reassigned_partition_reopens_while_owner_closes(harness: Harness) -> None:
    def lose(partition: ScriptedPartition) -> None:
        partition.claims.append(_fenced)
        harness.monkeypatch.setattr(partition, "close", closing.wait)

    async def moved(_partition: int) -> bool:
        return False

    closing = Gate()
    broker = await broker_on(harness, 1)
    _, door = harness._brokers[-1]
    manager = broker.partitions
    await until(lambda: broker.readiness().partitions[0] == "owned")
    with harness.monkeypatch.context() as elsewhere:
        elsewhere.setattr(door, "prepare_partition", lose)
        elsewhere.setattr(manager, "still_ours", moved)
        manager._assigned(Assignment(frozenset(), ("http://other",), (), 1))
        manager._assigned(Assignment(frozenset({0}), ("",), (), 1))
        await closing.reached.wait()
    manager._assigned(Assignment(frozenset({0}), ("",), (), 1))
    closing.open()
    await until(lambda: broker.readiness().partitions[0] == "owned")


@pytest.mark.rule(26)
async def test_call_to_closed_owner_fails_at_once(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    await owner.close()
    async with asyncio.timeout(1.0):
        with pytest.raises(OwnerUnavailable):
            await prepare(owner, harness.half())
        with pytest.raises(OwnerUnavailable):
            await commit(owner, id)


def newer_marker(harness: Harness, id: str, kind: str = "commit") -> Record:
    """Return a marker of a version that does not exist yet."""
    record = encode_marker(
        structs.replace(marker(MarkerKind.COMMIT, id), v=RECORD_VERSION + 1, group=GROUP)
    )
    assert record.value is not None
    return structs.replace(record, value=record.value.replace(b'"commit"', f'"{kind}"'.encode()))


@pytest.mark.rule(27)
@pytest.mark.parametrize("kind", ["commit", "annul"])
async def test_newer_marker_stops_one_partition(harness: Harness, kind: str) -> None:
    broker = await broker_on(harness, 2)
    await until(lambda: broker.readiness().ready)
    id = await _prepare(broker, harness, 0)
    op = harness.kafka.topics["x.op"].partitions[0]
    op.append([newer_marker(harness, id, kind)], harness.clock.now_ms())
    await until(lambda: broker.readiness().partitions[0].startswith("newer"))
    assert "newer txbroker" in broker.readiness().partitions[0]
    assert not broker.readiness().ready
    await through(broker, harness, 1)
    await broker.close()
    again = await broker_on(harness, 2)
    await until(lambda: again.readiness().partitions[1] == "owned")
    await until(lambda: again.readiness().partitions[0].startswith("newer"))


@pytest.mark.rule(27)
async def test_newer_half_message_stops_any_reader(harness: Harness) -> None:
    owner = await harness.owner()
    owner._tasks[4].cancel()  # the watch, so that the call below is the first to read it
    await settled()
    (record,) = encode_half(harness.half())
    headers = (
        ("txb-v", b"%d" % (RECORD_VERSION + 1) + (record.headers[0][1] or b"")[1:]),
        *record.headers[1:],
    )
    half = harness.kafka.topics["txbroker.half"].partitions[0]
    half.append([structs.replace(record, headers=headers)], harness.clock.now_ms())
    with pytest.raises(OwnerUnavailable):
        await commit(owner, harness.half().id)
    await harness.stopped(InvariantBroken)


@pytest.mark.rule(27)
async def test_newer_marker_in_gap_stops_before_answer(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    harness.partition.op.script.append(after(lambda: harness.zombie_op(newer_marker(harness, id))))
    with pytest.raises(OwnerUnavailable):
        await commit(owner, id)
    await harness.stopped(InvariantBroken)
    assert harness.visible() == []


@pytest.mark.rule("topics")
def test_record_without_append_time_stops_partition() -> None:
    data = encode_batch(batch_body([Record(b"k", b"v", (), 5)]), producer_id=1, epoch=0, sequence=0)
    answer = (0, 0, 1, 1, [], data)
    ours, theirs = (Fetched("x-0", 0, answer, append_time=own) for own in (True, False))
    assert [record.value for record in theirs.records] == [b"v"]
    with pytest.raises(InvariantBroken, match="LogAppendTime"):
        list(ours.pieces())


# --- helpers -------------------------------------------------------------------------------------


async def _fenced(inner: MemoryPartitionDoor, claim: Claim) -> Claimed:
    raise Fenced


async def broker_on(
    harness: Harness, partitions: int, script: Callable[[ScriptedPartition], None] | None = None
) -> Broker:
    """Return a broker on separate topics, the same ones each time."""
    door = ScriptedDoor(
        harness.kafka, topic_prefix="x", half_partitions=partitions, facts_ttl_s=0.01
    )
    if script is not None:
        door.prepare_partition = script
    return await harness.broker(door)


async def _prepare(broker: Broker, harness: Harness, partition: int) -> str:
    id = id_in(harness, partition)
    await execute(broker, PrepareRequest(GROUP, (message(id, key=None),), id=id))
    return id


def id_in(harness: Harness, partition: int) -> str:
    """Return an id of now in a half partition."""
    return make_id(partition, harness.clock.now_ms(), next(_NUMBERS))


async def through(broker: Broker, harness: Harness, partition: int) -> None:
    """Commit a transaction of a partition, and see it promoted."""
    id = await _prepare(broker, harness, partition)
    await execute(broker, DecideRequest(id, Decision.COMMIT, wait=True))


# --- trouble with the group ----------------------------------------------------------------------

MINE = Assignment(frozenset({0}), ("http://127.0.0.1:1",), ("http://127.0.0.1:1",), 1)
THEIRS = Assignment(frozenset(), ("http://other",), ("http://other",), 1)


async def at_work(harness: Harness) -> tuple[Broker, ScriptedDoor, PartitionOwner]:
    broker = await harness.new_broker()
    return broker, harness._brokers[-1][1], broker.partitions.open()[0]


@pytest.mark.rule(16)
@pytest.mark.parametrize("error", [ConfigurationError("the group is full"), RuntimeError("odd")])
async def test_proxy_that_left_rejoins_after_any_error(harness: Harness, error: Exception) -> None:
    broker, door, _ = await at_work(harness)
    join, errors = door.membership.join, [error]

    async def full(*args: object, **urls: str) -> None:
        if errors:
            raise errors.pop()
        await join(*args, **urls)  # type: ignore[arg-type]

    harness.monkeypatch.setattr(door.membership, "join", full)
    harness.monkeypatch.setattr(broker.partitions, "_rejoin_s", 0.001)
    await broker.partitions._leave_and_join(60.0)
    await until(lambda: broker.readiness().ready)


@pytest.mark.rule(16)
async def test_lost_contact_does_not_count_as_stuck_claim(harness: Harness) -> None:
    async def claim(inner: MemoryPartitionDoor, claim: Claim) -> Claimed:
        await gate.wait()
        return await inner.claim(claim)

    gate = Gate()
    door = ScriptedDoor(harness.kafka, half_partitions=1, facts_ttl_s=0.01)
    door.prepare_partition = lambda partition: partition.claims.append(claim)
    broker = await harness.broker(door)
    await gate.reached.wait()
    manager = broker.partitions
    manager._lost("no answer")
    manager._slots[0].since -= 60.0
    manager._assigned(MINE)
    assert manager._slots[0].stuck_s() == 0.0
    # In touch all the while, another generation changes nothing.
    manager._slots[0].since -= 60.0
    manager._assigned(MINE)
    assert manager._slots[0].stuck_s() > 50.0
    gate.open()
    await until(lambda: broker.readiness().ready)


async def test_cancelled_leave_closes_owners(harness: Harness) -> None:
    broker, door, _ = await at_work(harness)
    gate, closed = Gate(), asyncio.Event()
    close = door.opened[0].close

    async def slowly() -> None:
        await gate.wait()
        await close()
        closed.set()

    harness.monkeypatch.setattr(door.opened[0], "close", slowly)
    leaving = asyncio.create_task(broker.partitions._leave("requested by a test"))
    await gate.reached.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    gate.open()
    async with asyncio.timeout(2.0):
        await closed.wait()


@pytest.mark.rule(26)
async def test_takeover_during_lost_contact_is_counted(harness: Harness) -> None:
    fenced: list[str] = []
    harness.monkeypatch.setattr(harness.events, "fenced", lambda: fenced.append("fenced"))
    broker, _, _ = await at_work(harness)
    # Handed over by the group, as when a proxy joins: no owner was fenced.
    broker.partitions._assigned(THEIRS)
    assert fenced == []
    broker.partitions._assigned(MINE)
    await until(lambda: broker.mine())
    broker.partitions._lost("no answer")
    broker.partitions._assigned(THEIRS)
    assert fenced == ["fenced"]


@pytest.mark.rule(26)
async def test_paused_proxy_answers_nothing_from_memory(harness: Harness) -> None:
    broker, door, owner = await at_work(harness)
    id = await harness.prepared(owner)
    assert (await broker.find(id)).state == "pending"
    with harness.monkeypatch.context() as asleep:
        asleep.setattr(door.membership, "in_touch", lambda: False)
        with pytest.raises(OwnerUnavailable) as caught:
            await broker.find(id)
        assert caught.value.details["id"] == id
        with pytest.raises(OwnerUnavailable):
            await broker.list(ListRequest())
    assert (await broker.find(id)).state == "pending"
    assert len((await broker.list(ListRequest())).transactions) == 1
    assert known(owner, id).state == "pending"


@pytest.mark.rule(26)
async def test_keyless_prepare_avoids_suspended_partition(harness: Harness) -> None:
    door = ScriptedDoor(harness.kafka, topic_prefix="x", half_partitions=2)
    broker = await harness.broker(door)
    await until(lambda: len(broker.mine()) == 2)
    owners = broker.partitions.open()
    request = PrepareRequest("g", (Message("t", None, b"v"),))
    for away, left in ((0, 1), (1, 0)):
        owners[away].suspend()
        ids = [(await execute(broker, request)).id for _ in range(20)]
        assert {parse_id(id).partition for id in ids} == {left}
        owners[away].resume()
    for owner in owners.values():
        owner.suspend()
    with pytest.raises(OwnerUnavailable):
        await execute(broker, request)
