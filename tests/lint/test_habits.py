"""Limits of files, classes, functions, imports, words and commits; `habits.toml` has them.

What exceeds a limit stands in the file with its value, which may only fall: a lower value has to
be written down, so that nothing grows back.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.lint.package import (
    MODULES,
    PACKAGE,
    PYTHON,
    ROOT,
    committed,
    imported,
    name_of,
    own_imports,
    reached_own,
    statements,
)

TABLE = "tests/lint/habits.toml"
HABITS: dict[str, Any] = tomllib.loads((ROOT / TABLE).read_text())
PRODUCTS = ("consumer", "relay", "sdk", "proxy", "spark")
SUBJECT = 60


class Measured(NamedTuple):
    """A value, of what, and where it stands: file and line."""

    name: str
    value: float
    place: str


def compare(measure: str, found: Iterable[Measured]) -> None:
    """Hold values against the limit of a measure and its exceptions."""
    habit = HABITS[measure]
    limit, kept = habit["limit"], dict(habit.get("above", {}))
    faults = []
    for name, value, place in found:
        allowed = kept.pop(name, limit)
        about = f"{place}: {measure}: {name} has {value}"
        if value > allowed:
            faults.append(f"{about}, the limit is {allowed}: {habit['do']}")
        elif value < allowed and allowed > limit:
            faults.append(f"{about}: write it into {TABLE}, which still has {allowed}")
    faults += [f"{TABLE}: {measure}: {name} is gone: delete its line" for name in kept]
    assert not faults, "\n".join(faults)


def classes() -> Iterator[tuple[str, str, ast.ClassDef]]:
    """Yield the classes of the package by module and name, with their places."""
    for module, path in MODULES.items():
        for node in statements(path):
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", f"{name_of(path)}:{node.lineno}", node


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions directly within a class or module."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner


def test_folders_stay_small() -> None:
    files = Counter(name_of(path.parent) for path in PACKAGE if path.name != "__init__.py")
    compare("files of a folder", (Measured(name, n, name) for name, n in files.items()))


def test_constructors_take_few_arguments() -> None:
    compare(
        "arguments of a constructor",
        (
            Measured(name, len(each.args.args) + len(each.args.kwonlyargs) - 1, place)
            for name, place, node in classes()
            for each in functions(node)
            if each.name == "__init__"
        ),
    )


def test_classes_have_few_methods() -> None:
    compare(
        "methods of a class",
        (Measured(name, len([*functions(node)]), place) for name, place, node in classes()),
    )


def test_class_names_have_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for _, place, node in classes():
        places.setdefault(node.name, []).append(place)
    compare(
        "classes with the name",
        (Measured(name, len(found), ", ".join(found)) for name, found in places.items()),
    )


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes of `self` that the functions of a class assign."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }


def test_classes_have_few_attributes() -> None:
    compare(
        "attributes of a class",
        (Measured(name, len(attributes(node)), place) for name, place, node in classes()),
    )


def test_functions_stay_short() -> None:
    longest: dict[str, Measured] = {}
    for path in PYTHON:
        for node in statements(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{name_of(path)}: {node.name}"
                length = (node.end_lineno or 0) - node.lineno + 1
                if name not in longest or longest[name].value < length:
                    longest[name] = Measured(name, length, f"{name_of(path)}:{node.lineno}")
    compare("lines of a function", longest.values())


# --- imports ---------------------------------------------------------------------------------


def test_modules_import_few_others() -> None:
    counts = []
    for module, path in MODULES.items():
        bases = {base for base, names, _ in imported(path) if names}
        own = [base for base in bases if base.partition(".")[0] == "txbroker"]
        counts.append(Measured(module, len(own), name_of(path)))
    compare("imports of a module", counts)
    median = statistics.median_high(count.value for count in counts)
    nearest = min((count.value for count in counts if count.value > median), default=median)
    near = [count.place for count in counts if count.value == nearest]
    compare("median of imports", [Measured("the package", median, ", ".join(near[:5]))])


def test_no_modules_import_each_other() -> None:
    reach = {module: reached_own(module).keys() - {module} for module in MODULES}
    found = []
    for module, others in reach.items():
        circle = {other for other in others if module in reach[other]}
        line = min(
            (line for name, line in own_imports(module).items() if name in circle), default=1
        )
        found.append(Measured(module, len(circle), f"{name_of(MODULES[module])}:{line}"))
    compare("modules in a circle of imports with", found)


def room_of(module: str) -> str:
    """Return the folder directly below `txbroker/` that holds a module, "txbroker" for none."""
    parts = MODULES[module].relative_to(ROOT).parts[:-1]
    return next((part for part in parts if part != "txbroker"), "txbroker")


def test_products_span_few_rooms() -> None:
    found = []
    for product in PRODUCTS:
        own = [module for module in MODULES if room_of(module) == product]
        ways: dict[str, str] = {}
        for module, way in reached_own(*own).items():
            ways.setdefault(room_of(module), f"{room_of(module)} by {way}" if way else "itself")
        found.append(Measured(product, len(ways), ", ".join(ways.values())))
    compare("rooms that a product spans", found)


# --- words -----------------------------------------------------------------------------------


def text_files() -> Iterator[Path]:
    """Yield what is written for people: code, docs, templates, charts."""
    own = ROOT / "tests/lint"
    for path in committed("*.py", "*.md", "*.html", "*.yaml", "*.toml", "Makefile"):
        if own not in path.parents and name_of(path) not in HABITS["words"]["quoted in"]:
            yield path


def plain(text: str) -> str:
    """Return a text in lower case, with names as words."""
    return text.replace("_", " ").lower()


def lines_with(pattern: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of a line for each place where a plain text has a pattern."""
    # A pattern that begins with its letters is found several times faster than after `\b`.
    for found in re.finditer(pattern, text):
        start = found.start()
        if not text[max(0, start - 1) : start].isalnum():
            number = text.count("\n", 0, start) + 1
            yield number, text.splitlines()[number - 1].strip()


def before(path: Path) -> str:
    """Return the plain text of a file when the table was changed last; "" without one."""
    since = git("log", "-1", "--format=%H", "--", TABLE).strip()
    shown = ["git", "show", f"{since}:{name_of(path)}"]
    return plain(subprocess.run(shown, cwd=ROOT, capture_output=True, text=True).stdout)


def test_words_are_those_of_the_field() -> None:
    words = HABITS["words"]
    texts = {path: plain(path.read_text()) for path in text_files()}
    faults = [
        f"{name_of(path)}:{number}: {pattern!r}: write {instead}"
        for pattern, instead in words["rejected"].items()
        for path, text in texts.items()
        for number, _ in lines_with(pattern, text)
    ]
    for pattern, word in words["rare"].items():
        found = {path: [*lines_with(pattern, text)] for path, text in texts.items()}
        count = sum(map(len, found.values()))
        if count > word["count"]:
            about = f"{pattern!r} occurs {count} times, {word['count']} are allowed"
            faults += [
                f"{place}: {about}: write {word['instead']}" for place in new(pattern, found)
            ]
    assert not faults, "\n".join(faults)


def new(pattern: str, found: dict[Path, list[tuple[int, str]]]) -> Iterator[str]:
    """Yield the places of lines that were not there when the table was changed last."""
    for path, lines in found.items():
        old = Counter(line for _, line in lines_with(pattern, before(path)) if lines)
        for number, line in lines:
            old[line] -= 1
            if old[line] < 0:
                yield f"{name_of(path)}:{number}"


# --- commits ---------------------------------------------------------------------------------


def git(*words: str) -> str:
    """Return the output of a command of git."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_commits_have_short_subjects_and_say_why() -> None:
    first = git("log", "--format=%H", "--diff-filter=A", "--", TABLE).split()
    faults = []
    if first:  # a shallow clone does not have it
        log = git("log", "--no-merges", "--format=%h%x00%s%x00%b%x01", f"{first[-1]}..HEAD")
        for entry in filter(str.strip, log.split("\x01")):
            commit, subject, body = entry.strip("\n").split("\0")
            if len(subject) > SUBJECT or not body.strip():
                faults.append(f"{commit}: {subject!r}: {len(subject)} characters, body {body!r}")
    assert faults == []
