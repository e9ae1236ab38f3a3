"""`txbroker capture`: changes of rows become messages, without a change of business code."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import FILE, confirm, require_terminal, yes_option
from txbroker.cli.output import Row, TableColumn, output_option, show_rows
from txbroker.cli.relay.running import Running, run_relay, running_options, security_of
from txbroker.cli.run import CommandFailed, usage_errors
from txbroker.cli.setting_options import settings_from
from txbroker.config.settings import Settings
from txbroker.proxy.observe.logging import configure_logging
from txbroker.relay.capture.plan import Capture, open_capture
from txbroker.relay.capture.setup import Step, StepState, refusals

COLUMNS = (
    TableColumn("STATE"),
    TableColumn("STEP", keep=True, text=True),
    TableColumn("SQL", wide=True, text=True),
)
_file = click.argument("file", type=FILE)


@click.group("capture", cls=SuggestingGroup)
def command() -> None:
    """Capture changes of rows as messages, from PostgreSQL, MariaDB or SQLite.

    FILE is a TOML file that maps tables to topics; TXBROKER_DATABASE_URL names the database if the
    file does not.
    """


# --- prepare ---------------------------------------------------------------------------------


@command.command("plan")
@_file
@output_option
def plan_command(file: Path, output: str) -> None:
    """Show what the database lacks for a capture; change nothing.

    Exits with 1 if something must be done first that `apply` cannot do.
    """
    steps = asyncio.run(_open(file).plan())
    _show(steps, output)
    _refuse(steps)


@command.command("apply")
@_file
@yes_option
@output_option
def apply_command(file: Path, output: str, yes: bool) -> None:
    """Prepare the database: from then on, no change is lost.

    PostgreSQL gets a publication and a replication slot, which holds the write-ahead log until the
    capture runs; MariaDB a row with the position where the capture begins; SQLite triggers.
    """
    require_terminal(yes)
    capture = _open(file)
    steps = asyncio.run(capture.plan())
    _show(steps, output)
    _refuse(steps)
    if not any(each.state is StepState.TO_DO for each in steps):
        click.echo("There is nothing to do.", err=True)
        return
    confirm(f"Take these steps in {capture.database.name}?", yes)
    _refuse(asyncio.run(capture.apply()))
    click.echo("Done.", err=True)


@command.command("remove")
@_file
@yes_option
@output_option
def remove_command(file: Path, output: str, yes: bool) -> None:
    """Remove from the database what `apply` created; later changes are not captured."""
    require_terminal(yes)
    capture = _open(file)
    confirm(f"Remove capture {capture.mapping.name} from {capture.database.name}?", yes)
    steps = asyncio.run(capture.remove())
    _show(steps, output)
    _refuse(steps)
    click.echo(f"What stays: {capture.left}.", err=True)


def _open(file: Path) -> Capture:
    with usage_errors():
        return open_capture(str(file))


def _show(steps: Sequence[Step], output: str) -> None:
    rows: list[Row] = [
        {"state": each.state.value, "step": each.text, "sql": each.sql} for each in steps
    ]
    show_rows(rows, COLUMNS, output, "There is nothing to do.")


def _refuse(steps: Sequence[Step]) -> None:
    if refused := refusals(steps):
        raise CommandFailed(f"nothing was changed: {'; '.join(refused)}")


# --- run -------------------------------------------------------------------------------------


@command.command("run")
@_file
@click.option(
    "--on-gap",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Where the database no longer has the changes that follow the position, or they cannot be "
    "read: stop, or go on without them.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="ID",
    help="Leave out the change or transaction with this id, as an error names it. Repeatable.",
)
@running_options
def run_command(
    file: Path,
    config: Path | None,
    until_drained: bool,
    metrics_listen: str | None,
    on_gap: Literal["stop", "skip"],
    skip: tuple[str, ...],
    take_position: bool,
    **options: Any,
) -> None:
    """Move changes to Kafka, each transaction whole and once, until SIGINT or SIGTERM.

    `kafka` and `topic_prefix` of the mapping file count where no option names them.
    """
    capture = _open(file)
    mapping = capture.mapping
    options["kafka"] = options["kafka"] or mapping.kafka or None
    options["topic_prefix"] = options["topic_prefix"] or mapping.topic_prefix
    settings = settings_from(config, options)
    configure_logging(settings.log_format, settings.log_level)

    async def start() -> Running:
        if capture.is_outbox:
            return await _start_outbox(capture, settings, take_position=take_position)
        from txbroker.relay.capture.running import RunningCapture

        running = RunningCapture(
            capture,
            settings.kafka,
            topic_prefix=settings.topic_prefix,
            security=security_of(settings),
            take_position=take_position,
            on_gap=on_gap,
            skip=skip,
        )
        await running.start()
        return running

    run_relay(
        start,
        f"capture {mapping.name}",
        until_drained=until_drained,
        metrics_listen=metrics_listen,
    )


async def _start_outbox(capture: Capture, settings: Settings, *, take_position: bool) -> Running:
    """Start the relay of the outbox to which triggers write."""
    from txbroker.relay.capture.triggers import TriggerRelay

    relay = TriggerRelay(
        capture,
        settings.kafka,
        topic_prefix=settings.topic_prefix,
        security=security_of(settings),
        take_position=take_position,
    )
    await relay.start()
    return relay
