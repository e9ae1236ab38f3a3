"""Rules of the log protocol taken out one by one: the named test must fail each time.

Run all of them with `python -m tests.rules.mutants`, or those that hold a word with
`python -m tests.rules.mutants WORD…`. `--without-kafka` leaves out those that start a real Kafka.
The table is `mutants.toml`. The package is copied first; nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
PACKAGE = ("txbroker", "checkers", "cli")
COPIED = (*PACKAGE, "tests", "docs")
FILES = ("pyproject.toml", "setup.cfg")
TEST_TIMEOUT_S, ENDED_S = 30, 180
PASSED, FAILED = 0, 1

Tried = TypeVar("Tried")


class Edit(NamedTuple):
    """A text in a definition, as `ast.unparse` writes it, and the text in its place."""

    file: str
    name: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A rule taken out."""

    rule: str
    what: str
    edits: tuple[Edit, ...]
    test: str

    @property
    def real_kafka(self) -> bool:
        """Whether its test starts a Kafka."""
        files = (
            *(
                "test_unanswered",
                "kafka/test_in_kafka",
                "test_transaction_protocol",
                "test_forgotten",
            ),
            *(
                "kafka/test_delivering",
                "relay/test_relay.py",
                "test_partition.py",
                "test_member.py",
                "test_group_offsets",
                "test_group_member",
            ),
        )
        return "[kafka" in self.test or any(name in self.test for name in files)

    def sources(self, tree: Path) -> dict[str, str]:
        """Return the text of each changed file of a tree, by its path, with the rule taken out.

        Raises:
            ValueError: a definition is missing, or does not hold the text exactly once.
        """
        sources: dict[str, str] = {}
        for edit in self.edits:
            source = sources.get(edit.file) or (tree / edit.file).read_text()
            sources[edit.file] = edited(edit, source)
        return sources


def edited(edit: Edit, source: str) -> str:
    """Return the source of a module with an edit made."""
    node, text = definitions(source)[edit.name], changed(edit, source)
    lines = source.splitlines()
    start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
    lines[start : node.end_lineno] = textwrap.indent(text, " " * node.col_offset).splitlines()
    return "\n".join(lines) + "\n"


def changed(edit: Edit, source: str) -> str:
    """Return the changed definition of a module."""
    # Not within a name: `end` is not `append`.
    start, end = [r"\b" if each.isidentifier() else "" for each in (edit.old[0], edit.old[-1])]
    pattern = start + re.escape(edit.old) + end
    text, times = re.subn(pattern, lambda _: edit.new, ast.unparse(definitions(source)[edit.name]))
    if times != 1:
        raise ValueError(f"{edit.name} of {edit.file} holds {times} times: {edit.old!r}")
    return text


@lru_cache(maxsize=64)
def definitions(source: str) -> dict[str, ast.stmt]:
    """Return what a module defines by its name: functions, classes, their methods, constants."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        for name in _names(node):
            found[name] = node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                found |= {f"{name}.{inner_name}": inner for inner_name in _names(inner)}
    return found


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def defined() -> dict[str, list[str]]:
    """Return the files of the package that define each name."""
    found: dict[str, list[str]] = {}
    for folder in PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                for name in definitions(path.read_text()):
                    found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def file_of(where: str) -> tuple[str, str]:
    """Return file and name of a definition: `name`, or `module: name` where several have it.

    Raises:
        ValueError: no module, or more than one, defines it.
    """
    module, _, name = where.rpartition(": ")
    ending = f"/{module.replace('.', '/')}.py" if module else ".py"
    files = [file for file in defined().get(name, ()) if file.endswith(ending)]
    if len(files) != 1:
        raise ValueError(f"{where}: defined in {files or 'no module'}")
    return files[0], name


def mutants() -> list[Mutant]:
    """Return the table."""
    return [
        Mutant(
            rule,
            what,
            tuple(Edit(*file_of(where), *texts) for where, *texts in edits),
            f"tests/{test}",
        )
        for rule, table in tomllib.loads(TABLE.read_text()).items()
        for what, (test, *edits) in table.items()
    ]


def copy_of_the_tree(to: Path) -> None:
    """Copy what tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)


def run(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy and return pytest's exit code and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--timeout", str(TEST_TIMEOUT_S), *tests]
    # Without bytecode: a changed file of the same size and second would be taken for the old.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=ENDED_S,
        )
    except subprocess.TimeoutExpired:
        # The time limit of a test may interrupt its event loop where that cannot end any more.
        return FAILED, f"pytest did not end within {ENDED_S} s"
    return done.returncode, done.stdout + done.stderr


@contextmanager
def taken_out(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Make a mutant in a copy of the tree; undo it at the end."""
    changed = mutant.sources(tree)
    before = {file: (tree / file).read_text() for file in changed}
    try:
        for file, source in changed.items():
            (tree / file).write_text(source)
        yield
    finally:
        for file, source in before.items():
            (tree / file).write_text(source)


def survives(tree: Path, mutant: Mutant) -> str:
    """Try one mutant; return why it was not caught, "" if it was."""
    with taken_out(mutant, tree):
        code, output = run(tree, [mutant.test])
    if code == FAILED:
        return ""
    return "its test passes" if code == PASSED else f"pytest ended with {code}:\n{output[-2000:]}"


def main() -> int:
    """Try the chosen mutants; return 1 if one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants that hold one of these words")
    parser.add_argument("--without-kafka", action="store_true")
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in mutants()
        if not (given.without_kafka and mutant.real_kafka)
        if not given.words or any(word in " ".join(map(str, mutant)) for word in given.words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_of_the_tree(tree)
        code, output = run(tree, sorted({mutant.test for mutant in chosen}))
        if code != PASSED:
            print(f"without any mutant:\n{output[-4000:]}")
            return 1
        return try_each(
            {f"{mutant.rule}: {mutant.what}": mutant for mutant in chosen},
            lambda mutant: _with_place(mutant, survives(tree, mutant)),
        )


def _with_place(mutant: Mutant, why: str) -> str:
    return why and f"{mutant.edits[0].file}, {mutant.test}: {why}"


def try_each(chosen: Mapping[str, Tried], tried: Callable[[Tried], str]) -> int:
    """Try mutants by their names and print what becomes of each; return 1 if one is not caught.

    Args:
        tried: tries one; returns why it was not caught, "" if it was.
    """
    left = 0
    for name, each in chosen.items():
        why = tried(each)
        left += bool(why)
        print(f"{'SURVIVES' if why else 'caught  '} {name}", flush=True)
        if why:
            print(f"    {why}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} caught")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
