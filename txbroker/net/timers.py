"""Timers: one for the deadlines of many equal waits, and growing pauses between retries."""

import asyncio
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Waits with one maximum duration, so that they are due in the order in which they began.

    They share one timer: one per call, as `asyncio.timeout` sets, costs a producer a tenth of its
    processor time.

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


def grown_pause_s(failures: int, first_s: float, max_s: float) -> float:
    """Return the pause after a number of failures in a row: doubled each time, at most `max_s`."""
    return min(max_s, first_s * 2.0 ** min(failures - 1, 30))


class Backoff:
    """Pauses between attempts of one operation: jittered, doubling, until a deadline.

    Created inside a running event loop; the deadline counts from then on.

    Args:
        timeout_s: seconds until `pause` gives up; `math.inf` never does.
        pause_s: the first pause, on average.
        pause_max_s: the longest pause, on average.
    """

    def __init__(self, timeout_s: float, pause_s: float, pause_max_s: float = 0.25) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        self._first_s = pause_s
        self._pause_max_s = pause_max_s
        self._pauses = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self._deadline - self._loop.time()

    def reset(self) -> None:
        """Begin with the first pause again, after a success. The deadline stays."""
        self._pauses = 0

    async def pause(self) -> bool:
        """Sleep before the next attempt and return True; False at once after the deadline."""
        left_s = self.left_s
        if left_s <= 0:
            return False
        # Jitter keeps clients that failed together from retrying together.
        self._pauses += 1
        pause_s = grown_pause_s(self._pauses, self._first_s, self._pause_max_s)
        await asyncio.sleep(min(pause_s * (0.5 + random.random()), left_s))
        return True
