"""Fetching many partitions at once on a real Kafka: order, completeness, pauses, faults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Producer

from tests.kafka.relay import Fate, Relay, fates
from tests.kafka.test_foreign_batches import CODECS, raw
from tests.kit.kafka import KafkaHarness
from tests.kit.until import until
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import OffsetMissing
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client import fetcher as fetcher_module
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.fetcher import BatchUnreadable, KafkaFetcher
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.protocol.schemas import ProduceV7

FETCH = 1
PARTITIONS = 8
RESUMED_S = 0.25
"""Half of the brokers' wait for records, on a busy machine."""


class Fetching:
    """A door, a fetcher, and what it delivered."""

    def __init__(self, door: KafkaConsumingDoor) -> None:
        self.door = door
        self.got: dict[Partition, list[Record]] = {}
        self.next: dict[Partition, int] = {}
        self.failures: list[tuple[Partition, KafkaUnavailable]] = []
        self.on_deliver: Callable[[Partition], None] = lambda _partition: None
        self.fetcher = KafkaFetcher(door._client, self._deliver, self._failed)

    def _deliver(
        self, partition: Partition, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        assert not records or records[0].offset >= self.next.get(partition, 0)
        assert not records or records[-1].offset < next_offset <= end
        self.got.setdefault(partition, []).extend(records)
        self.next[partition] = next_offset
        self.on_deliver(partition)

    def _failed(self, partition: Partition, error: KafkaUnavailable) -> None:
        self.failures.append((partition, error))

    def values(self, partition: Partition) -> list[bytes | None]:
        return [record.value for record in self.got.get(partition, ())]

    async def until_values(self, partition: Partition, values: Sequence[bytes | None]) -> None:
        await until(lambda: len(self.values(partition)) >= len(values))
        assert self.values(partition) == list(values)

    async def until_failures(self, count: int) -> None:
        await until(lambda: len(self.failures) >= count)

    def assert_failures_pass(self) -> None:
        """Leaders of new topics, for example, are found only after a moment."""
        assert not any(error.lasting for _partition, error in self.failures)

    async def append(self, partition: Partition, *values: bytes) -> None:
        await self.door.append(*partition, [Record(None, value) for value in values])


@pytest.fixture
async def fetching(world: KafkaHarness) -> AsyncIterator[Fetching]:
    async for made in _fetching(KafkaConsumingDoor(world.settings())):
        yield made


async def _fetching(door: KafkaConsumingDoor) -> AsyncIterator[Fetching]:
    await door.start()
    made = Fetching(door)
    yield made
    await made.fetcher.close()
    await door.close()


async def store(client: Client, partition: Partition, batch: bytes) -> None:
    """Store a batch as it is."""
    leader = await client.leader(*partition)
    request = ProduceV7(None, -1, 10_000, [(partition[0], [(partition[1], batch)])])
    answer = await client.ask(leader, request, "foreign", 30.0)
    ((_, ((_, code, *_),)),) = answer.topics
    assert code == 0


# --- order and completeness ----------------------------------------------------------------------


async def test_all_records_come_once_and_in_order(world: KafkaHarness, fetching: Fetching) -> None:
    topic = await world.create_topic("t", PARTITIONS)
    partitions = [(topic, number) for number in range(PARTITIONS)]
    fetcher, total = fetching.fetcher, 6000
    turns = itertools.count()
    loop = asyncio.get_running_loop()

    def disturb(partition: Partition) -> None:
        turn = next(turns)
        if turn % 3 == 0:
            fetcher.pause(partition)
            loop.call_later(turn % 5 / 100, fetcher.resume, partition)
        elif turn % 3 == 1:
            fetcher.remove(partition)
            fetcher.add(partition, fetching.next[partition])

    fetching.on_deliver = disturb
    for partition in partitions:
        fetcher.add(partition, 0)
    for first in range(0, total, 500):
        values = [b"%d" % number for number in range(first, first + 500)]
        await asyncio.gather(*(fetching.append(at, *values) for at in partitions))
    for partition in partitions:
        await fetching.until_values(partition, [b"%d" % number for number in range(total)])
    fetching.assert_failures_pass()


async def test_added_again_is_fetched_after_an_earlier_answer(
    world: KafkaHarness, fetching: Fetching
) -> None:
    at = (await world.create_topic("t"), 0)
    fetcher = fetching.fetcher
    fetcher.add(at, 0)
    await fetching.append(at, b"1")
    await fetching.until_values(at, [b"1"])
    (broker,) = fetcher._brokers.values()
    earlier = fetcher._feeds[at]
    async with broker.turn:
        # An answer waits for its turn while the partition is removed and added.
        await fetching.append(at, b"2")
        await until(lambda: broker.turn._waiters)
        fetcher.remove(at)
        fetcher.add(at, fetching.next[at])
        await until(lambda: broker.feeds.get(at) not in (None, earlier))
    await fetching.append(at, b"3")
    await fetching.until_values(at, [b"1", b"2", b"3"])


async def test_added_again_gets_nothing_of_earlier_fetch(
    world: KafkaHarness, fetching: Fetching
) -> None:
    at = (await world.create_topic("t"), 0)
    await fetching.append(at, *(b"%d" % number for number in range(5000)))
    starts: list[int] = []

    def again(partition: Partition) -> None:
        starts.append(fetching.got[at][0].offset)
        if len(starts) <= 20:
            # The rest of this answer, and that to the next request, are on their way.
            fetching.fetcher.remove(partition)
            fetching.got.clear()
            fetching.next.clear()
            fetching.fetcher.add(partition, 7)

    fetching.on_deliver = again
    fetching.fetcher.add(at, 7)
    await fetching.until_values(at, [b"%d" % number for number in range(7, 5000)])
    assert set(starts) == {7}


async def test_aborted_transactions_are_hidden(world: KafkaHarness, fetching: Fetching) -> None:
    at = (await world.create_topic("t"), 0)
    fetching.fetcher.add(at, 0)
    await world.foreign(*at, Record(None, b"a"), committed=True)
    await world.foreign(*at, Record(None, b"no"), committed=False)
    await world.foreign(*at, Record(None, b"b"), committed=True)
    await fetching.until_values(at, [b"a", b"b"])
    # Record and end of each of the three.
    await until(lambda: fetching.next[at] == 6)


@pytest.mark.parametrize("codec", CODECS)
async def test_every_codec_decodes(world: KafkaHarness, fetching: Fetching, codec: str) -> None:
    at = (await world.create_topic("t"), 0)
    values = [b"%d" % number + bytes(150) for number in range(3000)]
    producer = AIOKafkaProducer(
        bootstrap_servers=world.bootstrap, compression_type=codec, linger_ms=20
    )
    await producer.start()
    try:
        for value in values:
            await producer.send(at[0], value, b"k", partition=0, headers=[("h", b"v")])
    finally:
        await producer.stop()
    # Of another make: its snappy has another framing.
    other = Producer(
        {"bootstrap.servers": world.bootstrap, "compression.type": codec, "linger.ms": 20}
    )
    for value in values:
        other.produce(at[0], value, b"k", 0)
    assert await asyncio.to_thread(other.flush, 10) == 0
    fetching.fetcher.add(at, 0)
    await fetching.until_values(at, values + values)
    assert {tuple(record.headers) for record in fetching.got[at]} == {(("h", b"v"),), ()}


# --- pauses --------------------------------------------------------------------------------------


async def test_resumed_partition_does_not_wait_for_others(
    world: KafkaHarness, fetching: Fetching
) -> None:
    topic = await world.create_topic("t", PARTITIONS)
    partitions = [(topic, number) for number in range(PARTITIONS)]
    for partition in partitions:
        fetching.fetcher.add(partition, 0)
    await until(lambda: len(fetching.next) == PARTITIONS)
    loop = asyncio.get_running_loop()
    took: list[float] = []
    for partition in partitions[:-1]:
        # The last one is in a long poll all the time.
        fetching.fetcher.pause(partition)
        await fetching.append(partition, b"first")
        # An answer that was on its way may hold the record already.
        began_s = loop.time()
        fetching.fetcher.resume(partition)
        await fetching.until_values(partition, [b"first"])
        took.append(loop.time() - began_s)
    assert max(took) < RESUMED_S


async def test_added_partition_does_not_wait_for_others(
    world: KafkaHarness, fetching: Fetching
) -> None:
    topic = await world.create_topic("t", PARTITIONS)
    loop = asyncio.get_running_loop()
    took: list[float] = []
    for number in range(PARTITIONS):
        await fetching.append((topic, number), b"first")
        began_s = loop.time()
        fetching.fetcher.add((topic, number), 0)
        await fetching.until_values((topic, number), [b"first"])
        took.append(loop.time() - began_s)
    assert max(took[1:]) < RESUMED_S


async def test_paused_partition_gets_nothing_new(world: KafkaHarness, fetching: Fetching) -> None:
    topic = await world.create_topic("t", 2)
    paused, other = (topic, 0), (topic, 1)
    fetching.fetcher.add(paused, 0)
    fetching.fetcher.add(other, 0)
    await until(lambda: len(fetching.next) == 2)
    fetching.fetcher.pause(paused)
    # Both are in one request in flight, whose answer this ends.
    await fetching.append(paused, b"1")
    for number in range(3):
        await fetching.append(other, b"%d" % number)
        await fetching.until_values(other, [b"%d" % n for n in range(number + 1)])
    assert fetching.values(paused) == []
    fetching.fetcher.resume(paused)
    await fetching.until_values(paused, [b"1"])


# --- faults --------------------------------------------------------------------------------------


async def test_deleted_offset_ends_fetching(world: KafkaHarness, fetching: Fetching) -> None:
    topic = await world.create_topic("t", 2)
    gone, other = (topic, 0), (topic, 1)
    await fetching.append(gone, b"0", b"1", b"2")
    await world.truncate(*gone, 2)
    fetching.fetcher.add(gone, 1)
    fetching.fetcher.add(other, 0)
    await until(lambda: any(isinstance(error, OffsetMissing) for _, error in fetching.failures))
    await fetching.append(other, b"a")
    await fetching.until_values(other, [b"a"])
    # A new partition may have no leader for a moment, which is another failure.
    ended = [each for each in fetching.failures if isinstance(each[1], OffsetMissing)]
    ((partition, error),) = ended
    assert partition == gone
    assert str(error) == f"{topic}-0 has no offset 1 (any more)"
    assert fetching.values(gone) == []
    fetching.fetcher.add(gone, 2)
    await fetching.until_values(gone, [b"2"])


async def test_unreadable_batch_stops_its_partition(
    world: KafkaHarness, fetching: Fetching
) -> None:
    topic = await world.create_topic("t", 2)
    bad, other = (topic, 0), (topic, 1)
    await fetching.append(bad, b"before")
    await store(fetching.door._client, bad, raw(bytes(200 << 20), gzip=True))
    await fetching.append(bad, b"after")
    fetching.fetcher.add(bad, 0)
    fetching.fetcher.add(other, 0)
    await fetching.until_failures(1)
    await fetching.append(other, b"a")
    await fetching.until_values(other, [b"a"])
    partition, error = fetching.failures[0]
    assert partition == bad
    assert isinstance(error, BatchUnreadable)
    assert error.lasting
    assert f"{topic}-0: the batch at offset 1 does not decode" in str(error)
    assert "gzip" in str(error)
    assert fetching.values(bad) == [b"before"]
    assert fetching.next[bad] == 1


async def test_records_of_failed_delivery_come_again(
    world: KafkaHarness, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "_LASTING_PAUSE_S", 0.1)
    at = (await world.create_topic("t"), 0)
    values = [b"%d" % number for number in range(3000)]
    for first in range(0, len(values), 1000):  # one batch, and one piece, for each
        await fetching.append(at, *values[first : first + 1000])
    seen: list[tuple[int, int]] = []

    def fail_once(_partition: Partition) -> None:
        seen.append((len(fetching.got[at]), fetching.next[at]))
        if len(seen) == 2:
            count, fetching.next[at] = seen[0]
            del fetching.got[at][count:]
            raise ValueError("a fault of the consumer")

    fetching.on_deliver = fail_once
    fetching.fetcher.add(at, 0)
    await fetching.until_values(at, values)
    assert "a fault of the consumer" in str(fetching.failures[-1][1])


async def test_topic_that_appears_is_fetched(world: KafkaHarness, fetching: Fetching) -> None:
    at = (world.name("t"), 0)
    fetching.fetcher.add(at, 0)
    await fetching.until_failures(2)
    fetching.assert_failures_pass()
    await world.create_topic("t")
    await fetching.append(at, b"1")
    await fetching.until_values(at, [b"1"])


@pytest.mark.parametrize("fate", [Fate.LOSE_ANSWER, Fate.HOLD_AND_RESET])
async def test_broken_connection_loses_and_repeats_nothing(
    world: KafkaHarness, make_relay: Callable[..., Relay], fate: Fate
) -> None:
    relay = make_relay()
    async for fetching in _fetching(KafkaConsumingDoor(world.settings(), relay.open)):
        topic = await world.create_topic("t", 2)
        partitions = [(topic, 0), (topic, 1)]
        for partition in partitions:
            fetching.fetcher.add(partition, 0)
        values: list[bytes | None] = []
        for turn in range(4):
            relay.decide = fates(FETCH, fate, fate)
            broken = len(fetching.failures)
            new = [b"%d-%d" % (turn, number) for number in range(1500)]
            values += new
            await asyncio.gather(*(fetching.append(at, *new) for at in partitions))
            await fetching.until_failures(broken + 1)
            for partition in partitions:
                await fetching.until_values(partition, values)
        fetching.assert_failures_pass()
