"""Rules 1 to 5: writers, order of application, and the basis of answers."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.rules.fakes import (
    Gate,
    after,
    lost_unanswered,
    stored_unanswered,
    without_offset,
    without_time,
)
from tests.rules.harness import (
    GROUP,
    WINDOW_MS,
    Harness,
    commit,
    known,
    marker,
    message,
    prepare,
    roll_back,
    settled,
    snapshot,
    until,
)
from txbroker.core import ledger as ledger_module
from txbroker.core.encoding import (
    encode_half,
    encode_kept,
    encode_marker,
    encode_progress,
    encode_skip,
)
from txbroker.core.ledger import Effect
from txbroker.core.records import RECORD_VERSION, MarkerKind, Message, ParkedCopy, Record, State
from txbroker.core.routing import make_id
from txbroker.door.protocols import PromotionTxn, PromotionTxnHandle
from txbroker.errors import (
    AlreadyDecided,
    IdConflict,
    InvariantBroken,
    NewerRecord,
    NotFound,
    OwnerUnavailable,
    WrongGroup,
)
from txbroker.proxy.partition import owner as owner_module
from txbroker.proxy.partition.recovery import read_copies
from txbroker.testing.door import MemoryPartitionDoor


@pytest.mark.rule(1)
@pytest.mark.parametrize("fate", [stored_unanswered, lost_unanswered])
async def test_unanswered_prepare_is_not_acked_and_repeatable(
    harness: Harness, fate: object
) -> None:
    owner = await harness.owner()
    half = harness.half(message("once"))
    harness.partition.half.script.append(fate)  # type: ignore[arg-type]
    with pytest.raises(OwnerUnavailable):
        await prepare(owner, half)
    assert (await prepare(owner, half)).id == half.id
    await commit(owner, half.id)
    await until(lambda: harness.visible() == ["once"])
    assert [transaction.id for transaction in owner.ledger.index] == [half.id]


@pytest.mark.rule(1)
@pytest.mark.parametrize("fate", [stored_unanswered, lost_unanswered])
async def test_unanswered_decision_is_not_acked_and_repeatable(
    harness: Harness, fate: object
) -> None:
    owner, id = await harness.new_pending()
    harness.partition.op.script.append(fate)  # type: ignore[arg-type]
    with pytest.raises(OwnerUnavailable):
        await commit(owner, id)
    assert (await commit(owner, id)).decision == "commit"
    await until(lambda: harness.visible() == [id])


@pytest.mark.rule(2, 3)
async def test_gap_is_applied_before_own_marker(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    harness.partition.op.script.append(
        after(lambda: harness.zombie_mark(MarkerKind.ROLLBACK, id, group=GROUP))
    )
    with pytest.raises(AlreadyDecided) as raised:
        await commit(owner, id)
    assert raised.value.details["decision"] == "rollback"
    assert owner.ledger.op_position == 2
    assert (known(owner, id).state, known(owner, id).verdict.op_offset) == (State.ROLLED_BACK, 0)


@pytest.mark.rule(2)
async def test_gap_in_half_is_applied_first(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.half(message("mine"), dedup_key="d")
    theirs = harness.half(message("theirs"))
    harness.partition.half.script.append(after(lambda: harness.zombie_half(theirs)))
    assert (await prepare(owner, half)).created
    assert known(owner, theirs.id).offset == 0
    assert known(owner, half.id).offset == 1


@pytest.mark.rule(2)
async def test_missing_offset_reads_log_back(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    harness.partition.op.script.append(without_offset)
    assert (await commit(owner, id)).decision == "commit"
    assert known(owner, id).verdict.op_offset == 0
    half = harness.half()
    harness.partition.half.script.append(without_offset)
    assert (await prepare(owner, half)).created
    assert known(owner, half.id).offset == 1


@pytest.mark.rule(2)
async def test_missing_offset_skips_equal_older_record(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.half(message("mine"), dedup_key="d")
    theirs = harness.half(message("theirs"))

    async def hidden_after_another(log: object, records: object) -> object:
        harness.zombie_half(theirs)
        return await without_offset(log, records)  # type: ignore[arg-type]

    harness.partition.half.script.append(hidden_after_another)  # type: ignore[arg-type]
    assert (await prepare(owner, half)).id == half.id
    assert [known(owner, each.id).offset for each in (theirs, half)] == [0, 1]


@pytest.mark.rule(2)
async def test_missing_append_time_reads_log_back(harness: Harness) -> None:
    owner = await harness.owner()
    harness.partition.half.script.append(without_time)
    id = await harness.prepared(owner)
    harness.partition.op.script.append(without_time)
    await commit(owner, id)
    transaction = known(owner, id)
    assert transaction.prepared_at_ms == harness.kafka.visible("txbroker.half")[0].timestamp_ms
    assert transaction.verdict.at_ms == harness.kafka.visible("txbroker.op")[0].timestamp_ms


@pytest.mark.rule(2)
async def test_contiguous_append_is_not_read_back(harness: Harness) -> None:
    owner = await harness.owner()
    calls = harness.partition.calls
    before = calls.count("half.read") + calls.count("op.read")
    for _ in range(3):
        await harness.committed(owner)
    assert calls.count("half.read") + calls.count("op.read") == before


@pytest.mark.rule(2)
async def test_idle_owner_applies_records_of_others(harness: Harness) -> None:
    await harness.owner()
    half = harness.half(message("theirs"))
    harness.zombie_half(half)
    harness.zombie_mark(MarkerKind.COMMIT, half.id, group=GROUP)
    await until(lambda: harness.events.promotions == [half.id])
    assert harness.visible() == ["theirs"]


@pytest.mark.rule(2)
def test_idle_owner_reads_every_second() -> None:
    assert owner_module.IDLE_S <= 1.0


@pytest.mark.rule(3)
async def test_decision_is_answered_after_marker_is_applied(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    gate = Gate()
    harness.partition.op.script.append(gate.append_unheard)
    deciding = asyncio.create_task(commit(owner, id))
    await gate.reached.wait()
    await settled()
    assert not deciding.done()
    assert known(owner, id).verdict.decision is None
    gate.open()
    assert (await deciding).decision == "commit"
    assert known(owner, id).verdict.op_offset == 0


@pytest.mark.rule(3)
async def test_decision_is_not_answered_before_gap_is_read(harness: Harness) -> None:
    owner = await harness.owner(half_retention_ms=1 << 60)
    id = await harness.prepared(owner)
    log = harness.partition.op
    log.script.append(after(lambda: harness.zombie_mark(MarkerKind.CHECK, id)))
    log.bounds_gate.clear()
    deciding = asyncio.create_task(commit(owner, id))
    await until(lambda: log.script == type(log.script)())
    await settled()
    assert not deciding.done()
    log.bounds_gate.set()
    assert (await deciding).decision == "commit"


@pytest.mark.rule(3)
async def test_repeated_decision_writes_nothing(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    await commit(owner, id)
    await until(lambda: harness.events.promotions == [id])
    assert (await commit(owner, id)).state is State.PROMOTED
    with pytest.raises(AlreadyDecided):
        await roll_back(owner, id)
    with pytest.raises(WrongGroup):
        await commit(owner, id, group="another")
    assert harness.kinds() == ["commit"]


@pytest.mark.rule(3)
async def test_not_found_after_reading_half_to_current_end(harness: Harness) -> None:
    owner = await harness.owner()
    await owner.close()
    theirs = harness.half()
    harness.zombie_half(theirs)
    assert (await owner.api.get(theirs.id)).offset == 0
    calls = harness.partition.calls
    before = calls.count("half.bounds")
    with pytest.raises(NotFound):
        await owner.api.get(harness.half().id)
    assert calls.count("half.bounds") == before + 1


@pytest.mark.rule(3)
async def test_not_found_waits_for_end_of_half(harness: Harness) -> None:
    owner = await harness.owner()
    log = harness.partition.half
    log.bounds_gate.clear()
    half = harness.half()
    deciding = asyncio.create_task(commit(owner, half.id))
    await settled()
    assert not deciding.done()
    harness.zombie_half(half)
    log.bounds_gate.set()
    assert (await deciding).decision == "commit"


@pytest.mark.rule(3)
async def test_silent_kafka_never_means_not_found(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.go_down()
    with pytest.raises(OwnerUnavailable):
        await commit(owner, harness.half().id)
    harness.kafka.come_up()


@pytest.mark.rule(4)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("commit", {"group": "another"}),
        ("check", {"round": 2, "number": 1, "reason": "asked"}),
        ("check", {"round": 1, "number": 2, "reason": "asked"}),
        ("returned", {"round": 1, "number": 1}),
        ("later", {"round": 1, "number": 1, "later_s": 9.0}),
        ("park", {"round": 1}),
        ("revive", {"round": 1}),
    ],
)
async def test_illegal_marker_is_counted_without_effect(
    harness: Harness, kind: str, fields: dict[str, object]
) -> None:
    owner, id = await harness.new_pending()
    before = structs.asdict(known(owner, id))
    harness.zombie_mark(kind, id, **fields)
    await until(lambda: harness.events.effects() == [Effect.ILLEGAL])
    assert structs.asdict(known(owner, id)) == before


@pytest.mark.rule(4)
async def test_second_marker_loses_and_is_counted(harness: Harness) -> None:
    owner, id = await harness.new_committed()
    harness.zombie_mark(MarkerKind.ROLLBACK, id, group=GROUP)
    await until(lambda: harness.events.effects() == [Effect.CONFLICT])
    await until(lambda: harness.visible() == [id])
    assert known(owner, id).verdict.decision == "commit"


@pytest.mark.rule(4)
async def test_first_of_contrary_markers_wins(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    first, second = await asyncio.gather(
        roll_back(owner, id), commit(owner, id), return_exceptions=True
    )
    assert not isinstance(first, BaseException)
    assert isinstance(second, AlreadyDecided)
    assert harness.kinds() == ["rollback", "commit"]


@pytest.mark.rule(4)
async def test_owner_checks_state_before_append(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    with pytest.raises(WrongGroup):
        await commit(owner, id, group="another")
    with pytest.raises(NotFound):
        await commit(owner, harness.half().id)
    assert harness.kinds() == []


@pytest.mark.rule(5)
async def test_marker_before_half_waits(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.half(message("late"))
    harness.zombie_mark(MarkerKind.COMMIT, half.id, group=GROUP)
    await until(lambda: owner.ledger.op_position == 1)
    assert harness.events.effects() == [Effect.WAITING]
    assert (await prepare(owner, half)).state is State.COMMITTED
    await until(lambda: harness.visible() == ["late"])


@pytest.mark.rule(5)
async def test_later_commit_waits_for_unread_half(harness: Harness) -> None:
    owner, later = await harness.new_pending(message("later"), order_key="k")
    earlier = harness.half(message("earlier"), order_key="k")
    harness.partition.half.bounds_gate.clear()
    # An owner that does not know yet that it was fenced stores both, and acknowledges the commit.
    harness.zombie_half(earlier)
    harness.zombie_mark(MarkerKind.COMMIT, earlier.id, group=GROUP)
    await commit(owner, later)
    await settled()
    assert harness.events.effects() == [Effect.WAITING]
    assert harness.visible() == []
    harness.partition.half.bounds_gate.set()
    await until(lambda: len(harness.visible()) == 2)
    assert harness.visible() == ["earlier", "later"]


@pytest.mark.rule(5)
async def test_commit_without_half_delays_nothing(harness: Harness) -> None:
    owner = await harness.owner()
    harness.zombie_mark(MarkerKind.COMMIT, harness.half().id, group=GROUP)
    for number in range(3):
        await harness.committed(owner, message(str(number)))
    await until(lambda: harness.visible() == ["0", "1", "2"])
    assert harness.events.effects() == [Effect.WAITING]


@pytest.mark.rule(5)
async def test_waiting_marker_expires_by_half_log_clock(harness: Harness) -> None:
    harness.monkeypatch.setattr(ledger_module, "WAITING_SWEEP_MIN", 0)
    owner = await harness.owner()
    late = harness.half(message("late"))
    harness.zombie_mark(MarkerKind.COMMIT, late.id, group=GROUP)
    # Op's log clock runs far ahead of half's, and then another half message comes.
    harness.clock.advance(10 * WINDOW_MS / 1000)
    harness.zombie_mark(MarkerKind.PARK, harness.half().id, round=1)
    harness.clock.advance(-10 * WINDOW_MS / 1000)
    await until(lambda: owner.ledger.op_position == 2)
    harness.zombie_half(harness.half())
    harness.zombie_half(late)
    await until(lambda: harness.visible() == ["late"])


@pytest.mark.rule(5, 12)
async def test_takeover_reads_end_of_op_before_half(harness: Harness) -> None:
    await (await harness.owner()).close()
    await harness.owner()
    asked = [call for call in harness.partition.calls if call.endswith("bounds")]
    assert asked[:2] == ["op.bounds", "half.bounds"]


@pytest.mark.rule(7)
async def test_other_content_in_gap_is_a_conflict(harness: Harness) -> None:
    owner = await harness.owner()
    mine, theirs = harness.half(message("mine")), message("theirs")
    harness.partition.half.script.append(
        after(lambda: harness.zombie_half(structs.replace(mine, messages=(theirs,))))
    )
    with pytest.raises(IdConflict):
        await prepare(owner, mine)
    await commit(owner, mine.id)
    await until(lambda: harness.visible() == ["theirs"])


# --- records of other clients --------------------------------------------------------------------

NEWER = RECORD_VERSION + 1


def newer(harness: Harness, log: str, partition: int) -> Record:
    """Return what a newer version writes about a transaction of a partition."""
    id = make_id(partition, harness.clock.now_ms(), 7)
    half = harness.half(Message("t", b"k", b"v", partition=0), id=id)
    if log == "op":
        return encode_marker(structs.replace(marker(MarkerKind.COMMIT, id), v=NEWER, group=GROUP))
    if log == "half":
        return encode_half(half, NEWER)[0]
    return encode_kept(ParkedCopy(half, 0, 1, State.PENDING), NEWER)[0]


async def write(harness: Harness, log: str, *records: Record, inside: bool) -> None:
    """Write as another client, inside of a Kafka transaction or outside."""
    if inside:
        harness.kafka.transact(f"txbroker.{log}", 0, records)
    else:
        await harness.kafka.append(f"txbroker.{log}", 0, records)


@pytest.mark.rule(10)
async def test_foreign_copy_of_checkpoint_repeats_no_promotion(harness: Harness) -> None:
    owner, first = await harness.new_committed()
    await until(lambda: harness.visible() == [first])
    stale = harness.progress()
    second = await harness.committed(owner)
    await until(lambda: harness.visible() == [first, second])
    await settled()
    await owner.close()
    await write(harness, "checkpoint", encode_progress(stale), inside=False)
    third = await harness.committed(await harness.owner())
    await until(lambda: third in harness.visible())
    assert harness.visible() == [first, second, third]
    assert harness.events.foreigners == ["checkpoint"]


@pytest.mark.rule(10)
async def test_missing_checkpoint_named_by_snapshot_stops(harness: Harness) -> None:
    owner, first = await harness.new_committed()
    await until(lambda: harness.visible() == [first])
    await settled()
    end = harness.kafka.partition("txbroker.checkpoint", 0).end
    assert await snapshot(owner)
    second = await harness.prepared(owner)
    await owner.close()
    # As compaction leaves it some time after a tombstone under the key of the progress.
    harness.kafka.truncate("txbroker.checkpoint", before=end)
    with pytest.raises(InvariantBroken, match="a snapshot with a checkpoint"):
        await harness.owner()
    assert second not in harness.visible()


@pytest.mark.rule(10)
async def test_snapshot_names_committed_checkpoints_only(harness: Harness) -> None:
    """Or the partition would stop once compaction has removed an older claim."""
    begun = asyncio.Event()

    async def hangs(inner: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        begun.set()
        return await asyncio.Future()

    owner = await harness.owner()
    harness.partition.writes.append(hangs)
    first = await harness.committed(owner)
    await begun.wait()
    end = harness.kafka.partition("txbroker.checkpoint", 0).end
    assert await snapshot(owner)
    await owner.close()
    harness.kafka.truncate("txbroker.checkpoint", before=end)
    await harness.owner()
    await until(lambda: harness.visible() == [first])


@pytest.mark.rule(27)
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(
    ("log", "inside", "partition"),
    [
        ("half", True, 0),
        ("half", False, 1),
        ("op", True, 0),
        ("op", False, 1),
        ("parked", False, 0),
        ("parked", True, 1),
    ],
)
async def test_foreign_records_stop_nothing(
    harness: Harness, log: str, inside: bool, partition: int, running: bool
) -> None:
    owner, first = await harness.new_committed()
    if not running:
        await owner.close()
    await write(harness, log, newer(harness, log, partition), inside=inside)
    if not running or log == "parked":
        await owner.close()
        owner = await harness.owner()
    second = await harness.committed(owner)
    await until(lambda: harness.visible() == [first, second])
    assert log in harness.events.foreigners
    assert not harness.stops


@pytest.mark.rule(27)
@pytest.mark.parametrize("log", ["half", "op"])
@pytest.mark.parametrize(
    ("inside", "partition", "stops"), [(False, 0, True), (True, 0, False), (False, 1, False)]
)
async def test_foreign_records_before_first_claim_stop_nothing(
    harness: Harness, log: str, inside: bool, partition: int, stops: bool
) -> None:
    await write(harness, log, newer(harness, log, partition), inside=inside)
    if stops:
        await harness.truncated("the checkpoint topic has no record")
    else:
        first = await harness.committed(await harness.owner())
        await until(lambda: harness.visible() == [first])


@pytest.mark.rule(27)
async def test_newer_marker_with_wrong_key_stops_nothing(harness: Harness) -> None:
    owner = await harness.owner()
    harness.zombie_op(Record(b"x", b'{"v": %d}' % NEWER))
    first = await harness.committed(owner)
    await until(lambda: harness.visible() == [first])
    assert (harness.events.foreigners, harness.stops) == (["op"], [])


@pytest.mark.rule(27)
@pytest.mark.parametrize("inside", [True, False])
async def test_tombstone_removes_newer_copy(harness: Harness, inside: bool) -> None:
    await (await harness.owner()).close()
    copy = newer(harness, "parked", 0)
    await write(harness, "parked", copy, inside=True)
    with pytest.raises(NewerRecord, match="repair"):
        await harness.owner()
    await write(harness, "parked", Record(copy.key, None), inside=inside)
    first = await harness.committed(await harness.owner())
    await until(lambda: harness.visible() == [first])


@pytest.mark.rule(27)
async def test_newer_copy_is_skipped_by_operator(harness: Harness) -> None:
    await (await harness.owner()).close()
    await write(harness, "parked", newer(harness, "parked", 0), inside=True)
    (stored,) = harness.kafka.visible("txbroker.parked")
    await write(harness, "checkpoint", encode_skip("parked", stored, "me", "why"), inside=False)
    first = await harness.committed(await harness.owner())
    await until(lambda: harness.visible() == [first])


@pytest.mark.rule(10)
async def test_foreign_tombstone_removes_no_copy(harness: Harness) -> None:
    await (await harness.owner()).close()
    half = harness.half(Message("t", b"k", b"v", partition=0))
    (copy,) = encode_kept(ParkedCopy(half, 0, harness.clock.now_ms(), State.PARKED))
    await write(harness, "parked", copy, inside=True)
    await write(harness, "parked", Record(copy.key, None), inside=False)
    copies = await read_copies(harness.door.partition(0), ())
    assert [kept.half.id for kept in copies.whole] == [half.id]
    assert (copies.foreign, [each.record.offset for each in copies.set_aside]) == (1, [2])
