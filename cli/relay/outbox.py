"""`txbroker outbox`: create the outbox table; show its rows, decide and retry them."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
    Row,
    TableColumn,
    clock,
    object_output_option,
    output_option,
    printable,
    show_data,
    show_rows,
    shown_columns,
    since,
    table,
)
from txbroker.cli.relay.outbox_relay import command as relay_command
from txbroker.cli.run import CommandFailed, PartlyDone, usage_errors
from txbroker.core.records import Decision
from txbroker.databases.barrier import TooLate
from txbroker.databases.database import Database, steps_in_transaction
from txbroker.databases.dialect import SQLITE
from txbroker.databases.outbox import operations
from txbroker.databases.outbox.operations import LISTED, WHOLE, Choice
from txbroker.databases.outbox.rows import decide, siblings
from txbroker.databases.outbox.table import MESSAGE_ERROR, OUTBOX, STATES, outbox_tables
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.databases.steps import Steps
from txbroker.databases.urls import from_url
from txbroker.errors import RequestError, needs

T = TypeVar("T")
_VARIABLE = "TXBROKER_DATABASE_URL"
_TABLES = outbox_tables()
_COLUMNS = (
    TableColumn("ID", keep=True),
    TableColumn("STATE", rank=1),
    TableColumn("TOPIC", rank=1),
    TableColumn("KEY", lambda row: row.get("key", row.get("key_base64")), text=True),
    TableColumn("AGE", lambda row: _age(row["created_at"]), rank=1),
    TableColumn("BYTES", rank=3),
    TableColumn("RETRIES", rank=3),
    TableColumn("CHECKS", lambda row: row["check_attempts"], rank=3),
    TableColumn("CAUSE", text=True),
    TableColumn("PROBLEM", text=True),
    TableColumn("POSITION", wide=True),
    TableColumn("UNIT", wide=True),
    TableColumn("ORDER KEY", wide=True),
    TableColumn("SHARD", wide=True),
    TableColumn("NEXT", lambda row: _clock(row["next_at"]), wide=True),
    TableColumn("TIMEOUT", lambda row: _clock(row["timeout_at"]), wide=True),
    TableColumn("CHANGED", lambda row: _clock(row["changed_at"]), wide=True),
)
_TIMES = ("timeout_at", "next_at", "created_at", "changed_at")


class _UrlCommand(SectionedCommand):
    """A command whose first argument is the database's URL, unless the environment has it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        url = os.environ.get(_VARIABLE, "")
        if url and not any("://" in arg for arg in args):
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
    rows = _find(_open(url), Choice((), states, topics, before_ms), limit + 1)
    _show(rows[:limit], output, "There are no such rows.")
    if len(rows) > limit:
        click.echo(f"There are more rows than {limit:,}: --limit shows them.", err=True)


@command.command("show")
@url_argument
@click.argument("id")
@object_output_option
def show_command(url: str, id: str, output: str) -> None:
    """Show a row with its message."""
    rows = _find(_open(url), Choice((id,)), 1, WHOLE)
    if not rows:
        raise CommandFailed(
            f"there is no row {id}: it was purged, or `txbroker outbox list` shows its id"
        )
    if output in ("json", "yaml"):
        show_data(rows[0], output)
        return
    for name, value in rows[0].items():
        if value not in (None, ""):
            text = _clock(value) if name in _TIMES and value else str(value)
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
    database = _open(url)
    with _refusals():
        prepared = _in_transaction(database, siblings(database.dialect, id))
    rows = _find(database, Choice(prepared.ids), len(prepared.ids))
    _preview(rows, yes)
    what = "Commit" if decision == "commit" else "Roll back"
    confirm(f"{what} {_counted(len(rows))}?", yes)
    cause = f"decided by {who()}: {reason}"
    steps = decide(database.dialect, prepared, Decision(decision), cause=cause)
    with _refusals():
        _in_transaction(database, steps)
    _show(_find(database, Choice(prepared.ids), len(prepared.ids)), output, "")
    done = "committed: the relay delivers them" if decision == "commit" else "rolled back"
    click.echo(f"{_counted(len(rows))} {done}.", err=True)


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
    database = _open(url)
    chosen = _find(database, Choice(ids, (MESSAGE_ERROR,)), 10_000)
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
    _preview(chosen, yes)
    if chosen:
        confirm(f"Deliver {'all such rows' if all_ else _counted(len(chosen))} again?", yes)
    cause = f"retried by {who()}: {reason}"
    count = _in_transaction(database, operations.retry(database.dialect, ids, cause))
    if count < len(ids):
        raise PartlyDone(f"{count} of {_counted(len(ids))}: the others were changed meanwhile")
    click.echo(f"{_counted(count)} to be delivered again.", err=True)


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
    database = _open(url)
    confirm(f"Delete rows that were finished before {clock(before_ms)}?", yes)
    keep_s = max(0.0, time.time() - before_ms / 1000)
    with database.explained(tables=_TABLES):
        count = database.apart(WaitingRows(database.dialect).purge(keep_s))
    click.echo(f"{_counted(count)} deleted.", err=True)


command.add_command(relay_command)


# --- shared ----------------------------------------------------------------------------------


def _open(url: str) -> Database:
    """Return a database whose outbox tables are checked."""
    with usage_errors():
        database = from_url(url)
    database.prepare(_TABLES)
    return database


def _find(
    database: Database, choice: Choice, limit: int, columns: Sequence[str] = LISTED
) -> list[Row]:
    """Return rows as JSON data, the newest first."""
    if database.dialect is SQLITE:
        with needs("relay"):
            from sqlite_utils import Database as Tables

        condition, values = choice.condition()
        tables = Tables(database.file)
        try:
            found = list(
                tables[OUTBOX].rows_where(
                    condition,
                    values,
                    order_by="position DESC",
                    select=operations.selected(columns),
                    limit=limit,
                )
            )
        finally:
            tables.close()
    else:
        with database.explained(tables=_TABLES):
            found = database.apart(operations.find(choice, limit, columns))
    return [operations.shown(row) for row in found]


def _in_transaction(database: Database, steps: Steps[T]) -> T:
    with database.explained(tables=_TABLES):
        session = database.open_apart()
        try:
            return steps_in_transaction(steps, session)
        finally:
            session.close()


@contextmanager
def _refusals() -> Iterator[None]:
    """Report a change that is not possible as a failure of the command."""
    try:
        yield
    except (RequestError, TooLate) as error:
        raise CommandFailed(str(error)) from None


def _show(rows: Sequence[Row], output: str, empty: str) -> None:
    columns = [
        column
        for column in _COLUMNS
        if column.title not in ("PROBLEM", "CAUSE") or any(map(column.value, rows))
    ]
    show_rows(rows, columns, output, empty)


def _preview(rows: Sequence[Row], yes: bool) -> None:
    """Show what will be changed, unless there is nothing to confirm."""
    if not yes and rows:
        lines = table(rows[:20], shown_columns(_COLUMNS, "table"), sys.stderr).lines
        click.echo("\n".join(lines), err=True)


def _age(at_ms: object) -> str:
    return since(at_ms) if isinstance(at_ms, int) else str(at_ms)


def _clock(at_ms: object) -> str:
    return clock(at_ms) if isinstance(at_ms, int) and at_ms else str(at_ms or "")


def _counted(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
