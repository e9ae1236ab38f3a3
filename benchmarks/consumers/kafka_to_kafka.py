"""Kafka to Kafka, exactly once: records a second of a processor that copies a topic.

Each record of 200 bytes becomes an output with the same key; outputs and offsets are one Kafka
transaction. All contenders read the same topic with a group, and each transaction has at most 1,000
records or 100 ms. The time begins with the first record, and ends with the last commit. aiokafka's
loop, as in `benchmarks.peers.read_process_write`, calls nothing for a record and keeps its
partition.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from benchmarks.consumers.load import PARTITIONS, door_to, fill, new_name
from benchmarks.consumers.rounds import Ratio
from txbroker.consumer import Consumer, InKafka, Message, Outputs, ReceivedMessage
from txbroker.door.consuming import LATEST, TopicSpec
from txbroker.embedded import EmbeddedKafka

COUNT, KEYS = 160_000, 1_000
_TRANSACTION, _TRANSACTION_S = 1_000, 0.1
_SOURCE, _TARGET = "bench-source", "bench-target"
_TIMEOUT_S = 30.0

Round = Callable[[str], Coroutine[Any, Any, float]]
"""Processes the topic of a Kafka once; returns records a second."""


def ratios(rounds: int) -> Iterator[Ratio]:
    """Measure, and compare."""
    contenders: dict[str, Round] = {
        "txbroker": with_txbroker,
        "confluent-kafka": with_confluent,
        "aiokafka": with_aiokafka,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with EmbeddedKafka() as kafka:
        uvloop.run(prepare(kafka.bootstrap))
        for _ in range(rounds):
            for name, process in contenders.items():
                rates[name].append(uvloop.run(process(kafka.bootstrap)))
                print(f"{name}: {rates[name][-1]:,.0f} a second", file=sys.stderr, flush=True)
    mine, confluent, aiokafka = map(statistics.median, rates.values())
    yield Ratio("InKafka: times confluent-kafka's transactional loop", 1.0, (mine, confluent))
    yield Ratio("InKafka: times aiokafka's read-process-write", 0.8, (mine, aiokafka))


async def prepare(kafka: str) -> None:
    """Fill the source, and create the target."""
    await fill(kafka, _SOURCE, COUNT, KEYS)
    async with door_to(kafka) as door:
        await door.create([TopicSpec(_TARGET, PARTITIONS, 1, {})])


async def with_txbroker(kafka: str) -> float:
    """Return the rate of a consumer with `InKafka`, in the default order."""
    began, left, group = 0.0, COUNT, new_name("bench")

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        nonlocal began, left
        began = began or time.perf_counter()
        left -= 1
        out.send(Message(_TARGET, key=message.key, value=message.value))

    chosen: Any = {"mode": "exactly-once", "store": InKafka()}
    async with (
        door_to(kafka) as door,
        Consumer(kafka, group=group, topics=[_SOURCE], **chosen) as consumer,
    ):
        ends = await door.offsets([(_SOURCE, number) for number in range(PARTITIONS)], LATEST)

        async def committed() -> bool:
            found = await door.committed(group)
            return all(found[place].offset == end for place, end in ends.items())

        running = asyncio.create_task(consumer.run(handle))
        while left > 0 or not await committed():
            await asyncio.sleep(_TRANSACTION_S / 10)
        took_s = time.perf_counter() - began
        consumer.stop()
        await running
    return COUNT / took_s


async def with_aiokafka(kafka: str) -> float:
    """Return the rate of aiokafka: batches of whole partitions, as in `benchmarks.peers`."""
    consumer: Any = AIOKafkaConsumer(  # type: ignore[no-untyped-call]
        _SOURCE,
        bootstrap_servers=kafka,
        group_id=new_name("bench"),
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    producer: Any = AIOKafkaProducer(  # type: ignore[no-untyped-call]
        bootstrap_servers=kafka,
        transactional_id=new_name("bench"),
        acks="all",
        max_batch_size=4 << 20,
        max_request_size=8 << 20,
        retry_backoff_ms=2,
    )
    await consumer.start()
    await producer.start()
    left, began = COUNT, 0.0
    try:
        while left:
            read = await consumer.getmany(timeout_ms=1000, max_records=_TRANSACTION)
            if not read:
                continue
            began = began or time.perf_counter()
            async with producer.transaction():
                written = []
                for place, records in read.items():
                    batch = producer.create_batch()
                    for record in records:
                        batch.append(key=record.key, value=record.value, timestamp=None)
                    batch.close()
                    written.append(
                        await producer.send_batch(batch, _TARGET, partition=place.partition)
                    )
                    left -= len(records)
                await asyncio.gather(*written)
                offsets = {place: records[-1].offset + 1 for place, records in read.items()}
                await producer.send_offsets_to_transaction(offsets, consumer._group_id)
        return COUNT / (time.perf_counter() - began)
    finally:
        await producer.stop()
        await consumer.stop()


async def with_confluent(kafka: str) -> float:
    """Return the rate of confluent-kafka's transactional loop."""
    return await asyncio.to_thread(_with_confluent, kafka)


def _with_confluent(kafka: str) -> float:
    from confluent_kafka import Consumer as Librdkafka
    from confluent_kafka import Producer

    consumer = Librdkafka(
        {
            "bootstrap.servers": kafka,
            "group.id": new_name("bench"),
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    producer = Producer(
        {"bootstrap.servers": kafka, "transactional.id": new_name("bench"), "linger.ms": 0}
    )
    producer.init_transactions(_TIMEOUT_S)
    consumer.subscribe([_SOURCE])
    left, began = COUNT, 0.0
    try:
        while left:
            records = consumer.consume(_TRANSACTION, _TRANSACTION_S)
            if not records:
                continue
            began = began or time.perf_counter()
            producer.begin_transaction()
            for record in records:
                producer.produce(_TARGET, record.value(), record.key())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()),
                consumer.consumer_group_metadata(),
                _TIMEOUT_S,
            )
            producer.commit_transaction(_TIMEOUT_S)
            left -= len(records)
        return COUNT / (time.perf_counter() - began)
    finally:
        consumer.close()
