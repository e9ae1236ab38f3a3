"""What a ledger holds: transactions by id, by what becomes of them next, by age and by group; and
what committed turns, and what a claim finds of them, do to these.

Each step here costs about the same however many there are, because there may be a million.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from txbroker.core.alike import intern
from txbroker.core.index import GroupIndex, OffsetIndex, ShareOf, ShareUse, own_share
from txbroker.core.lifecycle import UNDECIDED, Step
from txbroker.core.outcome import MarkerEntry
from txbroker.core.records import Cause, Checkpoint, Decision, Message, ParkedCopy, State
from txbroker.core.routing import order_mark, parse_id
from txbroker.core.segment import Segment
from txbroker.core.settled import SettledWindow
from txbroker.core.transaction import Transaction, Verdict, fingerprint, places

WAITING_SWEEP_MIN = 1000
"""Ids with waiting markers below which nobody looks whether some can be forgotten."""
BEYOND_MAX = 10_000
"""Settled transactions that are remembered although they are older than the dedup window."""


class Watcher(Protocol):
    """Who has to see a transaction before it changes: a snapshot that is being captured."""

    def before(self, transaction: Transaction) -> None:
        """This one is about to change."""
        ...


class TransactionIndex:
    """All transactions of one half partition that are not settled, and the recently settled.

    Args:
        dedup_window_ms: for how long an id or a `dedup_key` is remembered at least.
        beyond_max: settled transactions that are remembered beyond the window, for show.
    """

    def __init__(self, dedup_window_ms: int, beyond_max: int) -> None:
        self.transactions: dict[str, Transaction] = {}
        """What is not settled."""
        self.refused: dict[str, Transaction] = {}
        self.parked: dict[str, Transaction] = {}
        self.settled = SettledWindow()
        self.body_bytes = 0
        """What all messages take that are in memory."""
        self.watcher: Watcher | None = None
        self._ready: dict[str, Transaction] = {}
        self._ready_in_order = True
        self._ready_to = -1
        self._line = OffsetIndex()
        self._refused_topics: Counter[str] = Counter()
        self._groups: dict[str, GroupIndex] = {}
        self._dedup: dict[tuple[str, str], str] = {}
        self.undecided_count = 0
        """Pending and parked transactions."""
        self.unsettled = ShareUse()
        """What is not settled, by share."""
        self.share_of: ShareOf = own_share
        """Whose each group is; see `share_by`."""
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
        self.waiting: dict[str, list[MarkerEntry]] = {}
        """Markers before their half message, by id."""
        self._waiting_max = WAITING_SWEEP_MIN
        # All that is not settled up to this offset is kept.
        self._kept_to = -1

    def __iter__(self) -> Iterator[Transaction]:
        """Yield what is not settled, then the settled ones as far as they are remembered."""
        yield from self.transactions.values()
        yield from self.settled

    def get(self, id: str) -> Transaction | None:
        """Return a transaction that is not settled, or settled recently; of most of the latter
        only what answers need is remembered."""
        return self.transactions.get(id) or self.settled.get(id)

    def by_dedup_key(self, group: str, dedup_key: str) -> Transaction | None:
        """Return the transaction that holds a client's own key."""
        id = self._dedup.get((group, dedup_key))
        return None if id is None else self.get(id)

    def pending(self) -> list[Transaction]:
        """Return half minus operation: the undecided transactions, parked ones left out."""
        return [t for t in self.transactions.values() if t.state is State.PENDING]

    # --- coming in ---------------------------------------------------------------------------

    def take_in(self, transaction: Transaction) -> None:
        """Take a transaction that is not settled, in whatever state, as a snapshot has it."""
        half, state = transaction.half, transaction.state
        group = half.group
        self.transactions[half.id] = transaction
        self.unsettled.add(self.share_of(group))
        self.body_bytes += transaction.body_bytes
        self._line.add(transaction)
        if half.dedup_key is not None:
            self._hold_key((group, half.dedup_key), half.id, transaction.offset)
        if state is State.PENDING or state is State.PARKED:
            self.undecided_count += 1
            undecided = self._groups.get(group)
            if undecided is None:
                undecided = self._groups[group] = GroupIndex()
            undecided.enter(transaction)
            if state is State.PARKED:
                self.parked[half.id] = transaction
        elif state is State.REFUSED:
            self._hold_refused(transaction)
        elif state is State.COMMITTED:
            self._make_ready(transaction)

    def remember(self, segment: Segment) -> None:
        """Take settled transactions, as a snapshot has them."""
        self.settled.add_segment(segment)
        for each in segment.keyed():
            if each.dedup_key is not None:
                self._hold_key((intern(each.group), each.dedup_key), each.id, each.offset)

    def _hold_key(self, key: tuple[str, str], id: str, offset: int) -> None:
        """Of several uses of one `dedup_key` the last prepared one holds it."""
        holder = self._dedup.get(key)
        known = None if holder is None else self.get(holder)
        if known is None or known.offset <= offset:
            self._dedup[key] = id

    def _release_key(self, key: tuple[str, str], id: str) -> None:
        if self._dedup.get(key) == id:
            del self._dedup[key]

    def _leave_undecided(self, transaction: Transaction) -> None:
        """It is about to be decided."""
        self.undecided_count -= 1
        half = transaction.half
        if self._groups[half.group].leave(transaction):
            del self._groups[half.group]
        if self.parked:
            self.parked.pop(half.id, None)

    def _group(self, name: str) -> GroupIndex:
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = GroupIndex()
        return found

    def _hold_refused(self, transaction: Transaction) -> None:
        self.refused[transaction.id] = transaction
        self._refused_topics[_refusing(transaction)] += 1

    def _no_more_refused(self, transaction: Transaction) -> None:
        """It may have been refused; its cause is still the old one."""
        if self.refused.pop(transaction.id, None) is not None:
            topic = _refusing(transaction)
            self._refused_topics[topic] -= 1
            if not self._refused_topics[topic]:
                del self._refused_topics[topic]

    def _make_ready(self, transaction: Transaction) -> None:
        verdict = transaction.verdict
        at = -1 if verdict is None else verdict.op_offset
        self._ready[transaction.half.id] = transaction
        if at > self._ready_to:
            self._ready_to = at
        else:
            # Its marker was read before its half message, or it comes out of a snapshot.
            self._ready_in_order = False

    @property
    def ready(self) -> Mapping[str, Transaction]:
        """Committed, not yet promoted or refused, in the order of the deciding markers."""
        if not self._ready_in_order:
            self._ready = dict(sorted(self._ready.items(), key=lambda item: item[1].op_offset))
            self._ready_in_order = True
        return self._ready

    def _changing(self, transaction: Transaction) -> None:
        if self.watcher is not None:
            self.watcher.before(transaction)

    # --- turns ---------------------------------------------------------------------------

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
            transaction.take(Step.PROMOTE)
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
        self, progress: Checkpoint | None, kept: Iterable[ParkedCopy], unseen: Collection[str] = ()
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

    def _take_copies(self, copies: dict[str, ParkedCopy]) -> None:
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

    def _refused_before(self, transaction: Transaction, copy: ParkedCopy) -> None:
        """A turn has set it aside. Its commit marker may have fallen to retention since."""
        self._changing(transaction)
        if transaction.state in UNDECIDED:
            self._leave_undecided(transaction)
            transaction.take(Step.COMMIT)
            decided_ms = copy.decided_at_ms or copy.prepared_at_ms
            transaction.verdict = Verdict(Decision.COMMIT, at_ms=decided_ms)
            self.to_keep.pop(transaction.id, None)
        self.refuse(transaction.id, copy.cause or _CAUSE_LOST)

    def _done(self, progress: Checkpoint) -> list[Transaction]:
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

    # --- going out -----------------------------------------------------------------------

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

    # --- messages in memory ------------------------------------------------------------------

    def evict(self, transaction: Transaction) -> None:
        """Drop a transaction's messages from memory."""
        self.body_bytes -= transaction.evict()

    def fill(self, transaction: Transaction, messages: tuple[Message, ...]) -> None:
        """Take messages that were read again.

        Raises:
            ValueError: they are not those of this transaction.
        """
        self.body_bytes -= transaction.body_bytes
        try:
            transaction.fill(messages)
        finally:
            self.body_bytes += transaction.body_bytes

    @property
    def settled_count(self) -> int:
        """How many settled transactions are remembered."""
        return len(self.settled)

    def oldest_settled_ms(self) -> int:
        """Return the latest id's or append time of those that are forgotten next; 0 if none is
        remembered."""
        return self.settled.oldest_ms()

    # --- looking through them ------------------------------------------------------------

    def in_order(self, after_offset: int, count: int) -> list[Transaction]:
        """Return so many at most of what is not settled, by half offset, behind an offset."""
        return self._line.after(after_offset, count)

    def since(self, prepared_at_ms: int, count: int, after_id: str = "") -> list[Transaction]:
        """Return so many at most of what is not settled, by (time of preparation, id), behind
        such a pair."""
        return self._line.since(prepared_at_ms, count, after_id)

    def unsettled_before(self, prepared_ms: int) -> Iterator[Transaction]:
        """Yield what still has to become something and was prepared before a time."""
        for transaction in self._line:
            if transaction.prepared_at_ms >= prepared_ms:
                break
            yield transaction

    @property
    def pending_by_group(self) -> Mapping[str, int]:
        """How many transactions of each group are pending; only groups that have some."""
        return {name: n for name, each in self._groups.items() if (n := each.pending_count)}

    @property
    def parked_by_group(self) -> Mapping[str, int]:
        """How many transactions of each group are parked; only groups that have some."""
        return {name: n for name, each in self._groups.items() if (n := each.parked_count)}

    @property
    def refused_by_topic(self) -> Mapping[str, int]:
        """How many transactions are refused because of each target topic."""
        return self._refused_topics

    def share_by(self, share_of: ShareOf) -> None:
        """Count groups to these shares from now on, and what is held already, too."""
        if share_of == self.share_of:
            return
        self.share_of = share_of
        groups = Counter([transaction.half.group for transaction in self.transactions.values()])
        self.unsettled = ShareUse((share_of(group), count) for group, count in groups.items())
        self.settled.share_by(share_of)

    def use_of(self, ids: Iterable[str]) -> ShareUse:
        """Return how many of these transactions each share has; settled ones are left out."""
        found = (self.transactions.get(id) for id in ids)
        return ShareUse((self.share_of(each.half.group), 1) for each in found if each is not None)

    def oldest_pending_ms(self, group: str) -> int | None:
        """Return when the oldest pending one of a group was prepared; None without any."""
        found = self._groups.get(group)
        oldest = None if found is None else found.line.first()
        return None if oldest is None else oldest.prepared_at_ms

    def oldest_unsettled_ms(self) -> int | None:
        """Return when the oldest one that is not settled was prepared; None without any."""
        oldest = self._line.first()
        return None if oldest is None else oldest.prepared_at_ms


def _refusing(transaction: Transaction) -> str:
    """Return the topic that does not take a refused transaction."""
    return "" if transaction.cause is None else transaction.cause.topic


def from_copy(kept: ParkedCopy) -> Transaction:
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
