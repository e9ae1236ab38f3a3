"""Hands out messages, takes their results, and applies the failure policy.

Workers, pulled messages and batches use the same two steps: `next` and `finish`. Between them a
message is in flight and occupies its lane.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import structlog

from txbroker.consumer.failures import REFUSED_PAUSE_S, Failures
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Commits, Flow, Memory, Work, too_large
from txbroker.consumer.waiting import Waiting
from txbroker.core.consuming.copies import (
    GroupTopics,
)
from txbroker.core.consuming.failure import (
    FailurePolicy,
    ProcessEnded,
)
from txbroker.core.consuming.queues import Lane, Order, Queues
from txbroker.core.records import Record
from txbroker.door.consuming import Partition
from txbroker.door.writing import Copy
from txbroker.error_text import safe_repr
from txbroker.errors import KafkaUnavailable

log = structlog.wrap_logger(logging.getLogger(__name__))

SWEEP_S = 0.05
"""The time between looks at leases, delays, due times and timeouts."""
_DRAIN, _LEASE, _REFUSED, _NOT_STORED = "drain", "lease", "refused", "not stored"
_ALONE = "alone"
"""Reasons for which a partition is suspended."""
_NOT_NOTED_PAUSE_S = 1.0
"""Of a worker whose message could not be noted in the stored position."""


class Holder:
    """Who has messages in flight.

    Attributes:
        collecting: it is taking a batch: no handler has begun with its messages.
        since_s: when its call began, None if there is none.
        untimed: its handler does not run: the call waits for a connection, or a commit.
        reports: results of single messages that wait for the end of their batch; None: no batch.
        outputs: copies to store with the messages' positions.
    """

    collecting = False
    since_s: float | None = None
    untimed = False
    reports: dict[ReceivedMessage, BaseException | None] | None = None
    outputs: Sequence[Copy] = ()


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
        self._refused: set[Commits] = set()

    def add(self, suspension: Suspension) -> None:
        """Hand out no message that matches until `remove` with an equal argument."""
        self._active.add(suspension)
        for work in self._works:
            self._suspend(work, suspension)

    def apply(self, work: Work) -> None:
        """Suspend what matches in a new partition."""
        for suspension in self._active:
            self._suspend(work, suspension)
        if work.owner.commits in self._refused:
            self._queues.suspend(work.queue, _NOT_STORED)

    def hold_all(self, commits: Commits) -> None:
        """Hand out nothing whose results go there, until `release_all`."""
        self._refused.add(commits)
        for work in self._works:
            if work.owner.commits is commits:
                self._queues.suspend(work.queue, _NOT_STORED)

    def release_all(self, commits: Commits) -> None:
        """End `hold_all`."""
        self._refused.discard(commits)
        for work in self._works:
            if work.owner.commits is commits:
                self._queues.resume(work.queue, _NOT_STORED)

    def fill(self, work: Work, *, full: bool) -> None:
        """Hand out no new messages of a partition while it is full of results to store."""
        self._queues.fill(work.queue, full=full)

    def _suspend(self, work: Work, suspension: Suspension) -> None:
        if suspension.matches(work.place) and suspension.key is not None:
            self._queues.suspend_key(work.queue, suspension.key)
        elif suspension.matches(work.place):
            self._queues.suspend(work.queue, str(suspension))

    def hold(self, work: Work, key: bytes | int) -> None:
        """Hand out no message of a partition until `release`, for the sake of a released key."""
        self._queues.suspend(work.queue, f"held for {key!r}")

    def release(self, work: Work, key: bytes | int) -> None:
        """End `hold`."""
        self._queues.resume(work.queue, f"held for {key!r}")

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


class Pauses:
    """Partitions that pause: their lease has ended, or copies of their messages were refused."""

    def __init__(self, queues: Queues[ReceivedMessage]) -> None:
        self._queues = queues
        self._expired: set[Work] = set()
        self._resting: dict[Work, float] = {}

    def rest(self, work: Work, until_s: float) -> None:
        """Hand out no message of a partition until a time."""
        self._queues.suspend(work.queue, _REFUSED)
        self._resting[work] = until_s

    def expire(self, works: Collection[Work], now_s: float) -> list[Work]:
        """Pause partitions whose lease has ended since the last call; return them."""
        expired = [w for w in works if w not in self._expired and w.lease.ended(now_s)]
        for work in expired:
            self._expired.add(work)
            self._queues.suspend(work.queue, _LEASE)
        return expired

    def end(self, now_s: float) -> bool:
        """Continue with partitions whose pause is over; return whether there were any."""
        rested = [work for work, until_s in self._resting.items() if until_s <= now_s]
        for work in rested:
            del self._resting[work]
            self._queues.resume(work.queue, _REFUSED)
        renewed = [work for work in self._expired if not work.lease.ended(now_s)]
        for work in renewed:
            self._expired.discard(work)
            self._queues.resume(work.queue, _LEASE)
        return bool(rested or renewed)

    def forget(self, work: Work) -> None:
        """A partition has gone."""
        self._expired.discard(work)
        self._resting.pop(work, None)


class Alone:
    """The message in flight of all partitions in which one may end the process.

    Args:
        in_flight: the messages of the engine, kept current by it.
    """

    def __init__(
        self,
        queues: Queues[ReceivedMessage],
        works: Collection[Work],
        in_flight: Mapping[ReceivedMessage, Holder],
    ) -> None:
        self._queues = queues
        self._works = works
        self._in_flight = in_flight
        self.message: ReceivedMessage | None = None

    def apply(self, work: Work) -> None:
        """Hand out nothing of a new partition meanwhile."""
        if work.is_suspect and self.message is not None:
            self._queues.suspend(work.queue, _ALONE)

    def begin(self, message: ReceivedMessage) -> None:
        """Hand out no other message that may end the process."""
        self.message, message.alone = message, True
        for work in self._works:
            if work.is_suspect:
                self._queues.suspend(work.queue, _ALONE)

    def end(self) -> None:
        """Hand out the next one if the last one is not in flight any more."""
        if self.message is not None and self.message not in self._in_flight:
            self.message.work.note_handled(None)
            self.message = None
            for work in self._works:
                self._queues.resume(work.queue, _ALONE)

    async def note(self, holder: Holder) -> bool:
        """Note the message in the stored position. Return whether its handler may be called now;
        otherwise it was given back.

        Args:
            holder: of the message.
        """
        message = self.message
        assert message is not None
        engine, commits = message.work.engine, message.work.commits
        if commits is not None:
            message.work.note_handled(message)
            commits.changed(message.work, 0)
            try:
                await commits.flush([message.work])
            except KafkaUnavailable as error:
                log.warning("positions not stored", error=safe_repr(error))
                if self._in_flight.get(message) is holder:
                    engine.give_back([message])
                    await asyncio.sleep(_NOT_NOTED_PAUSE_S)
        return self._in_flight.get(message) is holder


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
        self.before = before
        """At most once, see the argument."""
        self.order = order
        self._queues: Queues[ReceivedMessage] = Queues()
        self._works: dict[Work, None] = {}
        self.memory = Memory(bytes_max, self._works)
        self._in_flight: dict[ReceivedMessage, Holder] = {}
        self.waiting = Waiting(lambda: self._queues.more)
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self.now_s = 0.0
        """Event loop time of the last call of `next`."""
        self._swept_s = 0.0
        self._pauses = Pauses(self._queues)
        self.staged = False
        """The handler has later stages, whose messages are done only after them."""
        self.handled = 0
        """Messages that are done since the start."""
        self.counts: Counter[str] = Counter()
        """Other events: `failed`, `dropped`, `dead`, `aside`, `retry_N`,
        `fenced`, `overflow`, `gap`."""
        self._failures = Failures(policy, topics, self._queues, self)
        self.lines = self._failures.lines
        self.abandon: Callable[[Collection[Holder]], None] = lambda _holders: None
        """Cancels the handlers of these holders; set by the workers."""
        self.suspensions = Suspensions(self._queues, self._works)
        self.alone = Alone(self._queues, self._works, self._in_flight)
        self.stopping = False
        self.error: Exception | None = None

    # --- partitions --------------------------------------------------------------------------

    def add(self, work: Work, commits: Commits, flow: Flow) -> None:
        """Begin with a partition."""
        self._works[work] = None
        work.commits, work.flow = commits, flow
        self.suspensions.apply(work)
        if work.owner.draining:
            self._queues.suspend(work.queue, _DRAIN)
        self.alone.apply(work)

    def remove(self, work: Work) -> None:
        """End with a partition, and with its released keys: its messages are dropped, the handlers
        of those in flight are cancelled, and their results are ignored."""
        for each in self._family(work):
            del self._works[each]
            each.commits = None
            self._queues.remove(each.queue)
            each.gate.clear()
            self.memory.paused.discard(each)
            self._pauses.forget(each)
            flying = [message for message in self._in_flight if message.work is each]
            self.abandon([self._in_flight.pop(message) for message in flying])
        self.alone.end()
        self.waiting.wake()

    def _family(self, work: Work) -> list[Work]:
        """Return a partition and its released keys; of a released key only itself."""
        return [each for each in self._works if work in (each, each.owner)]

    @property
    def works(self) -> Collection[Work]:
        """The partitions."""
        return self._works.keys()

    async def drained(self, work: Work) -> None:
        """Wait until no message of a partition is in flight; hand out no further ones."""
        work.draining = True
        for each in self._family(work):
            self._queues.suspend(each.queue, _DRAIN)
        while any(message.work.owner is work for message in self._in_flight):
            await self.waiting.watch()

    def interrupt(self, work: Work) -> None:
        """Cancel the handlers of a partition's messages in flight. Each message is given back when
        its handler has ended, so that no two run with it."""
        flying = self._in_flight.items()
        self.give_back([m for m, by in flying if by.collecting and m.work.owner is work])
        self.abandon([by for message, by in self._in_flight.items() if message.work.owner is work])

    def cancelled(self, messages: Sequence[ReceivedMessage], holder: Holder) -> None:
        """The handler of messages was cancelled: they are handled again; at most once: dropped."""
        mine = [message for message in messages if self._in_flight.get(message) is holder]
        for message in mine:
            message.attempt += 1
            if self.before:
                self.finish(message, asyncio.CancelledError("the handler was cancelled"))
        self.give_back(mine)

    # --- arrival -----------------------------------------------------------------------------

    def deliver(self, work: Work, records: Sequence[Record], next_offset: int, end: int) -> None:
        """Take records of a partition that arrived, see `Deliver`."""
        work.end = max(work.end, end)
        low = work.position.low
        fresh = work.position.arrive(records, next_offset)
        if work.position.low != low and work.commits is not None:
            work.commits.changed(work, 0)  # offsets without a record
        messages = work.wrap(fresh)
        sizes = [message.size for message in messages]
        work.bytes += sum(sizes)
        self.memory.take(work)
        if max(sizes, default=0) > self.memory.bytes_max:
            self.fail(too_large(work, max(sizes), self.memory.bytes_max))
        if self.before and work.commits is not None:
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
            if self.before:
                work.unhandled.update(messages)
            self._queues.add(work.queue, messages)
            self.waiting.wake()

    # --- hand out and finish -----------------------------------------------------------------

    def next(
        self, holder: Holder, *, together: bool = False, more: bool = False
    ) -> ReceivedMessage | None:
        """Return the next message, None if there is none now; `finish` must follow.

        Args:
            holder: who handles it.
            together: it handles several: a lane that it occupies gives it more messages.
            more: it has taken some.
        """
        self.now_s = now_s = self._time()
        if now_s - self._swept_s > SWEEP_S:
            # Before anything else after a pause of the process: its leases may have ended.
            self.sweep(now_s)
        if self.stopping:
            return None
        while True:
            message = self._queues.take(holder if together else None, more=more)
            if message is None:
                return None
            if message.work.aside is not None and message.work.is_aside(message):
                self._failures.set_aside(message, "an earlier message of its key is set aside")
                continue
            if message.work.is_suspect:
                if message.work.take_ended(message):
                    error = ProcessEnded("the process ended while its handler was called")
                    self._failures.fail(message, error)
                    continue
                self.alone.begin(message)
            self._in_flight[message] = holder
            if self.before:
                message.work.unhandled.discard(message)
            waiting = self.waiting
            if waiting.takers and not waiting.asked:
                waiting.ask()
            return message

    def more(self, holder: Holder, after: ReceivedMessage, count: int) -> list[ReceivedMessage]:
        """Return up to `count` messages that follow at once; there may be others, see `next`.

        Args:
            after: the last message that the holder took.
        """
        work = after.work
        if self.stopping or self.before or work.has_aside_keys or work.is_suspect:
            return []  # each message must be looked at
        found = self._queues.take_more(work.queue, holder, after, count)
        self._in_flight.update(dict.fromkeys(found, holder))
        alone = next((number for number, each in enumerate(found) if each.alone), None)
        if alone is not None:
            self.give_back(found[alone:])
            del found[alone:]
        return found

    @property
    def in_flight(self) -> Mapping[ReceivedMessage, Holder]:
        """The messages that are being handled, and who handles each."""
        return self._in_flight

    def finish(
        self,
        message: ReceivedMessage,
        error: BaseException | None,
        holder: Holder | None = None,
        outputs: Sequence[Copy] = (),
    ) -> None:
        """Take the result of a message: None: it is done. Ignored unless it is in flight.

        Args:
            holder: ignored also if it is in flight with another one; None: any.
            outputs: to be stored with its position.
        """
        if holder is not None and self._in_flight.get(message) is not holder:
            return
        if self._in_flight.pop(message, None) is None:
            return
        if error is None and not outputs:
            self.handled += 1
            self._queues.settle(message.work.queue, message)
            self.settled(message)
        elif error is None:
            self._failures.produce(message, outputs)
        else:
            if message.lane is not None and not self.before:
                self._hold_followers(message, message.lane)
            self._failures.fail(message, error)
        if self.alone.message is message:
            self.alone.end()
        waiting = self.waiting
        if waiting.watchers:
            waiting.wake()
        elif waiting.takers and not waiting.asked:
            waiting.ask()

    def finish_all(self, messages: Sequence[ReceivedMessage], holder: Holder) -> None:
        """Take note that messages are done, without outputs, unless another one has them."""
        in_flight = self._in_flight
        by_work: dict[Work, list[ReceivedMessage]] = {}
        for message in messages:
            if in_flight.get(message) is holder:
                del in_flight[message]
                by_work.setdefault(message.work, []).append(message)
        for work, done in by_work.items():
            self.handled += len(done)
            self._queues.settle_all(work.queue, done)
            self.settled(*done)
        self.alone.end()
        self.waiting.wake()

    def _hold_followers(self, message: ReceivedMessage, lane: Lane) -> None:
        """Take later messages of a lane back that were pulled with one that failed: they are handed
        out again, after it."""
        if lane.in_flight > 1:
            offset = message.record.offset
            together = [each for each in self._in_flight if each.lane is lane]
            self.give_back([each for each in together if each.record.offset > offset])

    def report(self, message: ReceivedMessage, error: Exception | None) -> None:
        """Take a result from the user's code, in any thread. While the handler of a batch runs it
        is kept until the end of the batch, so that the order of its lanes holds."""
        holder = self._in_flight.get(message)
        if holder is None:
            return
        reports = holder.reports  # other threads may end the batch
        if reports is not None:
            reports.setdefault(message, error)
        else:
            self.waiting.call(self.finish, message, error, holder)

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Put messages in flight, which must be in order, back to be handled again."""
        for message in reversed(messages):
            if self._in_flight.pop(message, None) is not None:
                self._queues.put_back(message.work.queue, message)
                if self.before:
                    message.work.unhandled.add(message)
        self.alone.end()
        self.waiting.wake()

    def end(self, message: ReceivedMessage, *, stored: bool = False) -> None:
        """The message needs nothing more: its lane continues, its offset is done.

        Args:
            stored: in the stored position, too.
        """
        self._queues.settle(message.work.queue, message)
        self.settled(message, stored=stored)
        self.waiting.wake()

    def settled(self, *messages: ReceivedMessage, stored: bool = False) -> None:
        """Messages of one partition are done: so are their offsets, and their memory is free."""
        work = messages[0].work
        commits = work.commits
        if commits is None:
            return
        for message in messages:
            work.bytes -= message.size
            if not self.before:
                work.finished(message.record.offset)
        if not self.before and not stored:
            commits.changed(work, len(messages))
        elif self.before and work.gate:
            commits.changed(work, 0)
        if self.memory.paused:
            self.memory.free(work)

    def refused(
        self, work: Work, messages: Sequence[tuple[ReceivedMessage, bool]], why: str
    ) -> None:
        """The copies of these messages, in order, cannot be stored: the partition pauses, and then
        they are handled again before the others.

        Args:
            messages: and whether the lane of each has continued.
        """
        log.error("copy refused", partition=work.place, messages=len(messages), why=why)
        self.counts["copy_refused"] += len(messages)
        for each in self._family(work):
            self._pauses.rest(each, self._time() + REFUSED_PAUSE_S)
        for message, settled in reversed(messages):
            message.attempt += 1
            self._failures.take_back(message, settled=settled)

    # --- time --------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Continue with messages that are due, and stop partitions whose lease has ended."""
        self._swept_s = now_s
        waiting = self._queues.delayed
        self._queues.wake(now_s)
        woken = self._queues.delayed < waiting
        for work in self._works:
            if work.gate and work.is_retry:
                self.admit(work, work.admit_due())
        woken |= self._pauses.end(now_s)
        for work in self._pauses.expire(self._works, now_s):
            log.warning("lease ended", partition=work.place)
            self.counts["fenced"] += 1
            self.interrupt(work.owner)
        if woken:
            self.waiting.wake()

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
        """Hand out no further message. For any thread."""
        self.stopping = True
        self.waiting.soon(self.waiting.wake_all)

    def fail(self, error: Exception) -> None:
        """End the consumer with an error."""
        if self.error is None:
            self.error = error
        self.stop()
