"""Messages that are not handed out because the user suspended a topic, a partition or a key."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work
from txbroker.core.consuming.queues import Queues
from txbroker.door.consuming import Partition


class Suspension(NamedTuple):
    """Which messages are not handed out; None matches any."""

    topic: str | None = None
    partition: int | None = None
    key: bytes | None = None

    def matches(self, place: Partition) -> bool:
        """Return whether it concerns a partition, or keys of it."""
        return self.topic in (None, place[0]) and self.partition in (None, place[1])

    def holds(self, place: Partition, key: bytes) -> bool:
        """Return whether it suspends this key of a partition."""
        return self.key == key and self.matches(place)


class Suspensions:
    """The suspensions of a consumer, also for partitions that are assigned later.

    Args:
        works: the partitions, kept current by the caller.
    """

    def __init__(self, queues: Queues[ReceivedMessage], works: Collection[Work]) -> None:
        self._queues = queues
        self._works = works
        self._active: set[Suspension] = set()

    def add(self, suspension: Suspension) -> None:
        """Hand out no message that matches until `remove` with an equal argument."""
        self._active.add(suspension)
        for work in self._works:
            self._suspend(work, suspension)

    def apply(self, work: Work) -> None:
        """Suspend what matches in a new partition."""
        for suspension in self._active:
            self._suspend(work, suspension)

    def _suspend(self, work: Work, suspension: Suspension) -> None:
        if suspension.matches(work.place) and suspension.key is not None:
            self._queues.suspend_key(work.queue, suspension.key)
        elif suspension.matches(work.place):
            self._queues.suspend(work.queue, str(suspension))

    def remove(self, suspension: Suspension) -> None:
        """End a suspension; without an equal `add` nothing changes."""
        self._active.discard(suspension)
        for work in self._works:
            if not suspension.matches(work.place):
                continue
            if suspension.key is None:
                self._queues.resume(work.queue, str(suspension))
            elif not any(each.holds(work.place, suspension.key) for each in self._active):
                self._queues.resume_key(work.queue, suspension.key)
