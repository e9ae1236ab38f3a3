"""Connections that txbroker opens: they begin and commit its own transactions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Protocol

from txbroker.databases.dialect import Dialect
from txbroker.databases.steps import Query, Result, with_placeholders
from txbroker.errors import ConfigurationError

_IDLE_MAX, _IDLE_S = 8, 30.0
_of_parents: list[Any] = []
"""Sessions of the process that forked this one: never closed."""


class TransactionControlled(ConfigurationError):
    """The consumer begins and ends the transaction of a handler: leave commit and rollback out of
    the handler, and raise an exception to roll back."""


def refuse_control(*_arguments: object, **_options: object) -> Any:
    """Stand in for `commit` and `rollback` of a connection that a handler receives.

    Raises:
        TransactionControlled
    """
    raise TransactionControlled(
        "the handler called commit or rollback, or a method that does: the consumer begins and "
        "ends its transaction. Leave it out, and raise an exception to roll back"
    )


class PlainSession(Protocol):
    """A connection that the caller's thread uses alone.

    Attributes:
        connection: what a handler receives.
    """

    connection: Any

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, as the driver knows without asking the server."""

    def execute(self, query: Query) -> Result: ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class AsyncSession(Protocol):
    """`PlainSession` for asyncio."""

    connection: Any

    @property
    def in_transaction(self) -> bool: ...

    async def execute(self, query: Query) -> Result: ...

    async def begin(self) -> None: ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...

    async def close(self) -> None: ...


class DriverSession:
    """A DB-API connection that commits every statement, unless a transaction was begun.

    Args:
        style: the driver's `paramstyle`.
    """

    def __init__(self, connection: Any, dialect: Dialect, style: str) -> None:
        self.connection = connection
        self._dialect = dialect
        self._style = style

    @property
    def in_transaction(self) -> bool:
        return bool(in_transaction(self.connection))

    def execute(self, query: Query) -> Result:
        """Execute a statement."""
        return execute(self.connection, query, self._style)

    def begin(self) -> None:
        """Begin a transaction that may write."""
        self._command(self._dialect.begin)

    def commit(self) -> None:
        """Commit it."""
        self._command("COMMIT")

    def rollback(self) -> None:
        """Roll it back, if one is open."""
        if in_transaction(self.connection) is not False:
            self._command("ROLLBACK")

    def _command(self, sql: str) -> None:
        """Execute a statement without a result: with less work than `execute`."""
        driver = driver_of(self.connection)
        if driver == "pymysql":
            self.connection.query(sql)
        elif driver in ("sqlite3", "psycopg"):
            self.connection.execute(sql)
        else:
            self.execute(Query(sql))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class SessionPool:
    """Sessions that stay open between their uses, for many threads.

    Args:
        opener: opens a session.
    """

    def __init__(self, opener: Callable[[], PlainSession]) -> None:
        self._open = opener
        self._idle: list[tuple[PlainSession, float]] = []
        self._process = os.getpid()

    @contextmanager
    def lend(self) -> Iterator[PlainSession]:
        """Lend a session for exclusive use. After an error, it and all idle ones are closed:
        they may be lost, too.

        Raises: the driver's error.
        """
        session = self._take() or self._open()
        try:
            yield session
        except BaseException:
            _close(session)
            self.close()
            raise
        if len(self._idle) < _IDLE_MAX:
            self._idle.append((session, time.monotonic()))
        else:
            session.close()

    def close(self) -> None:
        """Close the idle sessions."""
        while session := self._take():
            _close(session)

    def _take(self) -> PlainSession | None:
        """Return an idle session, no longer the pool's; close those that a server or a proxy may
        have closed."""
        if self._process != os.getpid():
            # A forked process must neither use nor close connections of the other one.
            _of_parents.extend(self._idle)
            self._idle, self._process = [], os.getpid()
        while True:
            try:
                session, since = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - since < _IDLE_S:
                return session
            _close(session)


def _close(session: PlainSession) -> None:
    """Close a session after an error, which is the one to raise."""
    with suppress(Exception):
        session.close()


def execute(connection: Any, query: Query, style: str) -> Result:
    """Execute a statement on a DB-API connection.

    Args:
        style: the driver's `paramstyle`.
    """
    cursor = tuple_cursor(connection)
    try:
        cursor.execute(with_placeholders(query.sql, style), tuple(query.values))
        rows = cursor.fetchall() if cursor.description else ()
        return Result(cursor.rowcount, rows)
    finally:
        cursor.close()


def tuple_cursor(connection: Any) -> Any:
    """Return a cursor whose rows are tuples, also where the connection's are dictionaries."""
    driver = driver_of(connection)
    if driver == "psycopg":
        from psycopg.rows import tuple_row

        return connection.cursor(row_factory=tuple_row)
    if driver == "psycopg2":
        from psycopg2.extensions import cursor as plain_cursor

        return connection.cursor(cursor_factory=plain_cursor)
    if driver == "pymysql":
        from pymysql.cursors import Cursor

        return connection.cursor(Cursor)
    cursor = connection.cursor()
    if driver == "sqlite3":
        cursor.row_factory = None
    return cursor


def in_transaction(connection: Any) -> bool | None:
    """Return whether a driver's connection has an open transaction; None: the driver does not show
    it."""
    driver = driver_of(connection)
    if driver in ("sqlite3", "aiosqlite"):
        return bool(connection.in_transaction)
    if driver in ("psycopg", "psycopg2"):
        return int(connection.info.transaction_status) != 0
    if driver == "pymysql":
        return bool(connection.server_status & 1)
    if driver == "asyncpg":
        return bool(connection.is_in_transaction())
    return None


def closed_by_user(connection: Any) -> bool:
    """Return whether a driver's connection was closed; False for one that was lost."""
    driver = driver_of(connection)
    if driver == "sqlite3":
        try:
            return connection.in_transaction is None
        except Exception:
            return True
    if driver == "pymysql":
        return bool(connection._closed)
    return bool(getattr(connection, "closed", False)) and not getattr(connection, "broken", False)


def driver_of(connection: Any) -> str:
    """Return the name of the package that a connection's class comes from, "" if it is unknown."""
    kind: Any = type(connection)  # mypy takes no class for hashable
    return _driver_of(kind)


@lru_cache(maxsize=64)
def _driver_of(connection: Any) -> str:
    """Return `driver_of` of a connection's class."""
    known: Mapping[str, None] = dict.fromkeys(
        ("sqlite3", "psycopg", "psycopg2", "pymysql", "asyncpg", "sqlalchemy", "django")
    )
    for kind in connection.__mro__:
        package: str = kind.__module__.partition(".")[0]
        if package in known:
            return package
    name: str = connection.__module__.partition(".")[0]
    return name
