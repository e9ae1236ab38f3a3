"""The audit of a capture: rows of its tables against the last record of each key.

The rows are those of one moment, whose place in the database's log is known. Records of changes
that the rows do not show are left out, and the capture has delivered all others before the ends of
the topics are read. So the last record of a key shows its row, and nothing has to be guessed from
times, except where a record does not name its transaction (see `_YOUNG_MS`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from msgspec import MsgspecError, Struct
from pyspark.sql import Column, DataFrame, SparkSession

from txbroker.contract.captured import AuditedTable, CapturedRow, LogPlace
from txbroker.spark import expressions as F
from txbroker.spark.access import AuditError, AuditKafka
from txbroker.spark.facts.bounds import chunks, held, read_target
from txbroker.spark.facts.messages import JSON_OPTIONS
from txbroker.spark.facts.topics import in_words
from txbroker.spark.judge.kinds import Kind
from txbroker.spark.rows.compared import (
    Compared,
    findings,
    kept,
    of_relay,
    on_disk,
    place,
    tally,
    write_rows,
)
from txbroker.spark.schema import TopicRead

KINDS = (
    Kind("extra", "Without a row", "the last record of a key shows a row that is not there"),
    Kind("missing", "Row without a record", "the last record of a row shows a delete, or is none"),
    Kind("stale", "Wrong order", "the last record of a key is of an earlier change than another"),
    Kind("differs", "Columns differ", "the last record shows other values than the row"),
    Kind("unreadable", "Not readable", "the last record is not as the mapping has it"),
)
"""Every kind of drift of a row, the gravest first."""
_ROWS = {"table": "string", "key": "binary", "shown": "binary", "whole": "boolean"}
_APART = ("gone", "young", "older", "unshown", "partly")
_SHARES = 1_000_000
_YOUNG_MS = 60_000
"""A record without an envelope does not name its transaction, which may have been committing when
the rows were read: while a synchronous standby had not answered. Where it disagrees with its row
and is younger, it is not judged."""
_DAY_MS = 86_400_000
"""A record that is older was committed when the rows were read, with any numbers: those of
PostgreSQL's transactions begin again after 2^32, and a server that was replaced or restored had
others."""
_XIDS = 1 << 32
_POLL_S = 0.2


class KeyExample(Struct, frozen=True):
    """A key with findings.

    Attributes:
        columns: that differ.
        place: of its last record, as `topic-0@7`; "": it has none.
    """

    table: str
    key: str
    findings: tuple[str, ...]
    columns: tuple[str, ...]
    place: str


class CaptureSummary(Compared, frozen=True, kw_only=True):
    """The result of an audit of a capture; `rows` are by table.

    Attributes:
        capture: its name.
        place: in the database's log, at which the rows were read.
        share: of the keys that was compared.
        older: rows without a record that may be older than the capture.
        partly: rows of which the last record does not show every column.
        unshown: rows with a value that no record can show.
        set_aside: records with the capture's name that are of none of these tables, such as
            emitted ones.
        unjudged: findings that a table cannot have, each with the reason.
    """

    kinds = KINDS
    capture: str
    place: str
    share: float = 1
    older: int = 0
    partly: int = 0
    unshown: int = 0
    set_aside: int = 0
    unjudged: dict[str, str]
    examples: tuple[KeyExample, ...] = ()

    @property
    def title(self) -> str:
        """Kind and name of the source of the rows."""
        return f"capture {self.capture}"


class CaptureTerms(Struct, frozen=True):
    """How a capture is compared.

    Attributes:
        share: of the keys, more than 0, at most 1.
        older_rows: rows without a record are no finding.
        wait_s: how long its records may be awaited, seconds.
    """

    share: float = 1
    older_rows: bool = False
    wait_s: float = 60


# --- the position ------------------------------------------------------------------------------


def _polls(wait_s: float) -> Iterator[None]:
    """Yield at once, and every `_POLL_S` seconds until the wait is over."""
    until_s = time.monotonic() + wait_s
    yield
    while time.monotonic() <= until_s:
        time.sleep(_POLL_S)
        yield


class StoredPosition:
    """The newest position of a capture in Kafka.

    Args:
        topic: of positions.
        capture: the name of the capture.

    Attributes:
        known: the capture has started once: it has stored a position, or that it claims it.
    """

    def __init__(self, access: AuditKafka, topic: str, capture: str) -> None:
        self._access = access
        self._topic = topic
        self._capture = capture
        self._key = f"{capture}/capture".encode()
        self._at = 0
        self._found: bytes | None = None
        self.known = False

    def read(self) -> bytes | None:
        """Return the position; None: there is none.

        Raises:
            AuditError: the topic cannot be read.
        """
        ends = self._access.ends((self._topic,)).get(self._topic)
        if ends is not None and ends.unread:
            raise AuditError(f"topic {self._topic} cannot be read: {ends.unread}")
        if ends is not None and ends.ends:
            at = max(self._at, ends.starts[0])
            stored = chunks(self._access, self._topic, 0, at, ends.ends[0])
            for record in chain.from_iterable(stored):
                if record.key is not None and not record.headers:
                    self.known |= record.key.startswith(self._key)
                    if record.key == self._key:
                        self._found = record.value
            self._at = ends.ends[0]
        return self._found

    def await_all(self, place: str, reached: Callable[[bytes], bool], wait_s: float) -> None:
        """Wait until all changes up to a place in the log are in Kafka.

        Args:
            reached: whether a position includes them.

        Raises:
            AuditError: they are not there in time, or the position is none of this database.
        """
        for _ in _polls(wait_s):
            position = self.read()
            try:
                if position is not None and reached(position):
                    return
            except (ValueError, MsgspecError):
                raise AuditError(
                    f"the position of capture {self._capture} in Kafka is none of this database: "
                    "another relay has this name, or the mapping names another database"
                ) from None
        raise AuditError(
            f"capture {self._capture} has not delivered the changes up to {place} within "
            f"{wait_s:g} s, so that its records would seem to be missing: start it, or give it "
            "more time with --wait-s"
        )


def settled_reads(access: AuditKafka, topics: Iterable[str], wait_s: float) -> list[TopicRead]:
    """Return how far topics are read, after the transactions that are open now have ended: Kafka
    may still be writing the end of one whose position is visible already.

    Raises:
        AuditError: one stays open, or a topic cannot be read.
    """
    names = sorted(set(topics))
    before: list[TopicRead] = []
    for _ in _polls(wait_s):
        now = access.ends(names)
        for name in names:
            if name not in now or now[name].unread:
                why = now[name].unread if name in now else "it was deleted"
                raise AuditError(f"topic {name} cannot be read: {why}. Run the audit again")
        reads = [read_target(name, now[name], None) for name in names]
        before = before or reads
        open_ = held(before, now)
        if not open_:
            return reads
    raise AuditError(
        f"{', '.join(open_)} ends in a Kafka transaction that has been open for {wait_s:g} s and "
        "hides later records: end it (`kafka-transactions.sh find-hanging`), and run the audit "
        "again"
    )


# --- rows --------------------------------------------------------------------------------------


def export(
    path: Path, table: AuditedTable, pieces: Iterable[Sequence[CapturedRow]], share: float
) -> int:
    """Write the rows of a table as Parquet, those of a share of the keys; return their number."""
    limit = share * _SHARES
    wanted = (
        [(table.name, *row) for row in piece if crc32(row.key) % _SHARES < limit]
        for piece in pieces
    )
    return write_rows(path, _ROWS, wanted)


# --- comparison --------------------------------------------------------------------------------


class CaptureAudit(NamedTuple):
    """The tables and terms of a comparison.

    Attributes:
        name: of the capture.
        rows: number of exported rows by table.
        folder: with their Parquet files; Spark's executors must see it.
        refused: tables that are not compared, with the reasons.
    """

    name: str
    tables: Sequence[AuditedTable]
    rows: dict[str, int]
    folder: Path
    place: LogPlace
    terms: CaptureTerms
    refused: dict[str, str]


def audit_capture(
    spark: SparkSession, access: AuditKafka, audit: CaptureAudit, reads: Sequence[TopicRead]
) -> CaptureSummary:
    """Compare rows that were exported with the records of their topics.

    Raises:
        AuditError: Kafka does not answer.
    """
    lost = {read.topic for read in reads if any(read.starts)}
    rows = spark.read.schema(", ".join(f"`{name}` {kind}" for name, kind in _ROWS.items()))
    with (
        kept(spark, access, reads, partial(_changes, audit=audit)) as (changes, count),
        in_words(),
    ):
        known = changes.where("number IS NOT NULL AND `table` IS NOT NULL")
        placed, truncated = _truncated(known)
        both = _joined(_last(known.where("key IS NOT NULL")), rows.parquet(str(audit.folder)))
        with on_disk(_judged(both, audit, truncated, lost)) as judged:
            found = tally(judged, KINDS, KeyExample, ["table", "key"])
    return CaptureSummary(
        capture=audit.name,
        place=audit.place.text,
        share=audit.terms.share,
        rows=audit.rows,
        records=count,
        drift=found.drift,
        set_aside=count - placed,
        **{name: found.apart[name] for name in _APART},
        unread=audit.refused,
        unjudged=_unjudged(audit.tables, lost),
        examples=found.examples,
    )


def _unjudged(tables: Sequence[AuditedTable], lost: Iterable[str]) -> dict[str, str]:
    found = {}
    for table in tables:
        why = [
            f"operations lack {', '.join(sorted(needed - table.operations))}: {name} is not judged"
            for name, needed in _NEEDED.items()
            if not needed <= table.operations
        ]
        if table.topic in lost:
            why.append(f"retention removed records of {table.topic}: rows without one are gone")
        if why:
            found[table.name] = "; ".join(why)
    return found


_NEEDED = {
    "missing": frozenset({"insert"}),
    "extra": frozenset({"delete"}),
    "differs": frozenset({"insert", "update"}),
}
"""Operations without which records need not show the rows."""


def _changes(records: DataFrame, audit: CaptureAudit) -> DataFrame:
    """Return the capture's records of changes that the rows show: table, key and value; the number
    of the transaction in its domain, and of the change in it. Those that cannot be placed have
    nulls there; of the share's keys alone."""
    col = F.col
    value = col("value").cast("string")
    parts = F.split("id", "[-@/]")

    def part(index: int) -> Column:
        return F.get(parts, index)

    if audit.place.snapshot:
        place_in_log = "[0-7]?[0-9A-F]{1,7}/[0-9A-F]{1,8}"
        halves = [F.conv(part(index), 16, 10).cast("bigint") for index in (0, 1)]
        domain, number, rest = F.lit(0), halves[0] * F.lit(_XIDS) + halves[1], 2
    else:
        place_in_log = "[0-9]{1,9}-[0-9]{1,10}-[0-9]{1,18}"
        domain, number, rest = part(0).try_cast("int"), part(2).try_cast("bigint"), 3
    written = col("id").rlike(rf"\A{place_in_log}@[0-9]{{1,15}}/[0-9]{{1,9}}(/|\z)")
    ours = of_relay(records, audit.name)
    if audit.terms.share < 1:
        bucket = F.pmod(F.crc32("key"), _SHARES)
        ours = ours.where(F.coalesce(bucket < audit.terms.share * _SHARES, F.lit(True)))
    placed = ours.select(
        _table(audit.tables, value).alias("table"),
        *("key", "value", "topic", "partition", "offset", "at_ms"),
        F.when(written, domain).alias("domain"),
        F.when(written, number).alias("number"),
        F.when(written, part(rest).try_cast("bigint")).alias("mark_ms"),
        F.when(written, part(rest + 1).try_cast("int")).alias("change"),
    )
    old = col("mark_ms") < audit.place.at_ms - _DAY_MS
    xid = F.when(~old, F.get_json_object(value, F.lit("$.source.xid")).try_cast("bigint"))
    return (
        placed.withColumn("xid", xid)
        .where(col("number").isNull() | old | is_shown(audit.place))
        .drop("xid")
        .withColumn("unnamed", F.lit(bool(audit.place.snapshot)) & xid.isNull())
    )


def _table(tables: Sequence[AuditedTable], value: Column) -> Column:
    """Return the name of the table that a record is of, null if it is of none."""
    schema, table = (
        F.get_json_object(value, F.lit(f"$.source.{name}")) for name in ("schema", "table")
    )
    found = F.lit(None).cast("string")
    for each in tables:
        here = F.col("topic") == each.topic
        if not each.alone:
            here &= (schema == each.schema) & (table == each.table)
        found = F.when(here, each.name).otherwise(found)
    return found


def is_shown(place: LogPlace) -> Column:
    """Return whether the rows show a change; see `relay/capture/snapshots/`."""
    domain, number = F.col("domain"), F.col("number")
    ends = [(domain == each) & (number <= end) for each, end in place.ends.items()]
    shown = reduce(lambda one, other: one | other, ends, F.lit(False))
    if not place.snapshot:
        return shown
    _, end, running = place.snapshot.split(":")
    xids = [int(each) % _XIDS for each in running.split(",") if each]
    begun = F.pmod(F.lit(int(end)) - F.col("xid"), F.lit(_XIDS)).between(1, _XIDS // 2 - 1)
    return shown & F.coalesce(begun & ~F.col("xid").isin(xids), F.lit(True))


def _last(changes: DataFrame) -> DataFrame:
    """Return the last record of each key, and whether an earlier record is of a later change."""
    last = F.struct(
        *("value", "domain", "number", "change", "mark_ms", "unnamed", "at_ms"),
        place().alias("place"),
    )
    # A key has several partitions where some were added: the last to be written to counts.
    of_partition = changes.groupBy("table", "key", "partition").agg(
        F.max_by(last, "offset").alias("last"),
        F.max(F.struct("number", "change", "mark_ms")).alias("newest"),
        # Numbers of different domains have no order.
        (F.min("domain") == F.max("domain")).alias("ordered"),
    )
    # Nor have those of a server before it was replaced or restored, when the time was earlier.
    stale = (
        F.col("ordered")
        & (F.struct("last.number", "last.change") < F.struct("newest.number", "newest.change"))
        & (F.col("newest.mark_ms") >= F.col("last.mark_ms"))
    )
    return (
        of_partition.select("table", "key", "last", stale.alias("stale"))
        .groupBy("table", "key")
        .agg(F.max_by(F.struct("last", "stale"), "last.at_ms").alias("record"))
        .select("table", "key", "record.last.*", "record.stale")
    )


def _truncated(changes: DataFrame) -> tuple[int, Mapping[str, Any]]:
    """Return the number of records, and the newest one of a TRUNCATE of each table that has one: it
    has no key."""
    at = F.struct("mark_ms", "domain", "number", "change")
    newest = F.max(F.when(F.col("key").isNull(), at)).alias("newest")
    found = changes.groupBy("table").agg(F.count("*").alias("records"), newest).collect()
    count = sum(row["records"] for row in found)
    return count, {row["table"]: row["newest"] for row in found if row["newest"] is not None}


def _judged(
    both: DataFrame, audit: CaptureAudit, truncated: Mapping[str, Any], lost: Iterable[str]
) -> DataFrame:
    """Return one row for each key: findings, why it is not judged, and the columns that differ."""
    col, none = F.col, F.array().cast("array<string>")
    column = _of_table("string", {each.name: each.column for each in audit.tables})
    has_row, has_record = col("whole").isNotNull(), col("recorded").isNotNull()
    operation = col("record.operation")
    is_envelope = F.coalesce(operation.isin("insert", "update", "delete"), F.lit(False))
    readable = column.isNotNull() | col("value").isNull() | is_envelope
    deleted = (
        F.coalesce(operation == "delete", F.lit(False)) & column.isNull()
        | col("value").isNull()
        | F.coalesce(
            _of_table("boolean", {n: _before(at) for n, at in truncated.items()}), F.lit(False)
        )
    )
    shown = has_record & ~deleted
    unchanged = F.coalesce(col("record.unchanged"), none)
    columns = _differing(column, unchanged)
    # A null in a column that is the value alone is as a delete.
    empty = column.isNotNull() & has_row & col("shown").isNull()
    tests = {
        "extra": ~has_row & shown & readable,
        "missing": has_row & ~shown & ~(empty & has_record),
        "stale": F.coalesce(col("stale"), F.lit(False)),
        "differs": has_row & shown & readable & (F.size(columns) > 0),
        "unreadable": has_record & ~readable,
    }
    for name, needed in _NEEDED.items():
        judges = {each.name: needed <= each.operations for each in audit.tables}
        tests[name] &= _of_table("boolean", judges)
    shortened = _of_table("boolean", {each.name: each.topic in lost for each in audit.tables})
    recent = col("mark_ms") >= audit.place.at_ms - _YOUNG_MS
    young = col("unnamed") & recent & ~tests["unreadable"]
    names = findings(tests, KINDS)
    apart = (
        F.when(has_row & ~col("whole"), "unshown")
        .when(F.size(names) == 0, None)
        .when(young, "young")
        .when(tests["missing"] & ~has_record & shortened, "gone")
        .when(tests["missing"] & ~has_record & F.lit(audit.terms.older_rows), "older")
    )
    partly = F.when(has_row & shown & (F.size(unchanged) > 0), "partly")
    return both.select(
        "table",
        col("key").cast("string").alias("key"),
        F.coalesce("place", F.lit("")).alias("place"),
        F.when(apart.isNull(), names).otherwise(none).alias("findings"),
        F.when(tests["differs"], columns).otherwise(none).alias("columns"),
        F.array_compact(F.array(apart, partly)).alias("apart"),
    )


def _joined(last: DataFrame, rows: DataFrame) -> DataFrame:
    """Return rows and last records by table and key, with the JSON of both."""
    envelope = "operation string, after map<string,string>, unchanged array<string>"
    record = F.from_json(F.col("value").cast("string"), envelope, JSON_OPTIONS)
    row = F.from_json(F.col("shown").cast("string"), "map<string,string>", JSON_OPTIONS)
    both = last.withColumn("recorded", F.lit(True)).join(
        rows.select("table", "key", "shown", "whole"), ["table", "key"], "full_outer"
    )
    return both.withColumn("record", record).withColumn("row", row)


def _differing(column: Column, unchanged: Column) -> Column:
    """Return the names of the columns that differ.

    Args:
        column: the one that is the value alone, null where that is an envelope.
        unchanged: those that the record lacks.
    """
    row, after = F.col("row"), F.col("record.after")
    of_envelope = F.filter(
        F.map_keys(row),
        lambda name: ~row[name].eqNullSafe(after[name]) & ~F.array_contains(unchanged, name),
    )
    none = F.array().cast("array<string>")
    same = F.col("shown").eqNullSafe(F.col("value"))
    return F.when(column.isNull(), of_envelope).otherwise(
        F.when(same, none).otherwise(F.array(column))
    )


def _of_table(kind: str, values: Mapping[str, Any]) -> Column:
    """Return a value of a type by the table of a row."""
    found: Column = F.lit(None).cast(kind)
    for name, value in values.items():
        found = F.when(F.col("table") == name, F.lit(value)).otherwise(found)
    return found


def _before(at: Mapping[str, int]) -> Column:
    """Return whether a record is of a change before a TRUNCATE."""
    number, change, mark_ms = F.col("number"), F.col("change"), F.col("mark_ms")
    order = (number < at["number"]) | (number == at["number"]) & (change < at["change"])
    # Numbers of different domains have no order.
    earlier = F.when(F.col("domain") == at["domain"], order).otherwise(mark_ms < at["mark_ms"])
    return earlier | (mark_ms < at["mark_ms"] - _DAY_MS)
