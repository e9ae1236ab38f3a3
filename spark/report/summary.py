"""The summary of a run, added up from its verdicts.
Spark adds up; the driver receives data in proportion to the groups and topics that are shown, not
to the number of transactions."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import NamedTuple

from msgspec import structs
from pyspark.sql import Column, DataFrame, Window

from txbroker.spark import expressions as F
from txbroker.spark.business import FINDINGS
from txbroker.spark.facts.messages import id_time_ms
from txbroker.spark.judge.kinds import KIND_NAMES
from txbroker.spark.schema import (
    TEXT_MAX,
    BrokenRecord,
    Example,
    Extract,
    Histogram,
    RunSummary,
    SnapshotBounds,
    Terms,
    TimeSpan,
)
from txbroker.spark.tables.current import is_kept
from txbroker.spark.tables.judged import moment

AGE_BOUNDS_MS = (
    1000, 5000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 21_600_000, 86_400_000, 604_800_000,
)  # fmt: skip
EXAMPLES_A_KIND = 10
"""Examples for each kind of finding."""
SET_ASIDE_SHOWN = 20
"""Unreadable records that are shown."""


class VerdictTotals(NamedTuple):
    """Totals of a run's verdicts; see `schema.RunSummary`. `carried_ms`: the first and last time in
    the ids of carried transactions; `days`: those of all prepares."""

    transactions: int
    carried: int
    states: dict[str, int]
    drift: dict[str, int]
    examples: tuple[Example, ...]
    pending_age: Histogram
    oldest_undecided_ms: int | None
    carried_ms: TimeSpan | None
    days: frozenset[date]


def add_up(verdicts: DataFrame, now_ms: int) -> VerdictTotals:
    """Add up the verdicts of a run; pending transactions have their age at `now_ms`."""
    age = F.when(F.col("state") == "pending", F.lit(now_ms) - F.col("prepared_at_ms"))
    id_ms = F.when(F.col("carry"), id_time_ms(F.col("id")))
    rows = (
        F.select(
            verdicts,
            "state",
            "carry",
            "findings",
            age.alias("age"),
            F.to_date(moment(F.col("prepared_at_ms"))).alias("day"),
            id_ms.alias("id_ms"),
        )
        .groupBy("state", "findings", _bucket(F.col("age"), AGE_BOUNDS_MS).alias("bucket"), "day")
        .agg(
            F.count("*").alias("n"),
            F.count_if("carry").alias("carried"),
            F.max("age").alias("age"),
            F.min("id_ms").alias("first_ms"),
            F.max("id_ms").alias("last_ms"),
        )
        .collect()
    )
    spans = [row for row in rows if row["first_ms"] is not None]
    oldest = [row["age"] for row in rows if row["age"] is not None]
    states, ages, found = Counter[str](), Counter[int](), Counter[str]()
    for row in rows:
        states[row["state"]] += row["n"]
        found.update(dict.fromkeys(row["findings"], row["n"]))
        if row["bucket"] is not None:
            ages[row["bucket"]] += row["n"]
    drift = {kind: found[kind] for kind in KIND_NAMES if kind in found}
    counts = tuple(ages[number] for number in range(len(AGE_BOUNDS_MS) + 1))
    return VerdictTotals(
        transactions=states.total(),
        carried=sum(row["carried"] for row in rows),
        states=dict(sorted(states.items())),
        drift=drift,
        examples=_examples(verdicts, [*drift]),
        pending_age=Histogram("pending", AGE_BOUNDS_MS, counts),
        oldest_undecided_ms=max(oldest, default=None),
        carried_ms=TimeSpan(
            min(row["first_ms"] for row in spans), max(row["last_ms"] for row in spans)
        )
        if spans
        else None,
        days=frozenset(row["day"] for row in rows if row["day"] is not None),
    )


def _bucket(value: Column, bounds_ms: Sequence[int]) -> Column:
    """Return the number of the bucket that a value belongs to, null for null."""
    return sum(((value > bound).cast("int") for bound in bounds_ms), F.lit(0))


# --- records that do not read ------------------------------------------------------------------


class Unread(NamedTuple):
    """Unreadable records: their number, how many of them are ours, and some of them."""

    records: int
    own: int
    shown: tuple[BrokenRecord, ...]


def count_unread(broken: DataFrame, most: int = SET_ASIDE_SHOWN) -> Unread:
    """Count the rows of the table of broken records, and return the first of them, ours before
    others'."""
    columns = ("topic", "partition", "offset", "why", "own")
    all_rows = Window.partitionBy(F.lit(0))
    counted = broken.select(*columns, F.count("*").over(all_rows), F.count_if("own").over(all_rows))
    rows = counted.orderBy(F.col("own").desc(), *columns[:3]).head(most)
    *_, records, own = rows[0] if rows else (0, 0)
    return Unread(records, own, tuple(BrokenRecord(*row[:-2]) for row in rows))


# --- findings ----------------------------------------------------------------------------------


def _examples(verdicts: DataFrame, kinds: Sequence[str]) -> tuple[Example, ...]:
    """Return the oldest transactions of each kind of finding."""
    shown = verdicts.select(
        "id",
        "findings",
        F.substring(F.coalesce("grp", F.lit("")), 1, TEXT_MAX).alias("grp"),
        F.substring(F.coalesce("why", F.lit("")), 1, TEXT_MAX).alias("why"),
        F.coalesce("decided_at_ms", "prepared_at_ms", F.lit(0)).alias("at_ms"),
        "verdict",
    )
    ordered = Window.partitionBy("verdict").orderBy("at_ms", "id")
    first = shown.where(F.col("verdict").isin(*kinds)).withColumn("n", F.row_number().over(ordered))
    rows = first.where(F.col("n") <= EXAMPLES_A_KIND).collect() if kinds else []
    rows.sort(key=lambda row: (kinds.index(row["verdict"]), row["n"]))
    return tuple(Example(row["id"], tuple(row["findings"]), row["grp"], row["why"]) for row in rows)


TOPICS_MAX = 50
"""Topics that are named: those with the most transactions."""


def missing_topics(cut: SnapshotBounds) -> list[str]:
    """Return the targets that did not exist when their ends were asked for."""
    return [target.topic for target in cut.targets if not (target.ends or target.unread)]


def unread_topics(cut: SnapshotBounds) -> dict[str, str]:
    """Return why targets could not be read, by topic; a bounded number of topics."""
    unread = [target for target in cut.targets if target.unread]
    return {target.topic[:TEXT_MAX]: target.unread for target in unread[:TOPICS_MAX]}


def committed_to_missing(
    verdicts: DataFrame, op: str, cut: SnapshotBounds, terms: Terms
) -> DataFrame:
    """Return the transactions that were committed to topics that do not exist, without those that
    are still within their time to become visible.

    Whether a message was visible before its topic was deleted makes no difference: a first run
    cannot know. For the same reason only transactions with a half message that is still there
    count. Refused ones are left out, because their copy is kept.

    Args:
        verdicts: the valid verdict of each transaction.
        op: the operation topic, which has the evidence.

    Returns:
        Columns as in `judged.MISSING`, `decided_at_ms`, and the topics as `missing`.
    """
    names = F.array(*map(F.lit, missing_topics(cut)))
    late = F.col("decided_at_ms") < terms.now_ms - terms.late_after_ms
    over = (
        (F.col("decision") == "commit")
        & (F.col("state") != "refused")
        & ((F.col("state") != "committed") | late)
    )
    missing = verdicts.where(over).withColumn("missing", F.array_intersect("topics", names))
    return missing.where(F.size("missing") > 0).select(
        "id",
        F.lit("target_missing").alias("kind"),
        F.coalesce("grp", F.lit("")).alias("grp"),
        F.lit(op).alias("topic"),
        F.col("half_partition").alias("partition"),
        F.col("op_offset").alias("offset"),
        F.concat(F.lit("committed to "), F.array_join("missing", ", ")).alias("why"),
        is_kept(cut.half).alias("kept"),
        "decided_at_ms",
        "missing",
    )


def _oldest(found: DataFrame, *order: str) -> Iterator[Example]:
    """Yield a few findings with columns as in `judged.FOUND`, the first in an order."""
    for row in found.orderBy(*order).head(EXAMPLES_A_KIND):
        yield Example(row["id"], (row["kind"],), row["grp"][:TEXT_MAX], row["why"][:TEXT_MAX])


def summary_of(run: str, mode: str, staged: Extract, tally: VerdictTotals) -> RunSummary:
    """Return a run's summary without its times and the business."""
    cut, unread = staged.cut, count_unread(staged.broken)
    reads = (cut.half, cut.op, cut.parked, *cut.targets)
    drift = tally.drift | ({"unreadable": unread.own} if unread.own else {})
    totals = tally._asdict() | {"drift": drift}
    del totals["carried_ms"], totals["days"]
    return RunSummary(
        run=run,
        mode=mode,
        started_ms=0,
        took_s=0.0,
        cut=cut,
        records={name: table.rows for name, table in staged.read.items()},
        quarantined=unread.records,
        set_aside=unread.shown,
        unread_targets=unread_topics(cut),
        taken={topic.topic: topic.taken for topic in reads if topic.taken},
        **totals,
    )


def with_topics_and_business(
    summary: RunSummary,
    missing: DataFrame | None,
    business: DataFrame | None,
    compared: Mapping[str, int],
) -> RunSummary:
    """Add the findings about missing topics and of the business to a summary.

    Args:
        missing: of `committed_to_missing`; None: no topic is missing.
        business, compared: findings and counts of `business.compare`; None without a comparison.
    """
    drift, examples = dict(summary.drift), [*summary.examples]
    topics: dict[str, int] = {}
    if missing is not None:
        there = missing.where("kept")
        counts = there.select(F.explode("missing").alias("topic")).groupBy("topic").count()
        most = counts.orderBy(F.col("count").desc(), "topic").head(TOPICS_MAX)
        topics = {row["topic"][:TEXT_MAX]: row["count"] for row in most}
        drift |= {"target_missing": n} if (n := there.count()) else {}
        examples += _oldest(there, "decided_at_ms", "id")
    if business is not None:
        for kind in FINDINGS:
            if compared.get(kind):
                drift[kind] = compared[kind]
                examples += _oldest(business.where(F.col("kind") == kind), "id")
    return structs.replace(
        summary,
        drift=drift,
        missing_targets=topics,
        business=dict(compared),
        examples=tuple(examples),
    )
