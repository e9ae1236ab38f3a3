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
from txbroker.spark import schema
from txbroker.spark.facts import id_time_ms
from txbroker.spark.folders import Folders, read_bytes, write_bytes
from txbroker.spark.history import TABLES, Facts, PastRun, read_facts
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
    def of(cls, horizon: Horizon) -> "KeptHorizon":
        """Return the same horizon."""
        return cls(
            dict(horizon.half_start),
            dict(horizon.half_begin_ms),
            dict(horizon.op_begin_ms),
            tuple(TakenFrom(*place, ms) for place, ms in sorted(horizon.taken_ms.items())),
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
    """

    names: Names
    cut: Cut
    horizon: KeptHorizon
    runs: tuple[PastRun, ...]
    carried: int
    version: int = CHAIN_VERSION


class Carried(Struct, frozen=True):
    """What a run has left, as the next one reads it.

    Attributes:
        chain: where to go on.
        facts: of all that was not finished.
        ids: of these; column `id`.
        keys: half messages whose `dedup_key` may void later ones.
    """

    chain: Chain
    facts: Facts
    ids: DataFrame
    keys: DataFrame


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
    facts = Facts(*(read_facts(spark, name, [f"{folder}/{name}"]) for name in TABLES))
    ids = spark.read.schema("id string").parquet(f"{folder}/ids")
    keys = spark.read.schema(schema.HALF).parquet(f"{folder}/keys")
    return Carried(chain, facts, ids, keys)


def write_carried(
    spark: SparkSession,
    folders: Folders,
    run: str,
    chain: Chain,
    facts: Facts,
    verdicts: DataFrame,
    keys: DataFrame,
) -> None:
    """Write what the next run needs. `verdicts`: of this run; those with `carry` go on."""
    folder = folders.carry(run)
    ids = verdicts.where("carry").select("id")
    if chain.carried:
        ids.write.parquet(f"{folder}/ids")
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
        ends = ids.agg(F.min(id_time_ms(F.col("id"))), F.max(id_time_ms(F.col("id")))).first()
        assert ends is not None
        young = F.col("id_ms").between(*ends)
        going_on = Facts(*(table.where(young) for table in facts)).of(ids)
    else:
        ids.limit(0).write.parquet(f"{folder}/ids")
        going_on = Facts(*(table.limit(0) for table in facts))
    for name, table in zip(TABLES, going_on, strict=True):
        table.write.parquet(f"{folder}/{name}")
    keys.write.parquet(f"{folder}/keys")
    write_bytes(spark, f"{folder}/{_CHAIN}", msgspec.json.encode(chain))


class Gaps(Struct, frozen=True):
    """Partitions in which retention took records that no run has read."""

    half: frozenset[int]
    op: frozenset[int]
    targets: frozenset[tuple[str, int]]

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return bool(self.half or self.op or self.targets)


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
    return Horizon(
        _later(horizon.half_start, fresh.half_start, gaps.half),
        _later(horizon.half_begin_ms, fresh.half_begin_ms, gaps.half),
        _later(horizon.op_begin_ms, fresh.op_begin_ms, gaps.op),
        _later(horizon.taken_ms, fresh.taken_ms, gaps.targets),
    )


def _later(was: Mapping[_Key, int], now: Mapping[_Key, int], where: Set[_Key]) -> dict[_Key, int]:
    fresh = {key: value for key, value in now.items() if key in where}
    return {key: max(was.get(key, 0), fresh.get(key, 0)) for key in {**was, **fresh}}


def keys_in_window(half: DataFrame, clock_ms: Sequence[int], dedup_window_ms: int) -> DataFrame:
    """Return half messages with a `dedup_key` that may still void a later one.

    Args:
        half: rows of the half topic, old and new.
        clock_ms: the half topic's log clock at the end of this run, by partition.
        dedup_window_ms: how long a key is remembered on it.
    """
    keyed = half.where("seq = 0 and dedup is not null and void is null")
    if not clock_ms:
        return keyed
    recent = [
        (F.col("partition") == partition) & (F.col("clock_ms") >= clock - dedup_window_ms)
        for partition, clock in enumerate(clock_ms)
    ]
    return keyed.where(reduce(lambda one, other: one | other, recent))
