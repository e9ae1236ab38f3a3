"""What earlier runs have read, looked up again where this run needs it.

A transaction that ended is carried on by no run. But a fault may come to it later: a second copy,
a contrary marker, a record in a wrong order. Then its earlier facts are fetched from the Parquet of
the runs that read them, so that it is judged as by one run that reads everything. What this costs
follows the number of such strangers: files are opened only where the time in their ids says that
there can be something, and Parquet's statistics skip most of these.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.spark import schema
from txbroker.spark.folders import Folders

TABLES = {
    "half": schema.HALF,
    "op": schema.OP,
    "visible": schema.VISIBLE,
    "parked": schema.PARKED,
}
"""The tables of facts, with their columns."""
_BUCKET_MS = 60_000
_BUCKETS_MAX = 2000
"""Minutes with strangers that are looked at one by one; beyond, all between the first and last."""
_BROADCAST_MAX = 200_000
"""Ids that are sent to every executor as they are."""
_SPANS_MAX = 30
"""Time spans in one search; neighbouring ones are joined until there are no more."""


class Facts(NamedTuple):
    """The tables of facts; columns as in `schema`."""

    half: DataFrame
    op: DataFrame
    visible: DataFrame
    parked: DataFrame

    def __or__(self, other: "Facts") -> "Facts":
        """Return the rows of both."""
        pairs = zip(self, other, strict=True)
        return Facts(*(mine.unionByName(theirs) for mine, theirs in pairs))

    def of(self, ids: DataFrame) -> "Facts":
        """Return the rows of these transactions. `ids`: one column `id`, each once."""
        return Facts(*(table.join(ids.select("id"), "id", "left_semi") for table in self))

    def kept(self) -> "Facts":
        """Return the same, held by Spark until `released`: they are used several times."""
        return Facts(*(table.persist() for table in self))

    def released(self) -> None:
        """Give back what `kept` holds."""
        for table in self:
            table.unpersist()


class PastRun(Struct, frozen=True):
    """A run whose facts may be looked up.

    Attributes:
        run: its name.
        first_ms, last_ms: least and greatest time in the ids of its facts that can count; None
            without facts.
        op_ends: how far it read the operation topic.
    """

    run: str
    first_ms: int | None
    last_ms: int | None
    op_ends: tuple[int, ...]


class RemainingRuns(NamedTuple):
    """What is left of the files of a chain's runs.

    Attributes:
        runs: those whose files, and the files of all later ones, are there.
        removed_ms: whatever has no later time in its id may have been in files that somebody has
            removed; None where none were.
    """

    runs: tuple[PastRun, ...]
    removed_ms: int | None


class TimeSpan(NamedTuple):
    """A time span, both ends in it, ms."""

    first_ms: int
    last_ms: int


class TableCount(NamedTuple):
    """How many rows a table has, those with a `dedup_key`, and the times in their ids, if any."""

    rows: int
    keyed: int
    span: TimeSpan | None


class EarlierFacts:
    """The facts of the runs since the last full one, that run's among them.

    Args:
        spark: the session.
        folders: where they lie.
        runs: which runs.
    """

    def __init__(self, spark: SparkSession, folders: Folders, runs: Sequence[PastRun]) -> None:
        self._spark = spark
        self._folders = folders
        self._runs = runs

    @property
    def last_ms(self) -> int | None:
        """The greatest time in all ids; what is younger was never seen."""
        return max((run.last_ms for run in self._runs if run.last_ms is not None), default=None)

    def strangers(self, new: Facts, carried: DataFrame) -> DataFrame | None:
        """Return ids with new facts that earlier runs may know and did not carry on.

        Args:
            new: what this run has read.
            carried: ids that are carried; column `id`.

        Returns:
            columns `id` and `id_ms`, each id once; None where there are none.
        """
        if self.last_ms is None:
            return None
        old = [t.select("id", "id_ms").where(F.col("id_ms") <= self.last_ms) for t in new]
        ids = reduce(DataFrame.union, old).join(carried.select("id"), "id", "left_anti")
        return ids.groupBy("id").agg(F.first("id_ms").alias("id_ms"))

    def facts(self, ids: DataFrame) -> Facts | None:
        """Return what is known of these transactions; None where that is nothing.

        Args:
            ids: columns `id` and `id_ms`, each id once; read several times, so it is to be cached.
        """
        spans = spans_of(ids)
        runs = [run.run for run in self._runs if any(_meets(run, span) for span in spans)]
        if not runs:
            return None
        inside = _inside(spans)
        return Facts(*(self._table(name, runs).where(inside) for name in TABLES)).of(ids)

    def neighbours(self, old: Facts, whole: Facts) -> DataFrame | None:
        """Return who may have been overtaken in the order of their key.

        A message is out of order if one that was decided later is visible before it. Where it was
        decided before this run and is visible, that one may have been read by an earlier run; all
        others were decided in this run, and so were those that could have overtaken them.

        Args:
            old: facts from earlier runs of transactions that are judged in this one.
            whole: all facts that are judged in this run.

        Returns:
            columns `id` and `id_ms`, each id once; None where there are none.
        """
        first = old.op.where("kind = 'commit'").groupBy("id", "partition")
        decided = first.agg(F.min("offset").alias("since")).persist()
        try:
            return self._overtaking(decided, whole)
        finally:
            decided.unpersist()

    def _overtaking(self, decided: DataFrame, whole: Facts) -> DataFrame | None:
        count = decided.count()
        if not count:
            return None
        if count <= _BROADCAST_MAX:
            # There are few of them; the tables of this run need no shuffle for their sake.
            decided = F.broadcast(decided)
        waiting = _visible_now(decided, whole)
        least = waiting.groupBy("partition").agg(F.min("since").alias("since")).collect()
        since = {row["partition"]: row["since"] for row in least}
        later = self._decided_later(since)
        if later is None:
            return None
        spans = spans_of(later)
        runs = [run.run for run in self._runs if any(_meets(run, span) for span in spans)]
        if not runs:
            return None
        marks = _marks(self._table("half", runs).where(_inside(spans)))
        found = later.join(marks, ["id", "partition"]).join(waiting, ["partition", "order_mark"])
        overtaking = found.where(F.col("offset") > F.col("since"))
        return overtaking.groupBy("id").agg(F.first("id_ms").alias("id_ms"))

    def _decided_later(self, since: dict[int, int]) -> DataFrame | None:
        """Return the commits behind these offsets, by partition; None where nobody read any."""
        runs = [run.run for run in self._runs if _reads_beyond(run, since)]
        if not runs:
            return None
        behind = [
            (F.col("partition") == partition) & (F.col("offset") > offset)
            for partition, offset in since.items()
        ]
        markers = self._table("op", runs).where("kind = 'commit'").where(reduce(_either, behind))
        return markers.groupBy("id", "id_ms", "partition").agg(F.max("offset").alias("offset"))

    def _table(self, name: str, runs: Sequence[str]) -> DataFrame:
        paths = [f"{self._folders.facts(run)}/{name}" for run in runs]
        return read_facts(self._spark, name, paths)


def left_of(runs: Sequence[PastRun], there: Set[str]) -> RemainingRuns:
    """Return what can be looked up where somebody has removed folders of earlier runs.

    A transaction's later facts say nothing right without its earlier ones. So nothing before a
    removed run counts either, whichever were removed.

    Args:
        runs: of a chain, in their order.
        there: names of runs whose folders are there.
    """
    first = max((n + 1 for n, run in enumerate(runs) if run.run not in there), default=0)
    removed = [run.last_ms for run in runs[:first] if run.last_ms is not None]
    return RemainingRuns(tuple(runs[first:]), max(removed, default=None))


def read_facts(spark: SparkSession, name: str, paths: Sequence[str]) -> DataFrame:
    """Return a table of facts that earlier runs have read: all of them are early."""
    rows = spark.read.schema(TABLES[name]).parquet(*paths)
    return rows.withColumn("early", F.lit(True)) if "early" in rows.columns else rows


def counted(facts: Facts) -> dict[str, TableCount]:
    """Count the rows of each table."""
    lines = [
        table.agg(
            F.lit(name).alias("name"),
            F.count("*").alias("rows"),
            F.count("dedup" if name == "half" else F.lit(None)).alias("keyed"),
            F.min("id_ms").alias("first"),
            F.max("id_ms").alias("last"),
        )
        for name, table in zip(TABLES, facts, strict=True)
    ]
    return {
        row["name"]: TableCount(
            row["rows"],
            row["keyed"],
            None if row["first"] is None else TimeSpan(row["first"], row["last"]),
        )
        for row in reduce(DataFrame.union, lines).collect()
    }


def times_of(
    read: Mapping[str, TableCount], half_clock_ms: Sequence[int], terms: schema.Terms
) -> TimeSpan | None:
    """Return from when to when the ids of a run's records are, None without any.

    Anybody may write an id of the far future into a target: nothing that counts is that far ahead.
    """
    spans = [each.span for each in read.values() if each.span is not None]
    if not spans:
        return None
    # A run reads on behind the time it began at.
    end_ms = max((terms.now_ms, *half_clock_ms)) + terms.dedup_window_ms
    first_ms = min(span.first_ms for span in spans)
    return TimeSpan(min(first_ms, end_ms), min(max(span.last_ms for span in spans), end_ms))


def spans_of(ids: DataFrame) -> list[TimeSpan]:
    """Return time spans in which all ids are, a bounded number. `ids`: column `id_ms`."""
    minutes = ids.groupBy(F.floor(F.col("id_ms") / _BUCKET_MS))
    ends = (F.min("id_ms").alias("first"), F.max("id_ms").alias("last"))
    rows = minutes.agg(*ends).limit(_BUCKETS_MAX + 1).collect()
    if len(rows) > _BUCKETS_MAX:
        rows = ids.agg(*ends).collect()
    return joined(TimeSpan(row["first"], row["last"]) for row in rows if row["first"] is not None)


def joined(spans: Iterable[TimeSpan], most: int = _SPANS_MAX) -> list[TimeSpan]:
    """Return no more than `most` spans that hold all of these, as little beside them as can be."""
    ordered = sorted(spans)
    if len(ordered) <= most:
        return ordered
    gaps = [after.first_ms - before.last_ms for before, after in pairwise(ordered)]
    cuts = sorted(sorted(range(len(gaps)), key=lambda n: -gaps[n])[: most - 1])
    starts = [0, *(cut + 1 for cut in cuts)]
    return [
        TimeSpan(ordered[start].first_ms, max(span.last_ms for span in ordered[start:end]))
        for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True)
    ]


# --- pieces ------------------------------------------------------------------------------------


def _meets(run: PastRun, span: TimeSpan) -> bool:
    if run.first_ms is None or run.last_ms is None:
        return False
    return run.first_ms <= span.last_ms and span.first_ms <= run.last_ms


def _reads_beyond(run: PastRun, since: dict[int, int]) -> bool:
    """Say whether a run has read markers behind these, by partition."""
    ends = run.op_ends
    return any(p < len(ends) and ends[p] > offset + 1 for p, offset in since.items())


def _inside(spans: Sequence[TimeSpan]) -> Column:
    return reduce(_either, (F.col("id_ms").between(*span) for span in spans))


def _either(one: Column, other: Column) -> Column:
    return one | other


def _marks(half: DataFrame) -> DataFrame:
    """Return the order marks of half messages."""
    first = half.where("seq = 0 and void is null and order_mark is not null")
    return first.select("id", "partition", "order_mark").distinct()


def _visible_now(decided: DataFrame, whole: Facts) -> DataFrame:
    """Return by order mark the first decision, made before this run, of what is visible now."""
    seen = whole.visible.join(decided.select("id"), "id", "left_semi").select("id").distinct()
    marks = _marks(whole.half.join(decided.select("id"), "id", "left_semi"))
    marked = marks.join(decided, ["id", "partition"]).join(seen, "id", "left_semi")
    return marked.groupBy("partition", "order_mark").agg(F.min("since").alias("since"))
