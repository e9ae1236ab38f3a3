"""The door to the log: everything that an owner asks of Kafka, as small protocols.

`txbroker.kafka` implements it on a real Kafka, `txbroker.testing` in memory; one contract suite
runs on both. Whoever is behind the door raises only the errors named here (and
`KafkaUnavailable`), so that no Kafka client's exception travels further.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from txbroker.core.records import Cause, Claim, Progress, Record
from txbroker.errors import TxbrokerError


class AppendRefused(TxbrokerError):
    """The broker does not take this batch and never will; nothing of it was stored."""


class AppendUnknown(TxbrokerError):
    """The broker did not answer: the batch was stored, or is on its way, or is lost."""


class LogTruncated(TxbrokerError):
    """The log begins after, or ends before, a position that was read or written already."""


class Fenced(TxbrokerError):
    """Another owner has claimed the partition since."""


class TurnLost(TxbrokerError):
    """A turn's outcome is unknown or its producers are unusable: only a new claim tells.

    `cause` names the target partition that did not answer, where it was one of those.
    """

    def __init__(self, message: str | None = None, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class TurnRefused(TxbrokerError):
    """The broker refused a record of the turn; nothing of the turn will become visible.

    The writer is unusable until the partition is claimed again.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Appended(NamedTuple):
    """Where a batch went: the offset of its first record and the broker's append time.

    Either is -1 where the broker did not say; then only reading back tells.
    """

    base_offset: int
    timestamp_ms: int


class Log(Protocol):
    """One partition of the half or operation topic, as its owner writes and reads it."""

    batch_bytes_max: int
    """The largest batch that the topic takes, bytes. Known once the log is open."""

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append records as one batch: acks=all, idempotent. One call at a time.

        Raises:
            AppendRefused: certainly not stored; the next append may go on.
            AppendUnknown: may or may not be stored, now or a little later.
        """
        ...

    async def bounds(self) -> tuple[int, int]:
        """Return the first offset that is kept and the offset that the next record will get.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    def read(self, start: int, end: int) -> AsyncIterator[Sequence[Record]]:
        """Yield the records from offset `start` up to, not including, `end`, in order.

        Raises:
            LogTruncated: `start` is not kept any more, or the log ends before `end`.
            KafkaUnavailable: Kafka does not answer.
        """
        ...


class Target(NamedTuple):
    """A record to be promoted, and where to."""

    topic: str
    partition: int
    record: Record


class Turn(Struct, frozen=True):
    """What becomes visible together: promoted records, parked copies and progress."""

    promoted: tuple[Target, ...]
    parked: tuple[Record, ...]
    progress: Progress


class TurnHandle(Protocol):
    """A turn whose writes the brokers have acknowledged."""

    offsets: Sequence[int]
    """The offset of each promoted record, -1 where the broker did not say."""

    async def committed(self) -> None:
        """Wait until the turn's commit is acknowledged.

        Raises:
            Fenced, TurnLost: claim again; the claim's progress tells whether it was committed.
        """
        ...

    async def visible(self) -> None:
        """Wait until every `read_committed` reader can see the turn (its LSO has passed it).

        Raises:
            KafkaUnavailable: not visible within 60 s; the partitions are named.
        """
        ...


class Claimed(NamedTuple):
    """What a claim found: our claim record's append time and the last acknowledged progress."""

    timestamp_ms: int
    progress: Progress | None


class PartitionDoor(Protocol):
    """What the owner of one half partition needs."""

    partition: int
    half: Log
    op: Log

    async def claim(self, claim: Claim) -> Claimed:
        """Fence every earlier owner, write the claim record, then read the progress.

        Also the way back after `Fenced`, `TurnLost` and `TurnRefused`: it makes new producers.

        Raises:
            Fenced: another owner claimed at the same time; try again after a random pause.
            KafkaUnavailable: Kafka does not answer, or a hanging transaction hides the progress.
        """
        ...

    def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Yield all records of this partition of the parked topic, `read_committed`, in order."""
        ...

    async def write(self, turn: Turn) -> TurnHandle:
        """Write one turn; return once its records are acknowledged and the next may be written.

        Its commit goes on by itself, behind the commit of the turn before it.

        Raises:
            TurnRefused: a record was refused; the turn is aborted.
            Fenced, TurnLost: claim again.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; never blocks on a broker that does not answer."""
        ...


class TargetFacts(Struct, frozen=True):
    """What a target topic takes: known from metadata and settings, never by trying."""

    partitions: int
    message_bytes_max: int
    log_append_time: bool
    leaderless: frozenset[int] = frozenset()


class Targets(Protocol):
    """What is known of target topics. Facts are cached for seconds."""

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return facts from the cache, or why there are none, or None where it must be asked."""
        ...

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask Kafka about a topic (never creating it by accident), and remember the answer.

        With `create`, a missing topic is created through the admin API.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache, after an error that says that its facts have changed."""
        ...


class GroupStore(Protocol):
    """The compacted topic of registered groups: opaque JSON by group name."""

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Read all groups, then keep following the topic; `changed` gets each group's JSON or
        None. Returns once what was there at the start has been read."""
        ...

    async def put(self, group: str, value: bytes | None) -> None:
        """Store or, with None, remove a group; returns once it is stored and was `changed`."""
        ...


class Membership(Protocol):
    """Which half partitions this proxy owns, by Kafka's group protocol."""

    async def join(self, assigned: Callable[[frozenset[int]], None]) -> None:
        """Join; `assigned` gets the owned partitions after every change, from the event loop.

        It must return at once. Partitions that are taken away are suspended first (an empty or
        smaller set), and come back in a later call if they stay.
        """
        ...

    async def still_ours(self, partition: int) -> bool:
        """After a fresh heartbeat in the same generation, say whether `partition` is ours.

        After a no, `assigned` is called with what is ours from then on.

        Raises:
            KafkaUnavailable: no answer; it may still be ours.
        """
        ...

    async def leave(self) -> None:
        """Leave the group, so that others take over at once."""
        ...


class Door(Protocol):
    """A Kafka, seen from a proxy."""

    partitions: int
    """How many half partitions there are. Known once started."""
    targets: Targets
    groups: GroupStore
    membership: Membership

    async def start(self) -> None:
        """Connect, check or create txbroker's own topics, refuse settings that cannot work.

        Raises:
            KafkaUnavailable: Kafka does not answer.
            ConfigurationError: the topics' settings contradict the configuration.
        """
        ...

    def partition(self, partition: int) -> PartitionDoor:
        """Return the door of one half partition; nothing is written before its `claim`."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...
