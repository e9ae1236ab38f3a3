"""Retries: growing pauses until a deadline."""

from __future__ import annotations

import asyncio
import random


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
