"""The page of a comparison, in Markdown, and its plot."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

Data = dict[str, Any]
_LINE = 105
_QUIET = 0.05
"""Maximum CPU share of other processes on a quiet machine."""
_RATIOS = (
    ("txbroker", "rocketmq"),
    ("txbroker", "ceiling"),
    ("txbroker-keyless", "rocketmq"),
    ("txbroker-keyless", "ceiling"),
    ("txbroker-outbox-sqlite", "outbox-sqlite"),
    ("txbroker-outbox-postgres", "outbox-postgres"),
)
"""Peers whose rates are divided."""


def page(data: Data, name: str) -> str:
    """Return the page; its plot is NAME.svg beside it, its data NAME.json."""
    return "\n".join(_lines(data, name)) + "\n"


def _lines(data: Data, name: str) -> Iterator[str]:
    plan = data["plan"]
    rounds = max((f["round"] for f in _figures(data)), default=0)
    yield "<!-- Written by `python -m benchmarks.compare`. -->"
    yield "# Compared with others"
    size, measured_s, warmup_s = plan["size"], plan["duration_s"], plan["warmup_s"]
    several = rounds > 1
    yield textwrap.fill(
        f"Messages of {size:,} bytes, one per transaction unless noted. Each figure is "
        f"{f'the median of {rounds} rounds' if several else 'of one round'} of {measured_s:g} s "
        f"after {warmup_s:g} s of warm-up{', with the least and the most in brackets' * several}. "
        "In every round each peer ran once, alone, with client and servers on this one machine:",
        width=_LINE,
    )
    yield ""
    yield f"- {data['machine']}; {data['at']}"
    yield f"- `{data['command']}`"
    busy = [share for share in data["busy_before"] if share is not None]
    if busy and max(busy) > _QUIET:
        yield (
            f"- **The machine was not quiet**: before the peers' turns, others took "
            f"{statistics.median(busy):.0%} of it, and up to {max(busy):.0%}"
        )
    yield ""
    yield f"![Transactions a second, by peer]({name}.svg)"
    yield ""
    yield "## Complete transactions a second"
    yield "Acknowledged and, but for RocketMQ's benchmark and the ceiling, seen to be delivered."
    yield ""
    yield from _table(data, _rate)
    yield ""
    yield "## Until a consumer has the message, ms (p50 / p99)"
    yield "From the call that decides; where nothing is decided, from the write."
    yield ""
    yield from _table(data, _visible)
    yield ""
    yield "## Until the decision is acknowledged, ms (p50 / p99)"
    yield "Of the whole transaction, as its client waits for it."
    yield ""
    yield from _table(data, _acked)
    yield from _ratios(data)
    yield ""
    yield "## What a transaction is, of each"
    yield "They do not promise the same:"
    yield ""
    for peer in data["peers"].values():
        yield f"- **{peer['title']}**: {peer['counts']}. {peer.get('version', '')}".rstrip()
    missing = [peer for peer in data["peers"].values() if "missing" in peer]
    if missing:
        yield ""
        yield "## Not measured"
        for peer in missing:
            yield f"- **{peer['title']}**: {' '.join(peer['missing'].split())}"


def _figures(data: Data) -> Iterator[Data]:
    for peer in data["peers"].values():
        yield from peer["figures"]


def _table(data: Data, cell: Callable[[Sequence[Data]], str]) -> Iterator[str]:
    in_flight = data["plan"]["in_flight"]
    yield "| |" + "".join(f" {number} in flight |" for number in in_flight)
    yield "| --- |" + " ---: |" * len(in_flight)
    for peer in data["peers"].values():
        cells = [
            cell([f for f in peer["figures"] if f["in_flight"] == number]) for number in in_flight
        ]
        if any(cells):
            yield f"| {peer['title']} |" + "".join(f" {text or '–'} |" for text in cells)


def rates(figures: Sequence[Data]) -> list[float]:
    """Return the rates of figures that have one."""
    return [figure["per_s"] for figure in figures if figure["per_s"] is not None]


def _rate(figures: Sequence[Data]) -> str:
    found = rates(figures)
    if not found:
        return ""
    middle = f"{statistics.median(found):,.0f}"
    return middle if len(found) == 1 else f"{middle} ({min(found):,.0f}–{max(found):,.0f})"


def _visible(figures: Sequence[Data]) -> str:
    return _times(figures, "visible_ms")


def _acked(figures: Sequence[Data]) -> str:
    return _times(figures, "acked_ms")


def _times(figures: Sequence[Data], name: str) -> str:
    found = [figure[name] for figure in figures if figure[name] is not None]
    if not found:
        return ""
    p50, p99 = (statistics.median(one[mark] for one in found) for mark in ("p50", "p99"))
    return f"{p50:,.1f} / {p99:,.1f}"


def _ratios(data: Data) -> Iterator[str]:
    """Yield txbroker's rates as multiples of others', round by round, so that a slow spell of the
    machine counts for both."""
    peers = data["peers"]
    rows = []
    for ours, other in _RATIOS:
        if ours not in peers or other not in peers:
            continue
        figures = peers[ours]["figures"], peers[other]["figures"]
        cells = [_ratio(*figures, number) for number in data["plan"]["in_flight"]]
        if any(cells):
            name = f"{peers[ours]['title']} ÷ {peers[other]['title']}"
            rows.append(f"| {name} |" + "".join(f" {text or '–'} |" for text in cells))
    if rows:
        yield ""
        yield "## txbroker as a multiple of others"
        yield "| |" + "".join(f" {number} in flight |" for number in data["plan"]["in_flight"])
        yield "| --- |" + " ---: |" * len(data["plan"]["in_flight"])
        yield from rows


def _ratio(ours: Sequence[Data], theirs: Sequence[Data], in_flight: int) -> str:
    def by_round(figures: Sequence[Data]) -> dict[int, float]:
        return {
            figure["round"]: figure["per_s"]
            for figure in figures
            if figure["in_flight"] == in_flight and figure["per_s"]
        }

    mine, other = by_round(ours), by_round(theirs)
    found = [mine[number] / other[number] for number in mine if number in other]
    if not found:
        return ""
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"


# --- the plot: bars of transactions a second, as SVG without scripts ---

_WIDTH, _LEFT, _RIGHT = 860, 290, 80
_BAR, _GAP, _TOP, _BOTTOM = 14, 16, 56, 30
_LEAST = 10.0
_COLOURS = ("#7a9cc6", "#2f6db3", "#123f73", "#0b2545")
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.muted { fill: #57606a } .grid { stroke: #d0d7de } .ours { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .muted { fill: #9198a1 } .grid { stroke: #3d444d } }
"""


def plot(data: dict[str, Any]) -> str:
    """Return the plot; its axis is logarithmic, as the peers differ by orders of magnitude."""
    in_flight = data["plan"]["in_flight"]
    rows = [
        (peer["title"], name.startswith("txbroker"), values)
        for name, peer in data["peers"].items()
        if any(values := [_median_rate(peer, number) for number in in_flight])
    ]
    most = max((value for _, _, values in rows for value in values if value), default=_LEAST * 10)
    top = 10 ** math.ceil(math.log10(max(most, _LEAST * 10)))
    height = _TOP + len(rows) * (len(in_flight) * _BAR + _GAP) + _BOTTOM
    described = "; ".join(f"{title}: {_described(values, in_flight)}" for title, _, values in rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>Transactions a second, by peer and transactions in flight</title>"
            f"<desc>{escape(described)}</desc><style>{_STYLE}</style>",
            *_legend(in_flight),
            *_grid(top, height),
            *_bars(rows, top, len(in_flight)),
            "</svg>",
            "",
        ]
    )


def _median_rate(peer: dict[str, Any], in_flight: int) -> float | None:
    found = rates([figure for figure in peer["figures"] if figure["in_flight"] == in_flight])
    return statistics.median(found) if found else None


def _described(values: list[float | None], in_flight: list[int]) -> str:
    return ", ".join(
        f"{value:,.0f} at {number}"
        for value, number in zip(values, in_flight, strict=True)
        if value is not None
    )


def _x(value: float, top: float) -> float:
    share = math.log(max(value, _LEAST) / _LEAST) / math.log(top / _LEAST)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _legend(in_flight: list[int]) -> Iterator[str]:
    for place, number in enumerate(in_flight):
        x = _LEFT + place * 120
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{_colour(place)}"/>'
        yield f'<text x="{x + 18}" y="21">{number} in flight</text>'


def _grid(top: float, height: int) -> Iterator[str]:
    value = _LEAST
    while value <= top:
        x = _x(value, top)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{height - _BOTTOM}"'
        yield f'<line class="grid" {ends}/>'
        yield (
            f'<text class="muted" x="{x:.1f}" y="{height - _BOTTOM + 18}" text-anchor="middle">'
            f"{value:,.0f}</text>"
        )
        value *= 10
    place = f'x="{_WIDTH - 8}" y="{_TOP - 16}" text-anchor="end"'
    yield f'<text class="muted" {place}>a second, log</text>'


def _bars(
    rows: list[tuple[str, bool, list[float | None]]], top: float, count: int
) -> Iterator[str]:
    y = _TOP
    for title, ours, values in rows:
        middle = y + count * _BAR / 2 + 4
        weight = "ours" if ours else "other"
        yield (
            f'<text class="{weight}" x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end">'
            f"{escape(title)}</text>"
        )
        for place, value in enumerate(values):
            if value is not None:
                x = _x(value, top)
                yield (
                    f'<rect x="{_LEFT}" y="{y + 1}" width="{max(1.0, x - _LEFT):.1f}" '
                    f'height="{_BAR - 2}" fill="{_colour(place)}"/>'
                )
                yield f'<text class="muted" x="{x + 5:.1f}" y="{y + _BAR - 3}">{value:,.0f}</text>'
            y += _BAR
        y += _GAP


def _colour(place: int) -> str:
    return _COLOURS[min(place, len(_COLOURS) - 1)]
