"""Records that arrive become messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter

from txbroker.consumer.engine.memory import MemoryTooSmall
from txbroker.consumer.engine.partitions import Partitions
from txbroker.consumer.message import (
    HEADER_BYTES,
    OVERHEAD_BYTES,
    ReceivedMessage,
    Reports,
    size_of,
)
from txbroker.core.consuming.copies import read_copy
from txbroker.core.consuming.failure import DELAYS_S
from txbroker.core.consuming.lifecycle import MessageEvent
from txbroker.core.consuming.partition import Feed, PartitionState
from txbroker.core.consuming.queues import Order, lane_key_of
from txbroker.core.records import Record

_size_of = attrgetter("size")


class Arrivals:
    """Takes records of partitions, and messages of further feeds.

    Args:
        order: what keeps its order.
        before: at most once: messages wait until their position is stored.
        reports: takes what user code reports about messages.
        fail: ends the consumer with an error.
    """

    def __init__(
        self,
        order: Order,
        partitions: Partitions,
        reports: Reports,
        fail: Callable[[Exception], None],
        *,
        before: bool,
    ) -> None:
        self._order = order
        self._before = before
        self._partitions = partitions
        self._reports = reports
        self._fail = fail

    def deliver(
        self, partition: PartitionState, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        """Take records of a partition that arrived, see `Deliver`."""
        position = partition.progress.position
        low = position.low
        fresh = partition.arrive(records, next_offset, end)
        if position.low != low:
            self._partitions.changed(partition, 0)  # offsets without a record
        self.accept(partition.log, self.wrap(partition.log, fresh))

    def accept(self, feed: Feed, messages: Sequence[ReceivedMessage]) -> None:
        """Take new messages of a feed, in order."""
        if not messages:
            return
        partition, sizes = feed.partition, [*map(_size_of, messages)]
        feed.bytes += sum(sizes)
        if feed is partition.log:
            try:
                self._partitions.memory.take(partition, max(sizes))
            except MemoryTooSmall as error:
                self._fail(error)
        if self._before:
            partition.gate.extend(messages)
            self._partitions.changed(partition, len(messages))
        elif feed.retries and feed is partition.log:
            partition.gate.extend(messages)
            partition.admit_due(time.time() * 1000)
            self._partitions.waiting.wake()
        else:
            partition.apply(MessageEvent.ADMIT, messages)
            self._partitions.waiting.wake()

    def wrap(self, log: Feed, records: Sequence[Record]) -> list[ReceivedMessage]:
        """Return records of a partition's log as messages that have not been handled."""
        if log.retries:
            return [self._retried(log, record) for record in records]
        # Hot path: `size_of` and `lane_key_of` without calls.
        by_key, lane, reports = (
            self._order is Order.KEY,
            lane_key_of(self._order, None),
            self._reports,
        )
        messages = [
            ReceivedMessage(
                r,
                log,
                reports,
                OVERHEAD_BYTES
                + len(r.value or b"")
                + len(r.key or b"")
                + (HEADER_BYTES * len(r.headers) if r.headers else 0),
                r.key if by_key else lane,
            )
            for r in records
        ]
        if ahead := log.partition.progress.ahead:
            for message in messages:
                message.stage = int(message.record.offset in ahead)
        return messages

    def _retried(self, log: Feed, record: Record) -> ReceivedMessage:
        """Return a record of the retry topic as a message."""
        message, failed = read_copy(record) or (record, None)
        attempt, stage = 1, int(record.offset in log.partition.progress.ahead)
        if failed is not None:
            # Other clients write, too: others wait for a copy no longer than its step.
            step = min(log.partition.place[1], len(DELAYS_S) - 1)
            failed = failed.due_by(round((time.time() + DELAYS_S[step]) * 1000))
            attempt, stage = failed.attempts + 1, max(stage, failed.stage)
        return ReceivedMessage(
            message,
            log,
            self._reports,
            size_of(record),
            lane_key_of(self._order, record.key),
            attempt,
            failed_before=failed,
            stage=stage,
        )
