"""The table of results in docs/reference/security-tests.md: class, case, result.

Each file of tests has `CLASS`, the number of its class of bad input. A test that passes is a row:
its name is the case, and the property `result`, else the first line of its docstring, the result.
`make security-table` writes the page, and a test holds the rows against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

CLASSES = {
    1: "Credentials: none, wrong, expired, revoked",
    2: "Another group's transactions",
    3: "Blank, missing and unknown groups",
    4: "Replayed calls",
    5: "Forged and truncated ids, cursors, cookies and signatures",
    6: "Rights withdrawn between prepare and promotion",
    7: "Forbidden check URLs in every spelling",
    8: "Impersonated check endpoints, and secrets of groups",
    9: "Answer bombs",
    10: "Fuzzing of HTTP, sessions and own topics",
    11: "Planted secrets",
    12: "Unsafe configurations",
    13: "A team with many groups and what all share",
}
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/security-tests.md"
WRITE = "TXBROKER_SECURITY_TABLE"
"""While this environment variable is set, the page is written and not compared."""
_FLEETS = ("one proxy", "two proxies")


class Row(NamedTuple):
    """One line of the table."""

    number: int
    case: str
    result: str


ROWS = pytest.StashKey[set[Row]]()
"""Where a test session keeps its rows."""


def row_of(item: pytest.Item, number: int, recorded: Mapping[str, object]) -> Row:
    """Return the row of a test that has passed; it is the same for one proxy and for two."""
    name, _, given = item.name.removeprefix("test_").partition("[")
    parts = given.removesuffix("]")
    for fleet in _FLEETS:
        parts = parts.removeprefix(fleet).removesuffix(f"-{fleet}")
        parts = parts.removeprefix("-") if given.startswith(fleet) else parts
    function = getattr(item, "function", None)
    doc = (getattr(function, "__doc__", None) or "").strip().partition("\n")[0].rstrip(".")
    case = f"{name.replace('_', ' ')}{f': {parts}' if parts else ''}"
    return Row(number, _cell(case), _cell(str(recorded.get("result", doc) or "passes")))


def _cell(text: str) -> str:
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return shown.replace("|", "\\|").replace("<", "&lt;")[:160]


def page_of(rows: Iterable[Row]) -> str:
    lines = [
        "<!-- Written by `make security-table`; edit the tests instead. -->",
        "# Security tests",
        "",
        "The result of each case of bad input in `tests/security`. Calls of an "
        "installation are made with one proxy and with two: credentials, other groups' "
        "transactions, unknown groups, replays, forgeries, withdrawn rights, fuzzed calls, what "
        "all share. What the classes protect is in [security](../operate/security.md).",
    ]
    found = sorted(set(rows))
    for number, title in CLASSES.items():
        lines += ["", f"## {number}. {title}", "", "| case | result |", "| --- | --- |"]
        lines += [f"| {row.case} | {row.result} |" for row in found if row.number == number]
    return "\n".join(lines) + "\n"


def rows_in(page: str) -> set[str]:
    """Return the lines of a page that are rows."""
    return {line for line in page.splitlines() if line.startswith("| ")}
