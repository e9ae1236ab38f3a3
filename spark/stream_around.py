"""Having a stream read around records whose timestamps Spark cannot hold; see `far`.

Spark's checkpoint says where each batch ends, and the next one begins there. While no query runs,
the end of the batch that failed is put to the first such record. Once it is there, the next batch
fails at its very beginning: then the end of the batch before is put after that record. So the
query is started again twice for each stretch of such records.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from txbroker.spark.cut import KafkaAccess
from txbroker.spark.far import far_offsets
from txbroker.spark.folders import names_in, read_bytes, write_bytes
from txbroker.spark.schema import SetAside

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_SOURCE = "-"
_HEAD_LINES = 2
"""Spark's version of the file, and settings."""
_WHY = "its timestamp is beyond what Spark can hold"

_Offsets = dict[str, dict[str, int]]
"""Of a source, by topic and partition."""


class _Batch:
    """Where a batch ends, by source."""

    def __init__(self, spark: "SparkSession", folder: str, number: int) -> None:
        self._spark, self._path = spark, f"{folder}/{number}"
        lines = (read_bytes(spark, self._path) or b"").decode().split("\n")
        self._head, sources = lines[:_HEAD_LINES], lines[_HEAD_LINES:]
        self.sources: list[_Offsets] = [
            {} if each == _NO_SOURCE else msgspec.json.decode(each) for each in sources if each
        ]

    def write(self) -> None:
        sources = [
            msgspec.json.encode(each).decode() if each else _NO_SOURCE for each in self.sources
        ]
        write_bytes(self._spark, self._path, "\n".join((*self._head, *sources)).encode())


def read_around(
    spark: "SparkSession",
    checkpoint: str,
    access: KafkaAccess,
    set_aside: Callable[[Sequence[SetAside]], None],
) -> bool:
    """Have the batch that failed read no record that Spark cannot; return whether it holds one.

    Args:
        set_aside: stores those that no batch will read from now on, before that is so.

    Raises:
        ConfigurationError: the checkpoint cannot be used.
        AuditError, KafkaUnavailable: Kafka does not answer.
    """
    folder = f"{checkpoint.rstrip('/')}/offsets"
    number = max((int(name) for name in names_in(spark, folder) if name.isdigit()), default=-1)
    if number < 0:
        return False
    failed = _Batch(spark, folder, number)
    before = _Batch(spark, folder, number - 1)
    begins = before.sources or [{} for _ in failed.sources]
    found = False
    aside: list[SetAside] = []
    for begin, end in zip(begins, failed.sources, strict=True):
        for topic, partition in [(t, p) for t, of_topic in end.items() for p in of_topic]:
            some = _cut(access, topic, partition, begin, end)
            found = found or some is not None
            aside += some or []
    if aside:
        set_aside(aside)
    if found:
        # This one first: where the second write fails, the next start fails and comes here again.
        failed.write()
        if aside:
            before.write()
    return found


def _cut(
    access: KafkaAccess, topic: str, partition: str, begins: _Offsets, ends: _Offsets
) -> list[SetAside] | None:
    """Let a partition's part of a batch end before its first far record, or begin after those
    that it begins with; return these, None where there is no such record."""
    number, end = int(partition), ends[topic][partition]
    begin = begins.get(topic, {}).get(partition, -1)
    start = begin if begin >= 0 else access.ends((topic,))[topic].starts[number]
    far = far_offsets(access, topic, number, start, end)
    if not far:
        return None
    if begin < 0 or far[0] > begin:
        ends[topic][partition] = far[0]
        return []
    passed = [offset for at, offset in enumerate(far) if offset == begin + at]
    begins[topic][partition] = passed[-1] + 1
    if len(passed) < len(far):
        ends[topic][partition] = far[len(passed)]
    return [SetAside(topic, number, offset, _WHY) for offset in passed]
