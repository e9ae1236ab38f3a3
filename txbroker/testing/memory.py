"""A Kafka in memory, as far as a door needs one: topics, transactions, and trouble on demand.

What it does not do: it keeps nothing on disk and compacts nothing; retention happens only when
`truncate` says so; there is one broker, so no leader moves and no replica lags; a transaction's
end takes no offset of its own, unless `transact` writes it; nothing is sent over a network, so
nothing arrives late; rights are yes or no for a whole topic; transactional ids are forgotten only
when `forget_transactional_ids` says so. It belongs to one event loop.
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
from txbroker.door.protocols import (
    Appended,
    AppendRefused,
    AppendUnknown,
    LogTruncated,
    TargetFacts,
)
from txbroker.errors import KafkaUnavailable
from txbroker.testing.members import MemoryCoordinator

MESSAGE_BYTES_MAX = 1_048_588
"""Kafka's own default of `max.message.bytes`."""
TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Kafka's own default: records dated further ahead of its clock are refused."""

_BATCH_HEADER_BYTES = 61
_MORE_BYTES = tuple(1 << bits for bits in range(6, 63, 7))
"""From each of these on a number, zigzag encoded, takes one byte more than the first."""
_ANY_PARTITION = -1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def wall_clock_ms() -> int:
    """Return this machine's time, ms since 1970."""
    return round(time.time() * 1000)


class AdjustableClock:
    """A clock that runs with this machine's and can be put forward.

    Args:
        now_ms: what it runs with.
    """

    def __init__(self, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._now_ms = now_ms
        self._ahead_ms = 0

    def now_ms(self) -> int:
        """Return the time, ms since 1970."""
        return self._now_ms() + self._ahead_ms

    def advance(self, seconds: float) -> None:
        """Put it forward."""
        self._ahead_ms += round(seconds * 1000)


class LostReply(Enum):
    """What became of a call that was never answered."""

    DONE = "done"
    NOT_DONE = "not done"


class KafkaTransaction:
    """A Kafka transaction: its records are visible once it is committed.

    Args:
        producer: the id of the producer that writes it.
    """

    def __init__(self, producer: int = -1) -> None:
        self.producer = producer
        self.open = True
        self.committed = False


_ENDED = KafkaTransaction()
"""Of what was never a record: nobody sees it, and it is in nobody's way."""
_ENDED.open = False


class RecordRefused(Exception):
    """A partition does not take a record."""

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
        for transaction in [each for each in self._open if not each.open]:
            del self._open[transaction]
        return min(self._open.values(), default=self.end)

    def append(
        self, records: Sequence[Record], now_ms: int, transaction: KafkaTransaction | None = None
    ) -> int:
        """Store records and return the first one's offset. Without a timestamp of their own
        they get `now_ms`."""
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
        """Store the end of a transaction: it takes an offset and is no record."""
        record = Record(None, None, timestamp_ms=now_ms, offset=self.end)
        self._entries.append((record, _ENDED))

    def hold(self, transaction: KafkaTransaction) -> None:
        """Keep the last stable offset where the log ends now, for as long as it is open."""
        self._open.setdefault(transaction, self.end)

    def follow(self, follower: Callable[[Record], None]) -> Callable[[], None]:
        """Call `follower` with every further record, until the returned function is called."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)

    def read(self, start: int, end: int, *, producers: bool = False) -> list[Record]:
        """Return the committed records from `start` up to, not including, `end`; with `producers`
        they say who wrote them.

        Raises:
            LogTruncated: they are not all there, or not any more.
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
        """Return the committed records at these offsets; what is not there is left out."""
        return [
            record
            for offset in offsets
            if self.begin <= offset < self.end
            for record in self.read(offset, offset + 1)
        ]

    def delete_before(self, offset: int) -> None:
        """Take the records below `offset` away, as retention does."""
        del self._entries[: max(0, offset - self.begin)]
        self.begin = max(self.begin, offset)

    def delete_from(self, offset: int) -> None:
        """Take the records from `offset` on away, as a topic that was restored from a backup."""
        del self._entries[max(0, offset - self.begin) :]


class MemoryTopic(Struct):
    """A topic and its settings."""

    partitions: list[MemoryPartition]
    message_bytes_max: int = MESSAGE_BYTES_MAX
    log_append_time: bool = False
    leaderless: frozenset[int] = frozenset()
    authorized: bool = True
    id: int = 0
    """Another one for each topic that is made, also under a name that was used before."""


class MemoryKafka:
    """Topics that several doors share, and switches for what can go wrong with them.

    Args:
        clock: the broker's clock, for append times.
        default_partitions: of topics that are created without a number.
    """

    def __init__(
        self, clock: AdjustableClock | None = None, *, default_partitions: int = 1
    ) -> None:
        self.clock = clock or AdjustableClock()
        self.topics: dict[str, MemoryTopic] = {}
        self._ids = itertools.count(1)
        self._members: dict[str, MemoryCoordinator] = {}
        self._transactions: dict[str, tuple[object, list[KafkaTransaction]]] = {}
        self._producers: dict[str, int] = {}
        self._default_partitions = default_partitions
        self._down: LostReply | None = None
        self._lost_append: LostReply | None = None
        self._lost_commit: LostReply | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self.untold: set[tuple[str, int]] = set()
        """Partitions that were never told of the end of a turn that an earlier claim began."""

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
            ValueError: no topic can have that name.
        """
        if not valid_name(name):
            raise ValueError(f"{name!r} is no name for a topic")
        count = self._default_partitions if partitions is None else partitions
        made = [MemoryPartition() for _ in range(count)]
        topic = MemoryTopic(made, message_bytes_max, log_append_time, id=next(self._ids))
        self.topics.setdefault(name, topic)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records.

        Raises:
            KeyError: there is none.
        """
        del self.topics[name]

    def recreate_topic(self, name: str, partitions: int | None = None) -> None:
        """Delete a topic and make it anew, empty, with the same settings.

        Args:
            name: of the topic.
            partitions: None for as many as it had.
        """
        old = self.topics[name]
        count = len(old.partitions) if partitions is None else partitions
        new = [MemoryPartition() for _ in range(count)]
        self.topics[name] = structs.replace(old, partitions=new, id=next(self._ids))

    def add_partitions(self, name: str, total: int) -> None:
        """Give a topic more partitions, `total` in all."""
        have = self.topics[name].partitions
        have.extend(MemoryPartition() for _ in range(total - len(have)))

    def set_log_append_time(self, name: str, *, log_append_time: bool) -> None:
        """Change a topic's `message.timestamp.type`; records that it has keep their times."""
        self.topics[name].log_append_time = log_append_time

    def set_message_bytes_max(self, name: str, message_bytes_max: int) -> None:
        """Change a topic's `max.message.bytes`."""
        self.topics[name].message_bytes_max = message_bytes_max

    def set_leaderless(self, name: str, *partitions: int) -> None:
        """Take the leaders of these partitions away, and give all others of the topic theirs."""
        self.topics[name].leaderless = frozenset(partitions)

    def set_authorized(self, name: str, *, authorized: bool) -> None:
        """Give or take the right to a topic."""
        self.topics[name].authorized = authorized

    def truncate(
        self, name: str, partition: int = 0, *, before: int = 0, end: int | None = None
    ) -> None:
        """Lose records: those below `before` (retention), and those from `end` on (a restored
        backup, an unclean leader)."""
        found = self.topics[name].partitions[partition]
        found.delete_before(before)
        if end is not None:
            found.delete_from(end)

    def visible(self, name: str, partition: int = 0) -> list[Record]:
        """Return what a `read_committed` consumer sees of a partition, from begin to end.

        Raises:
            KafkaUnavailable: it does not exist.
        """
        found = self.partition(name, partition)
        return found.read(found.begin, found.stable_end)

    # --- trouble -----------------------------------------------------------------------------

    def go_down(self, unanswered: LostReply = LostReply.NOT_DONE) -> None:
        """Answer nothing any more; `unanswered` says what becomes of appends and commits."""
        self._down = unanswered

    def come_up(self) -> None:
        """Answer again."""
        self._down = None

    def lose_answer_of_next_append(self, outcome: LostReply) -> None:
        """Leave the next append to a half or operation topic unanswered."""
        self._lost_append = outcome

    def lose_answer_of_next_commit(self, outcome: LostReply) -> None:
        """Leave the next commit of a turn unanswered."""
        self._lost_commit = outcome

    def hang(self, name: str, partition: int = 0) -> Callable[[], None]:
        """Leave a transaction open on a partition: `read_committed` readers see nothing that is
        written from now on, until the returned function is called."""
        transaction = KafkaTransaction()
        self.partition(name, partition).hold(transaction)
        return lambda: self.end(transaction, committed=False)

    def forget_transactional_ids(self) -> None:
        """Forget all transactional ids without an open transaction, as Kafka does with those
        that were idle for days."""
        self._transactions = {
            id: (holder, running)
            for id, (holder, running) in self._transactions.items()
            if any(each.open for each in running)
        }

    # --- for the door ------------------------------------------------------------------------

    async def reach(self) -> None:
        """Go to the broker, as every call does.

        Raises:
            KafkaUnavailable: it is down.
        """
        await asyncio.sleep(0)
        if self._down is not None:
            raise KafkaUnavailable("the in-memory Kafka is down")

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
        """Return what is known of a topic, or why there is nothing."""
        topic = self.topics.get(name)
        if not valid_name(name):
            return Cause("unknown_topic", f"{name!r} is no name for a topic", name, _ANY_PARTITION)
        if topic is None:
            return Cause("unknown_topic", f"topic {name} does not exist", name, _ANY_PARTITION)
        if not topic.authorized:
            sentence = f"no right to topic {name}"
            return Cause("not_authorized", sentence, name, _ANY_PARTITION)
        return TargetFacts(
            len(topic.partitions), topic.message_bytes_max, topic.log_append_time, topic.leaderless
        )

    def coordinator(self, group: str) -> MemoryCoordinator:
        """Return who shares partitions among the members of a group."""
        return self._members.setdefault(group, MemoryCoordinator())

    def fence(self, transactional_id: str, holder: object) -> None:
        """Make `holder` the only one who may use an id: what another left open is aborted."""
        for transaction in self._transactions.get(transactional_id, (None, []))[1]:
            self.end(transaction, committed=False)
        self._transactions[transactional_id] = (holder, [])

    def holds(self, transactional_id: str, holder: object) -> bool:
        """Say whether nobody has fenced `holder` since.

        Raises:
            KafkaUnavailable: the id is forgotten.
        """
        if transactional_id not in self._transactions:
            raise KafkaUnavailable(f"the in-memory Kafka has forgotten {transactional_id}")
        return self._transactions[transactional_id][0] is holder

    def begin(self, transactional_id: str) -> KafkaTransaction:
        """Begin a transaction, for who holds the id."""
        running = self._transactions[transactional_id][1]
        running[:] = [each for each in running if each.open]
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
            found = self.partition(name, partition)
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
        # Topics of txbroker's own: the broker's time counts, whatever the record says.
        stamped = [structs.replace(record, timestamp_ms=-1) for record in records]
        base = found.append(stamped, now_ms)
        if lost is not None:
            raise AppendUnknown("the in-memory Kafka did not answer, but stored the batch")
        return Appended(base, now_ms)

    def write(
        self, name: str, number: int, records: Sequence[Record], transaction: KafkaTransaction
    ) -> int:
        """Write records of a transaction and return the first one's offset.

        Raises:
            RecordRefused: the topic does not take them.
            KafkaUnavailable: the partition has no leader.
        """
        topic = self.topics.get(name)
        refused = self._refusal(topic, name, number, records)
        if refused is not None:
            raise RecordRefused(refused)
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
            sentence = f"{name}-{number} does not exist: create it"
            return Cause("unknown_topic", sentence, name, number, passing=True)
        if not topic.authorized:
            sentence = f"{name}-{number} may not be written by this proxy"
            return Cause("not_authorized", sentence, name, number)
        latest_ms = self.clock.now_ms() + TIMESTAMP_AHEAD_MAX_MS
        # Whoever writes cuts a batch that is too large, so what counts is each record alone.
        alone = _record_bytes(records, itertools.repeat(0))
        for size, record in zip(alone, records, strict=True):
            if _BATCH_HEADER_BYTES + size > topic.message_bytes_max:
                sentence = f"{name}-{number} is larger than max.message.bytes: raise that setting"
                return Cause("too_large", sentence, name, number)
            if record.timestamp_ms > latest_ms and not topic.log_append_time:
                sentence = f"{name}-{number} does not take the message's timestamp"
                return Cause("bad_timestamp", sentence, name, number)
        return None

    def transact(
        self, name: str, partition: int, records: Sequence[Record], *, committed: bool = True
    ) -> None:
        """Write a whole transaction, as another client does; its end takes an offset."""
        found = self.partition(name, partition)
        transaction, now_ms = KafkaTransaction(next(self._ids)), self.clock.now_ms()
        found.append(records, now_ms, transaction)
        self.end(transaction, committed=committed)
        found.mark(now_ms)

    def commit(self, transaction: KafkaTransaction) -> None:
        """End a transaction so that it becomes visible.

        Raises:
            KafkaUnavailable: no answer; it may or may not be committed.
        """
        lost = self._down or self._lost_commit
        self._lost_commit = None
        if lost is not LostReply.NOT_DONE:
            self.end(transaction, committed=True)
        if lost is not None:
            raise KafkaUnavailable("the in-memory Kafka did not answer to a commit")

    def end(self, transaction: KafkaTransaction, *, committed: bool) -> None:
        """End a transaction one way or the other; the first end counts."""
        if transaction.open:
            transaction.open = False
            transaction.committed = committed
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)

    async def ended(self) -> None:
        """Wait until some transaction ends."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)


def valid_name(name: str) -> bool:
    """Say whether a topic can have this name."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def batch_bytes(records: Sequence[Record]) -> int:
    """Return the size of records as one uncompressed batch of Kafka's, bytes.

    The times of one batch are taken to be equal, which holds for what an owner appends.
    """
    return _BATCH_HEADER_BYTES + sum(_record_bytes(records, itertools.count()))


def _record_bytes(records: Iterable[Record], numbers: Iterable[int]) -> list[int]:
    """Return what each record takes in a batch as the one of this number there, bytes."""
    sizes = []
    for record, number in zip(records, numbers, strict=False):
        parts = [record.key, record.value]
        # A byte each for attributes, time, and the first of its number and of both lengths.
        size = 3 + len(parts) + bisect_right(_MORE_BYTES, number)
        headers = record.headers
        size += len((headers if isinstance(headers, Encoded) else encode_headers(headers)).data)
        for part in parts:
            if part:
                size += len(part) + bisect_right(_MORE_BYTES, len(part))
        sizes.append(size + 1 + bisect_right(_MORE_BYTES, size))
    return sizes
