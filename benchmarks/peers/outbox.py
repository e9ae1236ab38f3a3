"""What people do today: an outbox table in the service's own database, polled by a relay.

A service inserts the message into a table in the same local transaction as its business row; a
relay asks for new rows again and again, publishes them to Kafka and removes them. The relay is at
least once: killed between Kafka's answer and the removal, it publishes again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from aiokafka import AIOKafkaProducer

from benchmarks.peers.base import PARTITIONS, Figure, Plan, body_of, run_lanes, times_of
from benchmarks.peers.kafka import Watcher, watching

TOPIC = "outbox"
POLL_S = 0.05
"""The relay's pause where it found nothing; less asks the database twenty times a second and more,
all day long."""
ROWS = 1000
"""As many rows as the relay takes at once."""
_BATCH_BYTES = 4 << 20

Row = tuple[int, bytes, bytes]
"""A row of the outbox: its number, and the message's key and value."""


class RelayStore(Protocol):
    """The relay's side of the database."""

    async def oldest(self) -> Sequence[Row]:
        """Return the oldest rows of the outbox."""
        ...

    async def remove(self, rows: Sequence[Row]) -> None:
        """Remove rows that were published."""
        ...


class Store(RelayStore, Protocol):
    """The service's side too."""

    async def insert(self, lane: int, key: bytes, value: bytes) -> None:
        """Insert an order and its message in one local transaction."""
        ...


async def measure(kafka: str, store: Store, plan: Plan, in_flight: int) -> Figure:
    """Measure with `in_flight` clients, each with sequential orders."""
    value = body_of(plan)
    number = 0
    async with watching(kafka, TOPIC) as watcher, relaying(kafka, store) as relay:

        async def order(lane: int) -> int:
            nonlocal number
            number += 1
            key = f"{in_flight}-{number}".encode()
            watcher.began[key] = time.monotonic()
            await store.insert(lane, key, value)
            return 1

        before = watcher.seen
        began = time.monotonic()
        per_s, times = await run_lanes(plan, in_flight, order)
        visible = in_window(watcher, began + plan.warmup_s, plan.duration_s)
        await _drained(watcher, before + number, relay)
    seconds = [took for _, took in visible]
    published_per_s = len(visible) / plan.duration_s
    return Figure(
        in_flight,
        round(min(per_s, published_per_s), 1),
        times_of(times),
        times_of(seconds),
        {"inserted_per_s": round(per_s, 1)},
    )


def in_window(watcher: Watcher, begin: float, seconds: float) -> list[tuple[float, float]]:
    """Return when messages were seen within a stretch of time, and how long each took."""
    return [one for one in watcher.times if begin <= one[0] <= begin + seconds]


async def _drained(watcher: Watcher, wanted: int, relay: asyncio.Task[None]) -> None:
    """Wait until everything was published, so that the next measurement begins with nothing."""
    while watcher.seen < wanted:
        if relay.done():
            relay.result()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def relaying(kafka: str, store: RelayStore) -> AsyncIterator[asyncio.Task[None]]:
    """Publish the outbox during the block; the yielded task fails if publishing does."""
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka,
        enable_idempotence=True,
        acks="all",
        max_batch_size=_BATCH_BYTES,
        max_request_size=2 * _BATCH_BYTES,
    )
    await producer.start()
    task = asyncio.create_task(_publish(producer, store))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await producer.stop()


async def _publish(producer: AIOKafkaProducer, store: RelayStore) -> None:
    while True:
        rows = await store.oldest()
        if not rows:
            await asyncio.sleep(POLL_S)
            continue
        sent = []
        for partition in range(PARTITIONS):
            batch = producer.create_batch()
            for number, key, value in rows:
                if number % PARTITIONS == partition:
                    batch.append(key=key, value=value, timestamp=None)
            if batch.record_count():
                batch.close()
                sent.append(await producer.send_batch(batch, TOPIC, partition=partition))
        await asyncio.gather(*sent)
        await store.remove(rows)
