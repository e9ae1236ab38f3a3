"""Which message is handled next: in offset order, and one at a time of each lane.

A lane is what keeps its order: a key, a partition, or, without order, each message alone. Messages
are taken in offset order; one whose lane is busy waits in the lane. When the lane is free, its next
message is taken before new ones, and lanes take turns after every message, so that no key starves
another one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar


class Order(StrEnum):
    """What keeps its order."""

    NONE = "none"
    PARTITION = "partition"
    KEY = "key"


class Item(Protocol):
    """A message, as the queues know it."""

    lane: Lane | None
    """The lane that it occupies in flight; None also where it is alone in its lane."""

    @property
    def lane_key(self) -> Hashable:
        """Names its lane in its partition, see `lane_key_of`; None: it is alone in any case."""


M = TypeVar("M", bound=Item)
_TURN = 64
"""Messages that are taken from one partition before the next one; a batch is not divided."""
_WHOLE = ""
"""The lane of all messages of a partition."""
_FREE: Any = object()
"""In place of a lane: there is none."""


class Lane:
    """Messages that are handled one after another."""

    __slots__ = ("blocked", "delayed", "holder", "in_flight", "key", "queue", "waiting")

    def __init__(self, queue: PartitionQueue[Any], key: Hashable) -> None:
        self.queue = queue
        self.key = key
        self.waiting: deque[Any] = deque()
        self.in_flight = 0
        self.holder: object = None
        """Who has the messages in flight, and may take more of them."""
        self.delayed = False
        self.blocked = False


class PartitionQueue(Generic[M]):
    """The messages of one partition that have arrived and are not in flight."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.buffer: deque[M] = deque()
        self.lanes: dict[Hashable, Lane | None] = {}
        """Lanes with messages in flight, waiting or delayed, and suspended ones. None: there is one
        message in flight and nothing else, as in most lanes."""
        self.alone: set[Lane] = set()
        """Lanes of messages that are alone in any case, and were put back."""
        self.held: list[Lane] = []
        """Lanes that were ready while the partition was suspended."""
        self.suspended: set[str] = set()
        """Reasons for which no message is given out."""
        self.full = False
        """Only messages that were given out, or wait in a lane, are given out."""
        self.removed = False
        self.listed = False
        self.taken = 0

    def heads(self) -> list[M]:
        """Return the first message of the buffer and of each lane."""
        lanes = [*self.lanes.values(), *self.alone]
        heads = [lane.waiting[0] for lane in lanes if lane is not None and lane.waiting]
        return heads + list(itertools.islice(self.buffer, 1))


class Queues(Generic[M]):
    """The queues of all partitions."""

    def __init__(self) -> None:
        self._round: deque[PartitionQueue[M]] = deque()
        self._ready: deque[Lane] = deque()
        self._delayed: list[tuple[float, int, Lane]] = []
        self._numbers = itertools.count()

    @property
    def more(self) -> bool:
        """Whether there may be another message to take."""
        return bool(self._ready or self._round)

    @property
    def delayed(self) -> int:
        """The number of delayed lanes."""
        return len(self._delayed)

    def add(self, queue: PartitionQueue[M], messages: Iterable[M]) -> None:
        """Add messages that arrived, in offset order."""
        queue.buffer.extend(messages)
        self._list(queue)

    def _list(self, queue: PartitionQueue[M]) -> None:
        if queue.buffer and not (queue.listed or queue.full or queue.suspended or queue.removed):
            queue.listed = True
            self._round.append(queue)

    def take(self, holder: object = None, *, more: bool = False) -> M | None:
        """Return the next message, None if none can be handled now. It is in flight until `settle`,
        `delay` or `put_back`.

        Args:
            holder: takes several messages: a lane that it occupies already gives it more.
            more: it has taken some: the turn of their partition is not over.
        """
        ready = self._ready
        while ready:
            lane = ready.popleft()
            if lane.waiting and not (lane.in_flight or lane.delayed or lane.blocked):
                if lane.queue.suspended:
                    lane.queue.held.append(lane)
                    continue
                return self._start(lane, lane.waiting.popleft(), holder)
        # Hot path: a message that is alone in its lane needs no more than two look-ups.
        round_ = self._round
        while round_:
            queue = round_[0]
            if queue.taken >= _TURN and not more:
                queue.taken = 0
                round_.rotate(-1)
                queue = round_[0]
            if not (queue.full or queue.suspended or queue.removed):
                buffer, lanes = queue.buffer, queue.lanes
                while buffer:
                    message = buffer.popleft()
                    key = message.lane_key
                    if key is not None:
                        if lanes.get(key, _FREE) is not _FREE or holder is not None:
                            if not self._join(queue, message, holder):
                                continue
                        else:
                            lanes[key] = None
                    queue.taken += 1
                    return message
            round_.popleft().listed = False
        return None

    def take_more(self, queue: PartitionQueue[M], holder: object, after: M, count: int) -> list[M]:
        """Return up to `count` messages from where another one came from: a batch should have few
        partitions, so that few statements store it.

        Args:
            queue: that of `after`.
            after: the last one that the holder took.
        """
        found: list[M] = []
        lane = after.lane
        if lane is not None and self._continues(lane, holder):
            waiting = lane.waiting
            while waiting and len(found) < count:
                found.append(waiting.popleft())
                found[-1].lane = lane
            lane.in_flight += len(found)
        if self._ready or queue.full or queue.suspended or queue.removed:
            return found
        buffer = queue.buffer
        while buffer and len(found) < count:
            message = buffer.popleft()
            if message.lane_key is None or self._join(queue, message, holder):
                found.append(message)
        queue.taken += len(found)
        return found

    def _continues(self, lane: Lane, holder: object) -> bool:
        """Return whether a lane gives its holder another message now."""
        return lane.holder is holder and not (
            lane.delayed or lane.blocked or lane.queue.suspended or lane.queue.removed
        )

    def _join(self, queue: PartitionQueue[M], message: M, holder: object) -> bool:
        """Put a message that arrived into its lane; return whether it is in flight."""
        key = message.lane_key
        if key not in queue.lanes:
            lane = queue.lanes[key] = Lane(queue, key)
            self._start(lane, message, holder)
            return True
        lane = self._lane(queue, key)
        if holder is not None and lane.holder is holder and not lane.waiting:
            lane.in_flight += 1
            message.lane = lane
            return True
        lane.waiting.append(message)
        return False

    def _lane(self, queue: PartitionQueue[M], key: Hashable) -> Lane:
        """Return the lane of a message in flight."""
        lane = queue.lanes.get(key)
        if lane is None:
            lane = queue.lanes[key] = Lane(queue, key)
            lane.in_flight = 1
        return lane

    def _start(self, lane: Lane, message: M, holder: object) -> M:
        if lane.key is None:
            lane.queue.alone.discard(lane)
        lane.in_flight = 1
        lane.holder = holder
        message.lane = lane
        return message

    def settle(self, queue: PartitionQueue[M], message: M) -> None:
        """End the flight of a message: its lane continues."""
        lane = message.lane
        if lane is None:
            key = message.lane_key
            if key is None:
                return
            lane = queue.lanes.pop(key, None)
            if lane is None:
                return
            queue.lanes[key] = lane
        message.lane = None
        lane.in_flight -= 1
        if not lane.in_flight:
            self._continue(lane)

    def settle_all(self, queue: PartitionQueue[M], messages: Iterable[M]) -> None:
        """`settle` for messages that one holder took together."""
        for message in messages:
            if (lane := message.lane) is None:
                self.settle(queue, message)
                continue
            message.lane = None
            lane.in_flight -= 1
            if not lane.in_flight:
                self._continue(lane)

    def _continue(self, lane: Lane) -> None:
        lane.holder = None
        if lane.queue.removed or lane.delayed or lane.blocked:
            return
        if lane.waiting:
            self._ready.append(lane)
        elif lane.queue.lanes.get(lane.key) is lane:
            del lane.queue.lanes[lane.key]

    def delay(self, queue: PartitionQueue[M], message: M, due_s: float) -> None:
        """Put a message back to the front of its lane, which continues with it at `due_s`."""
        lane = self.put_back(queue, message)
        lane.delayed = True
        heapq.heappush(self._delayed, (due_s, next(self._numbers), lane))

    def put_back(self, queue: PartitionQueue[M], message: M) -> Lane:
        """Put a message back to the front of its lane."""
        if message.lane is None and message.lane_key is None:
            lane = Lane(queue, None)
            queue.alone.add(lane)
            lane.waiting.append(message)
            self._ready.append(lane)
            return lane
        lane = message.lane or self._lane(queue, message.lane_key)
        if lane.key is None:
            queue.alone.add(lane)
        lane.waiting.appendleft(message)
        self.settle(queue, message)
        return lane

    def take_back(self, queue: PartitionQueue[M], message: M) -> None:
        """Put a message that was settled to the front of its lane."""
        key = message.lane_key
        if key is None:
            lane = Lane(queue, None)
            queue.alone.add(lane)
        elif key in queue.lanes:
            lane = self._lane(queue, key)
        else:
            lane = queue.lanes[key] = Lane(queue, key)
        lane.waiting.appendleft(message)
        if not lane.in_flight:
            self._continue(lane)

    def wake(self, now_s: float) -> float | None:
        """Continue with delayed lanes that are due; return when the next one is, None without."""
        delayed = self._delayed
        while delayed and delayed[0][0] <= now_s:
            lane = heapq.heappop(delayed)[2]
            lane.delayed = False
            if not lane.in_flight:
                self._continue(lane)
        return delayed[0][0] if delayed else None

    def remove(self, queue: PartitionQueue[M]) -> None:
        """Drop all messages of a partition. Those in flight may still be settled."""
        queue.removed = True
        queue.lanes.clear()
        queue.alone.clear()
        queue.held.clear()
        queue.buffer.clear()
        self._ready = deque(lane for lane in self._ready if lane.queue is not queue)
        self._delayed = [entry for entry in self._delayed if entry[2].queue is not queue]
        heapq.heapify(self._delayed)

    def suspend(self, queue: PartitionQueue[M], reason: str) -> None:
        """Give out no message of a partition until `resume` with the same reason."""
        queue.suspended.add(reason)

    def resume(self, queue: PartitionQueue[M], reason: str) -> None:
        """Give out messages of a partition again unless it is suspended for another reason."""
        queue.suspended.discard(reason)
        if not queue.suspended:
            self._list(queue)
            self._ready.extend(queue.held)
            queue.held.clear()

    def fill(self, queue: PartitionQueue[M], *, full: bool) -> None:
        """Give out no message of a partition that has waited in no lane yet; or do again."""
        queue.full = full
        self._list(queue)

    def suspend_key(self, queue: PartitionQueue[M], key: bytes) -> None:
        """Give out no message with a key until `resume_key`. For order `key` only."""
        lane = queue.lanes.get(key, _FREE)
        if lane is _FREE:
            lane = queue.lanes[key] = Lane(queue, key)
        elif lane is None:
            lane = self._lane(queue, key)
        lane.blocked = True

    def resume_key(self, queue: PartitionQueue[M], key: bytes) -> None:
        """Give out messages with a key again."""
        lane = queue.lanes.get(key)
        if lane is not None and lane.blocked:
            lane.blocked = False
            if not lane.in_flight:
                self._continue(lane)


def lane_key_of(order: Order, key: bytes | None) -> Hashable:
    """Return the name of a message's lane in its partition; None: it is alone in any case."""
    if order is Order.KEY:
        return key
    return _WHOLE if order is Order.PARTITION else None
