"""Numbers as people read them, percentiles of histograms, and the geometry of plots."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from txbroker.spark.schema import Histogram

_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"), (1, "ms"))


def count(value: int) -> str:
    """Return a number with separated thousands."""
    return f"{value:,}"


def plural(value: int, one: str, many: str = "") -> str:
    """Return a number and its noun, in the plural (`one` + s by default) unless it is 1."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def duration(ms: float) -> str:
    """Return a time span in its largest unit, with two digits where they are significant."""
    for size, unit in _UNITS:
        if ms >= size * 0.9995:  # what would round up to a whole one is one
            number = ms / size
            digits = 1 if number < 9.95 and round(number, 1) != round(number) else 0
            return f"{number:.{digits}f} {unit}"
    return "0" if ms <= 0 else f"{ms:.2g} ms"


def moment(ms: int) -> str:
    """Return a UTC time to the second."""
    return f"{_utc(ms):%Y-%m-%d %H:%M:%S} UTC"


def day(ms: int) -> str:
    """Return a UTC day and time to the minute."""
    return f"{_utc(ms):%d %b %H:%M}"


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class Percentile(NamedTuple):
    """The value below which a share of all values lies.

    Attributes:
        place: number of buckets below it, with a fraction.
        ms: the value; None beyond the last bound.
        over_ms: the last bound.
    """

    place: float
    ms: float | None
    over_ms: int

    def __str__(self) -> str:
        return f"> {duration(self.over_ms)}" if self.ms is None else duration(self.ms)


def percentile(histogram: Histogram, share: float) -> Percentile | None:
    """Return a percentile, interpolated within its bucket; None without values."""
    total = sum(histogram.counts)
    bounds = histogram.bounds
    if not total or not bounds:
        return None
    rank = share * total
    sums = list(accumulate(histogram.counts))
    bucket = bisect_left(sums, rank)
    number = histogram.counts[bucket]
    fraction = (rank - (sums[bucket] - number)) / number if number else 0.0
    over = bucket >= len(bounds)
    low = bounds[bucket - 1] if bucket else 0
    ms = None if over else low + fraction * (bounds[bucket] - low)
    return Percentile(bucket + fraction, ms, bounds[-1])


# --- plots -----------------------------------------------------------------------------------

_TICK_APART = 46
"""Pixels between axis labels, so that they can be read."""
_CHAR = 6.9
"""Approximate width of a label's character, pixels."""
_MARKS = (("p50", 0.5), ("p99", 0.99))


class BucketRange(NamedTuple):
    """The buckets of a plot: from `first` up to, not including, `last`."""

    first: int
    last: int


def common_buckets(histograms: Sequence[Histogram]) -> BucketRange:
    """Return the buckets with values in any of these histograms, which have the same bounds:
    plots side by side share one axis."""
    used = [
        bucket
        for histogram in histograms
        for bucket, number in enumerate(histogram.counts)
        if number
    ]
    if not used:
        return BucketRange(0, 1)
    longest = max(len(histogram.counts) for histogram in histograms)
    return BucketRange(max(0, min(used) - 1), min(longest, max(used) + 2))


class Bar(NamedTuple):
    """A bar of a plot; `unbounded`: of the last bucket, which has no upper bound."""

    x: float
    y: float
    width: float
    height: float
    unbounded: bool


class Label(NamedTuple):
    """A text of a plot; `anchor` as SVG's `text-anchor`."""

    x: float
    y: float
    words: str
    anchor: str


class PercentileMark(NamedTuple):
    """A percentile marked in a plot by a vertical line."""

    name: str
    x: float
    label: Label


class Plot:
    """Geometry of a histogram with buckets of equal width, for the template `plots.html`.

    Args:
        buckets: the buckets to show.
        title: read aloud by screen readers.
        width: approximate width on the page, pixels, so that text has its usual size.
    """

    top, floor, left = 44, 142, 8

    def __init__(
        self, histogram: Histogram, buckets: BucketRange, title: str, width: int = 260
    ) -> None:
        self._histogram = histogram
        self._range = buckets
        self.title = title
        self.width, self.right = width, width - self.left
        self._bar = (width - 2 * self.left) / max(1, buckets.last - buckets.first)
        percentiles = ((name, percentile(histogram, share)) for name, share in _MARKS)
        self._percentiles = [(name, value) for name, value in percentiles if value]

    @property
    def description(self) -> str:
        """The plot in words."""
        marks = ", ".join(f"{name} {value}" for name, value in self._percentiles)
        total = plural(sum(self._histogram.counts), "transaction")
        return f"{total}; {marks}" if marks else total

    @property
    def height(self) -> int:
        """Height of the plot, pixels."""
        return self.floor + (38 if self._has_unbounded else 23)

    @property
    def _has_unbounded(self) -> bool:
        return self._range.last > len(self._histogram.bounds)

    def _x(self, place: float) -> float:
        return self.left + (place - self._range.first) * self._bar

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield bound and count of each bucket with values."""
        bounds = self._histogram.bounds
        for bucket, number in enumerate(self._histogram.counts):
            if number and bucket < len(bounds):
                yield f"to {duration(bounds[bucket])}", number
            elif number:
                yield f"more than {duration(bounds[-1])}", number

    def bars(self) -> Iterator[Bar]:
        """Yield the bar of each bucket with values."""
        highest = max(self._histogram.counts, default=0)
        for bucket, number in enumerate(self._histogram.counts):
            if number and self._range.first <= bucket < self._range.last:
                height = max(1.5, number / highest * (self.floor - self.top))
                x, width = self._x(bucket) + 0.5, max(1.0, self._bar - 1)
                over = bucket >= len(self._histogram.bounds)
                yield Bar(x, self.floor - height, width, height, over)

    def ticks(self) -> list[float]:
        """Return where the axis is marked: at bounds between bars, as far apart as labels need."""
        return [self._x(place) for place in self._tick_places()]

    def _tick_places(self) -> range:
        last = min(self._range.last, len(self._histogram.bounds))
        return range(self._range.first, last + 1, max(1, ceil(_TICK_APART / self._bar)))

    def tick_labels(self) -> Iterator[Label]:
        """Yield the labels of the axis that do not overlap."""
        free_from = 0.0
        for place in self._tick_places():
            words = "0" if place == 0 else duration(self._histogram.bounds[place - 1])
            # The last one ends at the plot's side, and may have no room there.
            left, right = self._extent(self._x(place), words)
            if left >= free_from:
                free_from = right + _CHAR
                yield self._label(self._x(place), self.floor + 17, words)
        if self._has_unbounded:
            yield Label(self.right, self.floor + 32, "and more", "end")

    def highest(self) -> Label:
        """Return the label with the count of the highest bar."""
        words = f"max {count(max(self._histogram.counts, default=0))}"
        return self._label(self.left, self.top - 4, words)

    def marks(self) -> Iterator[PercentileMark]:
        """Yield the percentiles; each has a separate row above the bars for its label."""
        for row, (name, value) in enumerate(self._percentiles):
            x, y = self._x(value.place), 13 + row * 15
            words = f"{name} {value}"
            if x + 5 + len(words) * _CHAR < self.width:
                yield PercentileMark(name, x, Label(x + 5, y, words, "start"))
            else:
                yield PercentileMark(name, x, Label(x - 5, y, words, "end"))

    def _extent(self, x: float, words: str) -> tuple[float, float]:
        """Return where a text at `x` begins and ends: it stays within the plot."""
        wide = len(words) * _CHAR
        if x < wide / 2:
            return x, x + wide
        if x > self.width - wide / 2:
            return x - wide, x
        return x - wide / 2, x + wide / 2

    def _label(self, x: float, y: float, words: str) -> Label:
        left, right = self._extent(x, words)
        return Label(x, y, words, "start" if left == x else "end" if right == x else "middle")


def trend_height(value: int, values: Sequence[int]) -> float:
    """Return the height of a run's bar among those of other runs; even the smallest is visible."""
    return max(3.0, 34 * value / max(values)) if value else 2.5
