"""The contract of a door, in memory and on a real Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contract.door_records import bare, claimed, commit, new_claim, progress, to, turn
from tests.kit.kafka import now_ms
from txbroker.core.records import Cause, Record
from txbroker.door.protocols import (
    AppendRefused,
    Door,
    Log,
    LogTruncated,
    PartitionDoor,
    TargetFacts,
)
from txbroker.door.writing import Copy, Fenced, Refused, Unknown
from txbroker.errors import KafkaUnavailable

ODD = (
    Record(None, None),
    Record(b"", b""),
    Record(b"key", None),
    Record(None, b"value"),
    Record(b"\x00\xff", bytes(range(256)), (("b", b"\x00\xff"), ("a", None), ("b", b"\x00\xff"))),
    Record("schlüssel".encode(), b"{}", (("naïve", b""), ("", b"x"))),
)
"""Records that a careless hand would change."""


async def read(log: Log, start: int, end: int) -> list[Record]:
    return [record async for records in log.read(start, end) for record in records]


async def parked(door: PartitionDoor) -> list[Record]:
    return [record async for records in door.parked() for record in records]


# --- logs ------------------------------------------------------------------------------------


async def test_append_returns_offset_and_time(door: Door) -> None:
    log = door.partition(0).half
    assert await log.bounds() == (0, 0)
    first = await log.append([Record(b"a", b"1"), Record(b"b", b"2")])
    second = await log.append([Record(b"c", b"3")])
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert 0 < first.timestamp_ms <= second.timestamp_ms
    assert await log.bounds() == (0, 3)
    times = [record.timestamp_ms for record in await read(log, 0, 3)]
    assert times == [first.timestamp_ms, first.timestamp_ms, second.timestamp_ms]


async def test_records_are_read_as_written(door: Door) -> None:
    for log in (door.partition(1).half, door.partition(1).op):
        await log.append(ODD)
        assert bare(await read(log, 0, len(ODD))) == bare(ODD)


async def test_read_respects_its_bounds(door: Door) -> None:
    log = door.partition(0).op
    for number in range(5):
        await log.append([Record(b"%d.%d" % (number, part), b"") for part in range(3)])
    assert [r.key for r in await read(log, 2, 7)] == [b"0.2", b"1.0", b"1.1", b"1.2", b"2.0"]
    assert [r.offset for r in await read(log, 2, 7)] == [2, 3, 4, 5, 6]
    assert await read(log, 4, 4) == []


async def test_partitions_and_topics_are_separate(door: Door) -> None:
    await door.partition(0).half.append([Record(b"here", b"")])
    for log in (door.partition(1).half, door.partition(0).op):
        assert await log.bounds() == (0, 0)


async def test_second_door_reads_records_of_the_first(world: Any) -> None:
    one, two = await world.door("one"), await world.door("two")
    await one.partition(2).op.append([Record(b"a", b"1")])
    await two.partition(2).op.append([Record(b"b", b"2")])
    assert [r.key for r in await read(one.partition(2).op, 0, 2)] == [b"a", b"b"]


async def test_deleted_records_are_never_skipped(world: Any, door: Door) -> None:
    log = door.partition(0).half
    for number in range(4):
        await log.append([Record(b"%d" % number, b"")])
    await world.truncate(world.name("half"), 0, 2)
    assert await log.bounds() == (2, 4)
    with pytest.raises(LogTruncated):
        await read(log, 1, 4)
    assert [r.key for r in await read(log, 2, 4)] == [b"2", b"3"]


@pytest.mark.rule(2)
@pytest.mark.parametrize("noise", [1, 700])
async def test_offsets_of_foreign_transactions_are_reported(
    world: Any, door: Door, noise: int
) -> None:
    log, topic = door.partition(0).half, world.name("half")
    await log.append([Record(b"0", b"")])
    for committed in (False, True, False):
        records = [Record(b"%d" % n, b"foreign") for n in range(1 if committed else noise)]
        await world.foreign(topic, 0, *records, committed=committed)
    await log.append([Record(b"last", b"")])
    start, end = await log.bounds()
    found = await read(log, start, end)
    assert [(record.value, record.offset, record.skipped) for record in found] == [
        (b"", 0, 0),
        (b"foreign", noise + 2, noise + 1),
        (b"", 2 * noise + 5, noise + 2),
    ]
    assert [r.skipped for r in await read(log, 2, end)] == [noise, noise + 2]
    assert await read(log, noise + 3, end - 1) == []


@pytest.mark.parametrize("noise", [1, 700])
async def test_foreign_offsets_after_last_record_are_reported(
    world: Any, door: Door, noise: int
) -> None:
    """No record follows them that could show them."""
    log, topic = door.partition(0).op, world.name("op")

    async def skipped(start: int, end: int) -> list[range]:
        found: list[range] = []
        async for _ in log.read(start, end, found.append):
            assert found == []
        return found

    await log.append([Record(b"0", b"")])
    assert await skipped(0, 1) == []
    records = [Record(b"%d" % n, b"foreign") for n in range(noise)]
    await world.foreign(topic, 0, *records, committed=False)
    _, end = await log.bounds()
    assert await skipped(0, end) == [range(1, end)]
    assert await skipped(2, end) == [range(2, end)]
    await log.append([Record(b"1", b"")])
    assert await skipped(0, end + 1) == []
    assert await skipped(0, end) == [range(1, end)]


@pytest.mark.parametrize("start", [1, 2])
async def test_log_ending_too_early_is_truncated(door: Door, start: int) -> None:
    log = door.partition(0).half
    await log.append([Record(b"0", b"")])
    with pytest.raises(LogTruncated):
        await read(log, start, 3)


@pytest.mark.rule(18)
async def test_too_large_batch_is_refused_and_log_continues(door: Door) -> None:
    log = door.partition(0).half
    await log.append([Record(b"before", b"")])
    with pytest.raises(AppendRefused):
        await log.append([Record(b"large", bytes(log.batch_bytes_max))])
    assert (await log.append([Record(b"after", b"")])).base_offset == 1
    assert [r.key for r in await read(log, 0, 2)] == [b"before", b"after"]


# --- claims and turns ------------------------------------------------------------------------


@pytest.mark.rule(10)
async def test_claim_finds_newest_checkpoint(door: Door) -> None:
    partition = door.partition(0)
    mine = new_claim()
    first = await partition.claim(mine)
    assert first.progress is None
    for op in (1, 2, 3):
        await commit(partition, turn(mine, op))
    second = await partition.claim(new_claim())
    assert second.progress == progress(mine.claim, 3)
    assert 0 < first.timestamp_ms <= second.timestamp_ms


async def test_promotion_is_visible_as_written(world: Any, door: Door) -> None:
    one, two = await world.create_topic("one"), await world.create_topic("two", partitions=3)
    partition, mine = await claimed(door)
    at = 1_700_000_000_000
    records = [Record(r.key, r.value, r.headers, at + n) for n, r in enumerate(ODD)]
    promoted = [Copy(one, 0, record) for record in records]
    promoted.insert(2, Copy(two, 2, Record(b"other", b"topic", (), at)))
    handle = await partition.write(turn(mine, 1, *promoted))
    await handle.visible()
    assert list(handle.offsets) == [0, 1, 0, 2, 3, 4, 5]
    seen = await world.visible(one)
    assert bare(seen) == bare(records)
    assert [record.timestamp_ms for record in seen] == [record.timestamp_ms for record in records]
    assert [record.key for record in await world.visible(two, 2)] == [b"other"]
    assert await world.visible(two, 0) == []


async def test_pipelined_promotions_keep_their_order(world: Any, door: Door) -> None:
    topic = await world.create_topic("target")
    partition, mine = await claimed(door)
    handles = [
        await partition.write(turn(mine, n, Copy(topic, 0, Record(b"%d" % n, b"", (), n))))
        for n in range(20)
    ]
    await handles[-1].visible()
    assert [record.key for record in await world.visible(topic)] == [b"%d" % n for n in range(20)]
    assert (await partition.claim(new_claim())).progress == progress(mine.claim, 19)


@pytest.mark.rule(13)
async def test_promotion_larger_than_batch_is_atomic(world: Any, door: Door) -> None:
    topic = await world.create_topic("target", max_message_bytes="2000")
    assert isinstance(await door.targets.examine(topic), TargetFacts)
    partition, mine = await claimed(door)
    targets = [to(topic, b"%d" % n, bytes(900)) for n in range(9)]
    handle = await partition.write(turn(mine, 1, *targets))
    await handle.visible()
    assert list(handle.offsets) == list(range(9))
    assert [record.key for record in await world.visible(topic)] == [b"%d" % n for n in range(9)]


async def test_writes_before_claim_are_refused(door: Door) -> None:
    with pytest.raises(Unknown):
        await door.partition(0).write(turn(new_claim(), 1))


@pytest.mark.rule(8)
@pytest.mark.parametrize("turns_before", [0, 1, 2])
async def test_later_claim_fences_both_producers(world: Any, turns_before: int) -> None:
    topic = await world.create_topic("target")
    one, two = await world.door("one"), await world.door("two")
    earlier, later = one.partition(0), two.partition(0)
    first, second = new_claim("one"), new_claim("two")
    await earlier.claim(first)
    for number in range(turns_before):
        await commit(earlier, turn(first, number))
    await later.claim(second)
    for _ in range(2):
        with pytest.raises(Fenced):
            await commit(earlier, turn(first, 9, to(topic, b"zombie")))
    await (await later.write(turn(second, 1, to(topic, b"x")))).visible()
    assert [record.key for record in await world.visible(topic)] == [b"x"]
    assert (await later.claim(new_claim())).progress == progress(second.claim, 1)


@pytest.mark.rule(8)
async def test_one_of_concurrent_claims_can_write(world: Any) -> None:
    doors = [(await world.door(name)).partition(0) for name in ("one", "two", "three")]

    async def claim_and_write(partition: PartitionDoor) -> str:
        mine = new_claim()
        await partition.claim(mine)
        await all_claimed.wait()
        await commit(partition, turn(mine, 7))
        return mine.claim

    for _ in range(4):
        all_claimed = asyncio.Event()
        tasks = [asyncio.create_task(claim_and_write(partition)) for partition in doors]
        await asyncio.wait(tasks, timeout=0.5, return_when=asyncio.ALL_COMPLETED)
        all_claimed.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        winners = [result for result in results if isinstance(result, str)]
        losers = [result for result in results if not isinstance(result, str)]
        assert len(winners) <= 1
        assert all(isinstance(error, Fenced | Unknown | KafkaUnavailable) for error in losers)
        if winners:
            found = await doors[0].claim(new_claim())
            assert found.progress == progress(winners[0], 7)


@pytest.mark.rule(10)
async def test_door_reports_whether_partition_was_claimed(world: Any, door: Door) -> None:
    one, other = door.partition(0), door.partition(1)
    assert not await one.claimed_before()
    await one.claim(new_claim())
    assert await one.claimed_before()
    assert await (await world.door("two")).partition(0).claimed_before()
    assert not await other.claimed_before()


@pytest.mark.rule(18, "topics")
async def test_refused_record_aborts_its_promotion(world: Any, door: Door) -> None:
    good = await world.create_topic("good")
    small = await world.create_topic("small", max_message_bytes="1000")
    partition, mine = await claimed(door)
    await commit(partition, turn(mine, 1, to(good, b"before")))
    with pytest.raises(Refused) as refused:
        await partition.write(
            turn(
                mine,
                2,
                to(good, b"with it"),
                to(small, b"large", bytes(2000)),
                parked=(Record(b"id/0", b"kept"),),
            )
        )
    cause = refused.value.cause
    assert (cause.code, cause.topic, cause.partition) == ("too_large", small, 0)
    with pytest.raises(Refused):
        await partition.write(turn(mine, 3))
    again = new_claim()
    assert (await partition.claim(again)).progress == progress(mine.claim, 1)
    promoted = (to(small, b"fits"), to(good, b"after"))
    await (await partition.write(turn(again, 2, *promoted))).visible()
    assert [record.key for record in await world.visible(good)] == [b"before", b"after"]
    assert [record.key for record in await world.visible(small)] == [b"fits"]
    assert await parked(partition) == []


async def test_parked_copies_are_read_back(door: Door) -> None:
    partition, mine = await claimed(door, 3)
    records = (Record(b"id/0", b"body", (("h", None),)), Record(b"id/1", None))
    await (await partition.write(turn(mine, 1, parked=records))).visible()
    assert bare(await parked(partition)) == bare(records)


@pytest.mark.rule(10)
async def test_door_reports_whether_anything_was_parked(door: Door) -> None:
    partition, mine = await claimed(door, 3)
    assert not await partition.parked_before()
    for records in ((Record(b"id/0", b"body"),), (Record(b"id/0", None),)):
        await commit(partition, turn(mine, 1, parked=records))
        assert await partition.parked_before()
    assert not await door.partition(2).parked_before()


async def test_closed_partition_refuses_writes(door: Door) -> None:
    partition, mine = await claimed(door)
    await partition.close()
    with pytest.raises(Unknown):
        await partition.write(turn(mine, 1))
    await partition.close()


# --- targets ---------------------------------------------------------------------------------


async def test_target_facts_are_read(world: Any, door: Door) -> None:
    topic = await world.create_topic(
        "target", 3, max_message_bytes="4321", message_timestamp_type="LogAppendTime"
    )
    assert door.targets.known(topic) is None
    facts = await door.targets.examine(topic)
    assert facts == TargetFacts(3, 4321, log_append_time=True)
    assert door.targets.known(topic) == facts
    door.targets.forget(topic)
    assert door.targets.known(topic) is None


async def test_missing_target_is_a_cause_and_not_created(world: Any, door: Door) -> None:
    name = world.name("missing")
    for _ in range(2):
        cause = await door.targets.examine(name)
        assert isinstance(cause, Cause)
        assert (cause.code, cause.topic, cause.passing) == ("unknown_topic", name, False)
    assert door.targets.known(name) == cause


async def test_missing_target_is_created_on_request(world: Any, door: Door) -> None:
    name = world.name("new")
    facts = await door.targets.examine(name, create=True)
    assert isinstance(facts, TargetFacts)
    assert not facts.leaderless
    assert await door.targets.examine(name) == facts


async def target_records(
    door: Door, topic: str, partition: int = 0, **where: int
) -> list[tuple[int, bytes | None]]:
    """Return offset and key of what a target holds, from an offset or a time on."""
    found = door.targets.records(topic, partition, **where)  # type: ignore[arg-type]
    return [(record.offset, record.key) async for records in found for record in records]


async def test_committed_target_records_are_read(world: Any, door: Door) -> None:
    topic = await world.create_topic("target", 1)
    partition, mine = await claimed(door)
    at_ms = now_ms()
    for number, age_ms in enumerate((9000, 5000, 0)):
        record = Record(b"%d" % number, b"", (), at_ms - age_ms)
        written = turn(mine, number + 1, Copy(topic, 0, record))
        await (await partition.write(written)).visible()  # the LSO follows the commit
    everything = await target_records(door, topic)
    assert [key for _, key in everything] == [b"0", b"1", b"2"]
    # On a real Kafka each commit leaves a marker at the next offset.
    start = everything[1][0]
    assert await target_records(door, topic, start=start) == everything[1:]
    assert await target_records(door, topic, since_ms=at_ms - 5000) == everything[1:]
    assert await target_records(door, topic, since_ms=at_ms + 60_000) == []
    for start in (everything[-1][0] + 2, 1 << 40):
        with pytest.raises(LogTruncated):
            await target_records(door, topic, start=start)
    with pytest.raises(LogTruncated, match="partitions 0 to 0"):
        await target_records(door, topic, 1)
    with pytest.raises(KafkaUnavailable, match="does not exist"):
        await target_records(door, world.name("missing"))


@pytest.mark.parametrize("name", ["white space", "x" * 250, ".."])
async def test_invalid_topic_name_is_a_cause(door: Door, name: str) -> None:
    for create in (False, True):
        cause = await door.targets.examine(name, create=create)
        assert isinstance(cause, Cause)
        assert (cause.code, cause.passing) == ("unknown_topic", False)


# --- groups ----------------------------------------------------------------------------------


async def test_groups_are_kept_and_followed(world: Any) -> None:
    one, two = await world.door("one"), await world.door("two")
    first: dict[str, bytes | None] = {}
    await one.groups.load(first.__setitem__)
    await one.groups.put("orders", b'{"v":1}')
    await one.groups.put("bills", b"{}")
    await one.groups.put("bills", None)
    await one.groups.put("orders", b'{"v":2}')
    assert first == {"orders": b'{"v":2}', "bills": None}
    second: dict[str, bytes | None] = {}
    follows = asyncio.Event()

    def changed(group: str, value: bytes | None) -> None:
        second[group] = value
        if group == "late":
            follows.set()

    await two.groups.load(changed)
    assert second["orders"] == b'{"v":2}'
    assert second.get("bills") is None
    await one.groups.put("late", b"{}")
    async with asyncio.timeout(10):
        await follows.wait()
    assert second["late"] == b"{}"


# --- audits ----------------------------------------------------------------------------------


class Heard:
    """Collects the news of a feed, and waits for one."""

    def __init__(self) -> None:
        self.news: list[tuple[str, bytes | None]] = []
        self._more = asyncio.Event()

    def __call__(self, key: str, value: bytes | None) -> None:
        self.news.append((key, value))
        self._more.set()

    async def until(self, key: str, value: bytes | None) -> None:
        async with asyncio.timeout(20):
            while (key, value) not in self.news:
                self._more.clear()
                await self._more.wait()


async def test_every_door_follows_audit_news_once(world: Any) -> None:
    one, heard = await world.door("one"), Heard()
    one.audit.follow(heard)
    for value in (b"alarm", b"over"):
        await world.write_audit("batch", value)
    await world.write_audit("stream", b"1")
    await world.write_audit("stream", None)
    await heard.until("stream", None)
    assert heard.news[:2] == [("batch", b"alarm"), ("batch", b"over")]

    late = Heard()
    (await world.door("two")).audit.follow(late)
    await late.until("stream", None)
    assert late.news == [("batch", b"over"), ("stream", None)]
    await world.write_audit("batch", b"new")
    await late.until("batch", b"new")


async def test_door_works_without_audit_topic(world: Any) -> None:
    await world.door("one")
    await world.delete_topic(world.name("audit"))
    two, heard = await world.door("two", **world.without_creating), Heard()
    two.audit.follow(heard)
    assert await two.check_topics() == []
    await two.close()
    assert heard.news == []
