"""`txbroker top`: the state of an installation, refreshed."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from txbroker.cli.client import ApiClient, client_options
from txbroker.cli.options import SectionedCommand
from txbroker.cli.output import (
    TableColumn,
    duration,
    json_text,
    object_output_option,
    printable,
    show_data,
    shown_columns,
    table,
    width_of,
)
from txbroker.cli.watching import EVERY_MIN_S, EVERY_S, draw_again, draws, write_again

Overview = dict[str, Any]

GROUPS_SHOWN = 15


def _age(row: dict[str, Any], name: str = "oldest_pending_age_s") -> str:
    age = row.get(name)
    return "" if age is None else duration(age)


def _rate(row: dict[str, Any], what: str) -> str:
    rate = row["rates"][f"{what}_per_s"]
    return f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def _unreachable(row: dict[str, Any]) -> str:
    since_ms = row.get("unreachable_since_ms")
    if since_ms is None:
        return ""
    return f"for {duration(time.time() - since_ms / 1000)}: {row.get('unreachable_why', '')}"


def _count(name: str, rank: int = 1) -> TableColumn:
    def shown(row: dict[str, Any]) -> str:
        return "?" if row.get(name) is None else f"{row[name]:,}"

    return TableColumn(name.upper(), shown, rank=rank)


GROUPS = (
    TableColumn("GROUP", lambda row: row["group"], keep=True),
    _count("pending"),
    _count("parked"),
    TableColumn("OLDEST", _age, rank=1),
    TableColumn("CONNECTED", lambda row: row["sessions"]),
    TableColumn("UNREACHABLE", _unreachable, text=True),
)
PARTITIONS = (
    TableColumn("HALF", lambda row: row["partition"], keep=True),
    TableColumn("OWNER", lambda row: row["owner"].partition("://")[2], rank=3),
    TableColumn("STATE", lambda row: row["state"], rank=0),
    _count("pending"),
    _count("parked"),
    _count("refused", rank=2),
    _count("committed", rank=3),
    TableColumn("OLDEST", _age, rank=1),
    TableColumn("PREP/S", lambda row: _rate(row, "prepared")),
    TableColumn("DEC/S", lambda row: _rate(row, "decided"), wide=True),
    TableColumn("PROM/S", lambda row: _rate(row, "promoted")),
    TableColumn("WHY", lambda row: row.get("why"), text=True),
)
PROXIES = (
    TableColumn("PROXY", lambda row: row["url"], keep=True),
    TableColumn("STATE", lambda row: _proxy_state(row), rank=1),
    TableColumn("VERSION", lambda row: row.get("version"), rank=4),
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

    Shows rates over the last ten seconds; groups, those that need an operator first; half
    partitions with their owners; proxies. Without a terminal the output is appended; with -o json
    it is one line each time.
    """

    def query() -> Overview:
        return dict(client.get("overview"))

    def lines(overview: Overview) -> list[str]:
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


def _write(overview: Overview, lines: Callable[[Overview], list[str]], output: str) -> None:
    if output == "json":
        click.echo(json_text(overview))
    elif output == "yaml":
        click.echo("---")
        show_data(overview, output)
    else:
        click.echo("\n".join([*lines(overview), ""]))
    sys.stdout.flush()


def _lines(overview: Overview, where: str, wide: bool) -> Iterator[str]:
    partitions, groups = overview["partitions"], overview["groups"]
    unsure = "" if overview["complete"] else "at least "
    yield f"txbroker at {printable(where)}, {_of(overview['proxies'])} ready"
    counts = [
        f"{name} {unsure}{sum(row.get(name) or 0 for row in partitions):,}"
        for name in ("pending", "parked", "refused", "committed")
    ]
    yield from _flowing("now", [*counts, *_oldest(partitions)])
    rates = {
        what: sum(row["rates"][f"{what}_per_s"] for row in partitions)
        for what in ("prepared", "decided", "promoted")
    }
    yield from _flowing("rates", [f"{what} {rate:,.1f}/s" for what, rate in rates.items()])
    refused = overview["refused_topics"].items()
    if refused:
        yield from _flowing("refused", [f"by {printable(at)} {count:,}" for at, count in refused])
    yield ""
    shown_groups = groups if wide else groups[:GROUPS_SHOWN]
    left_out: dict[str, None] = {}
    for rows, columns in (
        (shown_groups, GROUPS),
        (partitions, PARTITIONS),
        (overview["proxies"], PROXIES),
    ):
        fitted = table(
            rows, shown_columns(columns, "wide" if wide else "table"), sys.stdout, fit=not wide
        )
        left_out |= dict.fromkeys(fitted.left_out)
        yield from fitted.lines
        left = len(groups) - len(shown_groups) + overview["groups_left_off"]
        if rows is shown_groups and left:
            yield f"… and {left:,} more groups"
        if rows:
            yield ""
    if left_out:
        yield f"Left out on this narrow terminal: {', '.join(left_out)}. -o wide shows them."


def _flowing(label: str, parts: Iterable[str]) -> Iterator[str]:
    """Yield a line of parts, or several where the terminal is narrow."""
    line, indent = f"{label:<7}", " " * 7
    for part in parts:
        if line.strip() not in ("", label) and len(line) + 2 + len(part) > width_of(sys.stdout):
            yield line
            line = indent
        line = f"{line}{'  ' if line[7:] else ' '}{part}"
    yield line


def _of(proxies: list[dict[str, Any]]) -> str:
    ready = sum(bool(proxy["ready"]) for proxy in proxies)
    return f"{ready} of {len(proxies)} {'proxy' if len(proxies) == 1 else 'proxies'}"


def _oldest(partitions: list[dict[str, Any]]) -> list[str]:
    ages = [row["oldest_pending_age_s"] for row in partitions if row.get("oldest_pending_age_s")]
    return [f"oldest pending {duration(max(ages))}"] if ages else []


def _proxy_state(row: dict[str, Any]) -> str:
    if not row["reached"]:
        return "no answer"
    return "ready" if row["ready"] else "not ready"
