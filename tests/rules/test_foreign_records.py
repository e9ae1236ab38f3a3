"""Records of other clients in txbroker's own topics that look like ours, or like newer ones."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.rules.recovery_world import snapshot
from tests.rules.rules_world import GROUP, World, marker, settled, until
from txbroker.core.encoding import (
    encode_half,
    encode_kept,
    encode_marker,
    encode_progress,
    encode_skip,
)
from txbroker.core.records import (
    RECORD_VERSION,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
    State,
)
from txbroker.core.routing import make_id
from txbroker.door.protocols import LogTruncated, PromotionTxn, PromotionTxnHandle
from txbroker.errors import InvariantBroken, NewerRecord
from txbroker.proxy.partition.parked_copies import read_copies
from txbroker.testing.door import MemoryPartitionDoor

NEWER = RECORD_VERSION + 1


def newer(world: World, log: str, partition: int) -> Record:
    """Return what a newer version writes about a transaction of a partition."""
    id = make_id(partition, world.clock.now_ms(), 7)
    half = world.half(Message("t", b"k", b"v", partition=0), id=id)
    if log == "op":
        return encode_marker(structs.replace(marker(MarkerKind.COMMIT, id), v=NEWER, group=GROUP))
    if log == "half":
        return encode_half(half, NEWER)[0]
    return encode_kept(ParkedCopy(half, 0, 1, State.PENDING), NEWER)[0]


async def write(world: World, log: str, *records: Record, inside: bool) -> None:
    """Write as another client, inside of a Kafka transaction or outside."""
    if inside:
        world.kafka.transact(f"txbroker.{log}", 0, records)
    else:
        await world.kafka.append(f"txbroker.{log}", 0, records)


@pytest.mark.rule(10)
async def test_foreign_copy_of_checkpoint_repeats_no_promotion(world: World) -> None:
    owner = await world.owner()
    first = await world.committed(owner)
    await until(lambda: world.visible() == [first])
    stale = world.progress()
    second = await world.committed(owner)
    await until(lambda: world.visible() == [first, second])
    await settled()
    await owner.close()
    await write(world, "checkpoint", encode_progress(stale), inside=False)
    third = await world.committed(await world.owner())
    await until(lambda: third in world.visible())
    assert world.visible() == [first, second, third]
    assert world.told.foreigners == ["checkpoint"]


@pytest.mark.rule(10)
async def test_missing_checkpoint_named_by_snapshot_stops(
    world: World,
) -> None:
    owner = await world.owner()
    first = await world.committed(owner)
    await until(lambda: world.visible() == [first])
    await settled()
    end = world.kafka.partition("txbroker.checkpoint", 0).end
    assert await snapshot(owner)
    second = await world.prepared(owner)
    await owner.close()
    # As compaction leaves it some time after a tombstone under the key of the progress.
    world.kafka.truncate("txbroker.checkpoint", before=end)
    with pytest.raises(InvariantBroken, match="a snapshot that tells of progress"):
        await world.owner()
    assert second not in world.visible()


@pytest.mark.rule(10)
async def test_snapshot_names_committed_checkpoints_only(world: World) -> None:
    """Or the partition would stop once compaction has removed an older claim."""
    begun = asyncio.Event()

    async def hangs(inner: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        begun.set()
        return await asyncio.Future()

    owner = await world.owner()
    world.partition.writes.append(hangs)
    first = await world.committed(owner)
    await begun.wait()
    end = world.kafka.partition("txbroker.checkpoint", 0).end
    assert await snapshot(owner)
    await owner.close()
    world.kafka.truncate("txbroker.checkpoint", before=end)
    await world.owner()
    await until(lambda: world.visible() == [first])


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
    world: World, log: str, inside: bool, partition: int, running: bool
) -> None:
    owner = await world.owner()
    first = await world.committed(owner)
    if not running:
        await owner.close()
    await write(world, log, newer(world, log, partition), inside=inside)
    if not running or log == "parked":
        await owner.close()
        owner = await world.owner()
    second = await world.committed(owner)
    await until(lambda: world.visible() == [first, second])
    assert log in world.told.foreigners
    assert not world.stops


@pytest.mark.rule(27)
@pytest.mark.parametrize("log", ["half", "op"])
@pytest.mark.parametrize(
    ("inside", "partition", "stops"), [(False, 0, True), (True, 0, False), (False, 1, False)]
)
async def test_foreign_records_before_first_claim_stop_nothing(
    world: World, log: str, inside: bool, partition: int, stops: bool
) -> None:
    await write(world, log, newer(world, log, partition), inside=inside)
    if stops:
        with pytest.raises(LogTruncated, match="the checkpoint topic has no record"):
            await world.owner()
    else:
        first = await world.committed(await world.owner())
        await until(lambda: world.visible() == [first])


@pytest.mark.rule(27)
async def test_newer_marker_with_wrong_key_stops_nothing(world: World) -> None:
    owner = await world.owner()
    world.zombie_op(Record(b"x", b'{"v": %d}' % NEWER))
    first = await world.committed(owner)
    await until(lambda: world.visible() == [first])
    assert (world.told.foreigners, world.stops) == (["op"], [])


@pytest.mark.rule(27)
@pytest.mark.parametrize("inside", [True, False])
async def test_tombstone_removes_newer_copy(world: World, inside: bool) -> None:
    await (await world.owner()).close()
    copy = newer(world, "parked", 0)
    await write(world, "parked", copy, inside=True)
    with pytest.raises(NewerRecord, match="repair"):
        await world.owner()
    await write(world, "parked", Record(copy.key, None), inside=inside)
    first = await world.committed(await world.owner())
    await until(lambda: world.visible() == [first])


@pytest.mark.rule(27)
async def test_newer_copy_is_skipped_by_operator(world: World) -> None:
    await (await world.owner()).close()
    await write(world, "parked", newer(world, "parked", 0), inside=True)
    (stored,) = world.kafka.visible("txbroker.parked")
    await write(world, "checkpoint", encode_skip("parked", stored, "me", "why"), inside=False)
    first = await world.committed(await world.owner())
    await until(lambda: world.visible() == [first])


@pytest.mark.rule(10)
async def test_foreign_tombstone_removes_no_copy(world: World) -> None:
    await (await world.owner()).close()
    half = world.half(Message("t", b"k", b"v", partition=0))
    (copy,) = encode_kept(ParkedCopy(half, 0, world.clock.now_ms(), State.PARKED))
    await write(world, "parked", copy, inside=True)
    await write(world, "parked", Record(copy.key, None), inside=False)
    copies = await read_copies(world.door.partition(0), ())
    assert [kept.half.id for kept in copies.whole] == [half.id]
    assert (copies.foreign, [each.record.offset for each in copies.set_aside]) == (1, [2])
