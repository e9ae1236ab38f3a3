"""Indexes over the transactions of a half partition: by id, offset, state, group and share.

Each step costs about the same however many there are, because there may be a million.
"""

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from txbroker.core.records import Message, State, intern
from txbroker.core.segment import Segment
from txbroker.core.settled import SettledWindow, ShareOf, ShareUse, own_share
from txbroker.core.transaction import Transaction

_BLOCK_MAX = 1024
"""Transactions in one block: few enough that inserting into its middle costs next to nothing."""
_SMALL = 64
"""Smaller blocks are merged with a neighbour, if the result is not too large."""
_id, _prepared_at_ms = attrgetter("id"), attrgetter("prepared_at_ms")


class OffsetIndex:
    """Transactions by half offset.

    They are in blocks, so that no step is slow however many there are: appending, the usual case,
    costs nothing; anything else moves a part of one block.
    """

    __slots__ = ("_blocks", "_firsts", "_offsets")

    def __init__(self) -> None:
        self._blocks: list[list[Transaction]] = []
        # The offsets of each block, and the least of them: bisect searches these in C.
        self._offsets: list[array[int]] = []
        self._firsts: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, transaction: Transaction) -> None:
        """Add a transaction."""
        offset = transaction.offset
        if not self._blocks:
            self._insert(0, [transaction], array("q", (offset,)), offset)
            return
        at = len(self._blocks) - 1
        if self._offsets[at][-1] < offset:
            self._offsets[at].append(offset)
            self._blocks[at].append(transaction)
        else:
            at = max(0, bisect_right(self._firsts, offset) - 1)
            self._firsts[at] = min(self._firsts[at], offset)
            row = bisect_left(self._offsets[at], offset)
            self._offsets[at].insert(row, offset)
            self._blocks[at].insert(row, transaction)
        if len(self._blocks[at]) > _BLOCK_MAX:
            self._split(at)

    def _split(self, at: int) -> None:
        offsets, block = self._offsets[at], self._blocks[at]
        # The last block only grows at its end, so it is left full.
        middle = len(block) - 1 if at == len(self._blocks) - 1 else len(block) // 2
        self._insert(at + 1, block[middle:], offsets[middle:], offsets[middle])
        del block[middle:], offsets[middle:]

    def _insert(self, at: int, block: list[Transaction], offsets: "array[int]", first: int) -> None:
        self._blocks.insert(at, block)
        self._offsets.insert(at, offsets)
        self._firsts.insert(at, first)

    def remove(self, transaction: Transaction) -> None:
        """Remove a transaction that is in the index."""
        at = row = 0
        if self._blocks[0][0] is not transaction:
            at = bisect_right(self._firsts, transaction.offset) - 1
            row = bisect_left(self._offsets[at], transaction.offset)
        offsets = self._offsets[at]
        del offsets[row], self._blocks[at][row]
        if not offsets:
            del self._blocks[at], self._offsets[at], self._firsts[at]
        elif len(offsets) < _SMALL:
            self._merge(at)

    def _merge(self, at: int) -> None:
        """Merge a small block with a neighbour; else many blocks of one would remain."""
        for left in (at, at - 1):
            if left < 0 or left + 1 == len(self._blocks):
                continue
            if len(self._blocks[left]) + len(self._blocks[left + 1]) <= _BLOCK_MAX // 2:
                self._offsets[left].extend(self._offsets.pop(left + 1))
                self._blocks[left].extend(self._blocks.pop(left + 1))
                del self._firsts[left + 1]
                return

    def first(self) -> Transaction | None:
        """Return the first transaction; None if empty."""
        return self._blocks[0][0] if self._blocks else None

    def after(self, offset: int, count: int) -> list[Transaction]:
        """Return up to `count` transactions after an offset, in offset order."""
        if not self._blocks:
            return []
        at = max(0, bisect_right(self._firsts, offset) - 1)
        start = bisect_right(self._offsets[at], offset)
        rows = self._blocks[at][start : start + count]
        while len(rows) < count and (at := at + 1) < len(self._blocks):
            rows += self._blocks[at][: count - len(rows)]
        return rows

    def since(
        self, prepared_at_ms: int, count: int, after_id: str = "", *, newest: bool = False
    ) -> list[Transaction]:
        """Return up to `count` transactions after (time of preparation, id), in that order, or with
        `newest` in the reverse one: log clocks grow with the offsets."""
        rows: list[Transaction] = []
        same: list[Transaction] = []
        first = heapq.nlargest if newest else heapq.nsmallest
        for transaction in (self._until if newest else self._since)(prepared_at_ms):
            if same and transaction.prepared_at_ms != same[0].prepared_at_ms:
                rows += first(count - len(rows), same, key=_id)
                same = []
                if len(rows) == count:
                    return rows
            of_cursor = transaction.prepared_at_ms == prepared_at_ms
            if not of_cursor or (
                transaction.id != after_id and newest == (transaction.id < after_id)
            ):
                same.append(transaction)
        return rows + first(count - len(rows), same, key=_id)

    def _since(self, prepared_at_ms: int) -> Iterator[Transaction]:
        firsts = [block[0].prepared_at_ms for block in self._blocks]
        at = max(0, bisect_left(firsts, prepared_at_ms) - 1)
        for block in islice(self._blocks, at, None):
            if block[-1].prepared_at_ms >= prepared_at_ms:
                yield from islice(
                    block, bisect_left(block, prepared_at_ms, key=_prepared_at_ms), None
                )

    def _until(self, prepared_at_ms: int) -> Iterator[Transaction]:
        for block in reversed(self._blocks):
            if block[0].prepared_at_ms <= prepared_at_ms:
                end = bisect_right(block, prepared_at_ms, key=_prepared_at_ms)
                yield from reversed(block[:end])


class GroupIndex:
    """The undecided transactions of one group: pending ones by offset, parked ones counted."""

    __slots__ = ("parked_count", "pending")

    def __init__(self) -> None:
        self.pending = OffsetIndex()
        self.parked_count = 0

    def add(self, transaction: Transaction) -> None:
        """Add an undecided transaction."""
        if transaction.state is State.PARKED:
            self.parked_count += 1
        else:
            self.pending.add(transaction)

    def remove(self, transaction: Transaction, state: State) -> bool:
        """Remove a transaction that was in this state; return whether it was the last one."""
        if state is State.PARKED:
            self.parked_count -= 1
        else:
            self.pending.remove(transaction)
        return not self.parked_count and not self.pending._blocks


class TransactionIndex:
    """All transactions of one half partition that are not settled, and the recently settled.

    Args:
        beyond_max: settled transactions that are remembered beyond the dedup window, for display.

    Attributes:
        transactions: those that are not settled, by id.
        by_offset: the same in offset order.
        refused, parked: those in this state, by id.
        refused_by_topic: how many each target topic has refused.
        body_bytes: the memory that their messages take.
        undecided_count: pending and parked transactions.
        unsettled: how many each share has that are not settled.
        to_keep: those of which the parked topic needs a copy.
        to_release: those whose copies in the parked topic are to be removed.
    """

    def __init__(self, beyond_max: int) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.by_offset = OffsetIndex()
        self.refused: dict[str, Transaction] = {}
        self.refused_by_topic: Counter[str] = Counter()
        self.parked: dict[str, Transaction] = {}
        self.settled = SettledWindow()
        self.body_bytes = 0
        self.undecided_count = 0
        self.unsettled = ShareUse()
        self.share_of: ShareOf = own_share
        self.to_keep: dict[str, Transaction] = {}
        self.to_release: dict[str, Transaction] = {}
        self.beyond_max = beyond_max
        self._ready: dict[str, Transaction] = {}
        self._ready_in_order = True
        self._ready_to = -1
        self._refused_topic: dict[str, str] = {}
        self._groups: dict[str, GroupIndex] = {}
        self._dedup: dict[tuple[str, str], str] = {}

    def __iter__(self) -> Iterator[Transaction]:
        """Yield the unsettled transactions, then the settled ones as far as remembered."""
        yield from self.transactions.values()
        yield from self.settled

    def get(self, id: str) -> Transaction | None:
        """Return a transaction that is not settled or settled recently; of most settled ones, only
        what answers need is remembered."""
        return self.transactions.get(id) or self.settled.get(id)

    def by_dedup_key(self, group: str, dedup_key: str) -> Transaction | None:
        """Return the transaction that holds a client's `dedup_key`."""
        id = self._dedup.get((group, dedup_key))
        return None if id is None else self.get(id)

    # --- adding ------------------------------------------------------------------------------

    def add(self, transaction: Transaction) -> None:
        """Add a transaction that is not settled, in any state."""
        half, state = transaction.half, transaction.state
        group = half.group
        self.transactions[half.id] = transaction
        self.unsettled.add(self.share_of(group))
        self.body_bytes += transaction.body_bytes
        self.by_offset.add(transaction)
        dedup_key = half.attributes.dedup_key
        if dedup_key is not None:
            self._hold_key((group, dedup_key), half.id, transaction.offset)
        if state is State.PENDING or state is State.PARKED:
            self.undecided_count += 1
            undecided = self._groups.get(group)
            if undecided is None:
                undecided = self._groups[group] = GroupIndex()
            undecided.add(transaction)
            if state is State.PARKED:
                self.parked[half.id] = transaction
        elif state is State.REFUSED:
            self._add_refused(transaction)
        elif state is State.COMMITTED:
            self._add_ready(transaction)

    def add_segment(self, segment: Segment) -> None:
        """Add settled transactions from a snapshot."""
        self.settled.add_segment(segment)
        for summary in segment.keyed():
            if summary.dedup_key is not None:
                key = (intern(summary.group), summary.dedup_key)
                self._hold_key(key, summary.id, summary.offset)

    def _hold_key(self, key: tuple[str, str], id: str, offset: int) -> None:
        """Of several transactions with one `dedup_key` the last prepared one holds it."""
        holder = self._dedup.get(key)
        known = None if holder is None else self.get(holder)
        if known is None or known.offset <= offset:
            self._dedup[key] = id

    def _add_ready(self, transaction: Transaction) -> None:
        op_offset = transaction.verdict.op_offset
        self._ready[transaction.half.id] = transaction
        if op_offset > self._ready_to:
            self._ready_to = op_offset
        else:
            # Its marker was read before its half message, or it comes from a snapshot.
            self._ready_in_order = False

    def _add_refused(self, transaction: Transaction) -> None:
        topic = "" if transaction.cause is None else transaction.cause.topic
        self.refused[transaction.id] = transaction
        self._refused_topic[transaction.id] = topic
        self.refused_by_topic[topic] += 1

    def _remove_refused(self, id: str) -> None:
        if self.refused.pop(id, None) is not None:
            topic = self._refused_topic.pop(id)
            self.refused_by_topic[topic] -= 1
            if not self.refused_by_topic[topic]:
                del self.refused_by_topic[topic]

    @property
    def ready(self) -> Mapping[str, Transaction]:
        """Committed, not yet promoted or refused, in the order of the deciding markers."""
        if not self._ready_in_order:
            self._ready = dict(
                sorted(self._ready.items(), key=lambda item: item[1].verdict.op_offset)
            )
            self._ready_in_order = True
        return self._ready

    def reorder(self, transaction: Transaction) -> None:
        """Put a ready transaction in order after its marker's offset has become known."""
        self._ready_to = max(self._ready_to, transaction.verdict.op_offset)
        self._ready_in_order = False

    # --- after a step ------------------------------------------------------------------------

    def park(self, transaction: Transaction) -> None:
        """Move a transaction that was pending and is parked now."""
        self.parked[transaction.id] = transaction
        group = self._groups[transaction.half.group]
        group.remove(transaction, State.PENDING)
        group.add(transaction)
        # Also with an older copy, whose state is not `parked`.
        self.to_keep[transaction.id] = transaction

    def revive(self, transaction: Transaction) -> None:
        """Move a transaction that was parked and is pending now."""
        del self.parked[transaction.id]
        group = self._groups[transaction.half.group]
        group.remove(transaction, State.PARKED)
        group.add(transaction)

    def decide(self, transaction: Transaction, before: State) -> None:
        """Move a transaction that was undecided and is committed or rolled back now."""
        half = transaction.half
        self.undecided_count -= 1
        if self._groups[half.group].remove(transaction, before):
            del self._groups[half.group]
        if self.parked:
            self.parked.pop(half.id, None)
        self.to_keep.pop(half.id, None)
        if transaction.state is State.COMMITTED:
            self._add_ready(transaction)
        else:
            if transaction.kept:
                self.to_release[half.id] = transaction
            self.settle((transaction,))

    def refuse(self, transaction: Transaction) -> None:
        """Move a transaction that a promotion transaction has refused."""
        self._ready.pop(transaction.id, None)
        self._remove_refused(transaction.id)
        self._add_refused(transaction)

    def settle(self, transactions: Sequence[Transaction]) -> None:
        """Move transactions that are promoted or rolled back now."""
        by_group: dict[str, int] = {}
        for transaction in transactions:
            half = transaction.half
            del self.transactions[half.id]
            self._ready.pop(half.id, None)
            if half.id in self.refused:
                self._remove_refused(half.id)
            by_group[half.group] = by_group.get(half.group, 0) + 1
            self.by_offset.remove(transaction)
            self.body_bytes -= transaction.evict()
        self.settled.settle_many(transactions)
        for group, count in by_group.items():
            self.unsettled.add(self.share_of(group), -count)

    def forget(self, before_ms: int) -> None:
        """Forget settled transactions that are older; a repeat of theirs would be void."""
        # The copy of a forgotten one would be restored one day: it is removed first.
        for gone in self.settled.forget(before_ms, self.beyond_max, self.to_release):
            if gone.dedup_key is not None:
                key = gone.group, gone.dedup_key
                if self._dedup.get(key) == gone.id:
                    del self._dedup[key]

    # --- messages in memory ------------------------------------------------------------------

    def evict(self, transaction: Transaction) -> None:
        """Drop a transaction's messages from memory."""
        self.body_bytes -= transaction.evict()

    def fill(self, transaction: Transaction, messages: tuple[Message, ...]) -> None:
        """Put messages back that were read again; raise ValueError if they are another
        transaction's."""
        self.body_bytes -= transaction.body_bytes
        try:
            transaction.fill(messages)
        finally:
            self.body_bytes += transaction.body_bytes

    # --- queries -----------------------------------------------------------------------------

    @property
    def pending_by_group(self) -> Mapping[str, int]:
        """Pending transactions of each group that has some."""
        return {name: n for name, group in self._groups.items() if (n := len(group.pending))}

    @property
    def parked_by_group(self) -> Mapping[str, int]:
        """Parked transactions of each group that has some."""
        return {name: n for name, group in self._groups.items() if (n := group.parked_count)}

    def share_by(self, share_of: ShareOf) -> None:
        """Count groups to these shares from now on, and recount the transactions there are."""
        if share_of == self.share_of:
            return
        self.share_of = share_of
        groups = Counter([transaction.half.group for transaction in self.transactions.values()])
        self.unsettled = ShareUse((share_of(group), count) for group, count in groups.items())
        self.settled.share_by(share_of)

    def use_of(self, ids: Iterable[str]) -> ShareUse:
        """Return how many of these transactions each share has, settled ones left out."""
        known = (self.transactions.get(id) for id in ids)
        return ShareUse((self.share_of(t.half.group), 1) for t in known if t is not None)

    def oldest_pending_ms(self, group: str) -> int | None:
        """Return when a group's oldest pending transaction was prepared; None without one."""
        undecided = self._groups.get(group)
        oldest = None if undecided is None else undecided.pending.first()
        return None if oldest is None else oldest.prepared_at_ms


# --- due times -------------------------------------------------------------------------------


def due_ms(transaction: Transaction) -> int | None:
    """Return when a transaction is next to be checked or parked, ms; None unless it is pending."""
    if transaction.state is not State.PENDING:
        return None
    # Most have had no attempt yet: there is nothing to park.
    park_ms = transaction.park_ms() if transaction.checks.number else None
    return transaction.next_check_ms() if park_ms is None else park_ms


class Schedule:
    """A queue of ids by time. Setting an id again moves it; stale heap entries are skipped."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def set(self, id: str, at_ms: int | None) -> bool:
        """Schedule an id, or remove it with None; see `set_run`."""
        return self.set_run(((id, at_ms),))

    def set_run(self, times: Iterable[tuple[str, int | None]]) -> bool:
        """Schedule ids, or remove them with None.

        Returns:
            True if the waiter must wake earlier than planned. If the first entry was moved or
            removed, the waiter only wakes too early.
        """
        due, heap, earlier = self._due, self._heap, False
        for id, at_ms in times:
            if at_ms is None:
                due.pop(id, None)
            elif due.get(id) != at_ms:
                due[id] = at_ms
                earlier = earlier or not heap or at_ms < heap[0][0]
                heapq.heappush(heap, (at_ms, id))
        if len(heap) > 64 + 4 * len(due):
            self._heap = [(at_ms, id) for id, at_ms in due.items()]
            heapq.heapify(self._heap)
        return earlier

    def next_ms(self) -> int | None:
        """Return the time of the first id; None if empty."""
        while self._heap:
            at_ms, id = self._heap[0]
            if self._due.get(id) == at_ms:
                return at_ms
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ms: int) -> Iterator[str]:
        """Remove and yield the ids that are due, oldest first."""
        while (at_ms := self.next_ms()) is not None and at_ms <= now_ms:
            _, id = heapq.heappop(self._heap)
            del self._due[id]
            yield id


class CheckBacklog:
    """Checks that are due while their group's queue is full, first in first out.

    They are not in the schedule: of a million waiting checks only one per group is tried again.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, None]] = {}
        self._group_of: dict[str, str] = {}
        self._retries = Schedule()

    def __contains__(self, group: str) -> bool:
        return group in self._ids

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, group: str, id: str) -> None:
        """Queue a check after the others of its group."""
        if id not in self._group_of:
            self._ids.setdefault(group, {})[id] = None
            self._group_of[id] = group

    def remove(self, id: str) -> None:
        """Remove a check."""
        group = self._group_of.pop(id, None)
        if group is not None:
            del self._ids[group][id]
            if not self._ids[group]:
                del self._ids[group]
                self._retries.set(group, None)

    def first(self, group: str) -> str | None:
        """Return the id that has waited longest; None if none waits."""
        return next(iter(self._ids.get(group, ())), None)

    def look(self, group: str, at_ms: int) -> None:
        """Try a group again at a time, if it has waiting checks."""
        if group in self._ids:
            self._retries.set(group, at_ms)

    def next_ms(self) -> int | None:
        """Return when the next group is tried again; None if none waits."""
        return self._retries.next_ms()

    def due(self, now_ms: int) -> list[str]:
        """Return the groups to try now; each is tried again only after the next `look`."""
        return list(self._retries.pop_due(now_ms))
