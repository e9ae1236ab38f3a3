"""Snapshot bounds: the offsets between which a run reads each topic, and the records between them
that Spark cannot hold.

Spark's Kafka connector converts a record's milliseconds to microseconds, and fails where the
product overflows 64 bits. Any producer may write such a timestamp, and no option makes the
connector skip it. So this process reads the offsets from the first such record of a partition to
the last one, in time proportional to the records between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from txbroker.contract.json import TIMESTAMP_MS_MAX
from txbroker.core.records import Record
from txbroker.kafka.tools.audit_access import StoredRecord
from txbroker.spark.access import AuditError, TopicEnds
from txbroker.spark.judge.rows import can_be_topic
from txbroker.spark.schema import SnapshotBounds, TopicRead


def read_on(
    now: TopicEnds, before: TopicRead | None, counted_from: TopicRead | None = None
) -> TopicRead:
    """Return the bounds of a topic: from its start, or from the end of an earlier read.

    Args:
        before: the bounds in the run that this one continues.
        counted_from: the last run's bounds, where this run reads the topic from its start: records
            that retention removed are counted from there.
    """
    was = _reached(before)
    if not _is_same(now, before):
        raise AuditError(
            f"topic {now.topic} is not the topic that the last run read: it was recreated, or this "
            "is another Kafka cluster. Run a full audit (--full)"
        )
    if is_replaced(now, before):
        raise AuditError(
            f"topic {now.topic} ends before the offset that the last run reached: it was "
            "truncated. Run a full audit (--full)"
        )
    positions = (*was, *[0] * (len(now.ends) - len(was)))
    begins = tuple(max(start, old) for start, old in zip(now.starts, positions, strict=True))
    last = counted_from if before is None else before
    taken = _taken(begins, last if _is_same(now, last) else None)
    # Retention may have moved the start beyond the last stable offset read before.
    ends = tuple(max(begin, end) for begin, end in zip(begins, now.ends, strict=True))
    facts = now.compacted, now.open, now.kept_ms, now.id
    return TopicRead(now.topic, now.starts, begins, ends, taken, *facts)


def is_replaced(now: TopicEnds, last: TopicRead | None) -> bool:
    """Return whether records that were last read are gone with their topic, or with its end."""
    was = _reached(last)
    shorter = len(now.ends) < len(was) or any(map(int.__lt__, now.ends, was))
    return shorter or not _is_same(now, last)


def _is_same(now: TopicEnds, last: TopicRead | None) -> bool:
    """Return whether a topic may be the one last read: earlier versions stored no ids, and a topic
    that held nothing may be replaced by any other."""
    return last is None or last.id in ("", now.id) or not _reached(last)


def _reached(last: TopicRead | None) -> tuple[int, ...]:
    """Return the ends that were last read; none of a topic that held nothing: another one may have
    fewer partitions."""
    return () if last is None or not any(last.ends) else last.ends


def _taken(begins: Sequence[int], last: TopicRead | None) -> int:
    """Return how many offsets retention removed between the last run and this one.

    A topic may be older than the first run that reads it, or than its first half message: its first
    offset then proves no loss.
    """
    if last is None or not last.ends:
        return 0
    ends = (*last.ends, *[0] * (len(begins) - len(last.ends)))
    return sum(max(0, begin - end) for begin, end in zip(begins, ends, strict=False))


def read_target(
    topic: str,
    now: TopicEnds | None,
    before: TopicRead | None,
    counted_from: TopicRead | None = None,
    run: str = "",
) -> TopicRead:
    """Return the bounds of a target as `read_on` does, or why it is not read. One that was deleted
    and created again, or truncated, is read from its start.

    Args:
        topic: the name in a half message.
        now: None where the topic does not exist.
        run: the name of this run.
    """
    last = counted_from if before is None else before
    since = "" if last is None else last.since
    why = (now.unread if now else "") if can_be_topic(topic) else "no topic can have this name"
    if why:
        # The next run with the right to read it continues from the last one, if it is the same.
        was = gone(topic) if before is None else before
        was = was if last is None else msgspec.structs.replace(was, id=last.id)
        return msgspec.structs.replace(
            was, begins=was.ends, taken=0, open=(), unread=why, since=since
        )
    if last is not None and _is_another(now, last):
        before, counted_from, since = None, None, run
    read = gone(topic) if now is None else read_on(now, before, counted_from)
    return msgspec.structs.replace(read, since=since)


def _is_another(now: TopicEnds | None, last: TopicRead) -> bool:
    """Return whether a target is not the one last read, or known by its id alone."""
    if last.unread and last.id:
        return now is None or now.id != last.id or is_replaced(now, last)
    return any(last.ends) and (now is None or is_replaced(now, last))


def renewed(before: SnapshotBounds, now: SnapshotBounds) -> frozenset[str]:
    """Return the targets that are not those that the run `before` read: they were deleted, created
    or truncated since."""
    was = {target.topic: target for target in before.targets}
    return frozenset(
        target.topic
        for target in now.targets
        if (last := was.get(target.topic)) is not None
        if target.since != last.since or (target.ends and not (last.ends or last.unread))
    )


def gone(topic: str) -> TopicRead:
    """Return the bounds of a topic that does not exist: its former contents are unknown."""
    return TopicRead(topic, (), (), ())


def to_end(read: TopicRead, now: TopicEnds) -> TopicRead:
    """Extend a read to the topic's current end."""
    check_same([read], {read.topic: now})
    if len(now.ends) != len(read.ends):
        raise AuditError(
            f"partitions were added to topic {read.topic} during the run: run the audit again"
        )
    ends = tuple(max(old, end) for old, end in zip(read.ends, now.ends, strict=True))
    return msgspec.structs.replace(read, ends=ends)


def check_same(reads: Iterable[TopicRead], now: Mapping[str, TopicEnds]) -> None:
    """Check that these topics are still those that a run began to read."""
    for read in reads:
        if read.topic in now and now[read.topic].id not in ("", read.id):
            raise AuditError(
                f"topic {read.topic} was deleted and created again while it was read: run the "
                "audit again"
            )


def from_positions(read: TopicRead, positions: Sequence[int]) -> TopicRead:
    """Return a read that begins at these positions, or later."""
    begins = zip(read.begins, positions, read.ends, strict=True)
    return msgspec.structs.replace(
        read, begins=tuple(min(max(begin, at), end) for begin, at, end in begins)
    )


def held(reads: Iterable[TopicRead], now: Mapping[str, TopicEnds]) -> tuple[str, ...]:
    """Return the partitions, as `topic-0`, that end in the same open transaction as when they were
    read; a successful promotion never stays open that long."""
    return tuple(
        f"{read.topic}-{partition}"
        for read in reads
        for partition in read.open
        if read.topic in now and partition in now[read.topic].open
        if now[read.topic].ends[partition] <= read.ends[partition]
    )


# --- records that Spark cannot hold --------------------------------------------------------------

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
    """Return a record as a row of `topics.KAFKA`."""
    kind = int(getattr(record, "append_time", False))
    headers = list(record.headers) or None
    at = record.offset, record.timestamp_ms
    return record.key, record.value, topic, partition, *at, kind, headers


def _is_far(record: Record) -> bool:
    # A batch that does not decode may hold any timestamp. The connector fails from
    # 9,223,372,036,854,776 on, and uses two calendars before 1582: the limit leaves room for that.
    return not isinstance(record, StoredRecord) or abs(record.timestamp_ms) > TIMESTAMP_MS_MAX
