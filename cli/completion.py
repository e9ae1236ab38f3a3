"""`txbroker completion`: what a shell offers when somebody presses Tab, live values included."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

from txbroker.cli.client import client_of
from txbroker.cli.output import duration, printable

WITHIN_S = 0.6
"""Nobody waits longer for a Tab: with what Python takes to start that stays within a second."""
NAME, VARIABLE = "txbroker", "_TXBROKER_COMPLETE"
"""The command that is completed, and the variable by which its shell asks it to."""
_SHELLS = ("bash", "zsh", "fish")
# A shell puts what is offered onto the command line as it is. A name made by a stranger must not
# become a command, or an option, when Enter is pressed.
_HARMLESS = re.compile(r"[\w.@:/+%][\w.@:/+=%-]*")
_LOOKED_AT = 200

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem[str]]"]


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print what makes a shell complete commands, options and live values.

    Groups, topics, transaction ids and contexts are those of the moment. Where no proxy answers
    at once there are none, and nothing is said.

    \b
    eval "$(txbroker completion bash)"     in ~/.bashrc
    eval "$(txbroker completion zsh)"      in ~/.zshrc, behind compinit
    txbroker completion fish > ~/.config/fish/completions/txbroker.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(click.get_current_context().find_root().command, {}, NAME, VARIABLE)
    # `source()` would first look which bash is there: it is the one that will read this.
    click.echo(completion.source_template % completion.source_vars())


def complete_groups(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return registered groups, and those that left transactions undecided."""

    def look() -> Iterable[tuple[str, str]]:
        client = client_of(context, WITHIN_S)
        for row in client.get("groups")["groups"]:
            yield row["group"], "registered"
        for row in client.get("overview")["groups"]:
            waiting = [f"{row[word]} {word}" for word in ("parked", "pending") if row.get(word)]
            yield row["group"], ", ".join(waiting)

    return _offered(look, incomplete)


def complete_topics(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return topics of transactions that are not settled."""

    def look() -> Iterable[tuple[str, str]]:
        rows = client_of(context, WITHIN_S).transactions(_LOOKED_AT)
        topics = {message["topic"] for row in rows for message in row["messages"]}
        return [(topic, "") for topic in sorted(topics)]

    return _offered(look, incomplete)


def complete_ids(states: Iterable[str]) -> Complete:
    """Return what completes the ids of transactions in these states."""
    wanted = tuple(states)

    def complete(
        context: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        def look() -> Iterable[tuple[str, str]]:
            client = client_of(context, WITHIN_S)
            there = set(context.params.get("ids") or ())
            for state in wanted:
                for row in client.transactions(_LOOKED_AT, state=state):
                    age = duration(time.time() - row["prepared_at_ms"] / 1000)
                    if row["id"] not in there:
                        yield row["id"], f"{row['state']} for {age}, {row['group']}"

        return _offered(look, incomplete.upper())

    return complete


def _offered(
    look: Callable[[], Iterable[tuple[str, str]]], incomplete: str
) -> list[CompletionItem[str]]:
    """Return the values, each with a word of help, that begin like this.

    None where they cannot be had in time, for whatever reason: a shell in the middle of a line is
    no place for an error.
    """
    found: list[tuple[str, str]] = []

    def run() -> None:
        try:
            for one in look():
                found.append(one)  # noqa: PERF402 - what came before an error is there
        except Exception:
            return

    # Looking up a name knows no timeout, so it goes on in a thread that nobody waits for.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN_S)
    words: dict[str, str] = {}
    for value, said in tuple(found):
        words[value] = said or words.get(value, "")
    return [
        CompletionItem(value, help=printable(said) or None)
        for value, said in words.items()
        if value.startswith(incomplete) and _HARMLESS.fullmatch(value)
    ]
