"""txbroker itself, through `txbroker bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.base import PARTITIONS, Figure, Missing, Plan, Times
from benchmarks.peers.kafka import KAFKA
from txbroker import __version__

_DEADLINE_S = 300.0


class Txbroker:
    """A proxy in a separate process, on a new Kafka."""

    def __init__(self, name: str, title: str, counts: str, *options: str) -> None:
        self.name = name
        self.title = title
        self.counts = counts
        self._options = options

    def version(self) -> str:
        return f"txbroker {__version__}, {KAFKA}, Python {sys.version.partition(' ')[0]}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        """Measure, each time on a new proxy and Kafka."""
        for in_flight in plan.in_flight:
            found = self._bench(plan, folder, in_flight)
            latency = found["latency_ms"]
            yield Figure(
                in_flight,
                min(found["acked_per_s"], found["promoted_per_s"]),
                Times(latency["both"]["p50"], latency["both"]["p99"]),
                Times(latency["visible"]["p50"], latency["visible"]["p99"]),
                {
                    name: found[name]
                    for name in ("acked_per_s", "promoted_per_s", "cpu_s_per_1000", "memory_mib")
                },
            )

    def _bench(self, plan: Plan, folder: Path, in_flight: int) -> dict[str, Any]:
        code = "from txbroker.cli.main import main; main()"
        command = [sys.executable, "-c", code, "bench", "-o", "json", *self._options]
        command += ["--in-flight", str(in_flight), "--size", str(plan.size)]
        command += ["--duration-s", str(plan.duration_s), "--warmup-s", str(plan.warmup_s)]
        command += ["--topic-partitions", str(PARTITIONS)]
        deadline_s = _DEADLINE_S + plan.warmup_s + plan.duration_s
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=deadline_s, check=False
        )
        if done.returncode != 0:
            raise Missing(f"it has failed: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


TXBROKERS = (
    Txbroker(
        "txbroker",
        "txbroker",
        "prepare and commit both confirmed by Kafka (acks=all); every message counted by a "
        "read_committed consumer, none lost, none doubled",
    ),
    Txbroker(
        "txbroker-keyless",
        "txbroker, messages without keys",
        "as the first, without order, as in RocketMQ's benchmark",
        "--keyless",
    ),
    Txbroker(
        "txbroker-http",
        "txbroker, plain HTTP/JSON",
        "as the first, by two HTTP calls",
        "--http",
    ),
    Txbroker(
        "txbroker-10",
        "txbroker, 10 messages a transaction",
        "as the first; transactions, so ten times as many messages a second",
        "--messages-per-transaction",
        "10",
    ),
)
