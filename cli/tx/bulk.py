"""An action on many transactions: selection, preview, confirmation and report."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from txbroker.cli.asking import conclude, confirm
from txbroker.cli.client import ApiClient, who
from txbroker.cli.output import (
    Row,
    TableColumn,
    clock,
    duration,
    printable,
    show_data,
    show_rows,
    table,
)
from txbroker.cli.run import CommandFailed
from txbroker.cli.tx.executor import BulkAction, BulkExecutor, Item, ItemResult
from txbroker.core.routing import parse_id

SAMPLE = 10
TYPED_FROM = 11
"""From this number on the user types the number, which no accidental key press does."""
GROUPS_SHOWN = 5
ROWS_SHOWN = 20
_PROGRESS_FROM = 20
_IN_A_SENTENCE = {"rollback": "Roll back"}

SAMPLED = (
    TableColumn("ID", lambda row: row["id"], keep=True),
    TableColumn("GROUP", lambda row: row["group"]),
    TableColumn("STATE", lambda row: row["state"], keep=True),
    TableColumn("AGE", lambda row: duration(time.time() - row["prepared_at_ms"] / 1000)),
    TableColumn("TOPICS", lambda row: row["topics"]),
)
STANDING = (
    TableColumn("ID", lambda row: row["id"], keep=True),
    TableColumn("STATE", lambda row: row["state"], keep=True),
    TableColumn("DECISION", lambda row: row.get("decision")),
)
FAILED = (
    TableColumn("ID", lambda row: row["id"], keep=True),
    TableColumn("ERROR", lambda row: row["error"]["code"], keep=True),
    TableColumn("WHY", lambda row: row["error"]["message"]),
)


# --- selection -------------------------------------------------------------------------------


def named(ids: Iterable[str]) -> list[Item]:
    """Return the transactions of these ids, each once, in their order."""
    items = [_from_id(id) for id in ids]
    return list({item.id: item for item in items}.values())


def matching(
    client: ApiClient, action: BulkAction, state: str | None, limit: int | None, **query: Any
) -> list[Item]:
    """Return the transactions that match a filter, oldest first, at most `limit`.

    Raises:
        ApiError: the proxy could not list them completely.
    """
    items: list[Item] = []
    for listed_state in (state,) if state else action.default_states:
        rows = client.transactions(limit, state=listed_state, **query)
        items += [from_row(row) for row in rows]
    items.sort(key=lambda item: (item.prepared_at_ms, item.half_offset, item.id))
    # A transaction that changes its state meanwhile can be on two lists.
    return list({item.id: item for item in items}.values())[:limit]


def from_row(row: Row) -> Item:
    """Return a transaction of the API's answer."""
    topics = dict.fromkeys(message["topic"] for message in row["messages"])
    return Item(
        row["id"],
        row["partition"],
        row["state"],
        row["half_offset"],
        row["group"],
        row["prepared_at_ms"],
        ", ".join(topics),
    )


def _from_id(text: str) -> Item:
    """Return the transaction of an id in any case; the proxy refuses an invalid id."""
    id = text.upper() if text.isascii() else text
    try:
        return Item(id, parse_id(id).partition)
    except ValueError:
        return Item(text, -1)


# --- preview and confirmation ----------------------------------------------------------------


def preview(items: Sequence[Item], now_s: float) -> Iterator[str]:
    """Yield the lines that summarise the selected transactions."""
    oldest = min(items, key=lambda item: item.prepared_at_ms)
    age = duration(now_s - oldest.prepared_at_ms / 1000)
    yield f"{len(items):,} {'transaction' if len(items) == 1 else 'transactions'}"
    yield f"  by group  {_counted(item.group for item in items)}"
    yield f"  by state  {_counted(item.state or '' for item in items)}"
    yield f"  oldest    {age}, prepared {clock(oldest.prepared_at_ms)}"
    yield ""
    yield from table([item._asdict() for item in items[:SAMPLE]], SAMPLED, sys.stderr)
    if len(items) > SAMPLE:
        yield f"… and {len(items) - SAMPLE:,} more"


def confirm_all(items: Sequence[Item], action: BulkAction, where: str, yes: bool) -> None:
    """Ask for confirmation unless `yes`; for many transactions the user types their number.

    Raises:
        CommandFailed: the answer is no.
    """
    if yes:
        return
    which = "this transaction" if len(items) == 1 else f"these {len(items):,} transactions"
    question = f"{_IN_A_SENTENCE.get(action.verb, action.verb.capitalize())} {which} at {where}?"
    if len(items) < TYPED_FROM:
        confirm(question, yes)
        return
    click.echo(question, err=True)
    typed = click.prompt(
        f"Type {len(items)} to go on, anything else to cancel",
        default="",
        show_default=False,
        err=True,
    )
    if typed.strip() != str(len(items)):
        raise CommandFailed("nothing was changed: you did not confirm")


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names).most_common()
    shown = [f"{printable(name)} {count:,}" for name, count in counts[:GROUPS_SHOWN]]
    if len(counts) > GROUPS_SHOWN:
        left = counts[GROUPS_SHOWN:]
        shown.append(f"{len(left):,} more {sum(count for _, count in left):,}")
    return ", ".join(shown)


# --- execution and report --------------------------------------------------------------------


def carry_out(
    client: ApiClient, action: BulkAction, items: Sequence[Item], body: dict[str, Any], output: str
) -> None:
    """Execute the action, report the results, and end the command accordingly.

    Raises:
        ApiError: the only transaction, given by its id, failed.
        CommandFailed: all failed.
        PartlyDone: some failed.
        KeyboardInterrupt: on Ctrl-C, after the report.
    """
    if len(items) == 1 and items[0].state is None:
        with_caller = {"by": who(), **body}
        row = client.change("POST", "transactions", items[0].id, action.verb, body=with_caller)
        show_rows([row], STANDING, output, "")
        return
    by_id: dict[str, ItemResult] = {}
    try:
        with _progress(len(items)) as advance:

            def keep(result: ItemResult) -> None:
                by_id[result.id] = result
                advance()

            BulkExecutor(client, action, body).execute(items, keep)
    finally:
        results = [by_id[item.id] for item in items if item.id in by_id]
        _report(results, action, output, list_all=items[0].state is None)
    conclude(sum(not result.code for result in results), len(items), action.done)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr, for many transactions and on a terminal only."""
    if total < _PROGRESS_FROM or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _report(
    results: Sequence[ItemResult], action: BulkAction, output: str, *, list_all: bool
) -> None:
    """Write results to stdout; in table formats write failures to stderr.

    Args:
        list_all: list successes individually even if they are many.
    """
    if output in ("json", "yaml"):
        show_data([result.row for result in results], output)
        return
    done = [result.row for result in results if not result.code]
    if list_all or len(done) <= ROWS_SHOWN:
        if done:
            show_rows(done, STANDING, output, "")
    else:
        states = _counted(row["state"] for row in done)
        click.echo(f"{len(done):,} {action.done}, now {states}.", err=True)
    _report_failures([result.row for result in results if result.code])


def _report_failures(failed: list[Row]) -> None:
    if not failed:
        return
    if len(failed) > ROWS_SHOWN:
        codes = _counted(row["error"]["code"] for row in failed)
        click.echo(f"{len(failed):,} failed: {codes}.", err=True)
    click.echo("\n".join(table(failed[:ROWS_SHOWN], FAILED, sys.stderr)), err=True)
    if len(failed) > ROWS_SHOWN:
        left = len(failed) - ROWS_SHOWN
        click.echo(f"… and {left:,} more; -o json lists all.", err=True)
