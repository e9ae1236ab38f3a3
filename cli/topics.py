"""`txbroker topics`: what txbroker's own topics are, and what they should be."""

import asyncio
from pathlib import Path
from typing import Any

import click

from txbroker.cli.asking import confirm, require_asking, yes_option
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import Column, Row, output_option, show_rows
from txbroker.cli.setting_options import TOPIC_SETTINGS, setting_options, settings_from
from txbroker.config import Settings
from txbroker.kafka.topics import Plan
from txbroker.kafka.wiring import door_from

COLUMNS = (
    Column("ACTION", lambda row: row["action"]),
    Column("TOPIC", lambda row: row["topic"]),
    Column("WHAT", lambda row: row["what"]),
    Column("SETTINGS", lambda row: row.get("settings"), wide=True),
)


@click.group("topics", cls=SuggestingGroup)
def command() -> None:
    """Plan and make txbroker's own topics."""


@command.command("plan")
@setting_options(TOPIC_SETTINGS)
@output_option
def plan_command(config: Path | None, output: str, **options: Any) -> None:
    """Show what `apply` would do; change nothing."""
    plan = asyncio.run(_plan(settings_from(config, options)))
    show_rows(_rows(plan), COLUMNS, output, "All topics are as they should be.")
    _remark(plan)


@command.command("apply")
@setting_options(TOPIC_SETTINGS)
@yes_option
@output_option
def apply_command(config: Path | None, output: str, yes: bool, **options: Any) -> None:
    """Create the topics that are missing and mend settings that differ."""
    require_asking(yes)
    settings = settings_from(config, options)
    plan = asyncio.run(_plan(settings))
    if plan.empty:
        show_rows([], COLUMNS, output, "All topics are as they should be.")
    elif yes:
        asyncio.run(_apply(settings, plan))
        show_rows(_rows(plan), COLUMNS, output, "")
    else:
        show_rows(_rows(plan), COLUMNS, output, "")
        confirm(f"Do this on {settings.kafka}?", yes)
        asyncio.run(_apply(settings, plan))
        click.echo("Done.", err=True)
    _remark(plan)


async def _plan(settings: Settings) -> Plan:
    door = door_from(settings)
    try:
        return await door.plan()
    finally:
        await door.close()


async def _apply(settings: Settings, plan: Plan) -> None:
    door = door_from(settings)
    try:
        await door.plan()  # makes the brokers known
        await door.apply(plan)
    finally:
        await door.close()


def _rows(plan: Plan) -> list[Row]:
    created: list[Row] = [
        {
            "action": "create",
            "topic": topic.name,
            "what": f"{topic.partitions} partitions, {topic.replication} copies",
            "settings": " ".join(f"{name}={value}" for name, value in topic.configs.items()),
        }
        for topic in plan.create
    ]
    changed: list[Row] = [
        {
            "action": "change",
            "topic": change.topic,
            "what": f"{change.name}: {change.found} to {change.wanted}",
        }
        for change in plan.change
    ]
    return created + changed


def _remark(plan: Plan) -> None:
    for remark in plan.remarks:
        click.echo(f"Note: {remark}", err=True)
