"""One partition of a consumer: its messages, their progress, and its set-aside keys.

Pure: no I/O, no clock. The methods are the events of a partition; the state of its messages changes
by the rules of `lifecycle` alone. All is called in the event loop of the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from txbroker.core.consuming.aside import AsideKeys
from txbroker.core.consuming.lifecycle import MessageEvent, apply_event
from txbroker.core.consuming.position import Metadata, StoredOffset
from txbroker.core.consuming.progress import PartitionProgress
from txbroker.core.consuming.queues import PartitionQueue, Queues, StopReason
from txbroker.core.consuming.starts import StartCount
from txbroker.core.records import Partition, Record

_OF_LOG = frozenset({StopReason.ALONE, StopReason.CLEARING})
"""Stops of the log alone: a released key goes on."""


class Lease(Protocol):
    """The time for which this consumer certainly owns a partition."""

    @property
    def deadline_s(self) -> float:
        """Event loop time at which it ends."""


class Feed:
    """Messages that enter a partition one way, with a queue; the messages of a released key, and
    rows of a database that are due, have one beside the partition's log.

    Attributes:
        finished: takes the offsets of messages that are done, in that order.
        bytes: memory of its messages, approximately.
        is_kept: its messages are rows of a database.
        retries: its messages are attempts after the delays of the retry topic.
    """

    is_kept = False
    retries = False

    def __init__(self, partition: PartitionState) -> None:
        self.partition = partition
        self.queue: PartitionQueue[Any] = PartitionQueue(partition.place)
        self.finished: list[int] | deque[int] = []
        self.bytes = 0

    def admit(self, messages: Sequence[Any]) -> None:
        """Messages may be handled now."""

    def clearance(self, message: Any) -> Sequence[Any]:
        """Return what to store with the result of a message so that it is not handled again."""
        return ()

    def stage_mark(self, message: Any) -> Sequence[Any]:
        """Return what to store with the first stage of a message so that it is not called again."""
        return ()

    def fail_again(self) -> bool:
        """Take note that a message failed that would be set aside; return whether it is already."""
        return False


class RecordFeed(Feed):
    """The records of a partition: their done offsets are in its progress.

    Args:
        before: at most once: messages count as done before they are handled.
    """

    def __init__(self, partition: PartitionState, *, retries: bool, before: bool) -> None:
        super().__init__(partition)
        self.retries = retries
        self._before = before
        self.finished = deque(maxlen=0) if before else partition.progress.finished

    def admit(self, messages: Sequence[Any]) -> None:
        """See `Feed.admit`."""
        if self._before:
            self.partition.progress.finished += [message.record.offset for message in messages]


class PartitionState:
    """The state of a partition that this consumer owns.

    Args:
        queues: of all partitions.
        lease: of the source that has assigned it.
        retries: it is a partition of the group's retry topic.
        before: at most once: messages count as done before they are handled.

    Attributes:
        place: topic and partition.
        token: rises with each owner.
        end: the end of the partition, as far as known.
        log: the feed of its records.
        feeds: all feeds, the log first.
        gate: messages that have arrived and may not be handled yet, in offset order.
        in_flight: messages, and the call that has each.
        keeps_rows: its failed messages become rows of a database.
        dirty: its position has changed since the last commit.
        draining: no further message is handed out, it is being released.
    """

    def __init__(
        self,
        place: Partition,
        queues: Queues[Any],
        lease: Lease,
        progress: PartitionProgress,
        *,
        retries: bool = False,
        before: bool = False,
    ) -> None:
        self.place = place
        self.lease = lease
        self.token = 0
        self.topic_id = ""
        self.end = 0
        self.progress = progress
        self.starts = StartCount()
        self.aside = AsideKeys(place)
        self.log = RecordFeed(self, retries=retries, before=before)
        self.feeds: list[Feed] = [self.log]
        self.gate: deque[Any] = deque()
        self.in_flight: dict[Any, Any] = {}
        self.keeps_rows = False
        self.dirty = False
        self.draining = False
        self.queues = queues

    # --- messages ----------------------------------------------------------------------------

    def arrive(self, records: Sequence[Record], next_offset: int, end: int) -> Sequence[Record]:
        """Take the next records of the log; return those that are not done.

        Args:
            next_offset: every offset below it has arrived now.
            end: of the partition.
        """
        self.end = max(self.end, end)
        return self.progress.position.arrive(records, next_offset)

    def apply(self, event: MessageEvent, messages: Sequence[Any], detail: Any = None) -> list[Any]:
        """Apply an event to messages of one feed, see `apply_event`."""
        return apply_event(self, event, messages, detail)

    def admit_due(self, now_ms: float) -> bool:
        """Let messages of the gate be handled that are due, in order: the head is waited for.
        Return whether there are any."""
        count = 0
        for message in self.gate:
            failed = message.failed_before
            if failed is not None and failed.due_ms > now_ms:
                break
            count += 1
        return bool(self.admit_first(count))

    def admit_first(self, count: int) -> list[Any]:
        """Let the first messages of the gate be handled; return them."""
        first = [self.gate.popleft() for _ in range(count)]
        return apply_event(self, MessageEvent.ADMIT, first)

    def add_feed(self, feed: Feed) -> None:
        """Begin with a further feed."""
        self.feeds.append(feed)
        for (reason, owner), until_s in self.log.queue.stops.items():
            if reason not in _OF_LOG:
                self.queues.stop(feed.queue, reason, owner, until_s)

    def remove_feed(self, feed: Feed) -> list[Any]:
        """End with a feed; return the calls that have messages of it."""
        self.feeds.remove(feed)
        self.queues.remove(feed.queue)
        flying = [message for message in self.in_flight if message.feed is feed]
        return [self.in_flight.pop(message) for message in flying]

    def lose(self) -> list[Any]:
        """Drop all messages; return the calls that have some."""
        calls = [call for feed in list(self.feeds) for call in self.remove_feed(feed)]
        # Messages have their partition, in cycles that the garbage collector does not see.
        self.gate.clear()
        self.starts = StartCount()
        return calls

    # --- positions ---------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Memory of its messages, approximately."""
        return sum([feed.bytes for feed in self.feeds])

    def begin_start(self, messages_max: int, *, again: bool) -> None:
        """Count this start of an owner, see `StartCount.begin`."""
        self.starts.begin(self.progress.position.low, self.end, messages_max, again=again)

    def store_stage(self, message: Any) -> None:
        """The first stage of a message is stored: after a crash only the later ones follow."""
        message.stage = max(1, message.stage)
        if message.feed is self.log:
            self.progress.ahead.add(message.record.offset)

    @property
    def head(self) -> Metadata:
        """The metadata of its position, without ranges."""
        return Metadata(self.token, self.topic_id, self.aside.count, starts=self.starts.value)

    def saved(
        self, done_too: Sequence[int] = (), ahead_too: Sequence[int] = ()
    ) -> tuple[int, Metadata]:
        """Return the position to store, see `PartitionProgress.saved`."""
        self.starts.forget(self.progress.position.low, self.progress.is_done)
        return self.progress.saved(self.head, done_too, ahead_too)

    def stored(
        self,
        done_too: Sequence[int] = (),
        ahead_too: Sequence[int] = (),
        *,
        distinct: bool = False,
    ) -> StoredOffset:
        """Return what to commit, see `PartitionProgress.stored`."""
        self.starts.forget(self.progress.position.low, self.progress.is_done)
        return self.progress.stored(self.head, done_too, ahead_too, distinct=distinct)

    def withdraw(self) -> bool:
        """At most once: take messages that count as done and were not handed out off the position;
        return whether there are any."""
        waiting = self.log.queue.remove_all()
        return self.progress.withdraw([message.record.offset for message in waiting])

    # --- stops -------------------------------------------------------------------------------

    def stop(
        self, reason: StopReason, owner: Hashable = None, until_s: float = float("inf")
    ) -> None:
        """Hand out no message until `go_on` with the same reason and owner, or until a time."""
        for feed in self.feeds[:1] if reason in _OF_LOG else self.feeds:
            self.queues.stop(feed.queue, reason, owner, until_s)

    def go_on(self, reason: StopReason, owner: Hashable = None) -> None:
        """End a stop; without an equal one nothing changes."""
        for feed in self.feeds:
            self.queues.go_on(feed.queue, reason, owner)

    def end_stops(self, now_s: float) -> bool:
        """End the stops whose time is over; return whether there were any."""
        over = {
            key
            for feed in self.feeds
            for key, until_s in feed.queue.stops.items()
            if until_s <= now_s
        }
        for reason, owner in over:
            self.go_on(reason, owner)
        return bool(over)

    def is_stopped(self, reason: StopReason, owner: Hashable = None) -> bool:
        """Return whether it is stopped for a reason."""
        return (reason, owner) in self.log.queue.stops
