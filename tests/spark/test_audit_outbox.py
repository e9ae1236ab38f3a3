"""The audit of an outbox: rows that a relay has delivered to a real Kafka, and planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.until import unique
from tests.spark.audit_process import QUICK, environment
from txbroker.config.settings import load_kafka_access
from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.core.records import Header, Record
from txbroker.databases.steps import Query
from txbroker.databases.urls import from_url
from txbroker.door.consuming import TopicSpec
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka import KafkaSettings
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.relay import Message, Outbox, Relay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.spark.rows.outbox import OutboxSummary

NOW_MS = round(time.time() * 1000)
MESSAGES = (
    Message("one", key=b"1", value=b"plain"),
    Message("one", key=b"2", value=None),
    Message("one", key=None, value=b""),
    Message("one", value=b"x", headers=(("a", b"text"), ("b", None), ("c", b"\xff"), ("a", b""))),
    Message("one", value=b"x", headers=(("looks like bytes", b'{"base64":"AAAA"}'),)),
    Message("two", key=b"3", value=b"placed", partition=1),
    Message("two", key=b"4", value=b"dated", timestamp_ms=NOW_MS - 5_000),
)
"""Of two topics, whose names get a prefix."""


class Audited:
    """An outbox, its relay and two topics."""

    def __init__(self, url: str, kafka: str, door: KafkaConsumingDoor) -> None:
        self.prefix = unique("outbox")
        self.url, self.kafka, self.door = url, kafka, door
        self.outbox = Outbox(from_url(url, create_tables=True), name=self.prefix)
        self.outbox.create()

    def topic(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def add(self, *messages: Message) -> list[str]:
        """Insert messages; return their ids."""
        ids: list[str] = []
        with closing(self.outbox.database.open()) as session:
            for message in messages:
                session.begin()
                named = Message(self.topic(message.topic), *_rest(message))
                ids += self.outbox.add(session.connection, named)
                session.commit()
        return ids

    def change(self, sql: str, *values: Any) -> None:
        """Change rows, as a fault."""
        with closing(self.outbox.database.open()) as session:
            session.execute(Query(f"UPDATE txbroker_outbox SET {sql}", values))

    async def deliver(self) -> None:
        async with Relay(self.outbox, self.kafka, topic_prefix=self.prefix) as relay:
            await relay.drain(30)

    async def append(self, name: str, id: str, *, installation: str = "") -> None:
        """Append a record of the relay without a row, as a fault."""
        of_relay: tuple[Header, ...] = (
            (INSTALLATION_HEADER, (installation or self.prefix).encode()),
            (ID_HEADER, id.encode()),
        )
        record = Record(b"1", b"plain", of_relay, NOW_MS)
        await self.door.append(self.topic(name), 0, [record])

    def audit(self, spark: SparkSession, folder: Path) -> OutboxSummary:
        from txbroker.spark.access import AuditKafka
        from txbroker.spark.rows.outbox import audit_outbox

        folder.mkdir()
        access = AuditKafka(KafkaSettings(bootstrap_servers=(self.kafka,), instance_id="audit"))
        return audit_outbox(spark, access, self.outbox.database, folder, keep_s=3600)


def _rest(message: Message) -> tuple[Any, ...]:
    return (
        message.key,
        message.value,
        message.headers,
        message.partition,
        message.timestamp_ms,
    )


@asynccontextmanager
async def _audited(kafka: EmbeddedKafka, url: str) -> AsyncIterator[Audited]:
    access = load_kafka_access(kafka.bootstrap, environ={})
    door = KafkaConsumingDoor.from_access(access, "txbroker-test")
    await door.start()
    try:
        audited = Audited(url, kafka.bootstrap, door)
        await door.create([TopicSpec(audited.topic(name), 2, -1, {}) for name in ("one", "two")])
        yield audited
    finally:
        await door.close()


async def test_every_fault_is_found_and_nothing_else(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with _audited(kafka, f"sqlite:///{tmp_path}/shop.db") as audited:
        right = audited.add(*MESSAGES)
        rolled_back, undecided, body, headers, timestamp, target, twice = audited.add(
            *[Message("one", key=b"1", value=b"plain")] * 7
        )
        await audited.deliver()

        clean = audited.audit(spark, tmp_path / "clean")

        assert (clean.drift, clean.rows) == ({}, {"GLOBAL_COMMIT": len(right) + 7})
        assert (clean.records, clean.examples) == (len(right) + 7, ())

        (lost, young) = audited.add(*[Message("one", value=b"never sent")] * 2)
        stray, purged = f"{NOW_MS:012x}" + "5" * 20, f"{NOW_MS - 7_200_000:012x}" + "5" * 20
        waiting = audited.add(Message("two", value=b"waits"))
        audited.change("state = 'GLOBAL_COMMIT', changed_at = 1 WHERE id = ?", lost)
        audited.change("state = 'GLOBAL_COMMIT', changed_at = 1000000000000000 WHERE id = ?", young)
        audited.change("state = 'LOCAL_ROLLBACK' WHERE id = ?", rolled_back)
        audited.change("state = 'UNKNOWN' WHERE id = ?", undecided)
        audited.change("message_value = 'plain ' WHERE id = ?", body)
        audited.change("""headers = '[["a","b"]]' WHERE id = ?""", headers)
        audited.change("timestamp_ms = 1 WHERE id = ?", timestamp)
        audited.change("topic = ? WHERE id = ?", audited.topic("two"), target)
        await audited.append("one", twice)
        await audited.append("two", stray)
        await audited.append("two", purged)
        await audited.append("two", stray, installation="another")

        found = audited.audit(spark, tmp_path / "planted")

        assert {each.id: each.findings for each in found.examples} == {
            lost: ("lost",),
            rolled_back: ("rolled_back_visible",),
            undecided: ("visible_without_commit",),
            body: ("body_changed",),
            headers: ("headers_changed",),
            timestamp: ("timestamp_changed",),
            target: ("wrong_target",),
            # The copy has the time of the append.
            twice: ("visible_twice", "timestamp_changed"),
            stray: ("stray",),
        }
        assert found.drift == {
            **dict.fromkeys(
                ("stray", "rolled_back_visible", "visible_without_commit", "visible_twice"), 1
            ),
            **dict.fromkeys(("lost", "body_changed", "headers_changed", "wrong_target"), 1),
            "timestamp_changed": 2,
        }
        assert (found.purged, found.gone, found.young) == (1, 0, 1)
        assert found.rows["LOCAL_COMMIT"] == len(waiting)


def test_rows_are_lost_only_where_that_is_certain(spark: SparkSession) -> None:
    from txbroker.spark.rows.outbox import JudgedFrom, lateness

    judged_from = {
        "kept": JudgedFrom(0, 1000),
        "trimmed": JudgedFrom(400, 1000),
        "compacted": JudgedFrom(None, 1000),
        "open": JudgedFrom(0, 900),
    }
    rows = {
        ("kept", 500, 600): "judged",
        ("trimmed", 500, 600): "judged",
        ("trimmed", 100, 600): "gone",
        ("compacted", 500, 600): "gone",
        ("open", 500, 600): "judged",
        ("open", 500, 940): "young",
        ("kept", 500, 1000): "young",
    }
    columns = "topic string, row_from_ms bigint, changed_at bigint"
    table = spark.createDataFrame(list(rows), columns)
    found = table.select("*", lateness(judged_from, 1000)).collect()
    assert {tuple(row)[:3]: tuple(row)[3] for row in found} == rows


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["postgres_server", "mariadb_server"])
async def test_a_server_is_read_by_jdbc(
    request: pytest.FixtureRequest, kafka: EmbeddedKafka, server: str
) -> None:
    url = request.getfixturevalue(server).create_database()
    async with _audited(kafka, url) as audited:
        ids = audited.add(*MESSAGES)
        await audited.deliver()
        (lost,) = audited.add(Message("one", value=b"never sent"))
        audited.change("state = 'GLOBAL_COMMIT', changed_at = 1 WHERE id = ?", lost)
        audited.change("message_value = ? WHERE id = ?", b"\xff", ids[0])

        command = [
            *(sys.executable, "-m", "txbroker", "audit", "outbox", url, "-o", "json"),
            *("--kafka", kafka.bootstrap, "--master", "local[2]", *QUICK),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment()
        )

        assert done.returncode == 4, done.stderr
        found = json.loads(done.stdout)
        assert found["drift"] == {"lost": 1, "body_changed": 1}
        assert found["records"] == len(MESSAGES)
        assert {each["id"] for each in found["examples"]} == {lost, ids[0]}
