"""The plots of the audit's report: SVG without scripts, drawn from counts.

Colours come from the page's classes, so that plots follow a light or dark page and a printer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from txbroker.spark.figures import Percentile, count, duration, percentile
from txbroker.spark.html import Html, join, tag
from txbroker.spark.schema import Histogram

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 8, 44, 40
_TICK_APART = 52
"""How far apart labels of the axis must be to be read."""

_CHAR = 6.6
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
) -> Html:
    """Return a histogram with buckets of the same width, and its percentiles.

    Args:
        histogram: what was counted.
        window: the buckets to show.
        title: for those who do not see it.
        unit: what was counted.
        marks: percentiles to point out.
    """
    found = [(mark, percentile(histogram, mark.share)) for mark in marks]
    counts = histogram.counts[window.first : window.last]
    highest = max(counts, default=0)
    bar_width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(counts))
    floor = _HEIGHT - _BOTTOM
    bars = [
        _bar(histogram, bucket, number, number / max(1, highest), bar_width, window)
        for bucket, number in enumerate(counts, window.first)
        if number
    ]
    said = ", ".join(f"{mark.name} {value}" for mark, value in found if value)
    return described(
        title,
        plural_of(sum(histogram.counts), unit) + (f"; {said}" if said else ""),
        tag("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_TOP, y2=_TOP),
        *bars,
        tag("line", class_="axis", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=floor, y2=floor),
        *_ticks(histogram, window, bar_width),
        _label(_LEFT, _TOP - 5, f"{count(highest)}", "muted"),
        *(
            _mark(mark, value, row, window, bar_width)
            for row, (mark, value) in enumerate(found)
            if value
        ),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        class_="plot",
    )


def plural_of(value: int, unit: str) -> str:
    """Return a number with what was counted, in the plural but for one."""
    return f"{count(value)} {unit.removesuffix('s') if value == 1 else unit}"


def _bar(
    histogram: Histogram, bucket: int, number: int, share: float, width: float, window: Window
) -> Html:
    height = max(1.5, share * (_HEIGHT - _TOP - _BOTTOM))
    return tag(
        "rect",
        class_="bar over" if bucket >= len(histogram.bounds) else "bar",
        x=f"{_LEFT + (bucket - window.first) * width + 0.75:.2f}",
        y=f"{_HEIGHT - _BOTTOM - height:.2f}",
        width=f"{max(1.0, width - 1.5):.2f}",
        height=f"{height:.2f}",
        rx=1.5,
    )


def _ticks(histogram: Histogram, window: Window, width: float) -> list[Html]:
    """Label bounds between bars, as many as have room, the last one always."""
    floor = _HEIGHT - _BOTTOM
    edges = [
        (_LEFT + (bucket + 1 - window.first) * width, duration(histogram.bounds[bucket]))
        for bucket in range(window.first, min(window.last, len(histogram.bounds)))
    ]
    if window.first == 0:
        edges.insert(0, (float(_LEFT), "0"))
    elif window.first <= len(histogram.bounds):
        edges.insert(0, (float(_LEFT), duration(histogram.bounds[window.first - 1])))
    step = max(1, -(-_TICK_APART // max(1, int(width))))
    drawn: list[Html] = []
    for place, words in edges[::step]:
        drawn.append(tag("line", class_="axis", x1=f"{place:.2f}", x2=f"{place:.2f}",
                         y1=floor, y2=floor + 4))  # fmt: skip
        drawn.append(_label(place, floor + 17, words, "tick"))
    if window.last > len(histogram.bounds):
        drawn.append(_label(_WIDTH - _RIGHT, floor + 32, "and more", "muted", "end"))
    return drawn


def _mark(mark: Mark, value: Percentile, row: int, window: Window, width: float) -> Html:
    place = _LEFT + (value.place - window.first) * width
    words = f"{mark.name} {value}"
    y = 13 + row * 15
    toward_end = place + 5 + len(words) * _CHAR < _WIDTH
    return tag(
        "g",
        tag("line", x1=f"{place:.2f}", x2=f"{place:.2f}", y1=y - 9, y2=_HEIGHT - _BOTTOM),
        _label(place + (5 if toward_end else -5), y, words, "", "start" if toward_end else "end"),
        class_=f"mark {mark.name}",
    )


def _label(x: float, y: float, words: str, class_: str, anchor: str | None = None) -> Html:
    """Return a text; one near the plot's sides begins or ends there."""
    half = len(words) * _CHAR / 2
    if anchor is None:
        anchor = "start" if x < half else "end" if x > _WIDTH - half else "middle"
        x = max(0.0, min(float(_WIDTH), x))
    return tag("text", words, x=f"{x:.2f}", y=f"{y:.2f}", text_anchor=anchor, class_=class_ or None)


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
