"""Databases of SQLAlchemy's engines and Django's settings: sessions, barriers, tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.databases.callers import ASYNC_DRIVERS, DRIVERS, engine, engine_url
from tests.databases.places import Place, django_alias, run, sqlite_place, with_tables
from tests.kit.until import unique, until
from txbroker.core.records import Decision
from txbroker.databases import (
    Barrier,
    Database,
    DatabaseUnavailable,
    TooLate,
    from_django,
    from_sqlalchemy,
)
from txbroker.databases.database import steps_in_transaction_async
from txbroker.databases.sessions import TransactionControlled
from txbroker.databases.steps import Query, Steps
from txbroker.errors import ConfigurationError


class Library(NamedTuple):
    """What opens sessions.

    Attributes:
        kind: of database.
        database: returns that of a place.
        execute: executes SQL on the connection of a handler.
    """

    kind: str
    database: Callable[[Place], Database]
    execute: Callable[[Any, str], Any]


def _sqlalchemy(place: Place) -> Database:
    return from_sqlalchemy(engine(place))


def _exec(connection: Any, sql: str) -> Any:
    return connection.exec_driver_sql(sql)


def _sqlalchemy_async(driver: str) -> Callable[[Place], Database]:
    return lambda place: from_sqlalchemy(
        create_async_engine(engine_url(place, driver), poolclass=NullPool)
    )


def _params(libraries: dict[str, Library]) -> list[Any]:
    return [
        pytest.param(each, id=name, marks=[] if each.kind == "sqlite" else [pytest.mark.full])
        for name, each in libraries.items()
    ]


PLAIN = _params(
    {f"{kind} engine": Library(kind, _sqlalchemy, _exec) for kind in DRIVERS}
    | {
        f"{kind} Django": Library(kind, lambda place: from_django(django_alias(place)), run)
        for kind in DRIVERS
    }
)
ASYNC = _params(
    {
        driver: Library(kind, _sqlalchemy_async(driver), _exec)
        for driver, kind in ASYNC_DRIVERS.items()
    }
)
SERVERS = [each for each in ASYNC if each.marks]
OWN = _params({"postgresql": Library("postgresql", lambda place: place.database, run)})


@pytest.fixture
def id() -> str:
    return unique("tx")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """The database of the library."""
    kind = request.node.callspec.params["library"].kind
    if kind == "sqlite":
        return with_tables(sqlite_place(request.getfixturevalue("tmp_path"), "wal"))
    name = "postgres_place" if kind == "postgresql" else "mariadb_place"
    found: Place = request.getfixturevalue(name)
    return found


def insertion(id: str) -> str:
    return f"INSERT INTO orders (id) VALUES ('{id}')"


def ids(place: Place, id: str) -> list[Any]:
    return [row[0] for row in place.select("SELECT id FROM orders") if row[0].startswith(id)]


@pytest.mark.parametrize("library", PLAIN)
def test_session(library: Library, place: Place, id: str) -> None:
    with closing(library.database(place).open()) as session:
        assert not session.in_transaction
        session.execute(Query(insertion(f"{id}-alone")))
        assert ids(place, id) == [f"{id}-alone"]
        for end in (session.rollback, session.commit):
            session.begin()
            assert session.in_transaction
            session.execute(Query(insertion(f"{id}-own")))
            library.execute(session.connection, insertion(f"{id}-handler"))
            assert session.in_transaction
            end()
            assert not session.in_transaction
    assert sorted(ids(place, id)) == [f"{id}-alone", f"{id}-handler", f"{id}-own"]


@pytest.mark.parametrize("library", PLAIN)
def test_handler_cannot_commit(library: Library, place: Place, id: str) -> None:
    from django.db.transaction import TransactionManagementError

    with closing(library.database(place).open()) as session:
        session.begin()
        library.execute(session.connection, insertion(id))
        with pytest.raises((TransactionControlled, TransactionManagementError)):
            session.connection.commit()
        session.rollback()
        assert ids(place, id) == []
        session.begin()
        library.execute(session.connection, "COMMIT")
        assert not session.in_transaction


@pytest.mark.parametrize("library", [each for each in PLAIN if each.marks])
def test_barrier_has_its_own_connection(library: Library, place: Place, id: str) -> None:
    """A check in the middle of a transaction of the same thread neither joins nor ends it."""
    database = library.database(place)
    barrier = Barrier(database)
    with closing(database.open()) as session:
        session.begin()
        assert barrier.check(id) is Decision.ROLLBACK
        with pytest.raises(TooLate):
            barrier.record(session.connection, id)
        assert session.in_transaction
        session.rollback()
    assert Barrier(place.database).check(id) is Decision.ROLLBACK


@pytest.mark.parametrize("library", ASYNC)
async def test_asynchronous_session(library: Library, place: Place, id: str) -> None:
    database = library.database(place)
    session = await database.open_async()
    await session.execute(Query(insertion(f"{id}-alone")))
    assert not session.in_transaction
    for end in (session.rollback, session.commit):
        await session.begin()
        assert session.in_transaction
        await session.execute(Query(insertion(f"{id}-own")))
        await library.execute(session.connection, insertion(f"{id}-handler"))
        assert session.in_transaction
        await end()
        assert not session.in_transaction
    await session.begin()
    await library.execute(session.connection, insertion(f"{id}-refused"))
    with pytest.raises(TransactionControlled):
        await session.connection.commit()
    await session.rollback()
    assert sorted(ids(place, id)) == [f"{id}-alone", f"{id}-handler", f"{id}-own"]
    await session.begin()
    await library.execute(session.connection, "COMMIT")
    assert not session.in_transaction
    await session.close()
    assert await Barrier(database).check_async(id) is Decision.ROLLBACK
    with pytest.raises(ConfigurationError, match="_async"):
        Barrier(database).check(id)


@pytest.mark.parametrize("library", [*SERVERS, *OWN])
async def test_cancelled_statement(library: Library, place: Place, id: str) -> None:
    """The caller sees the cancellation, not the loss of the connection that it causes. Its
    transaction ends with the session."""
    sql = f"UPDATE orders SET id = '{id}-later' WHERE id = '{id}'"

    def steps() -> Steps[None]:
        yield Query(sql)

    place.execute(insertion(id))
    session = await library.database(place).open_async()
    with place.transaction() as other:
        run(other, sql)
        task = asyncio.create_task(steps_in_transaction_async(steps(), session))
        await until(place.waits)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await session.close()
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    await until(lambda: not place.select(f"SELECT state {others}"))


def test_limits_do_not_reach_the_pool(postgres_place: Place, id: str) -> None:
    pooled = sqlalchemy.create_engine(engine_url(postgres_place), pool_size=1, max_overflow=0)
    assert Barrier(from_sqlalchemy(pooled)).check(id) is Decision.ROLLBACK
    with pooled.connect() as connection:
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "0"
    pooled.dispose()


def test_bad_engines_are_refused(postgres_place: Place) -> None:
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        from_sqlalchemy(engine(postgres_place, isolation_level="AUTOCOMMIT")).open()
    oracle = engine(postgres_place)
    oracle.dialect.name = "oracle"
    with pytest.raises(ConfigurationError, match="no tables for 'oracle'"):
        from_sqlalchemy(oracle)
    with pytest.raises(ConfigurationError, match="not str"):
        from_sqlalchemy("sqlite://")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="in memory"):
        from_sqlalchemy(sqlalchemy.create_engine("sqlite://"), create_tables=True).prepare()
    named = from_sqlalchemy(sqlalchemy.create_engine("postgresql+psycopg://u:secret@h/d"))
    assert "secret" not in named.name


def test_django_transaction_with_a_caught_error_is_not_committed(tmp_path: Any, id: str) -> None:
    from django.db import IntegrityError, transaction
    from django.db.transaction import TransactionManagementError

    place = with_tables(sqlite_place(tmp_path))
    alias = django_alias(place)
    with closing(from_django(alias).open()) as session:
        session.begin()
        session.execute(Query(insertion(id)))
        with (
            pytest.raises(IntegrityError),
            transaction.atomic(using=alias, savepoint=False),
        ):
            run(session.connection, "INSERT INTO txbroker_schema (version) VALUES (1)")
        with pytest.raises(TransactionManagementError):
            session.commit()
        session.rollback()
    assert ids(place, id) == []


def test_lost_connection_of_django_ends_its_session(postgres_place: Place, id: str) -> None:
    """Django would open another one, without the limits of the session."""
    session = from_django(django_alias(postgres_place)).open()
    session.begin()
    pid = session.execute(Query("SELECT pg_backend_pid()")).rows[0][0]
    postgres_place.select(f"SELECT pg_terminate_backend({pid}, 5000)")
    with pytest.raises(DatabaseUnavailable):
        session.rollback()
    session.close()
