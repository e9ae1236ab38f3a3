"""A Kafka in memory with what a door needs: topics, transactions, and faults on demand.

Differences from a real Kafka: no disk and no compaction; no retention except by `truncate`; one
broker, so leaders do not move and replicas do not lag; a transaction's end takes no offset, except
by `transact` and in commits of consumers; no network, so nothing arrives late; a topic is
authorized as a whole or not; transactional ids expire only by `forget_transactional_ids`. It
belongs to one event loop.
"""

import asyncio
import itertools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from txbroker.core.encoding import encode_headers
from txbroker.core.records import Cause, Encoded, Record
from txbroker.door.protocols import (
    Appended,
    AppendRefused,
    AppendUnknown,
)
from txbroker.door.writing import Copy, Refused
from txbroker.errors import KafkaUnavailable
from txbroker.testing.groups import MemoryGroup
from txbroker.testing.members import MemoryCoordinator
from txbroker.testing.topics import KafkaTransaction, LostReply, MemoryTopic, MemoryTopics

TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Kafka's own default: records dated further ahead of its clock are refused."""

_BATCH_HEADER_BYTES = 61
_MORE_BYTES = tuple(1 << bits for bits in range(6, 63, 7))
"""Numbers from each of these on take one more byte as zigzag varints."""


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


class MemoryKafka(MemoryTopics):
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
        super().__init__(default_partitions)
        self.clock = clock or AdjustableClock()
        self.groups: dict[str, MemoryGroup] = {}
        self.create_refusal = ""
        self._members: dict[str, MemoryCoordinator] = {}
        self._transactions: dict[str, tuple[object, list[KafkaTransaction]]] = {}
        self._producers: dict[str, int] = {}
        self._lost_append: LostReply | None = None
        self._lost_commit: LostReply | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self.unaware: set[tuple[str, int]] = set()

    # --- faults ------------------------------------------------------------------------------

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
        self._producers = {
            id: producer for id, producer in self._producers.items() if id in self._transactions
        }

    # --- for the door ------------------------------------------------------------------------

    async def reach(self) -> None:
        """Reach the broker, as every call does.

        Raises:
            KafkaUnavailable: it is down.
        """
        await asyncio.sleep(0)
        self.require_up()

    def coordinator(self, group: str) -> MemoryCoordinator:
        return self._members.setdefault(group, MemoryCoordinator())

    def group(self, name: str) -> MemoryGroup:
        """Return a group of consumers: its members, offsets and faults."""
        if name not in self.groups:
            # Atomic: members in several threads may be the first.
            self.groups.setdefault(name, MemoryGroup(self))
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

    def known_producers(self, transactional_id: str) -> frozenset[int]:
        """Return the producer id of a transactional id; none where it has none."""
        known = transactional_id in self._transactions and transactional_id in self._producers
        return frozenset({self._producers[transactional_id]} if known else ())

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
            Refused: the topic refuses them.
            KafkaUnavailable: the partition has no leader.
        """
        topic = self.topics.get(name)
        cause = self._refusal(topic, name, number, records)
        if cause is not None:
            raise Refused(*cause)
        assert topic is not None
        if number in topic.leaderless:
            raise KafkaUnavailable(f"{name}-{number} has no leader")
        if topic.log_append_time:
            records = [structs.replace(record, timestamp_ms=-1) for record in records]
        return topic.partitions[number].append(records, self.clock.now_ms(), transaction)

    def write_all(self, copies: Sequence[Copy], transaction: KafkaTransaction) -> list[int]:
        """Write records of a transaction, those of a partition together; return their offsets.

        Raises:
            Refused: with indexes in `copies`.
            KafkaUnavailable: a partition has no leader.
        """
        indexes: dict[tuple[str, int], list[int]] = {}
        for index, copy in enumerate(copies):
            indexes.setdefault((copy.topic, copy.partition), []).append(index)
        offsets = [0] * len(copies)
        for at, mine in indexes.items():
            try:
                base = self.write(*at, [copies[index].record for index in mine], transaction)
            except Refused as error:
                raise Refused([mine[each] for each in error.indexes], error.cause) from None
            for number, index in enumerate(mine):
                offsets[index] = base + number
        return offsets

    def _refusal(
        self, topic: MemoryTopic | None, name: str, number: int, records: Sequence[Record]
    ) -> tuple[Sequence[int], Cause] | None:
        """Return the indexes of refused records, and why they are."""
        if topic is None or number >= len(topic.partitions):
            message = f"{name}-{number} does not exist: create it"
            cause = Cause("unknown_topic", message, name, number, passing=True)
            return range(len(records)), cause
        if not topic.authorized:
            message = f"{name}-{number} may not be written by this proxy"
            return range(len(records)), Cause("not_authorized", message, name, number)
        latest_ms = self.clock.now_ms() + TIMESTAMP_AHEAD_MAX_MS
        # A producer splits a batch that is too large, so each record is measured alone.
        alone = _record_bytes(records, itertools.repeat(0))
        for index, (size, record) in enumerate(zip(alone, records, strict=True)):
            if _BATCH_HEADER_BYTES + size > topic.message_bytes_max:
                message = f"{name}-{number} is larger than max.message.bytes: raise that setting"
                return [index], Cause("too_large", message, name, number)
            if record.timestamp_ms > latest_ms and not topic.log_append_time:
                message = f"{name}-{number} refuses the message's timestamp"
                return [index], Cause("bad_timestamp", message, name, number)
        return None

    def transact(
        self,
        name: str,
        partition: int,
        records: Sequence[Record],
        *,
        committed: bool = True,
        transactional_id: str = "",
    ) -> None:
        """Write a whole transaction, as another client does or an earlier user of a transactional
        id; its end takes an offset."""
        log = self.partition(name, partition)
        producer = self._producer(transactional_id) if transactional_id else next(self._ids)
        transaction, now_ms = KafkaTransaction(producer), self.clock.now_ms()
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
