"""The door: what a proxy needs of Kafka, as small protocols.

`txbroker.kafka` implements them on a real Kafka, `txbroker.testing` in memory; one contract suite
runs on both. Implementations raise only the errors defined here, those of `txbroker.door.writing`
and `KafkaUnavailable`, never an exception of a Kafka client. Every method that asks Kafka raises
`KafkaUnavailable` if it does not answer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from txbroker.core.records import Cause, Checkpoint, Claim, Record, Skip
from txbroker.door.writing import Copy, Fenced, Refused, Unknown
from txbroker.errors import KafkaUnavailable, TxbrokerError


class AppendRefused(TxbrokerError):
    """The broker refuses this batch for good; nothing of it was stored."""


class AppendUnknown(TxbrokerError):
    """The broker did not answer: the batch is stored, in flight or lost."""


class LogTruncated(TxbrokerError):
    """The log begins after, or ends before, an offset that was read or written already."""


class Hanging(KafkaUnavailable):
    """An open Kafka transaction hides the checkpoint: the partition cannot be read."""


class NotVisible(KafkaUnavailable):
    """A promotion transaction is committed, but was not visible to readers in time.

    Attributes:
        partitions: those where it was not.
    """

    def __init__(self, message: str, partitions: Sequence[tuple[str, int]]) -> None:
        super().__init__(message)
        self.partitions = partitions


class Appended(NamedTuple):
    """The offset of a batch's first record, and the broker's append time.

    Either is -1 if the broker did not return it; then the log must be read back.
    """

    base_offset: int
    timestamp_ms: int


class Log(Protocol):
    """One partition of the half or operation topic, as its owner writes and reads it."""

    batch_bytes_max: int
    """The topic's largest batch, bytes. Known once the log is open."""

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append records as one batch: acks=all, idempotent. One call at a time.

        Raises:
            AppendRefused: not stored; the next append may follow.
            AppendUnknown: may be stored, now or later.
        """

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        """Return the log start offset and the offset of the next record.

        Unless `confirmed`, which is more expensive, records acknowledged by a newer leader may be
        missing.
        """

    def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the records from offset `start` up to, not including, `end`, in order.

        Offsets without a record, as other clients' Kafka transactions leave them, are counted in
        the next record's `skipped`. After the last record, `skipped` is called with such offsets,
        if any. Any other missing offset is a gap.

        Raises:
            LogTruncated: `start` is not kept any more, or the log ends before `end`.
        """

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return the records at these ascending offsets; those without a record are left out.

        Adjacent offsets are fetched together, distant ones separately.
        """


class PromotionTxn(Struct, frozen=True):
    """What becomes visible together: promoted records, parked copies and the checkpoint."""

    promoted: tuple[Copy, ...]
    parked: tuple[Record, ...]
    progress: Checkpoint


class PromotionTxnHandle:
    """A promotion transaction whose records the brokers have acknowledged; its commit proceeds.

    Args:
        offsets: of each promoted record, -1 if unknown.
        parked_offsets: of each record in the parked topic, -1 if unknown.
        commit: see `begin_commit`.
        pass_by: waits until the last stable offsets have passed it.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        parked_offsets: Sequence[int],
        commit: asyncio.Task[None],
        pass_by: Callable[[], Awaitable[None]],
    ) -> None:
        self.offsets = offsets
        self.parked_offsets = parked_offsets
        self._commit = commit
        self._pass_by = pass_by

    async def committed(self) -> None:
        """Wait until the commit is acknowledged.

        Raises:
            Fenced, Unknown: claim again; the progress shows whether it was committed.
        """
        await commit_outcome(self._commit)

    async def visible(self) -> None:
        """Wait until every `read_committed` reader can see it (the LSO has passed it).

        Raises:
            NotVisible: not within 60 s.
        """
        await self.committed()
        await self._pass_by()


class ForeignRecord(NamedTuple):
    """A record of another client in one of our topics, and how it is recognized."""

    record: Record
    why: str


class Claimed(NamedTuple):
    """The result of a claim.

    Attributes:
        timestamp_ms: our claim record's append time.
        progress: the last acknowledged checkpoint.
        snapshots: the newest record under each snapshot key of the checkpoint topic.
        skips: records that operators have decided to skip.
        foreign: how many records other clients wrote under our keys.
        set_aside: the newest of these.
    """

    timestamp_ms: int
    progress: Checkpoint | None
    snapshots: Sequence[Record] = ()
    skips: Sequence[Skip] = ()
    foreign: int = 0
    set_aside: Sequence[ForeignRecord] = ()


class PartitionDoor(Protocol):
    """What the owner of one half partition needs of Kafka."""

    partition: int
    half: Log
    op: Log

    async def claimed_before(self) -> bool:
        """Return whether the partition was ever claimed: the checkpoint topic has held a record."""

    async def checkpoint_end(self) -> int:
        """Return the next record's offset in the checkpoint topic."""

    async def parked_before(self) -> bool:
        """Return whether the parked topic has ever held a record."""

    async def claim(self, claim: Claim) -> Claimed:
        """Fence all earlier owners, write the claim record, then read the newest checkpoint.

        Also recovers from `Fenced`, `Unknown` and `Refused`: it creates new
        producers.

        Raises:
            Fenced: another owner claimed at the same time; retry after a random pause.
            Hanging: an open transaction hides the checkpoint.
            NewerRecord: a newer version wrote the checkpoint.
            InvariantBroken: the checkpoint is unreadable or lost.
        """

    async def store(self, records: Sequence[Record]) -> None:
        """Append records of a snapshot to the checkpoint topic, independently of promotion.

        One call at a time.

        Raises:
            AppendRefused: they are too large; nothing was stored.
            KafkaUnavailable: they may be stored, which does no harm: only complete snapshots are
                used.
        """

    def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Yield all records of this partition of the parked topic, `read_committed`, in order.

        Raises:
            Hanging: an open transaction hides some of them.
        """

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return records of this partition of the parked topic, as `Log.pick` does."""

    def unverified(self, places: Collection[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """Return the target partitions that may still hold an open transaction of an earlier claim:
        call `verify_no_open_txn` before writing to them."""

    async def verify_no_open_txn(self, places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        """Verify that promotion transactions of earlier claims have ended in target partitions.

        Returns:
            Why some must not be written now; the others are not `unverified` any more.

        One that never ended there would be ended together with the next one.
        """

    async def write(self, turn: PromotionTxn) -> PromotionTxnHandle:
        """Write one; return when its records are acknowledged and the next may be written.

        Its commit continues in the background, after that of the previous one.

        Raises:
            Refused: a record was refused; everything is aborted.
            Fenced, Unknown: claim again.
        """

    async def close(self) -> None:
        """Close connections; never waits for a broker that does not answer."""


class TargetFacts(Struct, frozen=True):
    """What a target topic accepts, by its metadata and settings, never by trying."""

    partitions: int
    message_bytes_max: int
    log_append_time: bool
    leaderless: frozenset[int] = frozenset()


class Targets(Protocol):
    """Facts about target topics, cached for seconds."""

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return cached facts, or why there are none; None if Kafka must be asked."""

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask Kafka about a topic and cache the answer; with `create`, create a missing one through
        the admin API, never automatically."""

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache, after an error that shows that its facts have changed."""

    def records(
        self, topic: str, partition: int, *, start: int | None = None, since_ms: int = 0
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the committed records of a partition in pieces, in order, to its last stable
        offset as of now.

        Args:
            start: the first offset; None: of the first record with this timestamp or a later one.

        Raises:
            LogTruncated: `start` is not in the log (any more).
            KafkaUnavailable: Kafka does not answer, or this proxy may not read the topic.
        """


class GroupStore(Protocol):
    """The compacted topic of registered groups: opaque JSON by group name."""

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Read all groups, then follow the topic; `changed` gets each group's JSON or None.

        Returns once everything that was there at the start is read.
        """

    async def put(self, group: str, value: bytes | None) -> None:
        """Store a group, or remove it with None; returns after `changed` was called with it."""


class AuditFeed(Protocol):
    """The compacted topic of audit results: opaque JSON by key."""

    def follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Follow the topic in the background.

        A missing or forbidden topic is retried, and unreadable records are skipped: nothing depends
        on it.

        Args:
            changed: gets each key's newest JSON or None, and must not raise.
        """


class Assignment(Struct, frozen=True):
    """The assignment of half partitions in one generation of the proxies' group.

    Attributes:
        mine: the half partitions of this proxy.
        owners: the URL of each half partition's proxy, "" if unknown.
        proxies: the URLs of all proxies, with this one and those without a partition.
        record_version: the newest record version that all of them read; none may write a newer one.
        peer_urls: by a proxy's URL, its separate URL for calls of other proxies.
        admin_urls: by a proxy's URL, its separate URL for operators.
    """

    mine: frozenset[int]
    owners: tuple[str, ...]
    proxies: tuple[str, ...]
    record_version: int
    peer_urls: dict[str, str] = {}
    admin_urls: dict[str, str] = {}


TAKEN = "another process has joined with our instance id"


def replaced_by(instance: str, url: str, host: str = "") -> str:
    """Return the error for an instance id that another process has taken, at this URL and, if
    known, host."""
    where = f"{url}, from host {host}" if host else url
    return (
        f"{TAKEN}: {instance} is now the proxy at {where}. This proxy stays out of the group until "
        "the other one leaves: stop one of them, or give it another --instance"
    )


class Membership(Protocol):
    """Membership in the proxies' group, which assigns the half partitions."""

    async def join(
        self,
        url: str,
        assigned: Callable[[Assignment], None],
        lost: Callable[[str], None],
        *,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        """Join the group; return after the first assignment.

        Args:
            url: of this proxy.
            assigned: called in each generation, also if nothing moved.
            lost: called, with the reason, when contact with the group is lost: ownership is
                unknown until the next `assigned`, so everything is suspended. Called again when
                more is known about the reason. During a rebalance we keep our partitions.
            peer_url: where this proxy takes other proxies' calls, "" for `url`.
            admin_url: where this proxy takes operators' calls, "" for `url`.

        Both callbacks run in the event loop and must return at once.

        Raises:
            ConfigurationError: the group cannot be used.
        """

    async def still_ours(self, partition: int) -> bool:
        """Return whether `partition` is still ours, after a new heartbeat in this generation.

        After False, `assigned` or `lost` is called.

        Raises:
            KafkaUnavailable: no answer; it may still be ours.
        """

    def in_touch(self) -> bool:
        """Return whether the coordinator's last response is younger than a session.

        Then our partitions cannot have been reassigned. After a long sleep of this process it is
        False before `lost` is called.
        """

    async def leave(self) -> None:
        """Leave the group, so that other proxies take over at once."""


class Door(Protocol):
    """Kafka as a proxy uses it."""

    partitions: int
    """The number of half partitions. Known once started."""
    targets: Targets
    groups: GroupStore
    audit: AuditFeed
    membership: Membership

    async def start(self) -> None:
        """Connect; check or create txbroker's own topics; refuse settings that cannot work.

        Raises:
            KafkaUnavailable: Kafka does not answer.
            ConfigurationError: the topics' settings contradict the configuration.
        """

    async def check_topics(self) -> list[str]:
        """Return problems of txbroker's own topics since `start`, as sentences.

        These are changed partition counts or settings, and deleted or recreated topics.
        """

    def brokers(self) -> Sequence[tuple[str, int]]:
        """Return host and port of each broker by the newest metadata; sends nothing."""

    def partition(self, partition: int) -> PartitionDoor:
        """Return the door of one half partition; it writes nothing before its `claim`."""

    async def close(self) -> None:
        """Close everything."""


# --- the commit of a promotion transaction ------------------------------------------------------
# A separate task, shared by all implementations: it continues if no caller waits for it.


def begin_commit(commit: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a commit; wait for it with `commit_outcome`."""
    task = asyncio.create_task(commit)
    # A caller that does not wait gets the failure at its next write.
    task.add_done_callback(_retrieve)
    return task


async def commit_outcome(commit: asyncio.Task[None]) -> None:
    """Wait for a commit, and raise Fenced or Unknown if it failed. Several callers may
    wait; cancelling one does not stop the commit."""
    try:
        await asyncio.shield(commit)
    except asyncio.CancelledError:
        if commit.cancelled():
            raise Unknown("the partition's door was closed") from None
        raise


def raised_again(
    error: Fenced | Unknown | Refused,
) -> Fenced | Unknown | Refused:
    """Return an equal exception; raising one object twice would accumulate tracebacks."""
    if isinstance(error, Refused):
        return Refused(error.indexes, error.cause)
    return type(error)(str(error))


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
