"""Records of other clients in txbroker's own topics that look like ours, or like newer ones."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.rules.harness import GROUP, Harness, marker, settled, snapshot, until
from txbroker.core.encoding import (
    encode_half,
    encode_kept,
    encode_marker,
    encode_progress,
    encode_skip,
)
from txbroker.core.records import RECORD_VERSION, MarkerKind, Message, ParkedCopy, Record, State
from txbroker.core.routing import make_id
from txbroker.door.protocols import LogTruncated, PromotionTxn, PromotionTxnHandle
from txbroker.errors import InvariantBroken, NewerRecord
from txbroker.proxy.partition.parked_copies import read_copies
from txbroker.testing.door import MemoryPartitionDoor

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
        with pytest.raises(LogTruncated, match="the checkpoint topic has no record"):
            await harness.owner()
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
