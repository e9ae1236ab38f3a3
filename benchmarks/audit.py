"""Time of an audit, compared with Spark only counting the same records.

`full`: a full audit of `--count` transactions of 1 KiB, compared with a count of all records that
it reads, with the same reader options. `incremental`: the same new part audited after a tenth of
the history, and after all of it; the time must not grow with the history. Run `make bench-audit`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from tests.spark.planting import Planting
from txbroker.config.settings import load_settings
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.schema import RunSummary, SnapshotBounds, Terms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PREFIX = "bench-audit"
PARTITIONS = 4
PROCESSES = 2
PENDING = 0.005
PIECE = 20_000


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


async def make_topics(kafka: str) -> Planting:
    """Create the installation's topics, with one transaction in them."""
    async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS) as planting:
        await planting.fill_clean(PARTITIONS, rolled_back=0.0)
    return planting


# --- measuring -------------------------------------------------------------------------------


class Bench:
    """One Spark and one Kafka that are measured against each other."""

    def __init__(self, spark: "SparkSession", kafka: str, planting: Planting, folder: Path) -> None:
        self._spark = spark
        self._kafka = kafka
        self._planting = planting
        self._folder = folder

    def audit(self, mode: str, name: str) -> RunSummary:
        """Audit once; nothing may be found."""
        from txbroker.spark.access import access_from
        from txbroker.spark.run import AuditSettings, run_audit

        given = {"kafka": self._kafka, "topic_prefix": PREFIX, "instance": "bench"}
        settings = load_settings(given, environ={})
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        # The data is written faster than any proxy promotes, so age is no fault.
        terms = Terms(0)
        wanted = AuditSettings(str(folder / "out"), folder, self._planting.names, terms, mode)  # type: ignore[arg-type]
        began = time.monotonic()
        steps: list[tuple[str, float]] = []
        summary = run_audit(
            self._spark,
            access_from(settings),
            wanted,
            lambda step: steps.append((step, time.monotonic() - began)),
        )
        if summary.has_drift or summary.quarantined:
            raise SystemExit(f"the audit found {summary.drift}, {summary.quarantined} broken")
        progress(
            f"{mode} audit of {summary.transactions:,}: {summary.took_s:.1f} s; {_times(steps)}\n"
        )
        return summary

    def count(self, cut: SnapshotBounds) -> tuple[int, float]:
        """Let Spark count the records that a run has read; return how many, and the seconds."""
        reads = (cut.half, cut.op, cut.parked, *cut.targets)
        options = {
            "kafka.bootstrap.servers": self._kafka,
            "assign": offsets({r.topic: list(range(len(r.ends))) for r in reads}),
            "startingOffsets": offsets({r.topic: numbered(r.begins) for r in reads}),
            "endingOffsets": offsets({r.topic: numbered(r.ends) for r in reads}),
            "kafka.isolation.level": "read_committed",
            "failOnDataLoss": "true",
            "includeHeaders": "true",
        }
        began = time.monotonic()
        found = self._spark.read.format("kafka").options(**options).load().count()
        took_s = time.monotonic() - began
        progress(f"count of {found:,}: {took_s:.1f} s\n")
        return found, took_s


def offsets(value: dict[str, Any]) -> str:
    """Return partitions or offsets as Spark's reader wants them."""
    return json.dumps(value)


def numbered(values: tuple[int, ...]) -> dict[str, int]:
    """Return values by the number of their partition."""
    return {str(number): value for number, value in enumerate(values)}


def _times(steps: list[tuple[str, float]]) -> str:
    """Return the start time of each step."""
    return ", ".join(f"{step} {at_s:.1f}" for step, at_s in steps)


def progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def measure(bench: Bench, filling: Callable[[int], None], count: int, part: int) -> dict[str, Any]:
    """Return both ratios and their components."""
    tenth = count // 10
    filling(tenth)
    bench.audit("full", "grows")
    filling(part)
    near = bench.audit("incremental", "grows")
    filling(count - tenth - part)
    bench.audit("incremental", "grows")
    filling(part)
    far = bench.audit("incremental", "grows")
    if near.cut is None or far.cut is None:
        raise SystemExit("an audit without a cut")
    counts = [bench.count(whole(far.cut))]
    full = bench.audit("full", "full")
    counts.append(bench.count(whole(far.cut)))
    # The faster one: the first may have found neither Java nor the disk warm.
    records, count_s = min(counts, key=lambda each: each[1])
    return {
        "transactions": full.transactions,
        "records": records,
        "count_s": count_s,
        "full_s": full.took_s,
        "full_ratio": full.took_s / count_s,
        "new": part,
        "history_near": tenth,
        "history_far": count,
        "near_s": near.took_s,
        "far_s": far.took_s,
        "incremental_ratio": far.took_s / near.took_s,
    }


def whole(cut: SnapshotBounds) -> SnapshotBounds:
    """Return a cut that begins where the logs do."""
    from msgspec.structs import replace

    def all_of(read: Any) -> Any:
        return replace(read, begins=read.starts)

    return replace(
        cut,
        half=all_of(cut.half),
        op=all_of(cut.op),
        parked=all_of(cut.parked),
        targets=tuple(map(all_of, cut.targets)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2_000_000, help="transactions in all")
    parser.add_argument("--part", type=int, default=100_000, help="new ones, for `incremental`")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a value")
    parser.add_argument("--memory", default="4g", help="of Spark's process")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from txbroker.spark.session import SparkSettings, spark_session

    conf = {"spark.driver.memory": arguments.memory}
    conf |= dict(text.split("=", 1) for text in arguments.conf)
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedKafka(Path(name) / "kafka", for_load=True) as kafka,
        spark_session(SparkSettings(arguments.master, conf)) as spark,
    ):
        planting = asyncio.run(make_topics(kafka.bootstrap))
        bench = Bench(spark, kafka.bootstrap, planting, Path(name))
        found = measure(
            bench,
            lambda count: fill(kafka.bootstrap, count, arguments.size),
            arguments.count,
            arguments.part,
        )
    show(found, arguments.json)
    return 0


def show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"full audit of {found['transactions']:,} transactions ({found['records']:,} records): "
        f"{found['full_s']:.1f} s, count {found['count_s']:.1f} s, "
        f"ratio {found['full_ratio']:.2f} (wanted: 4 at most)\n"
        f"incremental audit of {found['new']:,} after {found['history_near']:,}: "
        f"{found['near_s']:.1f} s, after {found['history_far']:,}: {found['far_s']:.1f} s, "
        f"ratio {found['incremental_ratio']:.2f} (wanted: 1.2 at most)"
    )


if __name__ == "__main__":
    sys.exit(main())
