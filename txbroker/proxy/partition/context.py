"""What all parts of a half partition share: settings, clocks, who waits, and what they report."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from txbroker.core.encoding import MarkerRow, marker_row
from txbroker.core.ledger import ApplyResult, Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Header, Marker, MarkerKind, Message, Source
from txbroker.core.shares import share_max
from txbroker.core.transaction import Transaction
from txbroker.errors import OwnerUnavailable
from txbroker.proxy.observe.rates import RateCounter
from txbroker.proxy.partition.clock import LogTime


class Bounds(Struct, frozen=True):
    """How much a half partition holds.

    Attributes:
        dedup_window_ms: for how long ids and keys are remembered.
        pending_max: transactions that are not settled.
        pending_group_max: those of one share.
        waiting_share_max: those of one share that wait for targets that do not take them now.
    """

    dedup_window_ms: int
    pending_max: int
    pending_group_max: int
    waiting_share_max: int


class OwnerSettings(Struct, frozen=True):
    """What an owner needs of the configuration."""

    dedup_window_ms: int
    pending_max: int
    pending_group_max: int
    half_retention_ms: int
    turns: PromotionLimits = PromotionLimits()
    snapshot_records_min: int = 20_000
    installation: tuple[Header, ...] = ()
    """What the headers of promoted records begin with."""

    def bounds(self) -> Bounds:
        """Return how much a half partition holds."""
        return Bounds(
            self.dedup_window_ms,
            self.pending_max,
            self.pending_group_max,
            waiting_share_max=share_max(self.turns.deferred_max),
        )


class PartitionEvents(Protocol):
    """Who is told what happens on a partition; called from the event loop, once a run or turn."""

    def outcome(self, outcome: ApplyResult) -> None:
        """A record, or a decision that came too late for one, changed nothing: it is repeated,
        contrary, illegal or void."""
        ...

    def prepared(self, transactions: Sequence[Transaction]) -> None:
        """Half messages were stored by this owner."""
        ...

    def decided(self, transactions: Sequence[Transaction]) -> None:
        """Deciding markers took effect."""
        ...

    def promoted(self, transactions: list[Transaction]) -> None:
        """These are visible now."""
        ...

    def refused(self, transactions: list[Transaction]) -> None:
        """These were set aside: a target does not take them."""
        ...

    def lost(self, count: int) -> None:
        """So many half messages vanished before their transactions were settled."""
        ...

    def snapshot_written(self, seconds: float, entries: int) -> None:
        """A snapshot of so many transactions was written, in so many seconds."""
        ...

    def snapshot_failed(self) -> None:
        """A snapshot could not be written."""
        ...

    def recovered(self, seconds: float) -> None:
        """A partition was gained and caught up on, in so many seconds."""
        ...

    def foreign(self, topic: str, count: int) -> None:
        """So many records of one of our topics (`half`, say) are none of ours."""
        ...

    def fenced(self) -> None:
        """Another owner has taken a partition."""
        ...

    def kafka_failed(self, operation: str) -> None:
        """Kafka did not do what was asked: an `append`, a `turn` or a `claim`."""
        ...


class VisibilityWaiters:
    """Who waits until a transaction is visible, by its id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def release(self, transactions: Iterable[Transaction]) -> None:
        """These are visible, or will not become so by themselves."""
        if self._waiting:
            for transaction in transactions:
                for future in self._waiting.pop(transaction.id, ()):
                    if not future.done():
                        future.set_result(None)

    def close(self) -> None:
        """Nobody here will know any more."""
        self._closed = True
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(OwnerUnavailable())
        self._waiting.clear()

    async def wait(self, id: str) -> None:
        """Wait until a transaction is visible.

        Raises:
            OwnerUnavailable: this owner closes.
        """
        if self._closed:
            raise OwnerUnavailable(id=id)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id, []).append(future)
        try:
            await future
        finally:
            # Whoever gave up and asks again must not be remembered each time.
            waiting = self._waiting.get(id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(id, None)


class CurrentClaim:
    """The claim under which an owner works: another one after each reclaim.

    Attributes:
        id: names it.
        reclaims: how often the partition was claimed again, and the ledger reconciled with what
            the claim found.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.reclaims = 0


class PartitionContext(Struct, frozen=True):
    """What all parts of one half partition share.

    Attributes:
        partition: the half partition.
        ledger: its transactions.
        settings: limits and windows.
        events: told what happens.
        record_version: returns the version of the records to write.
        stopped: told why, once, if the partition cannot go on.
        clock: the brokers' clock.
        id_clock: the half topic's own: ids are void by its log clock alone, wherever the others
            stand.
        claim: the owner's present claim.
        gate: nothing is written while it is not set: the owner is suspended.
        rates: counts what is shown as rates.
        visible: who waits until transactions are visible.
        settled_share: returns how many bytes of settled transactions it may remember.
    """

    partition: int
    ledger: Ledger
    settings: OwnerSettings
    events: PartitionEvents
    record_version: Callable[[], int]
    stopped: Callable[[Exception], None]
    clock: LogTime
    id_clock: LogTime
    claim: CurrentClaim
    gate: asyncio.Event
    rates: RateCounter
    visible: VisibilityWaiters
    settled_share: Callable[[], int]

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
            number: of the attempt; None is that of the last one.
            contents: the messages that replace the prepared ones.
        """
        return marker_row(
            Marker(
                v=self.record_version(),
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
        """Say that these are visible."""
        self.events.promoted(transactions)
        self.rates.promoted += len(transactions)
        self.visible.release(transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        """Say that these will not become visible by themselves."""
        self.events.refused(transactions)
        self.visible.release(transactions)
