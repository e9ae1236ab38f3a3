"""The plot of a comparison: bars of transactions a second, as SVG without scripts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.peers.page import rates

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
        if any(values := [_rate(peer, number) for number in in_flight])
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


def _rate(peer: dict[str, Any], in_flight: int) -> float | None:
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
