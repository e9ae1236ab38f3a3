"""Relays on real databases and a real Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import pytest

from tests.databases.places import Place, connect, run
from tests.kit.database_servers import PostgresServer, program
from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import unique, until
from tests.relay.conftest import place_of
from tests.relay.world import Shop, ids, with_transaction
from txbroker.cli.relay.outbox_rows import find_rows, open_outbox
from txbroker.databases import from_url
from txbroker.databases.outbox.operations import WHOLE, Choice
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.databases.steps import Query, one
from txbroker.embedded import EmbeddedKafka
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


@pytest.mark.rule(49)
async def test_only_rows_that_no_waiting_helps_are_given_up(shop: Shop) -> None:
    missing = f"{shop.prefix}.missing"
    large = b"x" * (2 << 20)  # more than a topic takes by default
    with closing(shop.place.connect()) as connection:
        for message in (
            Message(missing, "k1", "1"),
            Message(shop.topic, "k1", "2"),
            Message(shop.topic, "k2", "3", partition=77),
            Message(shop.topic, "k4", large),
        ):
            with_transaction(connection)
            shop.outbox.add(connection, message)
            connection.commit()
    shop.add([3])
    with closing(shop.place.connect()) as connection:
        with_transaction(connection)
        shop.outbox.add(connection, Message(shop.topic, "k4", "4"), timeout_s=0.001)
        connection.commit()
    await asyncio.sleep(0.05)  # the timeout of a row passes by the database's clock
    async with shop.relay(retries_max=1):
        await until(lambda: _retries(shop, missing) > 1 and shop.numbers() == [3], 20)
        assert [row[:3] for row in _causes(shop, "LOCAL_COMMIT")] == [
            (b"k1", f"topic {missing} does not exist, or this login may not describe it", 1),
            (b"k1", "an earlier row of its order or unit waits", 1),
            (b"k2", f"topic {shop.topic} has 3 partitions, and no partition 77", 1),
        ]
        await asyncio.to_thread(create_topic, shop.bootstrap, missing)
        await until(lambda: shop.numbers() == [2, 3], 20)
    large_row, late = _causes(shop, "MESSAGE_ERROR")
    assert "large" in large_row[1]
    assert large_row[2:] == (len(large), 1)
    assert late[1] == "not sent before its timeout_at"
    assert {cause for _, cause, *_ in _causes(shop, "GLOBAL_COMMIT")} == {""}


def _retries(shop: Shop, topic: str) -> int:
    ((retries,),) = shop.place.select(
        f"SELECT retries FROM txbroker_outbox WHERE topic = '{topic}'"
    )
    return int(retries)


def _causes(shop: Shop, state: str) -> list[tuple[Any, ...]]:
    """Return key, cause, size and retries of rows."""
    found = shop.place.select(
        "SELECT message_key, cause, LENGTH(message_value), retries FROM txbroker_outbox "
        f"WHERE state = '{state}' ORDER BY message_key, position"
    )
    return [(bytes(key), *others) for key, *others in found]


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


@pytest.mark.parametrize(
    "column",
    [
        "topic",
        "message_key",
        "message_value",
        "headers",
        "order_key",
        "id",
        "partition_id",
        "timestamp_ms",
    ],
)
async def test_a_row_of_any_bytes_is_given_up_alone(sqlite_shop: Shop, column: str) -> None:
    """SQLite takes text that is no UTF-8, and text in columns of numbers."""
    shop = sqlite_shop
    shop.add([1])
    columns = {"topic": f"'{shop.topic}'", "message_value": "x'32'"}
    columns[column] = "CAST(x'ff61' AS TEXT)"
    shop.execute(
        f"INSERT INTO txbroker_outbox ({', '.join(columns)}) VALUES ({', '.join(columns.values())})"
    )
    shop.add([3])
    async with shop.relay(retries_max=1) as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [1, 3]
    database = open_outbox(shop.place.url)
    listed = find_rows(database, Choice(), 10, WHOLE)
    assert len(msgspec.json.encode(listed)) > 100
    (given_up,) = [row for row in listed if row["state"] == "MESSAGE_ERROR"]
    assert "the row holds no message" in given_up["cause"]
    assert given_up["problem"].startswith("no message")


async def test_rows_of_a_database_without_an_encoding(
    request: pytest.FixtureRequest, kafka: EmbeddedKafka
) -> None:
    """PostgreSQL's SQL_ASCII takes any bytes as text."""
    server, name = request.getfixturevalue("postgres_server"), unique("ascii").replace("-", "_")
    with closing(connect(server.admin_url)) as connection:
        connection.autocommit = True
        connection.execute(
            f"CREATE DATABASE {name} OWNER {urlsplit(server.url(name)).username} "
            "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
    shop = Shop(Place(server.url(name)), kafka.bootstrap)
    shop.add([1])
    for column in ("headers", "order_key", "id", "topic"):
        topic = f"'{shop.topic}'" if column != "topic" else "convert_from('\\xff', 'SQL_ASCII')"
        other = f", {column}" if column != "topic" else ""
        text = ", convert_from('\\x61ff', 'SQL_ASCII')" if other else ""
        shop.execute(f"INSERT INTO txbroker_outbox (topic{other}) VALUES ({topic}{text})")
    shop.add([3])
    async with shop.relay(retries_max=1) as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [1, 3]
    listed = find_rows(open_outbox(shop.place.url), Choice(), 10, WHOLE)
    assert sum("holds no message" in row["cause"] for row in listed) == 4
    msgspec.json.encode(listed)


_MODES = (
    "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE,IGNORE_SPACE,"
    "NO_UNSIGNED_SUBTRACTION"
)


@pytest.mark.parametrize(
    ("kind", "caller", "own"),
    [
        ("mariadb", f"SET sql_mode = '{_MODES}'", f"sql_mode='{_MODES},EMPTY_STRING_IS_NULL'"),
        ("mariadb", "SET sql_mode = 'ORACLE', time_zone = '+05:00'", "sql_mode='ORACLE'"),
        ("mariadb", "SET sql_mode = ''", "sql_safe_updates=1,max_statement_time=1"),
        (
            "postgresql",
            "SET bytea_output = escape; SET datestyle = 'SQL, DMY'; "
            "SET standard_conforming_strings = off",
            "-c default_transaction_read_only=on -c statement_timeout=1000 -c bytea_output=escape "
            "-c standard_conforming_strings=off -c default_transaction_isolation=serializable",
        ),
    ],
)
async def test_settings_of_sessions_change_nothing(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    kind: str,
    caller: str,
    own: str,
) -> None:
    place = place_of(request, tmp_path, kind)
    option = {"options": own} if kind == "postgresql" else {"init_command": f"SET {own}"}
    url = place.url + ("&" if "?" in place.url else "?") + urlencode(option, quote_via=quote)
    shop = Shop(Place(url), kafka.bootstrap)
    value = bytes(range(256)) + b"'\\' \\x"
    with closing(place.connect()) as connection:
        run(connection, caller)
        connection.commit()
        message = Message(shop.topic, 'it\'s \\ "k"', value, {"h\\'": "\\"})
        shop.outbox.add(connection, message, order_key="o'\\")
        connection.commit()
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    (record,) = shop.visible()
    assert (record.key, record.value) == (message.key, value)
    assert record.headers[2:] == message.headers


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
async def test_rows_that_others_lock_hold_no_others_back(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    shop = Shop(place_of(request, tmp_path, kind), kafka.bootstrap)
    shop.add([1])
    ((position,),) = shop.place.select("SELECT position FROM txbroker_outbox")
    with closing(shop.place.connect()) as other:
        run(other, f"SELECT * FROM txbroker_outbox WHERE position = {position} FOR UPDATE")
        async with shop.relay() as relay:
            await until(lambda: shop.numbers() == [1], 20)
            shop.add([2])
            await until(lambda: shop.states() == {"GLOBAL_COMMIT": 1, "LOCAL_COMMIT": 1}, 20)
            assert relay.statistics()["failures_total"] > 0
        # MariaDB shows transactions only with the right PROCESS.
        who = {"postgresql": "probably process", "mariadb": "another transaction"}[kind]
        assert f"locked by {who}" in caplog.text
        async with shop.relay() as relay:  # the successor knows the visible rows
            shop.add([3])
            await until(lambda: shop.states() == {"GLOBAL_COMMIT": 2, "LOCAL_COMMIT": 1}, 20)
            other.rollback()
            await relay.drain(timeout_s=20)
    assert shop.numbers() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize("why", ["missing", "expired", "held", "malformed", "due"])
async def test_locked_rows_that_must_wait_hold_no_others_back(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    why: str,
) -> None:
    monkeypatch.setattr(outbox_source, "_PUT_OFF_S", 1)
    shop = Shop(place_of(request, tmp_path, kind), kafka.bootstrap)
    missing = [f"{shop.prefix}.missing{n}" for n in range(2)]

    def add(*messages: Message) -> None:
        with closing(shop.place.connect()) as connection:
            shop.outbox.add(connection, *messages)
            connection.commit()

    if why == "held":
        add(Message(missing[0], "a", "0"))
    topic = missing[0] if why in ("missing", "due") else shop.topic
    add(Message(topic, "a", "1"), Message(shop.topic, "b", "2"))
    ((position,),) = shop.place.select(
        "SELECT position FROM txbroker_outbox WHERE message_value = '1'"
    )
    if why in ("expired", "malformed"):
        change = "timeout_at = 1" if why == "expired" else "headers = 'x'"
        shop.execute(f"UPDATE txbroker_outbox SET {change} WHERE position = {position}")
    add(Message(shop.topic, "a", "3"))
    add(Message(shop.topic, "b", "4"))
    add(Message(missing[1], "c", "5"))
    if why == "due":
        async with shop.relay():
            await until(lambda: _retries(shop, topic) > 0, 20)
            await until(lambda: _retries(shop, missing[1]) > 0, 20)
        for each in missing:
            create_topic(shop.bootstrap, each)
    with closing(shop.place.connect()) as other:
        run(other, f"SELECT * FROM txbroker_outbox WHERE position = {position} FOR UPDATE")
        async with shop.relay(retries_max=1) as relay:
            for n in (6, 7, 8):
                add(Message(shop.topic, f"k{n}", str(n)))
            await until(lambda: shop.numbers() == [6, 7, 8], 20)
            if why == "due":
                await until(lambda: len(read_topics(shop.bootstrap, missing)) == 1, 20)
            await asyncio.sleep(1.5)  # it is tried again
            assert shop.numbers() == [6, 7, 8]
            assert relay.statistics()["failures_total"] > 0
            assert "locked by" in caplog.text
            other.rollback()
            for each in missing if why != "due" else ():
                create_topic(shop.bootstrap, each)
            await relay.drain(timeout_s=30)
    given_up = why in ("expired", "malformed")
    records = [*shop.visible(), *read_topics(shop.bootstrap, missing)]
    assert sorted(int(record.value or b"") for record in records) == [
        *([0] if why == "held" else []),
        *([] if given_up else [1]),
        *range(2, 9),
    ]
    of_topic = sorted(shop.visible(), key=lambda record: record.offset)
    for key, numbers in ((b"a", [b"1", b"3"]), (b"b", [b"2", b"4"])):
        found = [record.value for record in of_topic if record.key == key]
        assert found == numbers[-len(found) :]
    assert shop.states().get("MESSAGE_ERROR", 0) == given_up


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_rows_that_others_lock_are_not_purged_yet(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    place = place_of(request, tmp_path, kind)
    outbox = Outbox(place.database)
    outbox.create()
    with closing(place.connect()) as connection:
        outbox.add(connection, *(Message("t", str(n)) for n in range(3)))
        connection.commit()
    place.execute("UPDATE txbroker_outbox SET state = 'GLOBAL_COMMIT'")
    rows = WaitingRows(place.dialect)
    with closing(place.connect()) as other:
        run(other, "SELECT * FROM txbroker_outbox WHERE position IN (SELECT MIN(position) "
            "FROM txbroker_outbox) FOR UPDATE")  # fmt: skip
        assert place.database.apart(rows.purge_all(0)) == 2
        other.rollback()
    assert place.database.apart(rows.purge_all(0)) == 1


async def test_a_look_does_not_read_what_a_snapshot_keeps(
    request: pytest.FixtureRequest, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """Deleted rows stay in PostgreSQL's index while a transaction may see them."""
    shop = Shop(place_of(request, tmp_path, "postgresql"), kafka.bootstrap)
    rows = WaitingRows(shop.place.dialect)
    with closing(shop.place.connect()) as old, closing(shop.place.connect()) as connection:
        run(old, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        run(old, "SELECT 1 FROM txbroker_relay")
        run(
            connection,
            "INSERT INTO txbroker_outbox (topic) SELECT 't' FROM generate_series(1, 20000)",
        )
        connection.commit()
        shop.execute("DELETE FROM txbroker_outbox")
        floor = shop.place.database.apart(rows.floor())
        read = {at: _buffers(shop, rows, at) for at in ("", floor)}
    assert read[floor] < 10 < read[""], read


async def test_an_idle_relay_seldom_searches_from_the_beginning(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search from the beginning reads what a snapshot keeps."""
    shop = Shop(place_of(request, tmp_path, "postgresql"), kafka.bootstrap)
    floors: list[str] = []
    select = WaitingRows.select

    def noted(self: WaitingRows, count: int, visible: Any, floor: str, put_off: Any) -> Any:
        floors.append(floor)
        return select(self, count, visible, floor, put_off)

    monkeypatch.setattr(WaitingRows, "select", noted)
    async with shop.relay() as relay:
        for number in range(30):
            shop.add([number])
            await relay.drain(timeout_s=20)
    assert shop.numbers() == list(range(30))
    searches = floors.count("")
    assert len(floors) >= 60
    assert searches < len(floors) / 4, (searches, len(floors))


def _buffers(shop: Shop, rows: WaitingRows, floor: str) -> int:
    """Return how many pages a look reads."""
    query = next(rows.select(2000, floor=floor))
    plan = shop.place.database.apart(
        one(Query(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query.sql}", query.values))
    )
    return int(plan.rows[0][0][0]["Plan"]["Shared Hit Blocks"])


# --- several relays --------------------------------------------------------------------------


async def test_two_relays_share_the_shards_and_take_each_other_over(shop: Shop) -> None:
    first, second = (shop.relay(shards=4, lease_s=1) for _ in range(2))
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*map(stack.enter_async_context, (first, second)))
        await until(lambda: first.statistics()["shards"] == second.statistics()["shards"] == 2, 20)
        shop.add(range(200))
        await second.close()
        await until(lambda: first.statistics()["shards"] == 4, 20)
        shop.add(range(200, 220))
        await first.drain(timeout_s=20)
    assert shop.numbers() == list(range(220))


async def test_shards_are_divided_while_no_relay_runs(sqlite_shop: Shop) -> None:
    shop = sqlite_shop
    async with shop.relay(lease_s=1):
        with pytest.raises(ConfigurationError, match=r"1 shards, which running relays own: stop"):
            await shop.relay(shards=2, lease_s=1).start()
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


# --- restored tables -------------------------------------------------------------------------


@pytest.mark.rule(50)
async def test_rows_of_another_cluster_keep_their_order(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their units are transactions that this PostgreSQL cluster has not reached."""
    monkeypatch.setattr(outbox_source, "_ROWS", 4)
    shop = Shop(place_of(request, tmp_path, "postgresql"), kafka.bootstrap)
    foreign = ", ".join(
        # Transactions of two rows.
        f"('{shop.topic}', 'a', '{n}', '{90_000_000 + n // 2:020}', '{state}')"
        for n, state in enumerate(["LOCAL_COMMIT"] * 10 + ["UNKNOWN"])
    )
    shop.execute(
        "INSERT INTO txbroker_outbox (topic, message_key, message_value, unit, state) "
        f"VALUES {foreign}"
    )
    for n in range(11, 17):
        with closing(shop.place.connect()) as connection:
            shop.outbox.add(connection, Message(shop.topic, "a", str(n)))
            connection.commit()
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    records = sorted(shop.visible(), key=lambda record: record.offset)
    values = [int(record.value or b"") for record in records]
    assert values == [*range(10), *range(11, 17)]
    ((unit,),) = shop.place.select("SELECT unit FROM txbroker_outbox WHERE state = 'UNKNOWN'")
    assert unit.startswith("!")  # no transaction of this cluster prepares rows of the same unit


@pytest.mark.rule(50)
async def test_rows_of_a_dump_keep_their_order(
    postgres_server: PostgresServer, kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another PostgreSQL cluster passes their units before a relay starts there."""
    monkeypatch.setattr(outbox_source, "_ROWS", 4)
    shop = Shop(Place(postgres_server.create_database()), kafka.bootstrap)

    def add(n: int) -> None:
        with closing(shop.place.connect()) as connection:
            shop.outbox.add(connection, *shop.messages([n], "a"))
            connection.commit()

    for n in range(5):
        add(n)
    ((passed,),) = shop.place.select("SELECT MAX(CAST(unit AS bigint)) FROM txbroker_outbox")
    dump = [Path(program("postgres")).with_name("pg_dump"), "--no-owner", shop.place.url]
    script = await asyncio.to_thread(subprocess.check_output, dump)
    with PostgresServer(fsync="off") as other:
        shop.place = Place(other.create_database())
        psql = [Path(program("postgres")).with_name("psql"), "-qv", "ON_ERROR_STOP=1"]
        await asyncio.to_thread(
            subprocess.check_output, [*psql, shop.place.url], input=script, stderr=subprocess.STDOUT
        )
        shop.outbox = Outbox(shop.place.database)
        add(5)
        add(6)
        loop = f"WHILE CAST(CAST(pg_current_xact_id() AS text) AS bigint) <= {passed}"
        shop.place.database.apart(one(Query(f"DO 'BEGIN {loop} LOOP COMMIT; END LOOP; END'")))
        async with shop.relay() as relay:
            await relay.drain(timeout_s=20)
    records = sorted(shop.visible(), key=lambda record: record.offset)
    assert [int(record.value or b"") for record in records] == [*range(7)]


async def stopped_because(relay: Relay, text: str) -> str:
    await relay.start()
    with pytest.raises(ConfigurationError, match=text) as found:
        await asyncio.wait_for(relay.run(), 20)
    await relay.close()
    return str(found.value)


async def test_a_database_older_than_the_last_delivery_stops_the_relay(shop: Shop) -> None:
    shop.add([1])
    ((position,),) = shop.place.select("SELECT position FROM txbroker_outbox")
    shop.add([2])
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    # The backup has the first row.
    shop.execute(f"DELETE FROM txbroker_outbox WHERE position > {position}")
    shop.execute("UPDATE txbroker_outbox SET state = 'LOCAL_COMMIT'")
    shop.execute(_RESTART[shop.place.dialect.name].format(position=position))
    await stopped_because(shop.relay(), "older than the last delivery.* Compare it with the topic")
    assert shop.numbers() == [1, 2]
    assert shop.states() == {"LOCAL_COMMIT": 1}


_RESTART = {
    "sqlite": "UPDATE sqlite_sequence SET seq = {position} WHERE name = 'txbroker_outbox'",
    "postgresql": "SELECT setval('txbroker_outbox_position_seq', {position})",
    "mariadb": "ALTER SEQUENCE txbroker_outbox_position RESTART WITH {position}",
}


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
async def test_a_table_without_its_sequence_stops_the_relay(
    request: pytest.FixtureRequest, kafka: EmbeddedKafka, tmp_path: Path, kind: str
) -> None:
    """SQLite keeps its positions above all rows."""
    shop = Shop(place_of(request, tmp_path, kind), kafka.bootstrap)
    shop.add([1, 2])
    shop.execute(_RESTART[shop.place.dialect.name].format(position=1))
    shop.execute("UPDATE txbroker_outbox SET position = position + 500")
    why = await stopped_because(shop.relay(), r"behind row \d+ of the outbox.* Set it with")
    shop.execute(why.split("`")[1])
    async with shop.relay() as relay:
        await relay.drain(timeout_s=20)
    assert shop.numbers() == [1, 2]
