"""Handlers that interfere with their transaction, and errors that look like the database's."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from tests.kit.consumer_world import World, counted, text
from tests.kit.results import DATABASES, AsyncBooking, Booking, Shop, execute
from tests.kit.until import until
from txbroker.consumer import InDatabase, ReceivedMessage
from txbroker.databases import Postgres, from_sqlalchemy
from txbroker.databases.sessions import TransactionControlled
from txbroker.databases.steps import Query
from txbroker.errors import ConfigurationError

KINDS = ("sqlite", "postgres_server read committed", "mariadb_server repeatable read")
POSTGRES, MARIADB = KINDS[1:]
ENDS: list[tuple[str, Callable[[Any], Any]]] = [
    *((kind, lambda connection: connection.commit()) for kind in KINDS),
    *((kind, lambda connection: connection.rollback()) for kind in KINDS),
    ("sqlite", lambda connection: connection.executescript("SELECT 1")),
    ("sqlite", lambda connection: connection.__enter__()),
    (POSTGRES, lambda connection: connection.__exit__(None, None, None)),
    (MARIADB, lambda connection: connection.begin()),
]


async def ends(world: World, shop: Shop, handler: Any, error: type[Exception], match: str) -> None:
    """Run a consumer until its handler ends it."""
    async with world.consumer(**shop.options) as consumer:
        with pytest.raises(error, match=match):
            await asyncio.wait_for(consumer.run(handler), 30)


@pytest.mark.parametrize(("shop", "end"), ENDS, indirect=["shop"])
async def test_handler_may_not_end_its_transaction(
    world: World, shop: Shop, end: Callable[[Any], Any]
) -> None:
    def handle(message: ReceivedMessage, connection: Any) -> None:
        booking(message, connection)
        end(connection)

    booking = Booking(shop)
    world.produce("a=1")
    await ends(world, shop, handle, TransactionControlled, "Leave it out")
    assert shop.results == []
    assert shop.position()[0] == 0


@pytest.mark.parametrize(
    ("shop", "sql"),
    [
        *((kind, "COMMIT") for kind in KINDS),
        *((kind, "ROLLBACK") for kind in KINDS),
        (MARIADB, "CREATE TABLE other (n BIGINT)"),
    ],
    indirect=["shop"],
)
async def test_transaction_that_ended_is_noticed(world: World, shop: Shop, sql: str) -> None:
    def handle(message: ReceivedMessage, connection: Any) -> None:
        booking(message, connection)
        execute(connection, shop.database.dialect.name, sql)

    booking = Booking(shop)
    world.produce("a=1", "a=2")
    await ends(world, shop, handle, TransactionControlled, "ended the transaction")
    assert len(booking.begun) == 1


@pytest.mark.parametrize("shop", KINDS, indirect=True)
@pytest.mark.parametrize("error", [None, ValueError("bug")])
async def test_connection_that_the_handler_closed(
    world: World, shop: Shop, error: Exception | None
) -> None:
    def handle(_message: ReceivedMessage, connection: Any) -> None:
        connection.close()
        if error is not None:
            raise error

    world.produce("a=1")
    await ends(world, shop, handle, TransactionControlled, "closed its connection")


@pytest.mark.parametrize(
    ("shop", "sql"),
    [
        (POSTGRES, "SELECT pg_terminate_backend(pg_backend_pid())"),
        (MARIADB, "KILL CONNECTION_ID()"),
    ],
    indirect=["shop"],
)
@pytest.mark.parametrize("batch", [0, 3])
async def test_message_that_always_ends_its_session(
    world: World, shop: Shop, sql: str, batch: int
) -> None:
    """As one does that crashes the server's process: it has failed, and no other message."""
    booking = Booking(shop)

    def handle(given: Any, connection: Any) -> None:
        booking(given, connection)
        if "2" in booking.batches[-1]:
            execute(connection, shop.database.dialect.name, sql)

    world.produce("a=1", "a=2", "a=3")
    options = {"on_failure": "skip", "local_attempts_max": 1, **shop.options}
    async with world.running(handle, run={"batch": batch}, **options) as consumer:
        await shop.has("1", "3")
        await shop.reaches(3)
        assert counted(consumer, "failed") == 1
    assert shop.aside("dead") == ["2"]
    assert booking.batches.count(["2"]) == 3


@pytest.mark.parametrize("shop", [POSTGRES], indirect=True)
@pytest.mark.parametrize("coroutine", [False, True])
async def test_engine_that_lost_its_connection(world: World, shop: Shop, coroutine: bool) -> None:
    """It opens another one silently, without the limits of a session."""
    assert isinstance(shop.database, Postgres)
    url = shop.database._conninfo.replace("postgresql://", "postgresql+psycopg://")
    limits: list[str] = []

    def handle(message: ReceivedMessage, connection: Any) -> None:
        limits.append(connection.exec_driver_sql("SHOW lock_timeout").scalar())
        if len(limits) == 1:
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        insert = "INSERT INTO results (value, token) VALUES (%s, 1)"
        connection.exec_driver_sql(insert, (text(message),))

    async def handle_on_loop(message: ReceivedMessage, connection: Any) -> None:
        await connection.run_sync(lambda inner: handle(message, inner))

    world.produce("a=1", "a=2")
    engine = (create_async_engine if coroutine else create_engine)(url)
    store = InDatabase(from_sqlalchemy(engine))
    options = {"on_failure": "skip", "local_attempts_max": 1, "mode": "exactly-once"}
    handler = handle_on_loop if coroutine else handle
    async with world.running(handler, store=store, **options) as consumer:
        await shop.has("1", "2")
        assert counted(consumer, "failed") == 0
    assert limits == ["10s"] * 3


@pytest.mark.parametrize(
    ("shop", "error"),
    [
        ("sqlite", ConnectionError("of an HTTP service")),
        ("sqlite", StopIteration("elsewhere")),
        (POSTGRES, TimeoutError("of an HTTP service")),
        (POSTGRES, psycopg.OperationalError("connection refused, elsewhere")),
        (POSTGRES, sqlite3.OperationalError("locked, elsewhere")),
        (MARIADB, ConnectionError("of an HTTP service")),
        (MARIADB, KeyError(1213)),
        (MARIADB, pymysql.OperationalError(2006, "gone away, elsewhere")),
    ],
    ids=repr,
    indirect=["shop"],
)
async def test_errors_of_other_libraries_are_failures(
    world: World, shop: Shop, error: Exception
) -> None:
    booking = Booking(shop, **{"1": error})
    world.produce("a=1", "a=2")
    options = {"order": "key", "on_failure": "skip", "local_attempts_max": 2, **shop.options}
    async with world.running(booking, **options) as consumer:
        await shop.has("2")
        await shop.reaches(2)
        assert counted(consumer, "failed") == 2
    assert shop.aside("dead") == ["1"]


@pytest.mark.parametrize("shop", [POSTGRES], indirect=True)
@pytest.mark.parametrize("handler", [Booking, AsyncBooking])
async def test_swallowed_error_of_postgres(
    world: World, shop: Shop, handler: type[Booking]
) -> None:
    booking = handler(shop)

    def plain(message: ReceivedMessage, connection: Any) -> None:
        booking(message, connection)
        with pytest.raises(psycopg.Error):
            connection.execute("SELECT * FROM missing")

    async def coroutine(message: ReceivedMessage, connection: Any) -> None:
        await booking(message, connection)
        with pytest.raises(psycopg.Error):
            await connection.execute("SELECT * FROM missing")

    world.produce("a=1")
    options = {"order": "key", "on_failure": "skip", "local_attempts_max": 1, **shop.options}
    async with world.running(plain if handler is Booking else coroutine, **options):
        await until(lambda: shop.aside("dead"))
    ((cause,),) = shop.do("SELECT cause FROM txbroker_aside")
    assert "TransactionAborted: The handler caught an error of the database" in cause
    assert shop.results == []


@pytest.mark.parametrize("shop", DATABASES[1::2], indirect=True)
async def test_deadlocks_repeat_the_message(world: World, shop: Shop) -> None:
    errors = {
        "postgresql": psycopg.errors.DeadlockDetected("deadlock"),
        "mariadb": pymysql.OperationalError(1213, "deadlock"),
    }
    error = errors[shop.database.dialect.name]
    booking = Booking(shop, **{"1": [error, error, None], "2": error})
    world.produce("a=1", "a=2")
    options = {"on_failure": "skip", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options) as consumer:
        await shop.reaches(2)
        assert counted(consumer, "failed") == 1
    assert shop.results == ["1"]
    assert shop.aside("dead") == ["2"], "a handler that never succeeds has failed"
    assert booking.begun.count("1") == 3


async def test_coroutine_in_a_plain_function(world: World, shop: Shop) -> None:
    async def inner(_message: ReceivedMessage, _connection: Any) -> None: ...

    world.produce("a=1")
    await ends(
        world, shop, lambda *given: inner(*given), ConfigurationError, "returned an awaitable"
    )
    assert shop.position()[0] == 0


@pytest.mark.parametrize("shop", [MARIADB], indirect=True)
@pytest.mark.parametrize("order", ["partition", "key"])
async def test_deadlock_that_the_handler_caught_stores_no_position(
    world: World, shop: Shop, order: str
) -> None:
    """The server rolls the whole transaction back, and PyMySQL shows it as open."""

    waits = Query("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")

    def handle(message: ReceivedMessage, connection: Any) -> None:
        booking(message, connection)
        if len(booking.begun) > 1:
            return
        with closing(shop.database.open()) as other, closing(shop.database.open()) as watch:
            other.begin()
            other.execute(Query("UPDATE locks SET n = 1 WHERE id >= 2"))
            execute(connection, "mariadb", "UPDATE locks SET n = 1 WHERE id = 1")
            waiting = threading.Thread(
                target=other.execute, args=[Query("UPDATE locks SET n = 2 WHERE id = 1")]
            )
            waiting.start()
            while not int(watch.execute(waits).rows[0][1]):
                time.sleep(0.01)
            with pytest.raises(pymysql.err.OperationalError, match="Deadlock"):
                execute(connection, "mariadb", "UPDATE locks SET n = 1 WHERE id = 2")
            waiting.join()
            other.rollback()

    shop.do("CREATE TABLE locks (id BIGINT PRIMARY KEY, n BIGINT)")
    shop.do("INSERT INTO locks SELECT seq, 0 FROM seq_1_to_100")
    booking = Booking(shop)
    world.produce("a=1", "a=2")
    async with world.running(handle, **shop.options, order=order):
        await shop.has("1", "2")
