"""What an owner may rely on where a log has edges: single records, snapshots, own topics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.contract.door_records import bare, claimed, commit, new_claim, progress, to, turn
from txbroker.core.encoding import encode_claim
from txbroker.core.records import RECORD_VERSION, Record
from txbroker.door.own_topics import CheckpointScan
from txbroker.door.protocols import AppendRefused, Door, Hanging, Log, PartitionDoor, PromotionTxn
from txbroker.door.writing import Fenced, Refused, Unknown
from txbroker.errors import ConfigurationError, KafkaUnavailable, NewerRecord


async def fill(log: Log, count: int, batch: int = 3) -> None:
    """Append records whose keys are their offsets."""
    for first in range(0, count, batch):
        await log.append(
            [Record(b"%d" % n, b"body") for n in range(first, min(count, first + batch))]
        )


async def picked(log: Log, offsets: Sequence[int]) -> list[tuple[int, bytes | None]]:
    return [(record.offset, record.key) for record in await log.pick(offsets)]


# --- picking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offsets",
    [[], [0], [11], [4, 5, 6], [0, 11], [1, 3, 10], list(range(12))],
    ids=lambda offsets: ",".join(map(str, offsets)) or "none",
)
async def test_pick_returns_exactly_the_requested_records(door: Door, offsets: list[int]) -> None:
    log = door.partition(0).half
    await fill(log, 12)
    assert await picked(log, offsets) == [(n, b"%d" % n) for n in offsets]


async def test_pick_omits_missing_records(world: Any, door: Door) -> None:
    log = door.partition(0).op
    await fill(log, 12)
    assert await picked(log, [2, 12, 13, 900]) == [(2, b"2")]
    await world.truncate(world.name("op"), 0, 7)
    assert await picked(log, [0, 6, 7, 8, 11, 12]) == [(7, b"7"), (8, b"8"), (11, b"11")]
    assert await picked(log, [0, 1]) == []


async def test_pick_from_empty_log_is_empty(door: Door) -> None:
    assert await picked(door.partition(1).half, [0, 5]) == []


async def test_picked_records_are_complete(door: Door) -> None:
    log = door.partition(0).half
    record = Record(b"k", b"\x00\xff", (("a", None), ("a", b"")))
    where = await log.append([Record(b"before", bytes(5000)), record])
    (found,) = await log.pick([1])
    assert bare([found]) == bare([record])
    assert (found.offset, found.timestamp_ms) == (1, where.timestamp_ms)


# --- the parked topic ------------------------------------------------------------------------


async def test_pick_finds_parked_copies_by_offset(door: Door) -> None:
    partition, mine = await claimed(door, 2)
    records = tuple(Record(b"id/%d" % n, b"body %d" % n) for n in range(5))
    handle = await partition.write(turn(mine, 1, parked=records[:3]))
    assert list(handle.offsets) == []
    places = list(handle.parked_offsets)
    await handle.visible()
    second = await partition.write(turn(mine, 2, parked=records[3:]))
    places += second.parked_offsets
    await second.visible()
    assert len(set(places)) == len(records)
    assert bare(await partition.pick_parked(places)) == bare(records)
    assert bare(await partition.pick_parked(places[1:4:2])) == bare([records[1], records[3]])


async def test_pick_omits_copies_of_aborted_promotion(world: Any, door: Door) -> None:
    small = await world.create_topic("small", max_message_bytes="1000")
    partition, mine = await claimed(door)
    large = to(small, b"large", bytes(2000))
    with pytest.raises(Refused):
        await partition.write(turn(mine, 1, large, parked=(Record(b"id/0", b"lost"),)))
    again = new_claim()
    await partition.claim(again)
    kept = await partition.write(turn(again, 1, parked=(Record(b"id/1", b"kept"),)))
    await kept.visible()
    everything = range(kept.parked_offsets[0] + 1)
    assert [record.key for record in await partition.pick_parked(everything)] == [b"id/1"]


async def test_records_hidden_by_open_transaction_are_not_lost(world: Any, door: Door) -> None:
    partition, mine = await claimed(door)
    release = await world.hang(world.name("parked"), 0)
    handle = await partition.write(turn(mine, 1, parked=(Record(b"id/0", b"kept"),)))
    await handle.committed()
    with pytest.raises(KafkaUnavailable):
        await partition.pick_parked(handle.parked_offsets)
    # A copy that a takeover did not see would make its transaction count as promoted.
    with pytest.raises(Hanging):
        [record async for records in partition.parked() for record in records]
    await release()
    await handle.visible()
    found = await partition.pick_parked(handle.parked_offsets)
    assert [record.value for record in found] == [b"kept"]


# --- snapshots -------------------------------------------------------------------------------


def chunk(slot: int, number: int, value: bytes | None) -> Record:
    return Record(b"snapshot/%d/%d" % (slot, number), value)


async def test_claim_finds_newest_record_of_each_snapshot_key(door: Door) -> None:
    partition, mine = door.partition(0), new_claim()
    assert (await partition.claim(mine)).snapshots == []
    await partition.store([chunk(0, 0, b"old"), chunk(0, 1, b"stays"), chunk(0, 2, b"goes")])
    await commit(partition, turn(mine, 1))
    await partition.store([chunk(0, 0, b"new"), chunk(0, 2, None)])
    await commit(partition, turn(mine, 2))
    found = await partition.claim(new_claim())
    assert found.progress == progress(mine.claim, 2)
    assert bare(found.snapshots) == bare([chunk(0, 1, b"stays"), chunk(0, 0, b"new")])
    assert all(record.timestamp_ms > 0 for record in found.snapshots)


async def test_another_owner_finds_stored_snapshots(world: Any) -> None:
    one, two = await world.door("one"), await world.door("two")
    await one.partition(0).claim(new_claim())
    await one.partition(0).store([chunk(1, 0, bytes(100_000))])
    found = await two.partition(0).claim(new_claim())
    assert bare(found.snapshots) == bare([chunk(1, 0, bytes(100_000))])
    assert (await two.partition(1).claim(new_claim())).snapshots == []


async def test_too_large_snapshot_is_refused_next_is_stored(door: Door) -> None:
    partition = door.partition(0)
    await partition.claim(new_claim())
    with pytest.raises(AppendRefused):
        await partition.store([chunk(0, 0, bytes(2 << 20))])
    await partition.store([chunk(0, 0, b"small")])
    assert bare((await partition.claim(new_claim())).snapshots) == bare([chunk(0, 0, b"small")])


async def test_promotions_and_snapshots_run_concurrently(door: Door) -> None:
    partition, mine = await claimed(door)

    async def store() -> None:
        for number in range(20):
            await partition.store([chunk(0, number, bytes(20_000))])

    storing = asyncio.create_task(store())
    for op in range(20):
        await commit(partition, turn(mine, op))
    await storing
    found = await partition.claim(new_claim())
    assert found.progress == progress(mine.claim, 19)
    assert [record.key for record in found.snapshots] == [chunk(0, n, b"").key for n in range(20)]


async def test_checkpoint_of_newer_version_is_reported(door: Door) -> None:
    partition, mine = await claimed(door)
    newer = structs.replace(progress(mine.claim, 1), v=RECORD_VERSION + 1)
    await commit(partition, PromotionTxn((), (), newer))
    with pytest.raises(NewerRecord, match="checkpoint-0 at offset"):
        await partition.claim(new_claim())


def test_later_claim_of_newer_version_fences() -> None:
    scan = CheckpointScan("x-0")
    mine = new_claim()
    later = structs.replace(new_claim(), v=RECORD_VERSION + 1)
    records = [structs.replace(encode_claim(each), producer=7) for each in (mine, later)]
    scan.note(records)
    with pytest.raises(Fenced, match="newer"):
        scan.claimed(mine)


async def test_given_record_version_is_written(world: Any, door: Door) -> None:
    partition = door.partition(0)
    mine = structs.replace(new_claim(), v=0)
    await partition.claim(mine)
    newer = structs.replace(progress(mine.claim, 1), v=RECORD_VERSION + 1)
    await (await partition.write(PromotionTxn((), (), newer))).visible()
    written = await world.visible(world.name("checkpoint"))
    assert [msgspec.json.decode(record.value)["v"] for record in written] == [0, newer.v]


# --- hanging transactions, forgotten ids, old doors ------------------------------------------


@pytest.mark.rule(9)
async def test_hanging_transaction_hides_checkpoint(world: Any) -> None:
    door = await world.door(claim_timeout_s=0.3)
    partition = door.partition(0)
    await partition.claim(new_claim())
    release = await world.hang(world.name("checkpoint"), 0)
    with pytest.raises(Hanging):
        await partition.claim(new_claim())
    with pytest.raises(Unknown):
        await partition.write(turn(new_claim(), 1))
    await release()
    mine = new_claim()
    await partition.claim(mine)
    await commit(partition, turn(mine, 1))


async def test_closing_old_door_keeps_new_one_working(door: Door) -> None:
    old, mine = door.partition(0), new_claim()
    await old.claim(new_claim())
    await old.half.append([Record(b"old", b"")])
    new = door.partition(0)
    await new.claim(mine)

    async def work(partition: PartitionDoor) -> None:
        for op in range(20):
            await partition.half.append([Record(b"new", b"")])
            await partition.store([chunk(0, op, b"")])
            await commit(partition, turn(mine, op))

    working = asyncio.create_task(work(new))
    await new.op.append([Record(b"begun", b"")])
    await old.close()
    await working
    assert await new.half.bounds() == (0, 21)


# --- txbroker's own topics -------------------------------------------------------------------


async def test_created_own_topics_have_no_problems(world: Any) -> None:
    for _ in range(2):
        door = await world.door()
        assert await door.check_topics() == []


@pytest.mark.rule("topics")
async def test_added_half_partitions_are_reported_and_refused(world: Any) -> None:
    door = await world.door()
    for topic in ("half", "op", "checkpoint", "parked"):
        await world.add_partitions(world.name(topic), 6)
    (problem,) = await door.check_topics()
    assert "has 6 partitions" in problem
    assert "made with 4" in problem
    with pytest.raises(ConfigurationError, match="made with 4"):
        await world.closed_door().start()


async def test_own_topics_of_different_sizes_are_refused(world: Any) -> None:
    door = await world.door()
    await world.add_partitions(world.name("op"), 5)
    (problem,) = await door.check_topics()
    assert problem.startswith(f"{world.name('op')} has 5 partitions")
    with pytest.raises(ConfigurationError, match="has 5 partitions"):
        await world.closed_door().start()


async def test_recreated_topics_keep_partition_count(world: Any) -> None:
    await world.door()
    for topic in ("half", "op", "checkpoint", "parked"):
        await world.delete_topic(world.name(topic))
    door = await world.door(partitions=7)
    assert door.partitions == 4
    assert await door.check_topics() == []


async def test_deleted_own_topic_is_reported(world: Any, door: Door) -> None:
    await world.delete_topic(world.name("parked"))
    (problem,) = await door.check_topics()
    assert problem.startswith(f"missing: {world.name('parked')}")


@pytest.mark.rule("topics")
async def test_recreated_own_topic_is_reported(world: Any, door: Door) -> None:
    await world.recreate_topic(world.name("op"))
    (problem,) = await door.check_topics()
    assert problem.startswith(f"{world.name('op')} was deleted and ")


async def test_layout_record_is_not_a_group(world: Any, door: Door) -> None:
    groups: dict[str, bytes | None] = {}
    await door.groups.load(groups.__setitem__)
    assert groups == {}
    await door.groups.put("orders", b"{}")
    assert groups == {"orders": b"{}"}


async def test_check_topics_needs_kafka(world: Any, door: Door) -> None:
    await world.lose(door)
    with pytest.raises(KafkaUnavailable):
        await door.check_topics()
