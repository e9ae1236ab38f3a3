"""The pages about the audit tell of every table, column and finding that there is."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from txbroker.cli.audit.output import STATES
from txbroker.spark import schema
from txbroker.spark.journal import Journal

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "audit-tables.md").read_text()


def section(title: str) -> str:
    """Return what stands between a heading, or a table's name, and the next."""
    found = re.search(
        rf"(?:^## {title}$|^`{title}`, a row)(.*?)(?=^## |^`\w+`, a row|\Z)", PAGE, re.M | re.S
    )
    assert found is not None, title
    return found[1]


@pytest.mark.parametrize(
    ("title", "ddl"),
    [
        ("Verdicts", schema.VERDICT),
        ("half", schema.HALF),
        ("op", schema.OP),
        ("visible", schema.VISIBLE),
        ("parked", schema.PARKED),
        ("broken", schema.BROKEN),
    ],
)
def test_every_column_is_described(title: str, ddl: str) -> None:
    flat = re.sub(r"struct<[^>]*>", "struct", ddl)
    columns = re.findall(r"(\w+) (?:string|int|bigint|boolean|date|array)", flat)
    assert len(columns) == len(flat.split(","))
    described = set(re.findall(r"`(\w+)`", section(title)))
    assert [column for column in columns if column not in described] == []


def test_every_finding_is_described_the_gravest_first() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ", section("Findings"), re.M)
    assert rows == [(kind.name, kind.title) for kind in schema.ALL_KINDS]


def test_each_verdict_without_findings_has_a_meaning_in_the_cli() -> None:
    table = section("Verdicts").partition("without findings")[2]
    named = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert len(named) == 7
    assert [name for name in named if name not in STATES] == []


def test_the_journal_is_described(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "audit.db")
    journal.add(schema.RunSummary("r", "full", 0, 0.0, None, {}, 0, {}, {"late": 1}))
    with sqlite3.connect(journal.path) as db:
        columns = {
            column[1]
            for (table,) in db.execute("select name from sqlite_master where type = 'table'")
            for column in db.execute(f"pragma table_info({table})")
        }
    assert columns - set(re.findall(r"`(\w+)`", section("Journal"))) == set()
