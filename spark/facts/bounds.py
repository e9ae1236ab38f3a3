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
    """Return how a topic is read: all of it, or from where it was read before.

    Args:
        before: how it was read by the run that this one goes on from.
        counted_from: how it was read last, where it is read from its start again: what retention
            took is counted from there on.

    Raises:
        AuditError: it is not the topic that was read before.
    """
    was = () if before is None else before.ends
    if not _is_same(now, before):
        raise AuditError(
            f"topic {now.topic} is another one than was read before: it was made anew, or this is "
            "another Kafka. Run a full audit"
        )
    if len(now.ends) < len(was) or any(end < old for end, old in zip(now.ends, was, strict=False)):
        raise AuditError(
            f"topic {now.topic} ends before it was read up to: it was truncated. Run a full audit"
        )
    wanted = (*was, *[0] * (len(now.ends) - len(was)))
    begins = tuple(max(start, old) for start, old in zip(now.starts, wanted, strict=True))
    last = counted_from if before is None else before
    taken = _taken(begins, last if _is_same(now, last) else None)
    # Retention may have taken what was below the last stable offset in the meantime.
    ends = tuple(max(begin, end) for begin, end in zip(begins, now.ends, strict=True))
    told = now.compacted, now.open, now.kept_ms, now.id
    return TopicRead(now.topic, now.starts, begins, ends, taken, *told)


def _is_same(now: TopicEnds, last: TopicRead | None) -> bool:
    """Say whether a topic may be the one that was read last, as far as it matters: earlier versions
    kept no ids, and of one that had held nothing any other will do."""
    return last is None or last.id in ("", now.id) or not any(last.ends)


def _taken(begins: Sequence[int], last: TopicRead | None) -> int:
    """Return how many offsets retention took since the last run, and before this one.

    A topic may be older than the first run that reads it, or than its first half message: where it
    begins then tells nothing of what it held.
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
    """Return how a target is read: as `read_on` says, or why it is not read.

    Args:
        topic: as a half message names it.
        now: what of it can be read; None: it does not exist.
        before: as in `read_on`.
        counted_from: as in `read_on`.

    Raises:
        AuditError: it is not the topic that was read before.
    """
    why = (now.unread if now else "") if can_be_topic(topic) else "no topic can have this name"
    if why:
        # The next run that may read it goes on from where the last one has.
        was = gone(topic) if before is None else before
        return msgspec.structs.replace(was, begins=was.ends, taken=0, open=(), unread=why)
    return gone(topic) if now is None else read_on(now, before, counted_from)


def gone(topic: str) -> TopicRead:
    """Return how a topic is read that exists no more: nothing can be said about what it held."""
    return TopicRead(topic, (), (), ())


def to_end(read: TopicRead, now: TopicEnds) -> TopicRead:
    """Return a read that goes on to where the topic ends now.

    Raises:
        AuditError: the topic is not the same any more.
    """
    if len(now.ends) != len(read.ends):
        raise AuditError(f"topic {read.topic} was given other partitions meanwhile: run again")
    ends = tuple(max(old, end) for old, end in zip(read.ends, now.ends, strict=True))
    return msgspec.structs.replace(read, ends=ends)


def held(reads: Iterable[TopicRead], now: Mapping[str, TopicEnds]) -> tuple[str, ...]:
    """Return the partitions, as `topic-0`, that ended in an open transaction and still do at the
    same place, as no proxy's turn does that goes well."""
    return tuple(
        f"{read.topic}-{partition}"
        for read in reads
        for partition in read.open
        if read.topic in now and partition in now[read.topic].open
        if now[read.topic].ends[partition] <= read.ends[partition]
    )
