"""Options whose help names their environment variable and default; confirmations of changes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.run import CommandFailed, PartlyDone

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)


def env_option(
    name: str,
    text: str,
    *others: str,
    param: str = "",
    shown: str = "",
    prefix: str = "",
    **attributes: Any,
) -> Callable[[F], F]:
    """Return the decorator of an option with an environment variable.

    Args:
        name: `--name` or `--name/--no-name`; the variable is TXBROKER_, `prefix` and NAME.
        text: the help without variable and default.
        others: further names, such as `-n`.
        param: the function's parameter, if its name differs.
        shown: the default in the help, if it differs.
    """
    variable = f"TXBROKER_{prefix}{name.partition('/')[0][2:].replace('-', '_').upper()}"
    default = attributes.get("default")
    if not shown and default not in (None, "", False):
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    note = f"[env: {variable}{f'; default: {shown}' if shown else ''}]"
    names = (*others, name, param) if param else (*others, name)
    return click.option(*names, envvar=variable, help=f"{text} {note}", **attributes)


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that gives a command these options, in the order of its help."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


yes_option = env_option("--yes", "Do not ask for confirmation.", "-y", is_flag=True)
"""Gives a command `--yes`."""


def reason_option(*, required: bool = False) -> Callable[[F], F]:
    """Return the decorator that gives a command `--reason`."""
    return env_option(
        "--reason", "The reason, recorded with the change.", metavar="TEXT", required=required
    )


def require_terminal(yes: bool) -> None:
    """Refuse to ask for confirmation where stdin is no terminal."""
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("stdin is no terminal, so you cannot confirm: give --yes to go on")


def confirm(question: str, yes: bool) -> None:
    """Ask on stderr unless `yes`."""
    if not yes and not click.confirm(question, err=True):
        raise CommandFailed("nothing was changed: you did not confirm")


def conclude(done: int, total: int, verb: str) -> None:
    """End a command by the number of its successes: all, some or none."""
    if done == total:
        return
    if done == 0:
        raise CommandFailed(f"none of {total} {verb}")
    raise PartlyDone(f"{done} of {total} {verb}")
