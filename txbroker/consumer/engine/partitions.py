"""The partitions that a consumer has, and where the results of each go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence

import structlog

from txbroker.consumer.engine.calls import HandlerCall, call_of
from txbroker.consumer.engine.memory import Flow, Memory
from txbroker.consumer.engine.stops import Alone, Suspensions
from txbroker.consumer.engine.waiting import Waiting
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.pending import Commits
from txbroker.core.consuming.lifecycle import MessageEvent
from txbroker.core.consuming.partition import Feed, PartitionState
from txbroker.core.consuming.queues import StopReason
from txbroker.error_text import safe_repr
from txbroker.errors import KafkaUnavailable

log = structlog.wrap_logger(logging.getLogger(__name__))

_NOT_NOTED_PAUSE_S = 1.0
"""Of a call whose message could not be noted in the stored position."""


class Partitions:
    """The partitions of a consumer.

    Attributes:
        memory: of their messages.
        waiting: calls that wait for messages.
        commits: where the results of each go.
        alone: the message that is handled while no other one is that may end the process.
        suspensions: those of the user.
    """

    def __init__(self, memory: Memory, waiting: Waiting) -> None:
        self.commits: dict[PartitionState, Commits] = {}
        self.alone = Alone(self.commits.keys())
        self.suspensions = Suspensions(self.commits.keys())
        self.memory = memory
        self.waiting = waiting

    def __contains__(self, partition: PartitionState) -> bool:
        return partition in self.commits

    def __iter__(self) -> Iterator[PartitionState]:
        return iter(self.commits)

    def add(self, partition: PartitionState, commits: Commits, flow: Flow) -> None:
        """Begin with a partition."""
        self.commits[partition] = commits
        self.memory.begin(partition, flow)
        self.suspensions.apply(partition)
        self.alone.apply(partition)
        if commits.outage.failures:
            partition.stop(StopReason.NOT_STORED)

    def remove(self, partition: PartitionState) -> None:
        """End with a partition: its messages are dropped, the handlers of those in flight are
        cancelled, and their results are ignored."""
        if self.commits.pop(partition, None) is not None:
            self.memory.end(partition)
            self._cancel(partition.lose())

    def changed(self, partition: PartitionState, count: int) -> None:
        """Take note that messages of a partition are done or, at most once, have arrived."""
        commits = self.commits.get(partition)
        if commits is not None:
            commits.changed(partition, count)

    def add_feed(self, feed: Feed) -> None:
        """Begin with a further feed of a partition."""
        feed.partition.add_feed(feed)

    def remove_feed(self, feed: Feed) -> None:
        """End with a feed of a partition, as `remove`."""
        if feed in feed.partition.feeds:
            self._cancel(feed.partition.remove_feed(feed))

    def _cancel(self, calls: Iterable[HandlerCall]) -> None:
        for call in calls:
            call.cancel(None)
        self.alone.end()
        self.waiting.wake()

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Put messages in flight, which must be in order, back to be handled again."""
        for feed in dict.fromkeys([message.feed for message in messages]):
            mine = [message for message in messages if message.feed is feed]
            feed.partition.apply(MessageEvent.RETURN, mine)
        self.alone.end()
        self.waiting.wake()

    def note_end(self) -> None:
        """A call has ended: let those continue that wait for that."""
        if self.alone.message is not None:
            self.alone.end()
        if self.waiting.watchers:
            self.waiting.wake()
        elif self.waiting.takers and not self.waiting.asked:
            self.waiting.ask()

    async def note_alone(self, call: HandlerCall) -> bool:
        """Note the message that is handled alone in the stored position. Return whether its handler
        may be called now; otherwise it was given back.

        Args:
            call: that has it.
        """
        message = self.alone.message
        assert message is not None
        partition = message.feed.partition
        if (commits := self.commits.get(partition)) is not None:
            partition.starts.begin_alone(message)
            commits.changed(partition, 0)
            try:
                await commits.flush([partition])
            except KafkaUnavailable as error:
                log.warning("positions not stored", error=safe_repr(error))
                if call_of(message) is call:
                    self.give_back([message])
                    await asyncio.sleep(_NOT_NOTED_PAUSE_S)
        return call_of(message) is call

    def interrupt(self, partition: PartitionState) -> None:
        """Cancel the handlers of a partition's messages in flight. Each message is given back when
        its handler has ended, so that no two run with it."""
        flying = partition.in_flight.items()
        self.give_back([message for message, call in flying if call.collecting])
        self._cancel(list(partition.in_flight.values()))

    async def drained(self, partition: PartitionState) -> None:
        """Wait until no message of a partition is in flight; hand out no further ones."""
        partition.draining = True
        partition.stop(StopReason.RELEASED)
        while partition.in_flight:
            await self.waiting.wait(self.waiting.watchers)
