"""`txbroker top`: how all stands, drawn anew again and again."""

import json
import sys
import time
from collections.abc import Iterator
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
from txbroker.cli.watching import EVERY_MIN_S, EVERY_S, draw_again, look_again

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
@click.option("--once", is_flag=True, help="Show it once, and end.")
@click.option(
    "--every-s",
    type=click.FloatRange(min=EVERY_MIN_S),
    default=EVERY_S,
    metavar="SECONDS",
    help=f"How often to look. [default: {EVERY_S:g}]",
)
@output_option
@client_options
def command(client: ApiClient, output: str, once: bool, every_s: float) -> None:
    """Show how all stands, again and again until Ctrl-C.

    Rates over the last ten seconds; groups, those that need somebody first; half partitions with
    their owners; proxies. Where stdout is no terminal, each look is written below the one before;
    with -o json each is one line.
    """

    def look() -> Overview:
        return dict(client.get("overview"))

    def lines(found: Overview) -> list[str]:
        return list(_lines(found, str(client), output == "wide"))

    if once:
        found = look()
        if output in ("json", "yaml"):
            show_data(found, output)
        else:
            click.echo("\n".join(lines(found)))
    elif output in ("table", "wide") and sys.stdout.isatty():
        draw_again(look, lines, every_s)
    else:
        look_again(look, lambda found: _write(found, lines, output), every_s)


def _write(found: Overview, lines: Any, output: str) -> None:
    if output == "json":
        click.echo(json.dumps(found, ensure_ascii=False))
    elif output == "yaml":
        click.echo("---")
        show_data(found, output)
    else:
        click.echo("\n".join([*lines(found), ""]))
    sys.stdout.flush()


def _lines(found: Overview, where: str, wide: bool) -> Iterator[str]:
    partitions, groups = found["partitions"], found["groups"]
    unsure = "" if found["complete"] else "at least "
    yield f"txbroker at {printable(where)}, {_of(found['proxies'])} ready"
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
    refused = found["refused_topics"]
    if refused:
        shown = ", ".join(f"{printable(topic)} {count:,}" for topic, count in refused.items())
        yield f"refused by  {shown}"
    yield ""
    shown_groups = groups if wide else groups[:GROUPS_SHOWN]
    if shown_groups:
        yield from table(shown_groups, GROUPS, sys.stdout)
        left = len(groups) - len(shown_groups) + found["groups_left_off"]
        if left:
            yield f"… and {left:,} more groups"
        yield ""
    columns = shown_columns(PARTITIONS, "wide" if wide else "table")
    yield from table(partitions, columns, sys.stdout)
    yield ""
    yield from table(found["proxies"], PROXIES, sys.stdout)


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
