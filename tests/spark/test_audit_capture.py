"""The audit of a capture: rows of real databases against records in a real Kafka, with faults."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import psycopg
import pymysql
import pytest

from tests.kit.database_servers import USER, MariaServer, PostgresServer
from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import unique, until
from tests.relay.capture.deliveries import execute
from tests.relay.capture.maria_world import BINLOG
from txbroker.cli.audit.capture import read_capture
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.config.settings import Settings, load_kafka_access
from txbroker.contract.captured import AuditedTable, CapturedRow, LogPlace
from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.core.records import Record
from txbroker.databases.mariadb import MariaDB
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.relay.capture.plan import Capture, open_capture
from txbroker.relay.capture.running import RunningCapture
from txbroker.spark.access import access_from
from txbroker.spark.rows.capture import (
    CaptureAudit,
    CaptureSummary,
    CaptureTerms,
    KeyExample,
    audit_capture,
    export,
    is_shown,
    settled_reads,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = (
    "CREATE TABLE orders (id INT PRIMARY KEY, item VARCHAR(40), price DECIMAL(10, 2))",
    "CREATE TABLE order_lines (id INT PRIMARY KEY, order_id INT, amount FLOAT, "
    "FOREIGN KEY (order_id) REFERENCES orders (id) ON DELETE CASCADE)",
    "CREATE TABLE notes (id INT PRIMARY KEY, body VARCHAR(40))",
)
UP_TO = 20
NOW_MS = round(time.time() * 1000)
MAPPING = """
name = "{name}"
database = "{url}"
kafka = "{kafka}"
topic_prefix = "{name}"
[[tables]]
table = "orders"
topic = "{name}.orders"
[[tables]]
table = "order_lines"
topic = "{name}.lines"
tombstones = true
accept = ["cascades"]
[[tables]]
table = "notes"
topic = "{name}.notes"
column = "body"
"""


@pytest.fixture(scope="session")
def binlog_server() -> Iterator[MariaServer]:
    """A server with a binary log."""
    with MariaServer(**BINLOG) as running:
        yield running


class Shop:
    """Three captured tables with rows, and their topics."""

    def __init__(self, server: Any, kafka: str, folder: Path) -> None:
        self.name = unique("shop")
        self.kafka = kafka
        self.url = server.create_database()
        self.maria = isinstance(server, MariaServer)
        if self.maria:
            execute(
                self.connect("root"), [f"GRANT REPLICATION SLAVE ON *.* TO `{USER}`@`127.0.0.1`"]
            )
        else:
            execute(
                psycopg.connect(server.admin_url, autocommit=True),
                [f"ALTER ROLE {USER} REPLICATION"],
            )
        self.file = folder / f"{self.name}.toml"
        self.file.write_text(MAPPING.format(name=self.name, url=self.url, kafka=kafka))
        self.execute(*TABLES)
        for table, partitions in (("orders", 3), ("lines", 1), ("notes", 1)):
            create_topic(kafka, f"{self.name}.{table}", partitions)

    @property
    def capture(self) -> Capture:
        return open_capture(str(self.file))

    @property
    def settings(self) -> Settings:
        return Settings(kafka=self.kafka, topic_prefix=self.name)

    def connect(self, user: str = USER) -> Any:
        if not self.maria:
            return psycopg.connect(self.url, autocommit=True)
        options = {**MariaDB(self.url).options, "autocommit": True, "ssl_disabled": True}
        if user != USER:
            options |= {"user": user, "password": ""}
        return pymysql.connect(**options)

    def execute(self, *statements: str) -> Any:
        return execute(self.connect(), statements)

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[RunningCapture]:
        capture = RunningCapture(self.capture, self.kafka, topic_prefix=self.name, **options)
        await capture.start()
        try:
            yield capture
            await capture.drain(30)
        finally:
            await capture.close()

    async def lose(self, *statements: str) -> None:
        """Execute statements whose changes no capture sees; none runs meanwhile."""
        if self.maria:
            execute(self.connect("root"), ["SET sql_log_bin = 0", *statements])
            return
        slot = f"'txbroker_{self.name.replace('-', '_')}'"
        # The server ends the session of a closed capture a little later.
        held = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = {slot} AND active"
        await until(lambda: not self.execute(held))
        self.execute(
            *statements, f"SELECT pg_replication_slot_advance({slot}, pg_current_wal_lsn())"
        )
        async with self.running(on_gap="skip"):
            pass

    async def append(self, table: str, key: int, which: int, **changed: Any) -> None:
        """Append a copy of one of a key's records, with changes."""
        topic = f"{self.name}.{table}"
        found = [
            each
            for each in read_topics(self.kafka, [topic])
            if each.key == f'{{"id":{key}}}'.encode()
        ][which]
        value = found.value if "value" not in changed else changed["value"](found.value)
        record = Record(found.key, value, tuple(found.headers), NOW_MS)
        await append(self.kafka, topic, record, partition=found.partition)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Change rows of the table orders all the time, in and around the block."""
        stop, begun = threading.Event(), threading.Event()

        def change() -> None:
            with closing(self.connect()) as connection, connection.cursor() as cursor:
                number = 0
                while not stop.wait(0.02):
                    id = 1000 + number % 10
                    cursor.execute(f"DELETE FROM orders WHERE id = {id}")
                    cursor.execute(f"INSERT INTO orders VALUES ({id}, 'new', {number})")
                    cursor.execute(f"UPDATE orders SET price = price + 1 WHERE id > {id - 3}")
                    number += 1
                    if number > 10:
                        begun.set()

        thread = threading.Thread(target=change)
        thread.start()
        begun.wait(30)
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def audit(self, spark: SparkSession, *names: str, **terms: Any) -> CaptureSummary:
        with read_capture(self.settings, self.capture, names, CaptureTerms(**terms)) as ready:
            return audit_capture(spark, access_from(self.settings), *ready)


async def append(kafka: str, topic: str, *records: Record, partition: int = 0) -> None:
    door = KafkaConsumingDoor.from_access(load_kafka_access(kafka, environ={}), "txbroker-test")
    await door.start()
    try:
        await door.append(topic, partition, records)
    finally:
        await door.close()


def found_in(summary: CaptureSummary) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return findings and columns by the end of a table's name and the key."""
    return {
        f"{each.table.partition('.')[2]} {msgspec.json.decode(each.key)['id']}": (
            each.findings,
            each.columns,
        )
        for each in summary.examples
    }


def values(number: int) -> Sequence[str]:
    return (
        f"INSERT INTO orders VALUES ({number}, 'shoe', {number}.50)",
        f"INSERT INTO order_lines VALUES ({number}, {number}, {number} / 3.0)",
        f"INSERT INTO notes VALUES ({number}, 'note')",
    )


@pytest.mark.parametrize("server", ["postgres_server", "binlog_server"])
async def test_every_fault_is_found_and_nothing_else_beside_a_load(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
) -> None:
    # No minute has passed since the changes of the table whose records have no envelope.
    monkeypatch.setattr("txbroker.spark.rows.capture._YOUNG_MS", 0)
    shop = Shop(request.getfixturevalue(server), kafka.bootstrap, tmp_path)
    await shop.capture.apply()
    async with shop.running() as running:
        shop.execute(*[sql for number in range(1, UP_TO + 1) for sql in values(number)])
        shop.execute(
            "UPDATE orders SET item = 'boot' WHERE id IN (6, 7, 8)",
            "DELETE FROM order_lines WHERE id = 9",
            "DELETE FROM notes WHERE id = 9",
        )
        await running.drain(30)
        with shop.load():
            clean = await asyncio.to_thread(shop.audit, spark)

    assert clean.drift == {}, clean
    assert clean.rows[next(name for name in clean.rows if "notes" in name)] == UP_TO - 1
    assert (clean.unread, clean.unjudged, clean.gone, clean.young) == ({}, {}, 0, 0)
    assert clean.records > 4 * UP_TO

    await shop.lose(
        "DELETE FROM orders WHERE id = 4",  # and its line
        "UPDATE orders SET item = 'hat', price = 1 WHERE id = 2",
        "INSERT INTO order_lines VALUES (30, 1, 1)",
        "UPDATE notes SET body = 'lost' WHERE id = 3",
    )
    async with shop.running():
        shop.execute("DELETE FROM orders WHERE id = 5")
    await shop.append("orders", 6, 0)
    await shop.append("orders", 7, -1, value=lambda value: value.replace(b"boot", b"coat"))
    await shop.append("orders", 8, -1, value=lambda _: b"no envelope")

    async with shop.running():
        with shop.load():
            planted = await asyncio.to_thread(shop.audit, spark)

    # MariaDB's log does not show what a cascade deletes; PostgreSQL's does.
    cascade = {"order_lines 5": (("extra",), ())} if shop.maria else {}
    assert found_in(planted) == {
        "orders 4": (("extra",), ()),
        "order_lines 4": (("extra",), ()),
        "orders 2": (("differs",), ("item", "price")),
        "order_lines 30": (("missing",), ()),
        "notes 3": (("differs",), ("body",)),
        "orders 6": (("stale", "differs"), ("item",)),
        "orders 7": (("differs",), ("item",)),
        "orders 8": (("unreadable",), ()),
        **cascade,
    }
    assert planted.drift == {
        "extra": 2 + len(cascade),
        "missing": 1,
        "stale": 1,
        "differs": 4,
        "unreadable": 1,
    }


# --- rules, with records and rows that no database has written --------------------------------

ALL = frozenset({"insert", "update", "delete", "truncate"})
SHARE = 0.7
PLACE = LogPlace("0/200", {0: 0x1FF}, "100:110:104", 1_000_000_000_000)


def test_the_numbers_of_each_domain_decide_on_mariadb(spark: SparkSession) -> None:
    place = LogPlace("0-1-511,7-1-5", {0: 511, 7: 5}, "", 0)
    changes = {(0, 511): True, (0, 512): False, (7, 5): True, (7, 6): False, (9, 1): False}
    table = spark.createDataFrame(list(changes), "domain int, number bigint")
    assert {tuple(row) for row in table.where(is_shown(place)).collect()} == {
        change for change, shown in changes.items() if shown
    }


class Written:
    """Records of a capture by its rules, in topics of one partition each."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.name = unique("rules")
        self.tables: list[AuditedTable] = []
        self.records: dict[str, list[Record]] = {}
        self.rows: dict[str, list[CapturedRow]] = {}
        self.shortened = ""
        """The table from whose topic retention has removed records."""

    def table(self, name: str, column: str | None = None, operations: Any = ALL) -> AuditedTable:
        """Return a table with a topic."""
        topic = create_topic(self.kafka.bootstrap, f"{self.name}.{name}")
        found = AuditedTable("s", name, topic, column, frozenset(operations), alone=True)
        self.tables.append(found)
        self.records[topic], self.rows[name] = [], []
        return found

    def row(self, table: AuditedTable, key: str, *, whole: bool = True, **columns: Any) -> None:
        shown = columns.pop("value", None) or msgspec.json.encode(columns)
        self.rows[table.table].append(CapturedRow(key.encode(), shown, whole))

    def record(
        self,
        table: AuditedTable,
        key: str | None,
        number: int,
        *,
        xid: int = 1,
        age_s: int = 3600,
        **envelope: Any,
    ) -> None:
        """Add a record of the transaction with a number, and xid, whose commit was that long ago.
        `value`: of one without an envelope."""
        value = envelope.pop("value", b"")
        if value == b"":
            content = {"operation": "update", **envelope, "source": {"xid": xid}}
            value = msgspec.json.encode(content)
        mark = PLACE.at_ms - age_s * 1000
        headers = (
            (INSTALLATION_HEADER, self.name.encode()),
            (ID_HEADER, f"0/{number:X}@{mark}/0".encode()),
        )
        self.records[table.topic].append(Record(key and key.encode(), value, headers, NOW_MS))

    async def audit(self, spark: SparkSession, folder: Path, **terms: Any) -> CaptureSummary:
        for topic, records in self.records.items():
            if records:
                await append(self.kafka.bootstrap, topic, *records)
                records.clear()
        folder.mkdir()
        asked = CaptureTerms(**terms)
        rows = {
            each.name: export(
                folder / f"{each.table}.parquet", each, [self.rows[each.table]], asked.share
            )
            for each in self.tables
        }
        audit = CaptureAudit(self.name, self.tables, rows, folder, PLACE, asked, {})
        shortened = {each.topic for each in self.tables if each.table == self.shortened}
        access = access_from(Settings(kafka=self.kafka.bootstrap))
        reads = [
            msgspec.structs.replace(read, starts=(1,)) if read.topic in shortened else read
            for read in settled_reads(access, self.records, 30)
        ]
        return audit_capture(spark, access, audit, reads)


def _at_the_end_of_the_log(written: Written) -> None:
    """Add keys with records of changes that the rows may not show."""
    t, record, row, now = written.table("t"), written.record, written.row, {"a": 1}
    row(t, "later", **now)
    record(t, "later", 0x100, after=now)
    record(t, "later", 0x200, after={"a": 2})  # commits at the end of the WAL
    row(t, "running", **now)
    record(t, "running", 0x100, after=now)
    record(t, "running", 0x1FF, xid=104, age_s=5, after={"a": 2})  # its commit is not shown yet
    row(t, "begun later", **now)
    record(t, "begun later", 0x100, after=now)
    record(t, "begun later", 0x1FF, xid=110, age_s=0, after={"a": 2})
    row(t, "long ago", a=2)
    record(t, "long ago", 0x100, xid=104, age_s=10**6, after={"a": 2})  # the number came again
    row(t, "other server", a=2)
    record(t, "other server", 0x900, age_s=10**6, after=now)  # before it was replaced
    record(t, "other server", 0x100, after={"a": 2})
    row(t, "other server alone", a=2)
    record(t, "other server alone", 0x900, age_s=10**6, after={"a": 2})
    row(t, "shown", a=2)
    record(t, "shown", 0x100, xid=103, age_s=5, after=now)


def _of_other_rules(written: Written) -> None:
    """Add keys, of all kinds of tables."""
    (t,) = written.tables
    record, row, now = written.record, written.row, {"a": 1}
    row(t, "new column", a=1, b=None, c=5)
    record(t, "new column", 0x100, after=now)
    row(t, "large", a=1, b="long")
    record(t, "large", 0x100, after=now, unchanged=["b"])
    row(t, "text for number", a="1", j={"x": [1, None]})
    record(t, "text for number", 0x100, after={"a": "1", "j": {"x": [1, 2]}})
    row(t, "unsent", **now)
    row(t, "not shown", whole=False, a=None)
    record(t, "cleared", 0x50, after=now)
    record(t, None, 0x60, age_s=10**6, operation="truncate")
    row(t, "filled again", **now)
    record(t, "filled again", 0x61, after=now)
    v = written.table("v", column="body")
    row(v, "same", value=b"x")
    record(v, "same", 0x100, value=b"x")
    record(v, "deleted now", 0x100, value=b"x", age_s=5)
    record(v, "deleted", 0x100, value=b"x")
    inserts = written.table("i", operations=["insert"])
    record(inserts, "deleted later", 0x100, after=now)
    row(inserts, "updated later", a=2)
    record(inserts, "updated later", 0x100, after=now)
    row(inserts, "lost", a=2)
    written.records[t.topic].append(Record(b"other", b"", ((INSTALLATION_HEADER, b"x"),), NOW_MS))
    written.records[t.topic].append(
        Record(
            b"odd", b"", ((INSTALLATION_HEADER, written.name.encode()), (ID_HEADER, b"?")), NOW_MS
        )
    )


async def test_each_key_is_judged_by_its_last_record_that_the_rows_show(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    written = Written(kafka)
    _at_the_end_of_the_log(written)
    _of_other_rules(written)

    found = await written.audit(spark, tmp_path / "rows")

    assert {each.key: (each.findings, each.columns) for each in found.examples} == {
        "shown": (("differs",), ("a",)),
        "new column": (("differs",), ("c",)),
        "text for number": (("differs",), ("j",)),
        "deleted": (("extra",), ()),
        "lost": (("missing",), ()),
        "unsent": (("missing",), ()),
    }
    assert (found.young, found.partly, found.unshown, found.set_aside) == (1, 1, 1, 1)
    assert found.unjudged == {
        "s.i": "operations lack delete: extra is not judged; operations lack update: differs is "
        "not judged"
    }

    written.shortened = "i"
    again = await written.audit(spark, tmp_path / "again", share=SHARE, older_rows=True)

    def chosen(key: str) -> bool:
        return crc32(key.encode()) % 10**6 < SHARE * 10**6

    keys = [row.key.decode() for rows in written.rows.values() for row in rows]
    assert 0 < sum(again.rows.values()) == sum(map(chosen, keys)) < len(keys)
    assert [each.key for each in again.examples] == [
        each.key for each in found.examples if chosen(each.key) and "missing" not in each.findings
    ]
    assert (again.older, again.gone) == (chosen("unsent"), chosen("lost")) == (True, True)
    assert "retention removed records of" in again.unjudged["s.i"]


# --- bad inputs -------------------------------------------------------------------------------


def _nothing(shop: Shop) -> None:
    """Leave it as it is."""


def _denied(shop: Shop) -> None:
    shop.execute(f"REVOKE SELECT ON notes FROM {USER}")


def _other_database(shop: Shop) -> None:
    record = Record(f"{shop.name}/capture".encode(), b'{"gtids": "0-1-1"}')
    asyncio.run(append(shop.kafka, f"{shop.name}.relay", record))


def _another(text: str, instead: str) -> Callable[[Shop], None]:
    def change(shop: Shop) -> None:
        shop.file.write_text(re.sub(text, instead, shop.file.read_text(), count=1))

    return change


def _keyless(shop: Shop) -> None:
    shop.execute("ALTER TABLE notes DROP CONSTRAINT notes_pkey")
    shop.file.write_text(f'{shop.file.read_text()}key = "id"\n')


@pytest.mark.parametrize(
    ("change", "options", "code", "sentence"),
    [
        (_another("^", "tables = 1"), (), 2, "is not TOML"),
        (_another("database = .*", 'database = "sqlite:////tmp/x"'), (), 1, "audit outbox"),
        (_another(r"(?<=name = )\S+", '"other"'), (), 1, "has nothing of capture other"),
        (_another("127.0.0.1:[0-9]+/data", "127.0.0.1:1/data"), (), 1, "PostgreSQL database_"),
        (_another('"notes"', '"nothing"'), (), 1, "table public.nothing of capture shop"),
        (_nothing, ("--table", "public.x"), 2, "has no table public.x: name some of public.notes"),
        (_another("[.]notes", ".none"), ("--table", "public.notes"), 1, ".none does not exist"),
        (_keyless, ("--table", "public.notes"), 1, "rows without a primary key"),
        (_denied, (), 1, "permission denied for table notes: grant this user SELECT"),
        (_nothing, ("--wait-s", "0.1"), 1, "has not delivered the changes up to 0/"),
        (_other_database, (), 1, "is none of this database"),
    ],
)
def test_bad_input_ends_with_a_sentence(
    postgres_server: PostgresServer,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Shop], None],
    options: Sequence[str],
    code: int,
    sentence: str,
) -> None:
    shop = Shop(postgres_server, kafka.bootstrap, tmp_path)
    create_topic(kafka.bootstrap, f"{shop.name}.relay", cleanup_policy="compact")
    claim = Record(f"{shop.name}/capture/owner".encode(), b"{}")
    asyncio.run(append(kafka.bootstrap, f"{shop.name}.relay", claim))
    change(shop)

    ended = run(cli, ["audit", "capture", str(shop.file), *options])

    out, err = capsys.readouterr()
    assert (ended, sentence in err, out) == (code, True, ""), err
    assert "Traceback" not in err


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({}, 0, "Capture shop: 7 rows, 9 records. No drift."),
        ({"unread": {"s.v": "its topic v does not exist"}}, 1, "Error: s.v not compared: correct"),
        (
            {
                "drift": {"extra": 2, "differs": 1},
                "unread": {"s.v": "its topic v does not exist"},
                "examples": (KeyExample("s.t", "{}", ("differs",), ("a", "b"), "t-0@7"),),
            },
            4,
            "Drift! Without a row: 2, Columns differ: 1.",
        ),
    ],
)
def test_exit_code_and_output_have_all_that_was_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changed: dict[str, Any],
    code: int,
    words: str,
) -> None:
    clean: dict[str, Any] = {
        **{"capture": "shop", "place": "0/1", "rows": {"s.t": 7}, "records": 9, "drift": {}},
        **{"gone": 3, "unjudged": {"s.i": "operations lack delete"}},
    }
    summary = CaptureSummary(**clean | changed)
    file = tmp_path / "shop.toml"
    file.write_text(MAPPING.format(name="shop", url="postgresql://h/d", kafka="h:1"))
    monkeypatch.setattr("txbroker.cli.audit.capture.run_capture", lambda *_, **__: summary)

    assert run(cli, ["audit", "capture", str(file)]) == code

    out, err = capsys.readouterr()
    assert words in err
    for text in ("s.t", "gone", "operations lack delete", *summary.drift, *summary.unread.values()):
        assert text in out
    assert [each.place in out for each in summary.examples] == [True] * len(summary.examples)
