"""Deadlines of many equal waits, on one timer.

A timer per call, as `asyncio.timeout` sets, costs a producer a tenth of its processor time.
"""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Waits with one maximum duration, so that they are due in the order in which they began.

    Args:
        seconds: the maximum duration.
        overdue: called with each wait that reaches it; the wait has ended then.
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
        """Begin a wait."""
        self._due[wait] = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)

    def end(self, wait: K) -> None:
        """End a wait; nothing happens if it has ended."""
        self._due.pop(wait, None)

    def close(self) -> None:
        """End all waits without calling `overdue`."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """End the waits that are due, and set the timer for the next one."""
        self._timer = None
        now = self._loop.time()
        overdue = []
        # In one pass: finding a dict's first entry gets slower the more were removed.
        for wait, due in self._due.items():
            if due > now:
                self._timer = self._loop.call_at(due, self._check)
                break
            overdue.append(wait)
        for wait in overdue:
            if self._due.pop(wait, None) is not None:
                self._overdue(wait)
