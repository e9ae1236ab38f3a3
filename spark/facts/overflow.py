"""Records whose timestamps Spark cannot hold, and the records between them.
 Spark's Kafka connector converts a record's milliseconds to microseconds, and fails where the
product overflows 64 bits. Any producer may write such a timestamp, and no option makes the
connector skip it. So this process reads the offsets from the first such record of a partition to
the last one, in time proportional to the records between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from txbroker.contract.json import TIMESTAMP_MS_MAX
from txbroker.core.records import Record
from txbroker.kafka.tools.audit_access import Stored
from txbroker.spark.schema import TopicRead

OVERFLOW = "long overflow"
"""Spark's message for a timestamp that it cannot hold."""

FarRanges = Mapping[tuple[str, int], tuple[int, int]]
"""The offset of the first far record and the one after the last, by topic and partition."""


class RecordAccess(Protocol):
    """Reads records without Spark."""

    def some(
        self, topic: str, partition: int, position: int, end: int
    ) -> tuple[Sequence[Record], int]: ...


def find_far(access: RecordAccess, reads: Iterable[TopicRead]) -> FarRanges:
    """Return the far records within the bounds of these reads."""
    ranges: dict[tuple[str, int], tuple[int, int]] = {}
    for read in reads:
        for partition, (begin, end) in enumerate(zip(read.begins, read.ends, strict=True)):
            far = far_offsets(access, read.topic, partition, begin, end)
            if far:
                ranges[read.topic, partition] = far[0], far[-1] + 1
    return ranges


def far_offsets(
    access: RecordAccess, topic: str, partition: int, begin: int, end: int
) -> list[int]:
    """Return the offsets of a partition's far records, between two offsets."""
    pieces = chunks(access, topic, partition, begin, end)
    return [record.offset for records in pieces for record in records if _is_far(record)]


def chunks(
    access: RecordAccess, topic: str, partition: int, begin: int, end: int
) -> Iterator[Sequence[Record]]:
    """Yield the records between two offsets, some tens of MiB at a time."""
    while begin < end:
        records, begin = access.some(topic, partition, begin, end)
        yield records


def around(reads: Sequence[TopicRead], far: FarRanges) -> tuple[list[TopicRead], list[TopicRead]]:
    """Return the bounds before the far records, and those after them."""
    before, after = [], []
    for read in reads:
        bounds = [far.get((read.topic, p), (end, end)) for p, end in enumerate(read.ends)]
        before.append(msgspec.structs.replace(read, ends=tuple(first for first, _ in bounds)))
        after.append(msgspec.structs.replace(read, begins=tuple(last for _, last in bounds)))
    return before, after


def as_row(topic: str, partition: int, record: Record) -> tuple[Any, ...]:
    """Return a record as a row of `extract.KAFKA`."""
    kind = int(getattr(record, "append_time", False))
    headers = list(record.headers) or None
    at = record.offset, record.timestamp_ms
    return record.key, record.value, topic, partition, *at, kind, headers


def _is_far(record: Record) -> bool:
    # A batch that does not decode may hold any timestamp. The connector fails from
    # 9,223,372,036,854,776 on, and uses two calendars before 1582: the limit leaves room for that.
    return not isinstance(record, Stored) or abs(record.timestamp_ms) > TIMESTAMP_MS_MAX
