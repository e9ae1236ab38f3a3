"""Repeated queries: a redrawn screen, or a line for each new or changed row."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import click
from msgspec import Struct

from txbroker.cli.client import ApiError
from txbroker.cli.output import Row, RowStream, TableColumn, printable, row_lines

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R", bound=Row | Struct)
Draw = Callable[[Sequence[str]], None]

EVERY_S = 2.0
EVERY_MIN_S = 0.2
"""Each query makes the proxies build a list."""


def watch_option(function: F) -> F:
    """Give a command `--watch`; its value is the interval in seconds, None: query once."""
    return click.option(
        "-w",
        "--watch",
        is_flag=False,
        flag_value=EVERY_S,
        type=click.FloatRange(min=EVERY_MIN_S),
        metavar="[SECONDS]",
        help="Repeat until Ctrl-C: redraw the terminal or, without one and for JSON and YAML, "
        f"write new and changed rows. [SECONDS: {EVERY_S:g}]",
    )(function)


def watch_rows(
    query: Callable[[], Sequence[R]],
    columns: Sequence[TableColumn],
    output: str,
    every_s: float,
    key: Callable[[R], object],
) -> NoReturn:
    """Query and show rows until Ctrl-C; a row counts as changed when its `key` does.

    Only the first query's failure ends this; later ones are shown, and the query is repeated.
    """
    if draws(output):
        _draw_rows(query, columns, output, every_s)
    shown, known = RowStream(columns, output), set[object]()
    for rows in _with_errors_shown(_repeat(query, every_s)):
        shown.write([row for row in rows if key(row) not in known])
        known = {key(row) for row in rows}
    raise AssertionError


def draws(output: str) -> bool:
    """Return whether output in this format redraws the terminal."""
    able = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return output in ("table", "wide") and able


def _draw_rows(
    query: Callable[[], Sequence[R]], columns: Sequence[TableColumn], output: str, every_s: float
) -> NoReturn:
    def lines(rows: Sequence[R]) -> list[str]:
        shown = row_lines(rows, columns, output)
        return [f"{len(rows):,} listed. {shown.note}", "", *shown.lines]

    draw_again(query, lines, every_s)


def draw_again(
    query: Callable[[], T], lines: Callable[[T], Sequence[str]], every_s: float
) -> NoReturn:
    """Query and redraw the whole terminal until Ctrl-C; errors as in `watch_rows`."""
    with _screen() as draw:
        for result, error in _repeat(query, every_s):
            status = error or f"every {every_s:g} s, Ctrl-C ends"
            draw([f"{datetime.now(UTC):%H:%M:%SZ}  {printable(status)}", "", *lines(result)])
    raise AssertionError


def write_again(query: Callable[[], T], show: Callable[[T], None], every_s: float) -> NoReturn:
    """Query and write each result until Ctrl-C; errors as in `watch_rows`."""
    for result in _with_errors_shown(_repeat(query, every_s)):
        show(result)
    raise AssertionError


def _repeat(query: Callable[[], T], every_s: float) -> Iterator[tuple[T, str]]:
    """Yield the last result, and the newest query's error, "" if it succeeded."""
    result, failure = query(), ""
    while True:
        yield result, failure
        pause(every_s)
        try:
            result, failure = query(), ""
        except ApiError as error:
            failure = error.format_message()


def _with_errors_shown(results: Iterator[tuple[T, str]]) -> Iterator[T]:
    """Yield the results; write each new error to stderr once."""
    shown = ""
    for result, error in results:
        if not error:
            yield result
        elif error != shown:
            click.echo(error, err=True)
        shown = error


def pause(seconds: float) -> None:
    """Wait for the next query."""
    time.sleep(seconds)


@contextmanager
def _screen() -> Iterator[Draw]:
    """Use the terminal's alternate screen, and restore the terminal afterwards."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(lines: Sequence[str]) -> None:
            # A table has escape sequences for its bold titles; what is too long is folded.
            texts = [Text.from_ansi(line, overflow="fold") for line in lines]
            heights = [max(1, -(-text.cell_len // console.width)) for text in texts]
            fitting = len(texts)
            while sum(heights[:fitting]) > console.height - (fitting < len(texts)):
                fitting -= 1
            shown = texts[:fitting]
            if fitting < len(texts):
                shown.append(Text(f"… {len(texts) - fitting} more lines"))
            live.update(Text("\n", overflow="fold").join(shown), refresh=True)

        yield draw
