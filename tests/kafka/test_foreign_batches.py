"""Batches of other clients that txbroker does not decode, in its topics on a real Kafka."""

from __future__ import annotations

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from confluent_kafka import Producer

from tests.kit.kafka import KafkaHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.core.records import Cause, Message, Record
from txbroker.core.routing import parse_id
from txbroker.door.own_topics import encode_layout
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.door import KafkaDoor
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.kafka.protocol.schemas import ProduceV7

OWN = ("half", "op", "checkpoint", "parked", "groups", "audit")
CODECS = ("gzip", "snappy", "lz4", "zstd")


async def produce(service: Service, topic: str, batch: bytes) -> None:
    """Store a batch in partition 0 of a topic (full name) as it is."""
    assert isinstance(service.door, KafkaDoor)
    client = service.door._client
    leader = await client.leader(topic, 0)
    request = ProduceV7(None, -1, 10_000, [(topic, [(0, batch)])])
    answer = await client.ask(leader, request, "foreign", 30.0)
    ((_, ((_, code, *_),)),) = answer.topics
    assert code == 0


def raw(value: bytes, *, gzip: bool) -> bytes:
    """Return a batch; without gzip, of a header whose name is not UTF-8."""
    builder = DefaultRecordBatchBuilder(2, int(gzip), 0, -1, -1, -1, 1 << 30)
    builder.append(0, 1, b"k", value, [("zq", b"x")])
    batch = bytes(builder.build())
    batch = batch if gzip else batch.replace(b"zq", b"\xff\xfe")
    return batch[:17] + calc_crc32c(batch[21:]).to_bytes(4, "big") + batch[21:]


def compressed(world: KafkaHarness, topic: str, codec: str) -> None:
    config = {"bootstrap.servers": world.bootstrap, "compression.type": codec, "linger.ms": 50}
    producer = Producer(config)
    for _ in range(50):
        producer.produce(topic, b"x" * 200, b"progress", 0)
    assert producer.flush(10) == 0


async def works(service: Service) -> None:
    """See both half partitions owned and a transaction of each go through."""
    await until(lambda: owned(service))
    topic = await service.topic()
    ids: list[str] = []
    while {parse_id(id).partition for id in ids} != {0, 1}:
        ids.append(await service.prepare(Message(topic, b"%d" % len(ids), b"")))
        assert (await service.commit(ids[-1]))["state"] == "promoted"
    assert len(await service.values(topic)) == len(ids)


async def owned(service: Service) -> bool:
    return await service.owned() == {0, 1}


@pytest.mark.parametrize("kind", ["producer", "uncompressed"])
async def test_undecodable_batches_stop_no_partition(
    world: KafkaHarness, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEndpoint().serve() as desk:
        service = Service(world, desk)
        await service.start()
        try:
            assert isinstance(service.door, KafkaDoor)
            topics = [world.name(name) for name in OWN]
            await service.door.apply(await service.door.plan())
            for topic in topics:
                await service.door.admin.alter(topic, {"compression.type": kind})
            await works(service)
            for topic in topics:
                for codec in CODECS:
                    compressed(world, topic, codec)
                await produce(service, topic, raw(b"v", gzip=False))
                if kind == "producer":
                    await produce(service, topic, raw(bytes(100 << 20), gzip=True))
            await works(service)
            assert await service.door.repair().find() == []
            # A stop writes down how far the logs were read; a checkpoint is read at each claim.
            for name in ("half", "op"):
                assert await service.metric("foreign_records_total", topic=name) > 0
            await service.stop()
            await service.start()
            await works(service)
            assert await service.metric("foreign_records_total", topic="checkpoint") > 0
            warnings = [
                one for one in caplog.messages if "batch of another client set aside" in one
            ]
            # Once for each topic and process that has read it.
            times = [sum(topic in one for one in warnings) for topic in topics[:4]]
            assert all(1 <= each <= 2 for each in times) if kind == "producer" else not any(times)
        finally:
            await service.stop()


@pytest.mark.parametrize("policy", ["compact", "delete"])
async def test_installation_needs_compacted_topics(world: KafkaHarness, policy: str) -> None:
    door = await world.door()
    for name, count in (("half", 2), ("op", 2), ("checkpoint", 2), ("groups", 1)):
        await world.create_topic(f"x.{name}", count, cleanup_policy=policy)
    await world.foreign(world.name("x.groups"), 0, Record(b"g", b"{}"), encode_layout(2))
    found = await door.targets.examine(world.name("x.half"))
    assert (getattr(found, "code", "") == "reserved") == (policy == "compact")


async def test_installation_check_reads_bounded_bytes(
    world: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await world.door()
    for name, count in (("half", 1), ("op", 1), ("checkpoint", 1), ("groups", 1)):
        await world.create_topic(f"x.{name}", count, cleanup_policy="compact")
    many = [Record(b"%d" % number, bytes(100_000)) for number in range(60)]
    for name in ("groups", "checkpoint"):
        await world.foreign(world.name(f"x.{name}"), 0, *many)
    read = 0
    fetch = Reader.fetch

    async def counted(reader: Reader, *args: int, **kwargs: int) -> Fetched:
        nonlocal read
        fetched = await fetch(reader, *args, **kwargs)
        read += fetched.size_bytes if "x." in reader.name else 0
        return fetched

    monkeypatch.setattr(Reader, "fetch", counted)
    assert not isinstance(await door.targets.examine(world.name("x.half")), Cause)
    assert 0 < read < 4 << 20
