"""Every record of a partition goes through here: into the ledger, and on to what follows it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, cast

from msgspec import structs

from txbroker.core.decoding import passed_over
from txbroker.core.encoding import HalfRow, MarkerRow, Row
from txbroker.core.ledger import ApplyResult, Effect, Ledger
from txbroker.core.records import Anchor, Record, Skip
from txbroker.core.transaction import Transaction
from txbroker.door.own_topics import foreign_why
from txbroker.door.protocols import Claimed, ForeignRecord
from txbroker.errors import NewerRecord
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.context import PartitionEvents
from txbroker.proxy.partition.parked_copies import ParkedCopies

log = get_logger(__name__)


class Follower(Protocol):
    """What follows the ledger: it acts on what records have changed."""

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these transactions."""
        ...


class Applier:
    """Reports what came of the records that the two replicas apply.

    Args:
        ledger: the partition's ledger.
        events: told of every record that changed nothing.
    """

    def __init__(self, ledger: Ledger, events: PartitionEvents) -> None:
        self.ledger = ledger
        self.followers: list[Follower] = []
        """Told, in this order, of all transactions that records have changed."""
        self.skips: Sequence[Skip] = ()
        """What operators have decided to pass over."""
        self._events = events

    def claimed(self, found: Claimed) -> None:
        """Take over what a claim has found besides progress."""
        self.skips = found.skips
        self._set_aside("checkpoint", found.foreign, found.set_aside)

    def copied(self, copies: ParkedCopies) -> None:
        """Count and show what others wrote into the parked topic."""
        self._set_aside("parked", copies.foreign, copies.set_aside)

    def _set_aside(self, topic: str, count: int, shown: Sequence[ForeignRecord]) -> None:
        if count:
            self._events.foreign(topic, count)
        for record, why in shown:
            log.warning(
                "record set aside",
                topic=topic,
                partition=self.ledger.partition,
                offset=record.offset,
                why=why,
            )

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Pass on that records changed these."""
        for follower in self.followers:
            follower.changed(transactions)

    def unchanged(self, topic: str, outcome: ApplyResult, record: Record) -> None:
        """Count a record that changed nothing, and show it where it is none of ours.

        Raises:
            NewerRecord: a newer version wrote it, and nobody has decided to pass it over.
        """
        if outcome.effect is Effect.NEWER:
            why = foreign_why(topic, record, self.ledger.partition)
            if why:
                outcome = ApplyResult(Effect.VOID, why=f"{outcome.why}, but {why}")
        if outcome.effect is Effect.NEWER and not passed_over(self.skips, topic, record):
            # It may decide a transaction in a way that this build does not know: going on could
            # promote what was rolled back.
            raise NewerRecord(
                f"{topic} record at offset {record.offset} was written by a newer txbroker "
                f"({outcome.why}): upgrade this proxy. To pass it over see docs/operate/repair.md"
            )
        if outcome.effect is not Effect.PARTIAL:
            if outcome.effect is Effect.VOID:
                self._set_aside(topic, 1, [ForeignRecord(record, outcome.why)])
            self._events.outcome(outcome)


class LogReplica(ABC):
    """One log as far as the ledger has applied it: a `txbroker.proxy.partition.appender.Replica`.

    Args:
        applier: where what came of records is reported.
    """

    topic: str

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._ledger = applier.ledger

    @property
    @abstractmethod
    def position(self) -> int:
        """The next offset that is to be applied."""

    @property
    @abstractmethod
    def anchor(self) -> Anchor | None:
        """The last record that was applied."""

    @abstractmethod
    def skip(self, offsets: range) -> None:
        """Go past offsets that hold no record."""

    def apply(self, record: Record) -> ApplyResult:
        """Apply the next record, as it was read.

        Raises:
            NewerRecord: a newer version wrote it.
        """
        outcome = self._apply(record)
        if outcome.effect is Effect.APPLIED and outcome.transaction is not None:
            self._applier.changed((outcome.transaction,))
        else:
            self._applier.unchanged(self.topic, outcome, record)
        return outcome

    def apply_run(self, rows: Sequence[Row], offset: int, timestamp_ms: int) -> list[ApplyResult]:
        """Apply rows that were just appended as one batch; return an outcome of each."""
        outcomes = self._apply_run(rows, offset, timestamp_ms)
        changed: list[Transaction] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            offset += len(row.records)
            if outcome.effect is Effect.APPLIED and outcome.transaction is not None:
                changed.append(outcome.transaction)
            else:
                last = structs.replace(row.records[-1], offset=offset - 1)
                self._applier.unchanged(self.topic, outcome, last)
        if changed:
            self._applier.changed(changed)
        return outcomes

    @abstractmethod
    def _apply(self, record: Record) -> ApplyResult: ...

    @abstractmethod
    def _apply_run(
        self, rows: Sequence[Row], offset: int, timestamp_ms: int
    ) -> list[ApplyResult]: ...


class HalfReplica(LogReplica):
    """The half topic's partition."""

    topic = "half"

    @property
    def position(self) -> int:
        """The next offset that is to be applied."""
        return self._ledger.half_position

    @property
    def anchor(self) -> Anchor | None:
        """The last record that was applied."""
        return self._ledger.half_anchor

    def skip(self, offsets: range) -> None:
        """Go past offsets that hold no record."""
        self._ledger.skip_half(offsets)

    def _apply(self, record: Record) -> ApplyResult:
        return self._ledger.apply_half(record)

    def _apply_run(self, rows: Sequence[Row], offset: int, timestamp_ms: int) -> list[ApplyResult]:
        return self._ledger.apply_halves(cast(Sequence[HalfRow], rows), offset, timestamp_ms)


class OpReplica(LogReplica):
    """The operation topic's partition."""

    topic = "op"

    @property
    def position(self) -> int:
        """The next offset that is to be applied."""
        return self._ledger.op_position

    @property
    def anchor(self) -> Anchor | None:
        """The last record that was applied."""
        return self._ledger.op_anchor

    def skip(self, offsets: range) -> None:
        """Go past offsets that hold no record."""
        self._ledger.skip_op(offsets)

    def _apply(self, record: Record) -> ApplyResult:
        return self._ledger.apply_op(record)

    def _apply_run(self, rows: Sequence[Row], offset: int, timestamp_ms: int) -> list[ApplyResult]:
        return self._ledger.apply_markers(cast(Sequence[MarkerRow], rows), offset, timestamp_ms)
