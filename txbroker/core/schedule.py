"""When something is to be done for a pending transaction: a check, or parking."""

import heapq
from collections.abc import Iterable, Iterator

from txbroker.core.records import State
from txbroker.core.transaction import Transaction


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


class Crowd:
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
