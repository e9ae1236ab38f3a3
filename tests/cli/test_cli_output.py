"""Tables, YAML and times, without a proxy."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.cli.cli_stub import Stub
from tests.cli.terminals import Run
from tests.kit.cli import Call
from txbroker.cli.output import (
    TableColumn,
    cell,
    clock,
    duration,
    printable,
    show_rows,
    table,
    yaml_lines,
)

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


@pytest.mark.parametrize("output", ["csv", "json", "ndjson", "yaml", "table"])
def test_no_format_moves_the_cursor_of_a_terminal(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b[2J\x07\r\n\x9b31m\u202eline"
    columns = [TableColumn("KEY")]
    screen = io.StringIO(newline="")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    show_rows([{"key": evil}], columns, output, "")
    shown = screen.getvalue()
    assert shown.replace("\n", "").isprintable(), shown
    monkeypatch.setattr(screen, "isatty", lambda: False)
    screen.seek(0)
    screen.truncate()
    show_rows([{"key": evil}], columns, "csv", "")
    rows = list(csv.DictReader(io.StringIO(screen.getvalue(), newline="")))
    assert rows[0]["key"] == evil  # a program gets it as it is


@given(
    st.lists(st.tuples(*[st.text(max_size=20)] * 4), min_size=1, max_size=3),
    st.integers(1, 200),
)
def test_narrow_table_shortens_only_free_text(rows: list[tuple[str, ...]], width: int) -> None:
    columns = [
        TableColumn(str(n), lambda row, n=n: row[str(n)], keep=n == 0, rank=5 - n, text=n == 3)  # type: ignore[misc]
        for n in range(4)
    ]
    data = [{str(n): value for n, value in enumerate(row)} for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        shown = table(data, columns, io.StringIO())
    assert len(shown.lines) == len(rows) + 1
    kept = [cell(row[0]) for row in rows]
    widest = max(map(cell_len, [*kept, "0"]))
    assert all(cell_len(line) <= max(width, widest) for line in shown.lines)
    for row, line in zip(rows, shown.lines[1:], strict=True):
        whole = [cell(row[n]) for n in range(3) if str(n) not in shown.left_out]
        assert all(text in line for text in whole)
        assert line.startswith(whole[0])
    ranked = [str(n) for n in range(1, 4)]
    assert list(shown.left_out) == ranked[: len(shown.left_out)]
    assert bool(shown.note) == bool(shown.left_out)


def test_table_without_rows_is_empty() -> None:
    assert table([], [TableColumn("X", str)], io.StringIO()).lines == []


# --- formats and columns ----------------------------------------------------------------------


def test_columns_are_chosen_in_each_format(call: Call, stub: Stub) -> None:
    ids = stub.add(2)
    chosen = ("tx", "list", "--url", stub.url, "--columns", "state,ID,next-check")
    lines = call(*chosen).out.splitlines()
    assert [line.split() for line in lines] == [
        ["STATE", "ID", "NEXT", "CHECK"], *(["parked", id, "-"] for id in ids)
    ]  # fmt: skip
    rows = [{"state": "parked", "id": id, "next_check": ""} for id in ids]
    assert call(*chosen, "-o", "json").json == rows
    assert yaml.safe_load(call(*chosen, "-o", "yaml").out) == rows
    assert [json.loads(line) for line in call(*chosen, "-o", "ndjson").out.splitlines()] == rows
    assert list(csv.DictReader(io.StringIO(call(*chosen, "-o", "csv").out))) == rows


def test_csv_has_all_columns_and_ndjson_whole_rows(call: Call, stub: Stub) -> None:
    (id,) = stub.add(1)
    stub.rows[id]["group"] = 'a "b",\nc'
    (row,) = csv.DictReader(io.StringIO(call("tx", "list", "-o", "csv", "--url", stub.url).out))
    assert (row["id"], row["group"], row["half"]) == (id, 'a "b",\nc', "0@0")
    assert json.loads(call("tx", "list", "-o", "ndjson", "--url", stub.url).out) == stub.rows[id]


@pytest.mark.parametrize("output", ["csv", "ndjson"])
def test_nothing_is_no_row(call: Call, stub: Stub, output: str) -> None:
    shown = call("tx", "list", "-o", output, "--url", stub.url)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.count("\n") == (output == "csv")


def test_unknown_column_is_named(call: Call, stub: Stub) -> None:
    stub.add(1)
    refused = call("tx", "list", "--columns", "id,colour", "--url", stub.url)
    assert (refused.code, refused.out) == (2, "")
    assert "there is no column 'colour'; there are id, group, state" in refused.err


# --- terminals --------------------------------------------------------------------------------

PLAIN = {"NO_COLOR": "1"}
DUMB = {"TERM": "dumb"}
ASCII = {"LANG": "C"}
POSIX = {"LC_ALL": "POSIX"}
LATIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("width", "environ"),
    [(20, {}), (60, {}), (80, {}), (120, {})]
    + [(80, environ) for environ in (PLAIN, DUMB, ASCII, POSIX, LATIN)],
    ids=str,
)
def test_any_terminal_shows_whole_ids(
    stub: Stub, on_terminal: Run, width: int, environ: dict[str, str]
) -> None:
    ids = stub.add(3)
    for row in stub.rows.values():
        row["group"] = "caf\u00e9-" + "orders-" * 4
        row["messages"] = [{"topic": f"a-long-name-of-a-topic-{n}", "partition": 0} for n in (1, 2)]
    home = {"HOME": "/proc", "XDG_CONFIG_HOME": ""}
    shown = on_terminal("tx", "list", "--url", stub.url, width=width, environ={**home, **environ})
    assert shown.end() == 0
    lines = shown.text.splitlines()
    assert [line[:26] for line in lines[1:4]] == ids
    assert "\ufffd" not in shown.text
    assert "Traceback" not in shown.text
    assert ("\x1b[" in shown.text) == (environ not in (PLAIN, DUMB))
    if width < 120:
        assert "Left out on this narrow terminal: " in shown.text
        assert all(len(line) <= max(width, 26) for line in lines[1:4])
        if environ in (ASCII, POSIX, LATIN):
            assert shown.text.isascii()
