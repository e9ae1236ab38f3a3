"""Transactions in the order of their half offsets: added, taken out and paged through anywhere."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice

from txbroker.core.records import State
from txbroker.core.transaction import Transaction

_BLOCK_MAX = 1024
"""Transactions in one block: few enough that putting one into its middle costs next to nothing."""
_SMALL = 64
"""Blocks with fewer are joined with a neighbour, if that is not too large."""


class Line:
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


class Undecided:
    """What is undecided of one group: the pending ones in line, the parked ones counted."""

    __slots__ = ("line", "parked_count", "pending_count")

    def __init__(self) -> None:
        self.line = Line()
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
