"""The streaming query: Kafka records of all topics to findings, through Spark's state store.

The query's watermark does not come from records: an idle topic would hold it back, and the newest
record of one partition would push it past all others. It comes from the stream's *ticks*, which
name the moment up to which every log was read; all other rows have no event time.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from txbroker.spark.facts.messages import (
    half_facts,
    op_facts,
    parked_facts,
    visible_facts,
    with_at_ms,
)
from txbroker.spark.judge import fold, judge, rows
from txbroker.spark.schema import TopicNames
from txbroker.spark.stream import state
from txbroker.spark.stream.state import Bucket, BucketChanges, Fact, StreamFinding, StreamTerms

OUTPUT = (
    "what string, name string, number bigint, id string, grp string, why string, "
    "first_seen_ms bigint, at_ms bigint"
)
"""Output rows: new findings (`what` is `finding`, `name` the kind), changes of counts (`what` and
`name` as in `BucketChanges.counts`), names of targets that are not read (`what` is `target`),
and some unreadable records (`what` is `set_aside`, `why` a `schema.BrokenRecord` as JSON)."""
BROKEN, TICK = "broken", "tick"
"""Tables of rows that are no facts: unreadable records, and the stream's clock."""
SET_ASIDE_MAX = 20
"""Maximum number of unreadable records that are reported with their position."""
_PIECE_CHARS = 8_192


class Texts:
    """A bucket's texts in Spark's state store, in pieces.

    Python must hand Java short values: Spark 4.0 fails on some hundred KiB. Another piece follows
    each full one.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def read(self, name: str) -> str | None:
        pieces: list[str] = []
        while (piece := self._state.getValue(_key(name, len(pieces)))) is not None:
            pieces.append(str(piece[0]))
            if len(pieces[-1]) != _PIECE_CHARS:
                break
        return "".join(pieces) if pieces else None

    def write(self, name: str, text: str | None) -> None:
        starts = () if text is None else range(0, len(text) + 1, _PIECE_CHARS)
        for number, start in enumerate(starts):
            self._state.updateValue(
                _key(name, number), ((text or "")[start : start + _PIECE_CHARS],)
            )
        number = len(starts)
        while self._state.containsKey(_key(name, number)):
            self._state.removeKey(_key(name, number))
            number += 1


def _key(name: str, number: int) -> tuple[str]:
    return (f"{number} {name}" if number else name,)


class TransactionProcessor(StatefulProcessor):
    """Adds new records to a bucket, and examines it when something is due."""

    def __init__(self, terms: StreamTerms) -> None:
        self._terms = terms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Start work on a partition of the state."""
        self._handle = handle
        self._texts = handle.getMapState("texts", "name string", "text string")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        """Add new records."""
        import json

        facts: list[Fact] = []
        broken: list[dict[str, Any]] = []
        for frame in rows:
            columns = (frame[name].tolist() for name in ("table", "id", "facts"))
            for table, id, text in zip(*columns, strict=True):
                if table == BROKEN:
                    broken.append(json.loads(text))
                elif table != TICK:
                    facts.append(Fact(table, id, json.loads(text)))
        heard = self._look(facts, timerValues)
        own = [record for record in broken if record["own"]]
        heard.counts["quarantined", "records"] += len(broken)
        heard.counts["drift", "unreadable"] += len(own)
        heard.drift.extend(_unreadable(record, self._moment_ms(timerValues)) for record in own)
        ours_first = sorted(broken, key=lambda record: not record["own"])[:SET_ASIDE_MAX]
        yield from _frames(heard, [json.dumps(record) for record in ours_first])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[pd.DataFrame]:
        """Examine transactions that are due."""
        yield from _frames(self._look([], timerValues))

    def _look(self, facts: list[Fact], timers: Any) -> BucketChanges:
        moment_ms = self._moment_ms(timers)
        heard = Bucket(Texts(self._texts), self._terms, moment_ms).look(facts)
        if heard.due_ms is not None:
            self._handle.registerTimer(heard.due_ms)
        return heard

    def _moment_ms(self, timers: Any) -> int:
        return max(int(timers.getCurrentWatermarkInMs()), 0)

    def close(self) -> None:
        """End work on a partition of the state."""


def _unreadable(record: dict[str, Any], moment_ms: int) -> StreamFinding:
    """Return the finding of an unreadable record of ours; its position stands for an id."""
    place = f"{record['topic']}-{record['partition']}@{record['offset']}"
    return StreamFinding(place, "unreadable", "", record["why"], moment_ms, moment_ms)


def _frames(heard: BucketChanges, set_aside: Sequence[str] = ()) -> Iterator[pd.DataFrame]:
    rows = [("finding", finding.kind, 1, *_columns(finding)) for finding in heard.drift]
    rows += [(what, name, by, *_NOTHING) for (what, name), by in heard.counts.items() if by]
    rows += [("target", topic, 1, *_NOTHING) for topic in sorted(heard.targets)]
    rows += [("set_aside", "", 1, "", "", text, 0, 0) for text in set_aside]
    if rows:
        names = ["what", "name", "number", "id", "grp", "why", "first_seen_ms", "at_ms"]
        yield pd.DataFrame(rows, columns=names)


_NOTHING = ("", "", "", 0, 0)


def _columns(finding: StreamFinding) -> tuple[str, str, str, int, int]:
    return finding.id, finding.group, finding.why, finding.first_seen_ms, finding.at_ms


GRACE_MS = 2000
"""Delay of the moment after a tick: brokers' clocks differ by less."""
STATE_CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Each batch stores its changes, not all files of the database.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
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
    """

    names: TopicNames
    targets: frozenset[str]
    options: Mapping[str, str]
    tick_key: str
    records_max: int
    lenient: bool = False


def ship_by_value() -> None:
    """Make Spark send our modules to its executors, which need not have txbroker installed."""
    # pyspark pickles with its bundled cloudpickle.
    from pyspark import cloudpickle as sparks

    register: Any = sparks.register_pickle_by_value
    for module in (judge, fold, rows, state, sys.modules[__name__]):
        register(module)


def plan(spark: SparkSession, sources: Sources, terms: StreamTerms, buckets: int) -> DataFrame:
    """Return the stream of findings and changes; see `OUTPUT`."""
    names = sources.names
    # A source needs a topic even while no target is known; the audit topic holds no promoted
    # records.
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
    """Return facts as the state takes them. `topic`: the topic of all rows, where no column
    names it."""
    columns = [column for column in facts.columns if column not in ("id", "why", "own")]
    reads = F.col("why").isNull()
    named = F.col("topic") if topic is None else F.lit(topic).alias("topic")
    aside = F.to_json(F.struct(named, "partition", "offset", "why", "own"))
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
