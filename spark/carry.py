"""What a run leaves to the next one: how far it read, and the facts of all that is not finished.

A chain is a full run and the incremental ones after it. Each carries what the next has to look at
again; the facts of all others stay where they are, for `history`.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from functools import reduce
from typing import TypeVar

import msgspec
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.errors import ConfigurationError
from txbroker.spark.dedup import whole_with_key
from txbroker.spark.folders import Folders, read_bytes, write_bytes
from txbroker.spark.history import TABLES, Facts, PastRun, read_facts
from txbroker.spark.id_columns import id_time_ms
from txbroker.spark.rows import Horizon
from txbroker.spark.schema import Cut, Names, TopicRead

_Key = TypeVar("_Key", bound=Hashable)
CHAIN_VERSION = 1
_CHAIN = "chain.json"


class TakenFrom(Struct, frozen=True):
    """Of a target's partition: what was decided no later than this may have been there."""

    topic: str
    partition: int
    until_ms: int


class KeptHorizon(Struct, frozen=True):
    """A `rows.Horizon` in a form that JSON takes."""

    half_start: dict[int, int] = {}
    half_begin_ms: dict[int, int] = {}
    op_begin_ms: dict[int, int] = {}
    taken: tuple[TakenFrom, ...] = ()

    @classmethod
    def of(cls, horizon: Horizon, now_ms: int) -> "KeptHorizon":
        """Return the horizon of a run for those after it.

        Where nothing was left, all of the past is unknown; but what came after `now_ms` was read.
        A topic that was compacted or not there may not be so by then: each run looks anew.
        """
        return cls(
            dict(horizon.half_start),
            {p: min(ms, now_ms) for p, ms in horizon.half_begin_ms.items()},
            {p: min(ms, now_ms) for p, ms in horizon.op_begin_ms.items()},
            tuple(
                TakenFrom(topic, p, min(ms, now_ms))
                for (topic, p), ms in sorted(horizon.taken_ms.items())
            ),
        )

    def read(self) -> Horizon:
        """Return what it was made of."""
        taken_ms = {(each.topic, each.partition): each.until_ms for each in self.taken}
        return Horizon(self.half_start, self.half_begin_ms, self.op_begin_ms, taken_ms)


class Chain(Struct, frozen=True):
    """Where the next run goes on.

    Attributes:
        names: the installation's topics.
        cut: how far the last run read.
        horizon: what retention had left when the chain began, or took between its runs.
        runs: the chain's runs; their facts may be looked up.
        carried: how many transactions are carried.
        keys: whether half messages with a `dedup_key` are.
    """

    names: Names
    cut: Cut
    horizon: KeptHorizon
    runs: tuple[PastRun, ...]
    carried: int
    keys: bool
    version: int = CHAIN_VERSION


class Carried(Struct, frozen=True):
    """What a run has left, as the next one reads it.

    Attributes:
        chain: where to go on.
        facts: of all that was not finished.
        ids: of these; column `id`.
        keys: half messages whose `dedup_key` may void later ones; None where there are none.
    """

    chain: Chain
    facts: Facts
    ids: DataFrame
    keys: DataFrame | None


def read_carried(spark: SparkSession, folders: Folders, run: str) -> Carried:
    """Read what a run has left.

    Raises:
        ConfigurationError: it is not there, or another version wrote it.
    """
    folder = folders.carry(run)
    written = read_bytes(spark, f"{folder}/{_CHAIN}")
    if written is None:
        raise ConfigurationError(
            f"what the last run ({run}) left for this one is not in {folder}: name the output "
            "folder of that run, or run a full audit"
        )
    try:
        chain = msgspec.json.decode(written, type=Chain)
    except msgspec.MsgspecError:
        chain = None
    if chain is None or chain.version != CHAIN_VERSION:
        raise ConfigurationError(
            f"another version of txbroker wrote {folder}/{_CHAIN}: run a full audit"
        )
    if chain.carried:
        facts = Facts(*(read_facts(spark, name, [f"{folder}/{name}"]) for name in TABLES))
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
    else:
        facts = Facts(*(spark.createDataFrame([], ddl) for ddl in TABLES.values()))
        ids = spark.createDataFrame([], "id string")
    keys = read_facts(spark, "half", [f"{folder}/keys"]) if chain.keys else None
    return Carried(chain, facts, ids, keys)


def write_carried(
    spark: SparkSession,
    folders: Folders,
    run: str,
    chain: Chain,
    facts: Facts,
    verdicts: DataFrame,
    keys: DataFrame | None,
) -> None:
    """Write what the next run needs. `verdicts`: of this run; those with `carry` go on."""
    folder = folders.carry(run)
    if chain.carried:
        verdicts.where("carry").select("id").write.parquet(f"{folder}/ids")
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
        id_ms = id_time_ms(F.col("id"))
        ends = ids.agg(F.min(id_ms), F.max(id_ms)).first()
        assert ends is not None
        of_their_time = F.col("id_ms").between(*ends)
        going_on = Facts(*(table.where(of_their_time) for table in facts)).of(ids)
        for name, table in zip(TABLES, going_on, strict=True):
            table.write.parquet(f"{folder}/{name}")
    if chain.keys and keys is not None:
        keys.write.parquet(f"{folder}/keys")
    write_bytes(spark, f"{folder}/{_CHAIN}", msgspec.json.encode(chain))


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


class Gaps(Struct, frozen=True):
    """Partitions in which retention took records that no run has read."""

    half: frozenset[int]
    op: frozenset[int]
    targets: frozenset[tuple[str, int]]
    blind: bool = False
    """Some target is compacted, or no more."""

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return bool(self.half or self.op or self.targets or self.blind)


def gaps_between(before: Cut, now: Cut) -> Gaps:
    """Return where this run could not read on from where the last one ended."""
    was = {each.topic: each for each in before.targets}
    return Gaps(
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


def with_gaps(horizon: Horizon, fresh: Horizon, gaps: Gaps) -> Horizon:
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


def keys_in_window(
    half: DataFrame, before: DataFrame | None, clock_ms: Sequence[int], dedup_window_ms: int
) -> DataFrame:
    """Return half messages with a `dedup_key` that may still void a later one.

    Args:
        half: rows of the half topic that this run has read.
        before: what this came to in the last run, or None.
        clock_ms: the half topic's log clock at the end of this run, by partition.
        dedup_window_ms: how long a key is remembered on it.
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
