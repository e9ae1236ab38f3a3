"""How far back the topics can prove anything: what retention or compaction removed."""

from collections.abc import Hashable, Mapping, Set
from typing import Protocol, TypeVar

from msgspec import Struct
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from txbroker.spark.judge.rows import ALWAYS, Horizon
from txbroker.spark.schema import SnapshotBounds, TopicRead

_FIRST_OFFSETS = 1000
"""Records that are looked at to tell when a target partition's oldest ones were decided."""
_LAG_MS = 3_600_000
"""By so much the promotion of one half partition may be behind that of another, so that decisions
do not tell exactly what lay below the first offset that is left."""
_TOLD_MS = 86_400_000
"""Tombstones of the parked topic are there for so long at least (`delete.retention.ms`)."""


class StagedFacts(Protocol):
    """The tables of facts; columns as in `schema`."""

    @property
    def half(self) -> DataFrame: ...
    @property
    def op(self) -> DataFrame: ...
    @property
    def visible(self) -> DataFrame: ...
    @property
    def parked(self) -> DataFrame: ...


class StagedCut(StagedFacts, Protocol):
    """The same, with how far everything was read."""

    @property
    def cut(self) -> SnapshotBounds: ...


def horizon_of(staged: StagedCut, decided_ms: int = -1) -> Horizon:
    """Return what retention has left of the topics, told from a run that reads from their starts.

    What comes to the driver is as large as the number of partitions.

    Args:
        decided_ms: no marker that the run has not read is younger than this; -1 where it has read
            all that can matter.
    """
    cut = staged.cut
    half = {p: start for p, start in enumerate(cut.half.starts) if start > 0}
    op = {p: start for p, start in enumerate(cut.op.starts) if start > 0}
    return Horizon(
        half,
        _begins_ms(staged.half, half),
        _begins_ms(staged.op, op),
        _taken_ms(staged, decided_ms),
        _parked_from_ms(staged),
    )


def _begins_ms(table: DataFrame, starts: Mapping[int, int]) -> dict[int, int]:
    """Return the append time of what is left first, by partition of which something was taken."""
    if not starts:
        return {}
    rows = table.groupBy("partition").agg(F.min("at_ms").alias("at_ms")).collect()
    begins = {row["partition"]: row["at_ms"] for row in rows}
    # With nothing left, anything may have been there.
    return {p: begins.get(p, ALWAYS >> 1) for p in starts}


def parked_from_ms(staged: StagedCut, last_ms: int) -> dict[int, int]:
    """Return since when the parked topic tells of every refusal, by partition, to a run that goes
    on from one that ended at `last_ms`: what was parked and dropped in between is there for a
    while."""
    now_ms = max((*staged.cut.op_clock_ms, *staged.cut.half_clock_ms), default=0)
    return _parked_from_ms(staged) if now_ms - last_ms > _TOLD_MS else {}


def _parked_from_ms(staged: StagedCut) -> dict[int, int]:
    """Return since when the parked topic tells of every refusal, by partition; where nothing was
    ever written to it, that is always.

    Compaction drops a copy that has a tombstone before it drops the tombstone. So where both are
    there, it has not been at what follows them.
    """
    written = [p for p, end in enumerate(staged.cut.parked.ends) if end > 0]
    if not written:
        return {}
    now_ms = max((*staged.cut.op_clock_ms, *staged.cut.half_clock_ms), default=0)
    pairs = staged.parked.groupBy("partition", "id", "seq").agg(
        F.min(F.when(~F.col("tombstone"), F.col("offset"))).alias("copy"),
        F.max(F.when(F.col("tombstone"), F.col("offset"))).alias("dropped"),
        F.max(F.when(F.col("tombstone"), F.col("at_ms"))).alias("at_ms"),
    )
    both = pairs.where("copy < dropped").groupBy("partition").agg(F.min("at_ms").alias("at_ms"))
    found = {row["partition"]: row["at_ms"] for row in both.collect()}
    latest_ms = max(now_ms - _TOLD_MS, 0)
    return {p: min(found.get(p, latest_ms), latest_ms) for p in written}


def _taken_ms(staged: StagedCut, decided_ms: int) -> dict[tuple[str, int], int]:
    """Return until when decided messages may have been visible and be gone, by target partition.

    Timestamps there may be the users', so the oldest ones' decisions are looked up. A partition
    of -1 stands for all of a topic's.
    """
    found: dict[tuple[str, int], int] = {}
    cut_short: list[tuple[str, int]] = []
    for target in staged.cut.targets:
        if target.compacted or not (target.starts or target.unread):
            found[target.topic, -1] = ALWAYS
        else:
            cut_short += [(target.topic, p) for p, start in enumerate(target.starts) if start > 0]
    if not cut_short:
        return found
    found.update(dict.fromkeys(cut_short, ALWAYS))
    topics = sorted({topic for topic, _ in cut_short})
    visible = staged.visible.where(F.col("topic").isin(topics))
    first = visible.groupBy("topic", "partition").agg(F.min("offset").alias("first"))
    oldest = visible.join(F.broadcast(first), ["topic", "partition"]).where(
        F.col("offset") < F.col("first") + _FIRST_OFFSETS
    )
    decided = staged.op.where("kind = 'commit'").select("id", F.col("at_ms").alias("decided_ms"))
    until = oldest.select("id", "topic", "partition").join(decided, "id", "left")
    # Without a marker they are older than all that was read.
    rows = until.groupBy("topic", "partition").agg(
        F.coalesce(F.max("decided_ms"), F.lit(decided_ms)).alias("until_ms")
    )
    for row in rows.collect():
        place = row["topic"], row["partition"]
        if place in found:
            until_ms = row["until_ms"]
            found[place] = until_ms + _LAG_MS if until_ms >= 0 else until_ms
    return found


_Key = TypeVar("_Key", bound=Hashable)


class SavedTaken(Struct, frozen=True):
    """Of a target's partition: what was decided no later than this may have been there."""

    topic: str
    partition: int
    until_ms: int


class SavedHorizon(Struct, frozen=True):
    """A `rows.Horizon` in a form that JSON takes."""

    half_start: dict[int, int] = {}
    half_begin_ms: dict[int, int] = {}
    op_begin_ms: dict[int, int] = {}
    taken: tuple[SavedTaken, ...] = ()

    @classmethod
    def of(cls, horizon: Horizon, now_ms: int) -> "SavedHorizon":
        """Return the horizon of a run for those after it.

        Where nothing was left, all of the past is unknown; but what came after `now_ms` was read.
        A topic that was compacted or not there may not be so by then: each run looks anew.
        """
        return cls(
            dict(horizon.half_start),
            {p: min(ms, now_ms) for p, ms in horizon.half_begin_ms.items()},
            {p: min(ms, now_ms) for p, ms in horizon.op_begin_ms.items()},
            tuple(
                SavedTaken(topic, p, min(ms, now_ms))
                for (topic, p), ms in sorted(horizon.taken_ms.items())
            ),
        )

    def read(self) -> Horizon:
        """Return what it was made of."""
        taken_ms = {(each.topic, each.partition): each.until_ms for each in self.taken}
        return Horizon(self.half_start, self.half_begin_ms, self.op_begin_ms, taken_ms)


def without_removed(horizon: Horizon, removed_ms: int | None, half_partitions: int) -> Horizon:
    """Return a horizon behind which earlier runs' facts are unknown because they were removed.

    Args:
        removed_ms: the greatest time in the ids of removed facts; None where nothing was removed.
    """
    if removed_ms is None:
        return horizon
    begin_ms = dict.fromkeys(range(half_partitions), removed_ms)
    half_begin_ms = _later(horizon.half_begin_ms, begin_ms, frozenset(begin_ms))
    return horizon._replace(half_begin_ms=half_begin_ms, removed_ms=removed_ms)


class RetentionGaps(Struct, frozen=True):
    """Partitions in which retention took records that no run has read."""

    half: frozenset[int]
    op: frozenset[int]
    targets: frozenset[tuple[str, int]]
    blind: bool = False
    """Some target is compacted, or no more."""

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return bool(self.half or self.op or self.targets or self.blind)


def gaps_between(before: SnapshotBounds, now: SnapshotBounds) -> RetentionGaps:
    """Return where this run could not read on from where the last one ended."""
    was = {each.topic: each for each in before.targets}
    return RetentionGaps(
        frozenset(_gaps(before.half, now.half)),
        frozenset(_gaps(before.op, now.op)),
        frozenset(
            (each.topic, partition)
            for each in now.targets
            for partition in _gaps(was.get(each.topic), each)
        ),
        any(each.compacted or not (each.ends or each.unread) for each in now.targets),
    )


def _gaps(was: TopicRead | None, now: TopicRead) -> list[int]:
    """A partition that the last run did not know should begin at its very first record."""
    ends = () if was is None else was.ends
    return [
        partition
        for partition, start in enumerate(now.starts)
        if start > (ends[partition] if partition < len(ends) else 0)
    ]


def with_gaps(horizon: Horizon, fresh: Horizon, gaps: RetentionGaps) -> Horizon:
    """Return a horizon to which the gaps before a run were added.

    Args:
        horizon: of the chain so far.
        fresh: as if what this run has read were all there is.
        gaps: which of its partitions count.
    """
    # Of a topic that is compacted, or no more, nothing was ever certain, whatever runs have read.
    whole = {place for place in fresh.taken_ms if place[1] < 0}
    return Horizon(
        _later(horizon.half_start, fresh.half_start, gaps.half),
        _later(horizon.half_begin_ms, fresh.half_begin_ms, gaps.half),
        _later(horizon.op_begin_ms, fresh.op_begin_ms, gaps.op),
        _later(horizon.taken_ms, fresh.taken_ms, gaps.targets | whole),
    )


def _later(was: Mapping[_Key, int], now: Mapping[_Key, int], where: Set[_Key]) -> dict[_Key, int]:
    fresh = {key: value for key, value in now.items() if key in where}
    return {key: max(was.get(key, 0), fresh.get(key, 0)) for key in {**was, **fresh}}
