"""`txbroker tx`: look at transactions and resolve them."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from txbroker.cli.asking import (
    conclude,
    each,
    reason_option,
    require_asking,
    yes_option,
)
from txbroker.cli.client import ApiClient, client_options
from txbroker.cli.completion import complete_groups, complete_ids, complete_topics
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import (
    Row,
    TableColumn,
    clock,
    duration,
    output_option,
    printable,
    show_data,
    show_rows,
)
from txbroker.cli.tx.bulk import (
    STANDING,
    carry_out,
    confirm_all,
    from_row,
    matching,
    named,
    preview,
)
from txbroker.cli.tx.executor import CHECK, COMMIT, REVIVE, ROLLBACK, BulkAction, Item
from txbroker.cli.watching import watch_option, watch_rows

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("pending", "committed", "promoted", "rolled_back", "parked", "refused")
LIMIT = 100
STORIES_MAX = 5
"""So many are shown whole before something is done to them; more are counted."""


def _age(row: Row) -> str:
    return duration(time.time() - row["prepared_at_ms"] / 1000)


def _targets(row: Row) -> str:
    topics = dict.fromkeys(message["topic"] for message in row["messages"])
    return ", ".join(topics)


COLUMNS = (
    TableColumn("ID", lambda row: row["id"], keep=True),
    TableColumn("GROUP", lambda row: row["group"]),
    TableColumn("STATE", lambda row: row["state"], keep=True),
    TableColumn("AGE", _age, keep=True),
    TableColumn("MESSAGES", lambda row: len(row["messages"])),
    TableColumn("TOPICS", _targets),
    TableColumn("ATTEMPTS", lambda row: f"{row['attempts']}/{row['attempts_max']}"),
    TableColumn("PREPARED", lambda row: clock(row["prepared_at_ms"]), wide=True),
    TableColumn("NEXT CHECK", lambda row: clock(row.get("next_check_at_ms")), wide=True),
    TableColumn("ROUND", lambda row: row["round"], wide=True),
    TableColumn("DECIDED BY", lambda row: row.get("source"), wide=True),
    TableColumn("HALF", lambda row: f"{row['partition']}@{row['half_offset']}", wide=True),
    TableColumn("CAUSE", lambda row: (row.get("cause") or {}).get("message"), wide=True),
)


@click.group("tx", cls=SuggestingGroup)
def command() -> None:
    """Look at transactions and resolve them.

    \b
    pending      stored, undecided, invisible; its group is asked when its time comes
    committed    decided, not visible yet: it is on its way
    promoted     visible in all its target topics; settled
    rolled_back  never visible; settled
    parked       undecided after the last attempt: kept whole until you commit, roll
                 back or revive it, and never guessed
    refused      committed, but a target does not take it: mend the target; it is
                 tried again by itself, or at once with revive

    The first decision wins, whoever makes it; who comes later is told. What needs somebody:
    `txbroker tx list --state parked` and `--state refused`; `tx show ID` tells why.
    """


@command.command("list")
@click.option("--state", type=click.Choice(STATES), help="Only transactions in this state.")
@click.option(
    "--group",
    metavar="NAME",
    shell_complete=complete_groups,
    help="Only those of this producer group.",
)
@click.option(
    "--topic",
    metavar="NAME",
    shell_complete=complete_topics,
    help="Only those with a message for this topic.",
)
@click.option(
    "--older-than-s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Only those prepared longer ago.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=LIMIT,
    show_default=True,
    metavar="N",
    help="At most so many.",
)
@click.option("--all", "everything", is_flag=True, help="All of them, however many.")
@watch_option
@output_option
@client_options
def list_command(
    client: ApiClient,
    output: str,
    limit: int,
    everything: bool,
    watch: float | None,
    **query: Any,
) -> None:
    """List transactions, oldest first.

    Without --state: all that are not settled, so none that are promoted or rolled back.
    """
    if watch is not None:
        watch_rows(
            lambda: list(client.transactions(None if everything else limit, **query)),
            COLUMNS,
            output,
            watch,
            lambda row: (row["id"], row["state"], row["round"], row["attempts"]),
        )
    rows = list(client.transactions(None if everything else limit + 1, **query))
    if not everything and len(rows) > limit:
        rows = rows[:limit]
        click.echo(f"Only the first {limit}; --limit or --all shows more.", err=True)
    show_rows(rows, COLUMNS, output, "There are no such transactions.")


@command.command("show")
@click.argument(
    "ids", nargs=-1, required=True, metavar="ID...", shell_complete=complete_ids(STATES[:1])
)
@click.option("--bodies", is_flag=True, help="Show keys, values and headers too.")
@output_option
@client_options
def show_command(client: ApiClient, output: str, ids: tuple[str, ...], bodies: bool) -> None:
    """Tell all that is known of transactions."""
    flag = "true" if bodies else None
    found = each(ids, lambda id: dict(client.get("transactions", id, bodies=flag)))
    if output in ("json", "yaml"):
        show_data(found[0] if len(ids) == 1 and found else found, output)
    elif found:
        click.echo("\n\n".join("\n".join(_story(row)) for row in found))
    conclude(len(found), len(ids), "shown")


def _filters(action: BulkAction) -> Callable[[F], F]:
    """Give a command the ids and the filters that choose transactions."""
    usual = " or ".join(action.default_states)

    def decorate(function: F) -> F:
        for option in (
            click.option(
                "--limit",
                type=click.IntRange(min=1),
                metavar="N",
                help="At most so many, the oldest ones.",
            ),
            click.option(
                "--older-than-s",
                type=click.FloatRange(min=0),
                metavar="SECONDS",
                help="Those prepared longer ago.",
            ),
            click.option(
                "--topic",
                metavar="NAME",
                shell_complete=complete_topics,
                help="Those with a message for this topic.",
            ),
            click.option(
                "--group",
                metavar="NAME",
                shell_complete=complete_groups,
                help="Those of this producer group. With IDs: act in its name, so that no other's "
                "is touched."
                if action.verb in ("commit", "rollback")
                else "Those of this producer group.",
            ),
            click.option(
                "--state",
                type=click.Choice(action.states),
                help=f"Those in this state. [default: {usual}]",
            ),
            click.argument(
                "ids", nargs=-1, metavar="[ID]...", shell_complete=complete_ids(action.states)
            ),
        ):
            function = option(function)
        return function

    return decorate


@command.command("commit")
@_filters(COMMIT)
@click.option("--wait", is_flag=True, help="Return only when consumers can see the messages.")
@reason_option
@yes_option
@output_option
@client_options
def commit_command(client: ApiClient, wait: bool, **options: Any) -> None:
    """Commit transactions: their messages become visible.

    Say which by ID, or by --state, --group, --topic and --older-than-s, all of which have to fit.
    Chosen so, and without --state, only parked ones are meant. They are shown first, and only
    what was shown is committed: oldest first in each half partition. One that has moved on
    meanwhile is left alone. The same command can be given again.
    """
    _act(client, COMMIT, {"wait": "promoted" if wait else None}, **options)


@command.command("rollback")
@_filters(ROLLBACK)
@reason_option
@yes_option
@output_option
@client_options
def rollback_command(client: ApiClient, **options: Any) -> None:
    """Roll transactions back: their messages are never visible.

    Say which by ID, or by --state, --group, --topic and --older-than-s, all of which have to fit.
    Chosen so, and without --state, only parked ones are meant. They are shown first, and only
    what was shown is rolled back. One that has moved on meanwhile is left alone. The same command
    can be given again.
    """
    _act(client, ROLLBACK, {}, **options)


@command.command("check")
@_filters(CHECK)
@reason_option
@yes_option
@output_option
@client_options
def check_command(client: ApiClient, **options: Any) -> None:
    """Ask the producer groups of pending transactions now; it counts as an attempt.

    Say which by ID, or by --state pending, --group, --topic and --older-than-s, all of which have
    to fit. The last attempt of a round is never pulled forward.
    """
    _act(client, CHECK, {}, **options)


@command.command("revive")
@_filters(REVIVE)
@reason_option
@yes_option
@output_option
@client_options
def revive_command(client: ApiClient, **options: Any) -> None:
    """Check parked transactions in a new round; try refused ones again.

    Say which by ID, or by --state, --group, --topic and --older-than-s, all of which have to fit.
    """
    _act(client, REVIVE, {}, **options)


def _act(
    client: ApiClient,
    action: BulkAction,
    body: dict[str, Any],
    *,
    ids: tuple[str, ...],
    reason: str | None,
    yes: bool,
    output: str,
    limit: int | None,
    **query: Any,
) -> None:
    body["reason"] = reason
    if ids:
        body["group"] = query.pop("group") if action.verb in ("commit", "rollback") else None
        if limit is not None or any(value is not None for value in query.values()):
            raise click.UsageError("name IDs or say what fits, not both")
    elif all(value is None for value in query.values()):
        raise click.UsageError(
            f"say which: IDs, or what fits, such as --state {action.default_states[0]} --group NAME"
        )
    require_asking(yes)
    items = named(ids) if ids else matching(client, action, limit=limit, **query)
    if not items:
        show_rows([], STANDING, output, "There are no such transactions.")
        return
    if not yes:
        _show_before(client, items)
        confirm_all(items, action, str(client), yes)
    carry_out(client, action, items, body, output)


def _show_before(client: ApiClient, items: Sequence[Item]) -> None:
    """Show on stderr what is about to be done something to."""
    if items[0].state is None:
        rows = each([one.id for one in items], lambda id: dict(client.get("transactions", id)))
        if len(rows) <= STORIES_MAX:
            for row in rows:
                click.echo("\n".join([*_story(row), ""]), err=True)
            return
        items = [from_row(row) for row in rows]
    click.echo("\n".join((*preview(items, time.time()), "")), err=True)


def _story(row: Row) -> Iterable[str]:
    """Yield the lines that tell one transaction's life."""
    yield f"{row['id']}  {row['state']}"
    facts = {
        "group": row["group"],
        "order key": row.get("order_key"),
        "dedup key": row.get("dedup_key"),
        "attempts": f"{row['attempts']} of {row['attempts_max']}, round {row['round']}",
        "next check": clock(row.get("next_check_at_ms")),
        "waiting": row.get("waiting"),
        "half": f"partition {row['partition']}, offset {row['half_offset']}",
        "cause": (row.get("cause") or {}).get("message"),
    }
    for name, value in facts.items():
        if value:
            yield f"  {name:<11}{printable(str(value))}"
    for message in row["messages"]:
        yield f"  message    {printable(_placed(message))}"
    for event in row.get("timeline", ()):
        text = f"{clock(event['at_ms'])}  {event['event']:<9} {event.get('text', '')}"
        yield f"  {printable(text.rstrip())}"


def _placed(message: Row) -> str:
    where = f"{message['topic']}-{message['partition']}"
    if message.get("offset") is not None:
        where += f" at offset {message['offset']}"
    content = [
        f"{name}={message[field]!r}"
        for name, field in (
            ("key", "key"),
            ("key (base64)", "key_base64"),
            ("value", "value"),
            ("value (base64)", "value_base64"),
            ("headers", "headers"),
        )
        if field in message
    ]
    return "  ".join((where, *content))
