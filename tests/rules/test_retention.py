"""The start of the logs: deleted records, recreated topics, and suspension."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.rules.fakes import Gate, raising
from tests.rules.harness import (
    DAY_MS,
    GROUP,
    Harness,
    commit,
    forget_bodies,
    known,
    message,
    prepare,
    settled,
    snapshot,
    until,
)
from txbroker.contract.service import HalfPartitionState
from txbroker.core.encoding import encode_half, encode_kept
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Claim, MarkerKind, ParkedCopy, Record, Source, State
from txbroker.door.protocols import Claimed, Hanging, LogTruncated
from txbroker.door.writing import Unknown
from txbroker.errors import KafkaUnavailable, NewerRecord, Overloaded, OwnerUnavailable
from txbroker.proxy.partition import owner as owner_module
from txbroker.testing.door import MemoryPartitionDoor

LOGS = ["half", "op"]


# --- deleted ---------------------------------------------------------------------------------


@pytest.mark.rule(25)
async def test_deleted_half_in_memory_is_copied(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("saved"))
    harness.kafka.truncate("txbroker.half", before=1)
    await until(lambda: harness.parked() == [(f"{id}/0".encode(), True)])
    forget_bodies(owner)
    await commit(owner, id)
    await until(lambda: harness.visible() == ["saved"])
    assert harness.events.losses == []
    assert harness.stops == []


async def test_body_stays_in_memory_until_copied(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("saved"))
    harness.partition.writes.append(raising(Unknown()))
    harness.proxy.share = 0
    harness.kafka.truncate("txbroker.half", before=1)
    await until(lambda: id in owner._retention._held)
    await harness.prepared(owner)
    await until(lambda: known(owner, id).kept_at)
    await until(lambda: id not in owner._retention._held or not owner._retention._let_go())
    assert not known(owner, id).lost


@pytest.mark.rule(25)
async def test_deleted_half_without_body_is_lost_and_reported(harness: Harness) -> None:
    owner = await harness.owner()
    lost = [await harness.prepared(owner) for _ in range(3)]
    forget_bodies(owner)
    kept = await harness.prepared(owner)
    harness.kafka.truncate("txbroker.half", before=3)
    await until(lambda: sum(harness.events.losses) == 3)
    assert [known(owner, id).lost for id in [*lost, kept]] == [True] * 3 + [False]
    assert {known(owner, id).state for id in lost} == {State.PENDING}
    await commit(owner, kept)
    await until(lambda: harness.visible() == [kept])


@pytest.mark.rule(10)
@pytest.mark.parametrize("days", [1, 20])
async def test_deleted_young_markers_stop_partition(harness: Harness, days: int) -> None:
    owner = await harness.owner()
    await harness.promoted(owner, 3)
    await harness.delete(owner, half=3, op=3, days=days)
    if days == 1:
        await harness.truncated("younger than its retention")
    else:
        id = await harness.committed(await harness.owner())
        await until(lambda: harness.visible()[3:] == [id])


@pytest.mark.rule(10)
async def test_deleted_unread_half_messages_stop_partition(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.committed(owner)
    await until(lambda: len(harness.visible()) == 1)
    await owner.close()
    for _ in range(2):
        harness.zombie_half(harness.half())
    harness.kafka.truncate("txbroker.half", before=2)
    await harness.truncated("no owner has read")


@pytest.mark.rule(25)
async def test_retention_may_pass_snapshot(harness: Harness) -> None:
    """A quiet partition writes none for longer than half messages are kept."""
    owner, id = await harness.new_pending(message("old"))
    assert await snapshot(owner)
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: len(harness.parked()) == 1)
    late = await harness.prepared(owner, message("late"))
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: len(harness.parked()) == 2)
    await harness.delete(owner, half=2)
    again = await harness.owner()
    assert {known(again, each).state for each in (id, late)} == {State.PENDING}
    assert harness.events.losses == []
    for each in (id, late):
        await commit(again, each)
    await until(lambda: harness.visible() == ["old", "late"])


@pytest.mark.rule(25)
async def test_leftover_copy_is_not_restored(harness: Harness) -> None:
    """The snapshot knows better: it was rolled back before, and forgotten since."""
    owner, id = await harness.new_committed()
    await until(lambda: harness.visible() == [id])
    half = harness.half(id=id)
    harness.advance(1000)
    await harness.prepared(owner)
    assert await snapshot(owner)
    await owner.close()
    copy = encode_kept(ParkedCopy(half, 0, 0, State.PENDING))
    harness.kafka.transact("txbroker.parked", 0, copy)
    harness.kafka.truncate("txbroker.half", before=1)
    again = await harness.owner()
    assert id not in again.ledger.index.transactions
    await until(lambda: harness.parked()[-1] == (f"{id}/0".encode(), False))


@pytest.mark.rule(25)
async def test_next_owner_promotes_copy_made_after_commit(harness: Harness) -> None:
    """Its half message is gone, its marker lies above the progress of the turn that copied it."""
    # The others are committed meanwhile, so the next turn takes only one of them.
    begin, stuck = Gate(), Gate()
    owner = await harness.owner(promotion_limits=PromotionLimits(transactions_max=1))
    first, second, third = [await harness.prepared(owner, message(v)) for v in ("1", "2", "3")]
    harness.partition.writes.extend([begin.write, MemoryPartitionDoor.write, stuck.write])
    await commit(owner, first)
    await begin.reached.wait()
    for id in (second, third):
        await commit(owner, id)
    harness.kafka.truncate("txbroker.half", before=3)
    await until(lambda: {second, third} <= owner.ledger.index.to_keep.keys())
    begin.open()
    await stuck.reached.wait()
    await until(lambda: harness.visible() == ["1", "2"])
    assert (f"{third}/0".encode(), True) in harness.parked()
    await owner.close()
    harness.advance(15 * DAY_MS / 1000)
    await harness.owner()
    await until(lambda: harness.visible() == ["1", "2", "3"])


@pytest.mark.rule(25)
async def test_transaction_decided_before_copy_is_copied(harness: Harness) -> None:
    """Its target takes nothing for longer than half messages are kept."""
    owner, held = await harness.owner(), Gate()
    old = await harness.prepared(owner, message("old", topic="u"))
    other = await harness.prepared(owner)
    harness.partition.writes.append(held.write)
    await commit(owner, other)
    await held.reached.wait()
    harness.kafka.set_leaderless("u", 0)
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: old in owner.ledger.index.to_keep)
    await commit(owner, old)
    held.open()
    await until(lambda: (f"{old}/0".encode(), True) in harness.parked())
    forget_bodies(owner)
    harness.kafka.truncate("txbroker.half", before=2)
    harness.kafka.set_leaderless("u")
    await until(lambda: harness.visible("u") == ["old"])
    assert harness.events.losses == []


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", LOGS)
async def test_retention_during_recovery_stops_nothing(harness: Harness, topic: str) -> None:
    owner = await harness.owner()
    await harness.promoted(owner, 3)
    await owner.close()
    harness.advance(30 * DAY_MS / 1000)
    again = harness.make()
    log = getattr(harness.partition, topic)
    bounds = log.inner.bounds

    async def before_it_is_read(*, confirmed: bool = True) -> tuple[int, int]:
        found = await bounds(confirmed=confirmed)
        log.inner.bounds = bounds
        harness.kafka.truncate(f"txbroker.{topic}", before=2)
        return found

    log.inner.bounds = before_it_is_read
    with pytest.raises(KafkaUnavailable, match="retention deleted"):
        await again.open()
    await harness.owner()


# --- truncated and recreated -------------------------------------------------------------------


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", LOGS)
async def test_snapshot_beyond_end_stops_partition(harness: Harness, topic: str) -> None:
    owner, id = await harness.new_pending()
    await commit(owner, id)
    await until(lambda: harness.visible() == [id])
    for _ in range(2):
        await harness.prepared(owner)
    harness.zombie_mark("check", id, round=1, number=1, reason="due")
    await until(lambda: owner.ledger.op_position == 2)
    assert await snapshot(owner)
    await owner.close()
    harness.kafka.truncate(f"txbroker.{topic}", end=1)
    await harness.truncated("truncated or recreated")


@pytest.mark.rule(10)
@pytest.mark.parametrize("topic", LOGS)
async def test_snapshot_of_another_log_stops_partition(harness: Harness, topic: str) -> None:
    owner, id = await harness.new_pending()
    harness.zombie_mark("check", id, round=1, number=1, reason="due")
    await until(lambda: owner.ledger.op_position == 1)
    assert await snapshot(owner)
    await owner.close()
    old = harness.kafka.visible(f"txbroker.{topic}")
    harness.advance(5.0)
    _recreated(harness, topic, [*old, *old])
    await harness.truncated("another record")


@pytest.mark.rule(10)
@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("topic", LOGS)
async def test_recreated_log_stops_its_owner(harness: Harness, topic: str, more: int) -> None:
    owner = await harness.owner()
    await harness.promoted(owner, 2)
    old = harness.kafka.visible(f"txbroker.{topic}")
    harness.advance(5.0)
    _recreated(harness, topic, (old * 2)[:more] if more < 3 else old * 2)
    await harness.stopped(LogTruncated)


def _recreated(harness: Harness, topic: str, records: list[Record]) -> None:
    harness.kafka.recreate_topic(f"txbroker.{topic}")
    bare = [structs.replace(record, timestamp_ms=-1) for record in records]
    harness.kafka.topics[f"txbroker.{topic}"].partitions[0].append(bare, harness.clock.now_ms())


# --- hanging -----------------------------------------------------------------------------------


async def test_hanging_claim_is_shown_until_it_succeeds(harness: Harness) -> None:
    hangs = asyncio.Event()

    async def hanging(inner: MemoryPartitionDoor, claim: Claim) -> Claimed:
        hangs.set()
        await asyncio.sleep(0)
        raise Hanging("an open transaction")

    owner = await harness.owner()
    harness.partition.writes.append(raising(Unknown()))
    harness.partition.claims.extend([hanging] * 3)
    id = await harness.committed(owner)
    await hangs.wait()
    await until(lambda: owner.phase is HalfPartitionState.HANGING)
    await until(lambda: harness.visible() == [id])
    assert owner.phase is HalfPartitionState.OWNED
    assert harness.events.failures.count("claim") == 3


# --- suspended ---------------------------------------------------------------------------------


@pytest.mark.rule(26)
async def test_suspended_owner_writes_nothing_and_resumes(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    owner.suspend()
    assert owner.phase is HalfPartitionState.SUSPENDED
    before = list(harness.partition.calls)
    with pytest.raises(OwnerUnavailable):
        await harness.prepared(owner)
    with pytest.raises(OwnerUnavailable):
        await commit(owner, id)
    row = owner._context.marker(
        known(owner, id), MarkerKind.CHECK, source=Source.SCHEDULE, number=1
    )
    attempt = asyncio.create_task(owner._op.append_one(row))
    # What others write is seen, and still no turn is begun.
    harness.zombie_mark("commit", id, group=GROUP)
    await until(lambda: known(owner, id).state is State.COMMITTED)
    await settled()
    writes = ("half.append", "op.append", "claim", "store")
    assert [c for c in harness.partition.calls if c in writes] == [c for c in before if c in writes]
    assert harness.partition.turns == []
    assert owner.stuck_since_s() == 0.0
    owner.resume()
    await until(lambda: harness.visible() == [id])
    await attempt
    assert harness.partition.calls.count("claim") == 1
    assert owner.phase is HalfPartitionState.OWNED
    again = await harness.committed(owner)
    await until(lambda: harness.visible() == [id, again])


async def test_call_in_flight_fails_when_owner_is_suspended(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.half()
    harness.partition.half.bounds_gate.clear()
    harness.zombie_half(half)
    asking = asyncio.create_task(commit(owner, half.id))
    await settled()
    owner.suspend()
    harness.partition.half.bounds_gate.set()
    async with asyncio.timeout(1.0):
        with pytest.raises(OwnerUnavailable):
            await asking
    assert known(owner, half.id).state is State.PENDING


@pytest.mark.rule(26)
async def test_owner_resumed_after_takeover_is_fenced(harness: Harness) -> None:
    zombie = await harness.owner()
    id = await harness.prepared(zombie)
    zombie.suspend()
    heir = await harness.owner()
    await commit(heir, id)
    await until(lambda: harness.visible() == [id])
    harness.proxy.ours = False
    zombie.resume()
    await harness.committed(zombie)
    await until(lambda: harness.stops)
    await until(lambda: len(harness.visible()) == 2)
    assert harness.visible()[0] == id


async def test_promotion_of_another_owner_is_not_repeated(harness: Harness) -> None:
    # It does not happen to read what the other wrote before its turn is fenced.
    harness.monkeypatch.setattr(owner_module, "IDLE_S", 60.0)
    first = await harness.owner()
    mine = await harness.committed(first)
    first.suspend()
    second = await harness.owner()
    too_large = await harness.prepared(second, message("x" * 500, topic="u"))
    harness.kafka.set_message_bytes_max("u", 200)
    theirs = await harness.committed(second)
    await commit(second, too_large)
    await until(lambda: harness.events.refusals == [too_large])
    await until(lambda: len(second.ledger.index.settled) == 2)
    standing, copies = harness.progress(), harness.parked()
    await second.close()
    first.resume()
    await until(lambda: len(first.ledger.index.settled) == 2)
    last = await harness.committed(first)
    await until(lambda: last in harness.visible())
    assert harness.visible() == [mine, theirs, last]
    assert first.ledger.index.refused.keys() == {too_large}
    assert harness.parked() == copies
    progress = harness.progress()
    assert (progress.op, progress.half) >= (standing.op, standing.half)


# --- newer, full -------------------------------------------------------------------------------


@pytest.mark.rule(27)
async def test_newer_copy_is_kept_and_stops_partition(harness: Harness) -> None:
    await (await harness.owner()).close()
    (record,) = encode_kept(ParkedCopy(harness.half(), 0, 0, State.PARKED))
    newer = structs.replace(record, headers=(("txb-v", b"9 check kept"), *record.headers[1:]))
    harness.kafka.transact("txbroker.parked", 0, [newer])
    with pytest.raises(NewerRecord, match="upgrade"):
        await harness.owner()
    assert len(harness.kafka.visible("txbroker.parked")) == 1


@pytest.mark.rule(27)
async def test_newer_half_message_stops_takeover(harness: Harness) -> None:
    await (await harness.owner()).close()
    (record,) = encode_half(harness.half())
    newer = structs.replace(record, headers=(("txb-v", b"9 check"), *record.headers[1:]))
    harness.kafka.topics["txbroker.half"].partitions[0].append([newer], harness.clock.now_ms())
    with pytest.raises(NewerRecord):
        await harness.owner()


async def test_one_group_cannot_fill_partition(harness: Harness) -> None:
    owner = await harness.owner(pending_group_max=3)
    halves = [harness.half() for _ in range(10)]
    done = await asyncio.gather(*[prepare(owner, h) for h in halves], return_exceptions=True)
    refused = [each for each in done if isinstance(each, Overloaded)]
    assert len(done) - len(refused) == 3
    assert all(GROUP in str(each) and each.details["group"] == GROUP for each in refused)
    other = harness.half(group="another")
    assert (await prepare(owner, other)).id == other.id
    await commit(owner, next(iter(owner.ledger.index.transactions)))
    await until(lambda: harness.events.promotions)
    assert (await prepare(owner, harness.half())).state is State.PENDING
