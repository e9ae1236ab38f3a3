"""Real databases for the tests, each with txbroker's tables and a table of business rows."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from tests.kit.until import until
from txbroker.databases import Database, from_url
from txbroker.databases.dialect import Dialect

T = TypeVar("T")

LEVELS = {
    "sqlite": ("delete", "wal"),
    "postgresql": ("read committed", "repeatable read", "serializable"),
    "mariadb": ("read uncommitted", "read committed", "repeatable read", "serializable"),
}
"""Isolation levels; of SQLite, journal modes."""


@dataclass
class Place:
    """A database.

    Attributes:
        level: the isolation level of the connections.
    """

    url: str
    level: str = ""
    database: Database = field(init=False)

    def __post_init__(self) -> None:
        self.database = from_url(self.url, create_tables=True)

    @property
    def dialect(self) -> Dialect:
        return self.database.dialect

    def connect(self) -> Any:
        """Return a connection of the driver's own kind, without autocommit."""
        connection = connect(self.url)
        if self.level and self.dialect.name != "sqlite":
            kind = "CHARACTERISTICS AS" if self.dialect.name == "postgresql" else ""
            run(connection, f"SET SESSION {kind} TRANSACTION ISOLATION LEVEL {self.level}")
            connection.commit()
        return connection

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Commit at the end, or roll back."""
        with closing(self.connect()) as connection:
            try:
                yield connection
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def select(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query in a new transaction."""
        with closing(connect(self.url)) as connection:
            return run(connection, sql)

    def execute(self, sql: str) -> None:
        """Execute a statement and commit it."""
        with closing(connect(self.url)) as connection:
            run(connection, sql)
            connection.commit()

    def waits(self, count: int = 1) -> bool:
        """Return whether statements wait for locks; of SQLite, which does not show it, True."""
        if self.dialect.name == "sqlite":
            return True
        # Without the cache of information_schema.innodb_trx, which frequent readers keep old.
        sql = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
        if self.dialect.name == "postgresql":
            sql = "SELECT 'waits', count(*) FROM pg_locks WHERE NOT granted"
        return int(self.select(sql)[0][1]) >= count

    async def blocked(self, call: Callable[[], T], count: int = 1) -> asyncio.Task[T]:
        """Call a function in a thread, and return once it waits for a lock, or has ended.

        Args:
            count: of statements that wait then.
        """
        task = asyncio.create_task(asyncio.to_thread(call))
        await until(lambda: task.done() or self.waits(count))
        return task


def connect(url: str) -> Any:
    """Return a connection of the driver's own kind, without autocommit."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return sqlite3.connect(parts.path[1:], timeout=20)
    if parts.scheme == "postgresql":
        return psycopg.connect(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 0,
        user=parts.username,
        password=parts.password or "",
        database=parts.path[1:],
    )


def run(connection: Any, sql: str) -> list[tuple[Any, ...]]:
    """Execute a statement and return its rows."""
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []


def sqlite_place(folder: Path, journal: str = "delete") -> Place:
    """Return a new SQLite file."""
    path = folder / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
    return Place(f"sqlite:///{path}", level=journal)


def with_tables(place: Place) -> Place:
    """Create txbroker's tables and a table of orders."""
    place.database.prepare()
    place.execute(f"CREATE TABLE orders (id {place.dialect.key})")
    return place


def place_of(request: pytest.FixtureRequest, tmp_path: Path, kind: str, level: str = "") -> Place:
    """Return a test's database of a kind, with tables: a new file, or the session's database."""
    if kind == "sqlite":
        return with_tables(sqlite_place(tmp_path, level or "delete"))
    name = "postgres_place" if kind == "postgresql" else "mariadb_place"
    server: Place = request.getfixturevalue(name)
    return Place(server.url, level)


def kind_marks(kind: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests of a kind of database."""
    return [] if kind == "sqlite" else [pytest.mark.full]


_aliases: dict[str, str] = {}


def django_alias(place: Place) -> str:
    """Return the alias of a place in Django's settings."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        pymysql.install_as_MySQLdb()
        settings.configure(DATABASES={}, INSTALLED_APPS=["txbroker.databases.django"])
        django.setup()
    parts = urlsplit(place.url)
    alias = _aliases.setdefault(place.url, f"place{len(_aliases)}")
    engine = {"sqlite": "sqlite3", "mariadb": "mysql"}.get(parts.scheme, parts.scheme)
    connections.settings[alias] = {
        **connections.settings["default"],
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": parts.path[1:],
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
    }
    return alias
