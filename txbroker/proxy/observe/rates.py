"""Rates of a half partition: counts, sampled once a second.

Counting costs an addition; the clock is read only by samples, so calls pay nothing for it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from txbroker.contract.service import Rates

WINDOW_S = 10.0
"""Rates are averages over about this time, seconds."""


class _Sample(NamedTuple):
    at_s: float
    prepared: int
    decided: int
    promoted: int


class RateCounter:
    """Counts the transactions of one half partition.

    Args:
        clock_s: a monotonic clock, seconds.

    Attributes:
        prepared, decided, promoted: transactions so far; the caller adds to them.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.prepared = self.decided = self.promoted = 0
        self._clock_s = clock_s
        self._samples: deque[_Sample] = deque([self._now()])

    def sample(self) -> None:
        """Store the current counts."""
        now = self._now()
        self._samples.append(now)
        # The first sample kept is the last one before the window.
        while len(self._samples) > 1 and self._samples[1].at_s <= now.at_s - WINDOW_S:
            self._samples.popleft()

    def per_second(self) -> Rates:
        """Return the rates of the last seconds."""
        now = self._now()
        # Samples are late while Kafka does not answer; the newest one before the window is the
        # most accurate start.
        before = self._samples[0]
        for sample in self._samples:
            if sample.at_s > now.at_s - WINDOW_S:
                break
            before = sample
        passed_s = now.at_s - before.at_s
        if passed_s <= 0:
            return Rates()
        return Rates(
            (now.prepared - before.prepared) / passed_s,
            (now.decided - before.decided) / passed_s,
            (now.promoted - before.promoted) / passed_s,
        )

    def _now(self) -> _Sample:
        return _Sample(self._clock_s(), self.prepared, self.decided, self.promoted)
