"""Confirmations before changes, and the result of several changes."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from txbroker.cli.client import ApiError
from txbroker.cli.options import env_option
from txbroker.cli.output import printable
from txbroker.cli.run import CommandFailed, PartlyDone

F = TypeVar("F", bound=Callable[..., Any])


def yes_option(function: F) -> F:
    """Give a command `--yes`."""
    return click.option(
        "-y", "--yes", is_flag=True, envvar="TXBROKER_YES", help="Do not ask for confirmation."
    )(function)


def reason_option(*, required: bool = False) -> Callable[[F], F]:
    """Return the decorator that gives a command `--reason`."""
    return env_option(
        "--reason", "The reason, recorded with the change.", metavar="TEXT", required=required
    )


def require_terminal(yes: bool) -> None:
    """Refuse to ask for confirmation where stdin is no terminal.

    Raises:
        click.UsageError: stdin is no terminal, and --yes is missing.
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("stdin is no terminal, so you cannot confirm: give --yes to go on")


def confirm(question: str, yes: bool) -> None:
    """Ask on stderr unless `yes`.

    Raises:
        CommandFailed: the answer is no.
    """
    if not yes and not click.confirm(question, err=True):
        raise CommandFailed("nothing was changed: you did not confirm")


def for_all(names: Sequence[str], act: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `act` for each name and return the results; failures go to stderr.

    Raises:
        ApiError: the only call failed.
    """
    if len(names) == 1:
        return [act(names[0])]
    results = []
    for name in names:
        try:
            results.append(act(name))
        except ApiError as error:
            click.echo(f"{printable(name)}: {error.format_message()}", err=True)
    return results


def conclude(done: int, total: int, verb: str) -> None:
    """End a command by the number of its successes.

    Raises:
        CommandFailed: nothing succeeded.
        PartlyDone: some did.
    """
    if done == total:
        return
    if done == 0:
        raise CommandFailed(f"none of {total} {verb}")
    raise PartlyDone(f"{done} of {total} {verb}")
