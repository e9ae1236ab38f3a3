"""Connections of services, as each library opens them: in a transaction, and outside one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
)
from typing import Any, NamedTuple

import asyncpg
import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from pymysql.cursors import DictCursor
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from tests.databases.places import Place, connect, django_alias

DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql"}
ASYNC_DRIVERS = {
    "sqlite+aiosqlite": "sqlite",
    "postgresql+asyncpg": "postgresql",
    "postgresql+psycopg": "postgresql",
}


class Caller(NamedTuple):
    """A library.

    Attributes:
        kind: of database.
        inside: lends a connection in a transaction, which it commits, or rolls back after an error.
        outside: lends a connection that commits each statement.
    """

    kind: str
    inside: Callable[[Place], AbstractContextManager[Any]]
    outside: Callable[[Place], AbstractContextManager[Any]]


class AsyncCaller(NamedTuple):
    """`Caller` for asyncio."""

    kind: str
    inside: Callable[[Place], AbstractAsyncContextManager[Any]]
    outside: Callable[[Place], AbstractAsyncContextManager[Any]]


# --- DB-API ----------------------------------------------------------------------------------


class Wrapped:
    """A connection of a pool that txbroker does not know."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def cursor(self) -> Any:
        return self._connection.cursor()


def _raw(place: Place) -> Any:
    return connect(place.url)


def autocommitting(place: Place) -> Any:
    """Return a connection that commits each statement."""
    connection = connect(place.url)
    if place.dialect.name == "sqlite":
        connection.isolation_level = None
    elif place.dialect.name == "postgresql":
        connection.autocommit = True
    else:
        connection.autocommit(True)
    return connection


def _dictionaries(place: Place) -> Any:
    connection = connect(place.url)
    if place.dialect.name == "sqlite":
        connection.row_factory = lambda cursor, row: {"n": row}
    elif place.dialect.name == "postgresql":
        connection.row_factory = dict_row
    else:
        connection.cursorclass = DictCursor
    return connection


def dbapi(
    kind: str,
    open_: Callable[[Place], Any] = _raw,
    *,
    begin: str = "",
    shown: Callable[[Any], Any] = lambda connection: connection,
) -> Caller:
    """Return a caller that uses a driver's connection."""

    @contextmanager
    def inside(place: Place) -> Iterator[Any]:
        with closing(open_(place)) as connection:
            if begin:
                connection.cursor().execute(begin)
            try:
                yield shown(connection)
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    @contextmanager
    def outside(place: Place) -> Iterator[Any]:
        with closing(autocommitting(place)) as connection:
            yield shown(connection)

    return Caller(kind, inside, outside)


# --- SQLAlchemy ------------------------------------------------------------------------------


def engine_url(place: Place, driver: str = "") -> str:
    """Return the URL of a place for SQLAlchemy."""
    scheme, rest = place.url.split("://")
    return f"{driver or DRIVERS[scheme]}://{rest}"


def engine(place: Place, **options: Any) -> sqlalchemy.Engine:
    """Return an engine that keeps no connections."""
    return sqlalchemy.create_engine(engine_url(place), poolclass=NullPool, **options)


def alchemy(kind: str, wrap: Callable[[Any], Any]) -> Caller:
    """Return a caller that uses SQLAlchemy.

    Args:
        wrap: returns the object to pass for an engine.
    """

    def lent(*levels: str) -> Callable[[Place], AbstractContextManager[Any]]:
        @contextmanager
        def lend(place: Place) -> Iterator[Any]:
            options = {"isolation_level": levels[0]} if levels else {}
            with closing(wrap(engine(place, **options))) as connection:
                yield connection
                connection.commit()

        return lend

    return Caller(kind, lent(), lent("AUTOCOMMIT"))


def alchemy_async(driver: str, wrap: Callable[[Any], Any]) -> AsyncCaller:
    """`alchemy` for an asynchronous driver."""

    def lent(*levels: str) -> Callable[[Place], AbstractAsyncContextManager[Any]]:
        @asynccontextmanager
        async def lend(place: Place) -> AsyncIterator[Any]:
            options = {"isolation_level": levels[0]} if levels else {}
            url = engine_url(place, driver)
            async_engine = create_async_engine(url, poolclass=NullPool, **options)
            async with wrap(async_engine) as connection:
                yield connection
                await connection.commit()

        return lend

    return AsyncCaller(ASYNC_DRIVERS[driver], lent(), lent("AUTOCOMMIT"))


@asynccontextmanager
async def _async_scoped(async_engine: Any) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import async_sessionmaker

    scope = async_scoped_session(async_sessionmaker(async_engine), scopefunc=lambda: 1)
    try:
        yield scope
    finally:
        await scope.remove()


# --- others ----------------------------------------------------------------------------------


def django(kind: str) -> Caller:
    """Return a caller that uses Django."""

    @contextmanager
    def inside(place: Place) -> Iterator[Any]:
        from django.db import connections, transaction

        alias = django_alias(place)
        with closing(connections[alias]), transaction.atomic(using=alias):
            yield connections[alias]

    @contextmanager
    def outside(place: Place) -> Iterator[Any]:
        from django.db import connections

        with closing(connections[django_alias(place)]) as connection:
            yield connection

    return Caller(kind, inside, outside)


@asynccontextmanager
async def _psycopg(place: Place) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(place.url) as connection:
        yield connection


@asynccontextmanager
async def _psycopg_autocommit(place: Place) -> AsyncIterator[Any]:
    connect = psycopg.AsyncConnection.connect
    async with await connect(place.url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@asynccontextmanager
async def _psycopg_block(place: Place) -> AsyncIterator[Any]:
    async with _psycopg_autocommit(place) as connection, connection.transaction():
        yield connection


@asynccontextmanager
async def _asyncpg(place: Place) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(place.url)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _asyncpg_block(place: Place) -> AsyncIterator[Any]:
    async with _asyncpg(place) as connection, connection.transaction():
        yield connection


@asynccontextmanager
async def _asyncpg_pool(place: Place) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(place.url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        yield connection


# --- all -------------------------------------------------------------------------------------

_BEGIN = {"sqlite": "BEGIN", "postgresql": "BEGIN", "mariadb": "START TRANSACTION"}

CALLERS = {
    **{f"{kind}": dbapi(kind) for kind in DRIVERS},
    **{f"{kind} autocommit": dbapi(kind, autocommitting, begin=_BEGIN[kind]) for kind in DRIVERS},
    **{f"{kind} dictionaries": dbapi(kind, _dictionaries) for kind in DRIVERS},
    **{f"{kind} unknown": dbapi(kind, shown=Wrapped) for kind in DRIVERS if kind != "sqlite"},
    **{f"{kind} Connection": alchemy(kind, lambda engine: engine.connect()) for kind in DRIVERS},
    **{f"{kind} Session": alchemy(kind, Session) for kind in DRIVERS},
    **{
        f"{kind} scoped_session": alchemy(kind, lambda e: scoped_session(sessionmaker(e)))
        for kind in DRIVERS
    },
    **{f"{kind} Django": django(kind) for kind in DRIVERS},
}
ASYNC_CALLERS = {
    "psycopg": AsyncCaller("postgresql", _psycopg, _psycopg_autocommit),
    "psycopg block": AsyncCaller("postgresql", _psycopg_block, _psycopg_autocommit),
    "asyncpg": AsyncCaller("postgresql", _asyncpg_block, _asyncpg),
    "asyncpg pool": AsyncCaller("postgresql", _asyncpg_pool, _asyncpg),
    **{
        f"{driver} AsyncConnection": alchemy_async(driver, lambda engine: engine.connect())
        for driver in ASYNC_DRIVERS
    },
    **{f"{driver} AsyncSession": alchemy_async(driver, AsyncSession) for driver in ASYNC_DRIVERS},
    "async_scoped_session": alchemy_async("postgresql+asyncpg", _async_scoped),
}
