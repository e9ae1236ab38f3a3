"""Stops that concern several partitions: the user's, and that of a message handled alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from txbroker.consumer.message import ReceivedMessage
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.queues import StopReason
from txbroker.core.records import Partition


class Suspension(NamedTuple):
    """Which messages are not handed out; None matches any."""

    topic: str | None = None
    partition: int | None = None
    key: bytes | None = None

    def matches(self, place: Partition) -> bool:
        """Return whether it concerns a partition, or keys of it."""
        return self.topic in (None, place[0]) and self.partition in (None, place[1])


class Suspensions:
    """The suspensions of a consumer, also for partitions that are assigned later.

    Args:
        partitions: kept current by the caller.
    """

    def __init__(self, partitions: Collection[PartitionState]) -> None:
        self._partitions = partitions
        self._active: set[Suspension] = set()

    def add(self, suspension: Suspension) -> None:
        """Hand out no message that matches until `remove` with an equal argument."""
        self._active.add(suspension)
        for partition in self._partitions:
            self._begin(partition, suspension)

    def apply(self, partition: PartitionState) -> None:
        """Suspend what matches in a new partition."""
        for suspension in self._active:
            self._begin(partition, suspension)

    def _begin(self, partition: PartitionState, suspension: Suspension) -> None:
        if not suspension.matches(partition.place):
            return
        if suspension.key is None:
            partition.stop(StopReason.SUSPENDED, suspension)
        else:
            partition.queues.suspend_key(partition.log.queue, suspension.key)

    def remove(self, suspension: Suspension) -> None:
        """End a suspension; without an equal `add` nothing changes."""
        self._active.discard(suspension)
        key = suspension.key
        for partition in self._partitions:
            if not suspension.matches(partition.place):
                continue
            others = [each for each in self._active if each.matches(partition.place)]
            if key is None:
                partition.go_on(StopReason.SUSPENDED, suspension)
            elif all(each.key != key for each in others):
                partition.queues.resume_key(partition.log.queue, key)


class Alone:
    """The message in flight of all partitions in which one may end the process.

    Args:
        partitions: kept current by the caller.
    """

    def __init__(self, partitions: Collection[PartitionState]) -> None:
        self._partitions = partitions
        self.message: ReceivedMessage | None = None

    def apply(self, partition: PartitionState) -> None:
        """Hand out nothing of a new partition meanwhile."""
        if partition.starts.is_suspect and self.message is not None:
            partition.stop(StopReason.ALONE)

    def begin(self, message: ReceivedMessage) -> None:
        """Hand out no other message that may end the process."""
        self.message, message.alone = message, True
        for partition in self._partitions:
            if partition.starts.is_suspect:
                partition.stop(StopReason.ALONE)

    def end(self) -> None:
        """Hand out the next one if the last one is not in flight any more."""
        message = self.message
        if message is not None and message not in message.feed.partition.in_flight:
            message.feed.partition.starts.end_alone()
            self.message = None
            for partition in self._partitions:
                partition.go_on(StopReason.ALONE)


class Outage:
    """A time in which nothing of some partitions can be stored: none of their messages is handed
    out.

    Args:
        partitions: returns the partitions, as they are then.

    Attributes:
        failures: in a row; 0: there is no outage.
    """

    def __init__(self, partitions: Callable[[], Collection[PartitionState]]) -> None:
        self.failures = 0
        self._partitions = partitions
        self._again = asyncio.Event()

    def note(self) -> None:
        """Something could not be stored."""
        self.failures += 1
        for partition in self._partitions():
            partition.stop(StopReason.NOT_STORED)

    def end(self) -> bool:
        """Something is stored. Return whether there was an outage."""
        if not self.failures:
            return False
        self.failures = 0
        for partition in self._partitions():
            partition.go_on(StopReason.NOT_STORED)
        self.try_again()
        return True

    def try_again(self) -> None:
        """End the pause after a failure."""
        self._again.set()

    async def pause(self, pause_s: float) -> None:
        """Wait before the next attempt, until `try_again` at most."""
        self._again.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._again.wait(), pause_s)
