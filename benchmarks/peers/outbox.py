"""What people do today: an outbox table in the service's own database, polled by a relay.

A service inserts the message into a table in the same local transaction as its business row; a
relay asks for new rows again and again, publishes them to Kafka and removes them. The relay is at
least once: killed between Kafka's answer and the removal, it publishes again.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

import uvloop
from aiokafka import AIOKafkaProducer

from benchmarks.peers.base import PARTITIONS, Figure, Plan, body_of, run_lanes, times_of
from benchmarks.peers.kafka import (
    KAFKA,
    Watcher,
    create_topics,
    producing,
    running,
    running_kafka,
    watching,
)

TOPIC = "outbox"
POLL_S = 0.05
"""The relay's pause where it found nothing; less asks the database twenty times a second and more,
all day long."""
ROWS = 1000
"""As many rows as the relay takes at once."""
_BATCH_BYTES = 4 << 20

Row = tuple[int, bytes, bytes]
"""A row of the outbox: its number, and the message's key and value."""


Relaying: TypeAlias = AbstractAsyncContextManager["asyncio.Task[None]"]


class RelayStore(Protocol):
    """The relay's side of the database."""

    async def oldest(self) -> Sequence[Row]: ...

    async def remove(self, rows: Sequence[Row]) -> None: ...


async def measure(
    kafka: str, store: SqliteStore, plan: Plan, in_flight: int, relaying: Relaying
) -> Figure:
    """Measure with `in_flight` clients, each with sequential orders.

    Args:
        relaying: publishes the outbox during a block; the yielded task fails if publishing does.
    """
    value = body_of(plan)
    number = 0
    async with watching(kafka, TOPIC) as watcher, relaying as relay:

        async def order(lane: int) -> int:
            nonlocal number
            number += 1
            key = f"{in_flight}-{number}".encode()
            watcher.began[key] = time.monotonic()
            await store.insert(key, value)
            return 1

        before = watcher.seen
        began = time.monotonic()
        per_s, times = await run_lanes(plan, in_flight, order)
        found = figure(plan, in_flight, (per_s, times), watcher, began + plan.warmup_s)
        # Everything is published, so that the next measurement begins with nothing.
        while watcher.seen < before + number:
            if relay.done():
                relay.result()
            await asyncio.sleep(0.05)
    return found


def figure(
    plan: Plan, in_flight: int, inserted: tuple[float, list[float]], watcher: Watcher, begin: float
) -> Figure:
    """Return the figure of orders whose messages were seen during the measurement."""
    per_s, times = inserted
    seconds = [took for at, took in watcher.times if begin <= at <= begin + plan.duration_s]
    return Figure(
        in_flight,
        round(min(per_s, len(seconds) / plan.duration_s), 1),
        times_of(times),
        times_of(seconds),
        {"inserted_per_s": round(per_s, 1)},
    )


@asynccontextmanager
async def relaying(kafka: str, store: RelayStore) -> AsyncIterator[asyncio.Task[None]]:
    """Publish the outbox during the block; the yielded task fails if publishing does."""
    async with (
        producing(kafka, _BATCH_BYTES, max_request_size=2 * _BATCH_BYTES) as producer,
        running(_publish(producer, store)) as task,
    ):
        yield task


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


# --- on SQLite ---

_TABLES = """
CREATE TABLE IF NOT EXISTS orders (id BLOB PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, value BLOB NOT NULL);
"""


class SqliteStore:
    """One connection that writes, as SQLite has one writer at a time, and one that the relay
    reads by. A commit is in the system's hands, not yet on disk, like Kafka's."""

    def __init__(self, path: Path) -> None:
        self._writer, self._reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.path = path
        self.writing, self._reading = _open(path), _open(path)
        self.writing.executescript(_TABLES)

    def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self.writing.close()
        self._reading.close()

    async def insert(self, key: bytes, value: bytes) -> None:
        """Insert an order and its message in one local transaction."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._insert, key, value)

    async def oldest(self) -> Sequence[Row]:
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._oldest)

    async def remove(self, rows: Sequence[Row]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._remove, rows)

    def _insert(self, key: bytes, value: bytes) -> None:
        self.writing.execute("BEGIN IMMEDIATE")
        self.writing.execute("INSERT INTO orders VALUES (?, 'placed')", (key,))
        self.writing.execute("INSERT INTO outbox (key, value) VALUES (?, ?)", (key, value))
        self.writing.execute("COMMIT")

    def _oldest(self) -> Sequence[Row]:
        asked = "SELECT number, key, value FROM outbox ORDER BY number LIMIT ?"
        return self._reading.execute(asked, (ROWS,)).fetchall()

    def _remove(self, rows: Sequence[Row]) -> None:
        # Numbers come in the order of the commits here, so none below the last is missing.
        self.writing.execute("DELETE FROM outbox WHERE number <= ?", (rows[-1][0],))


class SqliteOutbox:
    """An outbox table in SQLite, polled."""

    name = "outbox-sqlite"
    title = "polled outbox, SQLite"
    counts = (
        "an order and its message inserted in one local transaction, published by a relay that "
        f"polls every {POLL_S * 1000:.0f} ms, at least once; journal WAL, synchronous NORMAL"
    )

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}, {KAFKA}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        with running_kafka(folder) as kafka:
            uvloop.run(create_topics(kafka.bootstrap, [TOPIC]))
            for in_flight in plan.in_flight:
                store = self.store(folder / f"outbox-{in_flight}.db")
                try:
                    relay = self.relaying(kafka.bootstrap, store)
                    yield uvloop.run(measure(kafka.bootstrap, store, plan, in_flight, relay))
                finally:
                    store.close()

    def store(self, path: Path) -> SqliteStore:
        """Return a new database."""
        return SqliteStore(path)

    def relaying(self, kafka: str, store: SqliteStore) -> Relaying:
        """Publish the outbox during a block."""
        return relaying(kafka, store)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
