"""Compares txbroker with its peers on this machine, and writes docs/comparison.*.

Every round runs each peer once, sequentially, with new servers on free ports and in a temporary
folder. The page gives the reason for a peer that cannot run here. RocketMQ and dtm come from Maven
Central and the Go module proxy. `python -m benchmarks.compare` takes an hour, with `--rounds 1`
twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers.base import Missing, Peer, Plan
from benchmarks.peers.ceiling import Ceiling
from benchmarks.peers.dtm import Dtm
from benchmarks.peers.outbox import SqliteOutbox
from benchmarks.peers.outbox_postgres import PostgresOutbox
from benchmarks.peers.outbox_relay import EmittedPostgres, RelayedPostgres, RelayedSqlite
from benchmarks.peers.page import page, plot
from benchmarks.peers.read_process_write import ReadProcessWrite
from benchmarks.peers.rocketmq import RocketMQ
from benchmarks.peers.txbroker_itself import TXBROKERS

PEERS: tuple[Peer, ...] = (
    *TXBROKERS,
    RocketMQ(),
    Ceiling(),
    ReadProcessWrite(),
    SqliteOutbox(),
    RelayedSqlite(),
    PostgresOutbox(),
    RelayedPostgres(),
    EmittedPostgres(),
    Dtm(),
)
DOCS = Path(__file__).parents[1] / "docs"


_LOOK_S = 1.0


@dataclass(frozen=True)
class Machine:
    """The description of a machine in a report."""

    processor: str
    cores: int
    memory_gib: float
    system: str

    @classmethod
    def here(cls) -> Machine:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return cls(
            _processor(),
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
            round(pages * size / 2**30, 1),
            f"{platform.system()} {platform.release()}",
        )

    def __str__(self) -> str:
        return f"{self.cores} cores ({self.processor}), {self.memory_gib:g} GiB, {self.system}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_share() -> float | None:
    """Return the share of all cores that other processes use; None if unknown."""
    before = _ticks()
    time.sleep(_LOOK_S)
    after = _ticks()
    if before is None or after is None:
        return None
    idle, total = (new - old for new, old in zip(after, before, strict=True))
    return round(1 - idle / max(total, 1), 3)


def _ticks() -> tuple[int, int] | None:
    """Return the idle ticks of all cores, and all ticks."""
    with suppress(OSError):
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ticks = [int(field) for field in fields]
        return ticks[3] + ticks[4], sum(ticks)
    return None


class Comparison:
    """The measurements and their files."""

    def __init__(self, peers: Sequence[Peer], plan: Plan, output: Path) -> None:
        self._peers = peers
        self._plan = plan
        self._output = output
        self._found: dict[str, dict[str, Any]] = {
            peer.name: {"title": peer.title, "counts": peer.counts, "figures": []} for peer in peers
        }
        self._data: dict[str, Any] = {
            "command": " ".join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]),
            "at": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": str(Machine.here()),
            "plan": asdict(plan),
            "busy_before": [],
            "peers": self._found,
        }

    def prepare(self) -> None:
        """Fetch and build the peers before the first measurement."""
        for peer in self._peers:
            found = self._found[peer.name]
            try:
                found["version"] = peer.version()
            except Missing as error:
                found["missing"] = str(error)
            show(f"{peer.title}: {found.get('version') or found['missing']}")

    def round(self, number: int) -> None:
        """Run each peer once, and write the results so far."""
        for peer in self._peers:
            found = self._found[peer.name]
            if "missing" in found:
                continue
            self._data["busy_before"].append(busy_share())
            show(f"round {number}: {peer.title}")
            try:
                with tempfile.TemporaryDirectory(
                    prefix="txbroker-peer-", ignore_cleanup_errors=True
                ) as folder:
                    for figure in peer.turn(self._plan, Path(folder)):
                        found["figures"].append({"round": number, **asdict(figure)})
                        show(f"  {json.dumps(found['figures'][-1])}")
            except Missing as error:
                found["missing"] = str(error)
                show(f"  {error}")
            except Exception as error:
                # The other peers still count; the page has this one's error.
                found["missing"] = f"it failed: {type(error).__name__}: {error}"
                show(f"  {found['missing']}")
            self.write()

    def write(self) -> None:
        written = json.dumps(self._data, indent=1) + "\n"
        self._output.with_suffix(".json").write_text(written, encoding="utf-8")
        self._output.with_suffix(".md").write_text(
            page(self._data, self._output.name), encoding="utf-8"
        )
        self._output.with_suffix(".svg").write_text(plot(self._data), encoding="utf-8")


def show(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _ended(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt  # so that all servers are stopped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=1024, help="bytes of each message")
    parser.add_argument("--warmup-s", type=float, default=30.0)
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument(
        "--output", type=Path, default=DOCS / "comparison", help="the files, without suffix"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _ended)
    plan = Plan(tuple(given.in_flight), given.size, given.warmup_s, given.duration_s)
    comparison = Comparison([p for p in PEERS if p.name in given.peers], plan, given.output)
    comparison.prepare()
    for number in range(1, given.rounds + 1):
        comparison.round(number)
    comparison.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
