"""Tables, YAML and times, without a proxy."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from txbroker.cli.output import clock, duration, printable, yaml_lines

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e9, 1e9)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(DATA)
def test_what_is_written_as_yaml_reads_back(data: Any) -> None:
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
def test_nothing_that_is_shown_moves_the_cursor(text: str) -> None:
    assert printable(text).isprintable()
