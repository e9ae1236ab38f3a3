"""How far back the topics can prove anything: what retention or compaction removed."""

from collections.abc import Hashable, Mapping, Set
from typing import TypeVar

from msgspec import Struct
from pyspark.sql import Column, DataFrame

from txbroker.spark import expressions as F
from txbroker.spark.judge.rows import ALWAYS, Horizon
from txbroker.spark.schema import Facts, SnapshotBounds, TopicRead

_FIRST_OFFSETS = 1000
"""Records examined to find when a target partition's oldest messages were decided."""
_LAG_MS = 3_600_000
"""Maximum lag between the promotions of two half partitions: decision times locate the first kept
offset no more exactly than this."""
_TOMBSTONES_MS = 86_400_000
"""Minimum time that tombstones stay in the parked topic (`delete.retention.ms`)."""


def horizon_of(facts: Facts, cut: SnapshotBounds, decided_ms: int = -1) -> Horizon:
    """Return the horizon of a run that reads all topics from their starts.

    `decided_ms`: no marker outside this run is younger than this; -1 where the run has read all
    relevant markers.
    """
    half = {p: start for p, start in enumerate(cut.half.starts) if start > 0}
    op = {p: start for p, start in enumerate(cut.op.starts) if start > 0}
    return Horizon(
        half,
        _begins_ms(facts.half, half),
        _begins_ms(facts.op, op),
        _taken_ms(facts, cut, decided_ms),
        _parked_from_ms(facts.parked, cut),
    )


def _begins_ms(table: DataFrame, starts: Mapping[int, int]) -> dict[int, int]:
    """Return the append time of the first record kept, by partition of which a part was removed."""
    if not starts:
        return {}
    rows = table.groupBy("partition").agg(F.min("at_ms").alias("at_ms")).collect()
    begins = {row["partition"]: row["at_ms"] for row in rows}
    # An empty partition may have held anything.
    return {p: begins.get(p, ALWAYS >> 1) for p in starts}


def parked_from_ms(parked: DataFrame, cut: SnapshotBounds, last_ms: int) -> dict[int, int]:
    """Return since when the parked topic shows every refusal, by partition, for a run that
    continues one that ended at `last_ms`: tombstones of copies dropped in between stay for a
    while."""
    now_ms = max((*cut.op_clock_ms, *cut.half_clock_ms), default=0)
    return _parked_from_ms(parked, cut) if now_ms - last_ms > _TOMBSTONES_MS else {}


def _parked_from_ms(parked: DataFrame, cut: SnapshotBounds) -> dict[int, int]:
    """Return since when the parked topic shows every refusal, by partition; always, where nothing
    was ever written to it.

    Compaction removes a copy before the tombstone that drops it. Where both are present, compaction
    has not reached the records after them.
    """
    written = [p for p, end in enumerate(cut.parked.ends) if end > 0]
    if not written:
        return {}
    now_ms = max((*cut.op_clock_ms, *cut.half_clock_ms), default=0)
    pairs = parked.groupBy("partition", "id", "seq").agg(
        F.min(F.when(~F.col("tombstone"), F.col("offset"))).alias("copy"),
        F.max(F.when(F.col("tombstone"), F.col("offset"))).alias("dropped"),
        F.max(F.when(F.col("tombstone"), F.col("at_ms"))).alias("at_ms"),
    )
    both = pairs.where("copy < dropped").groupBy("partition").agg(F.min("at_ms").alias("at_ms"))
    first_ms = {row["partition"]: row["at_ms"] for row in both.collect()}
    latest_ms = max(now_ms - _TOMBSTONES_MS, 0)
    return {p: min(first_ms.get(p, latest_ms), latest_ms) for p in written}


def _taken_ms(facts: Facts, cut: SnapshotBounds, decided_ms: int) -> dict[tuple[str, int], int]:
    """Return, by target partition, up to which decision time messages may be visible no more.

    Targets may carry users' timestamps, so the decisions of the oldest messages are looked up.
    Partition -1 stands for all partitions of a topic.
    """
    taken = never_certain(cut)
    cut_short: list[tuple[str, int]] = []
    for target in cut.targets:
        if (target.topic, -1) not in taken:
            # Where a run begins later, it reads all records that it needs.
            pairs = zip(target.starts, target.begins, strict=True)
            cut_short += [(target.topic, p) for p, (s, b) in enumerate(pairs) if b == s > 0]
    if not cut_short:
        return taken
    taken.update(dict.fromkeys(cut_short, ALWAYS))
    topics = sorted({topic for topic, _ in cut_short})
    visible = facts.visible.where(F.col("topic").isin(topics))
    first = visible.groupBy("topic", "partition").agg(F.min("offset").alias("first"))
    oldest = visible.join(F.broadcast(first), ["topic", "partition"]).where(
        F.col("offset") < F.col("first") + _FIRST_OFFSETS
    )
    decided = facts.op.where("kind = 'commit'").select("id", F.col("at_ms").alias("decided_ms"))
    until = oldest.select("id", "topic", "partition").join(decided, "id", "left")
    # Messages without a marker are older than everything that was read.
    rows = until.groupBy("topic", "partition").agg(
        F.coalesce(F.max("decided_ms"), F.lit(decided_ms)).alias("until_ms")
    )
    for row in rows.collect():
        place = row["topic"], row["partition"]
        if place in taken:
            until_ms = row["until_ms"]
            taken[place] = until_ms + _LAG_MS if until_ms >= 0 else until_ms
    return taken


def never_certain(cut: SnapshotBounds) -> dict[tuple[str, int], int]:
    """Return the entries of `Horizon.taken_ms` for compacted and missing targets."""
    return {
        (target.topic, -1): ALWAYS
        for target in cut.targets
        if target.compacted or not (target.starts or target.unread)
    }


_Key = TypeVar("_Key", bound=Hashable)


def of_partition(times_ms: Mapping[int, int], partition: Column) -> Column:
    """Return the time of a half partition, 0 where there is none."""
    if not times_ms:
        return F.lit(0)
    pairs = [
        column
        for number, ms in sorted(times_ms.items())
        for column in (F.lit(number).cast("int"), F.lit(ms).cast("bigint"))
    ]
    return F.coalesce(F.try_element_at(F.create_map(*pairs), partition), F.lit(0))


class SavedTaken(Struct, frozen=True):
    """The entry of `Horizon.taken_ms` for one target partition."""

    topic: str
    partition: int
    until_ms: int


class SavedHorizon(Struct, frozen=True):
    """A `rows.Horizon` as JSON can hold it."""

    half_start: dict[int, int] = {}
    half_begin_ms: dict[int, int] = {}
    op_begin_ms: dict[int, int] = {}
    taken: tuple[SavedTaken, ...] = ()

    @classmethod
    def of(cls, horizon: Horizon, now_ms: int) -> "SavedHorizon":
        """Return the horizon of a run for later runs.
        Where nothing was kept, the past is unknown only up to `now_ms`; all later records were
        read. Compacted and missing topics may change, so each run examines them again."""
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
        """Return the saved horizon."""
        taken_ms = {(entry.topic, entry.partition): entry.until_ms for entry in self.taken}
        return Horizon(self.half_start, self.half_begin_ms, self.op_begin_ms, taken_ms)


def without_topics(horizon: Horizon, topics: Set[str]) -> Horizon:
    """Return a horizon that does not know these targets."""
    taken_ms = {place: ms for place, ms in horizon.taken_ms.items() if place[0] not in topics}
    return horizon._replace(taken_ms=taken_ms)


def without_removed(horizon: Horizon, removed_ms: int | None, half_partitions: int) -> Horizon:
    """Return a horizon for which the facts of removed runs are unknown.

    `removed_ms`: greatest time in the ids of removed facts; None where none were removed.
    """
    if removed_ms is None:
        return horizon
    begin_ms = dict.fromkeys(range(half_partitions), removed_ms)
    half_begin_ms = _later(horizon.half_begin_ms, begin_ms, frozenset(begin_ms))
    return horizon._replace(half_begin_ms=half_begin_ms, removed_ms=removed_ms)


class RetentionGaps(Struct, frozen=True):
    """Partitions in which retention removed records that no run has read."""

    half: frozenset[int]
    op: frozenset[int]
    targets: frozenset[tuple[str, int]]
    blind: bool = False
    """Whether a target is compacted or deleted."""

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.half or self.op or self.targets or self.blind)


def gaps_between(
    before: SnapshotBounds, now: SnapshotBounds, renewed: Set[str] = frozenset()
) -> RetentionGaps:
    """Return where this run could not continue at the offset where the last one ended.

    `renewed`: targets that the last run did not read as they are now.
    """
    was = {target.topic: target for target in before.targets if target.topic not in renewed}
    return RetentionGaps(
        frozenset(_gaps(before.half, now.half)),
        frozenset(_gaps(before.op, now.op)),
        frozenset(
            (target.topic, partition)
            for target in now.targets
            for partition in _gaps(was.get(target.topic), target)
        ),
        any(target.compacted or not (target.ends or target.unread) for target in now.targets),
    )


def _gaps(was: TopicRead | None, now: TopicRead) -> list[int]:
    """A partition that the last run did not know should begin at its first record."""
    ends = () if was is None else was.ends
    return [
        partition
        for partition, start in enumerate(now.starts)
        if start > (ends[partition] if partition < len(ends) else 0)
    ]


def with_gaps(horizon: Horizon, fresh: Horizon, gaps: RetentionGaps) -> Horizon:
    """Return a horizon with the gaps before a run added.

    Args:
        horizon: the chain's horizon.
        fresh: the horizon if this run's records were all there ever was.
        gaps: the partitions of `fresh` that count.
    """
    # The contents of a compacted or deleted topic were never certain, no matter what runs have
    # read.
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
