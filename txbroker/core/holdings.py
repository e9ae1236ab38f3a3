"""What a ledger holds: transactions by id, by what becomes of them next, by age and by group.

Each step here costs about the same however many there are, because there may be a million.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from txbroker.core.alike import alike
from txbroker.core.order import Line, Undecided
from txbroker.core.records import Message, State
from txbroker.core.segment import Segment
from txbroker.core.settled import SettledWindow
from txbroker.core.shares import ShareOf, Use, own_share
from txbroker.core.transaction import Transaction


class Watcher(Protocol):
    """Who has to see a transaction before it changes: a snapshot that is being captured."""

    def before(self, transaction: Transaction) -> None:
        """This one is about to change."""
        ...


class Holdings:
    """All transactions of one half partition that are not settled, and the recently settled."""

    def __init__(self) -> None:
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
        self._line = Line()
        self._refused_topics: Counter[str] = Counter()
        self._groups: dict[str, Undecided] = {}
        self._dedup: dict[tuple[str, str], str] = {}
        self.undecided_count = 0
        """Pending and parked transactions."""
        self.unsettled = Use()
        """What is not settled, by share."""
        self.share_of: ShareOf = own_share
        """Whose each group is; see `share_by`."""

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
                undecided = self._groups[group] = Undecided()
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
                self._hold_key((alike(each.group), each.dedup_key), each.id, each.offset)

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

    def _group(self, name: str) -> Undecided:
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = Undecided()
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
        self.unsettled = Use((share_of(group), count) for group, count in groups.items())
        self.settled.share_by(share_of)

    def use_of(self, ids: Iterable[str]) -> Use:
        """Return how many of these transactions each share has; settled ones are left out."""
        found = (self.transactions.get(id) for id in ids)
        return Use((self.share_of(each.half.group), 1) for each in found if each is not None)

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
