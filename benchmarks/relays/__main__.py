"""Figures of relays and captures, against their aims: `python -m benchmarks.relays PART`.

Each part runs `txbroker outbox relay` or `txbroker capture run` in a separate process, with an
embedded Kafka and private database servers, whose commits are not synced; SQLite in journal mode
WAL. The result is a table. A rate or time is also given as a ratio to raw Kafka in the same run:
200,000 records of 100 bytes appended by an idempotent producer, or one record from its send until
it is visible. The exit code is 1 if an aim is missed.

Parts: `drain` (waiting rows of the outbox), `latency` (commit to visible), `capture` (changes that
were committed before), `idle` (relays and captures in which nothing happens).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.kafka import create_topics, running_kafka
from benchmarks.relays.figures import HEAD, Figure
from benchmarks.relays.idle import idle
from benchmarks.relays.latency import latency
from benchmarks.relays.places import RAW, TOPIC
from benchmarks.relays.rates import capture, drain


class Part(NamedTuple):
    """A measurement, and how many rows (of `idle`: tables) it takes."""

    run: Callable[[str, int], AsyncIterator[Figure]]
    rows: int


PARTS = {
    "drain": Part(drain, 1_000_000),
    "latency": Part(latency, 2_000),
    "capture": Part(capture, 300_000),
    "idle": Part(idle, 1_000),
}


async def show(figures: AsyncIterator[Figure]) -> int:
    """Print figures; return how many aims are missed."""
    missed = 0
    async for figure in figures:
        missed += figure.missed
        print(figure, flush=True)
    return missed


def main() -> int:
    """Measure, and print; return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", type=int, help="instead of each part's number")
    given = parser.parse_args()
    missed = 0
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, running_kafka(Path(folder)) as kafka:
        asyncio.run(create_topics(kafka.bootstrap, [TOPIC, RAW]))
        for name in given.parts:
            part = PARTS[name]
            missed += asyncio.run(show(part.run(kafka.bootstrap, given.rows or part.rows)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
