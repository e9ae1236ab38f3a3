"""The plots of the audit's report: SVG without scripts, drawn from counts.

Colours come from the page's classes, so that plots follow a light or dark page and a printer.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from txbroker.spark.report.figures import Percentile, count, duration, percentile
from txbroker.spark.report.html import Html, join, tag
from txbroker.spark.schema import Histogram

_TOP, _FLOOR, _SIDE = 44, 142, 8
_TICK_APART = 46
"""How far apart labels of the axis must be to be read."""

_CHAR = 6.9
"""How wide a character of a label is, about."""


class Window(NamedTuple):
    """The buckets that a plot shows: from `first` up to, not including, `last`."""

    first: int
    last: int


class Mark(NamedTuple):
    """A percentile to point out."""

    name: str
    share: float


MARKS = (Mark("p50", 0.5), Mark("p99", 0.99))


def common_window(histograms: Sequence[Histogram]) -> Window:
    """Return the buckets that hold anything in any of these, which have the same bounds: plots
    beside each other must have one axis."""
    held = [
        bucket
        for histogram in histograms
        for bucket, number in enumerate(histogram.counts)
        if number
    ]
    if not held:
        return Window(0, 1)
    longest = max(len(histogram.counts) for histogram in histograms)
    return Window(max(0, min(held) - 1), min(longest, max(held) + 2))


def described(title: str, text: str, *shapes: Html | None, **attributes: object) -> Html:
    """Return an SVG with a title and a description for those who do not see it."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", text),
        *shapes,
        role="img",
        aria_label=f"{title}. {text}",
        **attributes,
    )


def distribution(
    histogram: Histogram,
    window: Window,
    title: str,
    *,
    unit: str = "transactions",
    marks: Sequence[Mark] = MARKS,
    width: int = 260,
) -> Html:
    """Return a histogram with buckets of the same width, and its percentiles.

    Args:
        histogram: what was counted.
        window: the buckets to show.
        title: for those who do not see it.
        unit: what was counted.
        marks: percentiles to point out.
        width: about how wide it will be shown, pixels, so that its text is of the usual size.
    """
    found = [(mark, percentile(histogram, mark.share)) for mark in marks]
    said = ", ".join(f"{mark.name} {value}" for mark, value in found if value)
    plot = _Plot(histogram, window, width)
    return described(
        title,
        plural_of(sum(histogram.counts), unit) + (f"; {said}" if said else ""),
        plot.line("grid", _SIDE, width - _SIDE, _TOP, _TOP),
        *plot.bars(),
        plot.line("axis", _SIDE, width - _SIDE, _FLOOR, _FLOOR),
        *plot.ticks(),
        plot.label(_SIDE, _TOP - 4, f"max {count(max(histogram.counts, default=0))}", "muted"),
        *(plot.mark(mark, value, row) for row, (mark, value) in enumerate(found) if value),
        viewBox=f"0 0 {width} {plot.height}",
        class_="plot",
        style=f"max-width: {1.4 * width:.0f}px",
    )


def plural_of(value: int, unit: str) -> str:
    """Return a number with what was counted, in the plural but for one."""
    return f"{count(value)} {unit.removesuffix('s') if value == 1 else unit}"


class _Plot:
    """The shapes of one distribution."""

    def __init__(self, histogram: Histogram, window: Window, width: int) -> None:
        self._histogram = histogram
        self._window = window
        self._width = width
        self._bar = (width - 2 * _SIDE) / max(1, window.last - window.first)

    def _x(self, place: float) -> float:
        """Where so many buckets lie to the left."""
        return _SIDE + (place - self._window.first) * self._bar

    @property
    def height(self) -> int:
        return _FLOOR + (38 if self._has_more else 23)

    @property
    def _has_more(self) -> bool:
        """Whether the last bucket is shown, which has no bound."""
        return self._window.last > len(self._histogram.bounds)

    def bars(self) -> Iterator[Html]:
        counts, bounds = self._histogram.counts, self._histogram.bounds
        highest = max(counts, default=0)
        for bucket, number in enumerate(counts):
            if not number or not self._window.first <= bucket < self._window.last:
                continue
            height = max(1.5, number / highest * (_FLOOR - _TOP))
            yield tag(
                "rect",
                class_="bar over" if bucket >= len(bounds) else "bar",
                x=f"{self._x(bucket) + 0.5:.2f}",
                y=f"{_FLOOR - height:.2f}",
                width=f"{max(1.0, self._bar - 1):.2f}",
                height=f"{height:.2f}",
                rx=1,
            )

    def ticks(self) -> Iterator[Html]:
        """Label the bounds between bars, as many as have room."""
        bounds, first = self._histogram.bounds, self._window.first
        step = max(1, ceil(_TICK_APART / self._bar))
        free_from = 0.0
        for place in range(first, min(self._window.last, len(bounds)) + 1, step):
            x = self._x(place)
            yield self.line("axis", x, x, _FLOOR, _FLOOR + 4)
            words = "0" if place == 0 else duration(bounds[place - 1])
            # The last one ends at the plot's side, and may have no room there.
            left, right = self._sides(x, words)
            if left >= free_from:
                free_from = right + _CHAR
                yield self.label(x, _FLOOR + 17, words, "tick")
        if self._has_more:
            yield self.label(self._width - _SIDE, _FLOOR + 32, "and more", "tick", "end")

    def mark(self, mark: Mark, value: Percentile, row: int) -> Html:
        """Point out a percentile; each has a row of its own above the bars for its words."""
        x, y = self._x(value.place), 13 + row * 15
        words = f"{mark.name} {value}"
        right = x + 5 + len(words) * _CHAR < self._width
        return tag(
            "g",
            self.line(None, x, x, y - 9, _FLOOR),
            self.label(x + (5 if right else -5), y, words, None, "start" if right else "end"),
            class_=f"mark {mark.name}",
        )

    def _sides(self, x: float, words: str) -> tuple[float, float]:
        """Return where a text at `x` begins and ends: it stays within the plot."""
        wide = len(words) * _CHAR
        if x < wide / 2:
            return x, x + wide
        if x > self._width - wide / 2:
            return x - wide, x
        return x - wide / 2, x + wide / 2

    def line(self, class_: str | None, x1: float, x2: float, y1: float, y2: float) -> Html:
        return tag("line", class_=class_, x1=f"{x1:.2f}", x2=f"{x2:.2f}", y1=y1, y2=y2)

    def label(
        self, x: float, y: float, words: str, class_: str | None, anchor: str | None = None
    ) -> Html:
        """Return a text; one near the plot's sides begins or ends there."""
        if anchor is None:
            left, right = self._sides(x, words)
            anchor = "start" if left == x else "end" if right == x else None
        return tag(
            "text",
            words,
            x=f"{x:.2f}",
            y=f"{y:.2f}",
            text_anchor=anchor or "middle",
            class_=class_,
        )


class Column(NamedTuple):
    """One run in a row of the history."""

    value: int
    newest: bool


def history_row(title: str, columns: Sequence[Column], *, good_when_zero: bool = True) -> Html:
    """Return the bars of one kind over the runs, the oldest first. It stretches to any width and
    holds no text: numbers and dates stand beside and below it.

    Args:
        title: for those who do not see it.
        columns: one for each run.
        good_when_zero: whether a run without any is shown as a good one.
    """
    highest = max((column.value for column in columns), default=0)
    shapes = []
    for place, column in enumerate(columns):
        height = 0.0 if not column.value else max(3.0, 34 * column.value / highest)
        zero = "ok" if good_when_zero else "none"
        shapes.append(
            tag(
                "rect",
                class_=f"{zero if not column.value else 'bad'}{' newest' if column.newest else ''}",
                x=f"{place * 10 + 1.5}",
                y=f"{36 - (height or 2.5):.2f}",
                width=7,
                height=f"{height or 2.5:.2f}",
            )
        )
    values = ", ".join(count(column.value) for column in columns)
    return described(
        title,
        f"By run, the oldest first: {values}",
        join(*shapes),
        viewBox=f"0 0 {max(1, len(columns)) * 10} 37",
        preserveAspectRatio="none",
        class_="row",
    )
