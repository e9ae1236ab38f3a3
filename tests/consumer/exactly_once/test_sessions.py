"""Handlers that change their session: what fails is counted against their message, and the next
message has a session as it was opened."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg
import pytest

from tests.kit.consumer_world import World, counted, text
from tests.kit.results import AsyncBooking, Booking, Shop, execute
from tests.kit.until import until
from txbroker.consumer import InDatabase, ReceivedMessage

POSTGRES, MARIADB = "postgres_server read committed", "mariadb_server repeatable read"
ELSEWHERE = (
    "CREATE SCHEMA elsewhere",
    *(
        f"CREATE TABLE elsewhere.{table} (LIKE {table} INCLUDING ALL)"
        for table in ("txbroker_position", "txbroker_done")
    ),
)
CHANGES = [
    (POSTGRES, ("SET search_path TO pg_temp",), "SessionChanged"),
    (POSTGRES, ("SET LOCAL search_path TO pg_temp",), "SessionChanged"),
    (POSTGRES, (*ELSEWHERE, "SET search_path TO elsewhere"), "SessionChanged"),
    (POSTGRES, ("SET LOCAL ROLE weak",), "SessionChanged"),
    (POSTGRES, ("SET TRANSACTION READ ONLY",), "SessionChanged"),
    (POSTGRES, ("COMMIT", "BEGIN"), "TransactionAborted"),
    (MARIADB, ("USE information_schema",), "SessionChanged"),
    (MARIADB, ("COMMIT", "START TRANSACTION"), "TransactionAborted"),
    ("sqlite", ("PRAGMA query_only = ON",), "SessionChanged"),
]


@pytest.mark.parametrize(("shop", "changes", "error"), CHANGES, indirect=["shop"])
@pytest.mark.parametrize("order", ["partition", "key"])
async def test_change_that_prevents_the_position_fails_its_message(
    world: World,
    shop: Shop,
    changes: tuple[str, ...],
    error: str,
    order: str,
    request: pytest.FixtureRequest,
) -> None:
    if "ROLE" in changes[0]:
        may_become_weak(request.getfixturevalue("postgres_server").admin_url)
    booking = Booking(shop)

    def handle(message: ReceivedMessage, connection: Any) -> None:
        booking(message, connection)
        if text(message) == "1":
            for sql in changes:
                execute(connection, shop.database.dialect.name, sql)

    world.produce("a=1", "b=2", "c=3")
    store = InDatabase(shop.database, connections_max=1)
    options = {"mode": "exactly-once", "on_failure": "skip", "local_attempts_max": 1}
    async with world.running(handle, store=store, order=order, **options) as consumer:
        await shop.reaches(3)
        assert counted(consumer, "failed") == 1
    assert [each for each in shop.results if each != "1"] == ["2", "3"]
    assert shop.results.count("1") == ("COMMIT" in changes)
    ((value, cause),) = shop.do("SELECT message_value, cause FROM txbroker_aside")
    assert bytes(value) == b"1"
    assert error in cause


@pytest.mark.parametrize("shop", [MARIADB], indirect=True)
async def test_change_that_prevents_a_retry_to_be_stored(world: World, shop: Shop) -> None:
    """Also there the cause names the next step of the handler."""
    world.produce("1")
    options = {"order": "none", "on_failure": "retry", "local_attempts_max": 1, **shop.options}

    def handle(_message: ReceivedMessage, connection: Any) -> None:
        execute(connection, "mariadb", "USE information_schema")

    async with world.running(handle, **options):
        await until(lambda: shop.aside("dead") == ["1"])
    ((cause,),) = shop.do("SELECT cause FROM txbroker_aside")
    assert "SessionChanged" in cause


def may_become_weak(admin_url: str) -> None:
    with closing(psycopg.connect(admin_url, autocommit=True)) as admin:
        if not admin.execute("SELECT FROM pg_roles WHERE rolname = 'weak'").fetchall():
            admin.execute("CREATE ROLE weak")
            admin.execute("GRANT weak TO txbroker")


@pytest.mark.parametrize(
    ("shop", "change"),
    [
        (POSTGRES, "SET search_path TO pg_temp, public"),
        (MARIADB, "SET sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES'"),
        ("sqlite", "CREATE TEMP TABLE results (number, value, token)"),
    ],
    indirect=["shop"],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_change_does_not_reach_the_next_message(
    world: World, shop: Shop, change: str, fails: bool
) -> None:
    """Also where the message fails after it: not everything is undone with its transaction."""
    booking = Booking(shop)

    def handle(message: ReceivedMessage, connection: Any) -> None:
        booking(message, connection)
        if text(message) == "1":
            execute(connection, shop.database.dialect.name, change)
            if fails:
                raise ValueError("bug")

    world.produce("a=1", "b=2", "c=3")
    store = InDatabase(shop.database, connections_max=1)
    options = {"mode": "exactly-once", "on_failure": "skip", "local_attempts_max": 1}
    async with world.running(handle, store=store, order="partition", **options) as consumer:
        await shop.reaches(3)
        assert counted(consumer, "failed") == fails
    assert shop.results == (["2", "3"] if fails else ["1", "2", "3"])


@pytest.mark.parametrize("shop", [POSTGRES], indirect=True)
async def test_coroutine_that_changes_its_session(world: World, shop: Shop) -> None:
    booking = AsyncBooking(shop)

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await booking(message, connection)
        if text(message) == "1":
            await connection.execute("SET search_path TO pg_temp")

    world.produce("a=1", "a=2")
    store = InDatabase(shop.database, connections_max=1)
    options = {"mode": "exactly-once", "on_failure": "skip", "local_attempts_max": 1}
    async with world.running(handle, store=store, **options) as consumer:
        await shop.has("2")
        assert counted(consumer, "failed") == 1
