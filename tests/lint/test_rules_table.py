"""Every rule has its place on the page, code, tests and a mutant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.rules.mutants import ROOT, defined, definitions, mutants

RULES = [*map(str, range(1, 30)), "Topics"]
PAGE = (ROOT / "docs/reference/rules.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\.? ?[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def marked(node: ast.stmt) -> Iterator[str]:
    """Yield the rules in the marks of a test."""
    for mark in getattr(node, "decorator_list", ()):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
            yield from (str(ast.literal_eval(each)).capitalize() for each in mark.args)


def rules_of_tests() -> dict[str, set[str]]:
    """Return the rules of each marked test, by its file and name."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "pytest.mark.rule(" in source:
            for name, node in definitions(source).items():
                if rules := set(marked(node)):
                    found[f"{path.relative_to(ROOT)}::{name}"] = rules
    return found


MARKED = rules_of_tests()


def test_page_has_every_rule_with_code_and_a_marked_test() -> None:
    assert list(SECTIONS) == RULES
    for rule, section in SECTIONS.items():
        code, test = re.findall(r"^Code: (.*?) *\nTest: `(.*)`$", section, re.M)[0]
        for name in re.findall(r"`([^`]+)`", code):
            assert name in defined(), (rule, name)
        assert rule in MARKED[test], (rule, test)


def test_every_mutant_can_be_made_and_its_test_is_marked() -> None:
    faults = []
    for mutant in mutants():
        name = f"{mutant.rule}: {mutant.what}"
        try:
            for source in mutant.sources(ROOT).values():
                ast.parse(source)
        except ValueError as error:
            faults.append(f"{name}: {error}")
        rules = MARKED.get(mutant.test.partition("[")[0], set())
        faults += [
            f"{name}: {mutant.test} is not marked with rule {rule}"
            for rule in mutant.rule.split(", ")
            if rule.capitalize() not in rules
        ]
    assert faults == []


def test_every_rule_has_a_mutant() -> None:
    assert {rule.capitalize() for m in mutants() for rule in m.rule.split(", ")} >= set(RULES)
