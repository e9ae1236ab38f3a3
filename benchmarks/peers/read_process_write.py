"""Kafka's own exactly-once: read from a topic, write to another, offsets in the same transaction.

It needs no half messages, as nothing outside of Kafka takes part; so it is no substitute, but what
Kafka itself makes of records that are to be seen exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiokafka
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from benchmarks.peers.base import PARTITIONS, Figure, Plan, body_of, run_lanes, times_of
from benchmarks.peers.kafka import (
    KAFKA,
    create_topics,
    producing,
    running,
    running_kafka,
    watching,
)

SOURCE, TARGET = "source", "target"
_GROUP = "processor"
_BATCH_BYTES = 4 << 20
_BACKOFF_MS = 2
"""The client's pause while the coordinator still ends the previous transaction."""


class ReadProcessWrite:
    """A consumer and a transactional producer, through aiokafka."""

    name = "read-process-write"
    title = "Kafka's read-process-write"
    counts = (
        "a record read, written to another topic and its offset committed in one Kafka "
        "transaction, many at once; the time is from the input's send until the output is visible"
    )

    def version(self) -> str:
        return f"{KAFKA}, aiokafka {aiokafka.__version__}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        with running_kafka(folder) as kafka:
            uvloop.run(create_topics(kafka.bootstrap, [SOURCE, TARGET]))
            for in_flight in plan.in_flight:
                yield uvloop.run(_measure(kafka.bootstrap, plan, in_flight))


async def _measure(kafka: str, plan: Plan, in_flight: int) -> Figure:
    value = body_of(plan)
    numbers = itertools.count()
    lanes = min(PARTITIONS, in_flight)
    at_once = in_flight // lanes
    async with (
        producing(kafka, _BATCH_BYTES, retry_backoff_ms=_BACKOFF_MS) as feeder,
        watching(kafka, TARGET) as watcher,
        _processing(kafka) as processor,
    ):

        async def feed(partition: int) -> int:
            """Send some records, and wait until their outputs are seen."""
            batch = feeder.create_batch()
            seen = []
            for _ in range(at_once):
                key = f"{in_flight}-{next(numbers)}".encode()
                batch.append(key=key, value=value, timestamp=None)
                seen.append(watcher.expect(key))
            batch.close()
            await feeder.send_batch(batch, SOURCE, partition=partition)
            waiting = asyncio.ensure_future(asyncio.gather(*seen))
            await asyncio.wait((waiting, processor), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                processor.result()
            return at_once

        per_s, times = await run_lanes(plan, lanes, feed)
    found = times_of(times)
    return Figure(in_flight, round(per_s, 1), visible_ms=found)


@asynccontextmanager
async def _processing(kafka: str) -> AsyncIterator[asyncio.Task[None]]:
    """Process until the block is left; the task fails where processing does."""
    consumer = AIOKafkaConsumer(
        SOURCE,
        bootstrap_servers=kafka,
        group_id=_GROUP,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_partition_fetch_bytes=_BATCH_BYTES,
    )
    id = f"{_GROUP}-{time.monotonic_ns()}"
    async with producing(
        kafka,
        _BATCH_BYTES,
        max_request_size=2 * _BATCH_BYTES,
        transactional_id=id,
        retry_backoff_ms=_BACKOFF_MS,
    ) as producer:
        await consumer.start()
        try:
            async with running(_process(consumer, producer)) as task:
                yield task
        finally:
            await consumer.stop()


async def _process(consumer: AIOKafkaConsumer, producer: AIOKafkaProducer) -> None:
    while True:
        read = await consumer.getmany(timeout_ms=1000)
        if not read:
            continue
        async with producer.transaction():
            written = []
            for place, records in read.items():
                batch = producer.create_batch()
                for record in records:
                    batch.append(key=record.key, value=record.value, timestamp=None)
                batch.close()
                written.append(await producer.send_batch(batch, TARGET, partition=place.partition))
            await asyncio.gather(*written)
            offsets = {place: records[-1].offset + 1 for place, records in read.items()}
            await producer.send_offsets_to_transaction(offsets, _GROUP)
