"""Whether the simulator catches its bugs:
`python -m tests.simulator.mutate [--room ROOM] [--seeds N] [WORD…]`.

The bugs are rules taken out, those of `tests/rules/mutants.toml`: one line of
one module is another one, in the memory of a process that is made for it. No file is changed, and
nothing in txbroker knows of it. Without words the mutants that must be caught in a room are tried.
Exits with 0 if each is caught within this number of seeds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

from tests.rules.mutants import ROOT, Mutant, mutants

MUST_BE_CAUGHT = {
    "proxies": (
        "progress is left out of the turn",
        "one transactional id is taken alone",
        "both ids in fixed order, without the claim record",
        "n+1 is ended after n's abort",
        "answered before it is read back",
        "own marker applied across a gap",
        "a snapshot holds what turns did that are not acknowledged",
        '"below progress" is read as skip',
        "called though the marker was not accepted",
        "`returned` on a timeout",
        "ids are forgotten by the wall clock",
        "ghost guard off: an EndTxn without an answer is sent again",
        "read_uncommitted reader",
        "a transaction is not whole in its turn",
        "the commit of the claim record ends what an earlier turn left open",
        "nobody asks whether earlier turns have ended in a target",
        "a turn is begun where a commit of its producer may be lost",
        "what an owner has read is accounted for",
    ),
    "consumers": (
        "unstable offsets are read",
        "offsets in a transaction have no generation",
        "offsets are stored outside of the transaction",
        "a producer whose transaction may be open is used again",
        "the result of an unanswered commit is not looked up",
        "an unanswered commit counts as stored",
        "outputs are stored before the position",
        "the position is stored in another transaction",
        "the position is read before the claim",
        "the token is not compared with a done row",
        "an unanswered commit of a result counts as executed",
        "a result has no done row",
        "the row of a handled message stays",
        "offsets are committed without generation",
        "a new owner keeps the token",
        "at most once: positions are stored after the handler",
    ),
    "relays": (
        "a relay reads its position before it claims",
        "a replaced relay is not fenced",
        "the position is stored in another Kafka transaction",
        "the rows of the last delivery are not marked",
        "rows are marked before Kafka has committed",
        "a unit is divided by the limit of a selection",
        "held keys do not hold later rows",
    ),
}
SEEDS = 1000
_CAUGHT, _LEFT = 3, 0
"""Exit codes of a trial; every other one, as of a crash, is an error of the trial."""


def table() -> dict[str, Mutant]:
    """Return the mutants by their description."""
    return {mutant.what: mutant for mutant in mutants()}


def module_of(file: str) -> str:
    """Return the name under which a file is imported."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts if parts[0] == "txbroker" else ("txbroker", *parts))


class _Mutated(SourceFileLoader):
    """Loads a module from another text than the one on disk."""

    source = ""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text; files and caches stay unchanged."""
        return compile(self.source, self.get_filename(fullname), "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules of a mutant, to load them with the rule taken out."""

    def __init__(self, mutant: Mutant) -> None:
        sources = mutant.sources(ROOT)
        self._sources = {module_of(file): source for file, source in sources.items()}
        self._looking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec with another loader."""
        if name not in self._sources or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        assert spec is not None
        assert spec.origin is not None
        loader = _Mutated(name, spec.origin)
        loader.source = self._sources[name]
        spec.loader = _typed(loader)
        return spec


def _typed(loader: Loader) -> Loader:
    return loader


def try_one(room: str, what: str, seeds: int) -> int:
    """Try seeds of a room with a mutant, in this very process, before it imports txbroker."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "txbroker"]
    assert not loaded, loaded
    sys.meta_path.insert(0, _Finder(table()[what]))
    from tests.simulator import simulate

    return _CAUGHT if simulate.try_many(room, range(seeds), 1, 1) else _LEFT


def _tried(
    room: str, whats: Sequence[str], seeds: int, jobs: int
) -> Iterator[tuple[str, int, str]]:
    """Yield each mutant with the exit code and output of its process."""

    def run(what: str) -> tuple[str, int, str]:
        of_room = ["--room", room, "--seeds", str(seeds)]
        command = [sys.executable, "-m", __spec__.name, *of_room, "--one", what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return what, done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run, whats)


def main() -> int:
    """Try what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants that hold one of these words")
    parser.add_argument("--room", choices=list(MUST_BE_CAUGHT), default="proxies")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many for each")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", help="this mutant, in this very process")
    given = parser.parse_args()
    if given.one:
        return try_one(given.room, given.one, given.seeds)
    whats: Sequence[str] = MUST_BE_CAUGHT[given.room]
    if given.words:
        known = table()
        whats = [what for what in given.words if what in known]
        whats = whats or [what for what in known if any(word in what for word in given.words)]
    left = 0
    for what, code, output in _tried(given.room, whats, given.seeds, given.jobs):
        lines = output.splitlines() or [""]
        if code not in (_CAUGHT, _LEFT):
            raise RuntimeError(f"{what}: the trial ended with {code}: {output}")
        left += code != _CAUGHT
        if code == _CAUGHT:
            violated = lines[1].partition(" ")[0] if len(lines) > 1 else ""
            seed = lines[0].partition(" failed")[0].partition(": ")[2]
            print(f"caught   {what}: {violated}, {seed}", flush=True)
        else:
            print(f"SURVIVES {what}: {lines[-2:]}", flush=True)
    print(f"{len(whats) - left} of {len(whats)} caught")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
