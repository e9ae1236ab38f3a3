"""Options in sections, whose help names their environment variable and default; confirmations."""

import re
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.run import CommandFailed, PartlyDone

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
_ALL_KEY = f"{__name__}.all"


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d{1,9})([smhd])", re.ASCII)


class Moment(click.ParamType[int]):
    """A time: an age such as `2h`, or a date and time in ISO 8601, UTC without another zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return milliseconds since 1970."""
        text = str(value)
        if match := _AGO.fullmatch(text):
            return round((time.time() - int(match[1]) * _SECONDS[match[2]]) * 1000)
        try:
            moment = datetime.fromisoformat(text)
            zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return max(0, round(zoned.timestamp() * 1000))
        except (ValueError, OverflowError):
            self.fail(
                f"{text[:40]!r} is no time: give an age such as 30m or 2h, or a time such as "
                "2026-01-31T18:00",
                param,
                ctx,
            )

    @staticmethod
    def text(at_ms: int) -> str:
        """Return a time as this type reads it."""
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


MOMENT = Moment()


class SectionOption(click.Option):
    """An option in a section of the help.

    Args:
        section: the heading, "" for the command's main options.
        brief: `--help` only names it, `--help-all` explains it.
    """

    def __init__(
        self, *names: Any, section: str = "", brief: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*names, **attributes)
        self.section = section
        self.brief = brief


class SectionedCommand(click.Command):
    """A command whose help groups its options, and is short unless `--help-all` asks for all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return all parameters, with `--help-all` if `--help` leaves anything out."""
        *params, help_option = super().get_params(ctx)
        if not any(isinstance(param, SectionOption) and param.brief for param in params):
            return [*params, help_option]

        def show(context: click.Context, _: click.Parameter, given: bool) -> None:
            if given and not context.resilient_parsing:
                context.meta[_ALL_KEY] = True
                click.echo(context.get_help())
                context.exit()

        all_option = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=show,
            help="Explain all options and exit.",
        )
        return [*params, help_option, all_option]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section, the command's main options first."""
        sections: dict[str, tuple[list[tuple[str, str]], list[str]]] = {"": ([], [])}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, click.Option):
                continue
            section = param.section if isinstance(param, SectionOption) else ""
            explained, named = sections.setdefault(section, ([], []))
            if not section or _ALL_KEY in ctx.meta:
                explained.append(record)
            elif isinstance(param, SectionOption) and param.brief:
                named.append(param.opts[-1])
            else:
                explained.append((record[0], _shortened(record[1])))
        for title, (explained, named) in sections.items():
            with formatter.section(title or "Options"):
                if explained:
                    formatter.write_dl(explained)
                text = f"{'and ' if explained else ''}{', '.join(named)}"
                width = formatter.width - formatter.current_indent
                for line in textwrap.wrap(text, width, break_on_hyphens=False) if named else ():
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")


def _shortened(text: str) -> str:
    """Return an option's help with its first sentence only, and its environment variable."""
    sentence, bracket, note = text.rpartition(" [env: ")
    return f"{sentence.partition('. ')[0].removesuffix('.')}.{bracket}{note}"


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
    attributes.setdefault("cls", SectionOption)
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


def limit_option(text: str, default: int | None = None) -> Callable[[F], F]:
    """Return the decorator that gives a command `--limit`, a maximum number."""
    kind = click.IntRange(min=1)
    shown = default is not None
    return click.option(
        "--limit", type=kind, default=default, show_default=shown, metavar="N", help=text
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
