"""Which message is handled next: in offset order, and one at a time of each lane.

A lane is what keeps its order: a key, a partition, or, without order, each message alone. A
partition has three kinds of messages that can be handled, each first in, first out: new ones in
offset order, the next ones of lanes that continue, and retries of lanes whose first message failed.
A new message whose lane is busy waits in the lane.

Partitions take turns, and so do the kinds within a partition. So a message waits at most for the
messages before it of its kind, and one round of the others (`TURN`), whatever fails or arrives
meanwhile. With more than their share of the messages in flight, as slow handlers have, they get the
shortest turn: a partition one message, the retries one after `TURN` others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar


class Order(StrEnum):
    """What keeps its order."""

    NONE = "none"
    PARTITION = "partition"
    KEY = "key"


class StopReason(StrEnum):
    """Why no message of a partition is given out.

    SUSPENDED: the user has suspended it.
    RELEASED: it is being released.
    LEASE: its lease has ended.
    REFUSED: copies of its messages were refused a moment ago.
    NOT_STORED: nothing of it can be stored.
    ALONE: a message that may end the process is handled alone.
    CLEARING: the copies of a released key are being cleared.
    """

    SUSPENDED = "suspended"
    RELEASED = "released"
    LEASE = "lease"
    REFUSED = "refused"
    NOT_STORED = "not stored"
    ALONE = "alone"
    CLEARING = "clearing"


class Item(Protocol):
    """A message, as the queues know it."""

    lane: Lane | None
    """The lane that it occupies in flight; None also where it is alone in its lane."""

    @property
    def lane_key(self) -> Hashable:
        """Names its lane in its partition, see `lane_key_of`; None: it is alone in any case."""


M = TypeVar("M", bound=Item)
TURN = 64
"""Messages that are taken from one partition before the next one; a batch is not divided."""
_WHOLE = ""
"""The lane of all messages of a partition."""
_FREE: Any = object()
"""In place of a lane: there is none."""


class Lane:
    """Messages that are handled one after another."""

    __slots__ = (
        "blocked",
        "delayed",
        "failed",
        "holder",
        "in_flight",
        "key",
        "listed",
        "queue",
        "retrying",
        "waiting",
    )

    def __init__(self, queue: PartitionQueue[Any], key: Hashable) -> None:
        self.queue = queue
        self.key = key
        self.waiting: deque[Any] = deque()
        self.in_flight = 0
        self.holder: object = None
        """Who has the messages in flight, and may take more of them."""
        self.delayed = False
        self.blocked = False
        self.failed = False
        """Its first message is a retry."""
        self.retrying = False
        """Its message in flight is a retry."""
        self.listed = False
        """Its partition knows that it continues."""


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
        self.continued: deque[Lane] = deque()
        """Lanes whose next message can be given out."""
        self.retries: deque[Lane] = deque()
        """The same, of lanes whose first message failed."""
        self.stops: dict[tuple[StopReason, Hashable], float] = {}
        """Reasons for which no message is given out, and until when, event loop seconds. Several
        owners may have the same reason."""
        self.full = False
        """Only messages that were given out, or wait in a lane, are given out."""
        self.removed = False
        self.listed = False
        self.taken = 0
        """Messages that were taken in this turn."""
        self.in_flight = 0
        self.retrying = 0
        """Retries in flight."""
        self.new_next = False
        """A lane continued: a new message is next."""
        self.others = 0
        """Messages since the last retry, while retries wait."""

    @property
    def has_new(self) -> bool:
        """Whether messages may be given out that have waited in no lane."""
        return bool(self.buffer) and not self.full

    def next_lane(self) -> Lane | None:
        """Return the lane that continues, or whose retry is due, with the next message; None if
        there is none, or a new message is next."""
        while True:
            # Slow calls that fail would soon have all places in flight.
            others_min = 1 if self.retrying * 2 <= self.in_flight else TURN
            others_wait = self.continued or self.has_new
            if self.retries and not (others_wait and self.others < others_min):
                lanes, self.others = self.retries, 0
            elif self.continued and not (self.new_next and self.has_new):
                lanes, self.new_next = self.continued, True
                self.others += 1
            else:
                self.new_next = False
                self.others += 1
                return None
            lane = lanes.popleft()
            lane.listed = False
            if lane.waiting and not (lane.in_flight or lane.delayed or lane.blocked):
                return lane

    def heads(self) -> list[M]:
        """Return the first message of the buffer and of each lane."""
        lanes = [*self.lanes.values(), *self.alone]
        heads = [lane.waiting[0] for lane in lanes if lane is not None and lane.waiting]
        return heads + list(itertools.islice(self.buffer, 1))

    @property
    def count(self) -> int:
        """The number of messages that are not in flight."""
        lanes = (*self.lanes.values(), *self.alone)
        waiting = sum([len(lane.waiting) for lane in lanes if lane is not None])
        return len(self.buffer) + waiting

    def remove_all(self) -> list[M]:
        """Remove the messages that are not in flight; return them."""
        found = list(self.buffer)
        self.buffer.clear()
        for lane in (*self.lanes.values(), *self.alone):
            if lane is not None:
                found += lane.waiting
                lane.waiting.clear()
        return found


class Queues(Generic[M]):
    """The queues of all partitions."""

    def __init__(self) -> None:
        self._round: deque[PartitionQueue[M]] = deque()
        self._in_flight = 0
        self._delayed: list[tuple[float, int, Lane]] = []
        self._numbers = itertools.count()

    def has_more(self) -> bool:
        """Return whether there may be another message to take."""
        return bool(self._round)

    @property
    def delayed(self) -> int:
        """The number of delayed lanes."""
        return len(self._delayed)

    def add(self, queue: PartitionQueue[M], messages: Iterable[M]) -> None:
        """Add messages that arrived, in offset order."""
        queue.buffer.extend(messages)
        self._list(queue)

    def _list(self, queue: PartitionQueue[M]) -> None:
        if queue.listed or queue.stops or queue.removed:
            return
        if queue.continued or queue.retries or (queue.buffer and not queue.full):
            queue.listed = True
            self._round.append(queue)

    def take(self, holder: object = None, *, more: bool = False) -> M | None:
        """Return the next message, None if none can be handled now. It is in flight until `settle`,
        `delay` or `put_back`.

        Args:
            holder: takes several messages: a lane that it occupies already gives it more.
            more: it has taken some: the turn of their partition is not over.
        """
        round_ = self._round
        while round_:
            queue = round_[0]
            over = queue.taken >= TURN or queue.in_flight * len(round_) > self._in_flight
            if over and queue.taken and not more:
                queue.taken = 0
                round_.rotate(-1)
                queue = round_[0]
            if not (queue.stops or queue.removed):
                message = None
                if (queue.continued or queue.retries) and (lane := queue.next_lane()) is not None:
                    message = self._start(lane, lane.waiting.popleft(), holder)
                elif not queue.full:
                    # Hot path: a message that is alone in its lane needs two look-ups.
                    buffer, lanes = queue.buffer, queue.lanes
                    while buffer:
                        message = buffer.popleft()
                        key = message.lane_key
                        if key is None:
                            break
                        if lanes.get(key, _FREE) is _FREE and holder is None:
                            lanes[key] = None
                            break
                        if self._join(queue, message, holder):
                            break
                        message = None
                if message is not None:
                    queue.taken += 1
                    queue.in_flight += 1
                    self._in_flight += 1
                    return message
                if queue.continued or queue.retries:
                    continue  # all new messages wait in lanes
            queue.taken = 0
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
        others = queue.continued or queue.retries or queue.full or queue.stops or queue.removed
        buffer = queue.buffer
        while buffer and not others and len(found) < count:
            message = buffer.popleft()
            if message.lane_key is None or self._join(queue, message, holder):
                found.append(message)
        queue.taken += len(found)
        queue.in_flight += len(found)
        self._in_flight += len(found)
        return found

    def _continues(self, lane: Lane, holder: object) -> bool:
        """Return whether a lane gives its holder another message now."""
        return lane.holder is holder and not (
            lane.delayed or lane.blocked or lane.queue.stops or lane.queue.removed
        )

    def _join(self, queue: PartitionQueue[M], message: M, holder: object) -> bool:
        """Put a message that arrived into its lane; return whether it is in flight."""
        key = message.lane_key
        if key not in queue.lanes:
            lane = queue.lanes[key] = Lane(queue, key)
            self._start(lane, message, holder)
            return True
        lane = self._lane(queue, key)
        if holder is not None and not lane.waiting and self._continues(lane, holder):
            lane.in_flight += 1
            message.lane = lane
            return True
        lane.waiting.append(message)
        return False

    def _lane(self, queue: PartitionQueue[M], key: Hashable) -> Lane:
        """Return the lane of a message in flight."""
        lane = queue.lanes.get(key) if key is not None else None
        if lane is None:
            lane = Lane(queue, key)
            lane.in_flight = 1
            if key is not None:
                queue.lanes[key] = lane
        return lane

    def _start(self, lane: Lane, message: M, holder: object) -> M:
        if lane.key is None:
            lane.queue.alone.discard(lane)
        lane.in_flight = 1
        lane.holder = holder
        lane.retrying, lane.failed = lane.failed, False
        lane.queue.retrying += lane.retrying
        message.lane = lane
        return message

    def settle(self, queue: PartitionQueue[M], messages: Sequence[M]) -> None:
        """End the flight of messages: their lanes continue."""
        # Hot path: most messages are alone in their lane.
        if queue.removed:
            return
        lanes = queue.lanes
        queue.in_flight -= len(messages)
        self._in_flight -= len(messages)
        for message in messages:
            lane = message.lane
            if lane is None:
                key = message.lane_key
                if key is None or (lane := lanes.pop(key, None)) is None:
                    continue
                lanes[key] = lane
            message.lane = None
            lane.in_flight -= 1
            if not lane.in_flight:
                self._continue(lane)

    def _continue(self, lane: Lane) -> None:
        """Let a lane without messages in flight give the next one."""
        queue = lane.queue
        lane.holder = None
        queue.retrying -= lane.retrying
        lane.retrying = False
        if queue.removed or lane.delayed or lane.blocked:
            return
        if lane.waiting and not lane.listed:
            lane.listed = True
            (queue.retries if lane.failed else queue.continued).append(lane)
            self._list(queue)
        elif not lane.waiting and queue.lanes.get(lane.key) is lane:
            del queue.lanes[lane.key]

    def delay(self, queue: PartitionQueue[M], message: M, due_s: float) -> None:
        """Put a message that failed back to the front of its lane, which continues with it at
        `due_s`."""
        lane = self._to_front(queue, message)
        lane.delayed = lane.failed = True
        heapq.heappush(self._delayed, (due_s, next(self._numbers), lane))
        self.settle(queue, (message,))

    def put_back(self, queue: PartitionQueue[M], message: M) -> None:
        """Put a message back to the front of its lane."""
        self._to_front(queue, message)
        self.settle(queue, (message,))

    def _to_front(self, queue: PartitionQueue[M], message: M) -> Lane:
        lane = message.lane or self._lane(queue, message.lane_key)
        if lane.key is None:
            queue.alone.add(lane)
        lane.waiting.appendleft(message)
        message.lane = lane
        return lane

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
        for lane in (*queue.lanes.values(), *queue.alone):
            if lane is not None:
                lane.waiting.clear()  # a cycle that the garbage collector may not see
        queue.lanes.clear()
        queue.alone.clear()
        queue.continued.clear()
        queue.retries.clear()
        queue.buffer.clear()
        self._in_flight -= queue.in_flight
        queue.in_flight = 0
        self._delayed = [entry for entry in self._delayed if entry[2].queue is not queue]
        heapq.heapify(self._delayed)

    def stop(
        self,
        queue: PartitionQueue[M],
        reason: StopReason,
        owner: Hashable = None,
        until_s: float = math.inf,
    ) -> None:
        """Give out no message of a partition until `go_on` with the same reason and owner.

        Args:
            until_s: when the caller ends it, event loop seconds.
        """
        queue.stops[reason, owner] = until_s

    def go_on(self, queue: PartitionQueue[M], reason: StopReason, owner: Hashable = None) -> None:
        """Give out messages of a partition again unless it is stopped for another reason."""
        queue.stops.pop((reason, owner), None)
        self._list(queue)

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
