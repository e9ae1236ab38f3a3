"""Targets that are deleted, created again or truncated between runs of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.topic_reader import create_topic, delete_topic
from tests.spark.any_records import AT_MS, PARTITION
from tests.spark.audit_tables import rows_in
from tests.spark.planting import Planting, access_to
from tests.spark.test_audit_any_record import NAMES, Audits, Logs, audit
from txbroker.cli.audit.output import drift_in_words
from txbroker.core.encoding import encode_half, encode_marker, promoted_headers
from txbroker.core.records import Half, Marker, MarkerKind, Message, Record
from txbroker.core.routing import make_id
from txbroker.spark.access import AuditError
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.schema import Part
from txbroker.spark.tables.layout import DRIFT, TRANSACTIONS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from txbroker.embedded import EmbeddedKafka

__all__ = ["audit"]  # a fixture
Written = tuple[str, Record, Record, Record]


def written(number: int, topic: str, kind: MarkerKind = MarkerKind.COMMIT) -> Written:
    """Return a transaction: its id, half message, marker, and promoted record."""
    message = Message(topic, b"k", b"v", (), PARTITION)
    half = Half(make_id(PARTITION, AT_MS, number), "g", (message,))
    marker = encode_marker(Marker(1, kind, half.id, group="g"))
    promoted = Record(b"k", b"v", promoted_headers(half.id, 0, 1, message))
    return half.id, encode_half(half)[0], marker, promoted


@pytest.mark.timeout(600)
def test_messages_stay_missing_until_they_are_there_again(
    spark: SparkSession, tmp_path: Path, audit: Audits
) -> None:
    one, two, twice, bill = (
        written(number, topic) for number, topic in enumerate(["orders"] * 3 + ["bills"])
    )
    back = written(9, "bills", MarkerKind.ROLLBACK)
    every = [one, two, twice, bill, back]
    topics = {
        NAMES.half: [each[1] for each in every],
        NAMES.op: [each[2] for each in every],
        NAMES.parked: [],
        "orders": [one[3], two[3], twice[3], twice[3]],
        "bills": [bill[3], back[3]],
    }
    logs = Logs(spark, topics, tmp_path)
    logs.ends_at["bills"] = 1

    def findings() -> dict[tuple[str, str], str]:
        return {key: row["state"] for key, row in audit.rows("all", DRIFT).items()}

    def open_now(*findings_now: tuple[Written, str]) -> None:
        expected = {(each[0], kind) for each, kind in findings_now}
        assert {key for key, state in findings().items() if state == "open"} == expected

    # Within the time in which a commit that no run has seen may become visible.
    logs.at_ms = AT_MS + 40_000
    assert audit(logs, "all").drift == {"visible_twice": 1}
    del logs.ends_at["orders"]
    of_orders = [(each, "target_missing") for each in (one, two, twice)]
    for mode in ("full", "incremental"):
        found = audit(logs, "all", mode)
        assert (found.mode, found.drift) == (mode, {"target_missing": 3})
        assert found.missing_targets == {"orders": 3}
        open_now(*of_orders)
    # Its evidence is gone, which proves nothing.
    assert findings()[twice[0], "visible_twice"] == "expired"
    rows = audit.rows("all", TRANSACTIONS)
    assert {rows[each[0]]["state"] for each in (one, two, twice, bill)} == {"promoted"}
    part = audit(logs, "all", "part", part=Part(topics=("bills",)))
    assert part.drift == {}
    open_now(*of_orders)

    # The topic is there again, with one of the messages; another topic has a fault.
    logs.recreate("orders", [one[3]])
    logs.ends_at["bills"] = 2
    gone = [(two, "lost"), (twice, "lost"), (back, "rolled_back_visible")]
    found = audit(logs, "all")
    assert (found.mode, found.drift) == ("incremental", {"lost": 2, "rolled_back_visible": 1})
    open_now(*gone)
    assert audit(logs, "all", "full").drift == found.drift
    open_now(*gone)
    logs.recreate("orders", [one[3], two[3], twice[3]])
    found = audit(logs, "all")
    assert found.drift == {}
    assert "Rolled back but visible: 1. This run did not judge" in drift_in_words(found)
    assert "No new drift." in drift_in_words(found)
    open_now((back, "rolled_back_visible"))
    assert findings()[two[0], "lost"] == "healed"
    assert audit.rows("all", TRANSACTIONS).keys() == {each[0] for each in every}


def test_what_was_seen_without_a_half_message_ends_with_its_topic(
    spark: SparkSession, tmp_path: Path, audit: Audits
) -> None:
    bill, stray = written(1, "bills"), written(2, "bills")
    topics = {NAMES.half: [bill[1]], NAMES.op: [bill[2], stray[2]], NAMES.parked: []}
    logs = Logs(spark, {**topics, "bills": [bill[3], stray[3]]}, tmp_path)
    marker = {"marker_without_half": 1}
    assert audit(logs, "all").drift == {"visible_without_half": 1, **marker}
    logs.recreate("bills", [bill[3]])
    second = audit(logs, "all")
    assert (second.mode, second.drift, second.open_findings) == ("incremental", marker, marker)
    assert audit.rows("all", DRIFT)[stray[0], "visible_without_half"]["state"] == "expired"


def test_a_run_during_which_a_topic_becomes_another_one_does_not_count(
    spark: SparkSession, tmp_path: Path, audit: Audits, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *records = written(1, "orders")
    topics = (NAMES.half, NAMES.op, "orders", NAMES.parked)
    logs = Logs(spark, {t: records[n : n + 1] for n, t in enumerate(topics)}, tmp_path)
    load = logs.load

    def replaced(options: Mapping[str, str]) -> DataFrame:
        logs.recreate("orders", [])
        return load(options)

    monkeypatch.setattr(logs, "load", replaced)
    with pytest.raises(AuditError, match="orders was deleted and created again while it was read"):
        audit(logs, "all")
    assert Journal(tmp_path / "all" / JOURNAL_FILE).last() is None
    assert not [*(tmp_path / "all/out").glob("*/run=*")]


@pytest.mark.timeout(600)
async def test_on_kafka_a_topic_created_again_stops_no_run(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as p:
        access = access_to(p.bootstrap, p.prefix)
        settings = AuditSettings(str(tmp_path / "out"), tmp_path, p.names)
        bill = await p.prepare(p.message(p.bills, 1))
        p.promote(bill, await p.commit(bill))
        await p.turn()
        first = run_audit(spark, access, settings)
        assert (first.states, first.drift) == ({"promoted": 1}, {})
        await asyncio.to_thread(delete_topic, kafka.bootstrap, p.bills)
        await asyncio.to_thread(create_topic, kafka.bootstrap, p.bills, 1)
        shown = await p.prepare()
        p.promote(shown, await p.roll_back(shown))
        await p.turn()
        second = run_audit(spark, access, settings)
    found = {"lost": 1, "rolled_back_visible": 1}
    assert (second.mode, second.drift, second.open_findings) == ("incremental", found, found)
    # It proves that the message was there.
    assert rows_in(spark, settings.out)[bill.id]["state"] == "promoted"
