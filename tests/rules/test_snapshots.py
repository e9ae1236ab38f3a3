"""Snapshots are written beside the work: when, where, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.rules.fakes import FakeProxy, Gate, raising
from tests.rules.harness import WINDOW_MS, Harness, commit, known, roll_back, snapshot, until
from txbroker.core import settled as core_settled
from txbroker.core import snapshot as core_snapshot
from txbroker.core.records import Record, State
from txbroker.core.segment import ROW_BYTES
from txbroker.core.snapshot import Whole, find_whole, segment_key, segments_in
from txbroker.door.writing import Unknown
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


def whole(harness: Harness) -> list[Whole]:
    """The whole snapshots that are stored, the greatest first."""
    return find_whole(harness.kafka.visible("txbroker.checkpoint"))


async def refused(door: MemoryPartitionDoor, records: Sequence[Record]) -> None:
    """Kafka does not take it."""
    raise KafkaUnavailable("not now")


async def some(harness: Harness, owner: PartitionOwner, count: int) -> list[str]:
    """Prepare `count` transactions."""
    return [await harness.prepared(owner) for _ in range(count)]


async def test_snapshot_is_written_after_enough_records(harness: Harness) -> None:
    owner = await harness.owner(snapshot_records_min=10)
    await some(harness, owner, 9)
    await asyncio.sleep(0.02)
    assert harness.events.snapshots == []
    await some(harness, owner, 1)
    await until(lambda: harness.events.snapshots == [10])
    await some(harness, owner, 9)
    await asyncio.sleep(0.02)
    assert harness.events.snapshots == [10]
    await some(harness, owner, 1)
    await until(lambda: harness.events.snapshots == [10, 20])


async def test_many_entries_postpone_next_snapshot(harness: Harness) -> None:
    owner = await harness.owner()
    await some(harness, owner, 40)
    assert await snapshot(owner)
    owner._snapshots._records_min = 2
    await some(harness, owner, 11)
    assert not owner._snapshots.due
    await asyncio.sleep(0.02)
    assert harness.events.snapshots == [40]
    await some(harness, owner, 2)
    await until(lambda: len(harness.events.snapshots) == 2)


async def test_replayed_records_count_after_restart(harness: Harness) -> None:
    owner = await harness.owner()
    await some(harness, owner, 10)
    await harness.restarted(owner, snapshot_records_min=10)
    await until(lambda: harness.events.snapshots == [10])


@pytest.mark.rule(11)
async def test_newest_complete_snapshot_is_never_overwritten(harness: Harness) -> None:
    """Also after restarts, and with any number of failures in between."""
    slots = []
    for round_number in range(4):
        owner = await harness.owner()
        await some(harness, owner, 3)
        before = whole(harness)
        for stored in range(2):
            harness.partition.stores.extend([MemoryPartitionDoor.store] * stored + [refused])
            assert not await snapshot(owner)
            assert [each.closing for each in whole(harness)][:1] == [
                each.closing for each in before
            ][:1]
        assert await snapshot(owner)
        slots.append(whole(harness)[0].slot)
        assert whole(harness)[0].closing.half == 3 * (round_number + 1)
        await owner.close()
    assert slots == [0, 1, 0, 1]
    assert harness.events.snapshot_failures == 8


async def test_rejected_snapshot_is_retried_later(harness: Harness) -> None:
    owner = await harness.owner(snapshot_records_min=3)
    harness.partition.stores.extend([refused] * 3)
    ids = await some(harness, owner, 3)
    await until(lambda: harness.events.snapshots == [3])
    assert harness.events.snapshot_failures == 3
    assert harness.stops == []
    await owner.close()
    assert {known(await harness.owner(), id).state for id in ids} == {State.PENDING}


@pytest.mark.rule(11)
async def test_lost_promotion_abandons_snapshot(harness: Harness) -> None:
    owner = await harness.owner()
    id = (await some(harness, owner, 5))[0]
    gate = Gate()
    harness.partition.stores.append(gate.store)
    writing = asyncio.create_task(snapshot(owner))
    await gate.reached.wait()
    harness.partition.writes.append(raising(Unknown()))
    await commit(owner, id)
    await until(lambda: harness.visible() == [id])
    gate.open()
    assert not await writing
    assert whole(harness) == []
    assert owner.ledger.watcher is None
    assert await snapshot(owner)


async def test_close_detaches_capture_from_ledger(harness: Harness) -> None:
    owner = await harness.owner(snapshot_records_min=1)
    gate = Gate()
    harness.partition.stores.append(gate.store)
    await some(harness, owner, 3)
    await gate.reached.wait()
    # Never two at once, however much is due.
    await asyncio.sleep(0.02)
    assert harness.partition.calls.count("store") == 1
    await owner.close()
    assert owner.ledger.watcher is None
    assert harness.events.snapshots == []


@pytest.mark.rule(11)
async def test_snapshot_does_not_block_other_work(harness: Harness) -> None:
    owner = await harness.owner()
    ids = await some(harness, owner, 4)
    gate = Gate()
    harness.partition.stores.append(gate.store)
    writing = asyncio.create_task(snapshot(owner))
    await gate.reached.wait()
    late = await harness.committed(owner)
    await commit(owner, ids[0])
    await until(lambda: harness.visible() == [late, ids[0]])
    gate.open()
    assert await writing
    # It is as of where it began: the rest is replayed.
    assert (whole(harness)[0].closing.half, whole(harness)[0].closing.op) == (4, 0)
    again = await harness.restarted(owner)
    assert sorted(again.ledger.index.transactions) == ids[1:]
    assert harness.visible() == [late, ids[0]]


@pytest.mark.rule(11)
async def test_damaged_snapshot_costs_longer_replay_only(harness: Harness) -> None:
    owner = await harness.owner()
    ids = await some(harness, owner, 5)
    assert await snapshot(owner)
    await owner.close()
    found = harness.kafka.topics["txbroker.checkpoint"].partitions[0]
    found.append([Record(b"snapshot/0/0", b"rubbish")], harness.clock.now_ms())
    assert whole(harness) == []
    again = await harness.owner()
    assert list(again.ledger.index.transactions) == ids


async def settled(harness: Harness, owner: PartitionOwner, count: int) -> None:
    """Prepare and roll back `count` transactions."""
    for id in await some(harness, owner, count):
        await roll_back(owner, id)


@pytest.mark.rule(11)
async def test_unreferenced_segments_are_removed(harness: Harness) -> None:
    """Neither before: the snapshot before the greatest one counts if that is damaged."""
    harness.proxy.settled = 1 * ROW_BYTES
    owner = await harness.owner()
    names: list[set[str]] = []
    for _ in range(4):
        await settled(harness, owner, 4)
        assert await snapshot(owner)
        found = whole(harness)
        assert len(found) == min(len(names) + 1, 2)
        names.append({segment.name for segment in found[0].segments})
        stored = segments_in(harness.kafka.visible("txbroker.checkpoint"))
        assert stored == set().union(*names[-2:])
        harness.advance(WINDOW_MS * 2 / 1000)
    assert not names[0] & names[-1]


async def test_leftover_segments_go_with_next_snapshot(harness: Harness) -> None:
    harness.proxy.settled = 1 * ROW_BYTES
    owner = await harness.owner()
    await settled(harness, owner, 4)
    assert await snapshot(owner)
    harness.advance(WINDOW_MS * 2 / 1000)
    await settled(harness, owner, 4)
    assert await snapshot(owner)
    harness.advance(WINDOW_MS * 2 / 1000)
    await settled(harness, owner, 4)
    # The three segments and the closing record are stored, the removal is not.
    harness.partition.stores.extend([MemoryPartitionDoor.store] * 3 + [refused])
    assert await snapshot(owner)
    held = {segment.name for each in whole(harness) for segment in each.segments}
    assert segments_in(harness.kafka.visible("txbroker.checkpoint")) > held
    await owner.close()
    harness.proxy.settled = 1 * ROW_BYTES
    owner = await harness.owner()
    assert await snapshot(owner)
    held = {segment.name for each in whole(harness) for segment in each.segments}
    assert segments_in(harness.kafka.visible("txbroker.checkpoint")) == held


async def test_segments_have_version_that_all_proxies_read(harness: Harness) -> None:
    harness.proxy = FakeProxy(1)
    owner = await harness.owner()
    await settled(harness, owner, 4)
    remembered = {each.id: each.fingerprint for each in owner.ledger.index.settled}
    for version, stored in ((1, 1), (1, 1), (2, 2), (1, 2)):
        harness.proxy.record_version = version
        assert await snapshot(owner)
        (found, *_) = whole(harness)
        # Segments of the newer version stay: their extra fields exist nowhere else.
        assert stored == found.closing.v
        values = [
            record.value or b""
            for record in harness.kafka.visible("txbroker.checkpoint")
            if record.key in map(segment_key, found.closing.segments)
        ]
        assert {msgspec.msgpack.decode(value)[0] for value in values} == {stored}
        await owner.close()
        owner = await harness.owner()
        assert {each.id for each in owner.ledger.index.settled} == remembered.keys()
        for each in owner.ledger.index.settled:
            length = 8 if stored == 2 else 16
            assert remembered[each.id][:length] == each.fingerprint[:length]
