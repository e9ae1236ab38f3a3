"""`txbroker repair`: what stops half partitions, and passing over a record that does."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.asking import confirm, require_asking, yes_option
from txbroker.cli.client import who
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import Row, TableColumn, output_option, show_data, show_rows
from txbroker.cli.run import CommandFailed
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.config.settings import Settings
from txbroker.kafka.client.wiring import door_from
from txbroker.kafka.tools.repair import SET_ASIDE, Found, Repair

T = TypeVar("T")

COLUMNS = (
    TableColumn("RECORD", lambda row: row["record"]),
    TableColumn("CODE", lambda row: row["code"]),
    TableColumn("WHY", lambda row: row["why"]),
    TableColumn("PASSING OVER LOSES", lambda row: row["loses"]),
    TableColumn("PRODUCER", lambda row: row["producer"], wide=True),
    TableColumn("KEY", lambda row: row["key"], wide=True),
    TableColumn("VALUE", lambda row: row["value"], wide=True),
)
_NONE = "No record stops a partition."
_SHOWN_BYTES = 200
"""Of a key and of a value."""


@click.group("repair", cls=SuggestingGroup)
def command() -> None:
    """Find records that stop half partitions, and pass them over.

    Reads and writes Kafka itself, so it works while proxies run and while none does.
    """


@command.command("show")
@setting_options((*KAFKA_SETTINGS, "topic_prefix"))
@output_option
def show_command(config: Path | None, output: str, **options: Any) -> None:
    """Show each record that stops a partition, who wrote it, and what passing it over loses.

    Also the newest records that other clients wrote into the checkpoint and parked topics, with the
    code `set_aside`: these stop nothing. Changes nothing.
    """
    settings = settings_from(config, options)
    found = asyncio.run(_with_repair(settings, lambda it: it.find(set_aside=True)))
    show_rows([_row(one) for one in found], COLUMNS, output, _NONE)
    if found and all(one.stop.code == SET_ASIDE for one in found):
        click.echo(_NONE, err=True)


@command.command("skip")
@click.argument("record", metavar="TOPIC/PARTITION@OFFSET")
@click.option(
    "--reason",
    required=True,
    metavar="TEXT",
    envvar="TXBROKER_REASON",
    help="Why; recorded with the decision. [env: TXBROKER_REASON]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be passed over; change nothing.")
@setting_options((*KAFKA_SETTINGS, "topic_prefix"))
@yes_option
@output_option
def skip_command(
    config: Path | None,
    output: str,
    record: str,
    reason: str,
    dry_run: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Have the owner of a partition pass over one record that stops it, as `show` names it.

    The decision is kept in the checkpoint topic, with who made it and why, and is about exactly
    this record. A partition that has stopped begins again within seconds.
    """
    if not dry_run:
        require_asking(yes)
    settings = settings_from(config, options)
    found = asyncio.run(_with_repair(settings, lambda it: it.find()))
    one = next((each for each in found if each.at == record), None)
    if one is None:
        there = ", ".join(each.at for each in found)
        raise CommandFailed(
            f"{record} stops no partition. {f'There are {there}.' if there else _NONE}"
        )
    row = {**_row(one), "by": who(), "reason": reason}
    show_data(row, "yaml" if output in ("table", "wide") else output)
    if dry_run:
        click.echo("Nothing was changed.", err=True)
        return
    confirm(f"Pass over {record} for good?", yes)
    asyncio.run(_with_repair(settings, lambda it: it.skip(one, row["by"], reason)))
    click.echo(f"{record} is passed over.", err=True)


async def _with_repair(settings: Settings, act: Callable[[Repair], Awaitable[T]]) -> T:
    door = door_from(settings)
    try:
        return await act(door.repair())
    finally:
        await door.close()


def _row(found: Found) -> Row:
    record = found.stop.record
    return {
        "record": found.at,
        "code": found.stop.code,
        "why": found.stop.why,
        "loses": found.stop.loses,
        "producer": record.producer if record.producer >= 0 else None,
        "timestamp_ms": record.timestamp_ms,
        "key": _preview(record.key),
        "value": _preview(record.value),
    }


def _preview(data: bytes | None) -> str | None:
    """Return the begin of bytes as text; what is no text is escaped."""
    if data is None:
        return None
    shown = data[:_SHOWN_BYTES].decode(errors="backslashreplace")
    more = len(data) - _SHOWN_BYTES
    return f"{shown} … {more} bytes more" if more > 0 else shown
