"""Relays on real databases and a real Kafka."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing

import pytest

from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import until
from tests.relay.world import Shop, ids, with_transaction
from txbroker.databases import from_url
from txbroker.errors import ConfigurationError
from txbroker.relay import Message, Outbox, Relay, StillWaiting, outbox_source


async def test_committed_rows_become_visible_once_and_others_never(shop: Shop) -> None:
    shop.add(range(3))
    shop.add(range(3, 6), commit=False)
    async with shop.relay() as relay:
        shop.add([6])
        await relay.drain(timeout_s=20)
    async with shop.relay() as relay:  # its successor repeats nothing
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [0, 1, 2, 6]
    assert shop.states() == {"GLOBAL_COMMIT": 4}
    rows = shop.place.select("SELECT id FROM txbroker_outbox")
    ((name,),) = shop.place.select("SELECT relay FROM txbroker_relay")
    assert sorted(ids(shop.visible())) == sorted((name, row[0]) for row in rows)


async def test_content_arrives_unchanged(shop: Shop) -> None:
    at_ms = round(time.time() * 1000) - 3_600_000  # retention would remove a much older one
    headers = [("a", b"\xfe"), ("a", None), ("b", "ü")]
    message = Message(shop.topic, b"\xff\x00", bytes(range(256)), headers, 2, at_ms)
    with closing(shop.place.connect()) as connection:
        with_transaction(connection)
        shop.outbox.add(connection, message, Message(shop.topic, "tombstone"))
        connection.commit()
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    by_key = {record.key: record for record in shop.visible()}
    record = by_key[b"\xff\x00"]
    assert (record.value, record.partition, record.timestamp_ms) == (bytes(range(256)), 2, at_ms)
    assert record.headers[2:] == (("a", b"\xfe"), ("a", None), ("b", "ü".encode()))
    assert by_key[b"tombstone"].value is None
    assert abs(by_key[b"tombstone"].timestamp_ms / 1000 - time.time()) < 3600


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    """The rows of a page."""
    monkeypatch.setattr(outbox_source, "_ROWS", 50)
    return 50


def add_mixed(shop: Shop, long: Sequence[Message], short: Sequence[Message]) -> None:
    """Commit a long transaction, and short ones: their rows are between those of the long one, as
    far as the database has several writers."""
    several = "sqlite" not in shop.place.url
    with closing(shop.place.connect()) as first, closing(shop.place.connect()) as second:
        with_transaction(first)
        half = len(long) // 2
        shop.outbox.add(first, *long[:half])
        for message in short if several else ():
            shop.outbox.add(second, message)
            second.commit()
        shop.outbox.add(first, *long[half:])
        first.commit()
        for message in () if several else short:
            with_transaction(second)
            shop.outbox.add(second, message)
            second.commit()


async def test_a_unit_larger_than_a_page_is_one_kafka_transaction(
    shop: Shop, small_pages: int
) -> None:
    """A reader of a partition sees none or all of its rows."""
    long, short = range(20 * small_pages), range(5000, 5000 + 2 * small_pages)
    add_mixed(shop, shop.messages(long), shop.messages(short))
    seen: list[set[tuple[int, int]]] = []
    async with shop.relay() as relay:
        draining = asyncio.create_task(relay.drain(timeout_s=60))
        while not draining.done():
            seen.append(await asyncio.to_thread(_places, shop))
        await draining
    assert shop.numbers() == [*long, *short]
    assert relay.statistics()["delivered_total"] == len(long) + len(short)
    for partition in range(3):
        whole = {place for place in _places(shop) if place[0] == partition and place[1] in long}
        assert all(places & whole in (set(), whole) for places in seen)


def _places(shop: Shop) -> set[tuple[int, int]]:
    """Return partition and value of visible records."""
    return {(record.partition, int(record.value or b"-1")) for record in shop.visible()}


async def test_marks_of_a_long_unit_go_on_where_they_ended(shop: Shop, small_pages: int) -> None:
    """Its relay was killed between two pages; the first one is deleted already."""
    shop.add(range(250))
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    first, _second, *others = _pages(shop, small_pages)
    shop.execute(f"DELETE FROM txbroker_outbox WHERE position IN ({first})")
    for page in others:
        _unmark(shop, page)
    shop.add([8000])
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [*range(250), 8000]
    assert shop.states() == {"GLOBAL_COMMIT": 201}


async def test_a_long_unit_without_a_row_of_a_page_stops_the_relay(
    sqlite_shop: Shop, small_pages: int
) -> None:
    shop = sqlite_shop
    shop.add(range(250))
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    *_, last = _pages(shop, small_pages)
    _unmark(shop, last.partition(",")[2])
    relay = shop.relay()
    await relay.start()
    with pytest.raises(ConfigurationError, match="was restored or changed"):
        await relay.run()
    await relay.close()
    assert shop.states() == {"LOCAL_COMMIT": 49, "GLOBAL_COMMIT": 201}


def _pages(shop: Shop, size: int) -> list[str]:
    """Return the positions of all rows as SQL, by page."""
    found = shop.place.select("SELECT position FROM txbroker_outbox ORDER BY position")
    positions = [str(row[0]) for row in found]
    return [",".join(positions[begin : begin + size]) for begin in range(0, len(found), size)]


def _unmark(shop: Shop, positions: str) -> None:
    shop.execute(
        f"UPDATE txbroker_outbox SET state = 'LOCAL_COMMIT' WHERE position IN ({positions})"
    )


async def test_many_small_transactions_keep_the_order_of_their_keys(shop: Shop) -> None:
    with closing(shop.place.connect()) as connection:
        for n in range(300):
            with_transaction(connection)
            shop.outbox.add(connection, Message(shop.topic, f"k{n % 7}", str(n)))
            connection.commit()
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    by_key: dict[bytes | None, list[int]] = {}
    for record in sorted(shop.visible(), key=lambda record: (record.partition, record.offset)):
        by_key.setdefault(record.key, []).append(int(record.value or b""))
    assert sum(map(len, by_key.values())) == 300
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


# --- refusals --------------------------------------------------------------------------------


async def test_a_refused_row_waits_with_its_key_and_its_unit_while_others_continue(
    shop: Shop,
) -> None:
    missing = f"{shop.prefix}.missing"
    with closing(shop.place.connect()) as connection:
        for messages in (
            [Message(missing, "k1", "1"), Message(shop.topic, "k2", "2")],
            [Message(shop.topic, "k1", "3")],
            [Message(shop.topic, "k2", "4")],
            [Message(shop.topic, "k9", "5")],
        ):
            with_transaction(connection)
            shop.outbox.add(connection, *messages)
            connection.commit()
    async with shop.relay() as relay:
        await until(lambda: shop.numbers() == [5], 20)
        with pytest.raises(StillWaiting, match=f"4 rows still wait.*{missing}.*does not exist"):
            await relay.drain(timeout_s=0.1)
        await asyncio.to_thread(create_topic, shop.bootstrap, missing)
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [2, 3, 4, 5]
    assert len(read_topics(shop.bootstrap, [missing])) == 1


@pytest.mark.rule(49)
async def test_a_long_unit_waits_whole_and_goes_without_expired_rows(
    shop: Shop, small_pages: int
) -> None:
    missing = f"{shop.prefix}.missing"
    with closing(shop.place.connect()) as connection:
        with_transaction(connection)
        shop.outbox.add(connection, *shop.messages(range(130)))
        shop.outbox.add(connection, *shop.messages(range(900, 990)), timeout_s=0.001)
        shop.outbox.add(connection, *shop.messages([130]), Message(missing, "k131", "131"))
        connection.commit()
    shop.add([140], order_key="other")
    with closing(shop.place.connect()) as connection:
        with_transaction(connection)  # a long one, too, with a key of the first in its last page
        shop.outbox.add(connection, *shop.messages(range(200, 300)))
        shop.outbox.add(connection, *shop.messages([3]))
        connection.commit()
    await asyncio.sleep(0.05)  # the timeout of rows passes by the database's clock
    async with shop.relay() as relay:
        await until(lambda: shop.numbers() == [140], 20)
        with pytest.raises(StillWaiting, match="233 rows still wait"):
            await relay.drain(timeout_s=0.1)
        await asyncio.to_thread(create_topic, shop.bootstrap, missing)
        await relay.drain(timeout_s=20)
    assert shop.numbers() == sorted([*range(131), 140, *range(200, 300), 3])
    assert len(read_topics(shop.bootstrap, [missing])) == 1
    assert shop.states() == {"GLOBAL_COMMIT": 234, "MESSAGE_ERROR": 90}


async def test_a_row_is_given_up_whole_after_its_retries_or_its_timeout(shop: Shop) -> None:
    missing = f"{shop.prefix}.missing"
    large = b"x" * (2 << 20)  # more than a topic takes by default
    with closing(shop.place.connect()) as connection:
        for message in (Message(missing, "k1", "1"), Message(shop.topic, "k2", large)):
            with_transaction(connection)
            shop.outbox.add(connection, message)
            connection.commit()
    shop.add([3])
    with closing(shop.place.connect()) as connection:
        with_transaction(connection)
        shop.outbox.add(connection, Message(shop.topic, "k4", "4"), timeout_s=0.001)
        connection.commit()
    await asyncio.sleep(0.05)  # the timeout of a row passes by the database's clock
    async with shop.relay(retries_max=1) as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [3]
    rows = shop.place.select(
        "SELECT message_key, cause, LENGTH(message_value), retries FROM txbroker_outbox "
        "WHERE state = 'MESSAGE_ERROR' ORDER BY message_key"
    )
    (_, unknown, _, _), (_, too_large, size, retries), (_, late, _, _) = rows
    assert "does not exist" in unknown
    assert "large" in too_large
    assert (size, retries) == (len(large), 1)
    assert late == "not sent before its timeout_at"


async def test_a_row_for_an_own_topic_is_given_up_at_once(sqlite_shop: Shop) -> None:
    shop = sqlite_shop
    with closing(shop.place.connect()) as connection:
        with_transaction(connection)
        shop.outbox.add(connection, Message(f"{shop.prefix}.op", "k", "v"), *shop.messages([1]))
        connection.commit()
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [1]
    ((cause,),) = shop.place.select(
        "SELECT cause FROM txbroker_outbox WHERE state = 'MESSAGE_ERROR'"
    )
    assert cause == f"topic {shop.prefix}.op is txbroker's own: it is no target"


async def test_a_row_that_holds_no_message_is_refused_alone(sqlite_shop: Shop) -> None:
    shop = sqlite_shop
    shop.add([1])
    shop.execute(
        "INSERT INTO txbroker_outbox (topic, message_value, headers) "
        f"VALUES ('{shop.topic}', x'32', 'rubbish'), ('{shop.topic}', x'33', '[[7, 8]]')"
    )
    async with shop.relay(retries_max=1) as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [1]
    causes = shop.place.select("SELECT cause FROM txbroker_outbox WHERE state = 'MESSAGE_ERROR'")
    assert len(causes) == 2
    assert all("the row holds no message" in cause for (cause,) in causes)


# --- several relays --------------------------------------------------------------------------


async def test_two_relays_share_the_shards_and_take_each_other_over(shop: Shop) -> None:
    first, second = shop.relay(shards=4, lease_s=1), shop.relay(lease_s=1)
    async with first:
        assert first.statistics()["shards"] == 4
        async with second:
            await until(
                lambda: first.statistics()["shards"] == second.statistics()["shards"] == 2, 20
            )
            shop.add(range(200))
            await second.drain(timeout_s=20)
        await until(lambda: first.statistics()["shards"] == 4, 20)
        shop.add(range(200, 220))
        await first.drain(timeout_s=20)
    assert shop.numbers() == list(range(220))


async def test_shards_are_divided_while_no_relay_runs(sqlite_shop: Shop) -> None:
    shop = sqlite_shop
    async with shop.relay(lease_s=1):
        with pytest.raises(ConfigurationError, match=r"1 shards, which running relays own: stop"):
            await shop.relay(shards=2).start()
    for shards in (2, 16, 1):
        shop.add(range(shards * 100, shards * 100 + 50))
        async with shop.relay(shards=shards) as relay:
            await relay.drain(timeout_s=20)
    assert len(shop.numbers()) == len(set(shop.numbers())) == 150


async def test_a_second_outbox_with_the_name_is_refused_and_does_not_fence(
    sqlite_shop: Shop,
) -> None:
    shop = sqlite_shop
    ((name,),) = shop.place.select("SELECT relay FROM txbroker_relay")
    other = from_url(shop.place.url.replace("shop.db", "other.db"), create_tables=True)
    double = Outbox(other, name=name)
    shop.add([1])
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
        with pytest.raises(ConfigurationError, match=r"two relays have one name\. Give one"):
            await Relay(double, shop.bootstrap, topic_prefix=shop.prefix).start()
        shop.add([2])
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [1, 2]


async def test_a_restored_table_stops_the_relay(sqlite_shop: Shop) -> None:
    """Its rows have the positions of others that are delivered: none is marked unseen."""
    shop = sqlite_shop
    shop.add([1])
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    shop.execute("UPDATE txbroker_outbox SET id = 'another', state = 'LOCAL_COMMIT'")
    relay = shop.relay()
    await relay.start()
    with pytest.raises(ConfigurationError, match="was restored or changed"):
        await relay.run()
    await relay.close()
    assert shop.states() == {"LOCAL_COMMIT": 1}


@pytest.mark.parametrize("keep_s", [0, 0.001])
async def test_finished_rows_are_deleted(shop: Shop, keep_s: float) -> None:
    shop.add(range(5))
    async with shop.relay(keep_s=keep_s) as relay:
        await relay.drain(timeout_s=20)
        await until(lambda: not shop.states(), 20)
    assert shop.numbers() == [0, 1, 2, 3, 4]
