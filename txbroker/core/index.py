"""Indexes over the transactions of a partition: by half offset, by group, by share and by due time.

A *share* is one group, or all groups of one principal: the use of a shared pool is counted to it,
so that none uses the pool up alone. Whose a group is follows from its name, which stands in every
half message, so every owner comes to the same counts.
"""

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import TypeAlias

from txbroker.core.records import State
from txbroker.core.transaction import Transaction

_BLOCK_MAX = 1024
"""Transactions in one block: few enough that putting one into its middle costs next to nothing."""
_SMALL = 64
"""Blocks with fewer are joined with a neighbour, if that is not too large."""


class OffsetIndex:
    """Transactions by half offset.

    They are in blocks, so that no step takes long however many there are: adding at the end, which
    is nearly always so, costs nothing; anything else moves a part of one block.
    """

    __slots__ = ("_blocks", "_firsts", "_offsets")

    def __init__(self) -> None:
        self._blocks: list[list[Transaction]] = []
        # Beside each block its offsets, and the least of them: there the search is C's.
        self._offsets: list[array[int]] = []
        self._firsts: list[int] = []

    def __iter__(self) -> Iterator[Transaction]:
        """Yield them in order; whoever goes on may change the line meanwhile."""
        for block in list(self._blocks):
            yield from list(block)

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, transaction: Transaction) -> None:
        """Put a transaction in its place."""
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
            place = bisect_left(self._offsets[at], offset)
            self._offsets[at].insert(place, offset)
            self._blocks[at].insert(place, transaction)
        if len(self._blocks[at]) > _BLOCK_MAX:
            self._split(at)

    def _split(self, at: int) -> None:
        offsets, block = self._offsets[at], self._blocks[at]
        # One that grows at its end only stays full: nothing will come into its middle.
        middle = len(block) - 1 if at == len(self._blocks) - 1 else len(block) // 2
        self._insert(at + 1, block[middle:], offsets[middle:], offsets[middle])
        del block[middle:], offsets[middle:]

    def _insert(self, at: int, block: list[Transaction], offsets: "array[int]", first: int) -> None:
        self._blocks.insert(at, block)
        self._offsets.insert(at, offsets)
        self._firsts.insert(at, first)

    def remove(self, transaction: Transaction) -> None:
        """Take a transaction out, which is in line."""
        at = place = 0
        if self._blocks[0][0] is not transaction:
            at = bisect_right(self._firsts, transaction.offset) - 1
            place = bisect_left(self._offsets[at], transaction.offset)
        offsets = self._offsets[at]
        del offsets[place], self._blocks[at][place]
        if not offsets:
            del self._blocks[at], self._offsets[at], self._firsts[at]
        elif len(offsets) < _SMALL:
            self._join(at)

    def _join(self, at: int) -> None:
        """Make one block of a small one and a neighbour; else many would be left with one each."""
        for left in (at, at - 1):
            if left < 0 or left + 1 == len(self._blocks):
                continue
            if len(self._blocks[left]) + len(self._blocks[left + 1]) <= _BLOCK_MAX // 2:
                self._offsets[left].extend(self._offsets.pop(left + 1))
                self._blocks[left].extend(self._blocks.pop(left + 1))
                del self._firsts[left + 1]
                return

    def first(self) -> Transaction | None:
        """Return the first one, None if there is none."""
        return self._blocks[0][0] if self._blocks else None

    def after(self, offset: int, count: int) -> list[Transaction]:
        """Return so many at most of those behind an offset."""
        if not self._blocks:
            return []
        at = max(0, bisect_right(self._firsts, offset) - 1)
        start = bisect_right(self._offsets[at], offset)
        found = self._blocks[at][start : start + count]
        for block in islice(self._blocks, at + 1, None):
            if len(found) >= count:
                break
            found += block[: count - len(found)]
        return found

    def since(self, prepared_at_ms: int, count: int, after_id: str = "") -> list[Transaction]:
        """Return so many at most, by time of preparation and then by id, of those behind a time
        and id: log clocks grow with the offsets, so by time they are in order."""
        found: list[Transaction] = []
        same: list[Transaction] = []
        for transaction in self._since(prepared_at_ms):
            if same and transaction.prepared_at_ms != same[0].prepared_at_ms:
                found += nsmallest(count - len(found), same, key=_id)
                same = []
                if len(found) == count:
                    return found
            if transaction.prepared_at_ms > prepared_at_ms or transaction.id > after_id:
                same.append(transaction)
        return found + nsmallest(count - len(found), same, key=_id)

    def _since(self, prepared_at_ms: int) -> Iterator[Transaction]:
        """Yield those prepared at a time or later."""
        firsts = [block[0].prepared_at_ms for block in self._blocks]
        at = max(0, bisect_left(firsts, prepared_at_ms) - 1)
        for block in islice(self._blocks, at, None):
            if block[-1].prepared_at_ms >= prepared_at_ms:
                yield from islice(
                    block, bisect_left(block, prepared_at_ms, key=_prepared_at_ms), None
                )


def _id(transaction: Transaction) -> str:
    return transaction.id


def _prepared_at_ms(transaction: Transaction) -> int:
    return transaction.prepared_at_ms


class GroupIndex:
    """What is undecided of one group: the pending ones in line, the parked ones counted."""

    __slots__ = ("line", "parked_count", "pending_count")

    def __init__(self) -> None:
        self.line = OffsetIndex()
        self.pending_count = 0
        self.parked_count = 0

    def enter(self, transaction: Transaction) -> None:
        """It is undecided from now on."""
        if transaction.state is State.PARKED:
            self.parked_count += 1
        else:
            self.pending_count += 1
            self.line.add(transaction)

    def parked(self, transaction: Transaction) -> None:
        """It was pending, and is parked now."""
        self.parked_count += 1
        self.pending_count -= 1
        self.line.remove(transaction)

    def revived(self, transaction: Transaction) -> None:
        """It was parked, and is pending again."""
        self.parked_count -= 1
        self.enter(transaction)

    def leave(self, transaction: Transaction) -> bool:
        """It is about to be decided; say whether it was the last one."""
        if transaction.state is State.PARKED:
            self.parked_count -= 1
        else:
            self.pending_count -= 1
            self.line.remove(transaction)
        return not self.pending_count and not self.parked_count


# --- shares ----------------------------------------------------------------------------------


ShareOf: TypeAlias = Callable[[str], str]
"""Returns the share that a group counts to."""


def own_share(group: str) -> str:
    """Return a group as its own share: the rule where there are no principals."""
    return group


def share_max(pool: int) -> int:
    """Return what one share may use of a pool: four fifths.

    A share whose work stands still for hours fills its part. A fifth is then left for all others,
    while one busy share alone still gets nearly everything.
    """
    return max(1, pool * 4 // 5)


class ShareUse:
    """How much of a pool each share uses.

    Attributes:
        total: of all shares together.
    """

    __slots__ = ("_of", "total")

    def __init__(self, shares: Iterable[tuple[str, int]] = ()) -> None:
        self._of: dict[str, int] = {}
        self.total = 0
        for share, count in shares:
            self.add(share, count)

    def of(self, share: str) -> int:
        """Return how much one share uses."""
        return self._of.get(share, 0)

    def add(self, share: str, count: int = 1) -> None:
        """Count what a share takes, or, below 0, gives back."""
        self.total += count
        left = self._of.get(share, 0) + count
        if left:
            self._of[share] = left
        else:
            self._of.pop(share, None)


# --- due times -----------------------------------------------------------------------------------


def due_ms(transaction: Transaction) -> int | None:
    """Return when a transaction next needs attention by its own rules, ms; None if it does not."""
    if transaction.state is not State.PENDING:
        return None
    # Most have had no attempt yet: there is nothing to park.
    park_ms = None if transaction.checks is None else transaction.park_ms()
    return transaction.next_check_ms() if park_ms is None else park_ms


class Schedule:
    """A queue of ids by time. Setting an id again moves it; old places are skipped when met."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def set(self, id: str, at_ms: int | None) -> bool:
        """Put `id` at a time, or take it out with None; see `set_run`."""
        return self.set_run(((id, at_ms),))

    def set_run(self, times: Iterable[tuple[str, int | None]]) -> bool:
        """Put ids at their times, or take them out with None.

        Returns:
            Whether something comes earlier than what was first: a wait for that is too long now.
            Where what was first was moved or taken out since, the wait ends too early, at worst.
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
            self._heap = [(at, each) for each, at in due.items()]
            heapq.heapify(self._heap)
        return earlier

    def next_ms(self) -> int | None:
        """Return the time of the first id, None if there is none."""
        while self._heap:
            at_ms, id = self._heap[0]
            if self._due.get(id) == at_ms:
                return at_ms
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ms: int) -> Iterator[str]:
        """Take out and yield the ids whose time has come, oldest first."""
        while (at_ms := self.next_ms()) is not None and at_ms <= now_ms:
            _, id = heapq.heappop(self._heap)
            del self._due[id]
            yield id


class CheckBacklog:
    """Checks that are due while their group's queue is full, the one that waited longest first.

    They are off the schedule: a million of them are not looked at each second, only whether their
    group takes the first.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, None]] = {}
        self._group_of: dict[str, str] = {}
        self._looks = Schedule()

    def __contains__(self, group: str) -> bool:
        return group in self._ids

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, group: str, id: str) -> None:
        """Let a check wait behind the others of its group."""
        if id not in self._group_of:
            self._ids.setdefault(group, {})[id] = None
            self._group_of[id] = group

    def remove(self, id: str) -> None:
        """It waits no longer."""
        group = self._group_of.pop(id, None)
        if group is not None:
            del self._ids[group][id]
            if not self._ids[group]:
                del self._ids[group]
                self._looks.set(group, None)

    def first(self, group: str) -> str | None:
        """Return the id that has waited longest, None if none does."""
        return next(iter(self._ids.get(group, ())), None)

    def look(self, group: str, at_ms: int) -> None:
        """Look at that time whether a group that has some waiting takes one."""
        if group in self._ids:
            self._looks.set(group, at_ms)

    def next_ms(self) -> int | None:
        """Return when to look at a group next, None if none has any waiting."""
        return self._looks.next_ms()

    def due(self, now_ms: int) -> list[str]:
        """Return the groups to be looked at now, and put them off until `look`."""
        return list(self._looks.pop_due(now_ms))
