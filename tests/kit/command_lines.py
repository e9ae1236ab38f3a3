"""Command lines that docs, charts and runbooks name, read as the command itself reads them."""

from __future__ import annotations

from collections.abc import Iterable

import click

from txbroker.cli.main import cli


def parsed(words: Iterable[str]) -> tuple[str, click.Context]:
    """Return the command that these words call, `tx list`, and its context with all options read.

    Raises:
        click.UsageError: There is no such command, or it takes no such words.
    """
    rest = list(words)
    names: list[str] = []
    command: click.Command = cli
    # With the settings of a call: click keeps the `-h` of each command as its first context has it.
    context = click.Context(cli, info_name="txbroker", **cli.context_settings)
    while isinstance(command, click.Group):
        name = rest.pop(0) if rest else "no command"
        child = command.get_command(context, name)
        if child is None:
            raise click.UsageError(f"{' '.join(names)} has no {name}", context)
        names.append(name)
        context, command = click.Context(child, context, name), child
    return " ".join(names), command.make_context(names[-1], rest, parent=context.parent)
