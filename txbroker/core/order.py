"""Transactions in the order of their half offsets, of which most are gone soon."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from txbroker.core.records import State
from txbroker.core.transaction import Transaction

_SWEEP_MIN = 64


def _offset(transaction: Transaction) -> int:
    return transaction.offset


def _prepared_ms(transaction: Transaction) -> int:
    return transaction.prepared_at_ms


class Line:
    """Transactions by half offset: added at the end, left out anywhere.

    One that is not wanted any more stays in its place until many are, so leaving costs nothing;
    no more than half of the places hold such.

    Args:
        wanted: says whether a transaction is still in line.
    """

    __slots__ = ("_gone", "_head", "_items", "_wanted")

    def __init__(self, wanted: Callable[[Transaction], bool]) -> None:
        self._wanted = wanted
        self._items: list[Transaction] = []
        self._gone = 0
        self._head = 0

    def __iter__(self) -> Iterator[Transaction]:
        return filter(self._wanted, self._items)

    def add(self, transaction: Transaction) -> None:
        """Put a transaction in line, at the end in the common case."""
        if not self._items or self._items[-1].offset < transaction.offset:
            self._items.append(transaction)
        else:
            insort(self._items, transaction, key=_offset)
            self._head = 0

    def left(self) -> None:
        """One that was in line is not wanted any more."""
        self._gone += 1
        if self._gone > _SWEEP_MIN + len(self._items) // 2:
            self._items = list(self)
            self._gone = self._head = 0

    def back(self, transaction: Transaction) -> None:
        """One that had left is wanted again; it may still have its place."""
        at = bisect_left(self._items, transaction.offset, key=_offset)
        if at < len(self._items) and self._items[at] is transaction:
            self._gone = max(0, self._gone - 1)
            self._head = min(self._head, at)
        else:
            self.add(transaction)

    def first(self) -> Transaction | None:
        """Return the first one that is wanted."""
        items = self._items
        while self._head < len(items):
            if self._wanted(items[self._head]):
                return items[self._head]
            self._head += 1
        return None

    def after(self, offset: int, count: int) -> list[Transaction]:
        """Return so many at most of those behind an offset."""
        return self._from(bisect_right(self._items, offset, key=_offset), count)

    def since(self, prepared_at_ms: int, count: int, after_id: str = "") -> list[Transaction]:
        """Return, by time of preparation and then by id, those behind a time and id.

        Args:
            count: how many are enough; of one and the same time all are returned.
            after_id: of those that were prepared at this very time only greater ids.
        """
        items = self._items
        at = bisect_left(items, prepared_at_ms, key=_prepared_ms)
        found: list[Transaction] = []
        while at < len(items):
            time_ms = items[at].prepared_at_ms
            if len(found) >= count:
                break
            same = []
            while at < len(items) and items[at].prepared_at_ms == time_ms:
                if self._wanted(items[at]):
                    same.append(items[at])
                at += 1
            if time_ms == prepared_at_ms:
                same = [each for each in same if each.id > after_id]
            found.extend(sorted(same, key=lambda each: each.id))
        return found

    def _from(self, at: int, count: int) -> list[Transaction]:
        found: list[Transaction] = []
        items = self._items
        while at < len(items) and len(found) < count:
            if self._wanted(items[at]):
                found.append(items[at])
            at += 1
        return found


def _pending(transaction: Transaction) -> bool:
    return transaction.state is State.PENDING


class Undecided:
    """What is undecided of one group: counted, and the pending ones in line."""

    __slots__ = ("line", "parked_count", "pending_count")

    def __init__(self) -> None:
        self.line = Line(_pending)
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
        self.pending_count -= 1
        self.parked_count += 1
        self.line.left()

    def revived(self, transaction: Transaction) -> None:
        """It was parked, and is pending again."""
        self.parked_count -= 1
        self.pending_count += 1
        self.line.back(transaction)

    def leave(self, transaction: Transaction) -> bool:
        """It is about to be decided; say whether it was the last one."""
        if transaction.state is State.PARKED:
            self.parked_count -= 1
        else:
            self.pending_count -= 1
            self.line.left()
        return not self.pending_count and not self.parked_count
