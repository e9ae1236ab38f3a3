"""Snapshots are written beside the work: when, where, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.rules.recovery_world import snapshot
from tests.rules.rules_world import (
    WINDOW_MS,
    FakeProxy,
    Gate,
    World,
    commit,
    known,
    raising,
    roll_back,
    until,
)
from txbroker.core import settled as core_settled
from txbroker.core import snapshot as core_snapshot
from txbroker.core.records import Record, State
from txbroker.core.segment import ROW_BYTES
from txbroker.core.snapshot import Whole, find_whole, segment_key, segments_in
from txbroker.door.protocols import PromotionTxnLost
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.partition import snapshots
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.testing.door import MemoryPartitionDoor


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_snapshot, "CHUNK_ENTRIES", 2)
    monkeypatch.setattr(core_settled, "SEGMENT_ENTRIES", 2)
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 1)
    monkeypatch.setattr(snapshots, "LOOK_S", 0.002)
    monkeypatch.setattr(snapshots, "FIRST_RECORDS", 1 << 30)
    monkeypatch.setattr(snapshots, "SOON_MS", snapshots.AGE_MAX_MS)
    monkeypatch.setattr(snapshots, "PAUSE_S", 0.002)
    monkeypatch.setattr(snapshots, "REST_MIN_S", 0.0)
    monkeypatch.setattr(snapshots, "REST_MAX_S", 0.0)


def whole(world: World) -> list[Whole]:
    """The whole snapshots that are stored, the greatest first."""
    return find_whole(world.kafka.visible("txbroker.checkpoint"))


async def refused(door: MemoryPartitionDoor, records: Sequence[Record]) -> None:
    """Kafka does not take it."""
    raise KafkaUnavailable("not now")


async def some(world: World, owner: PartitionOwner, count: int) -> list[str]:
    """Prepare so many."""
    return [await world.prepared(owner) for _ in range(count)]


async def test_snapshot_is_written_after_enough_records(world: World) -> None:
    owner = await world.owner(snapshot_records_min=10)
    await some(world, owner, 9)
    await asyncio.sleep(0.02)
    assert world.told.snapshots == []
    await some(world, owner, 1)
    await until(lambda: world.told.snapshots == [10])
    await some(world, owner, 9)
    await asyncio.sleep(0.02)
    assert world.told.snapshots == [10]
    await some(world, owner, 1)
    await until(lambda: world.told.snapshots == [10, 20])


async def test_many_entries_postpone_next_snapshot(world: World) -> None:
    owner = await world.owner()
    await some(world, owner, 40)
    assert await snapshot(owner)
    owner._snapshots._records_min = 2
    await some(world, owner, 11)
    assert not owner._snapshots.due
    await asyncio.sleep(0.02)
    assert world.told.snapshots == [40]
    await some(world, owner, 2)
    await until(lambda: len(world.told.snapshots) == 2)


async def test_replayed_records_count_after_restart(world: World) -> None:
    owner = await world.owner()
    await some(world, owner, 10)
    await owner.close()
    await world.owner(snapshot_records_min=10)
    await until(lambda: world.told.snapshots == [10])


@pytest.mark.rule(11)
async def test_newest_complete_snapshot_is_never_overwritten(world: World) -> None:
    """Also after restarts, and with any number of failures in between."""
    slots = []
    for round_number in range(4):
        owner = await world.owner()
        await some(world, owner, 3)
        before = whole(world)
        for stored in range(2):
            world.partition.stores.extend([MemoryPartitionDoor.store] * stored + [refused])
            assert not await snapshot(owner)
            assert [each.closing for each in whole(world)][:1] == [each.closing for each in before][
                :1
            ]
        assert await snapshot(owner)
        slots.append(whole(world)[0].slot)
        assert whole(world)[0].closing.half == 3 * (round_number + 1)
        await owner.close()
    assert slots == [0, 1, 0, 1]
    assert world.told.snapshot_failures == 8


async def test_rejected_snapshot_is_retried_later(world: World) -> None:
    owner = await world.owner(snapshot_records_min=3)
    world.partition.stores.extend([refused] * 3)
    ids = await some(world, owner, 3)
    await until(lambda: world.told.snapshots == [3])
    assert world.told.snapshot_failures == 3
    assert world.stops == []
    await owner.close()
    assert {known(await world.owner(), id).state for id in ids} == {State.PENDING}


@pytest.mark.rule(11)
async def test_lost_promotion_abandons_snapshot(world: World) -> None:
    owner = await world.owner()
    id = (await some(world, owner, 5))[0]
    gate = Gate()

    async def held(door: MemoryPartitionDoor, records: Sequence[Record]) -> None:
        await gate.wait()
        await door.store(records)

    world.partition.stores.append(held)
    writing = asyncio.create_task(snapshot(owner))
    await gate.reached.wait()
    world.partition.writes.append(raising(PromotionTxnLost()))
    await commit(owner, id)
    await until(lambda: world.visible() == [id])
    gate.open()
    assert not await writing
    assert whole(world) == []
    assert owner.ledger.watcher is None
    assert await snapshot(owner)


async def test_close_detaches_capture_from_ledger(world: World) -> None:
    owner = await world.owner(snapshot_records_min=1)
    gate = Gate()

    async def held(door: MemoryPartitionDoor, records: Sequence[Record]) -> None:
        await gate.wait()

    world.partition.stores.append(held)
    await some(world, owner, 3)
    await gate.reached.wait()
    # Never two at once, however much is due.
    await asyncio.sleep(0.02)
    assert world.partition.calls.count("store") == 1
    await owner.close()
    assert owner.ledger.watcher is None
    assert world.told.snapshots == []


@pytest.mark.rule(11)
async def test_snapshot_does_not_block_other_work(world: World) -> None:
    owner = await world.owner()
    ids = await some(world, owner, 4)
    gate = Gate()

    async def held(door: MemoryPartitionDoor, records: Sequence[Record]) -> None:
        await gate.wait()
        await door.store(records)

    world.partition.stores.append(held)
    writing = asyncio.create_task(snapshot(owner))
    await gate.reached.wait()
    late = await world.committed(owner)
    await commit(owner, ids[0])
    await until(lambda: world.visible() == [late, ids[0]])
    gate.open()
    assert await writing
    # It is as of where it began: the rest is replayed.
    assert (whole(world)[0].closing.half, whole(world)[0].closing.op) == (4, 0)
    await owner.close()
    again = await world.owner()
    assert sorted(again.ledger.index.transactions) == ids[1:]
    assert world.visible() == [late, ids[0]]


@pytest.mark.rule(11)
async def test_damaged_snapshot_costs_longer_replay_only(world: World) -> None:
    owner = await world.owner()
    ids = await some(world, owner, 5)
    assert await snapshot(owner)
    await owner.close()
    found = world.kafka.topics["txbroker.checkpoint"].partitions[0]
    found.append([Record(b"snapshot/0/0", b"rubbish")], world.clock.now_ms())
    assert whole(world) == []
    again = await world.owner()
    assert list(again.ledger.index.transactions) == ids


async def settled(world: World, owner: PartitionOwner, count: int) -> None:
    """Prepare and roll back so many."""
    for id in await some(world, owner, count):
        await roll_back(owner, id)


@pytest.mark.rule(11)
async def test_unreferenced_segments_are_removed(world: World) -> None:
    """Neither before: the snapshot before the greatest one counts if that is damaged."""
    world.proxy.settled = 1 * ROW_BYTES
    owner = await world.owner()
    names: list[set[str]] = []
    for _ in range(4):
        await settled(world, owner, 4)
        assert await snapshot(owner)
        found = whole(world)
        assert len(found) == min(len(names) + 1, 2)
        names.append({segment.name for segment in found[0].segments})
        stored = segments_in(world.kafka.visible("txbroker.checkpoint"))
        assert stored == set().union(*names[-2:])
        world.advance(WINDOW_MS * 2 / 1000)
    assert not names[0] & names[-1]


async def test_leftover_segments_go_with_next_snapshot(world: World) -> None:
    world.proxy.settled = 1 * ROW_BYTES
    owner = await world.owner()
    await settled(world, owner, 4)
    assert await snapshot(owner)
    world.advance(WINDOW_MS * 2 / 1000)
    await settled(world, owner, 4)
    assert await snapshot(owner)
    world.advance(WINDOW_MS * 2 / 1000)
    await settled(world, owner, 4)
    # The three segments and the closing record are stored, the removal is not.
    world.partition.stores.extend([MemoryPartitionDoor.store] * 3 + [refused])
    assert await snapshot(owner)
    held = {segment.name for each in whole(world) for segment in each.segments}
    assert segments_in(world.kafka.visible("txbroker.checkpoint")) > held
    await owner.close()
    world.proxy.settled = 1 * ROW_BYTES
    owner = await world.owner()
    assert await snapshot(owner)
    held = {segment.name for each in whole(world) for segment in each.segments}
    assert segments_in(world.kafka.visible("txbroker.checkpoint")) == held


async def test_segments_have_version_that_all_proxies_read(world: World) -> None:
    world.proxy = FakeProxy(1)
    owner = await world.owner()
    await settled(world, owner, 4)
    remembered = {each.id: each.fingerprint for each in owner.ledger.index.settled}
    for version, stored in ((1, 1), (1, 1), (2, 2), (1, 2)):
        world.proxy.record_version = version
        assert await snapshot(owner)
        (found, *_) = whole(world)
        # What was written for all of the newer version stays: nobody knows the rest any more.
        assert stored == found.closing.v
        values = [
            record.value or b""
            for record in world.kafka.visible("txbroker.checkpoint")
            if record.key in map(segment_key, found.closing.segments)
        ]
        assert {msgspec.msgpack.decode(value)[0] for value in values} == {stored}
        await owner.close()
        owner = await world.owner()
        assert {each.id for each in owner.ledger.index.settled} == remembered.keys()
        for each in owner.ledger.index.settled:
            length = 8 if stored == 2 else 16
            assert remembered[each.id][:length] == each.fingerprint[:length]
