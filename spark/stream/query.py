"""The stream's state in Spark: a bucket's texts in the state store, and its alarm clock."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from txbroker.spark.facts.markers import op_facts
from txbroker.spark.facts.messages import half_facts, parked_facts, visible_facts, with_at_ms
from txbroker.spark.judge import fold, judge, rows
from txbroker.spark.schema import TopicNames
from txbroker.spark.stream import state
from txbroker.spark.stream.state import Bucket, BucketChanges, Fact, StreamFinding, StreamTerms

OUTPUT = (
    "what string, name string, number bigint, id string, grp string, why string, "
    "first_seen_ms bigint, at_ms bigint"
)
"""What comes out: new findings (`what` is `told`, `name` the kind), changes of counts (`what` and
`name` as in `BucketChanges.counts`), names of targets that are not read (`what` is `target`), and
some records that do not read (`what` is `set_aside`, `why` a `schema.BrokenRecord` as JSON)."""
BROKEN, TICK = "broken", "tick"
"""Tables of rows that are no facts: records that do not read, and the stream's own clock."""
SET_ASIDE_MAX = 20
"""Records that do not read, of which more than the number is told."""
_PIECE_CHARS = 8_192


class Texts:
    """A bucket's texts, in Spark's state store, in pieces.

    What Python hands to Java's side at once must be short: Spark 4.0 fails on some hundred KiB. A
    piece that is full has another one behind it.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def read(self, name: str) -> str | None:
        pieces: list[str] = []
        while (found := self._state.getValue(_key(name, len(pieces)))) is not None:
            pieces.append(str(found[0]))
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
    """Takes a bucket's new records in, and looks again when something is due."""

    def __init__(self, terms: StreamTerms) -> None:
        self._terms = terms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Begin work on a partition of the state."""
        self._handle = handle
        self._texts = handle.getMapState("texts", "name string", "text string")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        """Take new records in."""
        import json

        facts: list[Fact] = []
        broken: list[dict[str, Any]] = []
        for some in rows:
            columns = (some[name].tolist() for name in ("table", "id", "facts"))
            for table, id, text in zip(*columns, strict=True):
                if table == BROKEN:
                    broken.append(json.loads(text))
                elif table != TICK:
                    facts.append(Fact(table, id, json.loads(text)))
        heard = self._look(facts, timerValues)
        own = [each for each in broken if each["own"]]
        heard.counts["quarantined", "records"] += len(broken)
        heard.counts["drift", "unreadable"] += len(own)
        heard.drift.extend(_unreadable(each, self._moment_ms(timerValues)) for each in own)
        ours_first = sorted(broken, key=lambda each: not each["own"])[:SET_ASIDE_MAX]
        yield from _frames(heard, [json.dumps(each) for each in ours_first])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[pd.DataFrame]:
        """Look at what is due."""
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
    """Return the finding of a record of ours that does not read; its place stands for an id."""
    place = f"{record['topic']}-{record['partition']}@{record['offset']}"
    return StreamFinding(place, "unreadable", "", record["why"], moment_ms, moment_ms)


def _frames(heard: BucketChanges, set_aside: Sequence[str] = ()) -> Iterator[pd.DataFrame]:
    rows = [("told", each.kind, 1, *_told(each)) for each in heard.drift]
    rows += [(what, name, by, *_NOTHING) for (what, name), by in heard.counts.items() if by]
    rows += [("target", topic, 1, *_NOTHING) for topic in sorted(heard.targets)]
    rows += [("set_aside", "", 1, "", "", text, 0, 0) for text in set_aside]
    if rows:
        names = ["what", "name", "number", "id", "grp", "why", "first_seen_ms", "at_ms"]
        yield pd.DataFrame(rows, columns=names)


_NOTHING = ("", "", "", 0, 0)


def _told(drift: StreamFinding) -> tuple[str, str, str, int, int]:
    return drift.id, drift.group, drift.why, drift.first_seen_ms, drift.at_ms


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

    names: TopicNames
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
    for module in (judge, fold, rows, state, sys.modules[__name__]):
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
