"""No record ends an audit: any record is read or set aside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from tests.spark.any_records import AT_MS, PARTITION, any_records, frame, outcome, stored
from tests.spark.audit_tables import Audited, audited, rows_in
from txbroker.cli.audit.output import as_row, drift_in_words
from txbroker.core.decoding import NewerVersion, decode_half, decode_kept, decode_marker, is_content
from txbroker.core.encoding import (
    DEFAULT_PREFIX,
    encode_half,
    encode_kept,
    encode_marker,
    promoted_headers,
)
from txbroker.core.records import (
    RECORD_VERSION,
    Half,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
    State,
)
from txbroker.core.routing import make_id, parse_id
from txbroker.spark.access import TopicEnds, news_of
from txbroker.spark.report.contents import ReportTables
from txbroker.spark.report.report import render
from txbroker.spark.run import AuditSettings
from txbroker.spark.schema import RunSummary, TopicNames
from txbroker.spark.tables.layout import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

NAMES = TopicNames.of("txbroker")
Build = Callable[["DataFrame"], "DataFrame"]


def is_id(text: bytes | None) -> bool:
    """Return whether a text is an id of a transaction of this partition."""
    try:
        return parse_id((text or b"").decode()).partition == PARTITION
    except ValueError:
        return False


def has_our_version(record: Record) -> bool:
    """Return whether the first header is ours, of a version that this txbroker writes."""
    if not is_content(record):
        return False
    version = re.match(rb"[0-9]{1,18}(?= |\Z)", record.headers[0][1] or b"")
    return version is not None and int(version[0]) <= RECORD_VERSION


def is_copys_key(key: bytes | None) -> bool:
    """Return whether a key is that of a copy, ID/NUMBER."""
    id, _, number = (key or b"").partition(b"/")
    return is_id(id) and re.fullmatch(rb"[0-9]{1,19}", number) is not None


def read_op(record: Record) -> Any:
    read = outcome(decode_half if is_content(record) else decode_marker, record)
    if isinstance(read, type) or is_content(record):
        return read
    return read if is_id(record.key) else ValueError


def read_promoted(record: Record) -> Any:
    """Return what stands for an id in a target, of the installation of the default prefix."""
    return record if is_any_id(record.headers[0][1]) else ValueError


def is_any_id(text: bytes | None) -> bool:
    try:
        parse_id((text or b"").decode())
    except ValueError:
        return False
    return True


def built(build: Build, spark: SparkSession, records: Sequence[Record]) -> dict[int, Row]:
    """Return the rows by offset; where Spark fails, name the record."""
    try:
        return {row["offset"]: row for row in build(frame(spark, records)).collect()}
    except Exception:
        if len(records) == 1:
            raise AssertionError(f"this record ends the run: {records[0]!r}") from None
    middle = len(records) // 2
    built(build, spark, records[:middle])
    return built(build, spark, records[middle:])


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_every_record_is_read_or_set_aside(spark: SparkSession, count: int) -> None:
    from txbroker.spark.facts.messages import half_facts, op_facts, parked_facts, visible_facts

    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    records = any_records(count // 4)  # each is a case of each of four topics
    ours = [each for each in records if each.headers and each.headers[0][0] == "txb-id"]

    def whose(record: Record) -> bool:
        return is_id(record.key) if not is_content(record) else has_our_version(record)

    cases: dict[str, tuple[Build, list[Record], Any, Any]] = {
        "half": (half_facts, records, lambda r: outcome(decode_half, r), has_our_version),
        "op": (op_facts, records, read_op, whose),
        "parked": (
            parked_facts,
            records,
            lambda r: outcome(decode_kept, r),
            lambda r: has_our_version(r) or is_copys_key(r.key),
        ),
        "visible": (
            lambda frame: visible_facts(frame, DEFAULT_PREFIX),
            ours,
            read_promoted,
            lambda r: False,
        ),
    }
    for name, (build, some, read, is_own) in cases.items():
        assert len(some) > count // 40, name
        rows = built(build, spark, some)
        assert len(rows) == len(some), name
        whys = set()
        for offset, record in enumerate(some):
            row, found = rows[offset], read(record)
            unread = isinstance(found, type)
            assert (row["why"] is not None) is unread, (name, row["why"], found, record)
            expected = unread and found is not NewerVersion and is_own(record)
            assert row["own"] is expected, (name, row["why"], record)
            whys.add(row["why"])
        assert len(whys) > 1, name
    shop = [each for each in records if each.headers and each.headers[0][0] == "txb-installation"]
    assert shop
    built(lambda frame: visible_facts(frame, "shop"), spark, records)


# --- whole audits, without Kafka -------------------------------------------------------------


class Logs:
    """Topics whose records Spark is given in place of a Kafka's; all are in partition 3.

    Attributes:
        ends_at: how many records of each topic there are now.
        starts_at: how many of them retention has taken.
        at_ms: the time of a run; by default everything is old.
        options: how Spark would reach Kafka.
    """

    def __init__(
        self, spark: SparkSession, topics: Mapping[str, Sequence[Record]], folder: Path
    ) -> None:
        self.ends_at = {topic: len(records) for topic, records in topics.items()}
        self.starts_at = dict.fromkeys(topics, 0)
        self.at_ms = AT_MS + 10 * 86_400_000
        self.unread: set[str] = set()
        self._ids = {topic: topic for topic in topics}
        self._spark = spark
        self.options: dict[str, str] = {}
        self._stored = {topic: stored(records) for topic, records in topics.items()}
        for topic, records in self._stored.items():
            if topic in structs.astuple(NAMES):
                # Only the broker's own time is taken there.
                records[:] = [structs.replace(each, timestamp_ms=AT_MS) for each in records]
            frame(spark, records, topic).write.parquet(str(folder / "logs" / topic))
        self._read = spark.read.parquet
        self._folder = folder / "logs"

    def recreate(self, topic: str, records: Sequence[Record]) -> None:
        """Delete a topic, and create another one of that name with these records."""
        self._ids[topic] += "-again"
        self._stored[topic] = stored(records)
        self.ends_at[topic], self.starts_at[topic] = len(records), 0
        frame(self._spark, records, topic).write.parquet(str(self._folder / self._ids[topic]))

    def ends(self, topics: Iterable[str]) -> dict[str, TopicEnds]:
        known = self.ends_at.keys() & set(topics)
        zeros = (0,) * PARTITION
        found = {
            t: TopicEnds(t, (*zeros, self.starts_at[t]), (*zeros, self.ends_at[t]), id=self._ids[t])
            for t in known
        }
        return found | {t: TopicEnds(t, (), (), unread="no right") for t in known & self.unread}

    def own_ends(self, topic: str) -> TopicEnds:
        return self.ends((topic,))[topic]

    def now_ms(self, names: TopicNames) -> int:
        return self.at_ms

    def some(
        self, topic: str, partition: int, position: int, end: int
    ) -> tuple[Sequence[Record], int]:
        assert partition == PARTITION
        last = min(position + 100, end)
        return self._stored[topic][position:last], last

    def load(self, options: Mapping[str, str]) -> DataFrame:
        """Stand in for Spark's Kafka source, which has timestamps in microseconds."""
        from pyspark.sql import functions as F

        begins, ends = (json.loads(options[f"{which}Offsets"]) for which in ("starting", "ending"))
        found = []
        for topic, partitions in json.loads(options["assign"]).items():
            assert PARTITION in partitions
            rows = self._read(str(self._folder / self._ids[topic]))
            place = str(PARTITION)
            found.append(
                rows.where(f"offset >= {begins[topic][place]} and offset < {ends[topic][place]}")
            )
        rows = reduce(lambda one, other: one.unionByName(other), found)
        return rows.withColumn("timestamp", F.timestamp_millis("at_ms")).drop("at_ms")


class Audits:
    """Audits of records, each series in a folder."""

    def __init__(self, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spark, self._folder, self._monkeypatch = spark, folder, monkeypatch
        self._last: dict[str, Audited] = {}

    def __call__(
        self, logs: Any, name: str, mode: str = "incremental", **fields: Any
    ) -> RunSummary:
        load = "txbroker.spark.facts.topics.TopicReader._load"
        self._monkeypatch.setattr(load, lambda stage, options: logs.load(options))
        folder = self._folder / name
        settings = AuditSettings(str(folder / "out"), folder, NAMES, mode=mode, **fields)  # type: ignore[arg-type]
        self._last[name] = audited(self._spark, logs, settings)
        return self._last[name].summary

    def rows(self, name: str, table: Table) -> dict[Any, Any]:
        """Return the rows of a table of a series, by its keys."""
        return rows_in(self._spark, str(self._folder / name / "out"), table)

    def last(self, name: str) -> dict[str, Any]:
        """Return the verdicts of the last run of a series by id."""
        return self._last[name].rows

    def verdicts(self, name: str) -> dict[str, Any]:
        """Return the valid verdicts of a series by id, ended and carried ones."""
        return rows_in(self._spark, str(self._folder / name / "out")) | self._last[name].carried


@pytest.fixture
def audit(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audits:
    return Audits(spark, tmp_path, monkeypatch)


@pytest.mark.timeout(600)
def test_any_records_get_the_same_verdicts_in_one_run_and_in_two(
    spark: SparkSession, tmp_path: Path, audit: Audits
) -> None:
    records = any_records(1000)
    # Half messages of one id, which holds no time, for either run.
    nameless = encode_half(structs.replace(whole(1)[0], id="no id"))[0]
    records[0] = records[-1] = nameless
    topics = {NAMES.half: records, NAMES.op: records, NAMES.parked: records, "orders": records}
    logs = Logs(spark, topics, tmp_path)
    once = audit(logs, "once")
    logs.ends_at = dict.fromkeys(topics, 500)
    first = audit(logs, "twice")
    logs.ends_at = dict.fromkeys(topics, 1000)
    second = audit(logs, "twice")
    assert second.mode == "incremental"
    assert once.quarantined == first.quarantined + second.quarantined > 500
    parts = [each.drift.get("unreadable", 0) for each in (once, first, second)]
    assert parts[0] == parts[1] + parts[2] > 50
    assert len(once.set_aside) == 20
    assert all(each.own for each in once.set_aside)
    assert once.missing_targets == second.missing_targets
    in_one, in_two = audit.verdicts("once"), audit.verdicts("twice")
    assert {id: row for id, row in in_two.items() if row != in_one[id]} == {}
    assert in_one.keys() == in_two.keys() >= {"no id"}


def whole(number: int) -> tuple[Half, Record, Record, Record]:
    """Return a transaction that ends well: its half message, and all of its records."""
    message = Message("orders", b"k", b"v", (), PARTITION)
    half = Half(make_id(PARTITION, AT_MS, number), "g", (message,))
    marker = encode_marker(Marker(1, MarkerKind.COMMIT, half.id, group="g"))
    return (
        half,
        encode_half(half)[0],
        marker,
        Record(b"k", b"v", promoted_headers(half.id, 0, 1, message)),
    )


def test_records_of_others_are_named_and_no_drift(
    spark: SparkSession, tmp_path: Path, audit: Audits
) -> None:
    _, prepared, marker, promoted = whole(1)
    wrong = [Record(b"k", b"v", (("txb-id", b"012-456789ABCDEFGHJKMNPQRS"),))]
    wrong += [
        structs.replace(each, headers=(("txb-id", b"no id"), *each.headers))
        for each in any_records(200)
    ]
    topics = {
        NAMES.half: [prepared, Record(b"k", b"v")],
        NAMES.op: [marker, Record(b"k", b"v")],
        NAMES.parked: [Record(b"k", b"v")],
        "orders": [*wrong[:1], promoted, *wrong[1:]],
    }
    assert any(abs(each.timestamp_ms) > 1 << 60 for each in wrong)
    found = audit(Logs(spark, topics, tmp_path), "foreign")
    assert (found.states, found.drift, found.has_drift) == ({"promoted": 1}, {}, False)
    assert found.quarantined == 204
    places = {(each.topic, each.partition, each.offset): each.why for each in found.set_aside}
    assert places["orders", PARTITION, 0] == "its txb-id is not a transaction id"
    reported = json.loads(json.dumps(as_row(found)))
    first = next(each for each in reported["set_aside"] if each["topic"] == "orders")
    assert (first["partition"], first["offset"], first["own"]) == (PARTITION, 0, False)
    page = render(found, [], ReportTables())
    assert "its txb-id is not a transaction id" in page
    assert "204 records are unreadable and were set aside." in drift_in_words(found)
    assert news_of(found).set_aside[0].why in {each.why for each in found.set_aside}


def test_own_unreadable_record_is_drift(spark: SparkSession, tmp_path: Path, audit: Audits) -> None:
    half, prepared, marker, promoted = whole(1)
    own = Record(b"k", b"v", prepared.headers[:-1])
    topics = {
        NAMES.half: [prepared, own, Record(b"k", b"v")],
        NAMES.op: [marker, Record(half.id.encode(), b"{")],
        NAMES.parked: [Record(f"{half.id}/0".encode(), b"v")],
        "orders": [promoted],
    }
    found = audit(Logs(spark, topics, tmp_path), "own")
    assert (found.states, found.drift) == ({"promoted": 1}, {"unreadable": 3})
    assert found.has_drift
    assert found.quarantined == 4
    assert [(each.topic, each.offset, each.own) for each in found.set_aside] == [
        (NAMES.half, 1, True),
        (NAMES.op, 1, True),
        (NAMES.parked, 0, True),
        (NAMES.half, 2, False),
    ]
    assert "3 of them ours" in drift_in_words(found)
    assert "Own record unreadable" in render(found, [], ReportTables())


def test_a_target_that_does_not_exist_is_named_in_any_run(
    spark: SparkSession, tmp_path: Path, audit: Audits
) -> None:
    _, prepared, marker, promoted = whole(1)
    lost, back, kept = whole(2), whole(3), whole(4)
    rollback = encode_marker(Marker(1, MarkerKind.ROLLBACK, back[0].id, group="g"))
    copy = encode_kept(ParkedCopy(kept[0], 0, AT_MS, State.REFUSED, None, AT_MS))[0]
    topics = {
        NAMES.half: [prepared, lost[1], back[1], kept[1]],
        NAMES.op: [marker, lost[2], rollback, kept[2]],
        NAMES.parked: [copy],
        "orders": [promoted],
    }
    logs = Logs(spark, topics, tmp_path)
    logs.ends_at |= {NAMES.half: 1, NAMES.op: 1, NAMES.parked: 0}
    first = audit(logs, "parts")
    assert (first.states, first.drift) == ({"promoted": 1}, {})
    # The topic is deleted, with its visible messages.
    logs.ends_at = {NAMES.half: 4, NAMES.op: 4, NAMES.parked: 1}
    parts, once = audit(logs, "parts"), audit(logs, "once", "full")
    for found in (parts, once):
        assert (found.drift, found.missing_targets) == ({"target_missing": 2}, {"orders": 2})
        assert "Targets that do not exist: orders." in drift_in_words(found)
        assert "does not exist; 2 transactions committed to it" in render(found, [], ReportTables())
        assert news_of(found).missing_targets == {"orders": 2}
        assert {each.id for each in found.examples} == {whole(1)[0].id, lost[0].id}
    assert parts.mode == "incremental"
    # It exists from now on, with one of the messages.
    logs.ends_at["orders"] = 1
    found = audit(logs, "once")
    assert (found.mode, found.drift) == ("incremental", {"lost": 1})
    assert [each.id for each in found.examples] == [lost[0].id]
    del logs.ends_at["orders"]
    # A fresh commit may be refused in the next moment.
    logs.at_ms = AT_MS + 60_000
    assert audit(logs, "young", "full").drift == {}


def test_unreadable_target_ends_no_run(spark: SparkSession, tmp_path: Path, audit: Audits) -> None:
    _, prepared, marker, promoted = whole(1)
    lost = whole(2)
    undecided = Half(
        make_id(PARTITION, AT_MS, 3), "g", (Message("a/b", b"k", b"v", (), PARTITION),)
    )
    foreign = Half(make_id(0, AT_MS, 4), "g", (Message("..", b"k", b"v", (), 0),))
    topics = {
        NAMES.half: [prepared, lost[1], encode_half(undecided)[0], encode_half(foreign)[0]],
        NAMES.op: [marker, lost[2]],
        NAMES.parked: [],
        "orders": [promoted],
    }
    logs = Logs(spark, topics, tmp_path)
    first = audit(logs, "parts")
    assert first.drift.keys() & {"target_unreadable", "lost"} == {"lost"}
    assert first.unread_targets == {"a/b": "no topic can have this name"}
    logs.unread = {"orders"}
    full = audit(logs, "full", "full")
    assert full.drift == {"overdue": 1, "target_unreadable": 2}
    assert full.unread_targets.keys() == {"a/b", "orders"}
    assert audit(logs, "parts").drift == {"overdue": 1, "target_unreadable": 1}
    assert "Targets not readable: a/b (no topic can have this name), " in drift_in_words(full)
    assert "no right" in render(full, [], ReportTables())
    logs.unread = set()
    for name in ("full", "parts"):
        assert audit(logs, name).drift == {"overdue": 1, "lost": 1}


@pytest.mark.parametrize("taken", [0, 2])
def test_findings_without_half_are_found_in_any_run(
    spark: SparkSession, tmp_path: Path, audit: Audits, taken: int
) -> None:
    back, twice, good, never = whole(1), whole(2), whole(3), whole(4)
    rollback = encode_marker(Marker(1, MarkerKind.ROLLBACK, back[0].id, group="g"))
    # Where half was truncated, the ids of its half messages are unknown.
    unprepared = [] if taken else [never]
    topics = {
        NAMES.half: [back[1], twice[1], good[1]],
        NAMES.op: [rollback, twice[2], good[2], *(each[2] for each in unprepared)],
        NAMES.parked: [],
        "orders": [twice[3], good[3], back[3], twice[3], *(each[3] for each in unprepared)],
    }
    logs = Logs(spark, topics, tmp_path)
    logs.ends_at |= {NAMES.op: 3, "orders": 2}
    first = audit(logs, "parts")
    assert (first.states, first.drift) == ({"promoted": 2, "rolled_back": 1}, {})
    logs.ends_at = {topic: len(records) for topic, records in topics.items()}
    logs.starts_at[NAMES.half] = taken
    parts, once = audit(logs, "parts"), audit(logs, "once", "full")
    expected = {"rolled_back_visible": 1, "visible_twice": 1}
    if unprepared:
        expected |= {"visible_without_half": 1, "marker_without_half": 1}
    assert parts.mode == "incremental"
    assert parts.drift == once.drift == expected
    reported = [
        audit.verdicts("parts"),
        audit.verdicts("once"),
    ]
    for each in (back, twice, *unprepared):
        found = [(rows[each[0].id]["verdict"], rows[each[0].id]["findings"]) for rows in reported]
        assert found[0] == found[1]
        assert found[0][1]
