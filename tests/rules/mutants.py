"""Rules of the log protocol taken out one by one: the named test must fail each time.

Run all of them with `python -m tests.rules.mutants`, or those that hold a word with
`python -m tests.rules.mutants WORD…`. `--without-kafka` leaves out those that start a real Kafka.
The table is `mutants.toml`. The package is copied first; nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = ("txbroker", "checkers", "cli", "tests", "docs")
FILES = ("pyproject.toml", "setup.cfg")
TEST_TIMEOUT_S = 30
PASSED, FAILED = 0, 1

Tried = TypeVar("Tried")


class Mutant(NamedTuple):
    """A rule taken out: in `file` each text, which is there once, is replaced."""

    rule: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]
    test: str

    @property
    def real_kafka(self) -> bool:
        """Whether its test starts a Kafka."""
        files = (
            *("test_unanswered", "test_transaction_protocol", "test_forgotten"),
            *("test_partition", "test_member.py"),
        )
        return "[kafka" in self.test or any(name in self.test for name in files)


def mutants() -> list[Mutant]:
    """Return the table."""
    found = []
    for line in tomllib.loads(TABLE.read_text())["mutant"]:
        edits = [(line["old"], line["new"])]
        if "also_old" in line:
            edits.append((line["also_old"], line["also_new"]))
        mutant = Mutant(line["rule"], line["what"], line["file"], tuple(edits), line["test"])
        found.append(mutant)
    return found


def mutated(mutant: Mutant, source: str) -> str:
    """Return the source with the rule taken out.

    Raises:
        ValueError: a text is not there exactly once.
    """
    for old, new in mutant.edits:
        if source.count(old) != 1:
            raise ValueError(f"{mutant.file} holds {source.count(old)} times: {old!r}")
        source = source.replace(old, new)
    return source


def copy_of_the_tree(to: Path) -> None:
    """Copy what tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)


def run(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy and return pytest's exit code and what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--timeout", str(TEST_TIMEOUT_S), *tests]
    # Without bytecode: a changed file of the same size and second would be taken for the old.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def survives(tree: Path, mutant: Mutant) -> str:
    """Try one mutant; return why it was not caught, "" if it was."""
    path = tree / mutant.file
    source = path.read_text()
    path.write_text(mutated(mutant, source))
    try:
        code, said = run(tree, [mutant.test])
    finally:
        path.write_text(source)
    if code == FAILED:
        return ""
    return "its test passes" if code == PASSED else f"pytest ended with {code}:\n{said[-2000:]}"


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
        code, said = run(tree, sorted({mutant.test for mutant in chosen}))
        if code != PASSED:
            print(f"without any mutant:\n{said[-4000:]}")
            return 1
        return try_each(
            {f"{mutant.rule}: {mutant.what}": mutant for mutant in chosen},
            lambda mutant: _with_place(mutant, survives(tree, mutant)),
        )


def _with_place(mutant: Mutant, why: str) -> str:
    return why and f"{mutant.file}, {mutant.test}: {why}"


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
