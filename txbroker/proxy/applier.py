"""Every record of a partition goes through here: into the ledger, and on to who waits for it."""

from collections.abc import Callable

from txbroker.core.ledger import Ledger
from txbroker.core.outcome import Effect, Outcome
from txbroker.core.records import Record
from txbroker.core.transaction import Transaction
from txbroker.errors import NewerRecord


class Applier:
    """Applies records to the ledger and reports what changed.

    Args:
        ledger: the partition's ledger.
        changed: told of every transaction that a record changed.
        noted: told of every other outcome, for counting.
    """

    def __init__(
        self,
        ledger: Ledger,
        changed: Callable[[Transaction], None],
        noted: Callable[[Outcome], None],
    ) -> None:
        self.ledger = ledger
        self._changed = changed
        self._noted = noted

    def half(self, record: Record) -> Outcome:
        """Apply a record of the half topic."""
        return self._report(self.ledger.apply_half(record), "half", record)

    def op(self, record: Record) -> Outcome:
        """Apply a record of the operation topic."""
        return self._report(self.ledger.apply_op(record), "op", record)

    def _report(self, outcome: Outcome, topic: str, record: Record) -> Outcome:
        if outcome.effect is Effect.APPLIED and outcome.transaction is not None:
            self._changed(outcome.transaction)
        elif outcome.effect is Effect.NEWER:
            # It may decide a transaction in a way that this build does not know: going on could
            # promote what was rolled back.
            raise NewerRecord(
                f"{topic} record at offset {record.offset} was written by a newer txbroker "
                f"({outcome.why}): upgrade this proxy"
            )
        elif outcome.effect is not Effect.PARTIAL:
            self._noted(outcome)
        return outcome
