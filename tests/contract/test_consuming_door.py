"""The contract of a consumer's door, in memory and on a real Kafka: all but groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kit.consuming import Fetching
from tests.kit.kafka import now_ms
from tests.kit.until import until
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import EARLIEST, LATEST, ConsumingDoor, OffsetMissing, TopicSpec
from txbroker.errors import ConfigurationError, KafkaUnavailable

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
async def door(world: Any) -> AsyncIterator[ConsumingDoor]:
    door = await world.consuming_door()
    yield door
    await door.close()


@pytest.fixture
async def fetching(door: ConsumingDoor) -> AsyncIterator[Fetching]:
    made = Fetching(door)
    yield made
    await made.fetcher.close()
    assert not any(error.lasting for _, error in made.failures)  # a new topic has no leader yet


def numbered(start: int, end: int, value: bytes = b"") -> list[Record]:
    return [Record(b"%d" % number, value) for number in range(start, end)]


def keys(start: int, end: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(start, end)]


# --- topics ----------------------------------------------------------------------------------


async def test_topics_have_ids_and_partitions(world: Any, door: ConsumingDoor) -> None:
    one, two = await world.create_topic("one"), await world.create_topic("two", 3)
    found = await door.topics([one, two, world.name("none")])
    assert {name: topic.partitions for name, topic in found.items()} == {one: 1, two: 3}
    assert len({topic.id for topic in found.values()}) == 2
    assert all(len(topic.id) == 16 for topic in found.values())
    every = await door.topics()
    assert (every[one], every[two]) == (found[one], found[two])


async def test_topic_created_again_has_another_id(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic")
    before = (await door.topics([topic]))[topic]
    await world.delete_topic(topic)
    await until(lambda: _is_missing(door, topic))
    await world.create_topic("topic")
    assert (await door.topics([topic]))[topic].id != before.id


async def _is_missing(door: ConsumingDoor, topic: str) -> bool:
    return await door.topics([topic]) == {}


async def test_topics_are_created_once(world: Any, door: ConsumingDoor) -> None:
    specs = [
        TopicSpec(world.name("own"), 3, -1, {"max.message.bytes": "20000"}),
        TopicSpec(world.name("default"), -1, -1, {}),
    ]
    await door.create(specs)
    names = [spec.name for spec in specs]
    await until(lambda: _all_exist(door, names))
    before = await door.topics(names)
    assert before[names[0]].partitions == 3
    assert before[names[1]].partitions >= 1
    await door.create([TopicSpec(names[0], 5, -1, {})])
    assert await door.topics(names) == before
    with pytest.raises(KafkaUnavailable):
        await door.append(names[0], 0, [Record(b"large", bytes(30_000))])


async def _all_exist(door: ConsumingDoor, names: list[str]) -> bool:
    return (await door.topics(names)).keys() == set(names)


@pytest.mark.parametrize(
    "bad", [{"name": "no/name"}, {"name": "too.many.replicas", "replication": 99}]
)
async def test_refused_creation_names_topic(
    world: Any, door: ConsumingDoor, bad: dict[str, Any]
) -> None:
    given = {"partitions": 1, "replication": -1, "configs": {}, **bad}
    spec = TopicSpec(**{**given, "name": world.name(given["name"])})
    with pytest.raises(ConfigurationError, match=spec.name):
        await door.create([spec])
    assert await door.topics([spec.name]) == {}


# --- offsets and records ---------------------------------------------------------------------


async def test_records_are_read_as_appended(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic", 2)
    at_ms = now_ms() - 5000
    records = [
        Record(None, None, (), at_ms),
        Record(b"", b"", (("a", None), ("b", b"\x00\xff"), ("b", b"")), at_ms + 1),
        Record(b"key", bytes(range(256)), (("naïve", b"x"),), at_ms + 2),
    ]
    await door.append(topic, 1, records)
    found = await door.read((topic, 1), 0, 3)
    assert [(r.key, r.value, r.headers, r.timestamp_ms) for r in found] == [
        (r.key, r.value, r.headers, r.timestamp_ms) for r in records
    ]
    assert [record.offset for record in found] == [0, 1, 2]
    assert [record.key for record in await door.read((topic, 1), 1, 2)] == [b""]
    assert await door.read((topic, 0), 0, 0) == []


async def test_read_begins_where_log_does(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic")
    await door.append(topic, 0, numbered(0, 5))
    await world.truncate(topic, 0, 3)
    assert [record.key for record in await door.read((topic, 0), 0, 5)] == keys(3, 5)


async def test_settled_end_waits_for_open_transactions(world: Any, door: ConsumingDoor) -> None:
    """They hide the records after them."""
    topic = await world.create_topic("target")
    await door.append(topic, 0, numbered(0, 1))
    abort = await world.hang(topic, 0)
    await door.append(topic, 0, numbered(1, 2))
    assert await door.offsets([(topic, 0)], LATEST) == {(topic, 0): 1}
    waiting = asyncio.create_task(door.settled_end((topic, 0)))
    await asyncio.wait([waiting], timeout=0.3)
    assert not waiting.done()
    await abort()
    read = await door.read((topic, 0), 0, await waiting)
    assert [record.key for record in read] == keys(0, 2)


async def test_read_leaves_out_aborted_records(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic")
    await world.foreign(topic, 0, *numbered(0, 2), committed=False)
    await world.foreign(topic, 0, *numbered(2, 4), committed=True)
    end = (await door.offsets([(topic, 0)], LATEST))[topic, 0]
    assert [record.key for record in await door.read((topic, 0), 0, end)] == keys(2, 4)


async def test_offsets_are_found_by_time(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic", 2)
    at, other = (topic, 0), (topic, 1)
    begun_ms = now_ms() - DAY_MS
    await door.append(topic, 0, [Record(b"", b"", (), begun_ms + n * 1000) for n in range(5)])
    await world.truncate(topic, 0, 1)
    for time_ms, offset in (
        (EARLIEST, 1),
        (LATEST, 5),
        (begun_ms + 2000, 2),
        (begun_ms + 2001, 3),
        (begun_ms - DAY_MS, 1),
        (begun_ms + DAY_MS, 5),
    ):
        assert await door.offsets([at, other], time_ms) == {at: offset, other: 0}, time_ms


async def test_latest_offset_is_last_stable_one(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic")
    await door.append(topic, 0, numbered(0, 2))
    end = await world.hang(topic, 0)
    await door.append(topic, 0, numbered(2, 4))
    for time_ms in (LATEST, now_ms() + DAY_MS):
        assert await door.offsets([(topic, 0)], time_ms) == {(topic, 0): 2}
    await end()


# --- fetching --------------------------------------------------------------------------------


async def test_fetching_is_complete_and_in_order(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic", 3)
    for number in range(3):
        await door.append(topic, number, numbered(0, 1200))
        fetching.add((topic, number), number)
    for number in range(3):
        await fetching.reaches((topic, number), 1200)
        assert fetching.keys((topic, number)) == keys(number, 1200)
        assert fetching.end[topic, number] == 1200
    await door.append(topic, 1, numbered(1200, 1300))
    await fetching.reaches((topic, 1), 1300)
    assert fetching.keys((topic, 1)) == keys(1, 1300)
    assert fetching.keys((topic, 0)) == keys(0, 1200)


async def test_end_of_empty_partition_is_delivered(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic")
    fetching.add((topic, 0), 0)
    await fetching.reaches((topic, 0), 0)
    assert fetching.end == {(topic, 0): 0}


async def test_paused_partition_waits_and_others_go_on(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic", 2)
    paused, other = (topic, 0), (topic, 1)
    for at in (paused, other):
        fetching.add(at)
        await fetching.reaches(at, 0)
    fetching.fetcher.pause(paused)
    # A request in flight may return the first of them.
    await door.append(topic, 0, numbered(0, 1))
    for number in range(3):
        await door.append(topic, 1, numbered(number, number + 1))
        await fetching.reaches(other, number + 1)
        await door.append(topic, 0, numbered(number + 1, number + 2))
    assert len(fetching.keys(paused)) <= 1
    fetching.fetcher.resume(paused)
    await fetching.reaches(paused, 4)
    assert fetching.keys(paused) == keys(0, 4)


async def test_removed_partition_is_silent_until_added_again(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic", 2)
    at, other = (topic, 0), (topic, 1)
    await door.append(topic, 0, numbered(0, 2000))
    fetching.add(at)
    fetching.add(other)
    fetching.fetcher.remove(at)
    seen = fetching.keys(at)
    await door.append(topic, 1, numbered(0, 1))
    await fetching.reaches(other, 1)
    assert fetching.keys(at) == seen
    fetching.add(at, 1500)
    await fetching.reaches(at, 2000)
    assert fetching.keys(at) == keys(1500, 2000)


async def test_partition_added_twice_begins_again(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic")
    await door.append(topic, 0, numbered(0, 1000))
    fetching.add((topic, 0), 0)
    fetching.add((topic, 0), 990)
    await fetching.reaches((topic, 0), 1000)
    assert fetching.keys((topic, 0)) == keys(990, 1000)


async def test_only_committed_records_are_fetched(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic")
    at = (topic, 0)
    await door.append(topic, 0, numbered(0, 1))
    await world.foreign(topic, 0, *numbered(90, 95), committed=False)
    await world.foreign(topic, 0, *numbered(1, 3), committed=True)
    end = await world.hang(topic, 0)
    await door.append(topic, 0, numbered(3, 4))
    stable = (await door.offsets([at], LATEST))[at]
    fetching.add(at)
    await fetching.reaches(at, stable)
    assert fetching.keys(at) == keys(0, 3)
    assert fetching.end[at] == fetching.next[at] == stable
    await end()
    await until(lambda: fetching.keys(at)[3:])
    assert fetching.keys(at) == keys(0, 4)


async def test_aborted_end_of_log_is_passed(
    world: Any, door: ConsumingDoor, fetching: Fetching
) -> None:
    topic = await world.create_topic("topic")
    at = (topic, 0)
    await world.foreign(topic, 0, *numbered(0, 5), committed=False)
    fetching.add(at)
    await fetching.reaches(at, (await door.offsets([at], LATEST))[at])
    assert fetching.keys(at) == []


@pytest.mark.parametrize("offset", [0, 9], ids=["deleted", "beyond the end"])
async def test_missing_offset_ends_fetching(world: Any, door: ConsumingDoor, offset: int) -> None:
    topic = await world.create_topic("topic")
    at: Partition = (topic, 0)
    await door.append(topic, 0, numbered(0, 5))
    await world.truncate(topic, 0, 2)
    fetching = Fetching(door)
    fetching.add(at, offset)
    await until(lambda: fetching.failures)
    ((failed, error),) = fetching.failures
    assert failed == at
    assert isinstance(error, OffsetMissing)
    assert error.lasting
    fetching.add(at, 2)
    await fetching.reaches(at, 5)
    assert fetching.keys(at) == keys(2, 5)
    assert len(fetching.failures) == 1
    await fetching.fetcher.close()


async def test_fetching_waits_for_missing_topic(world: Any, door: ConsumingDoor) -> None:
    fetching = Fetching(door)
    at = (world.name("later"), 0)
    fetching.add(at)
    await until(lambda: fetching.failures)
    assert not isinstance(fetching.failures[0][1], OffsetMissing)
    await world.create_topic("later")
    await door.append(*at, numbered(0, 3))
    await fetching.reaches(at, 3)
    assert fetching.keys(at) == keys(0, 3)
    await fetching.fetcher.close()


async def test_closed_fetcher_delivers_nothing(world: Any, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic")
    first, second = Fetching(door), Fetching(door)
    for fetching in (first, second):
        fetching.add((topic, 0))
        await fetching.reaches((topic, 0), 0)
    await first.fetcher.close()
    await door.append(topic, 0, numbered(0, 1))
    await second.reaches((topic, 0), 1)
    assert first.keys((topic, 0)) == []
    await second.fetcher.close()
