"""Positions in an SQLite file, for a consumer without a group."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.writing import Copy
from txbroker.errors import ConfigurationError, KafkaUnavailable

T = TypeVar("T")

_APPLICATION_ID = 0x74786263
_VERSION = 1
_SCHEMA = f"""
    PRAGMA application_id = {_APPLICATION_ID};
    PRAGMA user_version = {_VERSION};
    CREATE TABLE position (topic TEXT, partition INTEGER, next INTEGER NOT NULL,
        metadata TEXT NOT NULL, PRIMARY KEY (topic, partition)) WITHOUT ROWID;
    CREATE TABLE failed (id INTEGER PRIMARY KEY, topic TEXT NOT NULL, key BLOB, value BLOB,
        headers TEXT NOT NULL, timestamp_ms INTEGER NOT NULL);
"""


class FileUnavailable(KafkaUnavailable):
    """The file of positions cannot be read or written now; the consumer tries again."""


class InFile:
    """A store of one instance: positions, and messages that failed, in an SQLite file.

    It is locked while in use. `failed` holds the messages that were skipped; their origin and cause
    are in the headers, as in a dead-letter topic.

    Args:
        path: created if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file.

        Raises:
            ConfigurationError: it cannot be opened, is in use or another program's.
        """
        if str(self._path) == ":memory:":
            raise ConfigurationError(
                "InFile needs a file: positions in memory end with the process"
            )
        try:
            connection = sqlite3.connect(self._path, timeout=1, check_same_thread=False)
            connection.isolation_level = None
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            why = "another consumer uses it" if "locked" in str(error) else str(error)
            raise ConfigurationError(
                f"the file {self._path} cannot be used for positions: {why}; each instance needs a "
                "separate file in a folder that it may write"
            ) from None
        self._connection = connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN EXCLUSIVE")
        application, version, tables = (
            connection.execute(query).fetchone()[0]
            for query in (
                "PRAGMA application_id",
                "PRAGMA user_version",
                "SELECT count(*) FROM sqlite_schema",
            )
        )
        if not tables:
            connection.execute("COMMIT")
            connection.executescript(_SCHEMA)
            return
        connection.execute("COMMIT")
        if (application, version) != (_APPLICATION_ID, _VERSION):
            raise ConfigurationError(
                f"the file {self._path} is another program's, or a newer version's: name another "
                "file"
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """See `GroupMember.load`."""
        return await self._in_thread(lambda: self._load(list(partitions)))

    def _load(self, partitions: Sequence[Partition]) -> dict[Partition, StoredOffset]:
        query = "SELECT next, metadata FROM position WHERE topic = ? AND partition = ?"
        with self._lock:
            rows = {place: self._open().execute(query, place).fetchone() for place in partitions}
        return {place: StoredOffset(*row) for place, row in rows.items() if row is not None}

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        """Store offsets and copies in one transaction, see `GroupMember.commit`."""
        await self._in_thread(lambda: self._commit(dict(offsets), list(copies)))

    async def _in_thread(self, access: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(access)
        except sqlite3.Error as error:
            raise FileUnavailable(
                f"positions cannot be kept in {self._path}: {error}: check disk and rights"
            ) from None

    def _commit(self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy]) -> None:
        rows = [(*place, *stored) for place, stored in offsets.items()]
        now_ms = round(time.time() * 1000)
        failed = [
            (
                copy.topic,
                copy.record.key,
                copy.record.value,
                msgspec.json.encode(list(copy.record.headers)).decode(),
                now_ms,
            )
            for copy in copies
        ]
        with self._lock:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany("REPLACE INTO position VALUES (?, ?, ?, ?)", rows)
                connection.executemany("INSERT INTO failed VALUES (NULL, ?, ?, ?, ?, ?)", failed)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ConfigurationError(f"the file {self._path} is closed")
        return self._connection
