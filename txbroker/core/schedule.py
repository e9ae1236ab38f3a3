"""When pending transactions are next due, and checks that wait for a free slot of their group."""

import heapq
from collections.abc import Iterable, Iterator

from txbroker.core.records import State
from txbroker.core.transaction import Transaction


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
