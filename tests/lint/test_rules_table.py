"""Every rule has its place on the page, code, tests and a mutant."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache

from tests.lint.package import ROOT
from tests.rules.mutants import Edit, changed, defined, definitions, mutants

RULES = [*map(str, range(1, 53)), "Topics"]
PAGE = (ROOT / "docs/reference/rules.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\.? ?[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def marked(node: ast.stmt) -> Iterator[str]:
    """Yield the rules in the marks of a test."""
    for mark in getattr(node, "decorator_list", ()):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
            yield from (str(ast.literal_eval(each)).capitalize() for each in mark.args)


@cache
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


def test_page_has_every_rule_with_code_and_a_marked_test() -> None:
    assert list(SECTIONS) == RULES
    for rule, section in SECTIONS.items():
        code, test = re.findall(r"^Code: (.*?) *\nTest: `(.*)`$", section, re.M)[0]
        for name in re.findall(r"`([^`]+)`", code):
            assert name in defined(), (rule, name)
        assert rule in rules_of_tests()[test], (rule, test)


def before(edit: Edit) -> ast.stmt:
    """Return the definition that an edit changes."""
    return definitions((ROOT / edit.file).read_text())[edit.name]


def test_every_mutant_can_be_made_and_its_test_is_marked() -> None:
    faults = []
    for mutant in mutants():
        name = f"{mutant.rule}: {mutant.what}"
        if not mutant.edits:
            faults.append(f"{name}: changes nothing")
        try:
            sources = mutant.sources(ROOT)
            parsed = {file: definitions(source) for file, source in sources.items()}
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        faults += [
            f"{name}: changes nothing in {edit.name}"
            for edit in mutant.edits
            if ast.dump(parsed[edit.file][edit.name]) == ast.dump(before(edit))
        ]
        rules = rules_of_tests().get(mutant.test.partition("[")[0], set())
        faults += [
            f"{name}: {mutant.test} is not marked with rule {rule}"
            for rule in mutant.rule.split(", ")
            if rule.capitalize() not in rules
        ]
    assert faults == []


def undefined(edit: Edit) -> Iterator[str]:
    """Yield the names that an edit adds to a definition, and that its module does not know.

    Such a mutant fails by a NameError or AttributeError, with or without its rule.
    """
    source = (ROOT / edit.file).read_text()
    known = {*re.findall(r"\w+", source), *dir(builtins)}
    nodes = list(ast.walk(ast.parse(changed(edit, source))))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    yield from {name.id for name in names} - known
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield from {node.attr} - known


def test_mutants_use_defined_names() -> None:
    faults = [
        (mutant.what, *names)
        for mutant in mutants()
        for edit in mutant.edits
        if (names := sorted(undefined(edit)))
    ]
    assert faults == []


def test_every_rule_has_a_mutant() -> None:
    assert {rule.capitalize() for m in mutants() for rule in m.rule.split(", ")} >= set(RULES)
