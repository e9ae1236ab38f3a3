"""Output: rows to stdout as a table, wide table, JSON or YAML; files that are replaced whole."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
Row = dict[str, Any]

_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# Plain words that a YAML version reads as another type than text.
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_GAP = 2
_CUT_MIN = 5
"""The least width of a shortened column: four characters and an ellipsis."""
_WIDTH_OF_FILES = 100_000
"""A table in a file or pipe is not shortened: programs need whole values."""


class TableColumn(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading.
        value: returns a row's value.
        wide: only `-o wide` shows it.
        keep: never shortened on a narrow terminal, because shortened ids and numbers mislead.
    """

    title: str
    value: Callable[[Row], object]
    wide: bool = False
    keep: bool = False


def output_option(function: F) -> F:
    """Give a command `-o`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "wide", "json", "yaml"]),
        default="table",
        envvar="TXBROKER_OUTPUT",
        help="Output format. [env: TXBROKER_OUTPUT; default: table]",
    )(function)


def show_rows(rows: Sequence[Row], columns: Sequence[TableColumn], output: str, empty: str) -> None:
    """Write rows to stdout; in place of an empty table, write `empty` to stderr."""
    if output in ("json", "yaml"):
        show_data(list(rows), output)
    elif not rows:
        click.echo(empty, err=True)
    else:
        click.echo("\n".join(table(rows, shown_columns(columns, output), sys.stdout)))


def show_one(row: Row, columns: Sequence[TableColumn], output: str) -> None:
    """Write one row to stdout: as a table of one row, or as a JSON or YAML object."""
    if output in ("json", "yaml"):
        show_data(row, output)
    else:
        show_rows([row], columns, output, "")


def shown_columns(columns: Sequence[TableColumn], output: str) -> list[TableColumn]:
    """Return the columns of a table in this format."""
    return [column for column in columns if output == "wide" or not column.wide]


def show_data(data: Any, output: str) -> None:
    """Write data to stdout, as JSON or YAML."""
    if output == "yaml":
        click.echo("\n".join(yaml_lines(data)))
    else:
        click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def table(rows: Sequence[Row], columns: Sequence[TableColumn], stream: TextIO) -> list[str]:
    """Return the lines of a table, fitted to the terminal of `stream`; none without rows."""
    if not rows:
        return []
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False, file=stream)
    if not stream.isatty() and "COLUMNS" not in os.environ:
        console.width = _WIDTH_OF_FILES
    cells = [[Text(cell(column.value(row))) for column in columns] for row in rows]
    full_widths = [
        max(len(column.title), *(text.cell_len for text in texts))
        for column, texts in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    rendered = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for column, width in zip(columns, _widths(columns, full_widths, console.width), strict=True):
        rendered.add_column(column.title, no_wrap=True, overflow="ellipsis", width=width)
    for line in cells:
        rendered.add_row(*line)
    with console.capture() as capture:
        console.print(rendered)
    return [line.rstrip() for line in capture.get().splitlines()]


def _widths(columns: Sequence[TableColumn], full_widths: Sequence[int], total: int) -> list[int]:
    """Return the columns' widths: to fit `total`, the widest column that may be cut shrinks."""
    widths = list(full_widths)
    may_shrink = [number for number, column in enumerate(columns) if not column.keep]
    excess = sum(widths) + _GAP * (len(widths) - 1) - total
    while excess > 0 and may_shrink:
        widest = max(may_shrink, key=lambda number: widths[number])
        if widths[widest] <= _CUT_MIN:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return printable(str(value))


def printable(text: str) -> str:
    """Return text without characters that move a terminal's cursor or change its colours."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def clock(at_ms: int | None) -> str:
    """Return a time in milliseconds since 1970 as readable text, in UTC."""
    if at_ms is None:
        return ""
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}Z"


def duration(seconds: float) -> str:
    """Return a time span in its one or two largest units, such as `2m05s`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def yaml_lines(data: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a YAML document of JSON data, with block lists and maps."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            if _is_block(value):
                yield f"{indent}{_scalar(key)}:"
                yield from yaml_lines(value, f"{indent}  ")
            else:
                yield f"{indent}{_scalar(key)}: {_scalar(value)}"
    elif isinstance(data, list) and data:
        for value in data:
            first, *rest = yaml_lines(value, f"{indent}  ")
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from rest
    else:
        yield indent + _scalar(data)


def _is_block(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON's scalars, empty list and empty map are valid YAML; surrogate pairs are not.
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 would read 1e-05 as text
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@contextmanager
def replacing(path: Path, text: str) -> Iterator[Path]:
    """Yield a new file, closed to other users; replace `path` by it when the block succeeds."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
