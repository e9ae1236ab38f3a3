"""The Kafka that several peers write to: started, given topics, and read as a consumer reads it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.peers.base import PARTITIONS
from txbroker.config.settings import load_settings
from txbroker.door.consuming import TopicSpec
from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.settings import KafkaSettings

KAFKA = f"Apache Kafka {DEFAULT_VERSION}"


@contextmanager
def running_kafka(folder: Path) -> Iterator[EmbeddedKafka]:
    """Run a Kafka in a folder, with txbroker's settings for development."""
    kafka = EmbeddedKafka(folder / "kafka", for_load=True)
    try:
        kafka.start()
        yield kafka
    finally:
        kafka.kill()  # its data is deleted anyway


async def create_topics(kafka: str, names: Sequence[str]) -> None:
    """Create topics, each with as many partitions as all peers' have."""
    client = Client(KafkaSettings.from_configuration(load_settings({"kafka": kafka}, environ={})))
    try:
        await Admin(client).create([TopicSpec(name, PARTITIONS, 1, {}) for name in names])
    finally:
        await client.close()


@asynccontextmanager
async def producing(
    kafka: str, batch_bytes: int, **options: Any
) -> AsyncIterator[AIOKafkaProducer]:
    """Open an idempotent producer for batches of this size, with acks=all."""
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka,
        enable_idempotence=True,
        acks="all",
        max_batch_size=batch_bytes,
        **{"max_request_size": 8 * batch_bytes, **options},
    )
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run work in a task until the block is left; the task fails if the work does."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Watcher:
    """Notes when a `read_committed` consumer had each message, by key."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._waiting: dict[bytes, asyncio.Future[float]] = {}
        self.began: Any = {}
        """Start times of messages by key: a dict that the writer fills, or an object with `pop`."""
        self.times: list[tuple[float, float]] = []
        """For each message of `began`: when it was seen, and after what time."""
        self.seen = 0

    def expect(self, key: bytes) -> asyncio.Future[float]:
        """Return a future that is done when the message with this key is seen."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        return future

    async def watch(self) -> None:
        """Read until cancelled."""
        while True:
            batches = await self._consumer.getmany(timeout_ms=200, max_records=20_000)
            now = time.monotonic()
            for records in batches.values():
                for record in records:
                    self._note(record.key, now)

    def _note(self, key: bytes, now: float) -> None:
        self.seen += 1
        began = self.began.pop(key, None)
        if began is not None:
            self.times.append((now, now - began))
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(now)


@asynccontextmanager
async def watching(kafka: str, topic: str) -> AsyncIterator[Watcher]:
    """Read messages written to a topic from now on."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_partition_fetch_bytes=8 << 20,
    )
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # of a Kafka that has just begun
    consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
    await consumer.start()
    await consumer.seek_to_end()
    watcher = Watcher(consumer)
    try:
        async with running(watcher.watch()):
            yield watcher
    finally:
        await consumer.stop()
