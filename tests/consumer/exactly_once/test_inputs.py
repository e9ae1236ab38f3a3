"""Wrong inputs are refused by a sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.kit.consumer_world import World
from tests.kit.results import Booking, Shop
from tests.kit.until import unique
from txbroker.consumer import Consumer, InDatabase, RecordsDeleted
from txbroker.databases import Barrier, Inbox, MariaDB, Postgres, SQLite
from txbroker.databases.database import DatabaseUnavailable
from txbroker.door.consuming import StoreUnavailable
from txbroker.errors import ConfigurationError

MODE = "exactly-once"


async def coroutine(_message: Any, _connection: Any) -> None: ...


def plain(_message: Any, _connection: Any) -> None: ...


async def refused(world: World, match: str, handler: Any = plain, **options: Any) -> None:
    with pytest.raises((ConfigurationError, StoreUnavailable), match=match):
        async with world.consumer(**options) as consumer:
            await asyncio.wait_for(consumer.run(handler), 10)


async def test_tables(world: World, shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "empty.db"
    file.touch()
    store = InDatabase(SQLite(file))
    await refused(world, "no such table.*txbroker databases create", mode=MODE, store=store)
    shop.do("UPDATE txbroker_schema SET version = 99")
    await refused(world, "version 99; this txbroker uses version 1", **shop.options)


@pytest.mark.parametrize("shop", ["postgres_server read committed"], indirect=True)
async def test_rights(world: World, shop: Shop, postgres_server: Any) -> None:
    database = shop.do("SELECT current_database()")[0][0]
    user = unique("user").replace("-", "_")
    with psycopg.connect(postgres_server.admin_url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {user} LOGIN")  # type: ignore[call-overload]
    shop.do(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}")
    url = f"postgresql://{user}@127.0.0.1:{postgres_server.port}/{database}"
    store = InDatabase(Postgres(url))
    await refused(
        world, "permission denied.*grant this user SELECT, INSERT", mode=MODE, store=store
    )


async def test_server_that_is_gone(world: World) -> None:
    store = InDatabase(Postgres("host=127.0.0.1 port=1 dbname=shop"))
    with pytest.raises(DatabaseUnavailable, match=r"shop: .*refused.*start the data"):
        async with world.consumer(mode=MODE, store=store):
            pass


async def test_handlers(world: World, shop: Shop) -> None:
    await refused(world, "takes plain functions", coroutine, **shop.options)
    one: Any = lambda _message: None  # noqa: E731
    await refused(world, "two arguments: it takes a message and connection", one, **shop.options)
    async with world.consumer(**shop.options) as consumer:
        with pytest.raises(ConfigurationError, match="use run"):
            aiter(consumer)
        with pytest.raises(ConfigurationError, match="use run"):
            consumer.batches(10)


def test_options(shop: Shop) -> None:
    given: dict[str, Any] = {"group": "g", "topics": ["orders"]}
    store = shop.options["store"]
    for options, match in (
        ({"mode": MODE}, "needs a store"),
        ({"store": store}, "give mode='exactly-once'"),
        ({"store": store, "mode": "at-most-once"}, "give mode='exactly-once'"),
        ({"store": store, "mode": MODE, "group": None}, "need a store|needs? a|give group"),
        ({"store": shop.database, "mode": MODE}, "store is .*give InDatabase"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            Consumer("kafka:9092", **given | options)


@pytest.mark.parametrize(
    ("kind", "given", "match"),
    [
        (InDatabase, {"database": "sqlite:///x"}, "InDatabase.*give a database"),
        (InDatabase, {"connections_max": 0}, "connections_max is 0"),
        (InDatabase, {"connections_max": "3"}, "connections_max is '3'"),
        (InDatabase, {"dead_letter_topic": 5}, "the name of a topic"),
        (Inbox, {"database": 5}, "Inbox.5.*give a database"),
        (Inbox, {"consumer": 5}, "consumer is a text .*not 5"),
        (Barrier, {"database": None}, "Barrier.None.*give a database"),
        (SQLite, {"file": ":memory:"}, "needs a file"),
        (SQLite, {"file": None}, "needs a file"),
        (Postgres, {"conninfo": 5}, "conninfo is malformed"),
        (MariaDB, {"url": None}, "URL is malformed"),
        (MariaDB, {"url": "mariadb://h:port/shop"}, "URL is malformed"),
        (Postgres, {"bogus": 1}, "an option is none of psycopg.connect"),
    ],
)
def test_wrong_arguments(kind: Any, given: dict[str, Any], match: str, tmp_path: Path) -> None:
    if kind in (InDatabase, Inbox):
        given = {"database": SQLite(tmp_path / "shop.db")} | given
    with pytest.raises(ConfigurationError, match=match):
        kind(**given)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(
            ("done_ranges", text)
            for text in ("x", "5", "{}", "[[1]]", '[["a", "b"]]', "[[3.5, 4]]")
        ),
        *(("done_ranges", text) for text in ("[[5, 2]]", "[[0, 3]]", "[[5, 6], [3, 4]]")),
        ("later_next", 999),
        ("later_next", -1),
        ("next", -5),
        ("token", -7),
    ],
)
async def test_row_that_another_program_changed(
    world: World, shop: Shop, column: str, value: str | int
) -> None:
    world.produce("a=1")
    async with world.running(Booking(shop), **shop.options):
        await shop.reaches(1)
    shop.do(f"UPDATE txbroker_position SET {column} = ? WHERE partition_id = 0", value)
    await refused(world, r"row of orders-0 of group \S+ in txbroker_position", **shop.options)


@pytest.mark.parametrize("on_gap", ["stop", "skip"])
@pytest.mark.parametrize("change", ["beyond the end", "created again"])
async def test_position_that_does_not_fit(
    world: World, shop: Shop, on_gap: str, change: str
) -> None:
    booking = Booking(shop)
    world.produce("a=1", "a=2")
    async with world.running(booking, **shop.options):
        await shop.reaches(2)
    if change == "created again":
        world.kafka.delete_topic("orders")
        world.kafka.create_topic("orders", 2)
        world.produce("a=3", "a=4", "a=5")
    else:
        shop.do("UPDATE txbroker_position SET next = 1000 WHERE partition_id = 0")
    if on_gap == "stop":
        async with world.consumer(on_gap=on_gap, **shop.options) as consumer:
            with pytest.raises(RecordsDeleted, match=r"created again|ends at 2, before"):
                await asyncio.wait_for(consumer.run(booking), 30)
        return
    async with world.running(booking, on_gap=on_gap, **shop.options):
        await shop.has("1", "2", *(["3", "4", "5"] if change == "created again" else ["1", "2"]))
        await shop.reaches(3 if change == "created again" else 2)
