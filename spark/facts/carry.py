"""State that a run leaves to the next one: how far it read, and the facts of open transactions.
 A chain is a full run and the incremental runs after it. Each carries the facts that the next run
has to judge again; all others stay in their files, for `history`."""

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
    """Where the next run continues.

    Attributes:
        names: the installation's topics.
        cut: the last run's snapshot bounds.
        horizon: what retention had left when the chain began, or removed between its runs.
        runs: the chain's runs; their facts may be looked up.
        carried: number of carried transactions.
        keys: whether half messages with a `dedup_key` are carried.
    """

    names: TopicNames
    cut: SnapshotBounds
    horizon: SavedHorizon
    runs: tuple[PastRun, ...]
    carried: int
    keys: bool
    version: int = CHAIN_VERSION


class CarriedState(Struct, frozen=True):
    """The state that a run left, as the next one reads it.

    Attributes:
        chain: where to continue.
        facts: facts of open transactions.
        ids: their ids; column `id`.
        keys: half messages whose `dedup_key` may void later ones; None where there are none.
    """

    chain: Chain
    facts: Facts
    ids: DataFrame
    keys: DataFrame | None


def read_carried(spark: SparkSession, folders: Folders, run: str) -> CarriedState:
    """Read the state that a run left.

    Raises:
        ConfigurationError: it is missing, or another version wrote it.
    """
    folder = folders.carry(run)
    written = read_bytes(spark, f"{folder}/{_CHAIN}")
    if written is None:
        raise ConfigurationError(
            f"the state that the last run ({run}) left is not in {folder}: name that run's output "
            "folder with --out, or run a full audit (--full)"
        )
    try:
        chain = msgspec.json.decode(written, type=Chain)
    except msgspec.MsgspecError:
        chain = None
    if chain is None or chain.version != CHAIN_VERSION:
        raise ConfigurationError(
            f"another version of txbroker wrote {folder}/{_CHAIN}: run a full audit (--full)"
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
    """Write the state for the next run. `verdicts`: of this run; those with `carry` are carried."""
    folder = folders.carry(run)
    if chain.carried:
        verdicts.where("carry").select("id").write.parquet(f"{folder}/ids")
        ids = spark.read.schema("id string").parquet(f"{folder}/ids")
        id_ms = id_time_ms(F.col("id"))
        ends = ids.agg(F.min(id_ms), F.max(id_ms)).first()
        assert ends is not None
        in_time_span = F.col("id_ms").between(*ends)
        open_facts = Facts(*(table.where(in_time_span) for table in facts)).of(ids)
        for name, table in zip(TABLES, open_facts, strict=True):
            table.write.parquet(f"{folder}/{name}")
    if chain.keys and keys is not None:
        keys.write.parquet(f"{folder}/keys")
    write_bytes(spark, f"{folder}/{_CHAIN}", msgspec.json.encode(chain))


def keys_in_window(
    half: DataFrame, before: DataFrame | None, clock_ms: Sequence[int], dedup_window_ms: int
) -> DataFrame:
    """Return half messages with a `dedup_key` that may still void a later one.

    Args:
        half: half facts of this run.
        before: the last run's result, or None.
        clock_ms: the half topic's log clock at the end of this run, by partition.
        dedup_window_ms: how long a key is held.
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
