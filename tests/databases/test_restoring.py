"""What a handler changes in its session: the next message finds it as it was opened, or another
session."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.string import StrDumper
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.databases import test_engines
from tests.databases.callers import engine
from tests.databases.places import Place, run, sqlite_place
from tests.databases.test_engines import ASYNC, PLAIN, Library
from txbroker.databases import from_sqlalchemy
from txbroker.databases.dialect import Fault
from txbroker.databases.restoring import Restorer
from txbroker.databases.steps import Query

place = test_engines.place
DRIVERS = [
    pytest.param(
        Library(kind, lambda where: where.database, run),
        id=f"{kind} driver",
        marks=[] if kind == "sqlite" else [pytest.mark.full],
    )
    for kind in ("sqlite", "postgresql", "mariadb")
]
KINDS = [*DRIVERS, *PLAIN]
CHANGES = {
    "postgresql": {
        "SET search_path TO pg_temp": "SHOW search_path",
        "SET statement_timeout = '7s'": "SHOW statement_timeout",
        "SET lock_timeout = 1": "SHOW lock_timeout",
        "SET idle_in_transaction_session_timeout = 0": "SHOW idle_in_transaction_session_timeout",
        "SET TIME ZONE 'Asia/Tokyo'": "SHOW timezone",
        "SET default_transaction_read_only = on": "SHOW default_transaction_read_only",
        "SET default_transaction_isolation = 'serializable'": "SHOW default_transaction_isolation",
        "SET application_name = 'mine'": "SHOW application_name",
        "SET other.setting = 'x'": "SELECT coalesce(current_setting('other.setting', true), '')",
        "CREATE TEMP TABLE scratch (n int)": "SELECT to_regclass('pg_temp.scratch') IS NULL",
        "DECLARE held CURSOR WITH HOLD FOR SELECT 1": "SELECT count(*) FROM pg_cursors",
        "LISTEN elsewhere": "SELECT count(*) FROM pg_listening_channels()",
        "SELECT pg_advisory_lock(4711)": (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711"
        ),
    },
    "mariadb": {
        "CREATE TEMPORARY TABLE scratch (n INT)": "SELECT 'is created again'",
        "USE information_schema": "SELECT DATABASE()",
        "SET sql_mode = 'ANSI'": "SELECT @@sql_mode",
        "SET time_zone = '+09:00'": "SELECT @@time_zone",
        "SET autocommit = 0": "SELECT @@autocommit",
        "SET max_statement_time = 1": "SELECT @@max_statement_time",
        "SET innodb_lock_wait_timeout = 1": "SELECT @@innodb_lock_wait_timeout",
        "SET SESSION TRANSACTION READ ONLY": "SELECT @@tx_read_only",
        "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE": "SELECT @@tx_isolation",
        "SET NAMES latin1": "SELECT @@character_set_client, @@collation_connection",
        "SET @mine = 1": "SELECT @mine",
        "SELECT GET_LOCK('mine', 0)": "SELECT IS_USED_LOCK('mine')",
    },
}
CLOSING = {
    "sqlite": [
        "PRAGMA recursive_triggers = ON",
        "ATTACH ':memory:' AS other",
        "CREATE TEMP TABLE scratch (n)",
    ],
    "postgresql": ["PREPARE mine AS SELECT 1"],
}


def state(session: Any, kind: str) -> list[Any]:
    return [list(map(tuple, session.execute(Query(sql)).rows)) for sql in CHANGES[kind].values()]


@pytest.mark.parametrize("library", [each for each in KINDS if each.marks])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_session_is_restored(library: Library, place: Place, end: str) -> None:
    with closing(library.database(place).open(7.0)) as session:
        session.lend()
        before = state(session, library.kind)
        for _ in range(2):
            session.begin()
            for sql in CHANGES[library.kind]:
                library.execute(session.connection, sql)
            getattr(session, end)()
            assert session.reusable
            assert state(session, library.kind) == before


@pytest.mark.parametrize("library", [each for each in ASYNC if each.marks])
async def test_asynchronous_session_is_restored(library: Library, place: Place) -> None:
    session = await library.database(place).open_async(7.0)
    await session.lend()

    async def state() -> list[Any]:
        probes = CHANGES[library.kind].values()
        return [list((await session.execute(Query(sql))).rows) for sql in probes]

    before = await state()
    for end in (session.commit, session.rollback):
        await session.begin()
        for sql in CHANGES[library.kind]:
            await library.execute(session.connection, sql)
        await end()
        assert session.reusable
        assert await state() == before
    await session.close()


@pytest.mark.full
async def test_session_of_psycopg_is_restored(postgres_place: Place) -> None:
    session = await postgres_place.database.open_async(7.0)
    await session.lend()

    async def state() -> list[Any]:
        probes = CHANGES["postgresql"].values()
        return [list((await session.execute(Query(sql))).rows) for sql in probes]

    before = await state()
    factory = session.connection.row_factory
    for end in (session.commit, session.rollback):
        await session.begin()
        session.connection.row_factory = lambda _cursor: lambda values: values
        for sql in CHANGES["postgresql"]:
            await session.connection.execute(sql)
        await end()
        assert session.reusable
        assert session.connection.row_factory is factory
        assert await state() == before
    await session.close()


@pytest.mark.parametrize("library", [each for each in KINDS if each.values[0].kind in CLOSING])
def test_session_that_cannot_be_restored_is_closed(
    library: Library,
    place: Place,
) -> None:
    for sql in CLOSING[library.kind]:
        with closing(library.database(place).open()) as session:
            session.lend()
            session.begin()
            library.execute(session.connection, "SELECT 1")
            session.commit()
            assert session.reusable
            session.begin()
            library.execute(session.connection, sql)
            session.commit()
            assert not session.reusable, sql


@pytest.mark.parametrize("library", [each for each in ASYNC if not each.marks])
async def test_session_of_aiosqlite(library: Library, place: Place) -> None:
    session = await library.database(place).open_async()
    await session.lend()
    for sql, clean in (("SELECT 1", True), ("CREATE TEMP TABLE scratch (n)", False)):
        await session.begin()
        await library.execute(session.connection, sql)
        await session.commit()
        assert session.reusable is clean
    await session.close()


@pytest.mark.rule(38)
def test_attributes_of_sqlite_are_restored(tmp_path: Path) -> None:
    with closing(sqlite_place(tmp_path).database.open()) as session:
        session.lend()
        session.begin()
        session.connection.row_factory = sqlite3.Row
        session.commit()
        assert session.connection.row_factory is None
        session.begin()
        session.connection.create_function("lower", 1, len)
        session.rollback()
        assert not session.reusable


@pytest.mark.parametrize("library", KINDS)
def test_transaction_that_the_handler_replaced_is_noticed(
    library: Library,
    place: Place,
) -> None:
    within = Query(
        f"SELECT count(*) FROM (SELECT 1) AS one WHERE 1 = 1{place.dialect.transaction_guard}"
    )
    with closing(library.database(place).open()) as session:
        session.lend()
        session.begin()
        library.execute(session.connection, "SELECT 1")
        assert session.in_transaction
        assert session.execute(within).rows[0][0] == 1
        for sql in ("COMMIT", place.dialect.begin):
            library.execute(session.connection, sql)
        if session.in_transaction and session.execute(within).rows[0][0]:
            with pytest.raises(Exception, match="SAVEPOINT") as error:
                session.commit()
            assert place.dialect.fault(error.value) is Fault.ABORTED
        session.rollback()
        assert session.reusable is (library.kind != "sqlite")


@pytest.mark.full
def test_what_an_engine_sets_when_it_connects_is_restored(postgres_place: Place) -> None:
    own = engine(postgres_place)
    name = "it's ? 100% \u00e9"

    @event.listens_for(own, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("SELECT set_config('application_name', %s, false)", (name,))
        connection.commit()

    with closing(from_sqlalchemy(own).open()) as session:
        session.lend()
        session.begin()
        session.connection.exec_driver_sql("SET application_name = 'other'")
        session.commit()
        shown = session.execute(Query("SHOW application_name")).rows[0][0]
        assert shown.startswith("it's ? 100% ")


def test_session_of_an_unknown_driver_is_used_once(tmp_path: Path) -> None:
    with closing(sqlite_place(tmp_path).database.open()) as session:
        session._restorer = Restorer(session.connection)
        session.begin()
        session.execute(Query("CREATE TABLE made (n)"))
        session.commit()
        assert not session.reusable
        assert session.execute(Query("SELECT count(*) FROM made")).rows == [(0,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_options_of_sqlalchemy_are_restored(tmp_path: Path, end: str) -> None:
    where = sqlite_place(tmp_path)
    url = f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"
    for found in (engine(where), create_async_engine(url, poolclass=NullPool)):
        database = from_sqlalchemy(found)
        session: Any = await database.open_async() if database.asynchronous else database.open()
        for call in (session.lend, session.begin):
            await _done(call())
        options = {"schema_translate_map": {None: "tenant"}}
        await _done(session.connection.execution_options(**options))
        await _done(getattr(session, end)())
        connection = getattr(session.connection, "sync_connection", session.connection)
        assert "schema_translate_map" not in connection.get_execution_options()
        await _done(session.close())


async def _done(result: Any) -> None:
    if isawaitable(result):
        await result


class Shouted(StrDumper):
    def dump(self, obj: str) -> bytes:
        return obj.upper().encode()


@pytest.mark.full
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_adapters_of_psycopg_are_restored(postgres_place: Place, end: str) -> None:
    with closing(postgres_place.database.open()) as session:
        session.lend()
        for _ in range(2):
            session.begin()
            (before,) = session.connection.execute("SELECT %s", ("a",)).fetchone()
            assert before == "a"
            session.connection.adapters.register_dumper(str, Shouted)
            session.connection.add_notice_handler(print)
            getattr(session, end)()
            assert session.reusable
            assert session.connection._notice_handlers == []


@pytest.mark.full
def test_converters_of_pymysql_are_restored(mariadb_place: Place) -> None:
    with closing(mariadb_place.database.open()) as session:
        session.lend()
        session.begin()
        session.connection.encoders[int] = lambda *_: "2"
        session.commit()
        session.begin()
        assert session.execute(Query("SELECT ?", (1,))).rows == ((1,),)
        session.rollback()
