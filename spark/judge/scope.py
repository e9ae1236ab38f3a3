"""Which transactions a run judges, and how far back their evidence reaches."""

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

from msgspec import structs
from pyspark.sql import DataFrame, SparkSession

from txbroker.spark import expressions as F
from txbroker.spark.facts.bounds import renewed
from txbroker.spark.facts.history import CarriedState, EarlierFacts, as_former, left_of
from txbroker.spark.facts.messages import id_time_ms
from txbroker.spark.folders import Folders, runs_in
from txbroker.spark.judge.group import judge_facts
from txbroker.spark.judge.horizon import (
    SavedHorizon,
    gaps_between,
    horizon_of,
    never_certain,
    parked_from_ms,
    with_gaps,
    without_removed,
    without_topics,
)
from txbroker.spark.judge.rows import Horizon, JudgeTerms, kept_from_ms
from txbroker.spark.schema import Extract, Facts, Part, SnapshotBounds, Terms


class Scope(NamedTuple):
    """What a run judges.

    Attributes:
        facts: of all transactions that it judges, and of `context`.
        horizon: what retention and compaction have left.
        context: transactions that others are compared with; this run does not judge them.
        removed_ms: facts of earlier runs with ids up to this time may have been deleted.
        judged_again: ids that this run judges again although an earlier one did not carry them:
            columns `id` and `id_ms`; None: there are none, or, in a full run, any may be.
        part: the transactions that the run judges; None: all of them.
    """

    facts: Facts
    horizon: Horizon
    context: DataFrame | None = None
    removed_ms: int | None = None
    judged_again: DataFrame | None = None
    part: Part | None = None

    def saved_horizon(self, now_ms: int) -> SavedHorizon:
        """Return the horizon as the next run needs it. `now_ms`: of this run."""
        return SavedHorizon.of(self.horizon, now_ms)


def scope_of(
    spark: SparkSession,
    folders: Folders,
    staged: Extract,
    before: CarriedState | None,
    known: DataFrame | None,
    keep: Callable[[DataFrame], DataFrame],
) -> Scope:
    """Return what a run judges: the facts that it has read, and those of earlier runs that are
    judged along with them.

    Args:
        staged: the facts that the run has read, and its snapshot bounds.
        before: the state that the last run left; None in a full run.
        known: rows of `current.rows_of_topics` for targets that were deleted, created or truncated
            since the last run, or in a full run since any; None: there are none.
        keep: caches a table until the end of the run.
    """
    new, cut = staged.facts, staged.cut
    if before is None:
        return Scope(with_former(new, known, cut), horizon_of(new, cut))
    left = left_of(before.chain.runs, runs_in(spark, folders.facts("")))
    history = EarlierFacts(spark, folders, left, cut.since)
    topics = renewed(before.chain.cut, cut)
    horizon = without_topics(before.chain.horizon.read(), topics)
    gaps = gaps_between(before.chain.cut, cut, topics)
    if gaps:
        # Markers that this run has not read are older than all that it has read.
        decided_ms = max(before.chain.cut.op_clock_ms, default=-1)
        horizon = with_gaps(horizon, horizon_of(new, cut, decided_ms), gaps)
    last_ms = max((*before.chain.cut.op_clock_ms, *before.chain.cut.half_clock_ms), default=0)
    horizon = horizon._replace(parked_from_ms=parked_from_ms(new.parked, cut, last_ms))
    old, judged = before.facts, before.ids
    old = old._replace(visible=as_former(old.visible, topics))
    again: DataFrame | None = None
    strangers = history.strangers(new, before.ids) if staged.rows else None
    if known is not None:
        ended = known.join(before.ids, "id", "left_anti").select("id", "id_ms")
        some = ended if strangers is None else strangers.unionAll(ended)
        strangers = some.groupBy("id").agg(F.first("id_ms").alias("id_ms"))
        new = with_former(new, known, cut)
    if strangers is not None:
        strangers = keep(strangers)
        judged = judged.union(strangers.select("id"))
        earlier = history.facts(strangers)
        if earlier is not None:
            earlier = Facts(*map(keep, earlier))
            old = old | earlier
        again = _judged_again(strangers, earlier, left.removed_ms)
    decided = strangers is not None or before.chain.rows.get("op")
    near = history.neighbours(old, new | old) if decided else None
    if near is None:
        return Scope(new | old, horizon, None, left.removed_ms, again)
    near = keep(near.join(judged, "id", "left_anti"))
    compared = history.facts(near)
    facts = new | old if compared is None else new | old | compared
    return Scope(facts, horizon, near, left.removed_ms, again)


def targets_to_look_up(before: CarriedState | None, cut: SnapshotBounds) -> frozenset[str]:
    """Return the targets of which the rows of earlier runs may not hold any more: in a run that
    does not continue another one, all that were ever deleted or truncated."""
    return frozenset(cut.since) if before is None else renewed(before.chain.cut, cut)


def scope_of_part(staged: Extract, terms: Terms, part: Part, known: DataFrame | None) -> Scope:
    """Return what a run of a part judges: the facts that it has read of these transactions, and of
    those that they are compared with. `known`: as in `scope_of`."""
    near = F.col("id_ms").between(*part.id_times_ms(terms)) | F.col("id_ms").isNull()
    facts = with_former(staged.facts, known, staged.cut)
    facts = Facts(*(table.where(near) for table in facts))
    return Scope(facts, horizon_of(staged.facts, staged.cut), part=part)


def with_former(facts: Facts, known: DataFrame | None, cut: SnapshotBounds) -> Facts:
    """Return facts with the messages that earlier runs have seen in targets that were deleted or
    truncated since. `known`: as in `scope_of`."""
    if known is None or not cut.since:
        return facts
    places = known.where("state = 'promoted'").select("id", "id_ms", "run", F.inline("places"))
    former = [
        (F.col("topic") == topic) & (F.col("run") < since) for topic, since in cut.since.items()
    ]
    rows = places.where(reduce(operator.or_, former)).drop("run")
    rows = rows.withColumn("former", F.lit(True))
    visible = facts.visible.unionByName(rows, allowMissingColumns=True)
    return facts._replace(visible=visible)


def scope_of_stored(
    spark: SparkSession,
    folders: Folders,
    staged: Extract,
    before: CarriedState,
    known: DataFrame | None,
) -> Scope:
    """Return what a run judges again: `staged`, the facts of all runs of a chain. `known`: as in
    `scope_of`."""
    left = left_of(before.chain.runs, runs_in(spark, folders.facts("")))
    parked_ms = parked_from_ms(staged.facts.parked, staged.cut, 0)
    horizon = before.chain.horizon.read()
    # As saved, they are certain from the time of that run on, by clocks that may have gone back.
    taken_ms = {**horizon.taken_ms, **never_certain(staged.cut)}
    horizon = horizon._replace(parked_from_ms=parked_ms, taken_ms=taken_ms)
    facts = with_former(staged.facts, known, staged.cut)
    return Scope(facts, horizon, removed_ms=left.removed_ms)


def _judged_again(
    strangers: DataFrame, known: Facts | None, removed_ms: int | None
) -> DataFrame | None:
    """Return those of `strangers` that an earlier run has judged, as far as its facts are there."""
    if known is None and removed_ms is None:
        return None
    judged = F.lit(False)
    if removed_ms is not None:
        judged = F.col("id_ms").isNull() | (F.col("id_ms") <= removed_ms)
    found = strangers.where(judged)
    if known is not None:
        for table in known:
            found = found.union(table.select("id", "id_ms"))
    return found.groupBy("id").agg(F.first("id_ms").alias("id_ms"))


def judge_scope(
    spark: SparkSession,
    scope: Scope,
    cut: SnapshotBounds,
    terms: Terms,
    path: str,
) -> DataFrame:
    """Judge, and return the verdicts, columns as in `schema.VERDICT`, which lie below the folder
    `path`."""
    horizon = without_removed(scope.horizon, scope.removed_ms, len(cut.half.ends))
    # For this run only: such a transaction may have ended by the next one.
    horizon = horizon._replace(
        open=_open(cut),
        hidden=_hidden(cut),
        kept_from_ms=_kept_from_ms(cut),
        unread=frozenset(target.topic for target in cut.targets if target.unread),
    )
    chosen: Callable[[DataFrame], DataFrame] | None = None
    if scope.context is not None:
        chosen = partial(DataFrame.join, other=scope.context.select("id"), on="id", how="left_anti")
    elif scope.part is not None:
        chosen = partial(_verdicts_of, scope.part)
    given = JudgeTerms(**structs.asdict(terms))
    return judge_facts(spark, scope.facts, given, horizon, path, chosen)


def _verdicts_of(part: Part, rows: DataFrame) -> DataFrame:
    at_ms = F.coalesce("prepared_at_ms", "decided_at_ms", id_time_ms(F.col("id")))
    rows = rows.where((at_ms >= part.from_ms) & (at_ms < part.to_ms))
    if part.groups:
        rows = rows.where(F.col("grp").isin(*part.groups))
    if part.topics:
        rows = rows.where(F.arrays_overlap("topics", F.array(*map(F.lit, part.topics))))
    return rows


def _kept_from_ms(cut: SnapshotBounds) -> dict[str, int]:
    return {
        target.topic: kept_from_ms(cut.asked_ms, target.kept_ms)
        for target in cut.targets
        if target.kept_ms
    }


def _open(cut: SnapshotBounds) -> frozenset[tuple[str, int]]:
    return frozenset((target.topic, p) for target in cut.targets for p in target.open)


def _hidden(cut: SnapshotBounds) -> frozenset[tuple[str, int]]:
    """Return those that one transaction has held open during the whole run."""
    return frozenset((topic, p) for topic, p in _open(cut) if f"{topic}-{p}" in cut.held)
