"""How fast a half partition works: counted as it happens, looked at once a second.

Counting costs an addition. The clock is read at the looks alone, so full speed pays nothing.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from txbroker.contract.service import Rates

WINDOW_S = 10.0
"""Rates are those of about so many last seconds."""


class _Look(NamedTuple):
    at_s: float
    prepared: int
    decided: int
    promoted: int


class RateCounter:
    """Counts what the calls of one half partition did.

    Args:
        clock_s: a monotonic clock, seconds.

    `prepared`, `decided` and `promoted` are how many transactions were so far.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.prepared = self.decided = self.promoted = 0
        self._clock_s = clock_s
        self._looks: deque[_Look] = deque([self._look()])

    def sample(self) -> None:
        """Remember how far the counts are now."""
        now = self._look()
        self._looks.append(now)
        # The first one that is kept is the last before the window.
        while len(self._looks) > 1 and self._looks[1].at_s <= now.at_s - WINDOW_S:
            self._looks.popleft()

    def per_second(self) -> Rates:
        """Return what happened per second in the last seconds."""
        now = self._look()
        # Looks may be late where Kafka does not answer; then the newest one outside the window
        # says more than an older one.
        before = self._looks[0]
        for look in self._looks:
            if look.at_s > now.at_s - WINDOW_S:
                break
            before = look
        passed_s = now.at_s - before.at_s
        if passed_s <= 0:
            return Rates()
        return Rates(
            (now.prepared - before.prepared) / passed_s,
            (now.decided - before.decided) / passed_s,
            (now.promoted - before.promoted) / passed_s,
        )

    def _look(self) -> _Look:
        return _Look(self._clock_s(), self.prepared, self.decided, self.promoted)
