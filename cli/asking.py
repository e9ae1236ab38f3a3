"""Asking before something is changed, and telling what became of several changes."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from txbroker.cli.client import ApiError
from txbroker.cli.output import printable
from txbroker.cli.run import CommandFailed, PartlyDone

F = TypeVar("F", bound=Callable[..., Any])


def yes_option(function: F) -> F:
    """Give a command `--yes`."""
    return click.option(
        "-y", "--yes", is_flag=True, envvar="TXBROKER_YES", help="Do it without asking."
    )(function)


def reason_option(function: F) -> F:
    """Give a command `--reason`."""
    return click.option(
        "--reason",
        metavar="TEXT",
        envvar="TXBROKER_REASON",
        help="Why; recorded with the transaction. [env: TXBROKER_REASON]",
    )(function)


def require_asking(yes: bool) -> None:
    """Refuse a question that nobody could answer.

    Raises:
        click.UsageError: stdin is no terminal, and there is no --yes.
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("nobody is there to ask: say --yes to do it")


def confirm(question: str, yes: bool) -> None:
    """Ask on stderr unless `yes`.

    Raises:
        CommandFailed: the answer is no.
    """
    if not yes and not click.confirm(question, err=True):
        raise CommandFailed("nothing was done")


def each(names: Sequence[str], act: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Do something to several things; one that fails is told on stderr and stops no other.

    Raises:
        ApiError: there is only one, and it fails.
    """
    if len(names) == 1:
        return [act(names[0])]
    done = []
    for name in names:
        try:
            done.append(act(name))
        except ApiError as error:
            click.echo(f"{printable(name)}: {error.format_message()}", err=True)
    return done


def conclude(done: int, wanted: int, what: str) -> None:
    """End a command by how much of what was wanted is done.

    Raises:
        CommandFailed: nothing. PartlyDone: something.
    """
    if done == wanted:
        return
    if done == 0:
        raise CommandFailed(f"none of {wanted} {what}")
    raise PartlyDone(f"{done} of {wanted} {what}")
