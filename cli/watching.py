"""Looking again and again: a screen that is drawn anew, or lines of what is new."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import click

from txbroker.cli.client import ApiError
from txbroker.cli.output import Row, TableColumn, printable, shown_columns, table, yaml_lines

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Draw = Callable[[Sequence[str]], None]

EVERY_S = 2.0
EVERY_MIN_S = 0.2
"""Watching costs the proxies a list each time."""


def watch_option(function: F) -> F:
    """Give a command `--watch`, whose value is how often to look, None for once."""
    return click.option(
        "-w",
        "--watch",
        is_flag=False,
        flag_value=EVERY_S,
        type=click.FloatRange(min=EVERY_MIN_S),
        metavar="[SECONDS]",
        help="Look again and again, until Ctrl-C: a screen that is drawn anew, or, where that is "
        f"no terminal or JSON or YAML, what is new or changed. [SECONDS: {EVERY_S:g}]",
    )(function)


def watch_rows(
    look: Callable[[], list[Row]],
    columns: Sequence[TableColumn],
    output: str,
    every_s: float,
    key: Callable[[Row], object],
) -> NoReturn:
    """Show rows again and again.

    Args:
        key: what has to differ for a row to count as changed.

    Raises:
        ApiError: the first look failed; a later one is told of, and repeated.
        KeyboardInterrupt: somebody has seen enough.
    """
    if output in ("table", "wide") and sys.stdout.isatty():
        _draw_rows(look, shown_columns(columns, output), every_s)
    titles, known = True, set[object]()
    for rows in _told(_looks(look, every_s)):
        fresh = [row for row in rows if key(row) not in known]
        known = {key(row) for row in rows}
        if output == "json":
            lines = [json.dumps(row, ensure_ascii=False) for row in fresh]
        elif output == "yaml":
            lines = [line for row in fresh for line in ("---", *yaml_lines(row))]
        else:
            lines = table(fresh, shown_columns(columns, output), sys.stdout)[not titles :]
            titles = titles and not fresh
        if fresh:
            click.echo("\n".join(lines))
            sys.stdout.flush()
    raise AssertionError


def _draw_rows(
    look: Callable[[], list[Row]], columns: Sequence[TableColumn], every_s: float
) -> NoReturn:
    def lines(rows: list[Row]) -> list[str]:
        return [f"{len(rows):,} listed", "", *table(rows, columns, sys.stdout)]

    draw_again(look, lines, every_s)


def draw_again(
    look: Callable[[], T], lines: Callable[[T], Sequence[str]], every_s: float
) -> NoReturn:
    """Draw what a look finds on the whole terminal, again and again.

    Raises:
        ApiError: the first look failed; a later one is told of, and repeated.
        KeyboardInterrupt: somebody has seen enough.
    """
    with _screen() as draw:
        for found, trouble in _looks(look, every_s):
            remark = trouble or f"every {every_s:g} s, Ctrl-C ends"
            draw([f"{datetime.now(UTC):%H:%M:%SZ}  {printable(remark)}", "", *lines(found)])
    raise AssertionError


def look_again(look: Callable[[], T], show: Callable[[T], None], every_s: float) -> NoReturn:
    """Write what a look finds below the one before, again and again.

    Raises:
        ApiError: the first look failed; a later one is told of, and repeated.
        KeyboardInterrupt: somebody has seen enough.
    """
    for found in _told(_looks(look, every_s)):
        show(found)
    raise AssertionError


def _looks(look: Callable[[], T], every_s: float) -> Iterator[tuple[T, str]]:
    """Yield what the last look found that was answered, and why the newest was not, or "".

    Raises:
        ApiError: of the first look.
    """
    found, trouble = look(), ""
    while True:
        yield found, trouble
        pause(every_s)
        try:
            found, trouble = look(), ""
        except ApiError as error:
            trouble = error.format_message()


def _told(looks: Iterator[tuple[T, str]]) -> Iterator[T]:
    """Yield what was found, and tell on stderr of what was not, once for each trouble."""
    said = ""
    for found, trouble in looks:
        if not trouble:
            yield found
        elif trouble != said:
            click.echo(trouble, err=True)
        said = trouble


def pause(seconds: float) -> None:
    """Wait until it is time to look again."""
    time.sleep(seconds)


@contextmanager
def _screen() -> Iterator[Draw]:
    """Take the whole terminal, and give it back as it was."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(lines: Sequence[str]) -> None:
            fitting = list(lines[: console.height])
            if len(lines) > console.height:
                fitting[-1] = f"… {len(lines) - console.height + 1} more lines"
            # A table has its own bold titles already.
            text = Text("\n", no_wrap=True, overflow="ellipsis").join(map(Text.from_ansi, fitting))
            live.update(text, refresh=True)

        yield draw
