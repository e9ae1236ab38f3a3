"""What becomes of messages whose handler has ended, and of the copies that they left."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

import structlog

from txbroker.consumer.engine.calls import HandlerCall
from txbroker.consumer.engine.partitions import Partitions
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.pending import Pending
from txbroker.core.consuming.lifecycle import FINISH, MessageEvent
from txbroker.core.consuming.partition import Feed

log = structlog.wrap_logger(logging.getLogger(__name__))

_DONE, _finish = FINISH


class Settlement:
    """Counts messages as done, at once or with a commit.

    Args:
        time: returns the time of the event loop, seconds.
        before: at most once: messages count as done before.

    Attributes:
        counts: events: `failed`, `dropped`, `dead`, `aside`, `retry_N`, `fenced`, `overflow`,
            `gap`.
        handled: messages whose handler has succeeded; with outputs, once these are stored.
        staged: the handler has later stages, whose messages are done only after them.
    """

    def __init__(self, partitions: Partitions, time: Callable[[], float], *, before: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.handled = 0
        self.staged = False
        self.time = time
        self._partitions = partitions
        self._before = before

    def finish(
        self, messages: Sequence[ReceivedMessage], call: HandlerCall, *, handled: bool = True
    ) -> None:
        """Messages need nothing more: their lanes continue, their offsets are done. Those that the
        call does not have any more are ignored.

        Args:
            handled: the handler has succeeded with them.
        """
        # Hot path: messages one by one take four Python calls here.
        partitions = self._partitions
        by_feed: dict[Feed, list[ReceivedMessage]] = {}
        for message in messages:
            feed = message.feed
            if feed.partition.in_flight.get(message) is call:
                message.state = _DONE
                if feed in by_feed:
                    by_feed[feed].append(message)
                else:
                    by_feed[feed] = [message]
        for feed, mine in by_feed.items():
            if handled:
                self.handled += len(mine)
            partition = feed.partition
            _finish(partition, feed, mine, None)
            if feed is partition.log and not self._before:
                partitions.commits[partition].changed(partition, len(mine))
            elif partition.gate:
                partitions.commits[partition].changed(partition, 0)
            if partitions.memory.paused:
                partitions.memory.free(partition)
        waiting = partitions.waiting
        asks = waiting.takers and not waiting.asked
        if asks or waiting.watchers or partitions.alone.message is not None:
            partitions.note_end()

    def store(self, pending: Pending, *, soon: bool = True) -> None:
        """Store copies with the position in which their message is done."""
        commits = self._partitions.commits.get(pending.partition)
        if commits is not None:
            commits.store(pending, soon=soon)

    def stored(self, pendings: Sequence[Pending]) -> None:
        """The copies of messages of one partition are stored, and their offsets with them."""
        partition = pendings[0].partition
        messages = [each.message for each in pendings if each.message is not None]
        for _, mine in groupby(messages, attrgetter("feed")):
            partition.apply(MessageEvent.STORED, list(mine))
        if self._partitions.memory.paused:
            self._partitions.memory.free(partition)

    def store_stage(self, messages: Iterable[ReceivedMessage]) -> None:
        """The first stage of messages is stored: after a crash only the later ones follow."""
        for message in messages if self.staged else ():
            message.feed.partition.store_stage(message)
