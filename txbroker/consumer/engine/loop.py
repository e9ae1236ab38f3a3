"""Hands out messages, takes their results, and applies the failure policy.

Workers, pulled messages and batches use the same two steps: `next` and `finish`. Between them a
message is in flight and occupies its lane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import structlog

from txbroker.consumer.engine.arrivals import Arrivals
from txbroker.consumer.engine.calls import HandlerCall, call_of
from txbroker.consumer.engine.failures import Failures
from txbroker.consumer.engine.memory import Memory
from txbroker.consumer.engine.partitions import Partitions
from txbroker.consumer.engine.settlement import Settlement
from txbroker.consumer.engine.waiting import Waiting
from txbroker.consumer.message import ReceivedMessage
from txbroker.core.consuming.copies import GroupTopics
from txbroker.core.consuming.failure import FailurePolicy, ProcessEnded
from txbroker.core.consuming.lifecycle import TAKE, MessageEvent
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.queues import Lane, Order, Queues, StopReason
from txbroker.door.writing import Copy

log = structlog.wrap_logger(logging.getLogger(__name__))

_IN_FLIGHT = TAKE.after
SWEEP_S = 0.05
"""The time between looks at leases, delays, due times and timeouts."""


class Engine:
    """The messages of all partitions of a consumer.

    Args:
        order: what keeps its order.
        policy: for failed messages.
        topics: of the group, for copies.
        bytes_max: memory for messages, bytes.
        before: at most once: positions are stored before messages are handed out.

    Attributes:
        queues: the messages that can be handled, of all partitions.
        partitions: those of the consumer.
        arrivals: takes records.
        settlement: counts messages as done.
        time: returns the time of the event loop, seconds.
        now_s: the time of the last call of `next`.
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
        self.order, self.before = order, before
        self.time = asyncio.get_running_loop().time
        self.queues: Queues[ReceivedMessage] = Queues()
        self.waiting = Waiting(self.queues.has_more)
        self.partitions = Partitions(Memory(bytes_max), self.waiting)
        self.arrivals = Arrivals(order, self.partitions, self, self.fail, before=before)
        self.settlement = Settlement(self.partitions, self.time, before=before)
        self._failures = Failures(policy, topics, self.settlement)
        self.lines = self._failures.lines
        self.now_s = 0.0
        self._swept_s = 0.0
        self.stopping = False
        self.error: Exception | None = None

    # --- hand out ----------------------------------------------------------------------------

    def next(
        self, call: HandlerCall, *, together: bool = False, more: bool = False
    ) -> ReceivedMessage | None:
        """Return the next message, None if there is none now; `finish` must follow.

        Args:
            call: that handles it.
            together: it handles several: a lane that it occupies gives it more messages.
            more: it has taken some.
        """
        self.now_s = now_s = self.time()
        if now_s - self._swept_s > SWEEP_S:
            # Before anything else after a pause of the process: its leases may have ended.
            self.sweep(now_s)
        if self.stopping:
            return None
        while True:
            message = self.queues.take(call if together else None, more=more)
            if message is None:
                return None
            partition, message.state = message.feed.partition, _IN_FLIGHT
            partition.in_flight[message] = call
            aside, key = partition.aside, message.record.key
            if (aside.keys or aside.pending) and message.feed is partition.log and key in aside:
                self._failures.set_aside(message, "an earlier message of its key is set aside")
                continue
            if partition.starts.is_suspect and message.feed is partition.log:
                if partition.starts.take_ended(message):
                    error = ProcessEnded("the process ended while its handler was called")
                    self._failures.fail(message, error)
                    continue
                self.partitions.alone.begin(message)
            waiting = self.waiting
            if waiting.takers and not waiting.asked:
                waiting.ask()
            return message

    def more(self, call: HandlerCall, after: ReceivedMessage, count: int) -> list[ReceivedMessage]:
        """Return up to `count` messages that follow at once; there may be others, see `next`.

        Args:
            after: the last message that the call took.
        """
        feed = after.feed
        partition = feed.partition
        if self.stopping or self.before:
            return []
        if feed is partition.log and (partition.aside or partition.starts.is_suspect):
            return []  # each message must be looked at
        found = self.queues.take_more(feed.queue, call, after, count)
        partition.apply(MessageEvent.TAKE, found, call)
        alone = next((number for number, each in enumerate(found) if each.alone), None)
        if alone is not None:
            self.partitions.give_back(found[alone:])
            del found[alone:]
        return found

    @property
    def in_flight(self) -> list[ReceivedMessage]:
        """The messages that are being handled."""
        return [message for partition in self.partitions for message in partition.in_flight]

    @property
    def calls(self) -> int:
        """The number of messages that are being handled."""
        return sum([len(partition.in_flight) for partition in self.partitions])

    # --- results -----------------------------------------------------------------------------

    def produce(self, message: ReceivedMessage, outputs: Sequence[Copy], call: HandlerCall) -> None:
        """The handler has succeeded, with outputs to be stored with the position of the message.
        Ignored if the call does not have it any more."""
        if call_of(message) is call:
            self._failures.produce(message, outputs)
            self.partitions.note_end()

    def fail_message(
        self, message: ReceivedMessage, error: BaseException, call: HandlerCall
    ) -> None:
        """The handler has failed with a message; ignored as by `produce`."""
        if call_of(message) is call:
            if message.lane is not None and not self.before:
                self._hold_followers(message, message.lane)
            self._failures.fail(message, error)
            self.partitions.note_end()

    def cancelled(self, messages: Sequence[ReceivedMessage], call: HandlerCall) -> None:
        """The handler of messages was cancelled: they are handled again; at most once: dropped."""
        mine = [message for message in messages if call_of(message) is call]
        for message in mine:
            message.attempt += 1
            if self.before:
                error = asyncio.CancelledError("the handler was cancelled")
                self.fail_message(message, error, call)
        if not self.before:
            self.partitions.give_back(mine)

    def _hold_followers(self, message: ReceivedMessage, lane: Lane) -> None:
        """Take later messages of a lane back that were pulled with one that failed: they are handed
        out again, after it."""
        if lane.in_flight > 1:
            offset = message.record.offset
            together = [each for each in message.feed.partition.in_flight if each.lane is lane]
            self.partitions.give_back([each for each in together if each.record.offset > offset])

    def report(self, message: ReceivedMessage, error: Exception | None) -> None:
        """Take a result from the user's code, in any thread. While the handler of a batch runs it
        is kept until the end of the batch, so that the order of its lanes holds."""
        call = call_of(message)
        if call is None:
            return
        reports = call.reports  # other threads may end the batch
        if reports is not None:
            reports.setdefault(message, error)
        else:
            self.waiting.call(self._take_report, message, error, call)

    def _take_report(
        self, message: ReceivedMessage, error: Exception | None, call: HandlerCall
    ) -> None:
        if error is None:
            self.settlement.finish((message,), call)
        else:
            self.fail_message(message, error, call)

    # --- time --------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Continue with messages that are due, and stop partitions whose lease has ended."""
        self._swept_s = now_s
        waiting, now_ms = self.queues.delayed, time.time() * 1000
        self.queues.wake(now_s)
        woken = self.queues.delayed < waiting
        for partition in list(self.partitions):
            if partition.gate and partition.log.retries:
                woken |= partition.admit_due(now_ms)
            if partition.log.queue.stops or partition.lease.deadline_s <= now_s:
                woken |= self._look_at(partition, now_s)
        if woken:
            self.waiting.wake()

    def _look_at(self, partition: PartitionState, now_s: float) -> bool:
        """Stop a partition whose lease has ended, and end stops whose time is over; return whether
        any ended."""
        stopped = partition.is_stopped(StopReason.LEASE)
        if (partition.lease.deadline_s <= now_s) is stopped:
            return partition.end_stops(now_s)
        if stopped:
            partition.go_on(StopReason.LEASE)
            return True
        partition.stop(StopReason.LEASE)
        log.warning("lease ended", partition=partition.place)
        self.settlement.counts["fenced"] += 1
        self.partitions.interrupt(partition)
        return False

    # --- the end -----------------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until there may be a message, or until the end.

        Raises: the error that ended the consumer.
        """
        if self.error is None and not self.stopping:
            await self.waiting.wait(self.waiting.takers)
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
