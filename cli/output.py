"""Output: rows to stdout as a table, CSV, JSON or YAML; files that are replaced whole."""

import csv
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import click
import msgspec
from msgspec import Struct

from txbroker.cli.options import env_option, with_options
from txbroker.cli.run import in_ascii, is_utf8

F = TypeVar("F", bound=Callable[..., Any])
Row = dict[str, Any]
Widths = dict[str, int]
"""The widths of columns by title."""

_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# Plain words that a YAML version reads as another type than text.
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
"""Characters that JSON and YAML may hold as they are, and a terminal obeys or YAML forbids."""
_GAP = 2
_TEXT_MIN = 12
"""The least width of free text; below it the column is left out."""
_WIDTH_DEFAULT = 80
_COLUMNS_KEY = f"{__name__}.columns"


class TableColumn(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading; `--columns` takes it in any case, with `_` or `-` for spaces.
        given: returns a row's value; None: the field of the column's name.
        wide: only `-o wide` and CSV show it.
        keep: identifies the row, so a narrow terminal neither leaves it out nor shortens it.
        rank: of the others, a narrow terminal leaves out those of the greatest rank first; of
            equal ones, the last.
        text: free text, which may be shortened. Names and numbers never are, as that misleads.
    """

    title: str
    given: Callable[[Any], object] | None = None
    wide: bool = False
    keep: bool = False
    rank: int = 2
    text: bool = False

    @property
    def name(self) -> str:
        """The name in `--columns`, CSV and JSON."""
        return self.title.lower().replace(" ", "_")

    def value(self, row: Row | Struct) -> object:
        """Return a row's value."""
        if self.given is not None:
            return self.given(row)
        return getattr(row, self.name) if isinstance(row, Struct) else row.get(self.name)


class FittedTable(NamedTuple):
    """A table for the width of a terminal: its lines, and the columns that were left out."""

    lines: list[str]
    left_out: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Which columns are missing, and how to see them; "" if none."""
        if not self.left_out:
            return ""
        missing = ", ".join(self.left_out)
        return f"Left out on this narrow terminal: {missing}. -o wide or --columns shows them."


def _format_option(formats: Sequence[str]) -> Callable[[F], F]:
    return env_option(
        "--output", "Output format.", "-o", type=click.Choice(formats), default="table"
    )


object_output_option = _format_option(("table", "wide", "json", "yaml"))
"""Gives a command that shows one nested object `-o`."""


def output_option(function: F) -> F:
    """Give a command that shows rows `-o` and `--columns`; `show_rows` follows both."""

    def keep(context: click.Context, _: click.Parameter, text: str | None) -> None:
        names = [part.strip() for part in (text or "").split(",") if part.strip()]
        context.meta[_COLUMNS_KEY] = [re.sub("[- ]", "_", name.lower()) for name in names]

    return with_options(
        _format_option(("table", "wide", "json", "yaml", "ndjson", "csv")),
        click.option(
            "--columns",
            metavar="A,B,…",
            expose_value=False,
            callback=keep,
            help="Show these columns, in this order and whole.",
        ),
    )(function)


def show_rows(
    rows: Sequence[Row | Struct], columns: Sequence[TableColumn], output: str, empty: str
) -> None:
    """Write rows to stdout; in place of an empty table, write `empty` to stderr."""
    if output in ("json", "yaml"):
        show_data([chosen_fields(row, columns) for row in rows], output)
    elif output not in ("ndjson", "csv") and not rows:
        click.echo(empty, err=True)
    else:
        shown = row_lines(rows, columns, output)
        if shown.lines:
            _write(shown.lines)
        if shown.note:
            click.echo(shown.note, err=True)


def _write(lines: Sequence[str]) -> None:
    # Otherwise click removes colours where stdout is no terminal, also from users' data in CSV.
    click.echo("\n".join(lines), color=True)


def show_one(row: Row | Struct, columns: Sequence[TableColumn], output: str) -> None:
    """Write one row to stdout: as rows, or as a JSON or YAML object."""
    if output in ("json", "yaml"):
        show_data(chosen_fields(row, columns), output)
    else:
        show_rows([row], columns, output, "")


def row_lines(
    rows: Sequence[Row | Struct],
    columns: Sequence[TableColumn],
    output: str,
    *,
    titles: bool = True,
    widths: Widths | None = None,
) -> FittedTable:
    """Return the lines of rows, for output that continues; JSON is a line for each row.

    Args:
        titles: whether a table or CSV begins with its titles; without, a table keeps its columns.
        widths: of the rows before, so that columns stay aligned; they are updated.
    """
    shown = shown_columns(columns, output)
    if output in ("json", "ndjson"):
        return FittedTable([json_text(chosen_fields(row, columns)) for row in rows])
    if output == "yaml":
        data = [chosen_fields(row, columns) for row in rows]
        return FittedTable([line for row in data for line in ("---", *yaml_lines(row))])
    if output == "csv":
        written = io.StringIO()
        writer = csv.writer(written, lineterminator="\n")
        if titles:
            writer.writerow([column.name for column in shown])
        for row in rows:
            values = [column.value(row) for column in shown]
            if sys.stdout.isatty():
                values = [escaped(each) if isinstance(each, str) else each for each in values]
            writer.writerow(values)
        return FittedTable(written.getvalue().rstrip("\n").split("\n") if rows or titles else [])
    fit = output == "table" and not _asked_columns()
    return table(rows, shown, sys.stdout, fit=fit, titles=titles, before=widths)


class RowStream:
    """Writes rows to stdout as they come: as one table or CSV, or in JSON a line for each row."""

    def __init__(self, columns: Sequence[TableColumn], output: str) -> None:
        self._columns = columns
        self._output = output
        self._titles = True
        self._widths: Widths = {}

    def write(self, rows: Sequence[Row | Struct]) -> None:
        """Write rows; raise BrokenPipeError if the reader has gone."""
        if not rows:
            return
        titles, widths = self._titles, self._widths
        shown = row_lines(rows, self._columns, self._output, titles=titles, widths=widths)
        _write(shown.lines)
        sys.stdout.flush()
        if shown.note:
            click.echo(shown.note, err=True)
        self._columns = [one for one in self._columns if one.title not in shown.left_out]
        self._titles = False


def shown_columns(columns: Sequence[TableColumn], output: str) -> list[TableColumn]:
    """Return the columns to show in this format: those of `--columns`, if it is given."""
    asked = _asked_columns()
    if not asked:
        return [column for column in columns if output in ("wide", "csv") or not column.wide]
    by_name = {column.name: column for column in columns}
    unknown = [name for name in asked if name not in by_name]
    if unknown:
        known = ", ".join(by_name)
        raise click.UsageError(f"--columns: there is no column {unknown[0]!r}; there are {known}")
    return [by_name[name] for name in asked]


def chosen_fields(row: Row | Struct, columns: Sequence[TableColumn]) -> Row:
    """Return a row's data for JSON and YAML: whole, or the columns of `--columns`."""
    if not _asked_columns():
        return dict(msgspec.to_builtins(row)) if isinstance(row, Struct) else row
    return {column.name: column.value(row) for column in shown_columns(columns, "json")}


def _asked_columns() -> list[str]:
    context = click.get_current_context(silent=True)
    return [] if context is None else context.meta.get(_COLUMNS_KEY, [])


def show_data(data: Any, output: str) -> None:
    """Write data to stdout, as JSON or YAML."""
    data = msgspec.to_builtins(data)
    click.echo("\n".join(yaml_lines(data)) if output == "yaml" else json_text(data, indent=2))


def json_text(data: Any, indent: int | None = None) -> str:
    """Return JSON that stdout's encoding can represent."""
    return _escaped_json(json.dumps(data, indent=indent, ensure_ascii=not is_utf8(sys.stdout)))


def _escaped_json(text: str) -> str:
    """Return the same JSON with escapes in place of characters that a terminal obeys."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def table(
    rows: Sequence[Row | Struct],
    columns: Sequence[TableColumn],
    stream: TextIO,
    *,
    fit: bool = True,
    titles: bool = True,
    before: Widths | None = None,
) -> FittedTable:
    """Return a table for the terminal of `stream`; no lines without rows.

    Args:
        fit: leave out columns and shorten free text where the terminal is narrow.
        before: least widths, which are updated.
    """
    if not rows:
        return FittedTable([])
    from rich.cells import cell_len, set_cell_size

    suited = str if is_utf8(stream) else in_ascii
    cells = {column: [suited(cell(column.value(row))) for row in rows] for column in columns}
    least = {} if before is None else before
    widths = {
        c: max(least.get(c.title, 0), cell_len(c.title), *map(cell_len, cells[c])) for c in columns
    }
    least.update({column.title: width for column, width in widths.items()})
    left_out = _fit(widths, width_of(stream), drop=titles) if fit else ()
    heading = [f"{column.title:<{width}}" for column, width in widths.items()]
    lines = []
    if titles:
        bold = click.style((" " * _GAP).join(heading).rstrip(), bold=True)
        lines.append(bold if has_colours(stream) else click.unstyle(bold))
    more = suited("…")
    for number in range(len(rows)):
        parts = []
        for column, width in widths.items():
            text = cells[column][number]
            if cell_len(text) > width:
                text = set_cell_size(text, width - len(more)) + more
            parts.append(set_cell_size(text, width))
        lines.append((" " * _GAP).join(parts).rstrip())
    return FittedTable(lines, left_out)


def _fit(widths: dict[TableColumn, int], total: int, *, drop: bool) -> tuple[str, ...]:
    """Reduce the widths of columns to `total`; return the titles of those that were removed."""

    def excess(least: Callable[[TableColumn], int]) -> int:
        return sum(map(least, widths)) + _GAP * (len(widths) - 1) - total

    def least_width(column: TableColumn) -> int:
        return min(widths[column], _TEXT_MIN) if column.text else widths[column]

    left_out = []
    while drop and excess(least_width) > 0:
        order = [column for column in widths if not column.keep]
        if not order:
            break
        ranked = max(enumerate(order), key=lambda each: (each[1].rank, each[0]))[1]
        del widths[ranked]
        left_out.append(ranked.title)
    while (over := excess(widths.__getitem__)) > 0:
        texts = [column for column in widths if least_width(column) < widths[column]]
        if not texts:
            break
        widest = max(texts, key=widths.__getitem__)
        widths[widest] -= min(over, widths[widest] - least_width(widest))
    return tuple(left_out)


def width_of(stream: TextIO) -> int:
    """Return the width of a stream's terminal; a file or pipe takes whole rows."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if not stream.isatty():
        return sys.maxsize
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH_DEFAULT
    except OSError:
        return _WIDTH_DEFAULT


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours and bold text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return printable(str(value))


def escaped(text: str) -> str:
    """Return text as one line that a terminal shows and does not obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


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


def since(at_ms: int) -> str:
    """Return the time that has passed since a time in milliseconds since 1970."""
    return duration(time.time() - at_ms / 1000)


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
    elif isinstance(data, list | tuple) and data:
        for value in data:
            first, *rest = yaml_lines(value, f"{indent}  ")
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from rest
    else:
        yield indent + _scalar(data)


def _is_block(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON's scalars, empty list and empty map are valid YAML; surrogate pairs are not.
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 would read 1e-05 as text
    return _escaped_json(text)


@contextmanager
def progress(*, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Yield what shows a part of 1 and a text as a progress bar: on stderr, on a terminal only.

    None as the part takes the bar away, so that its line can be written.
    """
    if hidden or not sys.stderr.isatty():
        yield lambda done, text="": None
        return
    from rich import progress as bars
    from rich.console import Console

    text, left = bars.TextColumn("{task.description}"), bars.TimeRemainingColumn()
    columns = (bars.BarColumn(), bars.TaskProgressColumn(), text, left)
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(done: float | None, text: str = "") -> None:
            gone = done is None
            bar.update(task, completed=done, description=text, visible=not gone, refresh=gone)

        yield show


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
