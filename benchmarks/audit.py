"""Processor time of audits by the command, with all its processes, compared with their aims.

Two data folders audit `--count` transactions of 1 KiB. One of them reads the first `--part` in full
and the next as new; the other reads all of them, then `--part` new ones, and then nothing new. A
plain count of the same records in the same kind of process is what the full audit is compared with.
Run `make bench-audit`.
"""

import argparse
import asyncio
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from tests.spark.planting import Planting
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.schema import RunSummary, SnapshotBounds

PREFIX = "bench-audit"
PARTITIONS = 4
PROCESSES = 2
PENDING = 0.005
PIECE = 20_000
_SUBREAPER = 36
"""Linux: processes of which the parent ended are this one's children."""


# --- filling ---------------------------------------------------------------------------------


def fill(kafka: str, count: int, size: int) -> None:
    """Write `count` transactions from several processes, which share the half partitions."""
    began, done = time.monotonic(), 0
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        while done < count:
            some = min(PIECE * PROCESSES, count - done)
            shares = [(some + number) // PROCESSES for number in range(PROCESSES)]
            tasks = [
                pool.submit(_fill_share, kafka, share, size, number)
                for number, share in enumerate(shares)
                if share
            ]
            for task in tasks:
                task.result()
            done += some
            progress(f"\rfilled {done:,} of {count:,} in {time.monotonic() - began:.0f} s")
    progress("\n")


def _fill_share(kafka: str, count: int, size: int, number: int) -> None:
    async def share() -> None:
        async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS, fresh=False) as planting:
            only = range(number, PARTITIONS, PROCESSES)
            await planting.fill_clean(count, size=size, pending=PENDING, only=only)

    uvloop.run(share())


async def make_topics(kafka: str) -> None:
    """Create the installation's topics, with one transaction in each partition."""
    async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS) as planting:
        await planting.fill_clean(PARTITIONS, rolled_back=0.0)


# --- measuring -------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Processor seconds of a command with all processes that it started, and its output."""

    cpu_s: float
    output: str


def spend(command: Sequence[str]) -> Spent:
    """Run a command, in a process whose other children do not count."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_spend, command).result()


def _spend(command: Sequence[str]) -> Spent:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    try:
        while True:  # workers of Python that Java has left
            os.waitpid(-1, 0)
    except ChildProcessError:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(used.ru_utime + used.ru_stime, done.stdout)


class Bench(NamedTuple):
    """What the commands share. `spark`: options of Spark; `folder`: of all data folders."""

    kafka: str
    folder: Path
    spark: tuple[str, ...]

    def audit(self, name: str) -> tuple[float, RunSummary]:
        """Audit once with a data folder; return processor seconds, and the summary."""
        command = [sys.executable, "-m", "txbroker", "audit", "run", "--kafka", self.kafka]
        command += ["--topic-prefix", PREFIX, "--data-dir", str(self.folder / name), "-o", "json"]
        # The data is written faster than any proxy promotes, so age is no fault.
        command += ["--late-after-s", "1e8", "--lost-after-s", "1e8", *self.spark]
        spent = spend(command)
        summary = msgspec.json.decode(spent.output, type=RunSummary)
        progress(
            f"{summary.mode} audit of {summary.transactions:,}: {spent.cpu_s:.1f} processor s, "
            f"{summary.took_s:.0f} s; {summary.cost}\n"
        )
        return spent.cpu_s, summary

    def count(self, cut: SnapshotBounds) -> tuple[float, int]:
        """Let Spark count all records that a full run has read; return processor seconds, and how
        many they are."""
        reads = (cut.half, cut.op, cut.parked, *cut.targets)
        options = {
            "kafka.bootstrap.servers": self.kafka,
            "assign": _json({r.topic: list(range(len(r.ends))) for r in reads}),
            "startingOffsets": _json({r.topic: _numbered(r.begins) for r in reads}),
            "endingOffsets": _json({r.topic: _numbered(r.ends) for r in reads}),
            "kafka.isolation.level": "read_committed",
            "failOnDataLoss": "true",
            "includeHeaders": "true",
        }
        command = [sys.executable, "-m", "benchmarks.audit", "--counting", _json(options)]
        spent = spend([*command, *self.spark])
        found = int(spent.output)
        progress(f"count of {found:,}: {spent.cpu_s:.1f} processor s\n")
        return spent.cpu_s, found


def count_records(options: dict[str, str], master: str, conf: dict[str, str]) -> None:
    """Print the number of records that Spark reads with these options of its Kafka source."""
    from txbroker.spark.session import SparkSettings, spark_session

    with spark_session(SparkSettings(master, conf)) as spark:
        print(spark.read.format("kafka").options(**options).load().count())


def _json(value: Any) -> str:
    return json.dumps(value)


def _numbered(values: tuple[int, ...]) -> dict[str, int]:
    return {str(number): value for number, value in enumerate(values)}


def progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


# --- aims --------------------------------------------------------------------------------------


class Aim(NamedTuple):
    """A figure and its aim. `sentence`: with a place for the figure."""

    name: str
    sentence: str
    figure: float
    most: float


def measure(bench: Bench, filling: Callable[[int], None], count: int, part: int) -> list[Aim]:
    """Return every figure, with its aim."""
    filling(part)
    first_s, first = bench.audit("near")
    filling(part)
    near_s, _ = bench.audit("near")
    filling(count - 2 * part)
    full_s, full = bench.audit("far")
    assert full.cut is not None
    count_s, records = bench.count(full.cut)
    filling(part)
    far_s, far = bench.audit("far")
    empty_s, empty = bench.audit("far")
    if any(run.has_drift or run.quarantined for run in (first, full, far, empty)):
        raise SystemExit("an audit found a fault")
    new, whole = f"{part:,} new transactions", f"{full.transactions:,} transactions"
    growth_s = (full_s - first_s) / (full.transactions - first.transactions) * 1000
    return [
        Aim("empty_s", "an audit with nothing new takes {:.1f} processor seconds", empty_s, 20),
        Aim(
            "incremental_ratio",
            f"an audit of {new} takes {{:.2f}} times what a full one of {whole} does",
            far_s / full_s,
            0.35,
        ),
        Aim(
            "history_ratio",
            f"an audit of {new} takes {{:.2f}} times what it does after {part:,}",
            far_s / near_s,
            1.2,
        ),
        Aim("growth_s", "1,000 more transactions take {:.3f} processor seconds", growth_s, 0.06),
        Aim(
            "count_ratio",
            f"a full audit of {whole} takes {{:.2f}} times what counting {records:,} records does",
            full_s / count_s,
            2.5,
        ),
    ]


def show(aims: Sequence[Aim]) -> None:
    for aim in aims:
        met = "met" if aim.figure <= aim.most else "missed"
        text = aim.sentence.format(aim.figure)
        print(f"{text[0].upper()}{text[1:]} (at most {aim.most:g}: {met}).")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=800_000, help="transactions in all")
    parser.add_argument("--part", type=int, default=50_000, help="new ones of incremental audits")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a value")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--counting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.counting:
        conf = dict(text.split("=", 1) for text in arguments.conf)
        count_records(json.loads(arguments.counting), arguments.master, conf)
        return 0
    settings = ["spark.driver.memory=4g", *arguments.conf]
    spark = (f"--master={arguments.master}", *(f"--conf={text}" for text in settings))
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedKafka(Path(name) / "kafka", for_load=True) as kafka,
    ):
        asyncio.run(make_topics(kafka.bootstrap))
        aims = measure(
            Bench(kafka.bootstrap, Path(name), spark),
            lambda count: fill(kafka.bootstrap, count, arguments.size),
            arguments.count,
            arguments.part,
        )
    if arguments.json:
        print(json.dumps({aim.name: aim.figure for aim in aims}))
    else:
        show(aims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
