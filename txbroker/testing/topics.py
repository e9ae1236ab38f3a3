"""Topics in memory: their partitions and records, Kafka transactions, and changes by an
administrator."""

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from msgspec import Struct, structs

from txbroker.core.records import Cause, Record
from txbroker.door.owners import Evidence
from txbroker.door.protocols import LogTruncated, TargetFacts
from txbroker.errors import KafkaUnavailable

MESSAGE_BYTES_MAX = 1_048_588
"""Kafka's own default of `max.message.bytes`."""

_ANY_PARTITION = -1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


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


class MemoryTopics:
    """The topics of a Kafka in memory, as an administrator changes them.

    Args:
        default_partitions: the partition count of topics created without one.
    """

    def __init__(self, default_partitions: int) -> None:
        self.topics: dict[str, MemoryTopic] = {}
        self._ids = itertools.count(1)
        self._default_partitions = default_partitions
        self._watchers: list[Callable[[], None]] = []
        self._down: LostReply | None = None

    # --- the broker ---------------------------------------------------------------------------

    def go_down(self, unanswered: LostReply = LostReply.NOT_DONE) -> None:
        """Stop answering; `unanswered` decides whether appends and commits take effect."""
        self._down = unanswered

    def come_up(self) -> None:
        self._down = None
        self._changed()

    def require_up(self) -> None:
        """Raise `KafkaUnavailable` while the broker is down."""
        if self._down is not None:
            raise KafkaUnavailable("the in-memory Kafka is down")

    # --- topics -------------------------------------------------------------------------------

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

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` until the returned function is called: after a transaction has ended, a
        topic has changed, or the broker has come up."""
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def _changed(self) -> None:
        for watcher in list(self._watchers):
            watcher()


class MemoryEvidence(Evidence):
    """What a Kafka in memory holds; it keeps no `cleanup.policy`."""

    def __init__(self, kafka: MemoryTopics) -> None:
        self._kafka = kafka

    async def partitions(self, names: Collection[str]) -> dict[str, int]:
        topics = self._kafka.topics
        return {name: len(topics[name].partitions) for name in names if name in topics}

    async def compacted(self, names: Sequence[str]) -> bool:
        return True

    async def holds(
        self, topic: str, partitions: int, test: Callable[[Record], bool], newest: int = 0
    ) -> bool:
        logs = self._kafka.topics[topic].partitions if topic in self._kafka.topics else ()
        return any(
            test(record)
            for log in logs
            for record in log.read(log.begin, log.stable_end, producers=True)
        )


def valid_name(name: str) -> bool:
    """Return True if a topic can have this name."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")
