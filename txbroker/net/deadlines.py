"""What has waited too long, by one timer for all of it.

A timer for each call, as `asyncio.timeout` sets, costs a producer a tenth of its processor time.
"""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Waits that each last the same at most, so that the one that began first is due first.

    Args:
        seconds: how long one lasts at most.
        overdue: told which one has lasted so long; it counts as ended.
    """

    def __init__(self, seconds: float, overdue: Callable[[K], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._overdue = overdue
        self._due: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due)

    def begin(self, wait: K) -> None:
        """A wait begins."""
        self._due[wait] = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def end(self, wait: K) -> None:
        """A wait is over; nothing happens if it was before."""
        self._due.pop(wait, None)

    def close(self) -> None:
        """Nobody is told any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Tell of those that are due, and look again when the next one is."""
        self._timer = None
        now = self._loop.time()
        overdue = []
        # In one pass: the first entry of a dict is the slower to find the more were taken out.
        for wait, due in self._due.items():
            if due > now:
                self._timer = self._loop.call_at(due, self._look)
                break
            overdue.append(wait)
        for wait in overdue:
            if self._due.pop(wait, None) is not None:
                self._overdue(wait)
