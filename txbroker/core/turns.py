"""What committed turns, and what a claim finds of them, do to the transactions of a partition."""

from collections.abc import Collection, Iterable, Sequence

from txbroker.core.holdings import Holdings
from txbroker.core.ids import parse_id
from txbroker.core.outcome import Waiting
from txbroker.core.placement import order_mark
from txbroker.core.records import Cause, Decision, Kept, Progress, State
from txbroker.core.states import UNDECIDED, Step, follow
from txbroker.core.transaction import Transaction, Verdict, fingerprint, places

WAITING_SWEEP_MIN = 1000
"""Ids with waiting markers below which nobody looks whether some can be forgotten."""
BEYOND_MAX = 10_000
"""Settled transactions that are remembered although they are older than the dedup window."""


class Turns(Holdings):
    """Transactions, and how turns settle them or set them aside.

    Args:
        dedup_window_ms: for how long an id or a `dedup_key` is remembered at least.
        beyond_max: settled transactions that are remembered beyond the window, for show.
    """

    def __init__(self, dedup_window_ms: int, beyond_max: int) -> None:
        super().__init__()
        self.dedup_window_ms = dedup_window_ms
        self.beyond_max = beyond_max
        self.half_clock_ms = 0
        self.op_progress = 0
        """The `op` of the newest progress, written or on its way: it never goes back."""
        self.op_committed = 0
        """The `op` of the newest progress that is known to be committed."""
        self.wrote_refused = False
        """Whether a turn, committed or on its way, has set a refused one aside."""
        self.to_keep: dict[str, Transaction] = {}
        """Whole bodies that are to be copied into the parked topic."""
        self.to_release: dict[str, Transaction] = {}
        """Rolled back: their copies in the parked topic are to be removed."""
        self.waiting: dict[str, list[Waiting]] = {}
        """Markers before their half message, by id."""
        self._waiting_max = WAITING_SWEEP_MIN
        # All that is not settled up to this offset is kept.
        self._kept_to = -1

    def promote_run(
        self, transactions: Sequence[Transaction], offsets: Sequence[int] = (), now_ms: int = 0
    ) -> None:
        """A turn with these transactions was committed: they are settled.

        Args:
            transactions: not settled, in the order of the turn.
            offsets: where their messages are in their targets, one transaction's behind the
                other's; empty if this owner did not see that.
            now_ms: when it saw them visible; 0 if it did not.

        Raises:
            IllegalStep: one is undecided, or was settled before.
        """
        taken = 0
        for transaction in transactions:
            if self.watcher is not None:
                self.watcher.before(transaction)
            transaction.state = follow(transaction.state, Step.PROMOTE)
            id, count = transaction.half.id, len(transaction.half.messages)
            self._ready.pop(id, None)
            if id in self.refused:
                self._no_more_refused(transaction)
            transaction.offsets = tuple(offsets[taken : taken + count])
            transaction.promoted_at_ms = now_ms
            transaction.cause = None
            transaction.kept = False
            taken += count
        self._settle(*transactions)

    def refuse(self, id: str, cause: Cause) -> None:
        """A turn was committed that set this transaction aside: a target does not take it."""
        transaction = self.transactions[id]
        self._changing(transaction)
        transaction.take(Step.REFUSE)
        self._ready.pop(id, None)
        self._no_more_refused(transaction)
        transaction.cause = cause
        transaction.kept = True
        self._hold_refused(transaction)

    def reconcile(
        self, progress: Progress | None, kept: Iterable[Kept], unseen: Collection[str] = ()
    ) -> list[Transaction]:
        """After a claim, take over what earlier turns have committed.

        `kept` is what the parked topic holds: all of it, whatever lost turns meant to write
        there. `unseen` are those whose turn is known to be committed and whose visibility is still
        waited for. Returns the others that turned out to be promoted.
        """
        self._take_copies({copy.half.id: copy for copy in kept})
        self.op_progress = self.op_committed = 0 if progress is None else progress.op
        self.wrote_refused = progress is not None and progress.refused
        done = [] if progress is None else self._done(progress)
        done = [transaction for transaction in done if transaction.id not in unseen]
        for transaction in done:
            if transaction.kept:
                self.to_release[transaction.id] = transaction
        self.promote_run(done)
        return done

    def _take_copies(self, copies: dict[str, Kept]) -> None:
        self.to_keep.clear()
        self.to_release.clear()
        self._kept_to = -1
        for id, transaction in self.transactions.items():
            copy = copies.get(id)
            if copy is None and not transaction.kept and transaction.state is not State.PARKED:
                continue
            transaction.kept = copy is not None
            transaction.kept_at = () if copy is None else copy.at
            if transaction.state is State.PARKED and (
                copy is None or copy.state is not State.PARKED
            ):
                self.to_keep[transaction.id] = transaction
            if copy is not None and copy.state is State.REFUSED:
                self._refused_before(transaction, copy)
        for id, copy in copies.items():
            if id not in self.transactions:
                # Settled, maybe so long ago that it is forgotten, and the copy was left over.
                self.to_release[id] = self.settled.shown.get(id) or from_copy(copy)

    def _refused_before(self, transaction: Transaction, copy: Kept) -> None:
        """A turn has set it aside. Its commit marker may have fallen to retention since."""
        self._changing(transaction)
        if transaction.state in UNDECIDED:
            self._leave_undecided(transaction)
            transaction.take(Step.COMMIT)
            decided_ms = copy.decided_at_ms or copy.prepared_at_ms
            transaction.verdict = Verdict(Decision.COMMIT, at_ms=decided_ms)
            self.to_keep.pop(transaction.id, None)
        self.refuse(transaction.id, copy.cause or _CAUSE_LOST)

    def _done(self, progress: Progress) -> list[Transaction]:
        # A refused one whose copy is gone: the turn that retried it was committed after all.
        retried = [each for each in self.refused.values() if not each.kept]
        deferred = frozenset(progress.deferred)
        return retried + [
            transaction
            for transaction in self.ready.values()
            if transaction.op_offset < progress.op
            and transaction.offset < progress.half
            and transaction.id not in deferred
        ]

    # --- memory --------------------------------------------------------------------------

    def _settle(self, *transactions: Transaction) -> None:
        by_group: dict[str, int] = {}
        for transaction in transactions:
            half = transaction.half
            del self.transactions[half.id]
            by_group[half.group] = by_group.get(half.group, 0) + 1
            self._line.remove(transaction)
            self.body_bytes -= transaction.evict()
        self.settled.settle_many(transactions)
        for group, count in by_group.items():
            self.unsettled.add(self.share_of(group), -count)
        self._forget()

    def _forget(self) -> None:
        """Forget settled transactions, by the log clock: a repeat of theirs would be void."""
        # A copy of a forgotten one would come back to life one day: it is removed first.
        for gone in self.settled.forget(
            self.half_clock_ms - self.dedup_window_ms, self.beyond_max, self.to_release
        ):
            if gone.dedup_key is not None:
                self._release_key((gone.group, gone.dedup_key), gone.id)
        if len(self.waiting) > self._waiting_max:
            self.waiting = {
                id: waiting
                for id, waiting in self.waiting.items()
                if self.half_clock_ms - parse_id(id).time_ms <= self.dedup_window_ms
            }
            # While op is read far ahead of half most of them stay: sweeping at each record
            # would be quadratic.
            self._waiting_max = max(WAITING_SWEEP_MIN, 2 * len(self.waiting))


def from_copy(kept: Kept) -> Transaction:
    """Return a transaction as its copy in the parked topic tells of it, undecided."""
    half = kept.half
    first = half.messages[0]
    transaction = Transaction(
        half,
        kept.half_offset,
        kept.prepared_at_ms,
        fingerprint(half.messages, half.group),
        places(half.messages),
        order_mark(half.order_key, first.topic, first.key),
    )
    transaction.kept = True
    return transaction


_CAUSE_LOST = Cause("unknown", "the copy does not say why", "", -1)
