"""`txbroker top`: the state of an installation, refreshed."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from txbroker.cli.client import ApiClient, client_options
from txbroker.cli.output import (
    TableColumn,
    duration,
    output_option,
    printable,
    show_data,
    shown_columns,
    table,
)
from txbroker.cli.watching import EVERY_MIN_S, EVERY_S, draw_again, write_again

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


def _count(name: str) -> TableColumn:
    def shown(row: dict[str, Any]) -> str:
        return "?" if row.get(name) is None else f"{row[name]:,}"

    return TableColumn(name.upper(), shown, keep=True)


GROUPS = (
    TableColumn("GROUP", lambda row: row["group"]),
    _count("pending"),
    _count("parked"),
    TableColumn("OLDEST", _age, keep=True),
    TableColumn("CONNECTED", lambda row: row["sessions"], keep=True),
    TableColumn("UNREACHABLE", _unreachable),
)
PARTITIONS = (
    TableColumn("HALF", lambda row: row["partition"], keep=True),
    TableColumn("OWNER", lambda row: row["owner"].partition("://")[2]),
    TableColumn("STATE", lambda row: row["state"] + (f": {row['why']}" if row.get("why") else "")),
    _count("pending"),
    _count("parked"),
    _count("refused"),
    _count("committed"),
    TableColumn("OLDEST", _age, keep=True),
    TableColumn("PREP/S", lambda row: _rate(row, "prepared"), keep=True),
    TableColumn("DEC/S", lambda row: _rate(row, "decided"), wide=True, keep=True),
    TableColumn("PROM/S", lambda row: _rate(row, "promoted"), keep=True),
)
PROXIES = (
    TableColumn("PROXY", lambda row: row["url"]),
    TableColumn("STATE", lambda row: _proxy_state(row)),
    TableColumn("VERSION", lambda row: row.get("version")),
    TableColumn("PARTITIONS", lambda row: len(row["partitions"])),
    TableColumn("PROBLEMS", lambda row: "; ".join(row["problems"]) or row.get("why")),
)


@click.command("top")
@click.option("--once", is_flag=True, help="Show the state once.")
@click.option(
    "--every-s",
    type=click.FloatRange(min=EVERY_MIN_S),
    default=EVERY_S,
    metavar="SECONDS",
    help=f"Interval. [default: {EVERY_S:g}]",
)
@output_option
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
    elif output in ("table", "wide") and sys.stdout.isatty():
        draw_again(query, lines, every_s)
    else:
        write_again(query, lambda overview: _write(overview, lines, output), every_s)


def _write(overview: Overview, lines: Callable[[Overview], list[str]], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(overview, ensure_ascii=False))
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
    yield (
        "now     "
        + "  ".join(
            f"{name} {unsure}{sum(row.get(name) or 0 for row in partitions):,}"
            for name in ("pending", "parked", "refused", "committed")
        )
        + _oldest(partitions)
    )
    yield "rates   " + "  ".join(
        f"{what} {sum(row['rates'][f'{what}_per_s'] for row in partitions):,.1f}/s"
        for what in ("prepared", "decided", "promoted")
    )
    refused = overview["refused_topics"]
    if refused:
        shown = ", ".join(f"{printable(topic)} {count:,}" for topic, count in refused.items())
        yield f"refused by  {shown}"
    yield ""
    shown_groups = groups if wide else groups[:GROUPS_SHOWN]
    if shown_groups:
        yield from table(shown_groups, GROUPS, sys.stdout)
        left = len(groups) - len(shown_groups) + overview["groups_left_off"]
        if left:
            yield f"… and {left:,} more groups"
        yield ""
    columns = shown_columns(PARTITIONS, "wide" if wide else "table")
    yield from table(partitions, columns, sys.stdout)
    yield ""
    yield from table(overview["proxies"], PROXIES, sys.stdout)


def _of(proxies: list[dict[str, Any]]) -> str:
    ready = sum(bool(proxy["ready"]) for proxy in proxies)
    return f"{ready} of {len(proxies)} {'proxy' if len(proxies) == 1 else 'proxies'}"


def _oldest(partitions: list[dict[str, Any]]) -> str:
    ages = [row["oldest_pending_age_s"] for row in partitions if row.get("oldest_pending_age_s")]
    return f"  oldest pending {duration(max(ages))}" if ages else ""


def _proxy_state(row: dict[str, Any]) -> str:
    if not row["reached"]:
        return "no answer"
    return "ready" if row["ready"] else "not ready"
