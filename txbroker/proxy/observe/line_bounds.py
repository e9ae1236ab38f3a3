"""Rate limit of log lines: at most a number of each kind per window, then a count of the rest.

During an incident an event can occur once for each of a hundred thousand transactions. The first
lines show its nature; metrics and `txbroker tx list` show the transactions.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

LINES_MAX = 20
"""Lines of one kind within a window: enough to see what they have in common."""
WINDOW_S = 10.0
"""Length of a window, seconds: on average at most two lines a second of each kind."""


class Timer(Protocol):
    """Calls a function once, later."""

    def start(self) -> None:
        """Begin to wait."""
        ...


def _thread_timer(delay_s: float, then: Callable[[], None]) -> Timer:
    timer = threading.Timer(delay_s, then)
    timer.daemon = True
    return timer


class _Window:
    __slots__ = ("admitted", "left_out", "partitions", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.admitted = 0
        self.left_out = 0
        self.partitions: set[int] = set()

    def takes(self, lines_max: int, partition: int | None) -> bool:
        """Count a line; return whether it may be written."""
        takes = self.admitted < lines_max
        if partition is not None and partition not in self.partitions:
            self.partitions.add(partition)
            takes = True
        if takes:
            self.admitted += 1
        else:
            self.left_out += 1
        return takes


class LineBounds:
    """Decides which lines are written, and reports how many were suppressed.

    A kind is one of a small set of texts, such as the names of events, as all are kept in memory.

    Args:
        report: called with a kind and its number of suppressed lines, at the end of its window.
        lines_max, window_s: see the constants.
        now_s: a monotonic clock.
        later: returns a timer that calls a function once, after a delay in seconds.
    """

    def __init__(
        self,
        report: Callable[[str, int], None],
        *,
        lines_max: int = LINES_MAX,
        window_s: float = WINDOW_S,
        now_s: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer] = _thread_timer,
    ) -> None:
        self._report = report
        self._lines_max = lines_max
        self._window_s = window_s
        self._now_s = now_s
        self._later = later
        # Lines come from threads as well.
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._waiting = False

    def admit(self, kind: str, partition: int | None = None) -> bool:
        """Return whether a line of this kind may be written.

        Args:
            partition: the half partition that it concerns. The first line of each partition is
                always written, as partitions fail independently.
        """
        now_s = self._now_s()
        begun: _Window | None = None
        with self._lock:
            window = self._windows.get(kind)
            if window is None or now_s - window.since_s >= self._window_s:
                begun, window = window, _Window(now_s)
                self._windows[kind] = window
            admitted = window.takes(self._lines_max, partition)
            waits = not admitted and not self._waiting
            self._waiting = self._waiting or waits
        if begun is not None and begun.left_out:
            self._report(kind, begun.left_out)
        if waits:
            self._later(self._window_s, self._look).start()
        return admitted

    def flush(self) -> None:
        """Report all suppressed lines at once, as at the end of the process."""
        self._report_all(lambda window: True)

    def _look(self) -> None:
        now_s = self._now_s()
        self._report_all(lambda window: now_s - window.since_s >= self._window_s)
        with self._lock:
            self._waiting = any(window.left_out for window in self._windows.values())
            waits = self._waiting
        if waits:
            self._later(self._window_s, self._look).start()

    def _report_all(self, over: Callable[[_Window], bool]) -> None:
        with self._lock:
            suppressed: Iterable[tuple[str, int]] = [
                (kind, window.left_out)
                for kind, window in self._windows.items()
                if window.left_out and over(window)
            ]
            for kind, _ in suppressed:
                del self._windows[kind]
        for kind, count in suppressed:
            self._report(kind, count)
