"""Rules of the protocol taken out one by one: a run of real faults must show it, by the judge.

Run as `python -m tests.faults.cluster.soak_mutants`, or with words of those to try. Each is an
entry of `tests/rules/mutants.toml`, tried in a copy of the tree, on a Kafka of three nodes of its
own, with one seed after the other until it is caught.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.rules.mutants import copy_of_the_tree, mutants, taken_out, try_each

SEEDS = (1, 2, 3)
MINUTES = 2
ENOUGH_S = 1200


class Shown(NamedTuple):
    """A mutant, the faults that show it, the version of Kafka's transaction protocol that is
    spoken, and the invariants one of which they break."""

    what: str
    faults: tuple[str, ...]
    protocol: int
    invariants: tuple[str, ...]


SHOWN = (
    Shown(
        "ghost guard off: an EndTxn without an answer is sent again",
        ("end of a turn late", "end of a turn late, connection reset", "end of a turn unanswered"),
        1,
        ("I1", "I3", "I10", "I11"),
    ),
)


def tried(tree: Path, shown: Shown) -> str:
    """Try one; return why it was not caught, "" if it was."""
    (mutant,) = (each for each in mutants() if each.what == shown.what)
    broken: Mapping[str, int] = {}
    said = ""
    with taken_out(mutant, tree):
        for seed in SEEDS:
            broken, said = _run(tree, shown, seed)
            if set(broken) & set(shown.invariants):
                print(f"    seed {seed}: {dict(broken)}", flush=True)
                return ""
    return f"broken: {dict(broken)}\n{said[-3000:]}"


def _run(tree: Path, shown: Shown, seed: int) -> tuple[Mapping[str, int], str]:
    """Run with a seed; return how often each invariant was broken, and all that was said."""
    results = tree / "results.jsonl"
    results.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["--seed", str(seed), "--minutes", str(MINUTES), "--results", str(results)]
    options += ["--folder", str(tree / f"history-{shown.protocol}-{seed}")]
    options += ["--protocol", str(shown.protocol), "--only", *shown.faults]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.cluster.soak_faults", *options],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=ENOUGH_S,
    )
    broken = json.loads(results.read_text())["broken"] if results.exists() else {}
    return broken, done.stdout + done.stderr


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
