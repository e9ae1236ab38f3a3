"""The door to the log: everything that an owner asks of Kafka, as small protocols.

`txbroker.kafka` implements it on a real Kafka, `txbroker.testing` in memory; one contract suite
runs on both. Whoever is behind the door raises only the errors named here (and
`KafkaUnavailable`), so that no Kafka client's exception travels further.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from txbroker.core.records import Cause, Checkpoint, Claim, Record, Skip
from txbroker.errors import KafkaUnavailable, TxbrokerError


class AppendRefused(TxbrokerError):
    """The broker does not take this batch and never will; nothing of it was stored."""


class AppendUnknown(TxbrokerError):
    """The broker did not answer: the batch was stored, or is on its way, or is lost."""


class LogTruncated(TxbrokerError):
    """The log begins after, or ends before, a position that was read or written already."""


class Fenced(TxbrokerError):
    """Another owner has claimed the partition since."""


class PromotionTxnLost(TxbrokerError):
    """A turn's outcome is unknown or its producers are unusable: only a new claim tells.

    `cause` names the target partition that did not answer, where it was one of those.
    """

    def __init__(self, message: str | None = None, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class PromotionTxnRefused(TxbrokerError):
    """The broker refused a record of the turn; nothing of the turn will become visible.

    The writer is unusable until the partition is claimed again.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Hanging(KafkaUnavailable):
    """A Kafka transaction that nobody ends hides the progress: the partition cannot be read."""


class NotVisible(KafkaUnavailable):
    """A turn is committed, but readers did not come past it in time.

    Attributes:
        partitions: where they did not.
    """

    def __init__(self, message: str, partitions: Sequence[tuple[str, int]]) -> None:
        super().__init__(message)
        self.partitions = partitions


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

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        """Return the log start offset and the offset of the next record.

        Unless `confirmed`, which is more expensive, records acknowledged by a newer leader may be
        missing.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the records from offset `start` up to, not including, `end`, in order.

        Offsets that hold none, as other clients' Kafka transactions leave them behind, are told
        by the next record's `skipped`. Behind the last record there is no next one: once all
        records are taken, `skipped` is called with such offsets, if any. What neither tells is a
        hole.

        Raises:
            LogTruncated: `start` is not kept any more, or the log ends before `end`.
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return the records at these offsets, in their order; an offset that holds none (any
        more) is left out. Offsets grow; near ones are fetched together, far ones each by itself.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...


class TargetRecord(NamedTuple):
    """A record to be promoted, and where to."""

    topic: str
    partition: int
    record: Record


class PromotionTxn(Struct, frozen=True):
    """What becomes visible together: promoted records, parked copies and progress."""

    promoted: tuple[TargetRecord, ...]
    parked: tuple[Record, ...]
    progress: Checkpoint


class PromotionTxnHandle(Protocol):
    """A turn whose writes the brokers have acknowledged."""

    offsets: Sequence[int]
    """The offset of each promoted record, -1 where the broker did not say."""
    parked_offsets: Sequence[int]
    """The offset of each record in the parked topic, -1 where the broker did not say."""

    async def committed(self) -> None:
        """Wait until the turn's commit is acknowledged.

        Raises:
            Fenced, PromotionTxnLost: claim again; the progress shows whether it was committed.
        """
        ...

    async def visible(self) -> None:
        """Wait until every `read_committed` reader can see the turn (its LSO has passed it).

        Raises:
            NotVisible: it is not within 60 s.
            KafkaUnavailable: Kafka does not answer.
        """
        ...


class ForeignRecord(NamedTuple):
    """A record of another client in one of our topics, and how that shows."""

    record: Record
    why: str


class Claimed(NamedTuple):
    """What a claim found: our claim record's append time, the last acknowledged progress, the
    newest record under each key of the checkpoint topic that belongs to a snapshot, which records
    operators have decided to pass over, and how many others wrote under our keys, with the newest
    of these."""

    timestamp_ms: int
    progress: Checkpoint | None
    snapshots: Sequence[Record] = ()
    skips: Sequence[Skip] = ()
    foreign: int = 0
    set_aside: Sequence[ForeignRecord] = ()


class PartitionDoor(Protocol):
    """What the owner of one half partition needs."""

    partition: int
    half: Log
    op: Log

    async def claimed_before(self) -> bool:
        """Return whether the partition was ever claimed: the checkpoint topic has held a record.

        Writes nothing.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    async def checkpoint_end(self) -> int:
        """Return the offset that the next record of the checkpoint topic will get.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    async def parked_before(self) -> bool:
        """Return whether the parked topic has ever held a record.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    async def claim(self, claim: Claim) -> Claimed:
        """Fence every earlier owner, write the claim record, then read the progress.

        Also recovers from `Fenced`, `PromotionTxnLost` and `PromotionTxnRefused`: it creates new
        producers.

        Raises:
            Fenced: another owner claimed at the same time; try again after a random pause.
            Hanging: a transaction that nobody ends hides the progress.
            NewerRecord: a newer version wrote the progress.
            InvariantBroken: the progress does not read, or is lost.
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    async def store(self, records: Sequence[Record]) -> None:
        """Append records of a snapshot to the checkpoint topic, beside the turns and never in
        their way. One call at a time.

        Raises:
            AppendRefused: they are too large; nothing was stored.
            KafkaUnavailable: they may or may not be stored. That does no harm, as a snapshot
                counts only when it is whole.
        """
        ...

    def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Yield all records of this partition of the parked topic, `read_committed`, in order.

        Raises:
            Hanging: a transaction that nobody ends hides some of them.
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return records of this partition of the parked topic, as `Log.pick` does."""
        ...

    def unverified(self, places: Collection[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """Return the target partitions that may still hold an open transaction of an earlier claim.

        Call `verify_no_open_txn` before writing to them.
        """
        ...

    async def verify_no_open_txn(self, places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        """Find out whether turns of earlier claims have ended in target partitions, and return why
        some must not be written now; the others are not `unverified` any more.

        A turn that never ended there would be ended together with the next one.
        """
        ...

    async def write(self, turn: PromotionTxn) -> PromotionTxnHandle:
        """Write one turn; return once its records are acknowledged and the next may be written.

        Its commit goes on by itself, behind the commit of the turn before it.

        Raises:
            PromotionTxnRefused: a record was refused; the turn is aborted.
            Fenced, PromotionTxnLost: claim again.
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


class AuditFeed(Protocol):
    """The compacted topic in which audits tell how they ended: opaque JSON by key."""

    def follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Read the topic and keep following it, beside everything else; `changed` gets each key's
        newest JSON or None, and must not raise.

        Nobody depends on it: a topic that is missing, or may not be read, is waited for, and what
        cannot be read is passed over.
        """
        ...


class Assignment(Struct, frozen=True):
    """Who owns what in one generation of the proxies' group.

    Attributes:
        mine: the half partitions of this proxy.
        owners: the URL of each half partition's proxy, "" where none is known.
        proxies: the URLs of all proxies, this one and those without a partition included.
        record_version: the newest record version that all of them understand; nobody may write a
            newer one.
        peer_urls: by the URL of a proxy, where it takes other proxies' calls if not there.
        admin_urls: by the URL of a proxy, where it takes operators' calls if not there.
    """

    mine: frozenset[int]
    owners: tuple[str, ...]
    proxies: tuple[str, ...]
    record_version: int
    peer_urls: dict[str, str] = {}
    admin_urls: dict[str, str] = {}


TAKEN = "another process has joined with our instance id"


def replaced_by(instance: str, url: str, host: str = "") -> str:
    """Return what to say where another process has taken our instance id.

    Args:
        instance: the id.
        url: of the other process.
        host: from which it connects, where known.
    """
    where = f"{url}, from host {host}" if host else url
    return (
        f"{TAKEN}: {instance} is now the proxy at {where}. This one stays out until that one has "
        "gone: stop one of them, or give it another --instance"
    )


class Membership(Protocol):
    """Which half partitions this proxy owns, and who owns the others, by Kafka's group protocol."""

    async def join(
        self,
        url: str,
        assigned: Callable[[Assignment], None],
        lost: Callable[[str], None],
        *,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        """Join as the proxy at `url`, which takes other proxies' calls at `peer_url` and
        operators' at `admin_url`, "" for there too; return when the first assignment is there.

        Both are called from the event loop and must return at once: `assigned` in each generation,
        also where nothing moved; `lost`, with why, when touch with the group is lost: then nobody
        knows what is ours until `assigned` is called again, so everything is suspended. It is
        called again when more is known of why. While a rebalance goes on we keep what we have.

        Raises:
            ConfigurationError: the group cannot be used.
        """
        ...

    async def still_ours(self, partition: int) -> bool:
        """After a fresh heartbeat in the same generation, say whether `partition` is ours.

        After a no, `assigned` or `lost` tells what is ours from then on.

        Raises:
            KafkaUnavailable: no answer; it may still be ours.
        """
        ...

    def in_touch(self) -> bool:
        """Return whether the coordinator's last response is younger than a session.

        Then our partitions cannot have been reassigned. After a long sleep of this process it is
        False before `lost` is called.
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
    audit: AuditFeed
    membership: Membership

    async def start(self) -> None:
        """Connect, check or create txbroker's own topics, refuse settings that cannot work.

        Raises:
            KafkaUnavailable: Kafka does not answer.
            ConfigurationError: the topics' settings contradict the configuration.
        """
        ...

    async def check_topics(self) -> list[str]:
        """Say in plain words what has happened to txbroker's own topics since `start` that it
        cannot work with: partitions, settings, a topic deleted or made anew. Empty if all is well.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        ...

    def brokers(self) -> Sequence[tuple[str, int]]:
        """Return host and port of each broker, as the newest metadata say; sends nothing."""
        ...

    def partition(self, partition: int) -> PartitionDoor:
        """Return the door of one half partition; nothing is written before its `claim`."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...
