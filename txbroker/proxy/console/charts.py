"""Charts of the last hour as lines for inline SVG, and lists of what happened.

A chart is drawn in a box of 1000 by 100 that is stretched to the page, so it has no text: title,
values and times are HTML around it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from txbroker.contract.service import History, HistoryEvent, HistoryPoint
from txbroker.proxy.console.formatting import age, clock_of, number, rate

WIDTH, HEIGHT = 1000, 100
SPANS = {"5m": 300, "15m": 900, "1h": 3600}
"""The parts of the last hour that charts show, seconds."""
EVENTS_SHOWN_MAX, MARKS_MAX = 20, 100
MARKED = frozenset({"start", "takeover", "handover", "problem", "solved"})
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_STYLES = ("c1", "c2", "c3")

Value = Callable[[HistoryPoint], float | None]


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        path: of the SVG; "" without a value.
        last: the newest value in words.
        faint: a median beside its percentile.
    """

    name: str
    style: str
    path: str
    last: str
    faint: bool = False


@dataclass(frozen=True)
class ChartMark:
    """An event at its place."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        top: the value at the upper edge, in words; the lower edge is 0.
        text: what the chart shows, for who cannot see it.
    """

    id: str
    title: str
    top: str
    text: str
    lines: Sequence[ChartLine]
    marks: Sequence[ChartMark]
    begin_ms: int
    end_ms: int


@dataclass(frozen=True)
class _Curve:
    name: str
    value: Value
    style: str
    faint: bool = False


def charts_of(history: History, begin_ms: int, end_ms: int) -> list[Chart]:
    """Return the charts of a history; its latencies are those of all groups."""
    sheet = _Sheet(history, begin_ms, end_ms)
    step_s = history.step_s

    def per_second(count: Callable[[HistoryPoint], int]) -> Value:
        # Nothing is known of a half partition whose owner Kafka does not answer.
        return lambda point: count(point) / step_s or (None if point.pending is None else 0.0)

    def oldest_s(point: HistoryPoint) -> float | None:
        return None if point.pending is None else point.oldest_pending_age_s or 0.0

    drawn = [
        sheet.chart("flow", "Transactions a second", rate, [
            _Curve("prepared", per_second(attrgetter("prepared")), "c1"),
            _Curve("decided", per_second(attrgetter("decided")), "c2"),
            _Curve("promoted", per_second(attrgetter("promoted")), "c3"),
        ]),
        sheet.chart("waiting", "Pending and parked", number, [
            _Curve("pending", attrgetter("pending"), "c1"),
            _Curve("parked", attrgetter("parked"), "c2"),
        ]),
        sheet.chart("oldest", "Oldest pending", age, [_Curve("age", oldest_s, "c1")]),
        sheet.chart("checks", "Checks a second", rate, [
            _Curve("decided", per_second(lambda p: p.checks.commit + p.checks.rollback), "c1"),
            _Curve("no decision", per_second(attrgetter("checks.undecided")), "c2"),
            _Curve(
                "not yet, not reached",
                per_second(lambda p: p.checks.later + p.checks.unreached),
                "c3",
            ),
        ]),
    ]  # fmt: skip
    known = [name for name in ("prepare", "decision", "promotion") if _has(history, name)]
    if known:
        lines = [
            line
            for name, style in zip(known, _STYLES, strict=False)
            for line in (
                _Curve(f"{name} p99", _latency(name, "p99_s"), style),
                _Curve(f"{name} p50", _latency(name, "p50_s"), style, faint=True),
            )
        ]
        drawn.append(sheet.chart("latency", "Latency, all groups", _milliseconds, lines))
    return drawn


def events_of(history: History, begin_ms: int) -> list[HistoryEvent]:
    """Return the newest events since a time, newest first."""
    since = [event for event in history.events if event.at_ms >= begin_ms]
    return since[: -EVENTS_SHOWN_MAX - 1 : -1]


def _has(history: History, name: str) -> bool:
    return any(name in point.latency for point in history.points)


def _latency(name: str, field: str) -> Value:
    def value(point: HistoryPoint) -> float | None:
        latency = point.latency.get(name)
        return None if latency is None else float(getattr(latency, field))

    return value


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{rate(seconds * 1000)}\N{NO-BREAK SPACE}ms" if seconds < 1 else age(seconds)


class _Sheet:
    """The horizontal part of all charts: the same points, times and events.

    Attributes of a point: where its step begins and ends, and whether the line is broken before it.
    """

    def __init__(self, history: History, begin_ms: int, end_ms: int) -> None:
        self._begin_ms, self._end_ms = begin_ms, end_ms
        self._points = [point for point in history.points if point.at_ms >= begin_ms]
        step_ms, before_ms = history.step_s * 1000, 0
        self._places: list[tuple[str, str, bool]] = []
        for point in self._points:
            at_ms = point.at_ms
            broken = at_ms - before_ms > 2 * step_ms
            self._places.append((f"{self._x(at_ms):g}", f"{self._x(at_ms + step_ms):g}", broken))
            before_ms = at_ms
        self._marks = [
            ChartMark(self._x(event.at_ms), event.kind, f"{clock_of(event.at_ms)} {event.text}")
            for event in history.events
            if event.kind in MARKED and begin_ms <= event.at_ms <= end_ms
        ][-MARKS_MAX:]

    def _x(self, at_ms: int) -> float:
        part = (at_ms - self._begin_ms) / (self._end_ms - self._begin_ms)
        return round(min(1.0, max(0.0, part)) * WIDTH, 1)

    def chart(
        self,
        id: str,
        title: str,
        shown: Callable[[float | None], str],
        series: Sequence[_Curve],
    ) -> Chart:
        """Return a chart of these series, whose values are shown by `shown`."""
        values = [[one.value(point) for point in self._points] for one in series]
        most = [max((v for v in row if v is not None), default=None) for row in values]
        top = _round_up(max((value for value in most if value is not None), default=0.0))
        lines, words = [], []
        for one, row, peak in zip(series, values, most, strict=True):
            last = shown(row[-1]) if row else "–"
            path = "".join(self._path(row, top))
            lines.append(ChartLine(one.name, one.style, path, last, one.faint))
            words.append(f"{one.name}: now {last}, at most {shown(peak)}")
        begin, end = clock_of(self._begin_ms), clock_of(self._end_ms)
        text = f"From {begin} to {end} UTC. {'; '.join(words)}."
        return Chart(id, title, shown(top), text, lines, self._marks, self._begin_ms, self._end_ms)

    def _path(self, row: Sequence[float | None], top: float) -> Iterator[str]:
        """Yield the commands of a path, which is broken where nothing is known. A value is that of
        a whole step, so a single one is a short line."""
        scale, known = HEIGHT / top, False
        for value, (begin, end, broken) in zip(row, self._places, strict=True):
            if value is None:
                known = False
                continue
            y = f"{HEIGHT - value * scale:.1f}"
            yield f"L{end} {y}" if known and not broken else f"M{begin} {y}L{end} {y}"
            known = True


def _round_up(value: float) -> float:
    """Return a round number that is not less, above 0."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * factor for factor in _ROUND if size * factor >= value)
