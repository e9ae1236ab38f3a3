"""What all parts of a half partition share: settings, clocks, claim, followers, events, waiters."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Protocol

from msgspec import Struct, field

from txbroker.core.decoding import passed_over
from txbroker.core.encoding import MarkerRow, marker_row
from txbroker.core.ledger import ApplyResult, Effect, Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import (
    LOG_VERSION,
    RECORD_VERSION,
    Header,
    Marker,
    MarkerKind,
    Message,
    Record,
    Skip,
    Source,
)
from txbroker.core.segment import SEGMENT_BYTES, SEGMENT_VERSION
from txbroker.core.settled import BEYOND_MAX, share_max
from txbroker.core.transaction import GROUP_OF, Transaction
from txbroker.door.own_topics import foreign_why
from txbroker.door.protocols import ForeignRecord, PartitionDoor, Targets
from txbroker.errors import NewerRecord, OwnerUnavailable
from txbroker.principals import Directory, no_principals
from txbroker.proxy.observe.counting import OperatorActions, RateCounter
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.clock import LogTime, TxnLimiter

log = get_logger(__name__)


class OwnerSettings(Struct, frozen=True):
    """The part of the configuration that an owner needs.

    Attributes:
        dedup_window_ms: how long ids and keys are remembered.
        pending_max: limit of unsettled transactions.
        pending_group_max: limit of unsettled transactions of one share.
        half_retention_ms: retention of the half topic.
        promotion_limits: limits of one promotion transaction.
        snapshot_records_min: records after which a snapshot is due.
        installation: the first headers of every promoted record.
    """

    dedup_window_ms: int
    pending_max: int
    pending_group_max: int
    half_retention_ms: int
    promotion_limits: PromotionLimits = PromotionLimits()
    snapshot_records_min: int = 20_000
    installation: tuple[Header, ...] = ()

    def waiting_share_max(self) -> int:
        """Return how many transactions of one share may wait for unavailable targets."""
        return share_max(self.promotion_limits.deferred_max)


class PartitionEvents(Protocol):
    """Observes a partition. Called in the event loop, once per run or promotion transaction."""

    def outcome(self, outcome: ApplyResult) -> None:
        """A record or decision changed nothing: it is repeated, contrary, illegal or void."""

    def prepared(self, transactions: Sequence[Transaction]) -> None:
        """This owner stored half messages."""

    def decided(self, transactions: Sequence[Transaction]) -> None:
        """Deciding markers took effect."""

    def promoted(self, transactions: list[Transaction]) -> None:
        """Transactions became visible."""

    def refused(self, transactions: list[Transaction]) -> None:
        """Transactions were set aside, because a target rejects them."""

    def lost(self, count: int) -> None:
        """Half messages of unsettled transactions no longer exist."""

    def snapshot_written(self, seconds: float, entries: int) -> None:
        """A snapshot with `entries` transactions was written."""

    def snapshot_failed(self) -> None:
        """A snapshot could not be written."""

    def recovered(self, seconds: float) -> None:
        """A partition was claimed and replayed."""

    def foreign(self, topic: str, count: int) -> None:
        """Another client wrote records into an own topic (such as `half`)."""

    def fenced(self) -> None:
        """Another owner took over a partition."""

    def kafka_failed(self, operation: str) -> None:
        """Kafka failed an `append`, a `turn` or a `claim`."""


class Follower(Protocol):
    """Acts on changes of the ledger."""

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these transactions."""


class OwnershipCheck(Protocol):
    """Asks the proxies' group who owns a partition (implemented by the partition manager)."""

    async def still_ours(self, partition: int) -> bool:
        """Return, after a fresh heartbeat, whether this proxy still owns the partition."""


class ProxyContext:
    """What the owners of one proxy share.

    Attributes:
        url: of this proxy, for claim records.
        limiter: admits the promotion transactions of all partitions.
        actions: what operators did, by the markers that the owners applied.
        record_version, segment_version: the versions to write, which all proxies can read.
    """

    def __init__(
        self,
        name: str,
        group: OwnershipCheck,
        partitions: Sized,
        bodies_bytes_max: int,
        settled_bytes_max: int,
        principals: Callable[[], Directory] = no_principals,
    ) -> None:
        self.name = name
        self.url = ""
        self.group = group
        self.limiter = TxnLimiter()
        self.actions = OperatorActions()
        self.principals = principals
        self.limit_version(RECORD_VERSION)
        self._partitions = partitions
        self._bodies_bytes_max = bodies_bytes_max
        self._settled_bytes_max = settled_bytes_max

    def limit_version(self, version: int) -> None:
        self.record_version = min(LOG_VERSION, version)
        self.segment_version = min(SEGMENT_VERSION, version)

    def bodies_share(self) -> int:
        """Return how many bytes of bodies one partition may keep in memory."""
        return self._bodies_bytes_max // max(1, len(self._partitions))

    def settled_share(self) -> int:
        """Return how many bytes of settled transactions one partition may remember."""
        return self._settled_bytes_max // max(1, len(self._partitions))

    def beyond_max(self) -> int:
        """Return how many settled transactions one partition may remember beyond the window."""
        return min(BEYOND_MAX, self.settled_share() // SEGMENT_BYTES)


class VisibilityWaiters:
    """Callers that wait until a transaction is visible, by its id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def release(self, transactions: Iterable[Transaction]) -> None:
        if self._waiting:
            for transaction in transactions:
                for future in self._waiting.pop(transaction.id, ()):
                    if not future.done():
                        future.set_result(None)

    def close(self) -> None:
        """Fail all waiting callers: this owner closes."""
        self._closed = True
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(OwnerUnavailable())
        self._waiting.clear()

    async def wait(self, id: str) -> None:
        """Wait until a transaction is visible, or cannot become so without help."""
        if self._closed:
            raise OwnerUnavailable(id=id)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id, []).append(future)
        try:
            await future
        finally:
            # A caller that times out and retries must not leave a future behind each time.
            waiting = self._waiting.get(id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(id, None)


class CurrentClaim:
    """The claim of an owner; a reclaim replaces its id.

    Attributes:
        id: of the claim.
        reclaims: how often this owner reclaimed the partition and reconciled its ledger.
        skips: records that operators decided to pass over, as found by the claim.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.reclaims = 0
        self.skips: Sequence[Skip] = ()


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


class PartitionContext(Struct, frozen=True):
    """What all parts of one half partition share.

    Attributes:
        door: logs, claims and promotion transactions of the partition.
        targets: facts about target topics.
        events: observes the partition.
        settings: limits and windows.
        proxy: shared by all owners of the proxy.
        stopped: called once with the error that stops the partition.
        ledger: the transactions of the partition.
        partition: its number.
        clock: the brokers' clock.
        id_clock: the half topic's clock: ids expire by its log clock alone, wherever the others
            stand.
        claim: the owner's current claim.
        gate: while it is not set the owner is suspended, and nothing is written.
        followers: notified, in this order, of all transactions that records changed.
        rates: counts events for rates.
        visible: callers that wait for visibility.
    """

    door: PartitionDoor
    targets: Targets
    events: PartitionEvents
    settings: OwnerSettings
    proxy: ProxyContext
    stopped: Callable[[Exception], None]
    ledger: Ledger
    clock: LogTime = field(default_factory=lambda: LogTime(0))
    id_clock: LogTime = field(default_factory=lambda: LogTime(0))
    claim: CurrentClaim = field(default_factory=CurrentClaim)
    gate: asyncio.Event = field(default_factory=_open_gate)
    followers: list[Follower] = field(default_factory=list)
    rates: RateCounter = field(default_factory=RateCounter)
    visible: VisibilityWaiters = field(default_factory=VisibilityWaiters)

    @property
    def partition(self) -> int:
        return self.ledger.partition

    def marker(
        self,
        transaction: Transaction,
        kind: MarkerKind,
        *,
        source: Source,
        by: str = "",
        reason: str = "",
        number: int | None = None,
        endpoint: str = "",
        previous: str = "",
        later_s: float = 0.0,
        group: str = "",
        contents: Sequence[Message] | None = None,
    ) -> MarkerRow:
        """Return the row of a marker of this transaction.

        Args:
            number: of the attempt; None is the number of the last one.
            contents: the messages that replace the prepared ones.
        """
        return marker_row(
            Marker(
                v=self.proxy.record_version,
                kind=kind,
                id=transaction.half.id,
                half=transaction.offset,
                source=source,
                by=by,
                reason=reason,
                round=transaction.checks.round,
                number=transaction.checks.number if number is None else number,
                claim=self.claim.id,
                endpoint=endpoint,
                previous=previous,
                later_s=later_s,
                group=group,
                contents=0 if contents is None else len(contents),
            ),
            transaction.half,
            contents,
        )

    def promoted(self, transactions: list[Transaction]) -> None:
        self.events.promoted(transactions)
        self.rates.promoted += len(transactions)
        self.rates.promoted_by.extend(map(GROUP_OF, transactions))
        self.visible.release(transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        """Report transactions as refused; they stay invisible until they are retried."""
        self.events.refused(transactions)
        self.visible.release(transactions)

    def changed(self, transactions: Sequence[Transaction]) -> None:
        for follower in self.followers:
            follower.changed(transactions)

    def unchanged(self, topic: str, outcome: ApplyResult, record: Record) -> None:
        """Count a record that changed nothing; log it if another client wrote it."""
        if outcome.effect is Effect.NEWER:
            why = foreign_why(topic, record, self.partition)
            if why:
                outcome = ApplyResult(Effect.VOID, why=f"{outcome.why}, but {why}")
        if outcome.effect is Effect.NEWER and not passed_over(self.claim.skips, topic, record):
            # It may decide a transaction in a way that this build does not know: going on could
            # promote a transaction that was rolled back.
            raise NewerRecord(
                f"{topic} record at offset {record.offset} was written by a newer txbroker "
                f"({outcome.why}): upgrade this proxy. To pass it over see docs/operate/repair.md"
            )
        if outcome.effect is not Effect.PARTIAL:
            if outcome.effect is Effect.VOID:
                self.report_foreign(topic, 1, [ForeignRecord(record, outcome.why)])
            self.events.outcome(outcome)

    def report_foreign(self, topic: str, count: int, newest: Sequence[ForeignRecord]) -> None:
        """Count records of other clients in an own topic, and log the newest of them."""
        if count:
            self.events.foreign(topic, count)
        for record, why in newest:
            log.warning(
                "record set aside",
                topic=topic,
                partition=self.partition,
                offset=record.offset,
                why=why,
            )
