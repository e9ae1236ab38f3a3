"""Which records of its topics a stream cannot read: removed, skipped, or gone with their topic."""

from collections.abc import Iterable, Mapping

from msgspec import structs

from txbroker.spark.access import AuditKafka, TopicEnds
from txbroker.spark.judge.rows import ALWAYS, kept_from_ms
from txbroker.spark.schema import TopicNames
from txbroker.spark.stream.stored import StreamManifest, TakenPartition

_CLOCKS_APART_MS = 60_000
"""How much earlier than `since_ms` the topics that follow the half topic are read."""


def taken_of(
    access: AuditKafka,
    names: TopicNames,
    topics: Iterable[TopicEnds],
    home: StreamManifest,
    now_ms: int,
) -> list[TakenPartition]:
    """Return the partitions of which records are gone, may go, or are skipped."""
    taken = []
    for topic in topics:
        gone = _gone(topic, now_ms)
        left_out = skipped(access, names, topic, home.since_ms, now_ms)
        taken += [left_out.get(number, each) for number, each in gone.items()]
        taken += [each for number, each in left_out.items() if number not in gone]
    return taken


def changed_targets(access: AuditKafka, home: StreamManifest) -> dict[str, TopicEnds | None]:
    """Return the targets that are not those that the stream has read; None: a deleted one."""
    ends = access.ends(home.ids)
    return {
        topic: ends.get(topic)
        for topic, id in home.ids.items()
        if topic not in ends or not (ends[topic].unread or ends[topic].id == id)
    }


def starts_of(changed: Mapping[str, TopicEnds | None]) -> dict[str, dict[str, int]]:
    """Return where to read changed targets from, by partition; nothing of deleted ones."""
    return {
        topic: {} if ends is None else {str(p): start for p, start in enumerate(ends.starts)}
        for topic, ends in changed.items()
    }


def renewed_home(
    home: StreamManifest,
    changed: Mapping[str, TopicEnds | None],
    taken: list[TakenPartition],
    now_ms: int,
) -> StreamManifest:
    """Return the manifest of a stream that reads changed targets as they are now.

    Args:
        taken: of those that exist, as `taken_of` returns them.
        now_ms: messages that were decided before may have been in the former topics.
    """
    former = [
        TakenPartition(topic, -1, 0, ALWAYS if ends is None else now_ms)
        for topic, ends in changed.items()
    ]
    there = {topic: ends.id for topic, ends in changed.items() if ends is not None}
    ids = {topic: id for topic, id in home.ids.items() if topic not in changed}
    return structs.replace(
        home.with_taken([*taken, *former], changed.keys()),
        ids=ids | there,
        read=home.read - (changed.keys() - there.keys()),
    )


def _gone(topic: TopicEnds, now_ms: int) -> dict[int, TakenPartition]:
    """Return the partitions of which records are gone or may go."""
    at_ms = ALWAYS if topic.compacted else now_ms
    kept_ms = kept_from_ms(now_ms, topic.kept_ms) if topic.kept_ms else 0
    return {
        number: TakenPartition(topic.topic, number, start, at_ms, kept_ms)
        for number, start in enumerate(topic.starts)
        if start or topic.compacted
    }


def skipped(
    access: AuditKafka, names: TopicNames, topic: TopicEnds, since_ms: int, now_ms: int
) -> dict[int, TakenPartition]:
    """Return the partitions of which `since_ms` skips records that are still there."""
    if not since_ms:
        return {}
    # The brokers of other topics may have earlier clocks.
    name, apart_ms = topic.topic, 0 if topic.topic == names.half else _CLOCKS_APART_MS
    from_ms = since_ms - apart_ms
    starts = access.offsets_at({name: len(topic.starts)}, from_ms)[name]
    at_ms = ALWAYS if topic.compacted else now_ms + _CLOCKS_APART_MS
    if name in (names.half, names.op, names.parked):
        at_ms = from_ms
    # A target's timestamps may be the users': the skipped records without one were decided before
    # that time, all others before now.
    removed = topic.compacted or (any(topic.starts) and not topic.kept_ms)
    return {
        number: TakenPartition(name, number, start, at_ms, 0 if removed else since_ms)
        for number, start in enumerate(starts)
        if start > topic.starts[number]
    }
