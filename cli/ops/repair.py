"""`txbroker repair`: find records that stop half partitions, and skip them."""

import asyncio
from pathlib import Path
from typing import Any

import click

from txbroker.cli.client import who
from txbroker.cli.main import SuggestingGroup
from txbroker.cli.ops.topics import with_door
from txbroker.cli.options import confirm, reason_option, require_terminal, yes_option
from txbroker.cli.output import (
    Row,
    TableColumn,
    object_output_option,
    output_option,
    show_data,
    show_rows,
)
from txbroker.cli.run import CommandFailed
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.kafka.door.repair import SET_ASIDE, StoppingRecord

COLUMNS = (
    TableColumn("RECORD", keep=True),
    TableColumn("CODE"),
    TableColumn("WHY", text=True),
    TableColumn("SKIPPING LOSES", lambda row: row["loses"], text=True),
    TableColumn("PRODUCER", wide=True),
    TableColumn("KEY", wide=True),
    TableColumn("VALUE", wide=True, text=True),
)
_NONE = "No record stops a partition."
_SHOWN_BYTES = 200
"""Bytes shown of a key and of a value."""


@click.group("repair", cls=SuggestingGroup)
def command() -> None:
    """Find records that stop half partitions, and skip them.

    Reads and writes Kafka directly, so it works with and without running proxies.
    """


@command.command("show")
@setting_options((*KAFKA_SETTINGS, "topic_prefix"))
@output_option
def show_command(config: Path | None, output: str, **options: Any) -> None:
    """Show each record that stops a partition, its producer, and the loss if it is skipped.

    Also shows the newest records of other clients in the checkpoint and parked topics, with the
    code `set_aside`: these stop nothing. Changes nothing.
    """
    settings = settings_from(config, options)
    records = asyncio.run(with_door(settings, lambda door: door.repair().find(set_aside=True)))
    show_rows([_row(record) for record in records], COLUMNS, output, _NONE)
    if records and all(record.stop.code == SET_ASIDE for record in records):
        click.echo(_NONE, err=True)


@command.command("skip")
@click.argument("record", metavar="TOPIC/PARTITION@OFFSET")
@reason_option(required=True)
@click.option("--dry-run", is_flag=True, help="Show the record; change nothing.")
@setting_options((*KAFKA_SETTINGS, "topic_prefix"))
@yes_option
@object_output_option
def skip_command(
    config: Path | None,
    output: str,
    record: str,
    reason: str,
    dry_run: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Make a partition's owner skip one record that stops it, as `show` names it.

    The decision, for exactly this record, is kept in the checkpoint topic with its author and
    reason. A stopped partition resumes within seconds.
    """
    if not dry_run:
        require_terminal(yes)
    settings = settings_from(config, options)
    stopping = asyncio.run(with_door(settings, lambda door: door.repair().find()))
    chosen = next((found for found in stopping if found.at == record), None)
    if chosen is None:
        names = ", ".join(found.at for found in stopping)
        raise CommandFailed(
            f"{record} stops no partition. {f'These records do: {names}.' if names else _NONE}"
        )
    row = {**_row(chosen), "by": who(), "reason": reason}
    show_data(row, "yaml" if output in ("table", "wide") else output)
    if dry_run:
        click.echo("Nothing was changed.", err=True)
        return
    confirm(f"Skip {record} permanently?", yes)
    skip = with_door(settings, lambda door: door.repair().skip(chosen, row["by"], reason))
    asyncio.run(skip)
    click.echo(f"{record} is skipped.", err=True)


def _row(found: StoppingRecord) -> Row:
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
    """Return the first bytes as text; other bytes are escaped."""
    if data is None:
        return None
    shown = data[:_SHOWN_BYTES].decode(errors="backslashreplace")
    more = len(data) - _SHOWN_BYTES
    return f"{shown} … {more} more bytes" if more > 0 else shown
