"""One partition that the consumer owns: its queue, position and set-aside keys."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from txbroker.consumer.message import MessageLease, ReceivedMessage
from txbroker.core.consuming.aside import AsideKeys
from txbroker.core.consuming.copies import Partition, Source, read_copy
from txbroker.core.consuming.failure import DELAYS_S
from txbroker.core.consuming.position import (
    METADATA_LENGTH_MAX,
    NO_STARTS,
    Later,
    Metadata,
    Position,
    Starts,
    encode_metadata,
)
from txbroker.core.consuming.queues import Order, PartitionQueue, lane_key_of
from txbroker.core.records import NO_HEADERS, Record
from txbroker.door.consuming import StoredOffset
from txbroker.door.writing import Copy
from txbroker.errors import TxbrokerError

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine
    from txbroker.consumer.stores.pending import Pending

_OVERHEAD_BYTES = 300
"""Memory of a message beside its key, value and headers."""
_HEADER_BYTES = 100
_STARTS_FREE = 1
"""Starts without a release and without progress, before messages are handled alone."""
_FETCH_BYTES_MIN, _FETCH_BYTES_MAX = 16 << 10, 1 << 20


class Commits(Protocol):
    """Where results go: the committer of the partition's reader."""

    def changed(self, work: Work, count: int = 1) -> None:
        """Take note that messages of a partition are done."""

    def store(self, pending: Pending, *, soon: bool = True) -> None:
        """Store copies with the partition's position, together."""

    def withdraw(self, pending: Pending) -> bool:
        """Store copies no more, unless they may be stored already; return whether they are not."""

    def unavailable(self, work: Work) -> None:
        """Hand out nothing more until positions can be stored again."""

    @property
    def fenced(self) -> Callable[[Work], None]:
        """Takes note that another owner has taken a partition over."""

    async def flush(self, works: Collection[Work]) -> None:
        """Store the positions and copies of partitions now.

        Raises:
            KafkaUnavailable: they are not stored, or it is unknown.
        """


class Flow(Protocol):
    """The fetching of a partition."""

    def pause(self, partition: Partition) -> None: ...

    def resume(self, partition: Partition) -> None: ...


class Work:
    """Messages of one partition in this consumer.

    Attributes:
        place: topic and partition.
        token: rises with each owner.
        bytes: memory of its messages, approximately.
        end: the end of the partition, as far as known.
        gate: messages that have arrived and may not be handled yet, in offset order.
        is_retry: it is a partition of the group's retry topic.
        aside: set-aside keys; None where none can be.
        dirty: its position has changed since the last commit.
    """

    def __init__(
        self, engine: Engine, place: Partition, lease: MessageLease, *, is_retry: bool = False
    ) -> None:
        self.engine = engine
        self.place = place
        self.lease = lease
        self.is_retry = is_retry
        self.order = engine.order
        self.queue: PartitionQueue[ReceivedMessage] = PartitionQueue(place)
        self._position = Position(0)
        self._finished: list[int] = []
        """Offsets of messages that are done and not in the position yet."""
        self.finished: Callable[[int], None] = self._finished.append
        """Takes note that the message of an offset is done, dropped or copied."""
        self.is_kept = False
        """Its messages are rows of a database."""
        self.keeps_rows = False
        """Its failed messages become rows of a database."""
        self.token = 0
        self.topic_id = ""
        self.aside_stored: int | None = 0
        """The number of set-aside keys, of the stored position; None without one."""
        self.bytes = 0
        self.end = 0
        self.gate: deque[ReceivedMessage] = deque()
        self.unhandled: set[ReceivedMessage] = set()
        """At most once: messages that count as done and were not handed out."""
        self.draining = False
        self.aside: AsideKeys | None = None
        self.setting_aside: set[bytes | int] = set()
        """Keys whose first copy is not visible in the aside topic yet."""
        self.dirty = False
        self.ahead: set[int] = set()
        """Offsets whose first stage is stored, while later stages are not done."""
        self.commits: Commits | None = None
        """Set while the engine has the partition, as is `flow`."""
        self.flow: Flow
        self.overflow = 0
        """Done offsets that did not fit into the metadata of the last commit."""
        self._sent: set[StoredOffset] = set()
        """What may be stored: the newest position that certainly is, and later attempts."""
        self._token_steps = 0
        self.is_suspect = False
        """A message may end the process: one is handled at a time, and noted before in the stored
        position, so that the next owner knows it."""
        self.starts = NO_STARTS
        """Owners that ended without a release, as stored, then with this one."""
        self._starts_before = NO_STARTS
        self._starts_until = 0
        """The low-water mark at which they no longer count."""
        self._starts_left = 0
        """The number of messages to handle alone."""
        self.exits = False
        """A handler of its messages wants the process to end: that counts as a killed one."""
        self._ended: ReceivedMessage | None = None
        """Its handler ended the process of an owner before; it is not done."""
        self.metadata_max = METADATA_LENGTH_MAX
        """How long metadata may be, characters."""

    @property
    def owner(self) -> Work:
        """The partition whose position is stored with copies of its messages."""
        return self

    def clearance(self, message: ReceivedMessage) -> Sequence[Copy]:
        """Return what to store with the result of a message so that it is not handled again; the
        position does not show that of a set-aside copy."""
        return ()

    def stage_mark(self, message: ReceivedMessage) -> Sequence[Copy]:
        """Return what to store with the first stage of a message so that it is not called again;
        see `clearance`."""
        return ()

    def fails_again(self) -> bool:
        """Return True if a message that is to be set aside is set aside already."""
        return False

    def wrap(self, records: Sequence[Record]) -> list[ReceivedMessage]:
        """Return records as messages that have not been handled."""
        if self.is_retry:
            return [self._copy(record) for record in records]
        # Hot path: `size_of` and `lane_key_of` without calls.
        by_key, lane = self.order is Order.KEY, lane_key_of(self.order, None)
        messages = [
            ReceivedMessage(
                r,
                self,
                _OVERHEAD_BYTES
                + len(r.value or b"")
                + len(r.key or b"")
                + (_HEADER_BYTES * len(r.headers) if r.headers else 0),
                r.key if by_key else lane,
            )
            for r in records
        ]
        for message in messages if self.ahead else ():
            message.stage = int(message.record.offset in self.ahead)
        return messages

    # --- starts ------------------------------------------------------------------------------

    def begin_start(self, messages_max: int) -> None:
        """Count this start, until the partition is released or messages are done.

        Args:
            messages_max: that owners before may have had in hand.
        """
        before = self._starts_before = self.starts
        low = self.position.low
        if low >= self.end:
            return
        self.starts = structs.replace(before, count=before.count + 1)
        self._starts_left = messages_max
        self.is_suspect = self.starts.count > _STARTS_FREE
        self._starts_until = min(self.end, low + messages_max) if self.is_suspect else low + 1

    def take_ended(self, message: ReceivedMessage) -> bool:
        """Return True once if the process ended while an owner before handled this message."""
        if self._ended is not None or self.starts.offset != message.record.offset:
            return False
        self._ended = message
        message.failures = self.starts.failures
        message.attempt += message.failures
        return True

    def note_handled(self, message: ReceivedMessage | None) -> None:
        """Take note of the message that is handled alone; None: no longer."""
        count, ended = self.starts.count, self._ended
        if message is not None:
            self.starts = Starts(count, message.record.offset, message.failures)
            return
        if self.exits:
            return
        self._starts_left -= 1
        # It may end the process again before it is handled alone again.
        self.starts = Starts(count)
        if ended is not None:
            self.starts = Starts(count, ended.record.offset, ended.failures - 1)

    def end_start(self) -> bool:
        """This owner releases the partition: its start does not count. Return whether that has to
        be stored."""
        if self.exits:
            return False
        before = self._starts_before.count
        changed = self.starts.count > before
        self.starts = structs.replace(self.starts, count=min(self.starts.count, before))
        return changed

    def _forget_starts(self) -> None:
        """Count no starts before messages that are done."""
        ended, position = self._ended, self.position
        if ended is not None and not position.undone([ended.record.offset]):
            self._ended, self.starts = None, Starts(self.starts.count)
        passed = position.low >= self._starts_until or self._starts_left <= 0
        if passed and self._ended is None:
            self.starts = self._starts_before = NO_STARTS
            self.is_suspect = False

    # --- positions ---------------------------------------------------------------------------

    def _copy(self, record: Record) -> ReceivedMessage:
        message, failed = read_copy(record) or (record, None)
        if failed is not None:
            # Other clients write, too: others wait for a copy no longer than its step.
            latest_ms = (time.time() + DELAYS_S[min(self.place[1], len(DELAYS_S) - 1)]) * 1000
            failed = structs.replace(failed, due_ms=min(failed.due_ms, round(latest_ms)))
        attempt = 1 if failed is None else failed.attempts + 1
        key = lane_key_of(self.order, record.key)
        stage = 0 if failed is None else failed.stage
        stage = max(stage, int(record.offset in self.ahead))
        return ReceivedMessage(
            message, self, size_of(record), key, attempt, failed_before=failed, stage=stage
        )

    def admit_due(self) -> list[ReceivedMessage]:
        """Return the messages of a retry partition that are due, in order: the head is waited
        for."""
        now_ms, due = time.time() * 1000, []
        while self.gate and due_ms(self.gate[0]) <= now_ms:
            due.append(self.gate.popleft())
        return due

    @property
    def position(self) -> Position:
        """The done offsets."""
        if self._finished:
            self._position.done_all(self._finished)
            self._finished.clear()
        return self._position

    @position.setter
    def position(self, position: Position) -> None:
        self._position = position

    def is_aside(self, message: ReceivedMessage) -> bool:
        """Return whether the message's key is set aside."""
        key = message.record.key
        return key is not None and (
            key in self.setting_aside or (self.aside is not None and key in self.aside.keys)
        )

    @property
    def has_aside_keys(self) -> bool:
        """Whether a key is set aside."""
        return self.aside is not None and bool(self.setting_aside or self.aside.keys)

    @property
    def aside_count(self) -> int:
        """The number of set-aside keys."""
        if self.aside is None:
            return self.aside_stored or 0  # another consumer of the group may have set some aside
        known = self.aside.keys
        return len(known) + sum(key not in known for key in self.setting_aside)

    def withdraw(self) -> bool:
        """Take messages that count as done and were not handed out off the position; return
        whether there are any."""
        offsets = sorted(message.record.offset for message in self.unhandled)
        self.unhandled.clear()
        if offsets:
            self.position = self.position.without(offsets)
        return bool(offsets)

    def saved(
        self, done_too: Sequence[int] = (), ahead_too: Sequence[int] = ()
    ) -> tuple[int, Metadata]:
        """Return the position to store, as the offset and its metadata.

        Args:
            done_too: offsets that are done once it is stored.
            ahead_too: offsets whose first stage is.
        """
        position = self.position.with_done(done_too) if done_too else self.position
        later = None
        if self.ahead or ahead_too:
            self.ahead.intersection_update(self.position.undone(self.ahead))
            if ahead := position.undone(self.ahead.union(ahead_too)):
                later = Later(position.low, position.ranges())
                position = position.with_done(ahead)
        if self.starts.count:
            self._forget_starts()
        token = self.token + self._token_steps
        ranges, aside = position.ranges(), self.aside_count
        return position.low, Metadata(token, self.topic_id, aside, ranges, later, self.starts)

    def stored(
        self,
        done_too: Sequence[int] = (),
        ahead_too: Sequence[int] = (),
        *,
        distinct: bool = False,
    ) -> StoredOffset:
        """Return what to commit, as `saved`.

        Args:
            distinct: it must differ from all that may be stored already, by a higher token if
                nothing else has changed, so that it shows whether this commit was stored.
        """
        while True:
            low, metadata = self.saved(done_too, ahead_too)
            text, self.overflow = encode_metadata(low, metadata, self.metadata_max)
            stored = StoredOffset(low, text)
            if not (distinct and stored in self._sent):
                self._sent.add(stored)
                return stored
            self._token_steps += 1

    def confirm(self, stored: StoredOffset) -> None:
        """Take note that a position is stored."""
        self._sent = {stored}

    @property
    def lag(self) -> int:
        """Offsets up to the end that are not done."""
        position = self.position
        done = sum(end - first for first, end in position.ranges())
        return max(0, self.end - position.low - done)


def first_stored(messages: Sequence[ReceivedMessage]) -> None:
    """The first stage of messages is stored: after a crash only the later ones follow."""
    for message in messages:
        work = message.work
        if work.engine.staged:
            message.stage = max(1, message.stage)
            if work.owner is work:
                work.ahead.add(message.record.offset)


def due_ms(message: ReceivedMessage) -> int:
    """Return when a message is due, milliseconds since 1970; 0: at once."""
    return 0 if message.failed_before is None else message.failed_before.due_ms


def source_of(message: ReceivedMessage) -> Source:
    """Return where a message was first read."""
    return Source(message.topic, message.partition, message.offset)


def size_of(record: Record) -> int:
    """Return the memory that a message takes, bytes, approximately."""
    size = _OVERHEAD_BYTES + len(record.value or b"") + len(record.key or b"")
    headers = record.headers
    if headers is NO_HEADERS or not headers:
        return size
    return size + _HEADER_BYTES * len(headers)


class MemoryTooSmall(TxbrokerError):
    """A record is larger than the memory for messages."""


def too_large(work: Work, size: int, bytes_max: int) -> MemoryTooSmall:
    """Return the error for a record that does not fit into the memory."""
    return MemoryTooSmall(
        f"{work.place[0]}-{work.place[1]} has a record of {size} bytes, and buffered_bytes_max is "
        f"{bytes_max}: raise it"
    )


class Memory:
    """Bounds the memory of messages: a partition that has its share pauses, others continue.

    Args:
        works: the partitions, kept current by the caller.

    Attributes:
        paused: partitions that are not fetched.
    """

    def __init__(self, bytes_max: int, works: Collection[Work]) -> None:
        self.bytes_max = bytes_max
        self.paused: set[Work] = set()
        self._works = works

    @property
    def share(self) -> float:
        """The bytes of one partition."""
        return self.bytes_max / max(1, len(self._works))

    @property
    def fetch_bytes(self) -> int:
        """How much of a partition to fetch at once, so that it keeps to its share."""
        return round(min(_FETCH_BYTES_MAX, max(_FETCH_BYTES_MIN, self.share)))

    def take(self, work: Work) -> None:
        """Pause a partition if it has its share."""
        if work.bytes >= self.share and work not in self.paused:
            self.paused.add(work)
            work.flow.pause(work.place)

    def free(self, work: Work) -> None:
        """Continue with a paused partition that has half of its share."""
        if work in self.paused and work.bytes < self.share / 2:
            self.paused.discard(work)
            work.flow.resume(work.place)
