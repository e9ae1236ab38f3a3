"""Connections of callers: txbroker's statements become part of their open transaction.

| connection | of |
| --- | --- |
| DB-API connection | sqlite3, psycopg, psycopg2, PyMySQL; others whose driver follows PEP 249 |
| `Connection`, `Session`, `AsyncConnection`, `AsyncSession` | SQLAlchemy |
| `AsyncConnection` | psycopg |
| connection, pooled or not | asyncpg |
| `connection`, `connections[alias]` | Django |
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, TypeAlias, TypeVar

from txbroker.databases.database import Database
from txbroker.databases.dialect import SQLITE, Fault, dialect_named
from txbroker.databases.sessions import driver_of, execute, in_transaction
from txbroker.databases.steps import Query, Result, Steps, one, run, run_async, with_placeholders
from txbroker.databases.tables import CONSUMING, TableSet
from txbroker.errors import ConfigurationError

T = TypeVar("T")
Execute: TypeAlias = Callable[[Query], Result]
ExecuteAsync: TypeAlias = Callable[[Query], Awaitable[Result]]

_DIALECTS = {
    "sqlite3": "sqlite",
    **dict.fromkeys(("psycopg", "psycopg2", "pg8000", "asyncpg"), "postgresql"),
    **dict.fromkeys(("pymysql", "MySQLdb", "mariadb"), "mariadb"),
}
_LOOK_S = 0.4
"""How long a look from another connection waits for a lock; on MariaDB, in whole seconds, not."""
_ASYNCPG_STYLE = "numeric_dollar"


class JoinedTransaction(NamedTuple):
    """The open transaction of a caller's connection.

    Attributes:
        driver: the driver's own connection.
        execute: executes a statement in the transaction.
    """

    database: Database
    tables: TableSet
    driver: Any
    execute: Execute

    def run(self, steps: Steps[T]) -> T:
        """Execute steps in the transaction, and return their result. See `run_on` for errors."""

        def step(query: Query) -> Result:
            if query.apart:
                return self.database.apart(one(query), _LOOK_S)
            return self.execute(query)

        try:
            return run(steps, step)
        except Exception as error:
            if _lasting(self.database, error):
                raise self.database.explain(error, self.tables) from error
            raise


class JoinedAsync(NamedTuple):
    """`JoinedTransaction` for asyncio."""

    database: Database
    tables: TableSet
    driver: Any
    execute: ExecuteAsync

    async def run(self, steps: Steps[T]) -> T:
        """Execute steps in the transaction, and return their result. See `run_on` for errors."""

        async def step(query: Query) -> Result:
            if query.apart:
                return await self.database.apart_async(one(query), _LOOK_S)
            return await self.execute(query)

        try:
            return await run_async(steps, step)
        except Exception as error:
            if _lasting(self.database, error):
                raise self.database.explain(error, self.tables) from error
            raise


def join(database: Database, connection: Any, tables: TableSet = CONSUMING) -> JoinedTransaction:
    """Return the open transaction of a connection.

    Args:
        tables: that are to be used.

    Raises:
        ConfigurationError, DatabaseUnavailable: see `run_on`.
    """
    database.ready(tables)
    return JoinedTransaction(database, tables, *_plain(connection, database))


async def join_async(
    database: Database, connection: Any, tables: TableSet = CONSUMING
) -> JoinedAsync:
    """`join` for asyncio."""
    await database.ready_async(tables)
    return JoinedAsync(database, tables, *await _asynchronous(connection, database))


def run_on(database: Database, connection: Any, steps: Steps[T]) -> T:
    """Execute steps in the open transaction of a caller's connection, and return their result.

    Raises:
        ConfigurationError: nothing was written: no transaction is open, the connection is
            asynchronous or of another kind of database, or the tables are not ready.
        DatabaseUnavailable: the tables cannot be checked.
        Exception: the driver's.
    """
    return join(database, connection).run(steps)


async def run_on_async(database: Database, connection: Any, steps: Steps[T]) -> T:
    """`run_on` for asyncio: for connections whose statements are awaited."""
    return await (await join_async(database, connection)).run(steps)


def _lasting(database: Database, error: Exception) -> bool:
    """Return whether only a change of the installation helps; its caller recognizes the others."""
    return database.dialect.fault(error) in (Fault.NO_TABLE, Fault.DENIED)


# --- plain connections -----------------------------------------------------------------------


def _plain(connection: Any, database: Database) -> tuple[Any, Execute]:
    """Return the driver's connection, and the function that executes statements in its open
    transaction."""
    driver = driver_of(connection)
    if driver == "asyncpg" or _awaits(connection):
        raise ConfigurationError(
            f"{_name(connection)} is asynchronous: await the method whose name ends with _async"
        )
    if driver == "sqlalchemy" and not hasattr(connection, "driver_connection"):
        return _sqlalchemy(connection, database)
    if driver == "django":
        return _django(connection, database)
    # SQLAlchemy's raw_connection() returns a wrapper.
    inner = getattr(connection, "driver_connection", None) or connection
    return _driver(inner, database)


def _awaits(connection: Any) -> bool:
    """Return whether a connection's statements are awaited."""
    kind: Any = type(connection)  # mypy takes no class for hashable
    return _class_awaits(kind)


@lru_cache(maxsize=64)
def _class_awaits(kind: Any) -> bool:
    """Return `_awaits` of a connection's class."""
    return iscoroutinefunction(getattr(kind, "execute", None))


def _driver(connection: Any, database: Database) -> tuple[Any, Execute]:
    if not hasattr(connection, "cursor"):
        raise ConfigurationError(
            f"{_name(connection)} is no connection: pass one of a DB-API driver, SQLAlchemy or "
            "Django"
        )
    _check_dialect(connection, _DIALECTS.get(driver_of(connection)), database)
    style = _style(connection, database)
    if not _joins(connection, database, style):
        raise _outside(database, "BEGIN a transaction first")
    return connection, lambda query: execute(connection, query, style)


def _joins(connection: Any, database: Database, style: str) -> bool:
    """Return whether a statement would be part of a transaction that the caller ends."""
    begun = in_transaction(connection)
    if begun:
        return True
    if begun is None:
        if not database.dialect.in_transaction:
            return False
        query = Query(database.dialect.in_transaction)
        return bool(execute(connection, query, style).rows[0][0])
    if driver_of(connection) == "sqlite3":
        if connection.isolation_level is None or getattr(connection, "autocommit", -1) is True:
            return False
        # As the first INSERT would, but with the write lock: nothing is done for a late one.
        connection.execute("BEGIN IMMEDIATE")
        return True
    return not autocommits(connection)


def autocommits(connection: Any) -> bool:
    """Return whether a driver's connection commits each statement outside a transaction."""
    if driver_of(connection) == "pymysql":
        return bool(connection.get_autocommit())
    return bool(getattr(connection, "autocommit", False))


def _style(connection: Any, database: Database) -> str:
    """Return the `paramstyle` of a connection's driver."""
    module = sys.modules.get(driver_of(connection))
    return str(getattr(module, "paramstyle", "") or database.style)


def _django(connection: Any, database: Database) -> tuple[Any, Execute]:
    _check_dialect(connection, connection.vendor, database)
    if not connection.in_atomic_block and connection.get_autocommit():
        raise _outside(database, "use `with transaction.atomic():`")
    return connection.connection, lambda query: execute(connection, query, "format")


# --- SQLAlchemy ------------------------------------------------------------------------------


def _sqlalchemy(connection: Any, database: Database) -> tuple[Any, Execute]:
    from sqlalchemy.engine import Connection

    inner = connection if isinstance(connection, Connection) else connection.connection()
    join_sqlalchemy(inner, database)
    return driver_connection(inner), lambda query: execute_sqlalchemy(inner, query)


def join_sqlalchemy(connection: Any, database: Database) -> None:
    """Begin the transaction of SQLAlchemy's `Connection` if none is open, as its first statement
    would.

    Raises:
        ConfigurationError: it commits each statement, or is of another kind of database.
    """
    _check_dialect(connection, connection.dialect.name, database)
    level = connection.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    if not connection.in_transaction():
        connection.begin()
    driver = driver_connection(connection)
    begun = in_transaction(driver)
    if database.dialect is SQLITE:
        alone = not begun and driver.isolation_level is None
    else:
        alone = begun is False and driver_of(driver) != "asyncpg" and autocommits(driver)
    if level == "AUTOCOMMIT" or alone:
        raise _outside(database, 'use an engine without isolation_level="AUTOCOMMIT"')


def driver_connection(connection: Any) -> Any:
    """Return the driver's connection of SQLAlchemy's `Connection`, also of one without a pool."""
    found = connection.connection.dbapi_connection
    return getattr(found, "driver_connection", found)


def execute_sqlalchemy(connection: Any, query: Query) -> Result:
    """Execute a statement on SQLAlchemy's `Connection`."""
    style = connection.dialect.dbapi.paramstyle
    result = connection.exec_driver_sql(with_placeholders(query.sql, style), tuple(query.values))
    rows = [tuple(row) for row in result] if result.returns_rows else ()
    return Result(result.rowcount, rows)


# --- asynchronous connections ----------------------------------------------------------------


async def _asynchronous(connection: Any, database: Database) -> tuple[Any, ExecuteAsync]:
    """`_plain` for asyncio."""
    driver = driver_of(connection)
    coroutines = _awaits(connection)
    if driver == "sqlalchemy" and coroutines:
        return await _sqlalchemy_async(connection, database)
    if driver == "asyncpg":
        _check_dialect(connection, _DIALECTS[driver], database)
        if not in_transaction(connection):
            raise _outside(database, "use `async with connection.transaction():`")
        return connection, lambda query: execute_asyncpg(connection, query)
    if driver == "psycopg" and coroutines:
        from txbroker.databases.postgres import execute_async

        _check_dialect(connection, _DIALECTS[driver], database)
        if not in_transaction(connection) and autocommits(connection):
            raise _outside(database, "use `async with connection.transaction():`")
        return connection, lambda query: execute_async(connection, query)
    raise ConfigurationError(
        f"{_name(connection)} is no asynchronous connection that txbroker knows: use one of "
        "psycopg, asyncpg or SQLAlchemy, or call the method without _async in a thread"
    )


async def _sqlalchemy_async(connection: Any, database: Database) -> tuple[Any, ExecuteAsync]:
    from sqlalchemy.ext.asyncio import AsyncConnection

    inner = connection
    if not isinstance(connection, AsyncConnection):
        inner = await connection.connection()
    await inner.run_sync(join_sqlalchemy, database)
    driver = await inner.run_sync(driver_connection)
    return driver, lambda query: inner.run_sync(execute_sqlalchemy, query)


async def execute_asyncpg(connection: Any, query: Query) -> Result:
    """Execute a statement on asyncpg's connection."""
    sql = with_placeholders(query.sql, _ASYNCPG_STYLE)
    if sql.startswith("SELECT"):
        rows = await connection.fetch(sql, *query.values)
        return Result(len(rows), rows)
    status = await connection.execute(sql, *query.values)
    count = status.rpartition(" ")[2]  # "INSERT 0 1"
    return Result(int(count) if count.isdigit() else -1, ())


# --- refusals --------------------------------------------------------------------------------


def _check_dialect(connection: Any, kind: str | None, database: Database) -> None:
    """Refuse a connection to another kind of database; None: the driver is not known."""
    if kind is not None and dialect_named(kind) is not database.dialect:
        raise ConfigurationError(
            f"{_name(connection)} does not belong to {database.name}: pass a connection to the "
            "database that has the txbroker tables"
        )


def _outside(database: Database, step: str) -> ConfigurationError:
    return ConfigurationError(
        f"{database.name}: the connection commits every statement automatically, so the row would "
        f"not be part of your transaction: {step}"
    )


def _name(connection: Any) -> str:
    kind = type(connection)
    return f"{kind.__module__.partition('.')[0]}'s {kind.__qualname__}"
