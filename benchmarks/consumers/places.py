"""Databases for benchmarks, and the inserts that a handler and a plain loop have in common.

A plain loop is what a program does that has its messages already: with the same driver it begins,
inserts a row for each message and commits.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pymysql

from tests.kit.database_servers import MariaServer, PostgresServer
from txbroker.databases.database import Database
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.postgres import Postgres
from txbroker.databases.sqlite import SQLite
from txbroker.databases.steps import Query

TABLE = "bench_result"
Rows = Sequence[tuple[int, int, bytes]]
"""Partition, offset and value of messages."""


class Message(NamedTuple):
    """A message of the plain loop."""

    partition: int
    offset: int
    value: bytes


def rows_of(messages: Sequence[Any]) -> Rows:
    """Return what is inserted for messages."""
    return [(each.partition, each.offset, each.value) for each in messages]


class Place(NamedTuple):
    """A database, and how a program uses it without txbroker.

    Attributes:
        name: of the database, and of the kind of handler.
        connect: opens a connection of the driver, with its defaults.
        mark: stands for a value in the driver's SQL.
        coroutine: its handlers are coroutine functions.
    """

    name: str
    database: Database
    connect: Callable[[], Any]
    mark: str
    coroutine: bool = False

    @property
    def sql(self) -> str:
        """The insert of a message."""
        return f"INSERT INTO {TABLE} VALUES ({self.mark}, {self.mark}, {self.mark})"

    def prepare(self) -> None:
        """Create all tables, that of results without rows."""
        self.database.create()
        session = self.database.open()
        with closing(session):
            blob = self.database.dialect.blob
            session.execute(Query(f"DROP TABLE IF EXISTS {TABLE}"))
            session.execute(
                Query(f"CREATE TABLE {TABLE} (part INTEGER, place BIGINT, value {blob})")
            )

    def stored(self) -> int:
        """Return how many messages have a row, each counted once."""
        session = self.database.open()
        with closing(session):
            found = session.execute(
                Query(f"SELECT DISTINCT part, place FROM {TABLE} WHERE part >= 0")
            )
            total = session.execute(Query(f"SELECT count(*) FROM {TABLE} WHERE part >= 0"))
        if len(found.rows) != total.rows[0][0]:
            raise SystemExit(f"{self.name}: {total.rows[0][0]} rows of {len(found.rows)} messages")
        return len(found.rows)

    # --- what handlers do --------------------------------------------------------------------

    def insert(self, connection: Any, rows: Rows) -> None:
        """Insert rows as a plain handler does."""
        cursor = connection.cursor()
        if len(rows) == 1:
            cursor.execute(self.sql, rows[0])
        else:
            cursor.executemany(self.sql, rows)
        cursor.close()

    async def insert_async(self, connection: Any, rows: Rows) -> None:
        """Insert rows as a coroutine does."""
        async with connection.cursor() as cursor:
            if len(rows) == 1:
                await cursor.execute(self.sql, rows[0])
            else:
                await cursor.executemany(self.sql, rows)

    # --- the plain loop ----------------------------------------------------------------------

    async def alone(self, messages: Sequence[Any], batch: int) -> float:
        """Insert messages without a consumer, in transactions of `batch`; return transactions a
        second."""
        parts = [messages[first : first + batch] for first in range(0, len(messages), batch)]
        if self.coroutine:
            return len(parts) / await self._alone_async(parts)
        with closing(self.connect()) as connection:
            begin = getattr(connection, "begin", None)
            began = time.perf_counter()
            for part in parts:
                if begin is not None:
                    begin()  # the other drivers begin with the first statement
                self.insert(connection, rows_of(part))
                connection.commit()
            return len(parts) / (time.perf_counter() - began)

    async def _alone_async(self, parts: Sequence[Sequence[Any]]) -> float:
        connection = await self.connect()
        async with connection:
            began = time.perf_counter()
            for part in parts:
                await self.insert_async(connection, rows_of(part))
                await connection.commit()
            return time.perf_counter() - began


# The servers' defaults, in place of the small ones of tests.
_POSTGRES: dict[str, str | int] = {"shared_buffers": "128MB"}
_MARIADB: dict[str, str | int] = {
    "innodb_buffer_pool_size": "128M",
    "innodb_log_file_size": "96M",
}
NAMES = ("sqlite", "postgresql", "postgresql-coroutine", "mariadb")


@contextmanager
def places(names: Collection[str], folder: Path) -> Iterator[list[Place]]:
    """Run the servers of databases for the block."""
    with ExitStack() as stack:
        found = []
        if "sqlite" in names:
            file = folder / "bench.db"
            found.append(Place("sqlite", SQLite(file), lambda: sqlite3.connect(file), "?"))
        if {"postgresql", "postgresql-coroutine"} & set(names):
            server = PostgresServer(**_POSTGRES)
            url = stack.enter_context(server).create_database("bench")
            found += [
                Place("postgresql", Postgres(url), lambda: psycopg.connect(url), "%s"),
                Place(
                    "postgresql-coroutine",
                    Postgres(url),
                    lambda: psycopg.AsyncConnection.connect(url),
                    "%s",
                    coroutine=True,
                ),
            ]
        if "mariadb" in names:
            maria = stack.enter_context(MariaServer(**_MARIADB))
            found.append(_mariadb(maria.create_database("bench")))
        yield [place for place in found if place.name in names]


def _mariadb(url: str) -> Place:
    parts = urlsplit(url)
    given: dict[str, Any] = {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password,
        "database": parts.path.lstrip("/"),
    }
    return Place("mariadb", MariaDB(url), lambda: pymysql.connect(**given), "%s")
