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
from itertools import pairwise, takewhile
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs
from pyspark.sql import Column, DataFrame, SparkSession

from txbroker.errors import ConfigurationError
from txbroker.spark import expressions as F
from txbroker.spark.access import AuditKafka
from txbroker.spark.facts.extract import extract, whole_with_key
from txbroker.spark.folders import Folders, runs_in
from txbroker.spark.judge.horizon import SavedHorizon
from txbroker.spark.schema import (
    BROKEN,
    TABLES,
    Extract,
    Facts,
    Part,
    SnapshotBounds,
    TableCount,
    Terms,
    TimeSpan,
    TopicNames,
    no_rows,
)
from txbroker.spark.secret import SECRET_FILE, mark_of, secret_in
from txbroker.spark.storage.folder import DataFolder
from txbroker.spark.storage.storage import storage_of

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


class EarlierFacts:
    """The facts of the runs since the last full run, including that run's.

    `since`: the first run that read a target as it is now, see `TopicRead`.
    """

    def __init__(
        self, spark: SparkSession, folders: Folders, left: RemainingRuns, since: Mapping[str, str]
    ) -> None:
        self._spark, self._folders = spark, folders
        self._runs, self._since = left.runs, since
        times = (left.removed_ms, *(run.last_ms for run in left.runs))
        self._last_ms = max((ms for ms in times if ms is not None), default=None)
        """The greatest time in all ids; no younger id was ever read."""

    def strangers(self, new: Facts, carried: DataFrame) -> DataFrame | None:
        """Return ids with new facts that earlier runs may have read and did not carry on: columns
        `id` and `id_ms`, each id once; None where there are none.

        Any run may have read an id that holds no valid time.
        """
        if not self._runs and self._last_ms is None:
            return None
        known = F.col("id_ms").isNull() | (F.col("id_ms") <= F.lit(self._last_ms))
        old = [table.select("id", "id_ms").where(known) for table in new]
        ids = reduce(DataFrame.union, old).join(carried.select("id"), "id", "left_anti")
        return ids.groupBy("id").agg(F.first("id_ms").alias("id_ms"))

    def facts(self, ids: DataFrame) -> Facts | None:
        """Return the known facts of these transactions; None where there are none.

        `ids`: columns `id` and `id_ms`, each id once; read several times, so cache it.
        """
        times = times_in(ids)
        runs = self._of(times)
        if not runs:
            return None
        inside = times.inside()
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
        times = times_in(later)
        runs = self._of(times)
        if not runs:
            return None
        marks = _marks(self._table("half", runs).where(times.inside()))
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

    def _of(self, times: "IdTimes") -> list[str]:
        """Return the runs that may have read ids with these times."""
        return [run.run for run in self._runs if times.meet(run)]

    def _table(self, name: str, runs: Sequence[str]) -> DataFrame:
        return facts_of_runs(self._spark, self._folders, name, runs, self._since)


def left_of(runs: Sequence[PastRun], there: Set[str]) -> RemainingRuns:
    """Return the runs of a chain that can be looked up where folders of earlier runs were deleted.

    Later facts of a transaction prove nothing without its earlier ones, so a deleted run hides all
    runs before it. `there`: names of runs whose folders are there.
    """
    first = max((n + 1 for n, run in enumerate(runs) if run.run not in there), default=0)
    # A run without such a time may have read ids that hold none.
    removed = [-1 if run.last_ms is None else run.last_ms for run in runs[:first]]
    return RemainingRuns(tuple(runs[first:]), max(removed, default=None))


def expired(runs: Sequence[PastRun], before_ms: int) -> tuple[PastRun, ...]:
    """Return the first runs of a chain, whose facts are all older: they can be deleted."""
    return tuple(takewhile(lambda run: run.last_ms is None or run.last_ms < before_ms, runs))


def read_facts(spark: SparkSession, name: str, paths: Sequence[str]) -> DataFrame:
    """Return a table of facts that earlier runs have read: all of them are early."""
    rows = spark.read.schema(TABLES[name]).parquet(*paths)
    return rows.withColumn("early", F.lit(True)) if "early" in rows.columns else rows


def facts_of_runs(
    spark: SparkSession,
    folders: Folders,
    name: str,
    runs: Sequence[str],
    since: Mapping[str, str],
) -> DataFrame:
    """Return a table of facts of earlier runs. `since`: as in `EarlierFacts`."""
    alike: dict[frozenset[str], list[str]] = {}
    for run in runs:
        topics = (topic for topic, first in since.items() if run < first)
        former = frozenset(topics if name == "visible" else ())
        alike.setdefault(former, []).append(f"{folders.facts(run)}/{name}")
    parts = [as_former(read_facts(spark, name, paths), of) for of, paths in alike.items()]
    return reduce(DataFrame.unionByName, parts)


def as_former(visible: DataFrame, topics: Set[str]) -> DataFrame:
    """Return visible records, of which those in these topics are not there any more."""
    if not topics:
        return visible
    former = F.when(F.col("topic").isin(*topics), F.lit(True)).otherwise(F.col("former"))
    return visible.withColumn("former", former)


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


class IdTimes(NamedTuple):
    """The times in some ids: a bounded number of spans that cover them. `untimed`: whether there
    are ids without a valid time, too."""

    spans: Sequence[TimeSpan]
    untimed: bool

    def meet(self, run: PastRun) -> bool:
        """Return whether a run may have read such ids."""
        return self.untimed or any(_meets(run, span) for span in self.spans)

    def inside(self) -> Column:
        """Return whether `id_ms` is among these times; there is at least one."""
        parts = [F.col("id_ms").between(*span) for span in self.spans]
        return reduce(_either, [F.col("id_ms").isNull()] * self.untimed + parts)


def times_in(ids: DataFrame) -> IdTimes:
    """Return the times in ids. `ids`: column `id_ms`."""
    minutes = ids.groupBy(F.floor(F.col("id_ms") / _BUCKET_MS))
    ends = (F.min("id_ms").alias("first"), F.max("id_ms").alias("last"))
    rows = minutes.agg(*ends).limit(_BUCKETS_MAX + 1).collect()
    if len(rows) > _BUCKETS_MAX:
        rows = ids.groupBy(F.isnull("id_ms")).agg(*ends).collect()
    untimed = any(row["first"] is None for row in rows)
    timed = [TimeSpan(row["first"], row["last"]) for row in rows if row["first"] is not None]
    return IdTimes(joined(timed), untimed)


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

CHAIN_VERSION = 3
"""Version 1 kept the verdicts of all its runs, and no tables; the hashes of version 2 had no
secret."""
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
        rows: number of carried facts, by table.
        secret: the mark of the secret with which the facts are hashed.
    """

    names: TopicNames
    cut: SnapshotBounds
    horizon: SavedHorizon
    runs: tuple[PastRun, ...]
    carried: int
    keys: bool
    rows: dict[str, int] = {}
    secret: str = ""
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


def read_chain(spark: SparkSession, folders: Folders, run: str) -> Chain | None:
    """Return where a run ended, of any version up to this one; None where there is no such run."""
    path = f"{folders.carry(run)}/{_CHAIN}"
    written = storage_of(spark, path).read(path)
    if written is None:
        return None
    try:
        chain = msgspec.json.decode(written, type=Chain)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{path} does not parse ({error}): restore it, or remove {folders.carry(run)} and run "
            "a full audit (--full)"
        ) from None
    if chain.version > CHAIN_VERSION:
        raise ConfigurationError(
            f"a newer version of txbroker wrote {path}: install it, or run a full audit (--full) "
            "with another --out"
        )
    return chain


def gather(
    spark: SparkSession,
    access: AuditKafka,
    folders: Folders,
    run: str,
    secret: str,
    names: TopicNames,
    terms: Terms,
    before: CarriedState | None,
    counted_from: SnapshotBounds | None,
    part: Part | None,
) -> Extract:
    """Read the topics from where the last run ended, or from their beginnings.

    Args:
        secret: of the hashes in facts.
        before: the state of the run that this one continues.
        counted_from, part: as in `extract`.
    """
    chain, keys = (None, None) if before is None else (before.chain, before.keys)
    cut, folder = None if chain is None else chain.cut, folders.facts(run)
    return extract(spark, access, names, terms, folder, secret, cut, keys, counted_from, part)


def stored(spark: SparkSession, folders: Folders, chain: Chain) -> Extract:
    """Return the facts of all runs of a chain, as far as they are there, as those of one run."""
    left = [run.run for run in left_of(chain.runs, runs_in(spark, folders.facts(""))).runs]
    if not left:
        raise ConfigurationError(
            f"the facts of earlier runs are not in {folders.out}: they were removed. Run a full "
            "audit (--full)"
        )
    *earlier, last = left
    # Of the last run only, some facts are younger than its targets.
    newest = folders.facts(last)
    facts = Facts(*(spark.read.schema(TABLES[name]).parquet(f"{newest}/{name}") for name in TABLES))
    if earlier:
        since = chain.cut.since
        facts = facts | Facts(
            *(facts_of_runs(spark, folders, name, earlier, since) for name in TABLES)
        )
    broken = [f"{folders.facts(run)}/broken" for run in left]
    counts = {
        name: TableCount(table.count(), 0, None) for name, table in zip(TABLES, facts, strict=True)
    }
    return Extract(facts, spark.read.schema(BROKEN).parquet(*broken), chain.cut, counts)


def leave_state(
    spark: SparkSession,
    folders: Folders,
    run: str,
    secret: str,
    names: TopicNames,
    terms: Terms,
    staged: Extract,
    before: CarriedState | None,
    judged: Facts,
    horizon: SavedHorizon,
    verdicts: DataFrame,
    carried: int,
    ids: TimeSpan | None,
) -> None:
    """Write the state that the next run continues.

    Args:
        secret: with which the facts are hashed.
        staged: the facts that the run has read.
        before: the state that it continues.
        judged: the facts that it has judged.
        horizon: what retention and compaction have left.
        verdicts: of the run; `carried` is how many of them the next run judges again.
        ids: the first and last time in the ids of those.
    """
    cut, last = staged.cut, None if before is None else before.chain
    first_ms, last_ms = times_of(staged.read, cut.half_clock_ms, terms) or (None, None)
    this = PastRun(run, first_ms, last_ms, cut.op.ends)
    runs = (this,) if last is None else (*last.runs, this)
    keyed = bool(staged.read["half"].keyed) or (last is not None and last.keys)
    chain = Chain(names, cut, horizon, runs, carried, keyed, secret=mark_of(secret))
    known = None if before is None else before.keys
    keys = keys_in_window(staged.facts.half, known, cut.half_clock_ms, terms.dedup_window_ms)
    write_carried(spark, folders, run, chain, judged, verdicts, ids, keys)


def check_goes_on(chain: Chain, names: TopicNames) -> None:
    """Check that the last run audited the same installation."""
    for was, now in ((chain.names.half, names.half), (chain.names.op, names.op)):
        if was != now:
            raise ConfigurationError(
                f"the last run with this data folder audited {was}, not {now}: name a separate "
                "--data-dir for each installation"
            )


def secret_for(folder: DataFolder, before: CarriedState | None) -> str:
    """Return the secret with which a run hashes facts: that of its data folder. It must be the one
    of the run before, so that facts of both can be compared."""
    secret = secret_in(folder)
    if before is not None and before.chain.secret != mark_of(secret):
        raise ConfigurationError(
            f"{SECRET_FILE} in the data folder is not the one of the last run, whose hashes would "
            "differ: restore the file, or run a full audit (--full)"
        )
    return secret


def read_carried(
    spark: SparkSession, folders: Folders, run: str, names: TopicNames
) -> CarriedState | None:
    """Read the state that a run left; None where an earlier version wrote it. `names`: the topics
    of the installation whose state it has to be."""
    folder = folders.carry(run)
    chain = read_chain(spark, folders, run)
    if chain is None:
        raise ConfigurationError(
            f"the state that the last run ({run}) left is not in {folder}: name that run's output "
            "folder with --out, or run a full audit (--full)"
        )
    check_goes_on(chain, names)
    if chain.version < CHAIN_VERSION:
        return None
    facts = Facts(
        *(
            read_facts(spark, name, [f"{folder}/facts/table={name}"])
            if chain.rows.get(name)
            else no_rows(spark, ddl)
            for name, ddl in TABLES.items()
        )
    )
    ids = no_rows(spark, "id string")
    if chain.carried:
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
    keys = read_facts(spark, "half", [f"{folder}/keys"]) if chain.keys else None
    return CarriedState(chain, facts, ids, keys)


def write_carried(
    spark: SparkSession,
    folders: Folders,
    run: str,
    chain: Chain,
    facts: Facts,
    verdicts: DataFrame,
    ids: TimeSpan | None,
    keys: DataFrame | None,
) -> None:
    """Write the state for the next run: all tables in one job, with the columns of all.

    Args:
        verdicts: of this run; those with `carry` are carried.
        ids: the first and last time in the ids of these.
        keys: half messages with a `dedup_key`; None where there are none.
    """
    folder = folders.carry(run)
    files = storage_of(spark, folder)
    parts: dict[str, DataFrame] = {}
    if chain.carried:
        carried = verdicts.where("carry").select("id")
        near = F.lit(True) if ids is None else F.col("id_ms").between(*ids)
        parts = Facts(*(table.where(near) for table in facts)).of(carried)._asdict()
        parts["ids"] = carried
    if chain.keys and keys is not None:
        parts["keys"] = keys
    if parts:
        named = [table.withColumn("table", F.lit(name)) for name, table in parts.items()]
        rows = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), named)
        seen = F.RowFigures({name: F.count_if(F.col("table") == name) for name in parts})
        seen.of(rows).write.partitionBy("table").parquet(f"{folder}/facts")
        counts = seen.get()
        chain = structs.replace(chain, rows={n: counts[n] for n in TABLES if n in counts})
        for name in {"ids", "keys"} & parts.keys():
            written = f"{folder}/facts/table={name}"
            files.make(written)  # where no row was written
            files.replace(written, f"{folder}/{name}")
    files.write(f"{folder}/{_CHAIN}", msgspec.json.encode(chain))


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
