"""Failed messages are rows: retries, dead letters, set-aside keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pymysql
import pytest

from tests.kit.consumer_world import World, counted, text
from tests.kit.results import PLACE, Booking, Shop, execute
from tests.kit.until import until
from txbroker.consumer import InDatabase, Later, ReceivedMessage, Reject
from txbroker.core.consuming.copies import Failed, LeftOut, MessageSource, read_copy
from txbroker.core.records import Record
from txbroker.databases import Postgres
from txbroker.databases.kept import Kept
from txbroker.errors import ConfigurationError

BUG = ValueError("bug")
KINDS = ("sqlite", "postgres_server repeatable read", "mariadb_server read committed")


@pytest.mark.parametrize("shop", KINDS, indirect=True)
async def test_retries_by_step_then_dead_letter(world: World, shop: Shop) -> None:
    headers = (("trace", b"\x00\xff"), ("trace", None))
    booking = Booking(shop, **{"1": BUG, "2": [BUG, Later(0.025), None]})
    world.produce("a=1", "a=2", "3", headers=headers, timestamp_ms=1234)
    options = {"order": "none", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options) as consumer:
        await until(lambda: shop.aside("dead") == ["1"])
        await shop.has("2", "3")
        await shop.reaches(3)
        await until(lambda: counted(consumer, "dead") == 1)
        counts = consumer.statistics().counts
        assert [counts[f"retry_{step}"] for step in range(16)] == [2, 1, 1, 2, *[1] * 12]
    assert shop.aside() == ["1"]
    dead = [message for message in booking.messages if text(message) == "1"]
    assert [message.attempt for message in dead] == list(range(1, 18))
    assert {(each.id, each.headers, each.timestamp_ms) for each in dead} == {
        ("orders/0@0", headers, 1234)
    }
    assert not [name for name in world.kafka.topics if name.startswith("txbroker.")]


@pytest.mark.parametrize("order", ["none", "partition", "key"])
async def test_dead_letter_is_sent_back(world: World, shop: Shop, order: str) -> None:
    booking = Booking(shop, **{"1": Reject("bad")})
    world.produce("a=1", "a=2")
    on_failure = "retry" if order == "none" else "aside"
    options = {"order": order, "on_failure": on_failure, **shop.options}
    async with world.running(booking, **options):
        await shop.has("2")
        await until(lambda: shop.aside("dead"))
        source = MessageSource("orders", 0, 0)
        assert shop.transact(shop.kept.retry(source, "checked")) == 1
        assert shop.transact(shop.kept.retry(source, "checked")) == 0
        await until(lambda: booking.begun.count("1") == 2 and shop.aside("dead"))
        booking.failing.clear()
        assert shop.transact(shop.kept.retry(source, "checked")) == 1
        await shop.has("2", "1")
        await until(lambda: not shop.aside())
    assert booking.begun == ["1", "2", "1", "1"]


async def test_dead_letter_topic(world: World, shop: Shop) -> None:
    world.kafka.create_topic("dead", 10)
    store = InDatabase(shop.database, dead_letter_topic="dead")
    booking = Booking(shop, **{"1": Reject("bad")})
    world.produce("a=1")
    async with world.running(booking, **shop.options | {"store": store}):
        await until(lambda: shop.aside("dead"))
    (record,) = [each for n in range(10) for each in world.kafka.visible("dead", n)]
    copy = read_copy(record)
    assert copy is not None
    assert (copy[0].value, copy[1].source, copy[1].cause) == (
        b"1",
        MessageSource("orders", 0, 0),
        "bad",
    )


@pytest.mark.parametrize(
    ("topic", "why"),
    [("dead", "dead does not exist"), ("txbroker.op", "txbroker.op is txbroker's own")],
)
async def test_dead_letter_topic_that_is_no_target(
    world: World, shop: Shop, topic: str, why: str
) -> None:
    store = InDatabase(shop.database, dead_letter_topic=topic)
    with pytest.raises(ConfigurationError, match=f"dead_letter_topic: topic {why}"):
        async with world.consumer(**shop.options | {"store": store}):
            pass


async def test_dead_letter_topic_that_does_not_answer(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead letter waits in its row."""
    world.kafka.create_topic("dead", 10)
    store = InDatabase(shop.database, dead_letter_topic="dead")
    booking = Booking(shop, **{"1": Reject("bad")})
    world.produce("a=1", "a=2")
    async with world.running(booking, **shop.options | {"store": store}):
        world.kafka.go_down()
        await shop.has("2")
        assert shop.aside("unpublished") == ["1"]
        world.kafka.come_up()
        await until(lambda: shop.aside("dead"))
    records = [each for n in range(10) for each in world.kafka.visible("dead", n)]
    assert {record.value for record in records} == {b"1"}


ASIDE: dict[str, Any] = {"on_failure": "aside", "local_attempts_max": 1}


@pytest.mark.parametrize("shop", KINDS, indirect=True)
@pytest.mark.parametrize("order", ["key", "partition"])
async def test_released_key_is_handled_in_order(world: World, shop: Shop, order: str) -> None:
    booking = Booking(shop, **{"1": [BUG, BUG, None]})
    world.produce("a=1", "b=2", "a=3")
    options = {"order": order, **ASIDE, **shop.options}
    async with world.running(booking, **options):
        await until(lambda: shop.aside("aside") == ["1", "3"])
        await shop.has("2")
        assert shop.transact(shop.kept.release(PLACE, b"a", "checked")) == 2
        await until(lambda: booking.begun.count("1") == 2 and len(shop.aside("aside")) == 2)
        world.produce("a=4")
        await until(lambda: shop.aside("aside") == ["1", "3", "4"])
    async with world.running(booking, **options):  # another owner
        world.produce("a=5")
        await until(lambda: shop.aside("aside") == ["1", "3", "4", "5"])
        with booking.held("1"):
            assert shop.transact(shop.kept.release(PLACE, b"a", "checked")) == 4
            if shop.database.dialect.name != "sqlite":  # which has one writer
                await booking.begins("1", 3)
                world.produce("a=6")
                await until(lambda: "6" in shop.aside("aside"))
        world.produce("a=7", "b=8")
        expected = ["2", "1", "3", "4", "5", "7", "8"]
        await shop.has(
            *expected, *(["6"] if "6" in shop.aside() else ["6"] * ("6" in shop.results))
        )
        await until(lambda: not shop.aside())
    mine = [value for value in shop.results if value not in "28"]
    assert mine == sorted(mine)
    world.produce("a=9")
    async with world.running(booking, **options):
        await until(lambda: "9" in shop.results)


async def test_message_without_a_key_is_set_aside_alone(world: World, shop: Shop) -> None:
    booking = Booking(shop, **{"1": [BUG, None]})
    world.produce("1", "2", "3")
    async with world.running(booking, order="key", **ASIDE, **shop.options):
        await shop.has("2", "3")
        await until(lambda: shop.aside("aside") == ["1"])
        assert shop.transact(shop.kept.release(PLACE, 0, "checked")) == 1
        await shop.has("2", "3", "1")
        await until(lambda: not shop.aside())


async def test_set_aside_message_that_is_read_again(world: World, shop: Shop) -> None:
    """Its key is free once its rows are done, however often they were stored."""
    booking = Booking(shop, **{"1": [BUG, None]})
    options = {"order": "key", **ASIDE, **shop.options}
    world.produce("a=1")
    async with world.running(booking, **options):
        await until(lambda: shop.aside("aside") == ["1"])
    async with world.running(booking, on_assign=lambda given: dict.fromkeys(given, 0), **options):
        await shop.reaches(1)
        assert shop.transact(shop.kept.release(PLACE, b"a", "checked")) == 1
        await until(lambda: not shop.aside())
        world.produce("a=2")
        await shop.has("1", "2")


@pytest.mark.rule(43)
async def test_message_is_kept_with_its_position(world: World, shop: Shop) -> None:
    """A crash at any time finds it in one of the two places."""
    booking = Booking(shop, **{"1": [BUG, None]})
    world.produce("a=1")
    options = {"order": "none", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options):
        await until(lambda: shop.aside("retry"))
        assert shop.position()[0] == 1
        await shop.has("1")
    assert shop.aside() == []


@pytest.mark.rule(40)
async def test_retried_message_of_a_replaced_owner(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    booking = Booking(shop, **{"1": [BUG, None]})
    shop.claims_before(monkeypatch, lambda: len(booking.begun) == 1)
    world.produce("a=1")
    options = {"order": "none", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options) as consumer:
        await shop.has("1")
        await until(lambda: not shop.aside())
        assert counted(consumer, "fenced") == 1
    assert booking.begun == ["1", "1", "1"]


async def test_cause_that_the_encoding_of_the_database_lacks(
    world: World, postgres_server: Any
) -> None:
    with closing(psycopg.connect(postgres_server.admin_url, autocommit=True)) as admin:
        admin.execute(
            "CREATE DATABASE kept_in_latin1 OWNER txbroker ENCODING 'LATIN1' LOCALE 'C' "
            "TEMPLATE template0"
        )
    shop = Shop(Postgres(postgres_server.url("kept_in_latin1"), create_tables=True))
    booking = Booking(shop, **{"1": ValueError("preis 5 €")})
    headers = (("größe €", "€".encode()),)
    world.produce("a=1", "b=2", headers=headers)
    options = {"on_failure": "skip", "local_attempts_max": 1, **shop.options}
    with closing(shop):
        async with world.running(booking, **options) as consumer:
            await shop.has("2")
            await until(lambda: shop.aside("dead") == ["1"])
            assert counted(consumer, "left_out") == 0
        (kept,) = shop.transact(shop.kept.list(["dead"]))
        assert "preis 5 \\u20ac" in kept.failed.cause
        assert kept.record.headers == headers


@contextmanager
def packets_of(size: int, server: Any) -> Iterator[None]:
    """Let new connections to a MariaDB take packets of this size."""
    where = {"host": "127.0.0.1", "port": server.port, "user": "root", "autocommit": True}
    with closing(pymysql.connect(**where)) as admin, admin.cursor() as cursor:
        cursor.execute("SET @before = @@GLOBAL.max_allowed_packet")
        cursor.execute(f"SET GLOBAL max_allowed_packet = {size}")
        try:
            yield
        finally:
            cursor.execute("SET GLOBAL max_allowed_packet = @before")


@pytest.mark.parametrize("shop", ["mariadb_server repeatable read"], indirect=True)
@pytest.mark.parametrize("on_failure", ["skip", "retry", "aside"])
@pytest.mark.parametrize("size", [700_000, 20_000_000])
async def test_message_that_is_larger_than_the_database_takes(
    world: World, shop: Shop, mariadb_server: Any, on_failure: str, size: int
) -> None:
    """Its row lacks the value, which is read in its first place once the row is handled again."""
    large = "x" * size
    failing = True

    def handle(message: ReceivedMessage, connection: Any) -> None:
        if text(message) == large and failing:
            raise ValueError("bug")
        value = str(len(text(message)))
        execute(connection, "mariadb", "INSERT INTO results (value) VALUES (?)", value)

    world.kafka.set_message_bytes_max("orders", 2 * size)
    world.produce(f"a={large}", "b=22", headers=(("h", b"1"),))
    order = "none" if on_failure == "retry" else "key"
    options = {"on_failure": on_failure, "local_attempts_max": 1, "order": order, **shop.options}
    state = "aside" if on_failure == "aside" else "dead"
    with packets_of(256 << 10, mariadb_server):
        async with world.running(handle, **options) as consumer:
            await shop.has("2")
            await until(lambda: counted(consumer, "left_out") == 1)
            await shop.reaches(2)
            (kept,) = shop.transact(shop.kept.list([state]))
            assert kept.failed.left_out == LeftOut("value", len(large))
            assert (kept.record.key, kept.record.value) == (b"a", None)
            assert kept.record.headers == (("h", b"1"),)
            failing = False
            if state == "aside":
                shop.transact(shop.kept.release(PLACE, b"a", "checked"))
            else:
                shop.transact(shop.kept.retry(kept.failed.source, "checked"))
            await shop.has("2", str(len(large)))


async def test_original_of_a_smaller_row_was_deleted(world: World, shop: Shop) -> None:
    """Sent back, it is a dead letter again."""
    shop.claim()
    source = MessageSource("orders", 0, 0)
    failed = Failed(source, 1, left_out=LeftOut("value", 5))
    shop.transact(shop.kept.keep(Kept("retry", failed, Record(b"a", None))))
    world.produce("a=1")
    booking = Booking(shop)
    async with world.running(booking, order="none", **shop.options):
        await until(lambda: shop.transact(shop.kept.list(["dead"])))
        await shop.has("1")
    (kept,) = shop.transact(shop.kept.list(["dead"]))
    assert kept.failed.left_out == failed.left_out
