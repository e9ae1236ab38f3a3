"""`txbroker tx`: look at transactions and resolve them."""

import time
from collections.abc import Iterable
from typing import Any

import click

from txbroker.cli.asking import (
    conclude,
    confirm,
    each,
    reason_option,
    require_asking,
    yes_option,
)
from txbroker.cli.client import Client, client_options
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import (
    Column,
    Row,
    clock,
    duration,
    output_option,
    printable,
    show_data,
    show_rows,
)

STATES = ("pending", "committed", "promoted", "rolled_back", "parked", "refused")
LIMIT = 100


def _age(row: Row) -> str:
    return duration(time.time() - row["prepared_at_ms"] / 1000)


def _targets(row: Row) -> str:
    topics = dict.fromkeys(message["topic"] for message in row["messages"])
    return ", ".join(topics)


COLUMNS = (
    Column("ID", lambda row: row["id"]),
    Column("GROUP", lambda row: row["group"]),
    Column("STATE", lambda row: row["state"]),
    Column("AGE", _age),
    Column("MESSAGES", lambda row: len(row["messages"])),
    Column("TOPICS", _targets),
    Column("ATTEMPTS", lambda row: f"{row['attempts']}/{row['attempts_max']}"),
    Column("PREPARED", lambda row: clock(row["prepared_at_ms"]), wide=True),
    Column("NEXT CHECK", lambda row: clock(row.get("next_check_at_ms")), wide=True),
    Column("ROUND", lambda row: row["round"], wide=True),
    Column("DECIDED BY", lambda row: row.get("source"), wide=True),
    Column("HALF", lambda row: f"{row['partition']}@{row['half_offset']}", wide=True),
    Column("CAUSE", lambda row: (row.get("cause") or {}).get("message"), wide=True),
)
STANDING = (
    Column("ID", lambda row: row["id"]),
    Column("STATE", lambda row: row["state"]),
    Column("DECISION", lambda row: row.get("decision")),
)


@click.group("tx", cls=SuggestingGroup)
def command() -> None:
    """Look at transactions and resolve them."""


@command.command("list")
@click.option("--state", type=click.Choice(STATES), help="Only transactions in this state.")
@click.option("--group", metavar="NAME", help="Only those of this producer group.")
@click.option("--topic", metavar="NAME", help="Only those with a message for this topic.")
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
@output_option
@client_options
def list_command(client: Client, output: str, limit: int, everything: bool, **query: Any) -> None:
    """List transactions, oldest first.

    Without --state: all that are not settled, so none that are promoted or rolled back.
    """
    rows = list(client.transactions(None if everything else limit + 1, **query))
    if not everything and len(rows) > limit:
        rows = rows[:limit]
        click.echo(f"Only the first {limit}; --limit or --all shows more.", err=True)
    show_rows(rows, COLUMNS, output, "There are no such transactions.")


@command.command("show")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--bodies", is_flag=True, help="Show keys, values and headers too.")
@output_option
@client_options
def show_command(client: Client, output: str, ids: tuple[str, ...], bodies: bool) -> None:
    """Tell all that is known of transactions."""
    flag = "true" if bodies else None
    found = each(ids, lambda id: dict(client.get("transactions", id, bodies=flag)))
    if output in ("json", "yaml"):
        show_data(found[0] if len(ids) == 1 and found else found, output)
    elif found:
        click.echo("\n\n".join("\n".join(_story(row)) for row in found))
    conclude(len(found), len(ids), "shown")


@command.command("commit")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--group", metavar="NAME", help="Decide as this group; else as an operator.")
@click.option("--wait", is_flag=True, help="Return only when consumers can see the messages.")
@reason_option
@yes_option
@output_option
@client_options
def commit_command(
    client: Client,
    output: str,
    ids: tuple[str, ...],
    yes: bool,
    group: str | None,
    wait: bool,
    reason: str | None,
) -> None:
    """Commit transactions: their messages become visible."""
    body = {"group": group, "reason": reason, "wait": "promoted" if wait else None}
    _act(client, "commit", "committed", ids, body, yes, output)


@command.command("rollback")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--group", metavar="NAME", help="Decide as this group; else as an operator.")
@reason_option
@yes_option
@output_option
@client_options
def rollback_command(
    client: Client,
    output: str,
    ids: tuple[str, ...],
    yes: bool,
    group: str | None,
    reason: str | None,
) -> None:
    """Roll transactions back: their messages are never visible."""
    _act(client, "rollback", "rolled back", ids, {"group": group, "reason": reason}, yes, output)


@command.command("check")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@reason_option
@yes_option
@output_option
@client_options
def check_command(
    client: Client, output: str, ids: tuple[str, ...], yes: bool, reason: str | None
) -> None:
    """Ask the producer groups now; it counts as an attempt."""
    _act(client, "check", "checked", ids, {"reason": reason}, yes, output)


@command.command("revive")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@reason_option
@yes_option
@output_option
@client_options
def revive_command(
    client: Client, output: str, ids: tuple[str, ...], yes: bool, reason: str | None
) -> None:
    """Check parked transactions in a new round; try refused ones again."""
    _act(client, "revive", "revived", ids, {"reason": reason}, yes, output)


def _act(
    client: Client,
    verb: str,
    done_word: str,
    ids: tuple[str, ...],
    body: dict[str, Any],
    yes: bool,
    output: str,
) -> None:
    require_asking(yes)
    ids = tuple(dict.fromkeys(ids))
    if not yes:
        for row in each(ids, lambda id: dict(client.get("transactions", id))):
            click.echo("\n".join([*_story(row), ""]), err=True)
        confirm(f"{verb.capitalize()} {_several(len(ids), 'transaction')}?", yes)
    done = each(ids, lambda id: dict(client.change("POST", "transactions", id, verb, body=body)))
    if done:
        show_rows(done, STANDING, output, "")
    conclude(len(done), len(ids), done_word)


def _several(number: int, what: str) -> str:
    return f"this {what}" if number == 1 else f"these {number} {what}s"


def _story(row: Row) -> Iterable[str]:
    """Yield the lines that tell one transaction's life."""
    yield f"{row['id']}  {row['state']}"
    facts = {
        "group": row["group"],
        "order key": row.get("order_key"),
        "dedup key": row.get("dedup_key"),
        "attempts": f"{row['attempts']} of {row['attempts_max']}, round {row['round']}",
        "next check": clock(row.get("next_check_at_ms")),
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
