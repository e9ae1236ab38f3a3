"""Blocks on connections of callers: a transaction, or a savepoint in the one that is open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any

from txbroker.databases.connections import autocommits, driver_connection, execute_sqlalchemy
from txbroker.databases.dialect import SQLITE, Dialect
from txbroker.databases.sessions import driver_of, in_transaction
from txbroker.databases.steps import Query

_numbers = count()
"""MariaDB forgets a savepoint at the next one of its name."""


@contextmanager
def block_on(dialect: Dialect, connection: Any) -> Iterator[None]:
    """Begin a transaction on a connection, and commit it at the end, or roll it back after an
    error. In an open transaction, an error rolls back to the beginning of the block, and the caller
    commits."""
    driver = driver_of(connection)
    if driver == "django":
        from django.db import transaction

        with transaction.atomic(using=connection.alias):
            yield
    elif driver == "sqlalchemy" and not hasattr(connection, "driver_connection"):
        session = _unwrap(connection)
        if session.in_transaction():
            _begin_sqlite(dialect, session)
            with session.begin_nested():
                yield
        else:
            with session.begin():
                yield
    else:
        # SQLAlchemy's raw_connection() returns a wrapper; another pool's may, too.
        inner = getattr(connection, "driver_connection", None) or connection
        with _savepoint(inner) if _is_open(inner) else _transaction(dialect, inner):
            yield


def _unwrap(connection: Any) -> Any:
    """Return the session of a scoped one, which is a function of it."""
    return connection() if callable(connection) else connection


def _begin_sqlite(dialect: Dialect, connection: Any) -> None:
    """Begin the driver's transaction, which SQLAlchemy leaves to the first change: the end of a
    savepoint without it would commit."""
    if dialect is not SQLITE:
        return
    from sqlalchemy.engine import Connection

    inner = connection if isinstance(connection, Connection) else connection.connection()
    if not in_transaction(driver_connection(inner)):
        execute_sqlalchemy(inner, Query(dialect.begin))


def _is_open(connection: Any) -> bool:
    """Return whether a transaction is open; of a driver that does not show it, the caller opened
    one, as is checked later."""
    return in_transaction(connection) is not False


@contextmanager
def _transaction(dialect: Dialect, connection: Any) -> Iterator[None]:
    # Others begin with their first statement.
    begins = driver_of(connection) in ("sqlite3", "pymysql") or autocommits(connection)
    if begins:
        _execute(connection, dialect.begin)
    try:
        yield
        if autocommits(connection):
            _execute(connection, "COMMIT")
        else:
            connection.commit()
    except BaseException:
        with suppress(Exception):  # the first error is the one to raise
            if autocommits(connection):
                _execute(connection, "ROLLBACK")
            else:
                connection.rollback()
        raise


@contextmanager
def _savepoint(connection: Any) -> Iterator[None]:
    name = f"txbroker_{next(_numbers)}"
    _execute(connection, f"SAVEPOINT {name}")
    try:
        yield
        _execute(connection, f"RELEASE SAVEPOINT {name}")
    except BaseException:
        with suppress(Exception):
            _execute(connection, f"ROLLBACK TO SAVEPOINT {name}")
            _execute(connection, f"RELEASE SAVEPOINT {name}")
        raise


def _execute(connection: Any, sql: str) -> None:
    cursor = connection.cursor()
    try:
        cursor.execute(sql)
    finally:
        cursor.close()


@asynccontextmanager
async def block_on_async(dialect: Dialect, connection: Any) -> AsyncIterator[None]:
    """`block_on` for connections whose statements are awaited."""
    async with await _async_block(dialect, connection):
        yield


async def _async_block(dialect: Dialect, connection: Any) -> AbstractAsyncContextManager[Any]:
    if driver_of(connection) != "sqlalchemy":
        # psycopg's and asyncpg's are savepoints in an open transaction.
        block: AbstractAsyncContextManager[Any] = connection.transaction()
        return block
    session = _unwrap(connection)
    if not session.in_transaction():
        begun: AbstractAsyncContextManager[Any] = session.begin()
        return begun
    await session.run_sync(lambda plain: _begin_sqlite(dialect, plain))
    nested: AbstractAsyncContextManager[Any] = session.begin_nested()
    return nested
