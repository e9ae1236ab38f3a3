"""What a run leaves to the next one: how far it read, and the facts of all that is not finished.

A chain is a full run and the incremental ones after it. Each carries what the next has to look at
again; the facts of all others stay where they are, for `history`.
"""

from collections.abc import Sequence
from functools import reduce

import msgspec
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.errors import ConfigurationError
from txbroker.spark.facts.history import TABLES, Facts, PastRun, read_facts
from txbroker.spark.facts.log_rules import whole_with_key
from txbroker.spark.facts.messages import id_time_ms
from txbroker.spark.folders import Folders, read_bytes, write_bytes
from txbroker.spark.judge.horizon import SavedHorizon
from txbroker.spark.schema import SnapshotBounds, TopicNames

CHAIN_VERSION = 1
_CHAIN = "chain.json"


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

    names: TopicNames
    cut: SnapshotBounds
    horizon: SavedHorizon
    runs: tuple[PastRun, ...]
    carried: int
    keys: bool
    version: int = CHAIN_VERSION


class CarriedState(Struct, frozen=True):
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


def read_carried(spark: SparkSession, folders: Folders, run: str) -> CarriedState:
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
