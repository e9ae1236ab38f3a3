"""Limits of files, classes, functions, words and commits; `habits.toml` has them.

What exceeds a limit stands in the file with its value, which may only fall: a lower value has to
be written down, so that nothing grows back.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.lint.test_tidy import MODULES, PACKAGE, PYTHON, ROOT, committed, name_of

HABITS: dict[str, Any] = tomllib.loads((ROOT / "tests/lint/habits.toml").read_text())
SUBJECT = 60


def compare(measure: str, values: Mapping[str, int]) -> None:
    """Hold values against the limit of a measure and its exceptions."""
    habit = HABITS[measure]
    limit, kept = habit["limit"], habit.get("above", {})
    above = {name: value for name, value in values.items() if value > limit}
    grown = {name: value for name, value in above.items() if value > kept.get(name, limit)}
    assert grown == {}, f"{measure}: split or simplify instead of raising the limit of {limit}"
    assert above == kept, f"{measure}: write the lower values into habits.toml"


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes of the package by module and name."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", node


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions directly within a class or module."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner


def test_folders_stay_small() -> None:
    files = Counter(name_of(path.parent) for path in PACKAGE if path.name != "__init__.py")
    compare("files of a folder", files)


def test_constructors_take_few_arguments() -> None:
    counts = {
        name: len(function.args.args) + len(function.args.kwonlyargs) - 1
        for name, node in classes()
        for function in functions(node)
        if function.name == "__init__"
    }
    compare("arguments of a constructor", counts)


def test_classes_have_few_methods() -> None:
    compare("methods of a class", {name: len([*functions(node)]) for name, node in classes()})


def test_modules_import_few_others() -> None:
    imports = {}
    for module, path in MODULES.items():
        nodes = ast.walk(ast.parse(path.read_text()))
        named = (each.module or "" for each in nodes if isinstance(each, ast.ImportFrom))
        imports[module] = len({name for name in named if name.startswith("txbroker")})
    compare("imports of a module", imports)


def test_functions_stay_short() -> None:
    lengths: dict[str, int] = {}
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{name_of(path)}: {node.name}"
                length = (node.end_lineno or 0) - node.lineno + 1
                lengths[name] = max(length, lengths.get(name, 0))
    compare("lines of a function", lengths)


# --- words -----------------------------------------------------------------------------------


def text_files() -> Iterator[Path]:
    """Yield what is written for people: code, docs, templates, charts."""
    own = ROOT / "tests/lint"
    for path in committed("*.py", "*.md", "*.html", "*.yaml", "*.toml", "Makefile"):
        if own not in path.parents and name_of(path) not in HABITS["words"]["quoted in"]:
            yield path


def test_words_are_those_of_the_field() -> None:
    words = HABITS["words"]
    found = []
    counts: Counter[str] = Counter()
    for path in text_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            plain = line.replace("_", " ")
            for pattern, instead in words["rejected"].items():
                if re.search(rf"\b{pattern}", plain, re.I):
                    found.append(f"{name_of(path)}:{number}: {pattern!r}: write {instead}")
            for pattern in words["rare"]:
                counts[pattern] += len(re.findall(rf"\b{pattern}", plain, re.I))
    assert found == []
    grown = {word: count for word, count in counts.items() if count > words["rare"][word]}
    assert grown == {}, "rare words may only become rarer"


# --- commits ---------------------------------------------------------------------------------


def test_commits_have_short_subjects_and_say_why() -> None:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    first = git("log", "--format=%H", "--diff-filter=A", "--", "tests/lint/habits.toml").split()
    faults = []
    if first:  # a shallow clone does not have it
        log = git("log", "--no-merges", "--format=%h%x00%s%x00%b%x01", f"{first[-1]}..HEAD")
        for entry in filter(str.strip, log.split("\x01")):
            commit, subject, body = entry.strip("\n").split("\0")
            if len(subject) > SUBJECT or not body.strip():
                faults.append(f"{commit}: {subject!r}: {len(subject)} characters, body {body!r}")
    assert faults == []
