"""Charts of the last hour as lines for inline SVG, and lists of what happened.

A chart is drawn in a box of 1000 by 100 that is stretched to the page, so it has no text: title,
values and times are HTML around it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from txbroker.contract.service import History, HistoryEvent, HistoryPoint
from txbroker.proxy.console.formatting import age, clock_of, number, rate

WIDTH, HEIGHT = 1000, 100
SPANS = {"5m": 300, "15m": 900, "1h": 3600}
"""The parts of the last hour that charts show, seconds."""
SPAN_WORDS = {"5m": "5 minutes", "15m": "15 minutes", "1h": "hour"}
EVENTS_SHOWN_MAX = 20
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
class _Series:
    name: str
    value: Value
    style: str
    faint: bool = False


def charts_of(history: History, begin_ms: int, end_ms: int) -> list[Chart]:
    """Return the charts of a history: of all groups or of one, which has no latencies."""
    step_s = history.step_s

    def per_second(count: Callable[[HistoryPoint], int]) -> Value:
        # Nothing is known of a half partition whose owner Kafka does not answer.
        return lambda point: count(point) / step_s or (None if point.pending is None else 0.0)

    drawn = [
        _chart("flow", "Transactions a second", history, (begin_ms, end_ms), rate, [
            _Series("prepared", per_second(lambda p: p.prepared), "c1"),
            _Series("decided", per_second(lambda p: p.decided), "c2"),
            _Series("promoted", per_second(lambda p: p.promoted), "c3"),
        ]),
        _chart("waiting", "Pending and parked", history, (begin_ms, end_ms), number, [
            _Series("pending", lambda p: p.pending, "c1"),
            _Series("parked", lambda p: p.parked, "c2"),
        ]),
        _chart("oldest", "Oldest pending", history, (begin_ms, end_ms), age, [
            _Series(
                "age",
                lambda p: None if p.pending is None else p.oldest_pending_age_s or 0.0,
                "c1",
            ),
        ]),
        _chart("checks", "Checks a second", history, (begin_ms, end_ms), rate, [
            _Series("decided", per_second(lambda p: p.checks.commit + p.checks.rollback), "c1"),
            _Series("no decision", per_second(lambda p: p.checks.undecided), "c2"),
            _Series(
                "not yet, not reached",
                per_second(lambda p: p.checks.later + p.checks.unreached),
                "c3",
            ),
        ]),
    ]  # fmt: skip
    known = [name for name in ("prepare", "decision", "promotion") if _measured(history, name)]
    if known:
        lines = [
            line
            for name, style in zip(known, _STYLES, strict=False)
            for line in (
                _Series(f"{name} p99", _latency(name, "p99_s"), style),
                _Series(f"{name} p50", _latency(name, "p50_s"), style, faint=True),
            )
        ]
        span = (begin_ms, end_ms)
        drawn.append(_chart("latency", "Latency", history, span, _milliseconds, lines))
    return drawn


def events_of(history: History, begin_ms: int) -> list[HistoryEvent]:
    """Return the newest events since a time, newest first."""
    since = [event for event in history.events if event.at_ms >= begin_ms]
    return since[: -EVENTS_SHOWN_MAX - 1 : -1]


def _measured(history: History, name: str) -> bool:
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


def _chart(
    id: str,
    title: str,
    history: History,
    span: tuple[int, int],
    shown: Callable[[float | None], str],
    series: Sequence[_Series],
) -> Chart:
    begin_ms, end_ms = span
    points = [point for point in history.points if point.at_ms >= begin_ms]
    values = [[one.value(point) for point in points] for one in series]
    top = _rounded(max((v for row in values for v in row if v is not None), default=0.0))
    lines, words = [], []
    for one, row in zip(series, values, strict=True):
        pairs = list(zip((point.at_ms for point in points), row, strict=True))
        path = " ".join(_path(pairs, span, top, history.step_s * 1000))
        last = shown(row[-1]) if row else "–"
        lines.append(ChartLine(one.name, one.style, path, last, one.faint))
        most = max((v for v in row if v is not None), default=None)
        words.append(f"{one.name}: now {last}, at most {shown(most)}")
    marks = [
        ChartMark(_x(event.at_ms, span), event.kind, f"{clock_of(event.at_ms)} {event.text}")
        for event in history.events
        if event.kind in MARKED and begin_ms <= event.at_ms <= end_ms
    ]
    text = f"From {clock_of(begin_ms)} to {clock_of(end_ms)} UTC. {'; '.join(words)}."
    return Chart(id, title, shown(top), text, lines, marks[-100:], begin_ms, end_ms)


def _path(
    pairs: Sequence[tuple[int, float | None]], span: tuple[int, int], top: float, step_ms: int
) -> Iterator[str]:
    """Yield the commands of a path, which is broken where nothing is known."""
    before_ms: int | None = None
    for at_ms, value in pairs:
        if value is None:
            before_ms = None
            continue
        # A value is that of a whole step.
        x, y = _x(at_ms + step_ms, span), HEIGHT - value / top * HEIGHT
        if before_ms is None or at_ms - before_ms > 2 * step_ms:
            yield f"M{_x(at_ms, span):g} {y:.1f}"
        yield f"L{x:g} {y:.1f}"
        before_ms = at_ms


def _x(at_ms: int, span: tuple[int, int]) -> float:
    begin_ms, end_ms = span
    return round(min(1.0, max(0.0, (at_ms - begin_ms) / (end_ms - begin_ms))) * WIDTH, 1)


def _rounded(value: float) -> float:
    """Return a round number that is not less, above 0."""
    if value <= 0:
        return 1.0
    size = 1.0
    while size > value:
        size /= 10
    while size * 10 < value:
        size *= 10
    return next(size * factor for factor in _ROUND if size * factor >= value)
