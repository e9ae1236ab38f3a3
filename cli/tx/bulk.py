"""One thing for many transactions: which ones, what is shown before, and what is told after."""

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
"""From so many on the number is typed, which a finger that slips does not do."""
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


# --- which ones ------------------------------------------------------------------------------


def named(ids: Iterable[str]) -> list[Item]:
    """Return the transactions of these ids, each once, in the order given."""
    items = [_from_id(id) for id in ids]
    return list({item.id: item for item in items}.values())


def matching(
    client: ApiClient, action: BulkAction, state: str | None, limit: int | None, **query: Any
) -> list[Item]:
    """Return the transactions to which a filter applies, oldest first, at most `limit`.

    Raises:
        ApiError: they could not be listed, all of them.
    """
    found: list[Item] = []
    for one in (state,) if state else action.default_states:
        found += [from_row(row) for row in client.transactions(limit, state=one, **query)]
    found.sort(key=lambda item: (item.prepared_at_ms, item.half_offset, item.id))
    # One that changes its state while they are listed can be on two lists.
    return list({item.id: item for item in found}.values())[:limit]


def from_row(row: Row) -> Item:
    """Return a transaction as a list, or the API's answer for one, tells of it."""
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
    """Return what an id tells, whatever the case it came in; what is none the proxy refuses."""
    id = text.upper() if text.isascii() else text
    try:
        return Item(id, parse_id(id).partition)
    except ValueError:
        return Item(text, -1)


# --- before ----------------------------------------------------------------------------------


def preview(items: Sequence[Item], now_s: float) -> Iterator[str]:
    """Yield the lines that tell what is about to be done something to."""
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
    """Ask whether to do it, unless `yes`: many want their number typed.

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
        f"Type {len(items)} to do it, anything else to leave them",
        default="",
        show_default=False,
        err=True,
    )
    if typed.strip() != str(len(items)):
        raise CommandFailed("nothing was done")


def _counted(words: Iterable[str]) -> str:
    counts = Counter(words).most_common()
    shown = [f"{printable(word)} {count:,}" for word, count in counts[:GROUPS_SHOWN]]
    if len(counts) > GROUPS_SHOWN:
        left = counts[GROUPS_SHOWN:]
        shown.append(f"{len(left):,} more {sum(count for _, count in left):,}")
    return ", ".join(shown)


# --- doing it, and after ---------------------------------------------------------------------


def carry_out(
    client: ApiClient, action: BulkAction, items: Sequence[Item], body: dict[str, Any], output: str
) -> None:
    """Do it, tell what became of it, and end the command accordingly.

    Raises:
        ApiError: there is only one, which was named, and it fails.
        CommandFailed: nothing was done. PartlyDone: something.
        KeyboardInterrupt: somebody has seen enough; what was done is told.
    """
    if len(items) == 1 and items[0].state is None:
        given = {"by": who(), **body}
        row = client.change("POST", "transactions", items[0].id, action.verb, body=given)
        show_rows([row], STANDING, output, "")
        return
    outcomes: dict[str, ItemResult] = {}
    try:
        with _progress(len(items)) as advance:

            def told(outcome: ItemResult) -> None:
                outcomes[outcome.id] = outcome
                advance()

            BulkExecutor(client, action, body).work(items, told)
    finally:
        found = [outcomes[item.id] for item in items if item.id in outcomes]
        _report(found, action, output, whole=items[0].state is None)
    conclude(sum(not one.code for one in found), len(items), action.done)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show on stderr how far it is, where that is a terminal and there is much to do."""
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
    outcomes: Sequence[ItemResult], action: BulkAction, output: str, *, whole: bool
) -> None:
    """Tell what became of them: data on stdout, failures of a table on stderr.

    `whole`: each one that is done has its line, however many there are.
    """
    done = [outcome.row for outcome in outcomes if not outcome.code]
    if output in ("json", "yaml"):
        show_data([outcome.row for outcome in outcomes], output)
        return
    if whole or len(done) <= ROWS_SHOWN:
        if done:
            show_rows(done, STANDING, output, "")
    else:
        states = _counted(row["state"] for row in done)
        click.echo(f"{len(done):,} {action.done}, now {states}.", err=True)
    _tell_failures([outcome.row for outcome in outcomes if outcome.code])


def _tell_failures(failed: list[Row]) -> None:
    if not failed:
        return
    if len(failed) > ROWS_SHOWN:
        codes = _counted(row["error"]["code"] for row in failed)
        click.echo(f"{len(failed):,} failed: {codes}.", err=True)
    click.echo("\n".join(table(failed[:ROWS_SHOWN], FAILED, sys.stderr)), err=True)
    if len(failed) > ROWS_SHOWN:
        left = len(failed) - ROWS_SHOWN
        click.echo(f"… and {left:,} more; -o json tells of each.", err=True)
