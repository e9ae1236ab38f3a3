"""Rows of an outbox as `txbroker outbox` shows them."""

import sys
from collections.abc import Sequence
from typing import TypeVar

import click

from txbroker.cli.output import Row, TableColumn, clock, show_rows, shown_columns, since, table
from txbroker.cli.run import usage_errors
from txbroker.databases.database import Database, steps_in_transaction
from txbroker.databases.outbox import operations
from txbroker.databases.outbox.operations import LISTED, Choice
from txbroker.databases.outbox.table import outbox_tables
from txbroker.databases.steps import Steps
from txbroker.databases.urls import from_url

T = TypeVar("T")
TABLES = outbox_tables()
_PREVIEWED = 20
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
    TableColumn("NEXT", lambda row: clock_text(row["next_at"]), wide=True),
    TableColumn("TIMEOUT", lambda row: clock_text(row["timeout_at"]), wide=True),
    TableColumn("CHANGED", lambda row: clock_text(row["changed_at"]), wide=True),
)
TIMES = ("timeout_at", "next_at", "created_at", "changed_at")


def open_outbox(url: str) -> Database:
    """Return a database whose outbox tables are checked."""
    with usage_errors():
        database = from_url(url)
    database.prepare(TABLES)
    return database


def find_rows(
    database: Database, choice: Choice, limit: int, columns: Sequence[str] = LISTED
) -> list[Row]:
    """Return rows as JSON data, the newest first."""
    with database.explained(tables=TABLES):
        found = database.apart(operations.find(choice, limit, columns))
    return [operations.shown(row) for row in found]


def in_transaction(database: Database, steps: Steps[T]) -> T:
    """Execute steps in one transaction; return their result."""
    with database.explained(tables=TABLES):
        session = database.open_apart()
        try:
            return steps_in_transaction(steps, session)
        finally:
            session.close()


def show(rows: Sequence[Row], output: str, empty: str) -> None:
    """Write rows to stdout; without causes and problems where no row has one."""
    columns = [
        column
        for column in _COLUMNS
        if column.title not in ("PROBLEM", "CAUSE") or any(map(column.value, rows))
    ]
    show_rows(rows, columns, output, empty)


def preview(rows: Sequence[Row], yes: bool) -> None:
    """Show what will be changed, unless there is nothing to confirm."""
    if not yes and rows:
        lines = table(rows[:_PREVIEWED], shown_columns(_COLUMNS, "table"), sys.stderr).lines
        click.echo("\n".join(lines), err=True)


def _age(at_ms: object) -> str:
    return since(at_ms) if isinstance(at_ms, int) else str(at_ms)


def clock_text(at_ms: object) -> str:
    """Return a row's time as readable text, "" for none."""
    return clock(at_ms) if isinstance(at_ms, int) and at_ms else str(at_ms or "")


def counted(count: int) -> str:
    """Return a number of rows as text."""
    return f"{count:,} row{'' if count == 1 else 's'}"
