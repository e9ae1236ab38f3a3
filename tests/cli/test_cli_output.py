"""Tables, YAML and times, without a proxy."""

from __future__ import annotations

import io
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from txbroker.cli.output import TableColumn, cell, clock, duration, printable, table, yaml_lines

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e9, 1e9)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(DATA)
@example(5e-324)
@example([1e16, -1.5e-7])
def test_yaml_output_parses_back(data: Any) -> None:
    assert yaml.safe_load("\n".join(yaml_lines(data))) == data


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0s"), (0.4, "0s"), (59, "59s"), (61, "1m01s"), (3700, "1h01m"), (90000, "1d01h")],
)
def test_time_spans(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_times() -> None:
    assert clock(1795230096218) == "2026-11-21 03:01:36.218Z"
    assert clock(None) == ""
    assert clock(10**18) == f"{10**18} ms"


@given(st.text())
def test_output_cannot_move_the_cursor(text: str) -> None:
    assert printable(text).isprintable()


@given(
    st.lists(st.lists(st.text(max_size=40), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(1, 200),
)
def test_narrow_table_shortens_only_allowed_columns(rows: list[list[str]], width: int) -> None:
    columns = [TableColumn(str(n), lambda row, n=n: row[str(n)], keep=n == 0) for n in range(3)]  # type: ignore[misc]
    data = [{str(n): value for n, value in enumerate(row)} for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        lines = table(data, columns, io.StringIO())
    assert len(lines) == len(rows) + 1
    assert all(cell_len(line) <= width for line in lines)
    kept = [cell(row[0]) for row in rows]
    if max(map(cell_len, [*kept, "0"])) + 2 * 5 + 2 * 2 <= width:
        assert all(line.startswith(text) for line, text in zip(lines[1:], kept, strict=True))


def test_table_without_rows_is_empty() -> None:
    assert table([], [TableColumn("X", str)], io.StringIO()) == []
