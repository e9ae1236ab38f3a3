"""A polled outbox on SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from benchmarks.peers.base import Figure, Plan
from benchmarks.peers.kafka import KAFKA, create_topics, running_kafka
from benchmarks.peers.outbox import POLL_S, ROWS, TOPIC, Row, measure

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
        self._writing, self._reading = _open(path), _open(path)
        self._writing.executescript(_TABLES)

    def close(self) -> None:
        """Close both."""
        self._writer.shutdown()
        self._reader.shutdown()
        self._writing.close()
        self._reading.close()

    async def insert(self, lane: int, key: bytes, value: bytes) -> None:
        """Insert an order and its message in one local transaction."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._insert, key, value)

    async def oldest(self) -> Sequence[Row]:
        """Return the oldest rows of the outbox."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._oldest)

    async def remove(self, rows: Sequence[Row]) -> None:
        """Remove rows that were published."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._remove, rows)

    def _insert(self, key: bytes, value: bytes) -> None:
        self._writing.execute("BEGIN IMMEDIATE")
        self._writing.execute("INSERT INTO orders VALUES (?, 'placed')", (key,))
        self._writing.execute("INSERT INTO outbox (key, value) VALUES (?, ?)", (key, value))
        self._writing.execute("COMMIT")

    def _oldest(self) -> Sequence[Row]:
        asked = "SELECT number, key, value FROM outbox ORDER BY number LIMIT ?"
        return self._reading.execute(asked, (ROWS,)).fetchall()

    def _remove(self, rows: Sequence[Row]) -> None:
        # Numbers come in the order of the commits here, so none below the last is missing.
        self._writing.execute("DELETE FROM outbox WHERE number <= ?", (rows[-1][0],))


class SqliteOutbox:
    """An outbox table in SQLite, polled."""

    name = "outbox-sqlite"
    title = "polled outbox, SQLite"
    counts = (
        "an order and its message inserted in one local transaction, published by a relay that "
        f"polls every {POLL_S * 1000:.0f} ms, at least once; journal WAL, synchronous NORMAL"
    )

    def version(self) -> str:
        """Return name and version of the software."""
        return f"SQLite {sqlite3.sqlite_version}, {KAFKA}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        """Measure on a new database and Kafka."""
        with running_kafka(folder) as kafka:
            uvloop.run(create_topics(kafka.bootstrap, [TOPIC]))
            for in_flight in plan.in_flight:
                store = SqliteStore(folder / f"outbox-{in_flight}.db")
                try:
                    yield uvloop.run(measure(kafka.bootstrap, store, plan, in_flight))
                finally:
                    store.close()


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
