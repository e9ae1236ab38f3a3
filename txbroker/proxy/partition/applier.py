"""Every record of a partition goes through here: into the ledger, and on to who waits for it."""

from collections.abc import Callable, Sequence

from txbroker.core.codec import passed_over
from txbroker.core.ledger import Ledger
from txbroker.core.outcome import Effect, Outcome
from txbroker.core.records import Record, Skip
from txbroker.core.transaction import Transaction
from txbroker.door import Claimed, SetAside
from txbroker.errors import NewerRecord
from txbroker.own_topics import foreign_why
from txbroker.proxy.logging import get_logger
from txbroker.proxy.partition.parked_copies import Copies

log = get_logger(__name__)


class Applier:
    """Applies records to the ledger and reports what changed.

    Args:
        ledger: the partition's ledger.
        changed: told of every transaction that a record changed.
        noted: told of every other outcome, for counting.
        foreign: told how many records of a topic are none of ours, and are set aside.
    """

    def __init__(
        self,
        ledger: Ledger,
        changed: Callable[[Transaction], None],
        noted: Callable[[Outcome], None],
        foreign: Callable[[str, int], None],
    ) -> None:
        self.ledger = ledger
        self._foreign = foreign
        self.skips: Sequence[Skip] = ()
        """What operators have decided to pass over."""
        self._changed = changed
        self._noted = noted

    def claimed(self, found: Claimed) -> None:
        """Take over what a claim has found besides progress."""
        self.skips = found.skips
        self._set_aside("checkpoint", found.foreign, found.set_aside)

    def copied(self, copies: Copies) -> None:
        """Count and show what others wrote into the parked topic."""
        self._set_aside("parked", copies.foreign, copies.set_aside)

    def _set_aside(self, topic: str, count: int, shown: Sequence[SetAside]) -> None:
        if count:
            self._foreign(topic, count)
        for record, why in shown:
            log.warning(
                "record set aside",
                topic=topic,
                partition=self.ledger.partition,
                offset=record.offset,
                why=why,
            )

    def half(self, record: Record) -> Outcome:
        """Apply a record of the half topic."""
        return self._report(self.ledger.apply_half(record), "half", record)

    def op(self, record: Record) -> Outcome:
        """Apply a record of the operation topic."""
        return self._report(self.ledger.apply_op(record), "op", record)

    def _report(self, outcome: Outcome, topic: str, record: Record) -> Outcome:
        if outcome.effect is Effect.NEWER:
            why = foreign_why(topic, record, self.ledger.partition)
            if why:
                outcome = Outcome(Effect.VOID, why=f"{outcome.why}, but {why}")
        if outcome.effect is Effect.APPLIED and outcome.transaction is not None:
            self._changed(outcome.transaction)
        elif outcome.effect is Effect.NEWER and not passed_over(self.skips, topic, record):
            # It may decide a transaction in a way that this build does not know: going on could
            # promote what was rolled back.
            raise NewerRecord(
                f"{topic} record at offset {record.offset} was written by a newer txbroker "
                f"({outcome.why}): upgrade this proxy. To pass it over see docs/operate/repair.md"
            )
        elif outcome.effect is not Effect.PARTIAL:
            if outcome.effect is Effect.VOID:
                self._set_aside(topic, 1, [SetAside(record, outcome.why)])
            self._noted(outcome)
        return outcome
