"""No flood of log lines: of one kind only so many in a while, and a count of those left out.

Under trouble an event can come once for each of a hundred thousand transactions. The first lines
say what it is; metrics and `txbroker tx list` say of which ones.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

LINES_MAX = 20
"""Lines of one kind within a window: enough to see what they have in common."""
WINDOW_S = 10.0
"""Seconds; so no kind writes more than two lines a second for longer than a moment."""


class Timer(Protocol):
    """Something that happens later."""

    def start(self) -> None:
        """Begin to wait."""
        ...


def _in_a_thread(delay_s: float, then: Callable[[], None]) -> Timer:
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
        """Count a line; say whether there is room for it."""
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
    """Says which lines are written, and tells how many were not.

    A kind is a text out of a small set, such as an event's name: each is remembered.

    Args:
        tell: called with a kind and how many lines of it were left out, at the end of its window.
        lines_max, window_s: see the constants.
        now_s: a monotonic clock.
        later: makes a timer that calls a function once after so many seconds.
    """

    def __init__(
        self,
        tell: Callable[[str, int], None],
        *,
        lines_max: int = LINES_MAX,
        window_s: float = WINDOW_S,
        now_s: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer] = _in_a_thread,
    ) -> None:
        self._tell = tell
        self._lines_max = lines_max
        self._window_s = window_s
        self._now_s = now_s
        self._later = later
        # Lines come from threads as well.
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._waiting = False

    def admit(self, kind: str, partition: int | None = None) -> bool:
        """Say whether a line of this kind is to be written.

        Args:
            partition: the half partition that it is about: the first line about each is written,
                however many there are, as what happens to one says nothing of the others.
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
            self._tell(kind, begun.left_out)
        if waits:
            self._later(self._window_s, self._look).start()
        return admitted

    def flush(self) -> None:
        """Tell at once of everything that was left out, as at the end of the process."""
        self._tell_all(lambda window: True)

    def _look(self) -> None:
        now_s = self._now_s()
        self._tell_all(lambda window: now_s - window.since_s >= self._window_s)
        with self._lock:
            self._waiting = any(window.left_out for window in self._windows.values())
            waits = self._waiting
        if waits:
            self._later(self._window_s, self._look).start()

    def _tell_all(self, over: Callable[[_Window], bool]) -> None:
        with self._lock:
            told: Iterable[tuple[str, int]] = [
                (kind, window.left_out)
                for kind, window in self._windows.items()
                if window.left_out and over(window)
            ]
            for kind, _ in told:
                del self._windows[kind]
        for kind, count in told:
            self._tell(kind, count)
