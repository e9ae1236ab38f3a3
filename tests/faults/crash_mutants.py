"""Rules of the protocol taken out one by one: crashes at named moments must show it, by the judge.

Run as `python -m tests.faults.crash_mutants`, or with words of those to try. Each is an entry of
`tests/rules/mutants.toml`, tried in a copy of the tree, on a dedicated Kafka.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.rules.mutants import copy_of_the_tree, mutants, taken_out, try_each

ENOUGH_S = 600


class Shown(NamedTuple):
    """A mutant, the cases that show it, and the invariants one of which they break."""

    what: str
    cases: tuple[str, ...]
    invariants: tuple[str, ...]


SHOWN = (
    Shown("progress is left out of the turn", ("turn.visible:kill",), ("I3", "I11")),
    Shown("one transactional id is taken alone", (":pause:commit",), ("I3", "I11")),
    Shown("a transaction is not whole in its turn", ("turn.ended:kill",), ("I10",)),
    Shown("read_uncommitted reader", ("turn.produced:kill", "turn.begun:kill"), ("I1",)),
    Shown('"below progress" is read as skip', ("turn.visible:kill:commit",), ("I5", "I12")),
    Shown("an append without an answer is an ack", ("op.sending:timeout",), ("I5", "I15")),
    Shown("what a lost turn did is not looked up", ("turn.ended:timeout",), ("I3",)),
    Shown("called though the marker was not accepted", ("check.acquired:pause",), ("I8", "I9")),
)


def tried(tree: Path, shown: Shown) -> str:
    """Try one; return why it was not caught, "" if it was."""
    (mutant,) = (each for each in mutants() if each.what == shown.what)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.faults.crash_run", *shown.cases]
    with taken_out(mutant, tree):
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=ENOUGH_S,
        )
    lines = done.stdout.splitlines()
    broken = {line.split(" ")[0] for line in lines if line.startswith("I")}
    if any("is not answered" in line or "not true within" in line for line in lines):
        # Nothing came to rest, in a time in which everything does.
        broken.add("I12")
    if broken & set(shown.invariants):
        return ""
    return f"exit code {done.returncode}, broken: {sorted(broken)}\n{done.stdout[-3000:]}"


def main() -> int:
    """Try the chosen ones; return 1 if one is not caught."""
    words = sys.argv[1:]
    chosen = [each for each in SHOWN if not words or any(word in each.what for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_of_the_tree(tree)
        return try_each({shown.what: shown for shown in chosen}, partial(tried, tree))


if __name__ == "__main__":
    sys.exit(main())
