"""The geometry of the report's plots, for the template `plots.html`."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, floor, log10
from typing import NamedTuple

from txbroker.spark.report.formatting import day, duration

DAY_MS = 86_400_000
NAMES = ("p50", "p95", "p99")
_LEVELS_MS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 432_000_000)


class LatencyPoint(NamedTuple):
    """Percentiles, ms, of the transactions that were prepared in a step that begins at `at_ms`."""

    at_ms: int
    p50: float
    p95: float
    p99: float


class TimeAxis(NamedTuple):
    """The time that plots beside each other show: steps of `step_ms` from `begin_ms` on, up to
    `end_ms`."""

    begin_ms: int
    end_ms: int
    step_ms: int


class Decades(NamedTuple):
    """A logarithmic axis from 10^`low` to 10^`high` ms."""

    low: int
    high: int


def common_decades(series: Sequence[Sequence[LatencyPoint]]) -> Decades:
    """Return the axis of plots side by side, so that they can be compared."""
    values = [max(1.0, value) for points in series for point in points for value in point[1:]]
    if not values:
        return Decades(0, 1)
    low = floor(log10(min(values)))
    return Decades(low, max(low + 1, ceil(log10(max(values)))))


class Mark(NamedTuple):
    """A text beside a plot, at a share of its height, %, from the top."""

    top: float
    words: str


class Line(NamedTuple):
    """A line of a plot: the percentile's name, and an SVG path. A point without a neighbour is a
    segment without length, which round caps make a dot."""

    name: str
    path: str


class LatencyPlot:
    """Percentiles over time. A step without transactions interrupts the lines.

    The drawing is stretched to its place, so it holds no text: the words beside it keep their size.

    Args:
        title: read aloud by screen readers.
    """

    width, height = 1000, 100

    def __init__(
        self, title: str, points: Sequence[LatencyPoint], time: TimeAxis, decades: Decades
    ) -> None:
        self.title = title
        self._points, self._time, self._decades = points, time, decades

    @property
    def description(self) -> str:
        """The plot in words."""
        worst = max(self._points, key=lambda point: point.p99)
        return (
            f"from {day(self._time.begin_ms)} to {day(self._time.end_ms)} UTC in steps of "
            f"{duration(self._time.step_ms)}; p99 is at most {duration(worst.p99)}, at "
            f"{day(worst.at_ms)}"
        )

    def lines(self) -> Iterator[Line]:
        """Yield the percentiles, the greatest first, so that the others are drawn over it."""
        begins = [True, *(self._is_gap(*pair) for pair in pairwise(self._points))]
        ends = [*begins[1:], True]
        for name in reversed(NAMES):
            path = " ".join(
                f"{'M' if begin else 'L'}{self._x(one.at_ms):.1f} {self._y(getattr(one, name)):.1f}"
                f"{'h0' * (begin and end)}"
                for one, begin, end in zip(self._points, begins, ends, strict=True)
            )
            yield Line(name, path)

    def levels(self) -> Iterator[Mark]:
        """Yield the durations that have a line."""
        low, high = self._decades
        for ms in _LEVELS_MS:
            if 10**low <= ms <= 10**high:
                yield Mark(self._y(ms), duration(ms))

    def dates(self) -> list[str]:
        """Return begin, middle and end of the time."""
        begin_ms, end_ms, _ = self._time
        return [day(begin_ms), day((begin_ms + end_ms) // 2), day(end_ms)]

    def _is_gap(self, one: LatencyPoint, other: LatencyPoint) -> bool:
        return other.at_ms - one.at_ms > self._time.step_ms

    def _x(self, at_ms: int) -> float:
        begin_ms, end_ms, step_ms = self._time
        share = (at_ms + step_ms / 2 - begin_ms) / max(1, end_ms - begin_ms)
        return min(1.0, share) * self.width

    def _y(self, ms: float) -> float:
        low, high = self._decades
        return (1 - (log10(max(1.0, ms)) - low) / (high - low)) * self.height


class Bar(NamedTuple):
    """A bar of a row: its value, None for a gap; how much of it is acknowledged; both in words."""

    value: float | None
    words: str
    known: float = 0


def bar_height(value: float, bars: Sequence[Bar]) -> float:
    """Return the height of a bar among others; even the smallest is visible."""
    return max(3.0, 34 * value / max(bar.value or 0 for bar in bars)) if value else 2.5
