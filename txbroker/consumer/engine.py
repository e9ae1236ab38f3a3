"""Hands out messages, takes their results, and applies the failure policy.

Workers, pulled messages and batches use the same two steps: `next` and `finish`. Between them a
message is in flight and occupies its lane.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from txbroker.consumer.failures import REFUSED_PAUSE_S, Failures
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work
from txbroker.consumer.suspensions import Suspensions
from txbroker.consumer.waiting import Waiting
from txbroker.core.consuming.copies import (
    GroupTopics,
)
from txbroker.core.consuming.failure import (
    FailurePolicy,
)
from txbroker.core.consuming.queues import Order, Queues
from txbroker.core.records import Record
from txbroker.door.consuming import Copy, Partition
from txbroker.errors import TxbrokerError

log = structlog.wrap_logger(logging.getLogger(__name__))

SWEEP_S = 0.05
"""The time between looks at leases, delays, due times and timeouts."""
_DRAIN, _LEASE, _REFUSED = "drain", "lease", "refused"
"""Reasons for which a partition is suspended."""


class Commits(Protocol):
    """Where results go: the committer of the partition's reader."""

    def changed(self, work: Work, count: int = 1) -> None:
        """Take note that messages of a partition are done."""

    def copy(
        self,
        work: Work,
        message: ReceivedMessage | None,
        copy: Copy,
        stored: Callable[[], None],
    ) -> None:
        """Store a copy with the partition's position, together; then call `stored`."""


class Flow(Protocol):
    """The fetching of a partition."""

    def pause(self, partition: Partition) -> None: ...

    def resume(self, partition: Partition) -> None: ...


class MemoryTooSmall(TxbrokerError):
    """A record is larger than the memory for messages."""


class Engine:
    """The messages of all partitions of a consumer.

    Args:
        order: what keeps its order.
        policy: for failed messages.
        topics: of the group, for copies.
        bytes_max: memory for messages, bytes.
        before: at most once: positions are stored before messages are handed out.
    """

    def __init__(
        self,
        order: Order,
        policy: FailurePolicy,
        topics: GroupTopics,
        bytes_max: int,
        *,
        before: bool = False,
    ) -> None:
        self._bytes_max = bytes_max
        self._before = before
        self.order = order
        self._queues: Queues[ReceivedMessage] = Queues()
        self._works: dict[Work, None] = {}
        self._paused: set[Work] = set()
        self._in_flight: dict[ReceivedMessage, object] = {}
        self.waiting = Waiting()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._swept_s = 0.0
        self._expired: set[Work] = set()
        self._resting: dict[Work, float] = {}
        self.handled = 0
        """Messages that are done since the start."""
        self.counts: Counter[str] = Counter()
        """Other events: `failed`, `dropped`, `dead`, `aside`, `retry_N`,
        `fenced`, `overflow`, `gap`."""
        self._failures = Failures(policy, topics, self._queues, self)
        self.abandon: Callable[[Collection[object]], None] = lambda _holders: None
        """Cancels the handlers of these holders; set by the workers."""
        self.suspensions = Suspensions(self._queues, self._works)
        self.stopping = False
        self.error: Exception | None = None

    # --- partitions --------------------------------------------------------------------------

    def add(self, work: Work, commits: Commits, flow: Flow) -> None:
        """Begin with a partition."""
        self._works[work] = None
        work.commits, work.flow = commits, flow
        self.suspensions.apply(work)

    def remove(self, work: Work) -> None:
        """End with a partition: its messages are dropped, the handlers of those in flight are
        cancelled, and their results are ignored."""
        if work not in self._works:
            return
        del self._works[work]
        work.commits = None
        self._queues.remove(work.queue)
        work.gate.clear()
        self._paused.discard(work)
        self._expired.discard(work)
        self._resting.pop(work, None)
        flying = [message for message in self._in_flight if message.work is work]
        self.abandon([self._in_flight.pop(message) for message in flying])
        self.waiting.wake()

    @property
    def works(self) -> Collection[Work]:
        """The partitions."""
        return self._works.keys()

    async def drained(self, work: Work) -> None:
        """Wait until no message of a partition is in flight; hand out no further ones. At most
        once: until those that count as done are handled."""
        if not self._before:
            self._queues.suspend(work.queue, _DRAIN)
        while any(message.work.owner is work for message in self._in_flight) or (
            self._before and work.queue.heads()
        ):
            await self.waiting.watch()

    def interrupt(self, work: Work) -> None:
        """Cancel the handlers of a partition's messages in flight, and give the messages back. At
        most once: they are dropped, because their handlers may have had an effect."""
        flying = [message for message in self._in_flight if message.work.owner is work]
        holders = [self._in_flight[message] for message in flying]
        if self._before:
            self.counts["dropped"] += len(flying)
            for message in flying:
                del self._in_flight[message]
                self.end(message)
            self.waiting.wake()
        else:
            self.give_back(sorted(flying, key=lambda message: message.record.offset))
        self.abandon(holders)

    # --- arrival -----------------------------------------------------------------------------

    def deliver(self, work: Work, records: Sequence[Record], next_offset: int, end: int) -> None:
        """Take records of a partition that arrived, see `Deliver`."""
        work.end = max(work.end, end)
        low = work.position.low
        fresh = work.position.arrive(records, next_offset)
        if work.position.low != low and work.commits is not None:
            work.commits.changed(work, 0)  # offsets without a record
        messages = work.wrap(fresh)
        work.bytes += sum([message.size for message in messages])
        self._limit(work, messages)
        if self._before and work.commits is not None:
            work.gate.extend(messages)
            work.commits.changed(work, len(messages))
        elif work.is_retry:
            work.gate.extend(messages)
            self.admit(work, work.admit_due())
        else:
            self.admit(work, messages)

    def admit(self, work: Work, messages: Sequence[ReceivedMessage]) -> None:
        """Let messages that arrived be handled."""
        if messages:
            self._queues.add(work.queue, messages)
            self.waiting.wake()

    def _limit(self, work: Work, messages: Sequence[ReceivedMessage]) -> None:
        if work.bytes >= self._share and work not in self._paused:
            self._paused.add(work)
            work.flow.pause(work.place)
        largest = max((message.size for message in messages), default=0)
        if largest > self._bytes_max:
            self.fail(
                MemoryTooSmall(
                    f"{work.place[0]}-{work.place[1]} has a record of {largest} bytes, and "
                    f"buffered_bytes_max is {self._bytes_max}: raise it"
                )
            )

    # --- hand out and finish -----------------------------------------------------------------

    def next(self, holder: object, *, together: bool = False) -> ReceivedMessage | None:
        """Return the next message, None if there is none now; `finish` must follow.

        Args:
            holder: who handles it.
            together: it handles several: a lane that it occupies gives it more messages.
        """
        now_s = self._loop.time()
        if now_s - self._swept_s > SWEEP_S:
            # Before anything else after a pause of the process: its leases may have ended.
            self.sweep(now_s)
        if self.stopping and not self._before:
            return None
        while True:
            message = self._queues.take(holder if together else None)
            if message is None:
                return None
            if message.work.aside is not None and message.work.is_aside(message):
                self._failures.set_aside(message, "an earlier message of its key is set aside")
                continue
            self._in_flight[message] = holder
            if self.waiting.idle and self._queues.more:
                self.waiting.wake()
            return message

    @property
    def in_flight(self) -> Mapping[ReceivedMessage, object]:
        """The messages that are being handled, and who handles each."""
        return self._in_flight

    def finish(self, message: ReceivedMessage, error: BaseException | None) -> None:
        """Take the result of a message: None: it is done. Ignored unless it is in flight."""
        if self._in_flight.pop(message, self) is self:
            return
        if error is None:
            self.handled += 1
            self._queues.settle(message.work.queue, message)
            self.settled(message)
        else:
            self._failures.fail(message, error)
        waiting = self.waiting
        if waiting.watched or (waiting.idle and self._queues.more):
            waiting.wake()

    def report(self, message: ReceivedMessage, error: Exception | None) -> None:
        """Take a result from the user's code, in any thread. While the handler of a batch runs it
        is kept until the end of the batch, so that the order of its lanes holds."""
        reports = getattr(self._in_flight.get(message), "reports", None)
        if reports is not None:
            reports.setdefault(message, error)
        elif threading.get_ident() == self._thread:
            self.finish(message, error)
        else:
            self._loop.call_soon_threadsafe(self.finish, message, error)

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Put messages in flight, which must be in order, back to be handled again."""
        for message in reversed(messages):
            if self._in_flight.pop(message, self) is not self:
                self._queues.put_back(message.work.queue, message)
        self.waiting.wake()

    def end(self, message: ReceivedMessage) -> None:
        """The message needs nothing more: its lane continues, its offset is done."""
        self._queues.settle(message.work.queue, message)
        self.settled(message)
        self.waiting.wake()

    def settled(self, message: ReceivedMessage) -> None:
        """The message is done: so is its offset, and its memory is free."""
        work = message.work
        commits = work.commits
        if commits is None:
            return
        work.bytes -= message.size
        if not self._before:
            work.finished(message)
            commits.changed(work)
        elif work.gate:
            commits.changed(work, 0)
        if self._paused and work in self._paused and work.bytes < self._share / 2:
            self._paused.discard(work)
            work.flow.resume(work.place)

    @property
    def _share(self) -> float:
        """Memory for one partition, bytes."""
        return self._bytes_max / max(1, len(self._works))

    def refused(self, work: Work, messages: Sequence[ReceivedMessage], why: str) -> None:
        """Copies of these messages, in order, cannot be stored: the partition pauses, and then they
        are handled again before the others."""
        log.error("copy refused", partition=work.place, messages=len(messages), why=why)
        self.counts["copy_refused"] += len(messages)
        self._queues.suspend(work.queue, _REFUSED)
        self._resting[work] = self._loop.time() + REFUSED_PAUSE_S
        for message in messages:
            message.attempt += 1
            self._queues.put_back(work.queue, message)

    # --- time --------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Continue with what is due, and stop partitions whose lease has ended."""
        self._swept_s = now_s
        waiting = self._queues.delayed
        self._queues.wake(now_s)
        woken = self._queues.delayed < waiting
        for work in self._works:
            if work.gate and work.is_retry:
                self.admit(work, work.admit_due())
            expired = work.lease.ended(now_s)
            if expired != (work in self._expired):
                self._expire(work, expired=expired)
                woken = True
        for work in [work for work, until_s in self._resting.items() if until_s <= now_s]:
            del self._resting[work]
            self._queues.resume(work.queue, _REFUSED)
            woken = True
        if woken:
            self.waiting.wake()

    def _expire(self, work: Work, *, expired: bool) -> None:
        if not expired:
            self._expired.discard(work)
            self._queues.resume(work.queue, _LEASE)
            return
        log.warning("lease ended", partition=work.place)
        self.counts["fenced"] += 1
        self._expired.add(work)
        self._queues.suspend(work.queue, _LEASE)
        self.interrupt(work)

    # --- the end -----------------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until there may be a message, or until the end.

        Raises: the error that ended the consumer.
        """
        if self.error is None and not self.stopping:
            await self.waiting.take()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Hand out no further message."""
        self.stopping = True
        self.waiting.wake_all()

    def fail(self, error: Exception) -> None:
        """End the consumer with an error."""
        if self.error is None:
            self.error = error
        self.stop()
