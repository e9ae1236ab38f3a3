"""Hands out messages, takes their results, and applies the failure policy.

Workers, pulled messages and batches use the same two steps: `next` and `finish`. Between them a
message is in flight and occupies its lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import structlog

from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work, due_ms, source_of
from txbroker.core.consuming.aside import KEYS_MAX
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    DEAD_PARTITIONS,
    Failed,
    GroupTopics,
    make_copy,
    spread,
)
from txbroker.core.consuming.failure import (
    Bury,
    Drop,
    FailurePolicy,
    Later,
    RetryHere,
    RetryLater,
    SetAside,
    Verdict,
)
from txbroker.core.consuming.queues import Order, Queues
from txbroker.core.records import Record
from txbroker.door.consuming import Copy, Partition
from txbroker.error_text import safe_repr
from txbroker.errors import TxbrokerError

log = structlog.wrap_logger(logging.getLogger(__name__))

_SWEEP_S = 0.05
"""The time between looks at leases, delays, due times and timeouts."""
_REFUSED_PAUSE_S = 5.0
_DRAIN, _LEASE, _REFUSED = "drain", "lease", "refused"
"""Reasons for which a partition is suspended."""


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
        self._policy = policy
        self._topics = topics
        self._bytes_max = bytes_max
        self._before = before
        self.order = order
        self._queues: Queues[ReceivedMessage] = Queues()
        self._works: dict[Work, None] = {}
        self._paused: set[Work] = set()
        self._in_flight: dict[ReceivedMessage, object] = {}
        self._takers: deque[asyncio.Future[int]] = deque()
        self._woken = 0
        """Takers that were woken and have not run yet: one at a time, each wakes the next."""
        self._watchers: list[asyncio.Future[int]] = []
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
        self.abandon: Callable[[Collection[object]], None] = lambda _holders: None
        """Cancels the handlers of these holders; set by the workers."""
        self._suspensions: set[Suspension] = set()
        self.stopping = False
        self.error: Exception | None = None

    # --- partitions --------------------------------------------------------------------------

    def add(self, work: Work, commits: Commits, flow: Flow) -> None:
        """Begin with a partition."""
        self._works[work] = None
        work.commits, work.flow = commits, flow
        for suspension in self._suspensions:
            self._suspend(work, suspension)

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
        self._wake()

    @property
    def works(self) -> Collection[Work]:
        """The partitions."""
        return self._works.keys()

    def suspend(self, suspension: Suspension) -> None:
        """Hand out no message that matches until `resume` with an equal argument."""
        self._suspensions.add(suspension)
        for work in self._works:
            self._suspend(work, suspension)

    def _suspend(self, work: Work, suspension: Suspension) -> None:
        if suspension.matches(work.place) and suspension.key is not None:
            self._queues.suspend_key(work.queue, suspension.key)
        elif suspension.matches(work.place):
            self._queues.suspend(work.queue, str(suspension))

    def resume(self, suspension: Suspension) -> None:
        """End a suspension; without an equal `suspend` nothing changes."""
        self._suspensions.discard(suspension)
        for work in self._works:
            if not suspension.matches(work.place):
                continue
            if suspension.key is None:
                self._queues.resume(work.queue, str(suspension))
            elif not any(each.holds(work.place, suspension.key) for each in self._suspensions):
                self._queues.resume_key(work.queue, suspension.key)
        self._wake()

    def _resume(self, work: Work, reason: str) -> None:
        self._queues.resume(work.queue, reason)
        self._wake()

    async def drained(self, work: Work) -> None:
        """Wait until no message of a partition is in flight; hand out no further ones. At most
        once: until those that count as done are handled."""
        if not self._before:
            self._queues.suspend(work.queue, _DRAIN)
        while any(message.work.owner is work for message in self._in_flight) or (
            self._before and work.queue.heads()
        ):
            await self._changed(self._watchers)

    def interrupt(self, work: Work) -> None:
        """Cancel the handlers of a partition's messages in flight, and give the messages back. At
        most once: they are dropped, because their handlers may have had an effect."""
        flying = [message for message in self._in_flight if message.work.owner is work]
        holders = [self._in_flight[message] for message in flying]
        if self._before:
            self.counts["dropped"] += len(flying)
            for message in flying:
                del self._in_flight[message]
                self._end(message)
            self._wake()
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
            self._wake()

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
        if now_s - self._swept_s > _SWEEP_S:
            # Before anything else after a pause of the process: its leases may have ended.
            self.sweep(now_s)
        if self.stopping and not self._before:
            return None
        while True:
            message = self._queues.take(holder if together else None)
            if message is None:
                return None
            if message.work.aside is not None and message.work.is_aside(message):
                self._set_aside(message, "an earlier message of its key is set aside")
                continue
            self._in_flight[message] = holder
            if self._takers and not self._woken and self._queues.more:
                self._wake()
            return message

    @property
    def in_flight(self) -> Collection[ReceivedMessage]:
        """The messages that are being handled."""
        return self._in_flight.keys()

    def finish(self, message: ReceivedMessage, error: BaseException | None) -> None:
        """Take the result of a message: None: it is done. Ignored unless it is in flight."""
        if self._in_flight.pop(message, self) is self:
            return
        if error is None:
            self.handled += 1
            self._queues.settle(message.work.queue, message)
            self._settled(message)
        else:
            self._fail(message, error)
        if self._watchers or (self._takers and not self._woken and self._queues.more):
            self._wake()

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
        self._wake()

    def _end(self, message: ReceivedMessage) -> None:
        """The message needs nothing more: its lane continues, its offset is done."""
        self._queues.settle(message.work.queue, message)
        self._settled(message)

    def give_back_of(self, holders: Collection[object]) -> None:
        """Put the messages that these holders have in flight back."""
        messages = [message for message, holder in self._in_flight.items() if holder in holders]
        self.give_back(sorted(messages, key=lambda message: message.record.offset))

    def _settled(self, message: ReceivedMessage) -> None:
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

    def _fail(self, message: ReceivedMessage, error: BaseException) -> None:
        if not isinstance(error, Later):
            message.failures += 1
            self.counts["failed"] += 1
        verdict = self._policy.decide(error, message.failures, message.work.step)
        log.log(
            logging.DEBUG if isinstance(error, Later) else logging.WARNING,
            "message failed",
            message=repr(message),
            error=safe_repr(error),
            next=type(verdict).__name__,
        )
        self._apply(message, verdict)

    def _apply(self, message: ReceivedMessage, verdict: Verdict) -> None:
        work = message.work
        if isinstance(verdict, SetAside) and work.aside_count >= KEYS_MAX:
            log.error("too many set-aside keys", partition=work.place, keys=KEYS_MAX)
            self.counts["aside_full"] += 1
            verdict = RetryHere(_REFUSED_PAUSE_S)
        if isinstance(verdict, RetryHere):
            message.attempt += 1
            due_s = self._loop.time() + verdict.delay_s
            self._queues.delay(work.queue, message, due_s)
        elif isinstance(verdict, Drop):
            self.counts["dropped"] += 1
            self._end(message)
        elif isinstance(verdict, SetAside) and work.fails_again():
            self._queues.settle(message.work.queue, message)
        elif isinstance(verdict, SetAside):
            key = message.record.key
            work.setting_aside.add(message.offset if key is None else key)
            self._set_aside(message, verdict.cause)
        else:
            self._copy(message, verdict)

    def _copy(self, message: ReceivedMessage, verdict: Bury | RetryLater) -> None:
        """Copy a message to another topic; its lane waits until the copy is stored."""
        source, due = source_of(message), round(time.time() * 1000)
        if isinstance(verdict, RetryLater):
            topic, number, name = self._topics.retry, verdict.step, f"retry_{verdict.step}"
            due += round(verdict.delay_s * 1000)
        else:
            topic, name = self._topics.dead, "dead"
            number = spread(source[:2], DEAD_PARTITIONS)
        record = make_copy(message.record, Failed(source, message.attempt, due, verdict.cause))

        def stored() -> None:
            self.counts[name] += 1
            self._end(message)
            self._wake()

        self._store(message, Copy(topic, number, record), stored)

    def _store(self, message: ReceivedMessage, copy: Copy, stored: Callable[[], None]) -> None:
        if message.work.commits is not None:
            message.work.commits.copy(message.work, message, copy, stored)

    def _set_aside(self, message: ReceivedMessage, cause: str) -> None:
        """Copy a message to the aside topic. Its lane continues at once: later messages of the key
        follow in the same order."""
        source = source_of(message)
        number = spread(source[:2], ASIDE_PARTITIONS)
        now_ms = round(time.time() * 1000)
        record = make_copy(message.record, Failed(source, message.attempt, now_ms, cause))
        self._queues.settle(message.work.queue, message)

        def stored() -> None:
            self.counts["aside"] += 1
            self._settled(message)

        copy = Copy(self._topics.aside, number, record)
        self._store(message, copy, stored)

    def refused(self, work: Work, messages: Sequence[ReceivedMessage], why: str) -> None:
        """Copies of these messages, in order, cannot be stored: the partition pauses, and then they
        are handled again before the others."""
        log.error("copy refused", partition=work.place, messages=len(messages), why=why)
        self.counts["copy_refused"] += len(messages)
        self._queues.suspend(work.queue, _REFUSED)
        self._resting[work] = self._loop.time() + _REFUSED_PAUSE_S
        for message in messages:
            message.attempt += 1
            self._queues.put_back(work.queue, message)

    # --- time --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at leases, delays and due times until cancelled."""
        while True:
            self.sweep(self._loop.time())
            await asyncio.sleep(_SWEEP_S)

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
            self._resume(work, _REFUSED)
        if woken:
            self._wake()

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

    def oldest_ms(self) -> int | None:
        """Return the timestamp of the oldest message that is not done, as far as it has arrived."""
        times = [message.timestamp_ms for message in self._in_flight]
        for work in self._works:
            heads = [*work.queue.heads()]
            if work.gate and due_ms(work.gate[0]) <= time.time() * 1000:
                heads.append(work.gate[0])
            times += [message.timestamp_ms for message in heads]
        return min(times, default=None)

    # --- waiting -----------------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until there may be a message, or until the end.

        Raises: the error that ended the consumer.
        """
        if self.error is not None:
            raise self.error
        if self.stopping:
            return
        await self._changed(self._takers)
        if self.error is not None:
            raise self.error

    async def room(self) -> None:
        """Wait until a message is finished, or until the end."""
        await self._changed(self._watchers)

    async def _changed(
        self, waiters: deque[asyncio.Future[int]] | list[asyncio.Future[int]]
    ) -> None:
        waiter: asyncio.Future[int] = self._loop.create_future()
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):
                    waiters.remove(waiter)
            else:
                self._woken -= waiter.result()
                self._wake()
            raise
        self._woken -= waiter.result()

    def _wake(self) -> None:
        """Wake one taker, and everything that watches."""
        if self._watchers:
            watchers, self._watchers = self._watchers, []
            for waiter in watchers:
                if not waiter.done():
                    waiter.set_result(0)
        while self._takers and not self._woken:
            waiter = self._takers.popleft()
            if not waiter.done():
                self._woken += 1
                waiter.set_result(1)

    def stop(self) -> None:
        """Hand out no further message."""
        self.stopping = True
        takers, self._takers = self._takers, deque()
        for waiter in takers:
            if not waiter.done():
                waiter.set_result(0)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the consumer with an error."""
        if self.error is None:
            self.error = error
        self.stop()
