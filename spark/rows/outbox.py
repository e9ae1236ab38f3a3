"""The audit of an outbox: rows of the table against the records that its relays wrote.

The database's time is read first, then the ends of the topics, and the rows last. So a row that was
marked before that time was visible below the ends, and a record below the ends had its row before
the rows were read, unless that was purged: relays purge rows that were finished `keep_s` ago.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from pyspark.sql import Column, DataFrame, SparkSession

from txbroker.databases.database import Database
from txbroker.databases.dialect import SQLITE
from txbroker.databases.outbox.table import OUTBOX, RELAY, outbox_tables
from txbroker.databases.steps import Query, Steps
from txbroker.spark import expressions as F
from txbroker.spark.access import AuditKafka
from txbroker.spark.facts.bounds import read_target
from txbroker.spark.facts.messages import JSON_OPTIONS, body_hash, headers_hash
from txbroker.spark.facts.topics import in_words
from txbroker.spark.jdbc import JdbcTable, ranges
from txbroker.spark.judge.kinds import Kind
from txbroker.spark.judge.rows import kept_from_ms
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
    Kind("stray", "Visible without a row", "this relay's id, and the table has no such row"),
    Kind("rolled_back_visible", "Rolled back but visible", "the row is LOCAL_ROLLBACK"),
    Kind("visible_without_commit", "Visible without a commit", "the row is not committed"),
    Kind("visible_twice", "Visible twice", "a row has several records"),
    Kind("lost", "Committed, not visible", "the row is GLOBAL_COMMIT and has no record"),
    Kind("body_changed", "Body changed", "key or value differ from the row's"),
    Kind("headers_changed", "Headers changed", "headers differ from the row's"),
    Kind("timestamp_changed", "Timestamp changed", "the timestamp differs from the row's"),
    Kind("wrong_target", "Wrong target", "visible in another topic or partition than the row's"),
)
"""Every kind of drift of a row, the gravest first."""
_COLUMNS = {
    "position": "bigint",
    "id": "string",
    "state": "string",
    "topic": "string",
    "message_key": "binary",
    "message_value": "binary",
    "headers": "string",
    "partition_id": "bigint",
    "timestamp_ms": "bigint",
    "created_at": "bigint",
    "changed_at": "bigint",
}
_PIECE_ROWS = 5000
_TASK_POSITIONS, _TASKS_MAX = 200_000, 64
_OPEN_FOR_MS = 60_000
"""Rows that were marked this long ago are lost also where another transaction is open: consumers
have not seen them for all that time."""


class RowExample(Struct, frozen=True):
    """A row or record with findings. `places`: some of its records, as `topic-0@7`."""

    id: str
    findings: tuple[str, ...]
    state: str
    topic: str
    places: tuple[str, ...]


class OutboxSummary(Compared, frozen=True, kw_only=True):
    """The result of an audit of an outbox; `rows` are by state.

    Attributes:
        relay: the name of its relays.
        purged: ids without a row whose row may have been purged.
        young: rows that were marked during the audit, or may be hidden by an open transaction.
    """

    kinds = KINDS
    relay: str
    purged: int = 0
    examples: tuple[RowExample, ...] = ()

    @property
    def title(self) -> str:
        """Kind and name of the source of the rows."""
        return f"outbox {self.relay}"


class _Begun(NamedTuple):
    """The table when the audit began: the relays' name, the database's time, topics, positions."""

    relay: str
    now_ms: int
    topics: tuple[str, ...]
    positions: tuple[int, int]


def audit_outbox(
    spark: SparkSession,
    access: AuditKafka,
    database: Database,
    folder: Path,
    *,
    keep_s: float,
    topics: Sequence[str] = (),
) -> OutboxSummary:
    """Compare an outbox with its topics.

    Args:
        folder: for an export of SQLite; Spark's executors must see it.
        keep_s: how long the relays keep finished rows, seconds: a record without a row is a stray
            if it is younger.
        topics: further ones to read, beside those in the table.

    Raises:
        ConfigurationError: a table, right, driver or setting is missing or wrong.
        AuditError: Kafka does not answer.
    """
    database.prepare(outbox_tables())
    with database.explained(tables=outbox_tables()):
        begun = database.apart(_begin(database))
    names = {*begun.topics, *topics}
    ends = access.ends(names)
    reads = [read_target(topic, ends.get(topic), None) for topic in names]
    facts_of = partial(relayed_facts, relay=begun.relay)
    # Before Kafka is read: an export shows rows that relays may remove meanwhile.
    with in_words():
        table = _rows(spark, database, begun, folder)
    with (
        kept(spark, access, reads, facts_of) as (facts, count),
        in_words(),
        on_disk(_digested(table)) as rows,
        on_disk(_judged(facts, rows, begun.now_ms, keep_s, _judged_from(reads, begun))) as judged,
    ):
        states = {row["state"]: row["count"] for row in rows.groupBy("state").count().collect()}
        found = tally(judged, KINDS, RowExample, ["id"])
    return OutboxSummary(
        relay=begun.relay,
        rows=dict(sorted(states.items())),
        records=count,
        drift=found.drift,
        **{name: found.apart[name] for name in ("purged", "gone", "young")},
        unread={read.topic: read.unread for read in reads if read.unread},
        examples=found.examples,
    )


def _begin(database: Database) -> Steps[_Begun]:
    named = yield Query(f"SELECT relay, {database.dialect.now_ms} FROM {RELAY} WHERE shard = 0")
    topics = yield Query(f"SELECT DISTINCT topic FROM {OUTBOX}")
    bounds = yield Query(f"SELECT MIN(position), MAX(position) FROM {OUTBOX}")
    first, last = bounds.rows[0]
    relay, now_ms = named.rows[0]
    names = tuple(sorted(str(row[0]) for row in topics.rows))
    return _Begun(str(relay), int(now_ms), names, (int(first or 0), int(last or 0)))


# --- records -----------------------------------------------------------------------------------


def relayed_facts(records: DataFrame, relay: str) -> DataFrame:
    """Return the facts of the records that relays of a name have written: id, place, timestamp,
    whether that is the broker's, and the hashes of the body and of the user's headers."""
    users = F.slice("headers", 3, F.greatest(F.size("headers") - 2, F.lit(0)))
    return of_relay(records, relay).select(
        *("id", "topic", "partition", "at_ms"),
        place().alias("place"),
        (F.col("timestampType") == 1).alias("append_time"),
        body_hash(F.col("key"), F.col("value")).alias("body"),
        headers_hash(users).alias("headers"),
    )


# --- rows --------------------------------------------------------------------------------------


def _rows(spark: SparkSession, database: Database, begun: _Begun, folder: Path) -> DataFrame:
    """Return the rows of the table, read in parts of positions."""
    if database.dialect is SQLITE:
        file = folder / "outbox.parquet"
        _export(database, file)
        return spark.read.parquet(str(file))
    first, last = begun.positions
    tasks = max(1, min(_TASKS_MAX, (last - first) // _TASK_POSITIONS))
    bounds = [str(first + (last - first) * number // tasks) for number in range(1, tasks)]
    table = JdbcTable.of(database, OUTBOX)
    return table.rows(spark, ranges("position", bounds)).select(*_COLUMNS)


def _export(database: Database, file: Path) -> None:
    """Write the rows of an SQLite file as Parquet."""
    # Another program may have written texts into columns of bytes.
    selected = ", ".join(
        f"CAST({name} AS BLOB)" if kind == "binary" else name for name, kind in _COLUMNS.items()
    )
    opened = f"{Path(database.file).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(opened, uri=True)) as connection:
        cursor = connection.execute(f"SELECT {selected} FROM {OUTBOX}")
        pieces = iter(lambda: cursor.fetchmany(_PIECE_ROWS), [])
        write_rows(file, _COLUMNS, pieces)


def _digested(rows: DataFrame) -> DataFrame:
    """Return the rows with hashes in place of their messages; the newest of an id."""
    pairs = F.from_json("headers", "array<array<string>>", JSON_OPTIONS)
    entries = F.map_entries(F.from_json("headers", "map<string, string>", JSON_OPTIONS))
    listed = F.transform(pairs, lambda pair: F.struct(F.get(pair, 0), F.get(pair, 1)))
    typed = "array<struct<key: string, value: string>>"
    written = F.when(F.startswith("headers", F.lit("{")), entries.cast(typed)).otherwise(
        listed.cast(typed)
    )
    digests = rows.select(
        "id",
        "position",
        "state",
        F.col("topic").alias("row_topic"),
        F.col("partition_id").alias("row_partition"),
        F.coalesce("timestamp_ms", "created_at").alias("row_at_ms"),
        F.least("created_at", "timestamp_ms").alias("row_from_ms"),
        "changed_at",
        body_hash(F.col("message_key"), F.col("message_value")).alias("row_body"),
        headers_hash(_binary(written, decoded=True)).alias("row_headers"),
        headers_hash(_binary(written, decoded=False)).alias("row_headers_as_text"),
    )
    # Of two parts that were read one after the other, both may have a row that was decided.
    others = [name for name in digests.columns if name != "id"]
    newest = F.max_by(F.struct(*others), "position").alias("row")
    return digests.groupBy("id").agg(newest).select("id", "row.*")


_BASE64 = r'\A\s*\{\s*"base64"\s*:\s*"([A-Za-z0-9+/]*=*)"\s*\}\s*\z'


def _binary(headers: Column, *, decoded: bool) -> Column:
    """Return headers as Kafka has them. A text that looks like bytes in base64 is only the same
    in SQL's JSON as these bytes are: one of both ways to read it is right."""

    def value(text: Column) -> Column:
        coded = F.unbase64(F.regexp_extract(text, F.lit(_BASE64), 1))
        plain = text.cast("binary")
        return F.when(text.rlike(_BASE64), coded).otherwise(plain) if decoded else plain

    return F.transform(
        headers,
        lambda each: F.struct(each["key"].alias("key"), value(each["value"]).alias("value")),
    )


# --- judgement ---------------------------------------------------------------------------------


class JudgedFrom(NamedTuple):
    """From when on the rows of a topic are judged without a record: the record's timestamp, and
    until when they were marked; None: never."""

    at_ms: int | None
    marked_ms: int


def _judged_from(reads: Sequence[TopicRead], begun: _Begun) -> Mapping[str, JudgedFrom]:
    found = {}
    for read in reads:
        at_ms: int | None = 0
        if read.unread or read.compacted:
            at_ms = None
        elif any(read.starts):
            at_ms = kept_from_ms(begun.now_ms, read.kept_ms) if read.kept_ms else None
        marked_ms = begun.now_ms - (_OPEN_FOR_MS if read.open else 0)
        found[read.topic] = JudgedFrom(at_ms, marked_ms)
    return found


def _judged(
    records: DataFrame,
    rows: DataFrame,
    now_ms: int,
    keep_s: float,
    judged_from: Mapping[str, JudgedFrom],
) -> DataFrame:
    """Return one row for each id: findings, why it is not judged, and places."""
    both = records.join(rows, "id", "full_outer")
    col = F.col
    differs = {
        "body_changed": col("body") != col("row_body"),
        "headers_changed": ~col("headers").isin(col("row_headers"), col("row_headers_as_text")),
        "timestamp_changed": ~col("append_time") & (col("at_ms") != col("row_at_ms")),
        "wrong_target": (col("topic") != col("row_topic"))
        | (col("partition") != col("row_partition")),
    }
    ids = both.groupBy("id").agg(
        F.count("place").alias("n"),
        F.max("state").alias("state"),
        F.coalesce(F.max("row_topic"), F.max("topic")).alias("topic"),
        F.max("changed_at").alias("changed_at"),
        F.max("row_from_ms").alias("row_from_ms"),
        F.max("at_ms").alias("at_ms"),
        F.slice(F.array_sort(F.collect_list("place")), 1, 5).alias("places"),
        *[F.coalesce(F.bool_or(test), F.lit(False)).alias(name) for name, test in differs.items()],
    )
    visible, state = col("n") > 0, col("state")
    # An id begins with its time, unless another program drew it.
    id_ms = F.conv(F.substring("id", 1, 12), 16, 10).try_cast("bigint")
    may_be_purged = F.least("at_ms", id_ms) <= now_ms - round(keep_s * 1000)
    missing = (state == "GLOBAL_COMMIT") & ~visible
    tests = {
        "stray": state.isNull() & ~may_be_purged,
        "rolled_back_visible": (state == "LOCAL_ROLLBACK") & visible,
        "visible_without_commit": state.isin("UNKNOWN", "MESSAGE_ERROR") & visible,
        "visible_twice": col("n") > 1,
        "lost": missing & (lateness(judged_from, now_ms) == "judged"),
        **{name: col(name) for name in differs},
    }
    apart = F.when(state.isNull() & may_be_purged, "purged").when(
        missing, lateness(judged_from, now_ms)
    )
    return ids.select(
        *("id", "topic", "places"),
        F.coalesce("state", F.lit("")).alias("state"),
        findings(tests, KINDS).alias("findings"),
        F.array_compact(F.array(apart)).alias("apart"),
    )


def lateness(judged_from: Mapping[str, JudgedFrom], now_ms: int) -> Column:
    """Return whether a marked row without a record is `judged`, `young` or `gone`."""
    chain = F.when(F.col("changed_at") >= now_ms, "young")
    for topic, since in judged_from.items():
        here = F.col("topic") == topic
        if since.at_ms is None:
            chain = chain.when(here, "gone")
            continue
        if since.at_ms:
            chain = chain.when(here & (F.col("row_from_ms") <= since.at_ms), "gone")
        chain = chain.when(here & (F.col("changed_at") >= since.marked_ms), "young")
    return chain.otherwise("judged")
