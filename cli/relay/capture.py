"""`txbroker capture`: changes of rows become messages, without a change of business code."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import FILE, confirm, require_terminal, yes_option
from txbroker.cli.output import Row, TableColumn, output_option, show_rows
from txbroker.cli.proxy.serving import until_signal
from txbroker.cli.run import CommandFailed, run_async, usage_errors
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.config.settings import Settings
from txbroker.databases.sqlite import SQLite
from txbroker.door.consuming import ConsumingDoor
from txbroker.errors import needs
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.proxy.observe.logging import configure_logging
from txbroker.relay.capture.plan import Capture, open_capture
from txbroker.relay.capture.setup import Step, StepState

COLUMNS = (
    TableColumn("STATE"),
    TableColumn("STEP", keep=True, text=True),
    TableColumn("SQL", wide=True, text=True),
)
_DRAIN_S = 1e9
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
    refused = [each.text for each in steps if each.state is StepState.REFUSED]
    if refused:
        raise CommandFailed(f"nothing was changed: {'; '.join(refused)}")


# --- run -------------------------------------------------------------------------------------


@command.command("run")
@_file
@click.option(
    "--until-drained", is_flag=True, help="End when all that is committed now is in Kafka."
)
@click.option(
    "--on-gap",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Where the database no longer has changes that follow the position: stop, or go on "
    "without them.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="ID",
    help="Leave out the change with this id, as an error names it (PostgreSQL). Repeatable.",
)
@setting_options((*KAFKA_SETTINGS, "topic_prefix", "log_format", "log_level"))
def run_command(
    file: Path,
    config: Path | None,
    until_drained: bool,
    on_gap: Literal["stop", "skip"],
    skip: tuple[str, ...],
    **options: Any,
) -> None:
    """Move changes to Kafka, each transaction whole and once, until Ctrl-C or SIGTERM.

    The file's `kafka` and `topic_prefix` hold where no option names them.
    """
    capture = _open(file)
    mapping = capture.mapping
    options["kafka"] = options["kafka"] or mapping.kafka or None
    options["topic_prefix"] = options["topic_prefix"] or mapping.topic_prefix
    settings = settings_from(config, options)
    configure_logging(settings.log_format, settings.log_level)
    if capture.is_outbox:
        work = _run_outbox(capture, settings, until_drained)
    else:
        work = _run(capture, settings, until_drained, on_gap, skip)
    click.echo(
        f"Capture {mapping.name} runs: {capture.database.name} to {settings.kafka}.", err=True
    )
    run_async(until_signal(work))


async def _run(
    capture: Capture,
    settings: Settings,
    until_drained: bool,
    on_gap: Literal["stop", "skip"],
    skip: Sequence[str],
) -> None:
    with needs("relay"):
        from txbroker.relay.capture.running import CaptureRun
        from txbroker.relay.pump import PumpEvents
    source = await capture.source(on_gap=on_gap, skip=skip)
    until = await capture.end() if until_drained else None
    door = _Door(settings).consuming_door()
    try:
        await door.start()
        run = CaptureRun(
            await capture.keyed(),
            source,
            door,
            topic_prefix=settings.topic_prefix,
            events=PumpEvents(),
            until=until,
        )
        await run.run()
    finally:
        await door.close()


async def _run_outbox(capture: Capture, settings: Settings, until_drained: bool) -> None:
    with needs("relay"):
        from txbroker.relay import Outbox, Relay
    database = capture.database
    assert isinstance(database, SQLite)
    to_do = [each.text for each in await capture.plan() if each.state is not StepState.DONE]
    if to_do:
        raise CommandFailed(f"{'; '.join(to_do)}: run `txbroker capture apply` first")
    async with Relay(
        Outbox(database), _Door(settings), topic_prefix=settings.topic_prefix
    ) as relay:
        await (relay.drain(_DRAIN_S) if until_drained else relay.run())


class _Door:
    """Kafka with the login of these settings; see `HasConsumingDoor`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def consuming_door(self) -> ConsumingDoor:
        """Return a door that is not started."""
        return KafkaConsumingDoor.from_access(self._settings, "txbroker-capture")
