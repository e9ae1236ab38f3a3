"""Records of topics as Spark reads them, between the bounds of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from txbroker.spark.access import AuditError, AuditKafka
from txbroker.spark.facts.bounds import FarRanges, around, as_row, chunks
from txbroker.spark.facts.messages import with_at_ms
from txbroker.spark.launch.driver import driver_of
from txbroker.spark.schema import TopicRead

_RECORDS_MIN, _RECORDS_MAX = 10_000, 500_000
"""Bounds of a task's records; the lower one holds if all cores have work."""
_FETCH_BYTES = 8 << 20

KAFKA = """
    key binary, value binary, topic string, partition int, offset bigint, at_ms bigint,
    timestampType int, headers array<struct<key: string, value: binary>>
"""
"""A record of the Kafka source, with Kafka's timestamp."""


class TopicReader:
    """Reads topics of one Kafka cluster."""

    def __init__(self, spark: SparkSession, access: AuditKafka) -> None:
        self._spark = spark
        self._access = access

    def around(self, reads: Sequence[TopicRead], far: FarRanges) -> Iterator[DataFrame]:
        """Yield the records of topics; records on which Spark's connector fails are read in
        this process."""
        for part in around(reads, far):
            yield self.records(part)
        for (topic, partition), (first, last) in far.items():
            for records in chunks(self._access, topic, partition, first, last):
                rows = [as_row(topic, partition, record) for record in records]
                yield self._spark.createDataFrame(rows, KAFKA)

    def records(self, reads: Sequence[TopicRead]) -> DataFrame:
        """Return the committed records of topics, as `KAFKA`."""
        reads = [read for read in reads if read.ends != read.begins]
        if not reads:
            return self._spark.createDataFrame([], KAFKA)
        count = sum(map(count_of, reads))
        cores = driver_of(self._spark).cores
        tasks = max(1, min(2 * cores, count // _RECORDS_MIN), count // _RECORDS_MAX)
        options = {
            **self._access.options,
            "assign": _json({read.topic: list(range(len(read.ends))) for read in reads}),
            "startingOffsets": _json({read.topic: _offsets(read.begins) for read in reads}),
            "endingOffsets": _json({read.topic: _offsets(read.ends) for read in reads}),
            "failOnDataLoss": "true",
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            # Kafka's default of 1 MiB needs eight times as many fetches.
            "kafka.max.partition.fetch.bytes": str(_FETCH_BYTES),
            # Each task makes a consumer for each of its partitions, with all of Kafka's metrics.
            "kafka.auto.include.jmx.reporter": "false",
            "kafka.enable.metrics.push": "false",
            "minPartitions": str(tasks),
        }
        # The connector makes a task for each partition, however few records it has.
        return with_at_ms(self._load(options).coalesce(tasks))

    def _load(self, options: Mapping[str, str]) -> DataFrame:
        with in_words():
            return self._spark.read.format("kafka").options(**options).load()


def count_of(read: TopicRead) -> int:
    """Return the number of offsets between the bounds of a read."""
    return sum(read.ends) - sum(read.begins)


def _offsets(of: Sequence[int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in enumerate(of)}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# --- what goes wrong -------------------------------------------------------------------------

TAKEN_BY_RETENTION = (
    r"(?:OffsetOutOfRange|DATA_LOSS|data may have been lost|aged out|PARTITION_OFFSET_CHANGED)"
)
"""Spark's errors for records that were removed before it read them."""
DELETED_TOPIC = r"(?:UnknownTopicOrPartition|does not host this topic)"
_SENTENCES = (
    (
        r"Not authorized to access topics: \[?([^\]\s]*)",
        "no right to topic {}: grant Describe and Read on it to the audit",
    ),
    (
        r"Not authorized to access group: (\S+)",
        "no right to the consumer group {}: Spark reads with groups of that prefix; grant Read on "
        "them to the audit",
    ),
    (
        TAKEN_BY_RETENTION,
        "retention removed records while the audit read them: run it again; if this error returns, "
        "lengthen the topics' retention beyond the duration of an audit",
    ),
    (
        DELETED_TOPIC,
        "a topic was deleted while it was read: run the audit again",
    ),
    (
        r"(?:Timeout of \d+ms expired before the position|Failed to construct kafka consumer|"
        r"kafka\.common\.errors\.(?:Timeout|Disconnect|SaslAuth|SslAuth)\w*)",
        "Kafka did not answer Spark: check that Spark's executors can reach the brokers",
    ),
)


@contextmanager
def in_words() -> Iterator[None]:
    """Turn Kafka's refusals to Spark into an `AuditError` with the next step; other errors pass."""
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        for pattern, sentence in _SENTENCES:
            match = re.search(pattern, text)
            if match:
                raise AuditError(sentence.format(*match.groups())) from error
        raise
