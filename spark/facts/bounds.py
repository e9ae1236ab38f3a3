"""Snapshot bounds: the offsets between which a run reads each topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from txbroker.spark.access import AuditError, TopicEnds
from txbroker.spark.judge.rows import can_be_topic
from txbroker.spark.schema import TopicRead


def read_on(
    now: TopicEnds, before: TopicRead | None, counted_from: TopicRead | None = None
) -> TopicRead:
    """Return the bounds of a topic: from its start, or from the end of an earlier read.

    Args:
        before: the bounds in the run that this one continues.
        counted_from: the last run's bounds, where this run reads the topic from its start: records
            that retention removed are counted from there.

    Raises:
        AuditError: the topic was recreated or truncated since.
    """
    was = () if before is None else before.ends
    if not _is_same(now, before):
        raise AuditError(
            f"topic {now.topic} is not the topic that the last run read: it was recreated, or this "
            "is another Kafka cluster. Run a full audit (--full)"
        )
    if len(now.ends) < len(was) or any(end < old for end, old in zip(now.ends, was, strict=False)):
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


def _is_same(now: TopicEnds, last: TopicRead | None) -> bool:
    """Return whether a topic may be the one last read: earlier versions stored no ids, and a topic
    that held nothing may be replaced by any other."""
    return last is None or last.id in ("", now.id) or not any(last.ends)


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
) -> TopicRead:
    """Return the bounds of a target as `read_on` does, or why it is not read.

    Args:
        topic: the name in a half message.
        now: the topic's current ends; None: it does not exist.
        before: as in `read_on`.
        counted_from: as in `read_on`.

    Raises:
        AuditError: the topic was recreated or truncated since.
    """
    why = (now.unread if now else "") if can_be_topic(topic) else "no topic can have this name"
    if why:
        # The next run with the right to read it continues from the last one.
        was = gone(topic) if before is None else before
        return msgspec.structs.replace(was, begins=was.ends, taken=0, open=(), unread=why)
    return gone(topic) if now is None else read_on(now, before, counted_from)


def gone(topic: str) -> TopicRead:
    """Return the bounds of a topic that does not exist: its former contents are unknown."""
    return TopicRead(topic, (), (), ())


def to_end(read: TopicRead, now: TopicEnds) -> TopicRead:
    """Extend a read to the topic's current end.

    Raises:
        AuditError: partitions were added to the topic.
    """
    if len(now.ends) != len(read.ends):
        raise AuditError(
            f"partitions were added to topic {read.topic} during the run: run the audit again"
        )
    ends = tuple(max(old, end) for old, end in zip(read.ends, now.ends, strict=True))
    return msgspec.structs.replace(read, ends=ends)


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
