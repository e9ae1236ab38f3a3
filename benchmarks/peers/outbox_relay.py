"""txbroker's outbox and relay, measured as the polled outboxes are.

The relay is `txbroker outbox relay` in a separate process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg

from benchmarks.peers.outbox import TOPIC, Relaying, SqliteOutbox, SqliteStore
from benchmarks.peers.outbox_postgres import ACCOUNT, PostgresOutbox
from txbroker.databases import Postgres, SQLite
from txbroker.relay import Message, Outbox

_TXBROKER = (sys.executable, "-m", "txbroker")
_UNREAD = """
SELECT pg_current_wal_flush_lsn() - confirmed_flush_lsn FROM pg_replication_slots
"""
_UNREAD_BYTES = 100_000
"""Other WAL than that of orders."""
_ORDERS = "CREATE TABLE orders (id text PRIMARY KEY, state text NOT NULL)"


class RelayedSqlite(SqliteOutbox):
    """txbroker's outbox on SQLite."""

    name = "txbroker-outbox-sqlite"
    title = "txbroker outbox, SQLite"
    counts = (
        "an order and its message inserted in one local transaction by `Outbox.add`, published by "
        "`txbroker outbox relay`, exactly once; journal WAL, synchronous NORMAL"
    )

    def store(self, path: Path) -> SqliteStore:
        return _Store(path)

    def relaying(self, kafka: str, store: SqliteStore) -> Relaying:
        return _relaying(f"sqlite:///{store.path}", kafka)


class _Store(SqliteStore):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._outbox = Outbox(SQLite(path))
        self._outbox.create()

    def _insert(self, key: bytes, value: bytes) -> None:
        self.writing.execute("BEGIN IMMEDIATE")
        self.writing.execute("INSERT INTO orders VALUES (?, 'placed')", (key,))
        self._outbox.add(self.writing, Message(TOPIC, key, value))
        self.writing.execute("COMMIT")


class RelayedPostgres(PostgresOutbox):
    """txbroker's outbox on PostgreSQL."""

    name = "txbroker-outbox-postgres"
    title = "txbroker outbox, PostgreSQL"
    counts = (
        "an order and its message inserted in one local transaction by pgbench, published by "
        "`txbroker outbox relay`, exactly once; synchronous_commit off"
    )
    message = (
        "INSERT INTO txbroker_outbox (topic, message_key, message_value) SELECT 'outbox', "
        "convert_to(key, 'UTF8'), convert_to(repeat('x', {size}), 'UTF8')"
    )

    def prepare(self, sockets: Path) -> None:
        Outbox(Postgres(_url(sockets))).create()
        with psycopg.connect(_url(sockets)) as connection:
            connection.execute(_ORDERS)

    def relaying(self, kafka: str, sockets: Path) -> Relaying:
        return _relaying(_url(sockets), kafka)

    async def pending(self, sockets: Path) -> bool:
        async with await psycopg.AsyncConnection.connect(_url(sockets)) as connection:
            found = await connection.execute(
                "SELECT 1 FROM txbroker_outbox WHERE state = 'LOCAL_COMMIT' LIMIT 1"
            )
            return await found.fetchone() is not None


class EmittedPostgres(RelayedPostgres):
    """txbroker's outbox without a table."""

    name = "txbroker-emitted-postgres"
    title = "txbroker capture of emitted messages, PostgreSQL"
    counts = (
        "an order inserted and its message emitted in one local transaction by pgbench, published "
        "by `txbroker capture run`, exactly once; synchronous_commit off"
    )
    message = (
        """SELECT pg_logical_emit_message(true, 'txbroker', '[{{"topic": "outbox", "key": "' """
        """|| key || '", "value": "' || repeat('x', {size}) || '"}}]')"""
    )
    wal_level = "logical"

    def prepare(self, sockets: Path) -> None:
        with psycopg.connect(_url(sockets)) as connection:
            connection.execute(_ORDERS)
        mapping = f'name = "orders"\ndatabase = "{_url(sockets)}"\nemitted = true\n'
        self._mapping(sockets).write_text(mapping)
        apply = (*_TXBROKER, "capture", "apply", str(self._mapping(sockets)), "--yes")
        subprocess.run(apply, check=True, capture_output=True)

    def relaying(self, kafka: str, sockets: Path) -> Relaying:
        return _running("capture", "run", str(self._mapping(sockets)), "--kafka", kafka)

    async def pending(self, sockets: Path) -> bool:
        async with await psycopg.AsyncConnection.connect(_url(sockets)) as connection:
            found = await connection.execute(_UNREAD)
            row = await found.fetchone()
        return row is not None and row[0] > _UNREAD_BYTES

    def _mapping(self, sockets: Path) -> Path:
        return sockets / "orders.toml"


def _url(sockets: Path) -> str:
    return f"postgresql:///postgres?host={sockets}&user={ACCOUNT}"


def _relaying(url: str, kafka: str) -> Relaying:
    # The polled outbox deletes its rows, too.
    return _running("outbox", "relay", url, "--kafka", kafka, "--keep-s", "0")


@asynccontextmanager
async def _running(*command: str) -> AsyncIterator[asyncio.Task[None]]:
    process = await asyncio.create_subprocess_exec(
        *_TXBROKER, *command, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    line = await process.stderr.readline()
    assert b"running" in line, line
    ended = asyncio.create_task(_end_of(process))
    try:
        yield ended
    finally:
        process.terminate()
        await ended


async def _end_of(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    output = await process.stderr.read()
    if await process.wait() > 0:
        raise AssertionError(output.decode())
