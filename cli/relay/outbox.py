"""`txbroker outbox`: create the outbox table; show its rows, decide and retry them."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from txbroker.cli.client import who
from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import (
    MOMENT,
    SectionedCommand,
    confirm,
    limit_option,
    reason_option,
    require_terminal,
    with_options,
    yes_option,
)
from txbroker.cli.output import (
    clock,
    object_output_option,
    output_option,
    printable,
    show_data,
)
from txbroker.cli.relay.outbox_relay import command as relay_command
from txbroker.cli.relay.outbox_rows import (
    TABLES,
    TIMES,
    clock_text,
    counted,
    find_rows,
    in_transaction,
    open_outbox,
    preview,
    show,
)
from txbroker.cli.run import CommandFailed, PartlyDone, usage_errors
from txbroker.core.records import Decision
from txbroker.databases.barrier import TooLate
from txbroker.databases.outbox.operations import WHOLE, Choice, retry
from txbroker.databases.outbox.rows import decide, siblings
from txbroker.databases.outbox.table import MESSAGE_ERROR, STATES, outbox_tables
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.databases.urls import from_url
from txbroker.errors import RequestError

_VARIABLE = "TXBROKER_DATABASE_URL"
_URL = re.compile("(sqlite|postgres|postgresql|mariadb|mysql)://")


class _UrlCommand(SectionedCommand):
    """A command whose first argument is the database's URL, unless the environment has it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        url = os.environ.get(_VARIABLE, "")
        if url and not any(_URL.match(arg) for arg in args):
            args = [url, *args]
        return super().parse_args(ctx, args)


class _UrlGroup(SuggestingGroup):
    command_class = _UrlCommand


@click.group("outbox", cls=_UrlGroup)
def command() -> None:
    """Create the outbox table, deliver its rows; show, decide and retry them.

    URL is sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE or
    mariadb://USER:PASSWORD@HOST/DATABASE. Without it, TXBROKER_DATABASE_URL counts, which keeps a
    password out of the list of processes.
    """


url_argument = click.argument("url", metavar="URL")


@command.command("create")
@url_argument
@click.option(
    "--name", default="", metavar="NAME", help="Of the outbox's relays; a random one by default."
)
@click.option("--dry-run", is_flag=True, help="Print the SQL; do not connect.")
def create_command(url: str, name: str, dry_run: bool) -> None:
    """Create the outbox tables that do not exist."""
    with usage_errors():
        database, tables = from_url(url), outbox_tables(name)
    if dry_run:
        click.echo("".join(f"{sql};\n" for sql in tables.statements(database.dialect)), nl=False)
        return
    database.create(tables)
    database.prepare(tables)
    click.echo(f"{database.name} has an outbox.", err=True)


# --- show ------------------------------------------------------------------------------------


def _choice(function: Any) -> Any:
    return with_options(
        click.option(
            "--state",
            "states",
            multiple=True,
            metavar="STATE",
            help=f"Only rows in this state: {', '.join(STATES)}. Repeatable.",
        ),
        click.option("--topic", "topics", multiple=True, metavar="TOPIC", help="Only this topic."),
        click.option(
            "--older-than",
            "before_ms",
            type=MOMENT,
            metavar="TIME",
            help="Only rows created before: an age such as 10m, or a time.",
        ),
    )(function)


@command.command("list")
@url_argument
@_choice
@limit_option("Show at most this number.", 100)
@output_option
def list_command(
    url: str,
    states: tuple[str, ...],
    topics: tuple[str, ...],
    before_ms: int | None,
    limit: int,
    output: str,
) -> None:
    """List rows, the newest first."""
    rows = find_rows(open_outbox(url), Choice((), states, topics, before_ms), limit + 1)
    show(rows[:limit], output, "There are no such rows.")
    if len(rows) > limit:
        click.echo(f"There are more rows than {limit:,}: --limit shows them.", err=True)


@command.command("show")
@url_argument
@click.argument("id")
@object_output_option
def show_command(url: str, id: str, output: str) -> None:
    """Show a row with its message."""
    rows = find_rows(open_outbox(url), Choice((id,)), 1, WHOLE)
    if not rows:
        raise CommandFailed(
            f"there is no row {id}: it was purged, or `txbroker outbox list` shows its id"
        )
    if output in ("json", "yaml"):
        show_data(rows[0], output)
        return
    for name, value in rows[0].items():
        if value not in (None, ""):
            text = clock_text(value) if name in TIMES and value else str(value)
            click.echo(f"{name:<15} {printable(text)}")


# --- change ----------------------------------------------------------------------------------


@command.command("decide")
@url_argument
@click.argument("id")
@click.argument("decision", type=click.Choice(["commit", "rollback"]))
@reason_option(required=True)
@yes_option
@output_option
def decide_command(url: str, id: str, decision: str, reason: str, yes: bool, output: str) -> None:
    """Commit or roll back a row that is undecided, with those that were prepared together with it.

    For rows in the state UNKNOWN, and those that checks have given up.
    """
    require_terminal(yes)
    database = open_outbox(url)
    with _refusals():
        prepared = in_transaction(database, siblings(database.dialect, id))
    rows = find_rows(database, Choice(prepared.ids), len(prepared.ids))
    preview(rows, yes)
    what = "Commit" if decision == "commit" else "Roll back"
    confirm(f"{what} {counted(len(rows))}?", yes)
    cause = f"decided by {who()}: {reason}"
    steps = decide(database.dialect, prepared, Decision(decision), cause=cause)
    with _refusals():
        in_transaction(database, steps)
    show(find_rows(database, Choice(prepared.ids), len(prepared.ids)), output, "")
    done = "committed: the relay delivers them" if decision == "commit" else "rolled back"
    click.echo(f"{counted(len(rows))} {done}.", err=True)


@command.command("retry")
@url_argument
@click.argument("ids", nargs=-1, metavar="[ID]…")
@click.option("--all", "all_", is_flag=True, help="All rows that Kafka did not take.")
@reason_option(required=True)
@yes_option
def retry_command(url: str, ids: tuple[str, ...], all_: bool, reason: str, yes: bool) -> None:
    """Let the relay deliver rows in the state MESSAGE_ERROR again.

    They keep their place, but later rows of their key may have been delivered already. A
    `timeout_at` that has passed no longer counts.
    """
    if bool(ids) == all_:
        raise click.UsageError("give ids, or --all")
    require_terminal(yes)
    database = open_outbox(url)
    chosen = find_rows(database, Choice(ids, (MESSAGE_ERROR,)), 10_000)
    undecided = [row["id"] for row in chosen if row["check_attempts"]]
    if undecided and not all_:
        raise CommandFailed(
            f"row {undecided[0]} is undecided: `txbroker outbox decide` commits it or rolls it back"
        )
    missing = set(ids) - {row["id"] for row in chosen}
    if missing:
        raise CommandFailed(
            f"row {min(missing)} is not in the state {MESSAGE_ERROR}: `txbroker outbox list "
            f"--state {MESSAGE_ERROR}` lists those rows"
        )
    chosen = [row for row in chosen if not row["check_attempts"]]
    preview(chosen, yes)
    if chosen:
        confirm(f"Deliver {'all such rows' if all_ else counted(len(chosen))} again?", yes)
    cause = f"retried by {who()}: {reason}"
    count = in_transaction(database, retry(database.dialect, ids, cause))
    if count < len(ids):
        raise PartlyDone(f"{count} of {counted(len(ids))}: the others were changed meanwhile")
    click.echo(f"{counted(count)} to be delivered again.", err=True)


@command.command("purge")
@url_argument
@click.option(
    "--older-than",
    "before_ms",
    type=MOMENT,
    required=True,
    metavar="TIME",
    help="Rows finished before: an age such as 7d, or a time.",
)
@yes_option
def purge_command(url: str, before_ms: int, yes: bool) -> None:
    """Delete finished rows: GLOBAL_COMMIT and LOCAL_ROLLBACK.

    A relay does so, too, after its `keep_s`.
    """
    require_terminal(yes)
    database = open_outbox(url)
    confirm(f"Delete rows that were finished before {clock(before_ms)}?", yes)
    keep_s = max(0.0, time.time() - before_ms / 1000)
    with database.explained(tables=TABLES):
        count = database.apart(WaitingRows(database.dialect).purge_all(keep_s))
    click.echo(f"{counted(count)} deleted.", err=True)


command.add_command(relay_command)


# --- shared ----------------------------------------------------------------------------------


@contextmanager
def _refusals() -> Iterator[None]:
    """Report a change that is not possible as a failure of the command."""
    try:
        yield
    except (RequestError, TooLate) as error:
        raise CommandFailed(str(error)) from None
