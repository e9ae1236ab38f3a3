"""Compares txbroker with its peers on this machine, and writes docs/comparison.*.

Every round runs each peer once, sequentially, with new servers on free ports and in a temporary
folder. The page gives the reason for a peer that cannot run here. RocketMQ and dtm come from Maven
Central and the Go module proxy. `python -m benchmarks.compare` takes an hour, with `--rounds 1`
twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers.base import Missing, Peer, Plan
from benchmarks.peers.ceiling import Ceiling
from benchmarks.peers.dtm import Dtm
from benchmarks.peers.machine import Machine, busy_share
from benchmarks.peers.outbox_postgres import PostgresOutbox
from benchmarks.peers.outbox_sqlite import SqliteOutbox
from benchmarks.peers.page import page
from benchmarks.peers.plot import plot
from benchmarks.peers.read_process_write import ReadProcessWrite
from benchmarks.peers.rocketmq import RocketMQ
from benchmarks.peers.txbroker_itself import Txbroker, TxbrokerHttp, TxbrokerKeyless, TxbrokerTen

PEERS: tuple[Peer, ...] = (
    Txbroker(),
    TxbrokerKeyless(),
    TxbrokerHttp(),
    TxbrokerTen(),
    RocketMQ(),
    Ceiling(),
    ReadProcessWrite(),
    SqliteOutbox(),
    PostgresOutbox(),
    Dtm(),
)
DOCS = Path(__file__).parents[1] / "docs"


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
        """Write data, page and plot."""
        written = json.dumps(self._data, indent=1) + "\n"
        self._output.with_suffix(".json").write_text(written, encoding="utf-8")
        self._output.with_suffix(".md").write_text(
            page(self._data, self._output.name), encoding="utf-8"
        )
        self._output.with_suffix(".svg").write_text(plot(self._data), encoding="utf-8")


def show(text: str) -> None:
    """Show the progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _ended(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt  # so that all servers are stopped


def main() -> int:
    """Compare the peers."""
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
