"""What an owner tells of its partition, remembered."""

from __future__ import annotations

from collections.abc import Sequence

from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.transaction import Transaction


class Told:
    """`PartitionEvents` that remembers everything."""

    def __init__(self) -> None:
        self.outcomes: list[ApplyResult] = []
        self.promotions: list[str] = []
        self.refusals: list[str] = []
        self.decisions: list[str] = []
        self.prepares: list[str] = []
        self.failures: list[str] = []
        self.foreigners: list[str] = []
        self.losses: list[int] = []
        self.snapshots: list[int] = []
        self.snapshot_failures = 0

    def outcome(self, outcome: ApplyResult) -> None:
        """A record changed nothing."""
        self.outcomes.append(outcome)

    def prepared(self, transactions: Sequence[Transaction]) -> None:
        """Half messages were stored."""
        self.prepares.extend(transaction.id for transaction in transactions)

    def decided(self, transactions: Sequence[Transaction]) -> None:
        """Deciding markers took effect."""
        self.decisions.extend(transaction.id for transaction in transactions)

    def promoted(self, transactions: list[Transaction]) -> None:
        """These are visible."""
        self.promotions.extend(transaction.id for transaction in transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        """These were set aside."""
        self.refusals.extend(transaction.id for transaction in transactions)

    def lost(self, count: int) -> None:
        """Half messages vanished."""
        self.losses.append(count)

    def snapshot_written(self, seconds: float, entries: int) -> None:
        """A snapshot was written."""
        self.snapshots.append(entries)

    def snapshot_failed(self) -> None:
        """A snapshot could not be written."""
        self.snapshot_failures += 1

    def recovered(self, seconds: float) -> None:
        """A partition was gained."""

    def foreign(self, topic: str, count: int) -> None:
        """Records of others were set aside."""
        self.foreigners.extend([topic] * count)

    def fenced(self) -> None:
        """A partition was taken."""

    def kafka_failed(self, operation: str) -> None:
        """Kafka did not do what was asked."""
        self.failures.append(operation)

    def effects(self) -> list[Effect]:
        """What the records did that changed nothing."""
        return [outcome.effect for outcome in self.outcomes]
