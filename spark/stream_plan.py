"""The streaming query: Kafka records of all topics to findings, by way of the state.

The query's watermark is not taken from records: an idle topic would hold it back, and the newest
record of one partition would push it past all others. It comes from the stream's *ticks*, which
say up to which moment every log was read; all other rows have no event time.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.spark import judge, life, rows, stream_processor, stream_state
from txbroker.spark.facts import half_facts, op_facts, parked_facts, visible_facts, with_at_ms
from txbroker.spark.schema import Names
from txbroker.spark.stream_processor import BROKEN, OUTPUT, TICK, TransactionProcessor
from txbroker.spark.stream_state import StreamTerms

GRACE_MS = 2000
"""By how much the moment stays behind a tick: brokers' clocks are apart by less."""
STATE_CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # What changed is stored with each batch, and not all files of the database.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}

_RANDOMNESS_AT, _RANDOMNESS_LENGTH = 15, 12
"""Where in an id the last 60 of its 64 random bits are."""


class Sources(Struct, frozen=True):
    """What is read, and how.

    Attributes:
        names: the installation's topics.
        targets: the target topics that exist.
        options: how Spark reaches Kafka.
        tick_key: the key of the stream's ticks in the audit topic.
        records_max: how many records one batch takes from each of the sources.
        lenient: whether records of targets that are gone are passed over; never by default.
    """

    names: Names
    targets: frozenset[str]
    options: Mapping[str, str]
    tick_key: str
    records_max: int
    lenient: bool = False


def ship_by_value() -> None:
    """Have Spark send our modules to its executors, where nothing of ours need be installed."""
    # pyspark brings a cloudpickle of its own and pickles with that one.
    from pyspark import cloudpickle as sparks

    register: Any = sparks.register_pickle_by_value
    for module in (judge, life, rows, stream_state, stream_processor):
        register(module)


def plan(spark: SparkSession, sources: Sources, terms: StreamTerms, buckets: int) -> DataFrame:
    """Return the stream of findings and changes; see `stream_processor.OUTPUT`."""
    names = sources.names
    # A source needs a topic even while no target is known; the audit topic's records are none of
    # a target's.
    targets = [*sorted(sources.targets), names.audit]
    tables = (
        _table("half", half_facts(_read(spark, sources, [names.half])), names.half),
        _table("op", op_facts(_read(spark, sources, [names.op])), names.op),
        _table("parked", parked_facts(_read(spark, sources, [names.parked])), names.parked),
        _table(
            "visible",
            visible_facts(_read(spark, sources, targets, strict=not sources.lenient), names.prefix),
        ),
        _ticks(_read(spark, sources, [names.audit], strict=False, limited=False), sources.tick_key),
    )
    union = tables[0]
    for table in tables[1:]:
        union = union.unionByName(table)
    randomness = F.substring("id", _RANDOMNESS_AT, _RANDOMNESS_LENGTH)
    bucket = F.when(F.col("id").isNull(), 0).otherwise(
        F.pmod(F.xxhash64(randomness), F.lit(buckets)).cast("int")
    )
    return (
        union.withWatermark("moment", f"{GRACE_MS} milliseconds")
        .withColumn("bucket", bucket)
        .groupBy("bucket")
        .transformWithStateInPandas(
            statefulProcessor=TransactionProcessor(terms),
            outputStructType=OUTPUT,
            outputMode="append",
            timeMode="eventTime",
        )
    )


def _read(
    spark: SparkSession,
    sources: Sources,
    topics: Iterable[str],
    *,
    strict: bool = True,
    limited: bool = True,
) -> DataFrame:
    options = {
        **sources.options,
        "subscribe": ",".join(topics),
        "includeHeaders": "true",
        "startingOffsets": "earliest",
        "failOnDataLoss": "true" if strict else "false",
        "kafka.isolation.level": "read_committed",
    }
    if limited:
        options["maxOffsetsPerTrigger"] = str(sources.records_max)
    return with_at_ms(spark.readStream.format("kafka").options(**options).load())


def _table(name: str, facts: DataFrame, topic: str | None = None) -> DataFrame:
    """Return facts as the state takes them. `topic`: of all of them, where no column says it."""
    columns = [column for column in facts.columns if column not in ("id", "why", "own")]
    reads = F.col("why").isNull()
    place = F.col("topic") if topic is None else F.lit(topic).alias("topic")
    aside = F.to_json(F.struct(place, "partition", "offset", "why", "own"))
    return facts.select(
        F.when(reads, F.lit(name)).otherwise(F.lit(BROKEN)).alias("table"),
        F.when(reads, F.col("id")).alias("id"),
        F.when(reads, F.to_json(F.struct(*columns))).otherwise(aside).alias("facts"),
        F.lit(None).cast("timestamp").alias("moment"),
    )


def _ticks(records: DataFrame, key: str) -> DataFrame:
    moment = F.col("value").cast("string").try_cast("bigint")
    return records.where(F.col("key").cast("string") == key).select(
        F.lit(TICK).alias("table"),
        F.lit(None).cast("string").alias("id"),
        F.lit(None).cast("string").alias("facts"),
        F.timestamp_millis(moment).alias("moment"),
    )
