"""Facts of earlier runs: the state that a run leaves to the next one, and files to look up.

A chain is a full run and the incremental runs after it. Each carries the facts of open
transactions, which the next run judges again; all others stay in their files.

No run carries a transaction that ended. But a fault may reach it later: a second copy, a contrary
marker, a record out of order. Its earlier facts are then read from the Parquet files of the runs
that read them, so that it is judged as in one run that reads everything. The cost follows the
number of such stragglers: only files that cover the times in their ids are opened, and Parquet's
statistics skip most of those.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import msgspec
from msgspec import Struct
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.errors import ConfigurationError
from txbroker.spark.facts.extract import whole_with_key
from txbroker.spark.facts.messages import id_time_ms
from txbroker.spark.folders import Folders, read_bytes, write_bytes
from txbroker.spark.judge.horizon import SavedHorizon
from txbroker.spark.schema import TABLES, Facts, SnapshotBounds, Terms, TopicNames

_BUCKET_MS = 60_000
_BUCKETS_MAX = 2000
"""Minutes with stragglers that are searched one by one; beyond, the whole span from first to
last."""
_BROADCAST_MAX = 200_000
"""Maximum number of ids that are broadcast to every executor."""
_SPANS_MAX = 30
"""Time spans in one search; the nearest ones are joined down to this number."""


class PastRun(Struct, frozen=True):
    """A run whose facts may be looked up.

    `first_ms`, `last_ms`: least and greatest time in the ids of its valid facts, if it has any.
    `op_ends`: end of its read of the operation topic.
    """

    run: str
    first_ms: int | None
    last_ms: int | None
    op_ends: tuple[int, ...]


class RemainingRuns(NamedTuple):
    """The runs of a chain whose files remain.

    `runs`: runs whose files, and the files of all later runs, are there. `removed_ms`: facts with
    ids no later than this may have been in deleted files; None where none were deleted.
    """

    runs: tuple[PastRun, ...]
    removed_ms: int | None


class TimeSpan(NamedTuple):
    """A time span with both ends included, ms."""

    first_ms: int
    last_ms: int


class TableCount(NamedTuple):
    """Number of rows in a table, of rows with a `dedup_key`, and the times in their ids, if any."""

    rows: int
    keyed: int
    span: TimeSpan | None


class EarlierFacts:
    """The facts of the runs since the last full run, including that run's."""

    def __init__(self, spark: SparkSession, folders: Folders, runs: Sequence[PastRun]) -> None:
        self._spark = spark
        self._folders = folders
        self._runs = runs

    @property
    def last_ms(self) -> int | None:
        """The greatest time in all ids; no younger id was ever read."""
        return max((run.last_ms for run in self._runs if run.last_ms is not None), default=None)

    def strangers(self, new: Facts, carried: DataFrame) -> DataFrame | None:
        """Return ids with new facts that earlier runs may know and did not carry on: columns `id`
        and `id_ms`, each id once; None where there are none."""
        if self.last_ms is None:
            return None
        old = [t.select("id", "id_ms").where(F.col("id_ms") <= self.last_ms) for t in new]
        ids = reduce(DataFrame.union, old).join(carried.select("id"), "id", "left_anti")
        return ids.groupBy("id").agg(F.first("id_ms").alias("id_ms"))

    def facts(self, ids: DataFrame) -> Facts | None:
        """Return the known facts of these transactions; None where there are none.

        `ids`: columns `id` and `id_ms`, each id once; read several times, so cache it.
        """
        spans = spans_of(ids)
        runs = [run.run for run in self._runs if any(_meets(run, span) for span in spans)]
        if not runs:
            return None
        inside = _inside(spans)
        return Facts(*(self._table(name, runs).where(inside) for name in TABLES)).of(ids)

    def neighbours(self, old: Facts, whole: Facts) -> DataFrame | None:
        """Return transactions that may have been overtaken in the order of their key.

        A message is out of order if one that was decided later is visible before it. For a message
        decided before this run and visible now, an earlier run may have read that other one.
        Messages decided in this run can only be overtaken by others decided in this run.

        `old`: facts from earlier runs of transactions that this run judges. `whole`: all facts that
        it judges. The result is that of `strangers`.
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
            # Few enough to broadcast: the tables of this run need no shuffle.
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
        ordered = later.join(marks, ["id", "partition"]).join(waiting, ["partition", "order_mark"])
        overtaking = ordered.where(F.col("offset") > F.col("since"))
        return overtaking.groupBy("id").agg(F.first("id_ms").alias("id_ms"))

    def _decided_later(self, since: dict[int, int]) -> DataFrame | None:
        """Return the commits after these offsets, by partition; None where no run read any."""
        runs = [run.run for run in self._runs if _reads_beyond(run, since)]
        if not runs:
            return None
        beyond = [
            (F.col("partition") == partition) & (F.col("offset") > offset)
            for partition, offset in since.items()
        ]
        markers = self._table("op", runs).where("kind = 'commit'").where(reduce(_either, beyond))
        return markers.groupBy("id", "id_ms", "partition").agg(F.max("offset").alias("offset"))

    def _table(self, name: str, runs: Sequence[str]) -> DataFrame:
        paths = [f"{self._folders.facts(run)}/{name}" for run in runs]
        return read_facts(self._spark, name, paths)


def left_of(runs: Sequence[PastRun], there: Set[str]) -> RemainingRuns:
    """Return the runs of a chain that can be looked up where folders of earlier runs were deleted.

    Later facts of a transaction prove nothing without its earlier ones, so a deleted run hides all
    runs before it. `there`: names of runs whose folders are there.
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
    counts = [
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
        for row in reduce(DataFrame.union, counts).collect()
    }


def times_of(
    read: Mapping[str, TableCount], half_clock_ms: Sequence[int], terms: Terms
) -> TimeSpan | None:
    """Return the first and last time in the ids of a run's records, None without any.

    Any producer may write an id of the far future into a target: no valid id is that far ahead.
    """
    spans = [table.span for table in read.values() if table.span is not None]
    if not spans:
        return None
    # A run reads records that arrive after it began.
    end_ms = max((terms.now_ms, *half_clock_ms)) + terms.dedup_window_ms
    first_ms = min(span.first_ms for span in spans)
    return TimeSpan(min(first_ms, end_ms), min(max(span.last_ms for span in spans), end_ms))


def spans_of(ids: DataFrame) -> list[TimeSpan]:
    """Return a bounded number of time spans that cover all ids. `ids`: column `id_ms`."""
    minutes = ids.groupBy(F.floor(F.col("id_ms") / _BUCKET_MS))
    ends = (F.min("id_ms").alias("first"), F.max("id_ms").alias("last"))
    rows = minutes.agg(*ends).limit(_BUCKETS_MAX + 1).collect()
    if len(rows) > _BUCKETS_MAX:
        rows = ids.agg(*ends).collect()
    return joined(TimeSpan(row["first"], row["last"]) for row in rows if row["first"] is not None)


def joined(spans: Iterable[TimeSpan], most: int = _SPANS_MAX) -> list[TimeSpan]:
    """Return at most `most` spans that cover all of these and as little else as possible."""
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
    """Return whether a run has read markers after these, by partition."""
    ends = run.op_ends
    return any(p < len(ends) and ends[p] > offset + 1 for p, offset in since.items())


def _inside(spans: Sequence[TimeSpan]) -> Column:
    return reduce(_either, (F.col("id_ms").between(*span) for span in spans))


def _either(one: Column, other: Column) -> Column:
    return one | other


def _marks(half: DataFrame) -> DataFrame:
    first = half.where("seq = 0 and void is null and order_mark is not null")
    return first.select("id", "partition", "order_mark").distinct()


def _visible_now(decided: DataFrame, whole: Facts) -> DataFrame:
    """Return, by order mark, the first decision made before this run of messages visible now."""
    seen = whole.visible.join(decided.select("id"), "id", "left_semi").select("id").distinct()
    marks = _marks(whole.half.join(decided.select("id"), "id", "left_semi"))
    marked = marks.join(decided, ["id", "partition"]).join(seen, "id", "left_semi")
    return marked.groupBy("partition", "order_mark").agg(F.min("since").alias("since"))


# --- state for the next run ----------------------------------------------------------------------

CHAIN_VERSION = 1
_CHAIN = "chain.json"


class Chain(Struct, frozen=True):
    """Where the next run continues.

    Attributes:
        names: the installation's topics.
        cut: the last run's snapshot bounds.
        horizon: what retention had left when the chain began, or removed between its runs.
        runs: the chain's runs; their facts may be looked up.
        carried: number of carried transactions.
        keys: whether half messages with a `dedup_key` are carried.
    """

    names: TopicNames
    cut: SnapshotBounds
    horizon: SavedHorizon
    runs: tuple[PastRun, ...]
    carried: int
    keys: bool
    version: int = CHAIN_VERSION


class CarriedState(Struct, frozen=True):
    """The state that a run left, as the next one reads it.

    `facts`: of open transactions. `ids`: their ids; column `id`. `keys`: half messages whose
    `dedup_key` may void later ones; None where there are none.
    """

    chain: Chain
    facts: Facts
    ids: DataFrame
    keys: DataFrame | None


def read_carried(spark: SparkSession, folders: Folders, run: str) -> CarriedState:
    """Read the state that a run left."""
    folder = folders.carry(run)
    written = read_bytes(spark, f"{folder}/{_CHAIN}")
    if written is None:
        raise ConfigurationError(
            f"the state that the last run ({run}) left is not in {folder}: name that run's output "
            "folder with --out, or run a full audit (--full)"
        )
    try:
        chain = msgspec.json.decode(written, type=Chain)
    except msgspec.MsgspecError:
        chain = None
    if chain is None or chain.version != CHAIN_VERSION:
        raise ConfigurationError(
            f"another version of txbroker wrote {folder}/{_CHAIN}: run a full audit (--full)"
        )
    if chain.carried:
        facts = Facts(*(read_facts(spark, name, [f"{folder}/{name}"]) for name in TABLES))
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
    else:
        facts = Facts(*(spark.createDataFrame([], ddl) for ddl in TABLES.values()))
        ids = spark.createDataFrame([], "id string")
    keys = read_facts(spark, "half", [f"{folder}/keys"]) if chain.keys else None
    return CarriedState(chain, facts, ids, keys)


def write_carried(
    spark: SparkSession,
    folders: Folders,
    run: str,
    chain: Chain,
    facts: Facts,
    verdicts: DataFrame,
    keys: DataFrame | None,
) -> None:
    """Write the state for the next run. `verdicts`: of this run; those with `carry` are carried."""
    folder = folders.carry(run)
    if chain.carried:
        verdicts.where("carry").select("id").write.parquet(f"{folder}/ids")
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
        id_ms = id_time_ms(F.col("id"))
        ends = ids.agg(F.min(id_ms), F.max(id_ms)).first()
        assert ends is not None
        in_time_span = F.col("id_ms").between(*ends)
        open_facts = Facts(*(table.where(in_time_span) for table in facts)).of(ids)
        for name, table in zip(TABLES, open_facts, strict=True):
            table.write.parquet(f"{folder}/{name}")
    if chain.keys and keys is not None:
        keys.write.parquet(f"{folder}/keys")
    write_bytes(spark, f"{folder}/{_CHAIN}", msgspec.json.encode(chain))


def keys_in_window(
    half: DataFrame, before: DataFrame | None, clock_ms: Sequence[int], dedup_window_ms: int
) -> DataFrame:
    """Return half messages with a `dedup_key` that may still void a later one.

    `before`: the last run's result. `clock_ms`: the half topic's log clock at the end of this run.
    """
    keyed = whole_with_key(half)
    if before is not None:
        keyed = keyed.unionByName(before)
    if not clock_ms:
        return keyed
    recent = [
        (F.col("partition") == partition) & (F.col("clock_ms") >= clock - dedup_window_ms)
        for partition, clock in enumerate(clock_ms)
    ]
    return keyed.where(reduce(lambda one, other: one | other, recent))
