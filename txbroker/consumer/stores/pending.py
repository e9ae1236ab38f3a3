"""Copies that wait for the commit in which their message is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work, size_of
from txbroker.door.writing import Copy, Refused

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine

COPIES_MAX, _BYTES_MAX = 1000, 16 << 20
"""Copies of one round, and their size: they are one Kafka transaction."""
_WAITING_MAX = 2 * COPIES_MAX
"""Copies of one partition: those of the round in flight, and of the next one."""


class Pending(Struct, eq=False):
    """Copies that are stored with the position in which their message is done.

    Attributes:
        message: None: the copies are of no message.
        owner: takes the result; None: it does not matter.
        settled: the lane of the message has continued.
        first: the message is not done then, but its first stage.
        replaced: its copies are in place of others, which were refused.
        size: of the copies, bytes, approximately; set by `PendingCopies.add`.
    """

    work: Work
    message: ReceivedMessage | None
    copies: Sequence[Copy]
    owner: Storing | None = None
    settled: bool = False
    first: bool = False
    replaced: bool = False
    size: int = 0


class Storing(Protocol):
    """Takes the results of copies."""

    def stored(self, pending: Pending) -> None:
        """They are stored."""

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        """Those that `error` names cannot be stored. Return the copies to store in place of all;
        nothing: the message fails. None: the message is handled again, later."""

    def dropped(self, pending: Pending) -> None:
        """The partition is lost: whether they are stored is not known."""


class _Waiting:
    """The copies of one partition."""

    def __init__(self, bytes_max: float) -> None:
        self.bytes_max = bytes_max
        self.queue: deque[Pending] = deque()
        self.count = 0
        self.bytes = 0
        self.is_full = False


class PendingCopies:
    """The copies of all partitions of a committer.

    A partition with many of them gets no new messages. Those that were handed out before go on, so
    that a gap in its position closes.

    Args:
        engine: hands out messages.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[Work, _Waiting] = {}
        self.count = 0
        """The number of all copies."""

    @property
    def works(self) -> Collection[Work]:
        """The partitions that have some."""
        return self._waiting.keys()

    @property
    def messages(self) -> set[tuple[str, int, int]]:
        """Topic, partition and offset of the messages that they are of."""
        messages = (each.message for waiting in self._waiting.values() for each in waiting.queue)
        return {(one.topic, one.partition, one.offset) for one in messages if one is not None}

    def of(self, work: Work) -> Iterable[Pending]:
        """Return those of a partition, in order."""
        waiting = self._waiting.get(work)
        return () if waiting is None else waiting.queue

    def add(self, pending: Pending) -> None:
        """Add some."""
        waiting = self._waiting.get(pending.work)
        if waiting is None:
            waiting = self._waiting[pending.work] = _Waiting(self._engine.memory.share)
        for copy in pending.copies:
            pending.size += size_of(copy.record)
        waiting.queue.append(pending)
        self._count(pending.work, waiting, len(pending.copies), pending.size)

    def take(self, works: Collection[Work]) -> dict[Work, list[Pending]]:
        """Return the first ones of these partitions, as many as one round stores; partitions take
        turns. They stay here until `remove`."""
        count, size = 0, 0
        found: dict[Work, list[Pending]] = {}
        for work in [work for work in self._waiting if work in works]:
            mine: list[Pending] = []
            for each in self._waiting[work].queue:
                count += len(each.copies)
                size += each.size
                if (found or mine) and (count > COPIES_MAX or size > _BYTES_MAX):
                    break
                mine.append(each)
            if mine:
                found[work] = mine
            if count > COPIES_MAX or size > _BYTES_MAX:
                break
        for work in found:
            self._waiting[work] = self._waiting.pop(work)
        return found

    def remove(self, work: Work, pendings: Collection[Pending]) -> None:
        """Remove some of a partition."""
        waiting = self._waiting.get(work)
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
        self._count(work, waiting, -copies, -size)
        if not waiting.queue:
            del self._waiting[work]

    def replace(self, pending: Pending, copies: Sequence[Copy]) -> None:
        """Store others in place of refused copies."""
        waiting = self._waiting[pending.work]
        more, size = len(copies) - len(pending.copies), sum(size_of(each.record) for each in copies)
        self._count(pending.work, waiting, more, size - pending.size)
        pending.copies, pending.size, pending.replaced = copies, size, True

    def drop(self, work: Work) -> list[Pending]:
        """Remove all of a partition; return them."""
        waiting = self._waiting.pop(work, None)
        if waiting is None:
            return []
        self._count(work, waiting, -waiting.count, -waiting.bytes)
        return list(waiting.queue)

    def _count(self, work: Work, waiting: _Waiting, copies: int, size: int) -> None:
        self.count += copies
        waiting.count += copies
        waiting.bytes += size
        is_full = waiting.count >= _WAITING_MAX or waiting.bytes > waiting.bytes_max
        if is_full is not waiting.is_full:
            waiting.is_full = is_full
            self._engine.suspensions.fill(work, full=is_full)
            if not is_full:
                self._engine.waiting.wake()
