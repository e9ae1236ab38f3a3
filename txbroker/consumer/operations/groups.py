"""The state of groups of consumers, from their committed offsets and topics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct

from txbroker.core.consuming.copies import GroupTopics, read_copy
from txbroker.core.consuming.failure import DELAYS_S
from txbroker.core.consuming.position import (
    ForeignMetadata,
    Metadata,
    StoredOffset,
    decode_metadata,
)
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import EARLIEST, LATEST, ConsumingDoor, GroupDescription
from txbroker.errors import ConfigurationError

_READ_OFFSETS = 1000
"""Offsets that are read at a time: records may be large."""
COUNTED_MAX = 10_000
"""Offsets of a partition in which records are counted; above, offsets are."""

_UNKNOWN = GroupDescription("Dead", ())


class PartitionView(Struct, frozen=True):
    """A partition that a group has read.

    Attributes:
        owner: name of the member that it is assigned to; None: no one.
        position: offset of the first message that is not done.
        end: None: the topic does not exist, or may not be read.
        lag: offsets that are not done; None without `end`.
        metadata: None: another program's, or none.
        foreign: the metadata are another program's, or a newer version's.
    """

    topic: str
    partition: int
    owner: str | None
    position: int
    end: int | None
    lag: int | None
    metadata: Metadata | None
    foreign: bool


class StepView(Struct, frozen=True):
    """A step of a group's retry topic.

    Attributes:
        delay_s: between the failure and the next attempt.
        messages: that wait; of more than `COUNTED_MAX` offsets, the offsets.
        due_ms: when the first one is due, milliseconds since 1970; None without any.
    """

    step: int
    delay_s: int
    messages: int
    due_ms: int | None


class GroupView(Struct, frozen=True):
    """A group.

    Attributes:
        state: as Kafka names it; `Dead` if Kafka does not know the group (any more).
        members: name and host of each.
        partitions: of the topics that it reads.
        retries: partitions of its retry topic, as far as they were read.
        topics: those of the group that exist.
        names: the names of the group's topics.
    """

    group: str
    state: str
    members: tuple[tuple[str, str], ...]
    partitions: tuple[PartitionView, ...]
    retries: tuple[PartitionView, ...]
    topics: Mapping[str, int]
    names: GroupTopics

    @property
    def ours(self) -> bool:
        """Whether txbroker's consumers use the group."""
        views = (*self.partitions, *self.retries)
        return bool(self.topics) or any(view.metadata is not None for view in views)

    @property
    def lag(self) -> int:
        """Offsets that are not done, of topics that may be read."""
        return sum(view.lag or 0 for view in self.partitions)

    @property
    def aside(self) -> int:
        """The number of set-aside keys when offsets were last committed."""
        return sum(view.metadata.aside for view in self.partitions if view.metadata is not None)


class ConsumerGroups:
    """Looks at groups.

    Args:
        prefix: of the groups' own topics.
    """

    def __init__(self, door: ConsumingDoor, prefix: str) -> None:
        self.door = door
        self.prefix = prefix

    async def find(self) -> list[GroupView]:
        """Return the groups of txbroker's consumers, by name."""
        counts = await self._counts()
        names = set(await self.door.groups())
        for kind in GroupTopics._fields:
            start = f"{self.prefix}.{kind}."
            names.update(name.removeprefix(start) for name in counts if name.startswith(start))
        views = []
        for name in sorted(names):
            stored = await self.door.committed(name)
            view = _view(name, self.prefix, stored, counts)
            if view.ours:
                views.append(await self._complete(view, stored, counts))
        return views

    async def view(self, group: str) -> GroupView:
        """Return a group, also one that other programs use.

        Raises:
            ConfigurationError: there is none.
        """
        stored = await self.door.committed(group)
        counts = await self._counts()
        view = _view(group, self.prefix, stored, counts)
        view = await self._complete(view, stored, counts)
        if view.state == "Dead" and not view.partitions and not view.topics:
            raise ConfigurationError(
                f"there is no consumer group {group!r}: `txbroker consumers list` lists them"
            )
        return view

    async def steps(self, view: GroupView) -> list[StepView]:
        """Return the steps of a group's retry topic in which messages wait."""
        topic = view.names.retry
        places = [(topic, step) for step in range(view.topics.get(topic, 0))]
        if not places:
            return []
        starts = await self.door.offsets(places, EARLIEST)
        ends = await self.door.offsets(places, LATEST)
        known = {(each.topic, each.partition): each for each in view.retries}
        steps = []
        for place in places:
            done: list[tuple[int, int]] = []
            start = starts[place]
            if place in known:
                start = max(start, known[place].position)
                metadata = known[place].metadata
                done = [] if metadata is None else list(metadata.ranges)
            count, due_ms = await self._backlog(place, start, ends[place], done)
            if count:
                step = place[1]
                steps.append(StepView(step, DELAYS_S[min(step, 15)], count, due_ms))
        return steps

    async def _backlog(
        self, place: Partition, start: int, end: int, done: Iterable[tuple[int, int]]
    ) -> tuple[int, int | None]:
        """Return how many messages wait, and when the first one is due."""
        count, due_ms = 0, None
        async for record in scan(self.door, place, start, min(end, start + COUNTED_MAX)):
            if any(first <= record.offset < last for first, last in done):
                continue
            count += 1
            copy = read_copy(record)
            if due_ms is None and copy is not None:
                due_ms = copy[1].due_ms
        return max(count, end - start if end - start > COUNTED_MAX else 0), due_ms

    async def _counts(self) -> dict[str, int]:
        """Return the number of partitions of all topics that may be read."""
        return {name: topic.partitions for name, topic in (await self.door.topics()).items()}

    async def _complete(
        self,
        view: GroupView,
        stored: Mapping[Partition, StoredOffset],
        counts: Mapping[str, int],
    ) -> GroupView:
        """Return a group with its members and the ends of its partitions."""
        described = await self.door.describe(view.group)
        readable = [place for place in stored if place[1] < counts.get(place[0], 0)]
        ends = await self.door.offsets(readable, LATEST) if readable else {}
        return _view(view.group, self.prefix, stored, counts, described, ends)


def _view(
    group: str,
    prefix: str,
    stored: Mapping[Partition, StoredOffset],
    counts: Mapping[str, int],
    described: GroupDescription = _UNKNOWN,
    ends: Mapping[Partition, int] = MappingProxyType({}),
) -> GroupView:
    names = GroupTopics.of(prefix, group)
    owners = {place: name for name, _host, partitions in described.members for place in partitions}
    views = [
        _partition(place, stored[place], ends.get(place), owners.get(place))
        for place in sorted(stored)
    ]
    return GroupView(
        group,
        described.state,
        tuple((name, host) for name, host, _partitions in described.members),
        tuple(view for view in views if view.topic != names.retry),
        tuple(view for view in views if view.topic == names.retry),
        {name: counts[name] for name in names if name in counts},
        names,
    )


async def scan(
    door: ConsumingDoor, place: Partition, start: int, end: int
) -> AsyncIterator[Record]:
    """Yield the committed records of a partition between offsets, in order."""
    for first in range(start, end, _READ_OFFSETS):
        for record in await door.read(place, first, min(end, first + _READ_OFFSETS)):
            yield record


def _partition(
    place: Partition, stored: StoredOffset, end: int | None, owner: str | None
) -> PartitionView:
    metadata, foreign = None, False
    try:
        metadata = decode_metadata(stored.offset, stored.metadata)
    except ForeignMetadata:
        foreign = True
    lag = None
    if end is not None:
        done = 0 if metadata is None else sum(last - first for first, last in metadata.ranges)
        lag = max(0, end - stored.offset - done)
    return PartitionView(*place, owner, stored.offset, end, lag, metadata, foreign)
