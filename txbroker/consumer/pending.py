"""Copies that wait for the commit in which their message is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from txbroker.consumer.engine.memory import Memory
from txbroker.consumer.engine.stops import Outage
from txbroker.consumer.message import ReceivedMessage, size_of
from txbroker.core.consuming.partition import PartitionState
from txbroker.door.writing import Copy, Refused

COPIES_MAX, _BYTES_MAX = 1000, 16 << 20
"""Copies of one round, and their size: they are one Kafka transaction."""
_WAITING_MAX = 2 * COPIES_MAX
"""Copies of one partition: those of the round in flight, and of the next one."""


class Pending(Struct, eq=False):
    """Copies that are stored with the position in which their message is done.

    Attributes:
        message: None: the copies are of no message.
        owner: takes the result; None: it does not matter.
        first: the message is not done then, but its first stage.
        refused: the copies in whose place its copies are; none: it has its own.
        size: of the copies, bytes, approximately; set by `PendingCopies.add`.
    """

    partition: PartitionState
    message: ReceivedMessage | None
    copies: Sequence[Copy]
    owner: Storing | None = None
    first: bool = False
    refused: Sequence[Copy] = ()
    size: int = 0


class Storing(Protocol):
    """Takes the results of copies."""

    def stored(self, pendings: Sequence[Pending]) -> None:
        """Those of one partition are stored."""

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        """Those that `error` names cannot be stored. Return the copies to store in place of all;
        nothing: the message fails. None: they are tried again later."""

    def dropped(self, pending: Pending) -> None:
        """The partition is lost: whether they are stored is not known."""


class Commits(Protocol):
    """Stores results and positions of the partitions of one reader; see `Rounds`.

    Attributes:
        outage: while nothing can be stored.
    """

    outage: Outage

    def changed(self, partition: PartitionState, count: int = 1) -> None:
        """Take note that messages of a partition are done."""

    def store(self, pending: Pending, *, soon: bool = True) -> None:
        """Store copies with the partition's position, together."""

    def withdraw(self, pending: Pending) -> bool:
        """Store copies no more, unless they may be stored already; return whether they are not."""

    def unavailable(self, partition: PartitionState) -> None:
        """Hand out nothing more until positions can be stored again."""

    def fence(self, partition: PartitionState) -> None:
        """Take note that another owner has taken a partition over."""

    async def flush(self, partitions: Collection[PartitionState]) -> None:
        """Store the positions and copies of partitions now.

        Raises:
            KafkaUnavailable: they are not stored, or it is unknown.
        """


class _Waiting:
    """The copies of one partition."""

    def __init__(self) -> None:
        self.queue: deque[Pending] = deque()
        self.count = 0
        self.bytes = 0
        self.resting = False


class PendingCopies:
    """The copies of all partitions of one reader.

    A partition with many of them gets no new messages. Those that were handed out before go on, so
    that a gap in its position closes.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._waiting: dict[PartitionState, _Waiting] = {}

    @property
    def count(self) -> int:
        """The number of copies that do not rest."""
        return sum([each.count for each in self._waiting.values() if not each.resting])

    @property
    def partitions(self) -> Collection[PartitionState]:
        """The partitions that have some that do not rest."""
        return [each for each, waiting in self._waiting.items() if not waiting.resting]

    def rest(self, partition: PartitionState, *, resting: bool) -> None:
        """Leave the copies of a partition out of `take`, or no longer: then all are tried again,
        also those that were replaced."""
        if (waiting := self._waiting.get(partition)) is not None:
            waiting.resting = resting
            for each in waiting.queue:
                if each.refused:
                    self.replace(each, each.refused)
                    each.refused = ()

    @property
    def messages(self) -> set[tuple[str, int, int]]:
        """Topic, partition and offset of the messages that they are of."""
        messages = (each.message for waiting in self._waiting.values() for each in waiting.queue)
        return {(one.topic, one.partition, one.offset) for one in messages if one is not None}

    def of(self, partition: PartitionState) -> Iterable[Pending]:
        """Return those of a partition, in order."""
        waiting = self._waiting.get(partition)
        return () if waiting is None else waiting.queue

    def add(self, pending: Pending) -> None:
        """Add some."""
        waiting = self._waiting.get(pending.partition)
        if waiting is None:
            waiting = self._waiting[pending.partition] = _Waiting()
        pending.size = sum([size_of(copy.record) for copy in pending.copies])
        waiting.queue.append(pending)
        self._count(pending.partition, waiting, len(pending.copies), pending.size)

    def take(self, partitions: Collection[PartitionState]) -> dict[PartitionState, list[Pending]]:
        """Return the first ones of these partitions, as many as one round stores; partitions take
        turns. They stay here until `remove`."""
        count, size = 0, 0
        found: dict[PartitionState, list[Pending]] = {}
        for partition in [each for each in self.partitions if each in partitions]:
            mine: list[Pending] = []
            for each in self._waiting[partition].queue:
                count += len(each.copies)
                size += each.size
                if (found or mine) and (count > COPIES_MAX or size > _BYTES_MAX):
                    break
                mine.append(each)
            if mine:
                found[partition] = mine
            if count > COPIES_MAX or size > _BYTES_MAX:
                break
        for partition in found:
            self._waiting[partition] = self._waiting.pop(partition)
        return found

    def remove(self, partition: PartitionState, pendings: Collection[Pending]) -> None:
        """Remove some of a partition."""
        waiting = self._waiting.get(partition)
        if waiting is None:
            return
        copies = size = 0
        for each in pendings:
            if waiting.queue and waiting.queue[0] is each:  # as those of a round
                waiting.queue.popleft()
            elif each in waiting.queue:
                waiting.queue.remove(each)
            else:
                continue
            copies += len(each.copies)
            size += each.size
        self._count(partition, waiting, -copies, -size)
        if not waiting.queue:
            del self._waiting[partition]

    def replace(self, pending: Pending, copies: Sequence[Copy]) -> None:
        """Store others in place of refused copies."""
        more, size = len(copies) - len(pending.copies), sum(size_of(each.record) for each in copies)
        waiting = self._waiting[pending.partition]
        self._count(pending.partition, waiting, more, size - pending.size)
        pending.refused = pending.refused or pending.copies
        pending.copies, pending.size = copies, size

    def drop(self, partition: PartitionState) -> list[Pending]:
        """Remove all of a partition; return them."""
        waiting = self._waiting.pop(partition, None)
        if waiting is None:
            return []
        self._count(partition, waiting, -waiting.count, -waiting.bytes)
        return list(waiting.queue)

    def _count(self, partition: PartitionState, waiting: _Waiting, copies: int, size: int) -> None:
        waiting.count += copies
        waiting.bytes += size
        full = waiting.count >= _WAITING_MAX or waiting.bytes > self._memory.share
        if full is not partition.log.queue.full:
            partition.queues.fill(partition.log.queue, full=full)
