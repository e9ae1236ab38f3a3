"""What a run says in the end, out of its verdicts.

Spark adds up; what comes to the driver is as large as the number of groups and topics that are
shown, not as the number of transactions.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from txbroker.spark.schema import KIND_NAMES, Example, Histogram

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
"""Transactions shown for each kind of finding."""
_WHY_MAX = 500


class Tally(NamedTuple):
    """What the verdicts of a run add up to; see `schema.RunSummary`."""

    transactions: int
    carried: int
    states: dict[str, int]
    drift: dict[str, int]
    examples: tuple[Example, ...]
    pending_age: Histogram
    decide_latency: tuple[Histogram, ...]
    visible_latency: tuple[Histogram, ...]


def add_up(verdicts: DataFrame, now_ms: int) -> Tally:
    """Add up the verdicts of a run.

    Args:
        verdicts: as they were written; read twice, and the rows with findings once more.
        now_ms: what the age of pending ones is measured to.
    """
    counts = _counts(verdicts, now_ms).persist()
    try:
        drift = _drift(verdicts)
        states = {row["state"]: (row["n"], row["carried"]) for row in _by_state(counts)}
        return Tally(
            transactions=sum(n for n, _ in states.values()),
            carried=sum(carried for _, carried in states.values()),
            states={state: n for state, (n, _) in sorted(states.items())},
            drift=drift,
            examples=_examples(verdicts, drift),
            pending_age=_pending_age(counts),
            decide_latency=_latencies(counts, "decide", F.lit(True)),
            visible_latency=_latencies(counts, "visible", F.col("state") == "promoted"),
        )
    finally:
        counts.unpersist()


# --- one pass over all rows --------------------------------------------------------------------


def _counts(verdicts: DataFrame, now_ms: int) -> DataFrame:
    """Return how many transactions have the same group, topics, state and buckets."""
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


def _by_state(counts: DataFrame) -> list[Row]:
    return (
        counts.groupBy("state")
        .agg(F.sum("n").alias("n"), F.sum("carried").alias("carried"))
        .collect()
    )


def _pending_age(counts: DataFrame) -> Histogram:
    rows = counts.where("age is not null").groupBy("age").agg(F.sum("n").alias("n")).collect()
    return _histogram("pending", AGE_BOUNDS_MS, {row["age"]: row["n"] for row in rows})


def _latencies(counts: DataFrame, column: str, which: Column) -> tuple[Histogram, ...]:
    """Return a histogram for each of the topics and groups that have the most transactions."""
    measured = counts.where(which & F.col(column).isNotNull())
    topics = measured.select(F.explode("topics").alias("name"), column, "n")
    groups = measured.select(F.col("grp").alias("name"), column, "n").where("name is not null")
    return _most(topics, "topic", column) + _most(groups, "group", column)


def _most(rows: DataFrame, kind: str, column: str) -> tuple[Histogram, ...]:
    buckets = [
        F.sum(F.when(F.col(column) == number, F.col("n")).otherwise(0)).alias(f"b{number}")
        for number in range(len(LATENCY_BOUNDS_MS) + 1)
    ]
    found = (
        rows.groupBy("name")
        .agg(F.sum("n").alias("n"), *buckets)
        .orderBy(F.col("n").desc(), "name")
        .limit(LABELS_MAX)
        .collect()
    )
    return tuple(
        Histogram(
            f"{kind}:{row['name']}",
            LATENCY_BOUNDS_MS,
            tuple(row[f"b{number}"] for number in range(len(LATENCY_BOUNDS_MS) + 1)),
        )
        for row in found
    )


def _histogram(label: str, bounds_ms: tuple[int, ...], counts: dict[int, int]) -> Histogram:
    return Histogram(
        label, bounds_ms, tuple(counts.get(number, 0) for number in range(len(bounds_ms) + 1))
    )


# --- findings ----------------------------------------------------------------------------------


def _found(verdicts: DataFrame) -> DataFrame:
    # A row with findings lies in the folder of the gravest: all others are not even opened.
    return verdicts.where(F.col("verdict").isin(*KIND_NAMES))


def _drift(verdicts: DataFrame) -> dict[str, int]:
    kinds = _found(verdicts).select(F.explode("findings").alias("kind"))
    found = {row["kind"]: row["count"] for row in kinds.groupBy("kind").count().collect()}
    return {kind: found[kind] for kind in KIND_NAMES if kind in found}


def _examples(verdicts: DataFrame, kinds: Iterable[str]) -> tuple[Example, ...]:
    """Return the oldest transactions of each kind of finding."""
    shown = verdicts.select(
        "id",
        "findings",
        F.coalesce("grp", F.lit("")).alias("grp"),
        F.substring(F.coalesce("why", F.lit("")), 1, _WHY_MAX).alias("why"),
        F.coalesce("decided_at_ms", "prepared_at_ms", F.lit(0)).alias("at_ms"),
        "verdict",
    )
    rows: list[Row] = []
    for kind in kinds:
        rows += shown.where(F.col("verdict") == kind).orderBy("at_ms", "id").head(EXAMPLES_A_KIND)
    return tuple(Example(row["id"], tuple(row["findings"]), row["grp"], row["why"]) for row in rows)
