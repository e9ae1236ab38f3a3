"""A Kafka in memory with what a door needs: topics, transactions, and faults on demand.

Differences from a real Kafka: no disk and no compaction; no retention except by `truncate`; one
broker, so leaders do not move and replicas do not lag; a transaction's end takes no offset, except
by `transact` and in commits of consumers; no network, so nothing arrives late; a topic is
authorized as a whole or not; transactional ids expire only by `forget_transactional_ids`. It
belongs to one event loop.
"""

import asyncio
import itertools
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from msgspec import Struct, structs

from txbroker.core.encoding import encode_headers
from txbroker.core.records import Cause, Encoded, Record
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.protocols import (
    Appended,
    AppendRefused,
    AppendUnknown,
    LogTruncated,
    TargetFacts,
)
from txbroker.errors import KafkaUnavailable
from txbroker.testing.groups import MemoryGroup
from txbroker.testing.members import MemoryCoordinator

MESSAGE_BYTES_MAX = 1_048_588
"""Kafka's own default of `max.message.bytes`."""
TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Kafka's own default: records dated further ahead of its clock are refused."""

_BATCH_HEADER_BYTES = 61
_MORE_BYTES = tuple(1 << bits for bits in range(6, 63, 7))
"""Numbers from each of these on take one more byte as zigzag varints."""
_ANY_PARTITION = -1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def wall_clock_ms() -> int:
    return round(time.time() * 1000)


class AdjustableClock:
    """A clock that can be advanced.

    Args:
        now_ms: the clock that it follows.
    """

    def __init__(self, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._now_ms = now_ms
        self._ahead_ms = 0

    def now_ms(self) -> int:
        return self._now_ms() + self._ahead_ms

    def advance(self, seconds: float) -> None:
        self._ahead_ms += round(seconds * 1000)


class LostReply(Enum):
    """Whether a write without an answer took effect."""

    DONE = "done"
    NOT_DONE = "not done"


class KafkaTransaction:
    """A Kafka transaction; `producer` is the id of its producer."""

    def __init__(self, producer: int = -1) -> None:
        self.producer = producer
        self.open = True
        self.committed = False


_ENDED = KafkaTransaction()
"""The transaction of end markers, which are not records."""
_ENDED.open = False


class RecordRefused(Exception):
    """A partition refuses a record."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class MemoryPartition:
    """The records of one partition."""

    def __init__(self) -> None:
        self.begin = 0
        self._entries: list[tuple[Record, KafkaTransaction | None]] = []
        self._open: dict[KafkaTransaction, int] = {}
        self._followers: list[Callable[[Record], None]] = []

    @property
    def end(self) -> int:
        """The offset that the next record will get."""
        return self.begin + len(self._entries)

    @property
    def stable_end(self) -> int:
        """The last stable offset: below it every transaction has ended."""
        for transaction in [txn for txn in self._open if not txn.open]:
            del self._open[transaction]
        return min(self._open.values(), default=self.end)

    def append(
        self, records: Sequence[Record], now_ms: int, transaction: KafkaTransaction | None = None
    ) -> int:
        """Store records and return the first offset. Records without a timestamp get `now_ms`."""
        base = self.end
        if transaction is not None:
            self._open.setdefault(transaction, base)
        for offset, record in enumerate(records, base):
            at_ms = now_ms if record.timestamp_ms < 0 else record.timestamp_ms
            stored = structs.replace(record, timestamp_ms=at_ms, offset=offset)
            self._entries.append((stored, transaction))
            for follower in list(self._followers):
                follower(stored)
        return base

    def mark(self, now_ms: int) -> None:
        """Store the end marker of a transaction: it takes an offset and is not a record."""
        record = Record(None, None, timestamp_ms=now_ms, offset=self.end)
        self._entries.append((record, _ENDED))

    def hold(self, transaction: KafkaTransaction) -> None:
        """Hold the last stable offset at the end of the log while the transaction is open."""
        self._open.setdefault(transaction, self.end)

    def follow(self, follower: Callable[[Record], None]) -> Callable[[], None]:
        """Call `follower` with every new record until the returned function is called."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)

    def read(self, start: int, end: int, *, producers: bool = False) -> list[Record]:
        """Return the committed records from `start` up to, not including, `end`; with `producers`,
        with their producer ids.

        Raises:
            LogTruncated: some offsets are not in the log (any more).
        """
        if start < end and (start < self.begin or end > self.end):
            raise LogTruncated(f"kept are offsets {self.begin} to {self.end}, not {start} to {end}")
        entries = self._entries[start - self.begin : end - self.begin]
        return [
            structs.replace(record, producer=transaction.producer)
            if producers and transaction is not None
            else record
            for record, transaction in entries
            if transaction is None or transaction.committed
        ]

    def pick(self, offsets: Sequence[int]) -> list[Record]:
        """Return the committed records at these offsets; offsets without a record are left out."""
        return [
            record
            for offset in offsets
            if self.begin <= offset < self.end
            for record in self.read(offset, offset + 1)
        ]

    def delete_before(self, offset: int) -> None:
        """Delete the records below `offset`, as retention does."""
        del self._entries[: max(0, offset - self.begin)]
        self.begin = max(self.begin, offset)

    def delete_from(self, offset: int) -> None:
        """Delete the records from `offset` on, as restoring an older backup does."""
        del self._entries[max(0, offset - self.begin) :]


class MemoryTopic(Struct):
    """A topic and its settings."""

    partitions: list[MemoryPartition]
    message_bytes_max: int = MESSAGE_BYTES_MAX
    log_append_time: bool = False
    leaderless: frozenset[int] = frozenset()
    authorized: bool = True
    id: int = 0
    """Unique per creation, also if the name was used before."""


class MemoryKafka:
    """Topics that several doors share, with switches for faults.

    Args:
        clock: the broker's clock, for append times.
        default_partitions: the partition count of topics created without one.

    Attributes:
        unaware: target partitions that have not received the end of a promotion transaction of an
            earlier claim.
        create_refusal: why `ConsumingDoor.create` is refused, "" if it is not.
    """

    def __init__(
        self, clock: AdjustableClock | None = None, *, default_partitions: int = 1
    ) -> None:
        self.clock = clock or AdjustableClock()
        self.topics: dict[str, MemoryTopic] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self.create_refusal = ""
        self._ids = itertools.count(1)
        self._members: dict[str, MemoryCoordinator] = {}
        self._transactions: dict[str, tuple[object, list[KafkaTransaction]]] = {}
        self._producers: dict[str, int] = {}
        self._default_partitions = default_partitions
        self._down: LostReply | None = None
        self._lost_append: LostReply | None = None
        self._lost_commit: LostReply | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._watchers: list[Callable[[], None]] = []
        self.unaware: set[tuple[str, int]] = set()

    # --- topics ------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        log_append_time: bool = False,
    ) -> None:
        """Create a topic; one that exists stays as it is.

        Raises:
            ValueError: the name is invalid.
        """
        if not valid_name(name):
            raise ValueError(f"{name!r} is not a valid topic name")
        count = self._default_partitions if partitions is None else partitions
        new = [MemoryPartition() for _ in range(count)]
        topic = MemoryTopic(new, message_bytes_max, log_append_time, id=next(self._ids))
        self.topics.setdefault(name, topic)
        self._changed()

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records.

        Raises:
            KeyError: there is none.
        """
        del self.topics[name]
        self._changed()

    def recreate_topic(self, name: str, partitions: int | None = None) -> None:
        """Delete a topic and create it again, empty, with the same settings.

        Args:
            partitions: None: as before.
        """
        old = self.topics[name]
        count = len(old.partitions) if partitions is None else partitions
        new = [MemoryPartition() for _ in range(count)]
        self.topics[name] = structs.replace(old, partitions=new, id=next(self._ids))
        self._changed()

    def add_partitions(self, name: str, total: int) -> None:
        """Increase a topic's partitions to `total`."""
        have = self.topics[name].partitions
        have.extend(MemoryPartition() for _ in range(total - len(have)))

    def set_log_append_time(self, name: str, *, log_append_time: bool) -> None:
        """Change a topic's `message.timestamp.type`; stored records keep their timestamps."""
        self.topics[name].log_append_time = log_append_time

    def set_message_bytes_max(self, name: str, message_bytes_max: int) -> None:
        """Change a topic's `max.message.bytes`."""
        self.topics[name].message_bytes_max = message_bytes_max

    def set_leaderless(self, name: str, *partitions: int) -> None:
        """Remove the leaders of these partitions, and restore all others of the topic."""
        self.topics[name].leaderless = frozenset(partitions)

    def set_authorized(self, name: str, *, authorized: bool) -> None:
        """Grant or revoke access to a topic."""
        self.topics[name].authorized = authorized
        self._changed()

    def truncate(
        self, name: str, partition: int = 0, *, before: int = 0, end: int | None = None
    ) -> None:
        """Delete records below `before` (retention) and from `end` on (a restored backup or an
        unclean leader)."""
        log = self.topics[name].partitions[partition]
        log.delete_before(before)
        if end is not None:
            log.delete_from(end)
        self._changed()

    def visible(self, name: str, partition: int = 0) -> list[Record]:
        """Return all records of a partition that a `read_committed` consumer sees.

        Raises:
            KafkaUnavailable: it does not exist.
        """
        log = self.partition(name, partition)
        return log.read(log.begin, log.stable_end)

    # --- faults ------------------------------------------------------------------------------

    def go_down(self, unanswered: LostReply = LostReply.NOT_DONE) -> None:
        """Stop answering; `unanswered` decides whether appends and commits take effect."""
        self._down = unanswered

    def come_up(self) -> None:
        self._down = None
        self._changed()

    def lose_answer_of_next_append(self, outcome: LostReply) -> None:
        """Do not answer the next append to a half or operation topic."""
        self._lost_append = outcome

    def lose_answer_of_next_commit(self, outcome: LostReply) -> None:
        """Do not answer the next commit of a promotion transaction."""
        self._lost_commit = outcome

    def hang(self, name: str, partition: int = 0) -> Callable[[], None]:
        """Leave a transaction open on a partition: `read_committed` readers see no later record
        until the returned function is called."""
        transaction = KafkaTransaction()
        self.partition(name, partition).hold(transaction)
        return lambda: self.end(transaction, committed=False)

    def forget_transactional_ids(self) -> None:
        """Expire all transactional ids without an open transaction, as Kafka does after days."""
        self._transactions = {
            id: (holder, running)
            for id, (holder, running) in self._transactions.items()
            if any(transaction.open for transaction in running)
        }

    # --- for the door ------------------------------------------------------------------------

    async def reach(self) -> None:
        """Reach the broker, as every call does.

        Raises:
            KafkaUnavailable: it is down.
        """
        await asyncio.sleep(0)
        self.require_up()

    def require_up(self) -> None:
        """Raise `KafkaUnavailable` while the broker is down."""
        if self._down is not None:
            raise KafkaUnavailable("the in-memory Kafka is down")

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` until the returned function is called: after a transaction has ended, a
        topic has changed, or the broker has come up."""
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def _changed(self) -> None:
        for watcher in list(self._watchers):
            watcher()

    def partition(self, name: str, number: int) -> MemoryPartition:
        """Return a partition.

        Raises:
            KafkaUnavailable: it does not exist.
        """
        topic = self.topics.get(name)
        if topic is None or number >= len(topic.partitions):
            raise KafkaUnavailable(f"{name}-{number} does not exist")
        return topic.partitions[number]

    def facts(self, name: str) -> TargetFacts | Cause:
        """Return the facts of a topic, or why there are none."""
        topic = self.topics.get(name)
        if not valid_name(name):
            return Cause(
                "unknown_topic", f"{name!r} is not a valid topic name", name, _ANY_PARTITION
            )
        if topic is None:
            return Cause("unknown_topic", f"topic {name} does not exist", name, _ANY_PARTITION)
        if not topic.authorized:
            message = f"not authorized to access topic {name}"
            return Cause("not_authorized", message, name, _ANY_PARTITION)
        return TargetFacts(
            len(topic.partitions), topic.message_bytes_max, topic.log_append_time, topic.leaderless
        )

    def coordinator(self, group: str) -> MemoryCoordinator:
        return self._members.setdefault(group, MemoryCoordinator())

    def consuming_door(self) -> ConsumingDoor:
        """Return a consumer's door, for the loop of this Kafka."""
        from txbroker.testing.consuming import MemoryConsumingDoor

        return MemoryConsumingDoor(self)

    def group(self, name: str) -> MemoryGroup:
        """Return a group of consumers: its members, offsets and faults."""
        if name not in self.groups:
            self.groups[name] = MemoryGroup(self)
        return self.groups[name]

    def fence(self, transactional_id: str, holder: object) -> None:
        """Make `holder` the only user of a transactional id, and abort its open transactions."""
        for transaction in self._transactions.get(transactional_id, (None, []))[1]:
            self.end(transaction, committed=False)
        self._transactions[transactional_id] = (holder, [])

    def holds(self, transactional_id: str, holder: object) -> bool:
        """Return True if `holder` has not been fenced.

        Raises:
            KafkaUnavailable: the id is forgotten.
        """
        if transactional_id not in self._transactions:
            raise KafkaUnavailable(f"the in-memory Kafka has forgotten {transactional_id}")
        return self._transactions[transactional_id][0] is holder

    def begin(self, transactional_id: str) -> KafkaTransaction:
        """Begin a transaction of the id's holder."""
        running = self._transactions[transactional_id][1]
        running[:] = [transaction for transaction in running if transaction.open]
        running.append(KafkaTransaction(self._producer(transactional_id)))
        return running[-1]

    def _producer(self, transactional_id: str) -> int:
        return self._producers.setdefault(transactional_id, next(self._ids))

    async def append(self, name: str, partition: int, records: Sequence[Record]) -> Appended:
        """Append one batch outside of transactions.

        Raises:
            AppendRefused: it is larger than the topic takes.
            AppendUnknown: no answer.
        """
        await asyncio.sleep(0)
        try:
            log = self.partition(name, partition)
        except KafkaUnavailable as error:
            raise AppendUnknown(str(error)) from None
        topic = self.topics[name]
        size = batch_bytes(records)
        if size > topic.message_bytes_max:
            raise AppendRefused(
                f"{name} takes batches of {topic.message_bytes_max} bytes, this one has {size}"
            )
        lost = self._down or self._lost_append
        self._lost_append = None
        if lost is LostReply.NOT_DONE:
            raise AppendUnknown("the in-memory Kafka did not answer, and stored nothing")
        now_ms = self.clock.now_ms()
        # txbroker's own topics use the broker's time, not the record's timestamp.
        stamped = [structs.replace(record, timestamp_ms=-1) for record in records]
        base = log.append(stamped, now_ms)
        if lost is not None:
            raise AppendUnknown("the in-memory Kafka did not answer, but stored the batch")
        return Appended(base, now_ms)

    def write(
        self,
        name: str,
        number: int,
        records: Sequence[Record],
        transaction: KafkaTransaction | None,
    ) -> int:
        """Write records, of a transaction or of none, and return the first offset.

        Raises:
            RecordRefused: the topic refuses them.
            KafkaUnavailable: the partition has no leader.
        """
        topic = self.topics.get(name)
        cause = self._refusal(topic, name, number, records)
        if cause is not None:
            raise RecordRefused(cause)
        assert topic is not None
        if number in topic.leaderless:
            raise KafkaUnavailable(f"{name}-{number} has no leader")
        if topic.log_append_time:
            records = [structs.replace(record, timestamp_ms=-1) for record in records]
        return topic.partitions[number].append(records, self.clock.now_ms(), transaction)

    def _refusal(
        self, topic: MemoryTopic | None, name: str, number: int, records: Sequence[Record]
    ) -> Cause | None:
        if topic is None or number >= len(topic.partitions):
            message = f"{name}-{number} does not exist: create it"
            return Cause("unknown_topic", message, name, number, passing=True)
        if not topic.authorized:
            message = f"{name}-{number} may not be written by this proxy"
            return Cause("not_authorized", message, name, number)
        latest_ms = self.clock.now_ms() + TIMESTAMP_AHEAD_MAX_MS
        # A producer splits a batch that is too large, so each record is measured alone.
        alone = _record_bytes(records, itertools.repeat(0))
        for size, record in zip(alone, records, strict=True):
            if _BATCH_HEADER_BYTES + size > topic.message_bytes_max:
                message = f"{name}-{number} is larger than max.message.bytes: raise that setting"
                return Cause("too_large", message, name, number)
            if record.timestamp_ms > latest_ms and not topic.log_append_time:
                message = f"{name}-{number} refuses the message's timestamp"
                return Cause("bad_timestamp", message, name, number)
        return None

    def transact(
        self, name: str, partition: int, records: Sequence[Record], *, committed: bool = True
    ) -> None:
        """Write a whole transaction, as another client does; its end takes an offset."""
        log = self.partition(name, partition)
        transaction, now_ms = KafkaTransaction(next(self._ids)), self.clock.now_ms()
        log.append(records, now_ms, transaction)
        self.end(transaction, committed=committed)
        log.mark(now_ms)

    def commit(self, transaction: KafkaTransaction) -> None:
        """Commit a promotion transaction; see `finish`."""
        lost, self._lost_commit = self._lost_commit, None
        self.finish(transaction, lost)

    def finish(self, transaction: KafkaTransaction, lost: LostReply | None) -> None:
        """Commit a transaction; `lost`: do not answer.

        Raises:
            KafkaUnavailable: no answer; it may or may not be committed.
        """
        lost = self._down or lost
        if lost is not LostReply.NOT_DONE:
            self.end(transaction, committed=True)
        if lost is not None:
            raise KafkaUnavailable("the in-memory Kafka did not answer to a commit")

    def end(self, transaction: KafkaTransaction, *, committed: bool) -> None:
        """Commit or abort a transaction; the first end counts."""
        if transaction.open:
            transaction.open = False
            transaction.committed = committed
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
            self._changed()

    async def ended(self) -> None:
        """Wait until any transaction ends."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)


def valid_name(name: str) -> bool:
    """Return True if a topic can have this name."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def batch_bytes(records: Sequence[Record]) -> int:
    """Return the size of records as one uncompressed Kafka batch, bytes.

    Assumes that a batch's timestamps are equal, as in an owner's appends.
    """
    return _BATCH_HEADER_BYTES + sum(_record_bytes(records, itertools.count()))


def _record_bytes(records: Iterable[Record], numbers: Iterable[int]) -> list[int]:
    """Return the size of each record, given its number in the batch, bytes."""
    sizes = []
    for record, number in zip(records, numbers, strict=False):
        parts = [record.key, record.value]
        # One byte each for attributes, timestamp delta, number and both lengths; then the rest.
        size = 3 + len(parts) + bisect_right(_MORE_BYTES, number)
        headers = record.headers
        size += len((headers if isinstance(headers, Encoded) else encode_headers(headers)).data)
        for part in parts:
            if part:
                size += len(part) + bisect_right(_MORE_BYTES, len(part))
        sizes.append(size + 1 + bisect_right(_MORE_BYTES, size))
    return sizes
