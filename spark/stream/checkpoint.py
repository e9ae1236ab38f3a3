"""Files in a stream's checkpoint folder: our manifest, and Spark's offsets where they must change.

Spark's offset files record where each batch ends, and the next one begins there. Spark cannot hold
some timestamps (see `overflow`). After such a failure, while no query runs, `read_around` moves the
end of the failed batch to the first such record. Then the next batch fails at its first record, and
the end of the batch before is moved past it. So each stretch of such records costs two restarts.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from txbroker.errors import ConfigurationError
from txbroker.spark.access import AuditKafka
from txbroker.spark.facts.overflow import far_offsets
from txbroker.spark.folders import names_in, read_bytes, write_bytes
from txbroker.spark.judge.rows import ALWAYS, Horizon, kept_from_ms
from txbroker.spark.schema import BrokenRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE = "txbroker-stream.json"
_VERSION = 1


class TakenPartition(Struct, frozen=True):
    """A partition of which records were gone when the stream reached it.

    Attributes:
        topic, partition: the partition.
        start: the first offset kept.
        at_ms: when the stream reached it; `ALWAYS` where records may go at any time.
        kept_ms: the topic's retention time by then; 0 where it is unknown.
    """

    topic: str
    partition: int
    start: int
    at_ms: int
    kept_ms: int = 0


class StreamManifest(Struct, frozen=True, kw_only=True):
    """Facts that live as long as the checkpoint.

    Attributes:
        v: version of the file.
        name: of the stream.
        installation: the half topic; another installation's checkpoint is refused.
        started_ms: when the stream began.
        buckets, slot_ms: layout of the state; fixed.
        targets: topics that half messages name, whether they exist or not.
        read: those of them that the checkpoint knows.
        taken: partitions of which records were gone.
    """

    v: int = _VERSION
    name: str
    installation: str
    started_ms: int
    buckets: int
    slot_ms: int
    targets: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    taken: tuple[TakenPartition, ...] = ()

    def horizon(self, half: str, op: str) -> Horizon:
        """Return the horizon: records that may have gone before the stream came."""
        halves = {taken.partition: taken for taken in self.taken if taken.topic == half}
        ops = {taken.partition: taken.at_ms for taken in self.taken if taken.topic == op}
        targets = [taken for taken in self.taken if taken.topic not in (half, op)]
        at_any_time = {taken.topic for taken in targets if taken.at_ms == ALWAYS}
        return Horizon(
            half_start={number: taken.start for number, taken in halves.items()},
            half_begin_ms={number: taken.at_ms for number, taken in halves.items()},
            op_begin_ms=ops,
            taken_ms={(taken.topic, taken.partition): taken.at_ms for taken in targets},
            kept_from_ms={
                taken.topic: kept_from_ms(taken.at_ms, taken.kept_ms)
                for taken in targets
                if taken.kept_ms and taken.topic not in at_any_time
            },
        )

    def with_taken(self, new: "list[TakenPartition]") -> "StreamManifest":
        """Return the manifest with more such partitions; earlier entries stay."""
        known = {(taken.topic, taken.partition): taken for taken in new}
        for taken in self.taken:
            place = (taken.topic, taken.partition)
            if taken.at_ms == ALWAYS or place not in known:
                known[place] = taken
        return msgspec.structs.replace(self, taken=tuple(known.values()))


def read_home(spark: "SparkSession", checkpoint: str) -> StreamManifest | None:
    """Return a checkpoint's manifest, None where no stream has begun there.

    Raises:
        ConfigurationError: it does not parse, or the folder cannot be used.
    """
    content = read_bytes(spark, _path(checkpoint))
    if content is None:
        return None
    try:
        home = msgspec.json.decode(content, type=StreamManifest)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{_path(checkpoint)} does not parse ({error}): name another --checkpoint"
        ) from None
    if home.v > _VERSION:
        raise ConfigurationError(f"{_path(checkpoint)}: a newer version of txbroker wrote it")
    return home


def write_home(spark: "SparkSession", checkpoint: str, home: StreamManifest) -> None:
    """Store the manifest.

    Raises:
        ConfigurationError: the folder cannot be used.
    """
    write_bytes(spark, _path(checkpoint), msgspec.json.encode(home))


def _path(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/{_FILE}"


_NO_SOURCE = "-"
_HEAD_LINES = 2
"""Spark's version of the file, and settings."""
_WHY = "its timestamp is beyond what Spark can hold"

_Offsets = dict[str, dict[str, int]]
"""Of a source, by topic and partition."""


class _BatchOffsets:
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
    access: AuditKafka,
    set_aside: Callable[[Sequence[BrokenRecord]], None],
) -> bool:
    """Make the failed batch skip records that Spark cannot hold; return whether it has any.

    Args:
        set_aside: stores records that no batch will read any more, before the offsets move.

    Raises:
        ConfigurationError: the checkpoint cannot be used.
        AuditError, KafkaUnavailable: Kafka does not answer.
    """
    folder = f"{checkpoint.rstrip('/')}/offsets"
    number = max((int(name) for name in names_in(spark, folder) if name.isdigit()), default=-1)
    if number < 0:
        return False
    failed = _BatchOffsets(spark, folder, number)
    before = _BatchOffsets(spark, folder, number - 1)
    begins = before.sources or [{} for _ in failed.sources]
    has_far = False
    aside: list[BrokenRecord] = []
    for begin, end in zip(begins, failed.sources, strict=True):
        for topic, partition in [(t, p) for t, of_topic in end.items() for p in of_topic]:
            some = _cut(access, topic, partition, begin, end)
            has_far = has_far or some is not None
            aside += some or []
    if aside:
        set_aside(aside)
    if has_far:
        # This one first: if the second write fails, the next start fails and returns here.
        failed.write()
        if aside:
            before.write()
    return has_far


def _cut(
    access: AuditKafka, topic: str, partition: str, begins: _Offsets, ends: _Offsets
) -> list[BrokenRecord] | None:
    """Let a partition's part of a batch end before its first far record, or begin after the far
    records at its start; return those, None where there is no such record."""
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
    return [BrokenRecord(topic, number, offset, _WHY) for offset in passed]
