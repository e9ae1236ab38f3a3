"""The summary of a run, added up from its verdicts.
Spark adds up; the driver receives data in proportion to the groups and topics that are shown, not
to the number of transactions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from txbroker.spark.facts.extract import Extract
from txbroker.spark.facts.history import TableCount
from txbroker.spark.schema import (
    BUSINESS_KINDS,
    KIND_NAMES,
    TEXT_MAX,
    BrokenRecord,
    Example,
    Histogram,
    RunSummary,
    SnapshotBounds,
    Terms,
)

LATENCY_BOUNDS_MS = (
    5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 300_000, 1_800_000,
    7_200_000, 86_400_000,
)  # fmt: skip
AGE_BOUNDS_MS = (
    1000, 5000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 21_600_000, 86_400_000, 604_800_000,
)  # fmt: skip
LABELS_MAX = 20
"""Topics, and groups, whose latencies are shown: those with the most transactions."""
EXAMPLES_A_KIND = 10
"""Examples for each kind of finding."""
SET_ASIDE_SHOWN = 20
"""Unreadable records that are shown."""


class VerdictTotals(NamedTuple):
    """Totals of a run's verdicts; see `schema.RunSummary`."""

    transactions: int
    carried: int
    states: dict[str, int]
    drift: dict[str, int]
    examples: tuple[Example, ...]
    pending_age: Histogram
    decide_latency: tuple[Histogram, ...]
    visible_latency: tuple[Histogram, ...]


def add_up(verdicts: DataFrame, now_ms: int) -> VerdictTotals:
    """Add up the verdicts of a run; pending transactions have their age at `now_ms`."""
    drift = _drift(verdicts)
    counts = _counts(verdicts, now_ms).persist()
    try:
        rows = counts.groupBy("state", "age").agg(*_sums("n", "carried")).collect()
        latencies = _latencies(counts)
    finally:
        counts.unpersist()
    states, ages = Counter[str](), Counter[int]()
    for row in rows:
        states[row["state"]] += row["n"]
        if row["age"] is not None:
            ages[row["age"]] += row["n"]
    return VerdictTotals(
        transactions=states.total(),
        carried=sum(row["carried"] for row in rows),
        states=dict(sorted(states.items())),
        drift=drift,
        examples=_examples(verdicts, drift),
        pending_age=Histogram("pending", AGE_BOUNDS_MS, _filled(AGE_BOUNDS_MS, ages)),
        decide_latency=latencies["decide"],
        visible_latency=latencies["visible"],
    )


def _sums(*names: str) -> list[Column]:
    return [F.sum(name).alias(name) for name in names]


# --- one pass over all rows --------------------------------------------------------------------


def _counts(verdicts: DataFrame, now_ms: int) -> DataFrame:
    """Return the number of transactions with the same group, topics, state and buckets."""
    decide = F.col("decided_at_ms") - F.col("prepared_at_ms")
    visible = F.col("visible_at_ms") - F.col("decided_at_ms")
    age = F.when(F.col("state") == "pending", F.lit(now_ms) - F.col("prepared_at_ms"))
    return (
        verdicts.select(
            "state",
            "grp",
            "topics",
            F.col("carry").cast("int").alias("carry"),
            _bucket(decide, LATENCY_BOUNDS_MS).alias("decide"),
            _bucket(visible, LATENCY_BOUNDS_MS).alias("visible"),
            _bucket(age, AGE_BOUNDS_MS).alias("age"),
        )
        .groupBy("state", "grp", "topics", "decide", "visible", "age")
        .agg(F.count("*").alias("n"), F.sum("carry").alias("carried"))
    )


def _bucket(value: Column, bounds_ms: Sequence[int]) -> Column:
    """Return the number of the bucket that a value belongs to, null for null."""
    return sum(((value > bound).cast("int") for bound in bounds_ms[1:]), _over(value, bounds_ms[0]))


def _over(value: Column, bound: int) -> Column:
    return (value > bound).cast("int")


def _latencies(counts: DataFrame) -> dict[str, tuple[Histogram, ...]]:
    """Return histograms of the topics and groups that have the most transactions, by measure."""
    measured = {
        "decide": F.col("decide"),
        "visible": F.when(F.col("state") == "promoted", F.col("visible")),
    }
    values = [F.col("n"), *(column.alias(measure) for measure, column in measured.items())]
    topics = counts.select(F.lit("topic").alias("kind"), F.explode("topics").alias("name"), *values)
    groups = counts.select(F.lit("group").alias("kind"), F.col("grp").alias("name"), *values)
    buckets = [
        F.sum(F.when(F.col(measure) == number, F.col("n")).otherwise(0)).alias(f"{measure}{number}")
        for measure in measured
        for number in range(len(LATENCY_BOUNDS_MS) + 1)
    ]
    labels = (
        topics.unionAll(groups)
        .where("name is not null and (decide is not null or visible is not null)")
        .groupBy("kind", "name")
        .agg(F.sum("n").alias("n"), *buckets)
    )
    most = Window.partitionBy("kind").orderBy(F.col("n").desc(), "name")
    shown = labels.withColumn("place", F.row_number().over(most)).where(
        F.col("place") <= LABELS_MAX
    )
    # Topics first, those with the most transactions before others.
    rows = sorted(shown.collect(), key=lambda row: (row["kind"] == "group", row["place"]))
    return {measure: tuple(_histograms(rows, measure)) for measure in measured}


def _histograms(rows: Iterable[Row], measure: str) -> Iterator[Histogram]:
    for row in rows:
        counts = tuple(row[f"{measure}{n}"] for n in range(len(LATENCY_BOUNDS_MS) + 1))
        if any(counts):
            yield Histogram(f"{row['kind']}:{row['name']}", LATENCY_BOUNDS_MS, counts)


def _filled(bounds_ms: Sequence[int], counts: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(counts.get(number, 0) for number in range(len(bounds_ms) + 1))


# --- records that do not read ------------------------------------------------------------------


class Unread(NamedTuple):
    """Unreadable records: their number, how many of them are ours, and some of them."""

    records: int
    own: int
    shown: tuple[BrokenRecord, ...]


def count_unread(broken: DataFrame) -> Unread:
    """Count the rows of the table of broken records, and return the first of them, ours before
    others'."""
    counts = broken.agg(F.count("*"), F.count_if("own")).first() or (0, 0)
    if not counts[0]:
        return Unread(0, 0, ())
    ordered = broken.orderBy(F.col("own").desc(), "topic", "partition", "offset")
    rows = ordered.select("topic", "partition", "offset", "why", "own").head(SET_ASIDE_SHOWN)
    return Unread(counts[0], counts[1], tuple(BrokenRecord(*row) for row in rows))


# --- findings ----------------------------------------------------------------------------------


def _found(verdicts: DataFrame) -> DataFrame:
    # A row with findings is in the folder of the gravest one; other folders are not opened.
    return verdicts.where(F.col("verdict").isin(*KIND_NAMES))


def _drift(verdicts: DataFrame) -> dict[str, int]:
    kinds = _found(verdicts).select(F.explode("findings").alias("kind"))
    counts = {row["kind"]: row["count"] for row in kinds.groupBy("kind").count().collect()}
    return {kind: counts[kind] for kind in KIND_NAMES if kind in counts}


def _examples(verdicts: DataFrame, kinds: Iterable[str]) -> tuple[Example, ...]:
    """Return the oldest transactions of each kind of finding."""
    shown = verdicts.select(
        "id",
        "findings",
        F.substring(F.coalesce("grp", F.lit("")), 1, TEXT_MAX).alias("grp"),
        F.substring(F.coalesce("why", F.lit("")), 1, TEXT_MAX).alias("why"),
        F.coalesce("decided_at_ms", "prepared_at_ms", F.lit(0)).alias("at_ms"),
        "verdict",
    )
    rows: list[Row] = []
    for kind in kinds:
        rows += shown.where(F.col("verdict") == kind).orderBy("at_ms", "id").head(EXAMPLES_A_KIND)
    return tuple(Example(row["id"], tuple(row["findings"]), row["grp"], row["why"]) for row in rows)


TOPICS_MAX = 50
"""Topics that are named: those with the most transactions."""


class MissingTargets(NamedTuple):
    """Number of transactions that were committed to topics that do not exist, also by topic, the
    largest first, and the oldest of them; a bounded number of both."""

    transactions: int
    topics: dict[str, int]
    examples: tuple[Example, ...]


def missing_topics(cut: SnapshotBounds) -> list[str]:
    """Return the targets that did not exist when their ends were asked for."""
    return [target.topic for target in cut.targets if not (target.ends or target.unread)]


def unread_topics(cut: SnapshotBounds) -> dict[str, str]:
    """Return why targets could not be read, by topic; a bounded number of topics."""
    unread = [target for target in cut.targets if target.unread]
    return {target.topic[:TEXT_MAX]: target.unread for target in unread[:TOPICS_MAX]}


def committed_to_missing(verdicts: DataFrame, cut: SnapshotBounds, terms: Terms) -> MissingTargets:
    """Return the transactions that were committed, and are late, to topics that do not exist.

    Whether a message was visible before its topic was deleted makes no difference: a run that reads
    everything again cannot know. For the same reason only transactions with a half message that is
    still there count. Refused ones are left out, because their copy is kept.
    """
    starts = F.array(*[F.lit(start).cast("bigint") for start in cut.half.starts])
    missing = verdicts.select(
        "id",
        F.coalesce("grp", F.lit("")).alias("grp"),
        "decided_at_ms",
        F.array_intersect("topics", F.array(*map(F.lit, missing_topics(cut)))).alias("missing"),
    ).where(
        (F.col("decision") == "commit")
        & (F.col("state") != "refused")
        & (F.col("decided_at_ms") < terms.now_ms - terms.late_after_ms)
        & (F.col("half_offset") >= F.get(starts, F.col("half_partition")))
        & (F.size("missing") > 0)
    )
    missing = missing.persist()
    try:
        counts = missing.select(F.explode("missing").alias("topic")).groupBy("topic").count()
        most = counts.orderBy(F.col("count").desc(), "topic").head(TOPICS_MAX)
        oldest = missing.orderBy("decided_at_ms", "id").head(EXAMPLES_A_KIND)
        return MissingTargets(
            missing.count(),
            {row["topic"][:TEXT_MAX]: row["count"] for row in most},
            tuple(
                Example(
                    row["id"],
                    ("target_missing",),
                    row["grp"][:TEXT_MAX],
                    f"committed to {', '.join(row['missing'])}"[:TEXT_MAX],
                )
                for row in oldest
            ),
        )
    finally:
        missing.unpersist()


def summary_of(
    run: str, mode: str, staged: Extract, read: Mapping[str, TableCount], tally: VerdictTotals
) -> RunSummary:
    """Return a run's summary without its times and the business."""
    cut, unread = staged.cut, count_unread(staged.broken)
    reads = (cut.half, cut.op, cut.parked, *cut.targets)
    drift = tally.drift | ({"unreadable": unread.own} if unread.own else {})
    totals = tally._asdict() | {"drift": drift}
    return RunSummary(
        run=run,
        mode=mode,
        started_ms=0,
        took_s=0.0,
        cut=cut,
        records={name: table.rows for name, table in read.items()},
        quarantined=unread.records,
        set_aside=unread.shown,
        unread_targets=unread_topics(cut),
        taken={topic.topic: topic.taken for topic in reads if topic.taken},
        **totals,
    )


def business_examples(found: DataFrame, kinds: Mapping[str, int]) -> tuple[Example, ...]:
    """Return some of the transactions that do not agree with the business."""
    meanings = {kind.name: kind.meaning for kind in BUSINESS_KINDS}
    return tuple(
        Example(row["id"], (kind,), "", meanings[kind])
        for kind in kinds
        for row in found.where(F.col("kind") == kind).orderBy("id").head(EXAMPLES_A_KIND)
    )
