"""`txbroker completion`: shell completion of commands, options and live values."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem, get_completion_class

from txbroker.cli.client import client_of
from txbroker.cli.options import SectionedCommand
from txbroker.cli.output import printable, since

WITHIN_S = 0.6
"""Timeout of a completion: with Python's start it stays below a second."""
NAME, VARIABLE = "txbroker", "_TXBROKER_COMPLETE"
"""The completed command, and the variable by which its shell requests completion."""
_SHELLS = ("bash", "zsh", "fish")
# A shell puts a completion onto the command line unquoted. A name chosen by another user must not
# become a command or an option when Enter is pressed.
_HARMLESS = re.compile(r"[\w.@:/+%][\w.@:/+=%-]*")
_TRANSACTIONS_MAX = 200

F = TypeVar("F", bound=Callable[..., Any])
Look = Callable[[click.Context], "Iterable[tuple[str, str]]"]
Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem[str]]"]


@click.command("completion", cls=SectionedCommand)
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print a script that makes a shell complete commands, options and live values.

    Groups, topics, transaction ids and contexts are current ones. If the proxy does not answer
    immediately, none are offered, without an error.

    \b
    eval "$(txbroker completion bash)"     in ~/.bashrc
    eval "$(txbroker completion zsh)"      in ~/.zshrc, after compinit
    txbroker completion fish > ~/.config/fish/completions/txbroker.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(click.get_current_context().find_root().command, {}, NAME, VARIABLE)
    # `source()` would first run bash to check its version.
    click.echo(completion.source_template % completion.source_vars())


def _live(look: Look, adapted: Callable[[str], str] = str) -> Complete:
    """Return the completion by what `look` finds at the proxy, for the `adapted` word."""

    def complete(
        context: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return _offered(lambda: look(context), adapted(incomplete))

    return complete


def _groups(context: click.Context) -> Iterable[tuple[str, str]]:
    """Yield registered groups, and groups with undecided transactions."""
    client = client_of(context, WITHIN_S)
    for row in client.get("groups")["groups"]:
        yield row["group"], "registered"
    for row in client.get("overview")["groups"]:
        counts = [f"{row[state]} {state}" for state in ("parked", "pending") if row.get(state)]
        yield row["group"], ", ".join(counts)


def _topics(context: click.Context) -> Iterable[tuple[str, str]]:
    """Yield topics of unsettled transactions."""
    rows = client_of(context, WITHIN_S).transactions(_TRANSACTIONS_MAX)
    yield from ((topic, "") for topic in sorted({m.topic for r in rows for m in r.messages}))


complete_groups = _live(_groups)
complete_topics = _live(_topics)


def complete_ids(states: Iterable[str]) -> Complete:
    """Return the completion of ids of transactions in these states."""
    states = tuple(states)

    def look(context: click.Context) -> Iterable[tuple[str, str]]:
        client = client_of(context, WITHIN_S)
        given = set(context.params.get("ids") or ())
        for state in states:
            for row in client.transactions(_TRANSACTIONS_MAX, state=state):
                if row.id not in given:
                    yield row.id, f"{row.state} for {since(row.prepared_at_ms)}, {row.group}"

    return _live(look, str.upper)


def group_option(text: str) -> Callable[[F], F]:
    """Return the decorator that gives a command `--group`."""
    return click.option("--group", metavar="NAME", shell_complete=complete_groups, help=text)


def topic_option(text: str) -> Callable[[F], F]:
    """Return the decorator that gives a command `--topic`."""
    return click.option("--topic", metavar="NAME", shell_complete=complete_topics, help=text)


def _offered(
    look: Callable[[], Iterable[tuple[str, str]]], incomplete: str
) -> list[CompletionItem[str]]:
    """Return the values that begin with `incomplete`, with their help.

    On a timeout or an error, return the values received so far: an error message would disturb the
    line that the user is typing.
    """
    received: list[tuple[str, str]] = []

    def run() -> None:
        try:
            for value_and_help in look():
                received.append(value_and_help)  # noqa: PERF402 - keep those before an error
        except Exception:
            return

    # A DNS lookup has no timeout, so it runs in a thread that does not delay the exit.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN_S)
    helps: dict[str, str] = {}
    for value, text in tuple(received):
        helps[value] = text or helps.get(value, "")
    return [
        CompletionItem(value, help=printable(text) or None)
        for value, text in helps.items()
        if value.startswith(incomplete) and _HARMLESS.fullmatch(value)
    ]
