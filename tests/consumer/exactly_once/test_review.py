"""Faults that a review found."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.kit.consumer_world import World, counted, text
from tests.kit.results import PLACE, Booking, Shop, execute
from tests.kit.until import until
from txbroker.consumer import CommitPolicy, InDatabase, ReceivedMessage
from txbroker.core.consuming.copies import Failed, MessageSource
from txbroker.core.consuming.position import Metadata, Position
from txbroker.core.consuming.progress import PartitionProgress
from txbroker.core.records import Record
from txbroker.databases import Postgres, from_sqlalchemy
from txbroker.databases.kept import RETRY, Kept
from txbroker.databases.positions import Settled, Stored

POSTGRES = "postgres_server repeatable read"
BUG = ValueError("bug")


@pytest.mark.parametrize("run", [{}, {"batch": 3}])
async def test_done_is_no_result(world: World, shop: Shop, run: dict[str, Any]) -> None:
    """A handler that calls `message.done()` and fails is handled again."""
    booking = Booking(shop, **{"1": [BUG, None]})

    def handle(given: Any, connection: Any) -> None:
        for message in given if isinstance(given, list) else [given]:
            message.done()
        booking(given, connection)

    world.produce("a=1")
    async with world.running(handle, order="key", run=run, **shop.options):
        await shop.reaches(1)
    assert shop.results == ["1"]


@pytest.mark.parametrize(
    "shop",
    ["sqlite", "postgres_server read committed", "mariadb_server read committed"],
    indirect=True,
)
def test_first_stage_of_a_kept_message_is_stored_once(shop: Shop) -> None:
    shop._session.lend()
    shop.claim()
    token = shop.position()[2]
    assert shop.transact(shop.positions.save(PLACE, (1, Metadata(token)), (), lower=True))
    failed = Failed(MessageSource("orders", 0, 0), 1, 7, "bug", -1, 0)
    shop.transact(shop.kept.keep(Kept(RETRY, failed, Record(b"a", b"1"))))
    settled = Settled(PLACE, token, (), [0], stages=True)
    assert shop.transact(shop.positions.settle(settled)) is Stored.NOW
    assert shop.transact(shop.positions.settle(settled)) is Stored.BEFORE


async def test_deleted_position_begins_at_start(world: World, shop: Shop) -> None:
    """Also where a crash has left done rows."""
    booking = Booking(shop, **{"1": [BUG] * 1000})
    world.produce("a=1", "b=2")
    options = {"order": "key", **shop.options}
    async with world.running(booking, commit=CommitPolicy(max_interval_s=60.0), **options):
        await shop.has("2")
        shop.claim()
    assert shop.done_rows == [1]
    shop.do("DELETE FROM txbroker_position")
    booking.failing.clear()
    async with world.running(booking, start="earliest", **options):
        await shop.has("1", "2", "2")
        await shop.reaches(2)


@pytest.mark.parametrize("shop", [POSTGRES], indirect=True)
async def test_engine_at_repeatable_read(world: World, shop: Shop) -> None:
    from sqlalchemy import create_engine

    assert isinstance(shop.database, Postgres)
    url = shop.database._conninfo.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, isolation_level="REPEATABLE READ")
    world.produce("a=1")

    def handle(message: ReceivedMessage, connection: Any) -> None:
        connection.exec_driver_sql(
            "INSERT INTO results (value, token) VALUES (%s, 1)", (text(message),)
        )

    store = InDatabase(from_sqlalchemy(engine))
    async with world.running(handle, order="key", mode="exactly-once", store=store):
        await shop.has("1")


@pytest.mark.parametrize("shop", [POSTGRES], indirect=True)
async def test_long_handler_beside_rounds(world: World, shop: Shop) -> None:
    """At repeatable read a round that ends while a handler runs makes its transaction fail."""

    def handle(message: ReceivedMessage, connection: Any) -> None:
        sql = "INSERT INTO results (value, token) VALUES (?, 1)"
        execute(connection, "postgresql", sql, text(message))
        if message.key == b"long":
            time.sleep(0.2)

    world.produce("long=0")
    async with world.running(handle, order="key", **shop.options) as consumer:
        for number in range(1, 400):
            world.produce(f"{number}={number}")
            await asyncio.sleep(0.02)
            if "0" in shop.results:
                break
        assert "0" in shop.results
        assert counted(consumer, "repeated") < 10


@pytest.mark.parametrize("shop", [POSTGRES], indirect=True)
async def test_end_while_the_server_does_not_answer(
    world: World, shop: Shop, postgres_server: Any
) -> None:
    booking = Booking(shop)
    world.produce("a=1")
    ended = asyncio.Event()

    async def consume() -> None:
        async with world.running(booking, drain_s=0.2, **shop.options):
            await shop.reaches(1)
            await asyncio.to_thread(postgres_server.pause)
            await asyncio.sleep(0.2)
        ended.set()

    task = asyncio.create_task(consume())
    try:
        await asyncio.wait_for(ended.wait(), 15)
    finally:
        postgres_server.resume()
        await task


def test_position_that_is_not_stored_forgets_no_stage(world: World) -> None:
    """The copy of a message whose later stage failed may be refused."""

    progress = PartitionProgress()
    progress.begin_at(Position(0), {0, 2})
    before = progress.saved(Metadata(1))
    assert progress.saved(Metadata(1), done_too=[2])[1].later is not None
    assert progress.saved(Metadata(1)) == before


@pytest.mark.parametrize("shop", ["postgres_server read committed"], indirect=True)
async def test_timeout_is_that_of_the_handler(world: World, shop: Shop) -> None:
    """It does not end the wait for a connection."""
    began: list[str] = []

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        began.append(text(message))
        await asyncio.sleep(0.2)
        sql = "INSERT INTO results (value, token) VALUES (%s, 1)"
        await connection.execute(sql, (text(message),))

    values = [str(number) for number in range(8)]
    world.produce(*(f"{value}={value}" for value in values))
    store = InDatabase(shop.database, connections_max=1)
    options = {"handler_timeout_s": 0.5, "on_failure": "skip", "local_attempts_max": 1}
    async with world.running(
        handle, order="key", mode="exactly-once", store=store, **options
    ) as consumer:
        await shop.has(*values)
        assert counted(consumer, "failed") == 0
    assert shop.aside() == []


@pytest.mark.parametrize("shop", ["postgres_server read committed"], indirect=True)
async def test_timeout_of_a_handler(world: World, shop: Shop) -> None:
    async def handle(_message: ReceivedMessage, _connection: Any) -> None:
        await asyncio.sleep(60)

    world.produce("a=1")
    options = {"handler_timeout_s": 0.1, "on_failure": "skip", "local_attempts_max": 1}
    async with world.running(handle, order="key", **options, **shop.options):
        await until(lambda: shop.aside("dead") == ["1"])


async def test_interrupted_call_that_waits_for_a_thread(world: World, shop: Shop) -> None:
    """SQLite has one: a handler does not begin after its lease has ended."""
    booking = Booking(shop)
    world.produce("a=1", "b=2")
    async with world.running(booking, order="key", **shop.options) as consumer:
        with booking.held("1"):
            await booking.begins("1")
            await until(lambda: len(consumer._engine.in_flight) == 2)
            consumer.suspend()
            (partition,) = [each for each in consumer._engine.partitions if each.place == PLACE]
            consumer._engine.partitions.interrupt(partition)
            await asyncio.sleep(0.05)
        await shop.has("1")
        await asyncio.sleep(0.2)
        assert booking.begun == ["1"]
        consumer.resume()
        await shop.has("1", "2")
