"""The streaming query: Kafka records of all topics to findings, through Spark's state store.

Every bucket reads every tick of the stream, a record that names the moment up to which all logs
were read. Spark's watermark is not used: it would take effect a batch later.
"""

import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from txbroker.spark import expressions as F
from txbroker.spark.facts.messages import (
    half_facts,
    op_facts,
    parked_facts,
    visible_facts,
    with_at_ms,
)
from txbroker.spark.judge import fold, judge, kinds, rows
from txbroker.spark.schema import TopicNames
from txbroker.spark.stream import state
from txbroker.spark.stream.state import (
    Bucket,
    BucketChanges,
    Fact,
    FindingChange,
    StreamTerms,
    Tick,
)

FINDING = {
    "state": "",
    "id": "",
    "kind": "",
    "group": "",
    "why": "",
    "at_ms": 0,
    "first_ms": 0,
    "last_ms": 0,
    "topic": "",
    "partition": -1,
    "offset": -1,
}
"""Columns of a finding, with the values that stand for none."""
OUTPUT = "what string, name string, number bigint, " + ", ".join(
    f"`{name}` {'string' if none == '' else 'bigint'}" for name, none in FINDING.items()
)
"""Output rows: changes of findings (`what` is `finding`), changes of counts (`what` and `name` as
in `BucketChanges.counts`), names of targets that are not read (`what` is `target`), and some
unreadable records (`what` is `set_aside`, `why` a `schema.BrokenRecord` as JSON)."""
TARGETS_SOURCE = 3
"""Number of the source of targets in Spark's offset files."""
BROKEN, TICK = "broken", "tick"
"""Tables of rows that are no facts: unreadable records, and the stream's ticks."""
SET_ASIDE_MAX = 20
"""Maximum number of unreadable records that are reported with their position."""
GRACE_MS = 2000
"""Delay of the moment after a tick: brokers' clocks differ by less, and the end of a Kafka
transaction reaches all its partitions within this time."""
_PIECE_BYTES = 8_192


class Texts:
    """A bucket's texts in Spark's state store: compressed, and in pieces.

    Python must hand Java short values: Spark 4.0 fails on some hundred KiB. Another piece follows
    each full one.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def read(self, name: str) -> str | None:
        pieces: list[bytes] = []
        while (piece := self._state.getValue(_key(name, len(pieces)))) is not None:
            pieces.append(bytes(piece[0]))
            if len(pieces[-1]) != _PIECE_BYTES:
                break
        return zlib.decompress(b"".join(pieces)).decode() if pieces else None

    def write(self, name: str, text: str | None) -> None:
        packed = b"" if text is None else zlib.compress(text.encode(), 1)
        starts = () if text is None else range(0, len(packed) + 1, _PIECE_BYTES)
        for number, start in enumerate(starts):
            piece = packed[start : start + _PIECE_BYTES]
            self._state.updateValue(_key(name, number), (piece,))
        number = len(starts)
        while self._state.containsKey(_key(name, number)):
            self._state.removeKey(_key(name, number))
            number += 1


def _key(name: str, number: int) -> tuple[str]:
    return (f"{number} {name}" if number else name,)


class TransactionProcessor(StatefulProcessor):
    """Adds new records to a bucket, and examines it with each tick."""

    def __init__(self, terms: StreamTerms) -> None:
        self._terms = terms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Start work on a partition of the state."""
        self._texts = handle.getMapState("texts", "name string", "piece binary")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        """Add new records, and examine due transactions."""
        facts: list[Fact] = []
        ticks: list[Tick] = []
        broken: list[dict[str, Any]] = []
        for frame in rows:
            columns = (frame[name].tolist() for name in ("table", "id", "facts"))
            for table, id, text in zip(*columns, strict=True):
                if table == BROKEN:
                    broken.append(json.loads(text))
                elif table == TICK:
                    at_ms, moment_ms = json.loads(text)
                    ticks.append(Tick(at_ms, max(moment_ms - GRACE_MS, 0)))
                else:
                    facts.append(Fact(table, id, json.loads(text)))
        bucket = Bucket(Texts(self._texts), self._terms)
        changes = bucket.look(facts, ticks)
        own = [record for record in broken if record["own"]]
        changes.counts["quarantined", "records"] += len(broken)
        changes.counts["drift", "unreadable"] += len(own)
        changes.findings.extend(_unreadable(record, bucket.moment_ms) for record in own)
        ours_first = sorted(broken, key=lambda record: not record["own"])[:SET_ASIDE_MAX]
        yield from _frames(changes, [json.dumps(record) for record in ours_first])

    def close(self) -> None:
        """End work on a partition of the state."""


def _unreadable(record: dict[str, Any], moment_ms: int) -> FindingChange:
    """Return the finding of an unreadable record of ours; its position stands for an id."""
    topic, partition, offset = record["topic"], record["partition"], record["offset"]
    return FindingChange(
        "opened",
        f"{topic}-{partition}@{offset}",
        "unreadable",
        "",
        record["why"],
        *(moment_ms, moment_ms, moment_ms),
        *(topic, partition, offset),
    )


def _frames(changes: BucketChanges, set_aside: Sequence[str] = ()) -> Iterator[pd.DataFrame]:
    none = tuple(FINDING.values())
    rows: list[tuple[Any, ...]] = [
        ("finding", finding.kind, 1, *map(_given, finding, none)) for finding in changes.findings
    ]
    # Counts of drift that add up to nothing show that there are findings.
    counts = changes.counts.items()
    rows += [(what, name, by, *none) for (what, name), by in counts if by or what == "drift"]
    rows += [("target", topic, 1, *none) for topic in sorted(changes.targets)]
    rows += [("set_aside", "", 1, *{**FINDING, "why": text}.values()) for text in set_aside]
    if rows:
        yield pd.DataFrame(rows, columns=["what", "name", "number", *FINDING])


def _given(value: Any, none: Any) -> Any:
    return none if value is None else value


STATE_CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Each batch stores its changes, not all files of the database.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # All parts of the state share one cache, which otherwise grows with their number.
    "spark.sql.streaming.stateStore.rocksdb.boundedMemoryUsage": "true",
    "spark.sql.streaming.stateStore.rocksdb.maxMemoryUsageMB": "256",
    # Spark would read each key before it is written; the stream counts its transactions itself.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # A restart needs the last batch only. Older ones fill the checkpoint folder.
    "spark.sql.streaming.minBatchesToRetain": "10",
}

_RANDOMNESS_AT, _RANDOMNESS_LENGTH = 15, 12
"""Where in an id the last 60 of its 64 random bits are."""


class Sources(Struct, frozen=True):
    """The sources and how they are read.

    Attributes:
        names: the installation's topics.
        targets: the target topics that exist.
        options: Spark's connection options for Kafka.
        tick_key: key of the stream's ticks in the audit topic.
        records_max: records that one batch reads from each source.
        lenient: whether missing records of targets are skipped; never by default.
        starts: first offsets of a new stream by topic and partition, of all its partitions; of
            other topics it reads all.
    """

    names: TopicNames
    targets: frozenset[str]
    options: Mapping[str, str]
    tick_key: str
    records_max: int
    lenient: bool = False
    starts: Mapping[str, Mapping[str, int]] = {}

    @property
    def topics(self) -> list[str]:
        """All topics that are judged."""
        return [self.names.half, self.names.op, self.names.parked, *sorted(self.targets)]


def ship_by_value() -> None:
    """Make Spark send our modules to its executors, which need not have txbroker installed."""
    # pyspark pickles with its bundled cloudpickle.
    from pyspark import cloudpickle as sparks

    register: Any = sparks.register_pickle_by_value
    for module in (judge, fold, kinds, rows, state, sys.modules[__name__]):
        register(module)


def plan(spark: SparkSession, sources: Sources, terms: StreamTerms, buckets: int) -> DataFrame:
    """Return the stream of findings and changes; see `OUTPUT`."""
    names = sources.names
    # A source needs a topic even while no target is known; the audit topic holds no promoted
    # records.
    targets = [*sorted(sources.targets), names.audit]
    visible = visible_facts(
        _read(spark, sources, targets, strict=not sources.lenient), names.prefix
    )
    ticks = _read(spark, sources, [names.audit], strict=False, limited=False)
    tables = (
        _table("half", half_facts(_read(spark, sources, [names.half])), buckets, names.half),
        _table("op", op_facts(_read(spark, sources, [names.op])), buckets, names.op),
        _table(
            "parked", parked_facts(_read(spark, sources, [names.parked])), buckets, names.parked
        ),
        _table("visible", visible, buckets),
        _ticks(ticks, sources.tick_key, buckets),
    )
    union = tables[0]
    for table in tables[1:]:
        union = union.unionByName(table)
    return union.groupBy("bucket").transformWithStateInPandas(
        statefulProcessor=TransactionProcessor(terms),
        outputStructType=OUTPUT,
        outputMode="append",
        timeMode="none",
    )


def _read(
    spark: SparkSession,
    sources: Sources,
    topics: Sequence[str],
    *,
    strict: bool = True,
    limited: bool = True,
) -> DataFrame:
    options = {
        **sources.options,
        "subscribe": ",".join(topics),
        "includeHeaders": "true",
        "startingOffsets": _begins(sources, topics),
        "failOnDataLoss": "true" if strict else "false",
        "kafka.isolation.level": "read_committed",
    }
    if limited:
        options["maxOffsetsPerTrigger"] = str(sources.records_max)
    return with_at_ms(spark.readStream.format("kafka").options(**options).load())


def _begins(sources: Sources, topics: Sequence[str]) -> str:
    if not sources.starts:
        return "earliest"
    return json.dumps({topic: dict(sources.starts[topic]) for topic in topics})


def _table(name: str, facts: DataFrame, buckets: int, topic: str | None = None) -> DataFrame:
    """Return facts as the state takes them. `topic`: the topic of all rows, where no column
    names it."""
    columns = [column for column in facts.columns if column not in ("id", "why", "own")]
    reads = F.col("why").isNull()
    named = F.col("topic") if topic is None else F.lit(topic).alias("topic")
    aside = F.to_json(F.struct(named, "partition", "offset", "why", "own"))
    randomness = F.substring("id", _RANDOMNESS_AT, _RANDOMNESS_LENGTH)
    bucket = F.pmod(F.xxhash64(randomness), F.lit(buckets)).cast("int")
    return facts.select(
        F.when(reads, F.lit(name)).otherwise(F.lit(BROKEN)).alias("table"),
        F.when(reads, F.col("id")).alias("id"),
        F.when(reads, F.to_json(F.struct(*columns))).otherwise(aside).alias("facts"),
        F.when(reads, bucket).otherwise(0).alias("bucket"),
    )


def _ticks(records: DataFrame, key: str, buckets: int) -> DataFrame:
    moment = F.col("value").cast("string").try_cast("bigint")
    return records.where(F.col("key").cast("string") == key).select(
        F.lit(TICK).alias("table"),
        F.lit(None).cast("string").alias("id"),
        F.to_json(F.array("at_ms", F.coalesce(moment, F.lit(0)))).alias("facts"),
        F.explode(F.sequence(F.lit(0), F.lit(buckets - 1))).alias("bucket"),
    )
