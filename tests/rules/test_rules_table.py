"""The table of rules names what is there, and every mutant can be made."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.rules.mutants import ROOT, Mutant, mutants

PAGE = ROOT / "docs/reference/rules.md"
RULES = [*map(str, range(1, 30)), "topics"]
CELL = re.compile(r"`([^`]+)`")
MUTANTS = mutants()


@cache
def names(path: Path) -> frozenset[str]:
    """Return what a file defines: functions, classes, `Class.method` and constants."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


def rows() -> dict[str, tuple[list[str], list[str]]]:
    """Return code and tests of each rule as the page names them."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and "---" not in line and not line.startswith("| rule"):
            rule, _, code, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found[rule] = (CELL.findall(code), CELL.findall(tests))
    return found


ROWS = rows()


def test_every_rule_has_a_line() -> None:
    assert list(ROWS) == RULES
    assert all(code and tests for code, tests in ROWS.values())


@pytest.mark.parametrize("rule", ROWS)
def test_the_code_and_tests_of_a_rule_are_there(rule: str) -> None:
    code, tests = ROWS[rule]
    for entry in code:
        path, _, name = entry.partition(": ")
        assert not name or name in names(ROOT / path), entry
    for entry in tests:
        path, _, name = entry.partition("::")
        assert name in names(ROOT / "tests" / path), entry


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: f"{each.rule}: {each.what}")
def test_a_mutant_can_be_made_and_names_its_test(mutant: Mutant) -> None:
    for source in mutant.sources(ROOT).values():
        ast.parse(source)
    path, _, name = mutant.test.partition("::")
    assert name.partition("[")[0] in names(ROOT / path)
    named = f"{path.removeprefix('tests/')}::{name.partition('[')[0]}"
    assert any(named in tests for _, tests in ROWS.values()), f"{named} is not on the page"


def test_every_rule_has_a_mutant() -> None:
    taken_out = {rule for mutant in MUTANTS for rule in mutant.rule.split(", ")}
    assert taken_out >= set(RULES)
