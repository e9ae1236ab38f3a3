"""Rules of the protocol taken out one by one: a run of faults must show it, by the judge.

Run as `python -m tests.faults.fault_mutants`, or with words of those to try. Each is an entry of
`tests/rules/mutants.toml`, tried in a copy of the tree: by crashes at named moments on a dedicated
Kafka, or by a soak on one of three nodes, with one seed after the other until it is caught.
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

SEEDS = (1, 2, 3)
MINUTES = 2
ENOUGH_S = 1200


class Shown(NamedTuple):
    """A mutant, the crashes (or with `protocol` the faults of a soak at this version of Kafka's
    transaction protocol) that show it, and the invariants one of which they break."""

    what: str
    by: tuple[str, ...]
    invariants: tuple[str, ...]
    protocol: int = 0

    def runs(self, tree: Path) -> list[list[str]]:
        """Return the commands to try until one of them catches it."""
        if not self.protocol:
            return [["tests.faults.crash_run", *self.by]]
        soak = ["tests.faults.cluster.soak_faults", "--protocol", str(self.protocol)]
        soak += ["--minutes", str(MINUTES), "--results", str(tree / "results.jsonl")]
        return [
            [*soak, "--folder", str(tree / f"h-{seed}"), "--seed", str(seed), "--only", *self.by]
            for seed in SEEDS
        ]


SHOWN = (
    Shown("progress is left out of the turn", ("turn.visible:kill",), ("I3", "I11")),
    Shown("one transactional id is taken alone", (":pause:commit",), ("I3", "I11")),
    Shown("a transaction is not whole in its turn", ("turn.ended:kill",), ("I10",)),
    Shown("read_uncommitted reader", ("turn.produced:kill", "turn.begun:kill"), ("I1",)),
    Shown('"below progress" is read as skip', ("turn.visible:kill:commit",), ("I5", "I12")),
    Shown("an append without an answer is an ack", ("op.sending:timeout",), ("I5", "I15")),
    Shown("what a lost turn did is not looked up", ("turn.ended:timeout",), ("I3",)),
    Shown("called though the marker was not accepted", ("check.acquired:pause",), ("I8", "I9")),
    Shown(
        "ghost guard off: an EndTxn without an answer is sent again",
        ("end of a turn late", "end of a turn late, connection reset", "end of a turn unanswered"),
        ("I1", "I3", "I10", "I11"),
        protocol=1,
    ),
)


def tried(tree: Path, shown: Shown) -> str:
    """Try one; return why it was not caught, "" if it was."""
    (mutant,) = (each for each in mutants() if each.what == shown.what)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    why = ""
    with taken_out(mutant, tree):
        for run in shown.runs(tree):
            done = subprocess.run(
                [sys.executable, "-m", *run],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=ENOUGH_S,
            )
            broken = broken_in(done.stdout)
            if broken & set(shown.invariants):
                return ""
            why = f"exit code {done.returncode}, broken: {sorted(broken)}\n{done.stdout[-3000:]}"
    return why


def broken_in(output: str) -> set[str]:
    """Return the invariants that a run reports as broken."""
    lines = [line.removeprefix("BROKEN: ") for line in output.splitlines()]
    broken = {line.split(" ")[0] for line in lines if line.startswith("I")}
    if any("is not answered" in line or "not true within" in line for line in lines):
        # Nothing came to rest, in a time in which everything does.
        broken.add("I12")
    return broken


def main() -> int:
    words = sys.argv[1:]
    chosen = [each for each in SHOWN if not words or any(word in each.what for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_of_the_tree(tree)
        return try_each({shown.what: shown for shown in chosen}, partial(tried, tree))


if __name__ == "__main__":
    sys.exit(main())
