"""Extract facts: read the topics within their snapshot bounds into narrow Parquet tables.

The order of reads makes the audit right while the proxies go on working. The operation topic's end
is asked for first, so every marker below it has its half message below half's end, which is asked
for next; promoted records are read after that. Finally both logs are read on to their ends, so
that every message seen in a target has its marker and its half message.

Each topic is read once. Rows are written as they arrive and counted on the way, and rewritten only
where a fault is found that no single record shows. A topic with nothing new needs no Spark job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce

import msgspec
from msgspec import Struct
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql.types import StructType

from txbroker.spark import expressions as F
from txbroker.spark import schema
from txbroker.spark.access import AuditKafka, TopicEnds
from txbroker.spark.facts.bounds import (
    OVERFLOW,
    check_same,
    find_far,
    from_positions,
    held,
    is_replaced,
    read_on,
    read_target,
    to_end,
)
from txbroker.spark.facts.keyed import with_secret
from txbroker.spark.facts.messages import (
    half_facts,
    op_facts,
    parked_facts,
    visible_facts,
    with_contents,
)
from txbroker.spark.facts.topics import TopicReader, count_of, in_words
from txbroker.spark.folders import run_of
from txbroker.spark.schema import (
    Extract,
    Facts,
    Part,
    SnapshotBounds,
    TableCount,
    Terms,
    TimeSpan,
    TopicNames,
    TopicRead,
    no_rows,
    types_of,
)
from txbroker.spark.session import spread
from txbroker.spark.storage.storage import storage_of

_CODEC = {
    "compression": "zstd",
    "parquet.compression.codec.zstd.level": "1",
    # Parquet tries a dictionary for each column, in vain where no two values are equal.
    **{f"parquet.enable.dictionary#{name}": "false" for name in ("id", "offset", "body")},
}


def extract(
    spark: SparkSession,
    access: AuditKafka,
    names: TopicNames,
    terms: Terms,
    folder: str,
    secret: str,
    before: SnapshotBounds | None = None,
    keys_before: DataFrame | None = None,
    counted_from: SnapshotBounds | None = None,
    part: Part | None = None,
) -> Extract:
    """Read all topics and write their facts into `folder`.

    Args:
        folder: an empty folder, a path or URI that Hadoop knows. Each table gets a subfolder.
        secret: of the hashes in facts; that of the run that this one continues.
        before: bounds of the run that this one continues; None reads everything.
        keys_before: half facts of earlier runs that hold a `dedup_key` within the dedup window
            before `before`.
        counted_from: bounds of the last run, even if this one does not continue it: records that
            retention removed are counted from there, and a part reads its targets.
        part: the transactions to judge; None: all.
    """
    extraction = _Extraction(spark, access, names, terms, folder, before, counted_from)
    return extraction.run(secret, keys_before, part)


class _Extraction:
    def __init__(
        self,
        spark: SparkSession,
        access: AuditKafka,
        names: TopicNames,
        terms: Terms,
        folder: str,
        before: SnapshotBounds | None,
        counted_from: SnapshotBounds | None,
    ) -> None:
        self._spark, self._access, self._names = spark, access, names
        self._reader = TopicReader(spark, access)
        self._terms, self._folder, self._before = terms, folder.rstrip("/"), before
        self._files, self._run = storage_of(spark, self._folder), run_of(self._folder)
        self._was, self._counted_from = _by_topic(before), _by_topic(counted_from)
        self._written: dict[str, WrittenRows] = {}

    def run(self, secret: str, keys_before: DataFrame | None, part: Part | None) -> Extract:
        spark, before, names = self._spark, self._before, self._names
        self._secret, self._part = secret, part
        began_s = time.monotonic()
        for name in (*Facts._fields, "broken"):
            self._files.make(self._path(name))
        op_early = self._access.own_ends(names.op)
        (half,) = self._in_part(self._read_on(self._access.own_ends(names.half)))
        half_clock = LogClock.after(len(half.ends), () if before is None else before.half_clock_ms)
        self._write_half(half, half_clock, early=True)

        targets = self._target_reads(half_clock)
        asked_ms = self._terms.now_ms + round((time.monotonic() - began_s) * 1000)
        # After the targets' ends: a refused transaction that is promoted in between is settled, not
        # refused and visible.
        parked = self._read_on(self._access.own_ends(names.parked))
        self._write("parked", parked_facts, (parked,))
        self._write("visible", lambda records: visible_facts(records, names.prefix), targets)

        op_now = self._access.own_ends(names.op)
        # Records that retention removed in the meantime cannot be read.
        (op,) = self._in_part(
            self._read_on(msgspec.structs.replace(op_early, starts=op_now.starts))
        )
        op = to_end(op, op_now)
        whole_half = to_end(half, self._access.own_ends(names.half))
        op_clock = LogClock.after(len(op.ends), () if before is None else before.op_clock_ms)
        self._write_op(op, op_clock, op_early.ends)
        tail = msgspec.structs.replace(whole_half, begins=half.ends)
        self._write_half(tail, half_clock, early=False)
        named = self._named(half_clock, "NOT early") if count_of(tail) else set()

        clocks = {"half": half_clock, "op": op_clock}
        with spread(spark, sum(written.all for written in self._written.values())), in_words():
            ends_ms = self._settle(clocks, keys_before)
        cut = SnapshotBounds(
            whole_half,
            op,
            parked,
            targets,
            op_early.ends,
            half.ends,
            ends_ms["half"],
            ends_ms["op"],
            tuple(sorted(named - {target.topic for target in targets})),
            self._held(targets, parked),
            asked_ms,
        )
        read = {name: self._count(name) for name in Facts._fields}
        return Extract(Facts(*map(self._table, Facts._fields)), self._table("broken"), cut, read)

    def _target_reads(self, half_clock: LogClock) -> tuple[TopicRead, ...]:
        topics = self._named(half_clock)
        if self._before is not None:
            topics |= {target.topic for target in self._before.targets}
            topics |= set(self._before.named_late)
        elif self._part is not None:
            # A copy may be in any of them, and half messages outside the part name others.
            topics |= self._counted_from.keys() - set(msgspec.structs.astuple(self._names))
        ends = self._access.ends(topics)
        was, counted_from = self._was, self._counted_from
        reads = [
            read_target(topic, ends.get(topic), was.get(topic), counted_from.get(topic), self._run)
            for topic in sorted(topics)
        ]
        timed = {topic for topic, now in ends.items() if now.append_time}
        return self._in_part(*reads, timed=timed)

    def _in_part(
        self, *reads: TopicRead, timed: Container[str] | None = None
    ) -> tuple[TopicRead, ...]:
        """Return reads that skip the records before the part to judge.

        `timed`: the topics whose timestamps are the brokers'; None: all of them.
        """
        part = self._part
        if part is None or not part.from_ms:
            return reads
        known = {r.topic: len(r.ends) for r in reads if timed is None or r.topic in timed}
        at = self._access.offsets_at(known, part.read_from_ms(self._terms))
        return tuple(
            from_positions(read, at[read.topic]) if read.topic in at else read for read in reads
        )

    def _held(self, targets: Sequence[TopicRead], parked: TopicRead) -> tuple[str, ...]:
        """Return the target partitions that end in the same open transaction since they were
        read; check that all these topics are still those that were read."""
        read = [topic for topic in (*targets, parked) if topic.ends and not topic.unread]
        now = self._access.ends(topic.topic for topic in read)
        check_same(read, now)
        return held(targets, now)

    def _named(self, clock: LogClock, which: str = "true") -> set[str]:
        """Return the targets that half messages name, in all rows or in a selection.

        Void half messages do not count: any producer with access to the half topic can name
        anything in them. Those that are void by their `dedup_key` are not known yet.
        """
        if "half" not in self._written:
            return set()
        rows, written = self._raw("half"), self._written["half"]
        with spread(self._spark, written.all), in_words():
            # Where append times go back, the log clock may still place a row within the window.
            if written.early_ids:
                surveyed = survey({"half": (rows, clock)})["half"]
                if surveyed.goes_back:
                    rows = self._void_by(rows, surveyed)
            rows = rows.where("why IS NULL AND void IS NULL").where(which)
            return {row["topic"] for row in rows.select("topic").distinct().collect()}

    def _read_on(self, now: TopicEnds) -> TopicRead:
        was, last = self._was.get(now.topic), self._counted_from.get(now.topic)
        read, known = read_on(now, was, last), was or last
        if known is None or is_replaced(now, known):
            return msgspec.structs.replace(read, since=self._run)
        return msgspec.structs.replace(read, since=known.since)

    # --- writing -----------------------------------------------------------------------------

    def _write_half(self, read: TopicRead, clock: LogClock, *, early: bool) -> None:
        def facts(records: DataFrame) -> DataFrame:
            clocked = half_facts(records).withColumn("clock_ms", clock.unless_back())
            return clocked.withColumn("void", self._void()).withColumn("early", F.lit(early))

        self._write("half", facts, (read,))

    def _void(self) -> Column:
        """Return why a half message is void by its own fields, or by the log clock."""
        apart = F.abs(F.col("clock_ms") - F.col("id_ms"))
        expired = F.when(apart > self._terms.dedup_window_ms, F.lit("expired"))
        return F.coalesce(F.col("void"), expired)

    def _write_op(self, read: TopicRead, clock: LogClock, early: Sequence[int]) -> None:
        ends = F.array(*[F.lit(end).cast("bigint") for end in early])
        is_early = F.col("offset") < F.get(ends, F.col("partition"))
        none = F.lit(None).cast(_types("op")["contents"].dataType)

        def facts(records: DataFrame) -> DataFrame:
            clocked = op_facts(records).withColumn("clock_ms", clock.unless_back())
            return clocked.withColumn("early", F.coalesce(is_early, F.lit(False))).withColumn(
                "contents", none
            )

        self._write("op", facts, (read,))

    def _write(
        self, name: str, facts: Callable[[DataFrame], DataFrame], reads: Sequence[TopicRead]
    ) -> None:
        """Write a table as its topics are read, with `why` and the columns that settling needs."""
        reads = [read for read in reads if count_of(read)]
        if not reads:
            return
        path = self._path(name)
        there = self._files.names(path)
        try:
            with spread(self._spark, sum(map(count_of, reads))):
                self._append(name, facts(self._reader.records(reads)))
        except (Py4JJavaError, PySparkException) as error:
            far = find_far(self._access, reads) if OVERFLOW in str(error) else {}
            if not far:
                raise
            # Committers that move each task's files leave the files of a failed write.
            for left in set(self._files.names(path)).difference(there):
                self._files.remove(f"{path}/{left}")
            for records in self._reader.around(reads, far):
                self._append(name, facts(records))

    def _append(self, name: str, facts: DataFrame) -> None:
        columns = _types(name).names
        settling = [column for column in facts.columns if column not in columns]
        with in_words():
            rows = with_secret(F.select(facts, *columns, *settling), self._secret)
            self._store(name, rows, self._path(name))

    def _store(self, name: str, rows: DataFrame, path: str) -> None:
        """Append rows to the files of a table, and count them on the way."""
        types = rows.schema
        seen = F.RowFigures(_counts(types.names))
        seen.of(rows).write.mode("append").options(**_CODEC).parquet(path)
        found = WrittenRows(types, **seen.get())
        before = self._written.get(name)
        self._written[name] = found if before is None else before.with_more(found)

    # --- settling ----------------------------------------------------------------------------

    def _settle(
        self, clocks: Mapping[str, LogClock], keys_before: DataFrame | None
    ) -> dict[str, tuple[int, ...]]:
        """Apply the rules that no single record decides; return the log clocks at the end.

        Tables that change are written again, and records that do not read to the table of broken
        records: all in one job.
        """
        raw = {name: self._raw(name) for name in self._written}
        surveyed = survey({name: (raw[name], clocks[name]) for name in clocks if name in raw})
        changed = {name: rows for name, rows in raw.items() if self._written[name].broken}
        broken = [self._set_aside(name, rows) for name, rows in changed.items()]
        for name, found in surveyed.items():
            if found.goes_back:
                back = self._void_by if name == "half" else with_clock
                changed[name] = back(raw[name], found)
        good = {name: rows.where("why IS NULL") for name, rows in (raw | changed).items()}
        with ExitStack() as kept:
            if "half" in raw and self._written["half"].keyed:
                window_ms = self._terms.dedup_window_ms
                voids = dedup_voids(good["half"], keys_before, window_ms).persist()
                kept.callback(voids.unpersist)
                if voids.count():
                    changed["half"] = good["half"] = _mark_void(good["half"], voids)
            if "op" in raw and self._written["op"].contents:
                joined = with_contents(good["op"])
                broken.append(self._set_aside("op", joined.broken))
                changed["op"] = good["op"] = joined.markers
            tables = {name: good[name] for name in changed}
            if broken:
                tables["broken"] = reduce(DataFrame.unionByName, broken)
            self._replace(tables)
        return {
            name: surveyed[name].ends if name in surveyed else clock.begins
            for name, clock in clocks.items()
        }

    def _void_by(self, rows: DataFrame, surveyed: ClockSurvey) -> DataFrame:
        """Return half rows with the surveyed log clock, void by it where they are."""
        by_id = F.when(F.col("void") == "id", F.col("void"))
        clocked = with_clock(rows, surveyed).withColumn("void", by_id)
        return clocked.withColumn("void", self._void())

    def _set_aside(self, name: str, rows: DataFrame) -> DataFrame:
        """Return the unreadable records of a table, as rows of the table of broken records."""
        topic = getattr(self._names, name, None)
        named = rows if topic is None else rows.withColumn("topic", F.lit(topic))
        return F.select(named.where("why IS NOT NULL"), *_types("broken").names)

    def _replace(self, tables: Mapping[str, DataFrame]) -> None:
        """Write tables again, all of them at once: with the columns of all."""
        if not tables:
            return
        parts = [
            F.select(rows, *_types(name).names).withColumn(_TABLE, F.lit(name))
            for name, rows in tables.items()
        ]
        rows = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts)
        figures = {
            f"{name}_{count}": column
            for name in tables
            for count, column in _counts(_types(name).names, F.col(_TABLE) == name).items()
        }
        seen = F.RowFigures(figures)
        new = f"{self._folder}/settled"
        written = seen.of(rows).write.partitionBy(_TABLE)
        written.options(**_CODEC).parquet(new)
        found = seen.get()
        for name in tables:
            of_table = {count: found[f"{name}_{count}"] for count in _COUNTS}
            self._written[name] = WrittenRows(_types(name), **of_table)
            self._files.make(f"{new}/{_TABLE}={name}")  # where no row was written
            self._files.replace(f"{new}/{_TABLE}={name}", self._path(name))
        self._files.remove(new)

    # --- reading -----------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _raw(self, name: str) -> DataFrame:
        return self._spark.read.schema(self._written[name].types).parquet(self._path(name))

    def _table(self, name: str) -> DataFrame:
        ddl = getattr(schema, name.upper())
        if name not in self._written:
            return no_rows(self._spark, ddl)
        return self._spark.read.schema(ddl).parquet(self._path(name))

    def _count(self, name: str) -> TableCount:
        written = self._written.get(name)
        if written is None:
            return TableCount(0, 0, None)
        return TableCount(written.rows, written.keyed, written.span, written.checks)


class WrittenRows(Struct):
    """The columns of a table as it was written, and counts of its rows.

    Attributes:
        rows, keyed, checks, first_ms, last_ms: as in `TableCount`, without broken rows.
        broken: rows that do not parse.
        contents: rows that belong to commits with replaced messages.
        early_ids: rows that are void because their id is too far ahead of their append time.
    """

    types: StructType
    rows: int
    keyed: int
    checks: int
    first_ms: int | None
    last_ms: int | None
    broken: int
    contents: int
    early_ids: int

    @property
    def all(self) -> int:
        """All rows, also the broken ones and replaced messages."""
        return self.rows + self.broken + self.contents

    @property
    def span(self) -> TimeSpan | None:
        """The first and last time in the ids."""
        if self.first_ms is None or self.last_ms is None:
            return None
        return TimeSpan(self.first_ms, self.last_ms)

    def with_more(self, more: WrittenRows) -> WrittenRows:
        """Return the counts of both."""
        spans = [span for span in (self.span, more.span) if span is not None]
        return WrittenRows(
            self.types,
            self.rows + more.rows,
            self.keyed + more.keyed,
            self.checks + more.checks,
            min((span.first_ms for span in spans), default=None),
            max((span.last_ms for span in spans), default=None),
            self.broken + more.broken,
            self.contents + more.contents,
            self.early_ids + more.early_ids,
        )


_TABLE = "table"
_COUNTS = WrittenRows.__struct_fields__[1:]


def _counts(columns: Sequence[str], which: Column | None = None) -> dict[str, Column]:
    """Return the aggregates of `WrittenRows` for a table with these columns. `which`: of all rows,
    those of the table."""
    none, no = F.lit(None), F.lit(False)
    why = F.col("why") if "why" in columns else none
    content = F.col("content") if "content" in columns else none
    own = F.lit(True) if which is None else which
    good = own & why.isNull() & content.isNull()
    id_ms = F.when(good, F.col("id_ms") if "id_ms" in columns else none.cast("bigint"))
    keyed = F.col("dedup") if "dedup" in columns else none
    contents = content.isNotNull() | (F.col("contents_count") > 0) if "content" in columns else no
    checks = good & (F.col("kind") == "check") if "kind" in columns else no
    early = no
    if {"void", "why"} <= set(columns):
        early = good & (F.col("void") == "expired") & (F.col("clock_ms") < F.col("id_ms"))
    return {
        "rows": F.count_if(good),
        "keyed": F.count(F.when(good, keyed)),
        "checks": F.count_if(checks),
        "first_ms": F.min(id_ms),
        "last_ms": F.max(id_ms),
        "broken": F.count(F.when(own, why)),
        "contents": F.count_if(contents),
        "early_ids": F.count_if(early),
    }


def _mark_void(half: DataFrame, voids: DataFrame) -> DataFrame:
    """Return the half table with the rows marked void whose key another transaction holds.

    `voids`: cached and counted, so that Spark knows whether it can broadcast them.
    """
    marks = voids.withColumn("by_key", F.lit("dedup"))
    joined = half.join(marks, ["partition", "offset"], "left")
    return joined.withColumn("void", F.coalesce("void", "by_key")).drop("by_key")


def _by_topic(cut: SnapshotBounds | None) -> dict[str, TopicRead]:
    if cut is None:
        return {}
    return {read.topic: read for read in (cut.half, cut.op, cut.parked, *cut.targets)}


def _types(name: str) -> StructType:
    return types_of(getattr(schema, name.upper()))


# --- the log clock, and half messages void by their `dedup_key` ----------------------------------
#
# The log clock of a partition is the running maximum of its append times, in order of offsets.
# Append times hardly ever go back (only where brokers' clocks differ and the leader changes), so
# rows are written with their own append time as clock, and a survey checks whether that was right.
# It works on buckets of offsets, so that no partition is one task, however long it is.

BUCKET = 1 << 14
"""Offsets in a bucket."""

_PLACE = ("partition", "bucket")


class LogClock(Struct, frozen=True):
    """A topic's log clock where reading began, by partition, ms since 1970; 0 at the start."""

    begins: tuple[int, ...]

    @classmethod
    def after(cls, partitions: int, ends: Sequence[int]) -> LogClock:
        """Return the clock that continues an earlier run's; partitions may have been added
        since."""
        return cls((*ends, *[0] * (partitions - len(ends))))

    def at_begin(self) -> Column:
        """Return the clock at the begin of a row's partition."""
        begins = F.array(*[F.lit(begin).cast("bigint") for begin in self.begins])
        return F.get(begins, F.col("partition"))

    def unless_back(self) -> Column:
        """Return a row's clock, provided that append times never go back."""
        return F.greatest(F.col("at_ms"), self.at_begin())


class ClockSurvey(Struct, frozen=True):
    """The result of a survey. `ends`: the clock at the end, by partition. `goes_back`: whether
    append times go back anywhere. `buckets`: where the clock begins in each bucket, and whether
    append times go back inside it; one row for `BUCKET` offsets, computed where it is needed."""

    ends: tuple[int, ...]
    goes_back: bool
    buckets: DataFrame


def survey(
    tables: Mapping[str, tuple[DataFrame, LogClock]], bucket: int = BUCKET
) -> dict[str, ClockSurvey]:
    """Find where append times go back in tables with `partition`, `offset` and `at_ms`; one Spark
    job for all of them."""
    if not tables:
        return {}
    buckets = {name: _surveyed(*table, bucket) for name, table in tables.items()}
    ends = [
        rows.groupBy("partition")
        .agg(F.max("end_ms").alias("end_ms"), F.bool_or("back").alias("back"))
        .withColumn("name", F.lit(name))
        for name, rows in buckets.items()
    ]
    found: dict[str, dict[int, Row]] = {name: {} for name in tables}
    for row in reduce(DataFrame.unionAll, ends).collect():
        found[row["name"]][row["partition"]] = row
    return {
        name: ClockSurvey(
            tuple(
                found[name][p]["end_ms"] if p in found[name] else begin
                for p, begin in enumerate(clock.begins)
            ),
            any(row["back"] for row in found[name].values()),
            buckets[name],
        )
        for name, (_, clock) in tables.items()
    }


def _surveyed(rows: DataFrame, clock: LogClock, bucket: int) -> DataFrame:
    """Return the buckets of a table; see `ClockSurvey`."""
    by_time = rows.groupBy("partition", _bucket(bucket), "at_ms").agg(
        F.min("offset").alias("first"), F.max("offset").alias("last")
    )
    # Append times do not go back where later ones begin after the end of all earlier ones.
    earlier = Window.partitionBy(*_PLACE).orderBy("at_ms").rowsBetween(*_BEFORE)
    marked = by_time.withColumn("back", F.col("first") < F.max("last").over(earlier))
    inside = marked.groupBy(*_PLACE).agg(
        F.min("at_ms").alias("lowest"),
        F.max("at_ms").alias("highest"),
        F.coalesce(F.bool_or("back"), F.lit(False)).alias("back_inside"),
    )
    buckets_before = Window.partitionBy("partition").orderBy("bucket").rowsBetween(*_BEFORE)
    begin = F.greatest(F.max("highest").over(buckets_before), clock.at_begin())
    return F.select(
        inside.withColumn("begin_ms", begin),
        *_PLACE,
        "begin_ms",
        F.greatest("begin_ms", "highest").alias("end_ms"),
        F.col("back_inside"),
        # Nothing goes back before the first record, even if an earlier run's clock is later.
        ((F.col("lowest") < F.col("begin_ms")) | F.col("back_inside")).alias("back"),
    )


def with_clock(rows: DataFrame, surveyed: ClockSurvey, bucket: int = BUCKET) -> DataFrame:
    """Return a table with the correct `clock_ms` where append times go back."""
    begins = F.broadcast(surveyed.buckets.select(*_PLACE, "begin_ms", "back_inside"))
    placed = rows.withColumn("bucket", _bucket(bucket)).join(begins, [*_PLACE], "left")
    forward = placed.where(~F.col("back_inside")).withColumn("running", F.col("at_ms"))
    # Only buckets in which append times go back are sorted.
    order = Window.partitionBy(*_PLACE).orderBy("offset").rowsBetween(*_SO_FAR)
    back = placed.where("back_inside").withColumn("running", F.max("at_ms").over(order))
    both = forward.unionByName(back)
    return both.withColumn("clock_ms", F.greatest("running", "begin_ms")).drop(
        "bucket", "begin_ms", "back_inside", "running"
    )


def _bucket(size: int) -> Column:
    return F.floor(F.col("offset") / size).alias("bucket")


_BEFORE = (Window.unboundedPreceding, -1)
_SO_FAR = (Window.unboundedPreceding, Window.currentRow)

_KEY = ("partition", "grp", "dedup")
_COLUMNS = (*_KEY, "offset", "clock_ms", "id")


def dedup_voids(half: DataFrame, before: DataFrame | None, window_ms: int) -> DataFrame:
    """Return partition and offset of first records that are void by their `dedup_key`.

    The ledger's rule: the last half message of a group with a key that counted holds the key;
    another one counts only after more than the dedup window on the log clock. A repeated id is not
    decided by the key. `before`: rows of an earlier run that hold a key.
    """
    of_now = whole_with_key(half).select(*_COLUMNS, F.lit(True).alias("now"))
    rows = of_now
    if before is not None:
        rows = rows.unionByName(before.select(*_COLUMNS, F.lit(False).alias("now")))
    by_key = rows.groupBy(*_KEY).agg(
        F.array_sort(F.collect_list(F.struct("offset", "clock_ms", "id", "now"))).alias("uses")
    )
    several = by_key.where(F.size("uses") > 1)
    held = several.withColumn("held", _held(F.col("uses"), window_ms))
    void = F.filter(
        "uses",
        lambda use: (
            use["now"]
            & ~F.array_contains(F.col("held")["offsets"], use["offset"])
            & ~F.array_contains(F.col("held")["ids"], use["id"])
        ),
    )
    return held.select("partition", F.explode(void["offset"]).alias("offset"))


def whole_with_key(half: DataFrame) -> DataFrame:
    """Return the first records of whole half messages with a key."""
    firsts = half.where(F.col("dedup").isNotNull() & (F.col("seq") == 0) & F.col("void").isNull())
    same = ("partition", "base", "id", "grp", "count")
    several = half.where("count > 1").withColumn("base", F.col("offset") - F.col("seq"))
    complete = several.groupBy(*same).agg(F.count("*").alias("there")).where("there = count")
    whole = firsts.where("count > 1").withColumn("base", F.col("offset"))
    return firsts.where("count = 1").unionByName(
        whole.join(complete, [*same], "left_semi").drop("base")
    )


def _held(uses: Column, window_ms: int) -> Column:
    """Return offsets and ids of the uses of a key that held it in turn."""
    free_key = F.struct(
        F.lit(None).cast("bigint").alias("clock_ms"),
        F.array().cast("array<bigint>").alias("offsets"),
        F.array().cast("array<string>").alias("ids"),
    )

    def use_next(holder: Column, use: Column) -> Column:
        free = holder["clock_ms"].isNull() | (
            (use["clock_ms"] - holder["clock_ms"] > window_ms)
            & ~F.array_contains(holder["ids"], use["id"])
        )
        taken = F.struct(
            use["clock_ms"].alias("clock_ms"),
            F.array_append(holder["offsets"], use["offset"]).alias("offsets"),
            F.array_append(holder["ids"], use["id"]).alias("ids"),
        )
        return F.when(free, taken).otherwise(holder)

    return F.aggregate(uses, free_key, use_next)
