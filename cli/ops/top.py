"""`txbroker top`: the state of an installation, refreshed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import msgspec

from txbroker.cli.client import ApiClient, ApiError, client_options
from txbroker.cli.options import SectionedCommand
from txbroker.cli.output import (
    Row,
    TableColumn,
    clock,
    duration,
    json_text,
    object_output_option,
    printable,
    show_data,
    shown_columns,
    since,
    table,
    width_of,
)
from txbroker.cli.run import is_utf8
from txbroker.cli.watching import EVERY_MIN_S, EVERY_S, draw_again, draws, write_again
from txbroker.contract.service import CheckCounts, Overview
from txbroker.diagnosis.table import problems_of

GROUPS_SHOWN = 15
PAST_S = (900, 300)
"""What sparklines show, seconds: the second if the proxies have run no longer."""
BARS = ("▁▂▃▄▅▆▇█", "_.:-=+*#")
"""The heights of a sparkline, and those of a terminal without UTF-8."""
BARS_MAX = 30


def _age(row: dict[str, Any], name: str = "oldest_pending_age_s") -> str:
    age = row.get(name)
    return "" if age is None else duration(age)


def _rate(row: dict[str, Any], what: str) -> str:
    return _shown_rate(row["rates"][f"{what}_per_s"]) if _current(row) else ""


def _shown_rate(rate: float) -> str:
    return f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def _current(row: dict[str, Any]) -> bool:
    """Return whether the counts of a half partition are those of now."""
    return row.get("pending") is not None and row.get("as_of_ms") is None


def _unreachable(row: dict[str, Any]) -> str:
    since_ms = row.get("unreachable_since_ms")
    if since_ms is None:
        return ""
    return f"unreachable for {since(since_ms)}: {row.get('unreachable_why', '')}"


def _count(name: str, rank: int = 1) -> TableColumn:
    return TableColumn(
        name.upper(), lambda row: _least(row.get(name), row.get("partial", False)), rank=rank
    )


def _least(value: int | None, partial: bool) -> str:
    """Return a count; with `partial`, when other parts of it are unknown, as a lower bound."""
    if value is None or (partial and not value):
        return ""
    return f"{value:,}+" if partial else f"{value:,}"


def _as_of(row: dict[str, Any]) -> str:
    return clock(row.get("as_of_ms"))[11:19]


def _connected(row: dict[str, Any]) -> str:
    return "URL" if not row["sessions"] and row.get("check_url") else str(row["sessions"])


def _failing(row: dict[str, Any]) -> str:
    """Return the last answer of a group whose checks fail by the bounds of the alert."""
    counts = row.get("checks", {}).get("counts", {})
    if not counts or not msgspec.convert(counts, CheckCounts).failing:
        return ""
    undecided = counts["unknown"] + counts["unclear"]
    last = row["checks"].get("undecided") or {}
    return f"{undecided:,} checks bring no decision: {last.get('answer', '')}"


def _trouble(row: dict[str, Any]) -> str:
    return "; ".join(filter(None, (_unreachable(row), _failing(row))))


GROUPS = (
    TableColumn("GROUP", keep=True),
    TableColumn("AS OF", _as_of, rank=0),
    _count("pending"),
    _count("parked"),
    TableColumn("OLDEST", _age, rank=1),
    TableColumn("CONNECTED", _connected),
    TableColumn("TROUBLE", _trouble, text=True),
)
PARTITIONS = (
    TableColumn("HALF", lambda row: row["partition"], keep=True),
    TableColumn("OWNER", lambda row: row["owner"].partition("://")[2], rank=3),
    TableColumn("STATE", rank=0),
    TableColumn("AS OF", _as_of, rank=0),
    _count("pending"),
    _count("parked"),
    _count("refused", rank=2),
    _count("committed", rank=3),
    TableColumn("OLDEST", _age, rank=1),
    TableColumn("PREP/S", lambda row: _rate(row, "prepared")),
    TableColumn("DEC/S", lambda row: _rate(row, "decided"), wide=True),
    TableColumn("PROM/S", lambda row: _rate(row, "promoted")),
    TableColumn("WHY", text=True),
)
PROXIES = (
    TableColumn("PROXY", lambda row: row["url"], keep=True),
    TableColumn("STATE", lambda row: _proxy_state(row), rank=1),
    TableColumn("VERSION", rank=4),
    TableColumn("PARTITIONS", lambda row: len(row["partitions"]), rank=3),
    TableColumn("PROBLEMS", lambda row: "; ".join(row["problems"]) or row.get("why"), text=True),
)


@click.command("top", cls=SectionedCommand)
@click.option("--once", is_flag=True, help="Show the state once.")
@click.option(
    "--every-s",
    type=click.FloatRange(min=EVERY_MIN_S),
    default=EVERY_S,
    metavar="SECONDS",
    help=f"Interval. [default: {EVERY_S:g}]",
)
@object_output_option
@client_options
def command(client: ApiClient, output: str, once: bool, every_s: float) -> None:
    """Show the state of an installation, refreshed until Ctrl-C.

    Shows rates over the last ten seconds; the names of the alerts whose reason is there; the last
    quarter of an hour as sparklines; groups, those that need an operator first; half partitions
    with their owners; proxies. Without a terminal the output is appended; with -o json it is one
    line each time, without sparklines.
    """

    def query() -> Row:
        overview = dict(client.get("overview"))
        if output in ("table", "wide"):
            overview["past"] = _past(client)
        return overview

    def lines(overview: Row) -> list[str]:
        return list(_lines(overview, str(client), output == "wide"))

    if once:
        overview = query()
        if output in ("json", "yaml"):
            show_data(overview, output)
        else:
            click.echo("\n".join(lines(overview)))
    elif draws(output):
        draw_again(query, lines, every_s)
    else:
        write_again(query, lambda overview: _write(overview, lines, output), every_s)


def _write(overview: Row, lines: Callable[[Row], list[str]], output: str) -> None:
    if output == "json":
        click.echo(json_text(overview))
    elif output == "yaml":
        click.echo("---")
        show_data(overview, output)
    else:
        click.echo("\n".join([*lines(overview), ""]))
    sys.stdout.flush()


def _lines(overview: Row, where: str, wide: bool) -> Iterator[str]:
    partitions, proxies = overview["partitions"], overview["proxies"]
    partial = any(row.get("pending") is None for row in partitions) or not all(
        proxy["reached"] for proxy in proxies
    )
    groups = [{**group, "partial": partial} for group in overview["groups"]]
    yield f"txbroker at {printable(where)}, {_of(proxies)} ready"
    for proxy in proxies:
        if proxy.get("kafka_silent_since_ms") is not None:
            whom = "this proxy" if len(proxies) == 1 else proxy["url"]
            since, why = clock(proxy["kafka_silent_since_ms"])[11:19], proxy.get("kafka_why", "")
            yield f"Kafka has not answered {printable(whom)} since {since} UTC" + (
                f": {printable(why)}" if why else ""
            )
    width = width_of(sys.stdout)
    counts = [
        f"{name} {_sum(partitions, name, partial)}"
        for name in ("pending", "parked", "refused", "committed")
    ]
    yield from _packed("now     ", [*counts, _oldest(partitions), _sums_as_of(partitions)], width)
    rates = [
        f"{what} {_sum_of_rates(partitions, what)}" for what in ("prepared", "decided", "promoted")
    ]
    yield from _packed("rates   ", rates, width)
    yield from _sparklines(overview.get("past") or {}, width)
    refused = overview["refused_topics"]
    if refused:
        shown = [f"by {printable(topic)} {count:,}" for topic, count in refused.items()]
        yield from _packed("refused ", shown, width)
    problems = problems_of(msgspec.convert(overview, Overview))
    trouble = list(dict.fromkeys(words for words, _group in problems))
    if trouble:
        yield from _packed("trouble ", trouble, width)
    yield ""
    shown_groups = groups if wide else groups[:GROUPS_SHOWN]
    left_out: dict[str, None] = {}
    for rows, columns in ((shown_groups, GROUPS), (partitions, PARTITIONS), (proxies, PROXIES)):
        fitting = [one for one in columns if one.title != "AS OF" or any(map(_as_of, rows))]
        named = shown_columns(fitting, "wide" if wide else "table")
        fitted = table(rows, named, sys.stdout, fit=not wide)
        left_out |= dict.fromkeys(fitted.left_out)
        yield from fitted.lines
        left = len(groups) - len(shown_groups) + overview["groups_left_off"]
        if rows is shown_groups and left:
            yield f"… and {left:,} more groups"
        if rows:
            yield ""
    if left_out:
        yield f"Left out on this narrow terminal: {', '.join(left_out)}. -o wide shows them."


def _packed(head: str, parts: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of at most `width` with these parts, the first after `head`."""
    line = head
    for part in filter(None, parts):
        if len(line) > len(head) and len(line) + len(part) > width:
            yield line.rstrip()
            line = " " * len(head)
        line += part + "  "
    yield line.rstrip()


# --- the last quarter of an hour -----------------------------------------------------------------


def _past(client: ApiClient) -> dict[str, Any]:
    """Return the history; nothing if the proxy has none, as an older one."""
    try:
        past = dict(client.get("history", since_s=PAST_S[0]))
        points = past.get("points") or [{"at_ms": 0}]
        if points[-1]["at_ms"] - points[0]["at_ms"] >= PAST_S[1] * 1000:
            return {**past, "span_s": PAST_S[0]}
        return {**client.get("history", since_s=PAST_S[1]), "span_s": PAST_S[1]}
    except ApiError:
        return {}


def _sparklines(past: dict[str, Any], width: int) -> Iterator[str]:
    points = past.get("points", ())
    if not points:
        return
    step_s, span_s = past["step_s"], past["span_s"]
    yield f"the last {span_s // 60} minutes"
    failed = [p["checks"]["unknown"] + p["checks"]["unclear"] for p in points]
    promoted = [p["promoted"] / step_s or (None if p["pending"] is None else 0.0) for p in points]
    oldest = [None if p["pending"] is None else p["oldest_pending_age_s"] or 0.0 for p in points]
    rows: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("promoted", promoted, lambda v: f"{_shown_rate(v)}/s"),
        ("pending", [p["pending"] for p in points], lambda v: f"{v:,.0f}"),
        ("oldest", oldest, duration),
        ("failing", [number / step_s for number in failed], lambda v: f"{_shown_rate(v)}/s"),
    ]
    slots = min(BARS_MAX, max(5, width - 40))
    for name, values, shown in rows:
        known = [value for value in values if value is not None]
        if not known or (name == "failing" and not any(known)):
            continue
        placed = _placed([p["at_ms"] for p in points], values, slots, span_s)
        # The present values are above: the newest step here may be seconds older.
        yield f"{name:<8}  {_bars(placed)}  at most {shown(max(known))}"


def _placed(
    times: list[int], values: list[float | None], slots: int, span_s: int
) -> list[float | None]:
    """Return the greatest value of each part of the time, None where nothing is known."""
    placed: list[float | None] = [None] * slots
    part_ms = span_s * 1000 / slots
    for at_ms, value in zip(times, values, strict=True):
        number = slots - 1 - int((times[-1] - at_ms) / part_ms)
        if number >= 0 and value is not None:
            placed[number] = max(value, placed[number] or 0.0)
    return placed


def _bars(values: list[float | None]) -> str:
    bars = BARS[0] if is_utf8(sys.stdout) else BARS[1]
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    last = len(bars) - 1
    return "".join(" " if value is None else bars[round(value / most * last)] for value in values)


def _sum(partitions: list[dict[str, Any]], name: str, partial: bool) -> str:
    known = [row[name] for row in partitions if row.get(name) is not None]
    total = sum(known) if known else None
    if total is None or (partial and not total):
        return "-"
    return f"at least {total:,}" if partial else f"{total:,}"


def _sums_as_of(partitions: list[dict[str, Any]]) -> str:
    times = [row["as_of_ms"] for row in partitions if row.get("as_of_ms") is not None]
    return f"as of {clock(min(times))[11:19]} UTC" if times else ""


def _sum_of_rates(partitions: list[dict[str, Any]], what: str) -> str:
    """Return the rate of the half partitions whose present is known."""
    rates = [row["rates"][f"{what}_per_s"] for row in partitions if _current(row)]
    if not rates or (len(rates) < len(partitions) and not sum(rates)):
        return "-"
    return ("at least " if len(rates) < len(partitions) else "") + f"{sum(rates):,.1f}/s"


def _of(proxies: list[dict[str, Any]]) -> str:
    ready = sum(bool(proxy["ready"]) for proxy in proxies)
    return f"{ready} of {len(proxies)} {'proxy' if len(proxies) == 1 else 'proxies'}"


def _oldest(partitions: list[dict[str, Any]]) -> str:
    ages = [row["oldest_pending_age_s"] for row in partitions if row.get("oldest_pending_age_s")]
    return f"oldest pending {duration(max(ages))}" if ages else ""


def _proxy_state(row: dict[str, Any]) -> str:
    if not row["reached"]:
        return "no answer"
    return "ready" if row["ready"] else "not ready"
