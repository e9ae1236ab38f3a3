"""A message as a handler receives it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from msgspec import Struct

from txbroker.core.consuming.copies import Failed, MessageSource, message_id, read_copy
from txbroker.core.consuming.lifecycle import MessageState
from txbroker.core.consuming.partition import Feed, Lease
from txbroker.core.consuming.queues import Lane
from txbroker.core.records import NO_HEADERS, Headers, Record
from txbroker.core.records import Message as Message

OVERHEAD_BYTES = 300
"""Memory of a message beside its key, value and headers."""
HEADER_BYTES = 100


class MessageLease:
    """How long the consumer certainly owns the message's partition."""

    __slots__ = ("_lease", "_time")

    def __init__(self, lease: Lease, time: Callable[[], float]) -> None:
        self._lease = lease
        self._time = time

    @property
    def left_s(self) -> float:
        """Seconds left; 0: another consumer may own the partition. Infinite without a group."""
        return max(0.0, self._lease.deadline_s - self._time())


class Reports(Protocol):
    """Takes what user code reports about messages; see `Engine`.

    Attributes:
        time: returns the time of the event loop, seconds.
    """

    time: Callable[[], float]

    def report(self, message: ReceivedMessage, error: Exception | None) -> None: ...


class ReceivedMessage(Struct, eq=False, gc=False):
    """A message of a topic.

    A message that failed earlier has the topic, partition, offset and headers that it had first.

    Attributes:
        attempt: 1 for the first call of a handler with it. A crash may lose counted attempts.
        stage: the handler's stages that are done.
        alone: it is handled in a batch without others: a call with them failed.
        sessions_lost: connections to a database that ended while it was handled alone.
    """

    record: Record
    feed: Feed
    reports: Reports
    size: int
    lane_key: Hashable
    attempt: int = 1
    lane: Lane | None = None
    state: MessageState = MessageState.GATED
    failures: int = 0
    failed_before: Failed | None = None
    stage: int = 0
    alone: bool = False
    sessions_lost: int = 0

    @property
    def topic(self) -> str:
        origin = self.failed_before
        return self.feed.partition.place[0] if origin is None else origin.source.topic

    @property
    def partition(self) -> int:
        origin = self.failed_before
        return self.feed.partition.place[1] if origin is None else origin.source.partition

    @property
    def offset(self) -> int:
        origin = self.failed_before
        return self.record.offset if origin is None else origin.source.offset

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def value(self) -> bytes | None:
        """None is a tombstone."""
        return self.record.value

    @property
    def headers(self) -> Headers:
        """Names and values, in order; names may repeat."""
        return self.record.headers

    @property
    def timestamp_ms(self) -> int:
        """Milliseconds since 1970, as the producer or the broker set it."""
        return self.record.timestamp_ms

    @property
    def id(self) -> str:
        """The identity of the message, the same for every repeat of it: for a message that txbroker
        promoted its installation, transaction and number; otherwise topic, partition, offset."""
        return message_id(self.topic, self.partition, self.offset, self.record.headers)

    @property
    def step(self) -> int | None:
        """The last step of the retry topic that a failure led to; None: it was not read from
        there."""
        if not self.feed.retries:
            return None
        return -1 if self.failed_before is None else self.failed_before.step

    @property
    def token(self) -> int:
        """Rises with each owner of the partition. External systems can refuse a lower one than
        they have seen: it comes from an owner that was replaced."""
        return self.feed.partition.token

    @property
    def lease(self) -> MessageLease:
        return MessageLease(self.feed.partition.lease, self.reports.time)

    def done(self) -> None:
        """Mark it as done, where messages are pulled. The position is committed later, in batches.
        Only the first call of `done` or `failed` counts."""
        self.reports.report(self, None)

    def failed(self, error: Exception) -> None:
        """Report a failure, as a handler does by raising `error` (which may be `Later` or
        `Reject`), where messages are pulled or handled in batches."""
        self.reports.report(self, error)

    def __repr__(self) -> str:
        return f"<message {self.topic}/{self.partition}@{self.offset} attempt {self.attempt}>"


def source_of(message: ReceivedMessage) -> MessageSource:
    """Return where a message was first read."""
    return MessageSource(message.topic, message.partition, message.offset)


def size_of(record: Record) -> int:
    """Return the memory that a message takes, bytes, approximately."""
    size = OVERHEAD_BYTES + len(record.value or b"") + len(record.key or b"")
    headers = record.headers
    if headers is NO_HEADERS or not headers:
        return size
    return size + HEADER_BYTES * len(headers)


def messages_of(
    feed: Feed, reports: Reports, copies: Sequence[Record], lane_key: Hashable
) -> list[ReceivedMessage]:
    """Return the messages of copies, in order.

    Args:
        lane_key: of all of them; None: each is alone.
    """
    messages = []
    for record in copies:
        copy = read_copy(record)
        assert copy is not None
        message, failed = copy
        messages.append(
            ReceivedMessage(
                message,
                feed,
                reports,
                size_of(message),
                lane_key,
                failed.attempts + 1,
                failed_before=failed,
                stage=failed.stage,
            )
        )
    return messages
