"""The page of the tables describes every column, with its type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from txbroker.spark.tables.layout import TABLES, Table

PAGE = (Path(__file__).parents[2] / "docs/reference/audit-tables.md").read_text()
_COLUMN = re.compile(r"(\w+) (\w+(?:<.*>)?)")


def parts(ddl: str) -> list[str]:
    """Split columns at the commas outside of `<>`."""
    found, depth = [""], 0
    for character in ddl:
        depth += (character == "<") - (character == ">")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [" ".join(part.split()) for part in found]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_page_has_every_column_of_a_table(table: Table) -> None:
    section = PAGE.partition(f"\n## {table.name.capitalize()}\n")[2].partition("\n## ")[0]
    described = re.findall(r"^\| `(\w+)` \| `(.+)` \| \S", section, re.MULTILINE)
    declared = [_COLUMN.fullmatch(part) for part in parts(table.ddl)]
    assert described == [each and each.groups() for each in declared]
    keys = ", ".join(f"`{key}`" for key in table.keys)
    assert f"Key: {keys}." in " ".join(section.split())
