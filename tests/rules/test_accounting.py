"""Records that are gone, and nothing that an owner has written down accounts for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import structs

from tests.rules.harness import (
    DAY_MS,
    GROUP,
    WINDOW_MS,
    Harness,
    commit,
    forget_bodies,
    known,
    message,
    partition,
    prepare,
    records,
    roll_back,
    snapshot,
    standing_of,
    until,
)
from txbroker.contract.service import PrepareRequest
from txbroker.core.encoding import encode_progress
from txbroker.core.records import Half, Message, Record, State
from txbroker.core.snapshot import SnapshotCapture, find_whole
from txbroker.door.protocols import PromotionTxn, PromotionTxnHandle
from txbroker.door.writing import Unknown
from txbroker.errors import BodyLost, KafkaUnavailable
from txbroker.proxy.cluster.views import summary
from txbroker.proxy.partition import owner as owner_module
from txbroker.proxy.partition import snapshots as snapshots_module
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.proxy.partition.snapshots import SnapshotWriter
from txbroker.testing.door import MemoryPartitionDoor

LOGS = ["half", "op"]


@pytest.fixture
def _no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every owner were killed before its first one."""
    monkeypatch.setattr(SnapshotWriter, "due", False)


# --- the first snapshot ----------------------------------------------------------------------


def written(harness: Harness, owner: PartitionOwner) -> tuple[int, int] | None:
    """Return the half position and the progress that in the newest snapshot, once no other
    one is due."""
    if owner._snapshots.due:
        return None
    closing = find_whole(records(harness, "checkpoint"))[0].closing
    return closing.half, closing.progress


@pytest.mark.rule(11)
async def test_first_records_make_snapshot_due(harness: Harness) -> None:
    harness.monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1000)
    id = await harness.prepared(owner)
    await until(lambda: harness.events.snapshots == [1])
    assert not owner._snapshots.due
    await harness.prepared(owner)
    assert not owner._snapshots.due
    await harness.delete(owner, half=1)
    again = await harness.owner()
    assert harness.events.losses == [1]
    assert known(again, id).lost


@pytest.mark.rule(10)
async def test_first_checkpoint_makes_snapshot_due(harness: Harness) -> None:
    """Without it a deletion could not be detected."""
    harness.monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1000)
    await harness.prepared(owner)
    await until(lambda: harness.events.snapshots == [1])
    assert await harness.committed(owner)
    await until(lambda: written(harness, owner) == (2, 1))


async def test_existing_snapshot_makes_none_due(harness: Harness) -> None:
    owner = await harness.owner(snapshot_records_min=1000)
    await harness.prepared(owner)
    assert owner._snapshots.due
    assert await snapshot(owner)
    again = await harness.restarted(owner, snapshot_records_min=1000)
    await harness.prepared(again)
    assert not again._snapshots.due


async def test_empty_partition_makes_no_snapshot_due(harness: Harness) -> None:
    owner = await harness.owner()
    assert not owner._snapshots.due


# --- without any snapshot --------------------------------------------------------------------


@pytest.mark.rule(10)
@pytest.mark.usefixtures("_no_snapshots")
@pytest.mark.parametrize(("topic", "days"), [("half", 0), ("half", 30), ("op", 0)])
async def test_unaccounted_records_stop_partition(harness: Harness, topic: str, days: int) -> None:
    """Also when they are old: no owner has lived to copy them before retention took them."""
    owner, id = await harness.new_pending()
    if topic == "op":
        harness.zombie_mark("check", id, round=1, number=1, reason="due")
        await until(lambda: owner.ledger.op_position == 1)
    await harness.delete(owner, days=days, **{topic: 1})
    for _ in range(2):
        await harness.truncated(rf"{topic} topic begins at offset 1.*only to 0")


@pytest.mark.rule(10)
@pytest.mark.parametrize("days", [1, 20])
async def test_deleted_markers_after_snapshot_stop_partition(harness: Harness, days: int) -> None:
    """A rollback writes no checkpoint: its decision is unknown afterwards."""
    owner, id = await harness.new_pending()
    assert await snapshot(owner)
    harness.zombie_mark("rollback", id)
    await until(lambda: owner.ledger.op_position == 1)
    await harness.delete(owner, half=1, op=1, days=days)
    why = "no owner has read" if days == 1 else "their transactions are unknown"
    await harness.truncated(why)


@pytest.mark.rule(28)
async def test_rollback_before_kill_is_accounted_for(harness: Harness) -> None:
    """It writes no progress; a snapshot is due all the same once a minute is over."""
    harness.monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1000)
    id = await harness.prepared(owner)
    await until(lambda: harness.events.snapshots == [1])
    harness.advance(59)
    harness.zombie_mark("rollback", id)
    await until(lambda: owner.ledger.op_position == 1)
    assert not owner._snapshots.due
    harness.advance(1)
    await until(lambda: harness.events.snapshots == [1, 0])
    await harness.delete(owner, half=1, op=1, days=20)
    late = await harness.committed(await harness.owner())
    await until(lambda: harness.visible() == [late])


@pytest.mark.rule(28)
async def test_old_snapshot_is_renewed_before_retention(harness: Harness) -> None:
    """Also with many open transactions, where few records make none due."""
    owner = await harness.owner(snapshot_records_min=1)
    for _ in range(8):
        await harness.prepared(owner)
    assert await snapshot(owner)
    harness.advance(3599)
    await harness.prepared(owner)
    assert not owner._snapshots.due
    harness.advance(1)
    assert owner._snapshots.due


# --- half messages that an owner has read, and no snapshot holds -------------------------------


@pytest.fixture
def _unnoticed(harness: Harness) -> None:
    """As if owners were killed before they look whether records were deleted."""
    harness.monkeypatch.setattr(owner_module, "EDGES_S", 600.0)


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_unnoticed")
@pytest.mark.parametrize("days", [0, 20])
async def test_checkpoint_alone_does_not_account_for_recent(harness: Harness, days: int) -> None:
    """The checkpoint shows that an owner read the half messages; its memory is lost."""
    owner = await harness.owner()
    for _ in range(8):
        await harness.prepared(owner)
    assert await snapshot(owner)
    for _ in range(3):
        await harness.prepared(owner)
    harness.kafka.truncate("txbroker.half", before=11)
    id = await harness.committed(owner)
    await until(lambda: harness.visible() == [id])
    assert (harness.progress().half, harness.progress().accounted) == (12, 0)
    await owner.close()
    harness.advance(days * DAY_MS / 1000)
    for _ in range(2):
        await harness.truncated(r"begins at offset 11.*account only for .* below 8")


async def judged(harness: Harness, stops: bool) -> None:
    """See that the next owner stops, or that nothing is lost."""
    if stops:
        await harness.truncated("their transactions are unknown")
    else:
        await harness.owner()
        assert harness.events.losses == []


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_unnoticed")
@pytest.mark.parametrize(("windows", "stops"), [(0, True), (1.5, True), (2.1, False)])
async def test_settled_is_accounted_for_during_dedup_window(
    harness: Harness, windows: float, stops: bool
) -> None:
    """Or the same prepare again would be a new transaction, visible once more."""
    owner = await harness.owner()
    assert await harness.prepared(owner)
    assert await snapshot(owner)
    await roll_back(owner, next(iter(owner.ledger.index.transactions)))
    half = harness.half()
    await prepare(owner, half)
    await commit(owner, half.id)
    await until(lambda: harness.visible() == [half.id])
    assert harness.progress().accounted == 2
    await harness.delete(owner, half=2)
    harness.advance(windows * WINDOW_MS / 1000)
    await judged(harness, stops)


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_unnoticed")
@pytest.mark.parametrize(("before", "stops"), [(2, False), (3, True)])
async def test_deleted_is_older_than_first_kept_record(
    harness: Harness, before: int, stops: bool
) -> None:
    """Or an outage that ends as retention reaches the last records would stop the partition."""
    owner = await harness.owner()
    await harness.prepared(owner)
    assert await snapshot(owner)
    await roll_back(owner, next(iter(owner.ledger.index.transactions)))
    ids = [await harness.committed(owner), await harness.committed(owner)]
    harness.advance(3 * WINDOW_MS / 1000)
    ids.append(await harness.committed(owner))
    await until(lambda: harness.visible() == ids)
    await harness.delete(owner, half=before)
    await judged(harness, stops)


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_unnoticed")
async def test_copy_accounts_for_half_message(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("kept"), message("too", topic="u"))
    owner._retention._copy_out(known(owner, id))
    await until(lambda: len(harness.parked()) == 2)
    assert harness.progress().accounted == 2
    await harness.prepared(owner)
    await harness.delete(owner, half=2)
    again = await harness.owner()
    await commit(again, id)
    await until(lambda: harness.visible() == ["kept"])
    await harness.delete(again, half=3)
    await harness.truncated("their transactions are unknown")


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_unnoticed")
async def test_copy_accounts_for_nothing_before_it(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    id = await harness.prepared(owner)
    owner._retention._copy_out(known(owner, id))
    await until(lambda: len(harness.parked()) == 1)
    assert harness.progress().accounted == 0
    await harness.delete(owner, half=2)
    await harness.truncated("account only for offsets below 0")


@pytest.mark.rule(28)
async def test_deletion_makes_snapshot_due(harness: Harness) -> None:
    """Also without a loss: a repeated prepare must be recognised."""
    harness.monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1000)
    first = await harness.committed(owner)
    await until(lambda: written(harness, owner) == (1, 1))
    half = harness.half()
    await prepare(owner, half)
    await commit(owner, half.id)
    await until(lambda: harness.visible() == [first, half.id])
    assert not owner._snapshots.due
    harness.kafka.truncate("txbroker.half", before=2)
    await until(lambda: written(harness, owner) == (2, 2))
    again = await harness.restarted(owner, snapshot_records_min=1000)
    assert (await again.api.get(half.id)).state == "promoted"
    repeated = standing_of(again, PrepareRequest(GROUP, half.messages, half.id, None))
    assert repeated is not None
    assert not repeated.created
    assert harness.events.losses == []


@pytest.mark.rule(28)
async def test_loss_makes_snapshot_due_and_counts_once(harness: Harness) -> None:
    harness.monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1)
    ids = [await harness.prepared(owner)]
    await until(lambda: harness.events.snapshots == [1])
    ids.append(await harness.prepared(owner))
    await until(lambda: harness.events.snapshots == [1, 2])
    forget_bodies(owner)
    harness.kafka.truncate("txbroker.half", before=2)
    await until(lambda: harness.events.losses == [2])
    # As no record has come since, it stands at the same place as the one before.
    await until(lambda: harness.events.snapshots == [1, 2, 2])
    await owner.close()
    for _ in range(2):
        again = await harness.owner(snapshot_records_min=1000)
        for id in ids:
            shown = summary(await again.api.get(id))
            assert (shown.state, shown.cause and shown.cause.code) == ("pending", "body_lost")
        await again.close()
    assert sum(harness.events.losses) == 2


async def lost(
    harness: Harness, owner: PartitionOwner, *messages: Message, **fields: object
) -> Half:
    """Prepare a transaction, and delete all half messages that are there by then."""
    half = harness.half(*messages, **fields)
    await prepare(owner, half)
    forget_bodies(owner)
    harness.kafka.truncate("txbroker.half", before=owner.ledger.half_position)
    await until(lambda: known(owner, half.id).lost)
    return half


@pytest.mark.rule(28)
@pytest.mark.parametrize("restarted", [False, True])
async def test_lost_transaction_takes_rollback_or_messages(
    harness: Harness, restarted: bool
) -> None:
    owner = await harness.owner()
    first = await lost(harness, owner, message("first"), dedup_key="first")
    second = await lost(harness, owner)
    if restarted:
        assert await snapshot(owner)
        await owner.close()
        owner = await harness.owner()
    for half in (first, second):
        with pytest.raises(BodyLost, match="roll it back") as caught:
            await commit(owner, half.id)
        assert caught.value.details == {"id": half.id, "state": "pending"}
    for id, key in ((second.id, None), (None, "first")):
        half = second if id else first
        with pytest.raises(BodyLost):
            standing_of(owner, PrepareRequest(GROUP, half.messages, id, key))
    with pytest.raises(BodyLost):
        await prepare(owner, structs.replace(first, id=harness.half().id))
    assert harness.kinds() == []
    assert (await commit(owner, first.id, messages=first.messages)).decision == "commit"
    assert (await roll_back(owner, second.id)).state == "rolled_back"
    await until(lambda: harness.visible() == ["first"])
    await until(lambda: known(owner, first.id).state == "promoted")


@pytest.mark.rule(28)
async def test_lost_committed_stays_refused_across_restarts(harness: Harness) -> None:
    harness.kafka.set_leaderless("t", 0)
    owner, id = await harness.new_pending()
    assert await snapshot(owner)
    await commit(owner, id)
    await harness.delete(owner, half=1)
    harness.kafka.set_leaderless("t")
    for _ in range(2):
        again = await harness.owner()
        await until(lambda again=again: known(again, id).state is State.REFUSED)
        shown = summary(await again.api.get(id))
        assert shown.cause is not None
        assert (shown.cause.code, shown.decision) == ("body_lost", "commit")
        assert (await commit(again, id)).state == "refused"
        await again.close()
    assert harness.visible() == []
    assert harness.events.losses == [1]


@pytest.mark.rule(28)
async def test_deletion_during_recovery_is_judged_again(harness: Harness) -> None:
    owner = await harness.owner()
    assert await harness.prepared(owner)
    assert await snapshot(owner)
    id = await harness.committed(owner)
    await until(lambda: harness.visible() == [id])
    await owner.close()
    again = harness.make()
    log = harness.partition.half
    bounds = log.inner.bounds

    async def before_it_is_read(*, confirmed: bool = True) -> tuple[int, int]:
        found = await bounds(confirmed=confirmed)
        harness.kafka.truncate("txbroker.half", before=2)
        return found

    log.inner.bounds = before_it_is_read  # type: ignore[method-assign]
    with pytest.raises(KafkaUnavailable, match="retention deleted"):
        await again.open()
    log.inner.bounds = bounds  # type: ignore[method-assign]
    await harness.truncated("their transactions are unknown")


@pytest.mark.rule(28)
async def test_restored_records_are_not_lost(harness: Harness) -> None:
    owner = await harness.owner()
    stored = partition(harness, "half")
    id = await harness.prepared(owner, message("back"))
    entries = list(stored._entries)
    forget_bodies(owner)
    harness.kafka.truncate("txbroker.half", before=1)
    await until(lambda: known(owner, id).lost)
    assert await snapshot(owner)
    await owner.close()
    stored.begin, stored._entries = 0, entries
    await commit(await harness.owner(), id)
    await until(lambda: harness.visible() == ["back"])
    assert harness.events.losses == [1]


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_no_snapshots", "_unnoticed")
async def test_retention_under_older_proxy_stops_nothing(harness: Harness) -> None:
    """It renewed no snapshot by age, and its checkpoint does not account for anything."""
    owner, first = await harness.new_committed()
    await until(lambda: harness.visible() == [first])
    await owner.close()
    newest = structs.replace(harness.progress(), accounted=None)
    harness.kafka.transact(
        "txbroker.checkpoint", 0, [encode_progress(newest)], transactional_id="txbroker.half-0"
    )
    harness.kafka.truncate("txbroker.half", before=1)
    later = await harness.committed(await harness.owner())
    await until(lambda: harness.visible() == [first, later])


async def older(harness: Harness) -> None:
    """Prepare a transaction, and write a snapshot without a time."""
    made = SnapshotCapture.__init__

    def without_time(self: SnapshotCapture, *args: object) -> None:
        made(self, *args[:-1])  # type: ignore[arg-type]

    owner = await harness.owner()
    await harness.prepared(owner)
    with harness.monkeypatch.context() as patch:
        patch.setattr(SnapshotCapture, "__init__", without_time)
        assert await snapshot(owner)
    await owner.close()


@pytest.mark.rule(28)
@pytest.mark.usefixtures("_no_snapshots", "_unnoticed")
async def test_new_snapshot_after_older_proxy_accounts(harness: Harness) -> None:
    """Killed before its first snapshot, it has written progress."""
    await older(harness)
    owner = await harness.owner()
    for _ in range(5):
        await harness.prepared(owner)
    harness.kafka.truncate("txbroker.half", before=6)
    late = await harness.committed(owner)
    await until(lambda: harness.visible() == [late])
    await owner.close()
    await harness.truncated("their transactions are unknown")


async def test_snapshot_of_older_proxy_is_replaced_at_once(harness: Harness) -> None:
    await older(harness)
    again = await harness.owner(snapshot_records_min=1000)
    assert again._snapshots.due


@pytest.mark.rule(10)
async def test_either_log_dates_last_read(harness: Harness) -> None:
    """The last half message that was read is old, the last marker is not."""
    owner, id = await harness.new_pending()
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: len(harness.parked()) == 1)
    harness.advance(8 * DAY_MS / 1000)
    await commit(owner, id)
    await until(lambda: harness.visible() == [id])
    await owner.close()
    harness.zombie_half(harness.half())
    harness.kafka.truncate("txbroker.half", before=2)
    await harness.truncated("no owner has read")


# --- a recreated checkpoint topic ------------------------------------------------------------


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", LOGS)
async def test_recreated_checkpoint_topic_stops_partition(harness: Harness, topic: str) -> None:
    """Without the progress all that was promoted would be promoted again."""
    owner, id = await harness.new_committed()
    await until(lambda: harness.visible() == [id])
    await owner.close()
    harness.kafka.recreate_topic("txbroker.checkpoint")
    other = "op" if topic == "half" else "half"
    harness.kafka.recreate_topic(f"txbroker.{other}")
    # It stays so: nothing is written that would make it look like an old one.
    for _ in range(2):
        await harness.truncated("the checkpoint topic has no record")
    assert harness.visible() == [id]
    assert harness.kafka.visible("txbroker.checkpoint") == []


# --- a recreated parked topic ----------------------------------------------------------------


@pytest.mark.rule(10)
async def test_recreated_parked_topic_stops_if_refused(harness: Harness) -> None:
    """Only its copy shows that it was not promoted."""
    owner = await harness.owner()
    await harness.refused(owner)
    # Later promotions do not change this.
    await harness.committed(owner, message("other", topic="u"))
    await until(lambda: harness.visible("u") == ["other"])
    await owner.close()
    await (await harness.owner()).close()
    harness.kafka.recreate_topic("txbroker.parked")
    for _ in range(2):
        await harness.truncated("the parked topic has no record")


@pytest.mark.rule(10)
async def test_recreated_parked_topic_without_refused_is_fine(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("old"))
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: len(harness.parked()) == 1)
    await owner.close()
    harness.kafka.recreate_topic("txbroker.parked")
    again = await harness.owner()
    await commit(again, id)
    await until(lambda: harness.visible() == ["old"])


@pytest.mark.rule(10)
async def test_lost_promotion_refuses_nothing(harness: Harness) -> None:
    """Or the next owner would miss a copy that there never was."""
    owner, id = await harness.new_pending(message("big" * 100))
    harness.kafka.set_message_bytes_max("t", 100)

    async def lost(inner: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        # In the meantime the target is fixed.
        harness.kafka.set_message_bytes_max("t", 1 << 20)
        harness.door.targets.forget("t")
        raise Unknown

    harness.partition.writes.append(lost)
    await commit(owner, id)
    await until(lambda: id in harness.events.promotions)
    assert not harness.progress().refused
    await owner.close()
    assert harness.parked() == []
    await harness.owner()


# --- a clean stop --------------------------------------------------------------------------------

# --- a clean stop ----------------------------------------------------------------------------


@pytest.mark.rule(28)
@pytest.mark.parametrize("last", ["rollback", "check"])
async def test_clean_stop_accounts_for_all_records(harness: Harness, last: str) -> None:
    """A rollback writes no checkpoint; undecided transactions are reported lost by id."""
    harness.monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1000)
    first = await harness.committed(owner)
    await until(lambda: harness.visible() == [first] and not owner._snapshots.due)
    id = await harness.prepared(owner)
    harness.zombie_mark(
        last, id, **({"round": 1, "number": 1, "reason": "due"} if last == "check" else {})
    )
    await until(lambda: owner.ledger.op_position == 2)
    forget_bodies(owner)
    await owner.close(last_snapshot=True)
    harness.advance(20 * DAY_MS / 1000)
    for name in LOGS:
        harness.kafka.truncate(f"txbroker.{name}", before=2)
    again = await harness.owner()
    if last == "check":
        assert known(again, id).lost
    assert harness.events.losses == ([1] if last == "check" else [])
    late = await harness.committed(again)
    await until(lambda: harness.visible() == [first, late])


async def test_clean_stop_without_records_writes_no_snapshot(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    assert await snapshot(owner)
    await owner.close(last_snapshot=True)
    assert harness.events.snapshots == [1]


async def test_stop_bounds_wait_for_last_snapshot(harness: Harness) -> None:
    harness.monkeypatch.setattr(snapshots_module, "LAST_S", 0.01)

    async def hangs(inner: MemoryPartitionDoor, records: Sequence[Record]) -> None:
        await asyncio.Event().wait()

    owner = await harness.owner()
    await harness.prepared(owner)
    harness.partition.stores.append(hangs)
    async with asyncio.timeout(5.0):
        await owner.close(last_snapshot=True)
    assert (harness.events.snapshots, harness.events.snapshot_failures) == ([], 1)


async def test_suspended_owner_writes_no_last_snapshot(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    owner.suspend()
    calls = harness.partition.calls
    await owner.close(last_snapshot=True)
    assert "store" not in calls


# --- offsets that hold no record, at the end of a log ----------------------------------------


@pytest.mark.rule(28)
@pytest.mark.parametrize("topic", LOGS)
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
async def test_empty_offsets_at_end_are_accounted_for(
    harness: Harness, topic: str, committed: bool, replayed: bool
) -> None:
    """Retention deletes them with earlier records; then nothing shows that they were empty."""
    owner, id = await harness.new_pending()
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: known(owner, id).kept_at)
    harness.zombie_mark("check", id, round=1, number=1, reason="due")
    await until(lambda: known(owner, id).checks.number == 1)
    if replayed:
        await owner.close()
    harness.kafka.transact(f"txbroker.{topic}", 0, [Record(b"x", b"foreign")], committed=committed)
    if replayed:
        owner = await harness.owner()
    half, op = partition(harness, "half").end, partition(harness, "op").end
    await until(lambda: (owner.ledger.half_position, owner.ledger.op_position) == (half, op))
    assert await snapshot(owner)
    await harness.delete(owner, half=half, days=40)
    harness.kafka.truncate("txbroker.op", before=op)
    again = await harness.owner()
    assert known(again, id).checks.number == 1
    await commit(again, id)
    await until(lambda: harness.visible() == [id])


# --- two first owners -----------------------------------------------------------------------


@pytest.mark.rule(10)
async def test_concurrent_first_owners_lose_no_checkpoint(harness: Harness) -> None:
    """The other one may claim and write after the first look at the checkpoint topic."""
    one, two = harness.make(), harness.make()
    found = harness.partition.claimed_before
    asked: list[bool] = []

    async def while_the_other_begins() -> bool:
        before = await found()
        if not asked:
            await one.open()
            await harness.prepared(one)
        asked.append(before)
        return before

    harness.partition.claimed_before = while_the_other_begins  # type: ignore[method-assign]
    await two.open()
    assert asked == [False, True]
