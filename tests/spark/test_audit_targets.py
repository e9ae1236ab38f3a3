"""Targets that are deleted, created again or truncated between runs of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.any_records import AT_MS, PARTITION
from tests.spark.test_audit_any_record import NAMES, Audits, Logs, audit
from txbroker.cli.audit.output import drift_in_words
from txbroker.core.encoding import encode_half, encode_marker, promoted_headers
from txbroker.core.records import Half, Marker, MarkerKind, Message, Record
from txbroker.core.routing import make_id
from txbroker.spark.schema import Part
from txbroker.spark.tables.layout import DRIFT, TRANSACTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
