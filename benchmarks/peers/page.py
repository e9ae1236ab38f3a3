"""The page of a comparison, in Markdown."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

Data = dict[str, Any]
_LINE = 105
_QUIET = 0.05
"""Maximum CPU share of other processes on a quiet machine."""


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
    for ours, other in product(("txbroker", "txbroker-keyless"), ("rocketmq", "ceiling")):
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
