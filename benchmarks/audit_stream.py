"""Latency, memory and state of a streaming audit at a rate, compared with its aims.

Writes faultless transactions at `--rate` straight into Kafka, now and then a rolled back one that
is visible, and follows them with `txbroker audit stream`, as a user would start it. Measured are
the time from the visible record to the event in the drift topic, and over time the resident memory
of Spark's processes, the checkpoint folder, and lag and state as the stream publishes them.
`python -m benchmarks.audit_stream --rate 2000 --duration-s 3600`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from msgspec import Struct, structs

from tests.kit.topic_reader import read_topics
from tests.spark.planting import Planting
from txbroker.contract.audit import STREAM_KEY, AuditNews, decode_news
from txbroker.embedded import EmbeddedKafka

PREFIX = "bench-stream"
PARTITIONS = 4
LATENCY_MAX_S = 20.0
GROWTH_MAX = 1.1
"""Of memory and state: the last fifth of the samples, compared with the fifth before it."""
FIRST_EVENT_MAX_S = 300.0
EVENT_MAX_S = 120.0
MIB = 1 << 20


class Sample(Struct, frozen=True):
    """A stream at one moment: `s` after the load began; memory and folder in MiB."""

    s: float
    rss: float
    folder: float
    files: int
    cpu_s: float
    news: AuditNews | None


# --- load ------------------------------------------------------------------------------------


def load(kafka: str, rate: float, until_s: float) -> tuple[int, float]:
    """Write transactions at a rate until a time (`time.time`); return their number, and the
    seconds that took."""

    async def write() -> tuple[int, float]:
        async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS, fresh=False) as planting:
            done, began_s = 0, time.time()
            while (now_s := time.time()) < until_s:
                due = round((now_s - began_s) * rate) - done
                if due:
                    await planting.fill_clean(due)
                    done += due
                await asyncio.sleep(max(1 - (time.time() - now_s), 0))
            return done, time.time() - began_s

    return uvloop.run(write())


async def plant(planting: Planting, every_s: float, until_s: float) -> dict[str, float]:
    """Show rolled back messages now and then; return when each became visible, by its event."""
    planted = {}
    while time.time() < until_s:
        half = await planting.prepare()
        at_ms = await planting.roll_back(half)
        planting.promote(half, at_ms)
        await planting.turn()
        planted[f"{half.id}:rolled_back_visible"] = time.time()
        await asyncio.sleep(every_s)
    return planted


# --- the stream ------------------------------------------------------------------------------


class Watched(NamedTuple):
    """A stream in a child process."""

    process: "subprocess.Popen[bytes]"
    checkpoint: Path
    kafka: str

    def sample(self, s: float) -> Sample:
        """Return its memory, its folder and its newest news."""
        sizes = [size for path in self.checkpoint.rglob("*") if (size := _size(path)) is not None]
        rss, cpu_s = resources(self.process.pid)
        news = [
            decode_news(record.value or b"")
            for record in read_topics(self.kafka, [f"{PREFIX}.audit"])
            if record.key == STREAM_KEY.encode()
        ]
        folder = sum(sizes) / MIB
        return Sample(s, rss / MIB, folder, len(sizes), cpu_s, news[-1] if news else None)

    def has_begun(self) -> bool:
        """Return whether it has written an event."""
        if self.process.poll() is not None:
            raise SystemExit("the stream has ended")
        return bool(self.events())

    def events(self) -> dict[str, float]:
        """Return when each finding was written, seconds since 1970."""
        found: dict[str, float] = {}
        for record in read_topics(self.kafka, [f"{PREFIX}.audit.drift"]):
            found.setdefault((record.key or b"").decode(), record.timestamp_ms / 1000)
        return found


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None  # Spark has removed it meanwhile


def resources(root: int) -> tuple[int, float]:
    """Return resident bytes and processor seconds of a process and its descendants."""
    children: dict[int, list[int]] = {}
    found: dict[int, tuple[int, float]] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        # With those of its ended children.
        used = sum(map(int, fields[11:15]))
        found[int(folder.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), used / ticks
    whole, cpu_s, left = 0, 0.0, [root]
    while left:
        pid = left.pop()
        bytes_, used_s = found.get(pid, (0, 0.0))
        whole, cpu_s = whole + bytes_, cpu_s + used_s
        left += children.get(pid, [])
    return whole, cpu_s


def sampling(stream: Watched, until_s: float, every_s: float, samples: list[Sample]) -> None:
    """Sample a stream until a time."""
    began_s = time.time()
    while time.time() < until_s:
        time.sleep(every_s)
        if stream.process.poll() is not None:
            raise SystemExit("the stream has ended")
        samples.append(stream.sample(round(time.time() - began_s, 1)))
        progress(f"{line(samples[-1])}\n")


HEADER = f"{'s':>6} {'RSS MiB':>8} {'folder MiB':>10} {'files':>6} {'CPU s':>7}"
NEWS_COLUMNS = ("transactions", "carried")


def line(sample: Sample) -> str:
    """Return a row of the table."""
    texts = [f"{sample.s:6.0f} {sample.rss:8.0f} {sample.folder:10.1f} {sample.files:6}"]
    texts.append(f"{sample.cpu_s:7.0f}")
    if sample.news is not None:
        texts += [f"{getattr(sample.news, name):>14,}" for name in NEWS_COLUMNS]
        texts += [f"{name} {value:,.0f}" for name, value in stream_figures(sample.news)]
    return " ".join(texts)


def stream_figures(news: AuditNews) -> Sequence[tuple[str, float]]:
    """Return the figures of a stream's own state."""
    return () if news.stream is None else tuple(structs.asdict(news.stream).items())


# --- figures ---------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of them does not exceed."""
    return sorted(values)[max(round(share * len(values) + 0.499999) - 1, 0)]


def growth(values: Sequence[float]) -> float:
    """Return the mean of the last fifth, as a multiple of that of the fifth before it."""
    fifth = max(len(values) // 5, 1)
    last, before = values[-fifth:], values[-2 * fifth : -fifth] or values[:1]
    return (sum(last) / len(last)) / max(sum(before) / len(before), 1e-9)


def aims(latencies: Sequence[float], samples: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """Return name, value and maximum of each aim."""
    return [
        ("latency p95, s", percentile(latencies, 0.95), LATENCY_MAX_S),
        ("growth of memory", growth([sample.rss for sample in samples]), GROWTH_MAX),
        ("growth of checkpoint folder", growth([sample.folder for sample in samples]), GROWTH_MAX),
    ]


def progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def wait(condition: Callable[[], bool], most_s: float, what: str) -> None:
    """Wait for a condition."""
    until_s = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > until_s:
            raise SystemExit(f"{what}: not within {most_s:.0f} s")
        time.sleep(0.5)


def command(arguments: argparse.Namespace, kafka: str, folder: Path) -> list[str]:
    """Return the command of the stream."""
    given = [sys.executable, "-m", "txbroker", "audit", "stream", "--kafka", kafka]
    given += ["--topic-prefix", PREFIX, "--data-dir", str(folder)]
    given += ["--master", arguments.master]
    for conf in (f"spark.driver.memory={arguments.memory}", *arguments.conf):
        given += ["--conf", conf]
    return [*given, *arguments.option]


async def make_topics(kafka: str) -> None:
    """Create the installation's topics, with one transaction in each partition."""
    async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS) as planting:
        await planting.fill_clean(PARTITIONS, rolled_back=0.0)


def measure(arguments: argparse.Namespace, kafka: str, folder: Path) -> dict[str, Any]:
    """Run stream and load, and return the figures."""
    asyncio.run(make_topics(kafka))
    with (folder / "stream.log").open("wb") as log:
        process = subprocess.Popen(command(arguments, kafka, folder), stdout=log, stderr=log)
    stream = Watched(process, folder / "audit-stream", kafka)
    try:
        return follow(arguments, stream)
    finally:
        process.terminate()
        process.wait()
        progress((folder / "stream.log").read_text()[-2000:])


def follow(arguments: argparse.Namespace, stream: Watched) -> dict[str, Any]:
    """Wait until the stream is warm, then measure it under load."""
    asyncio.run(_plant_one(stream.kafka))
    wait(stream.has_begun, FIRST_EVENT_MAX_S, "the first event")
    began_s = time.time()
    until_s = began_s + arguments.duration_s
    samples: list[Sample] = []
    sampler = threading.Thread(
        target=sampling, args=(stream, until_s, arguments.sample_s, samples), daemon=True
    )
    progress(f"{HEADER}\n")
    sampler.start()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        loading = pool.submit(load, stream.kafka, arguments.rate, until_s)
        planted = asyncio.run(_plant_many(stream.kafka, arguments.drift_s, until_s))
        loaded, took_s = loading.result()
    sampler.join()
    wait(lambda: planted.keys() <= stream.events().keys(), EVENT_MAX_S, "all events")
    events = stream.events()
    latencies = [events[event] - at_s for event, at_s in planted.items()]
    strange = sorted(events.keys() - planted.keys())[1:]
    return {
        "transactions": loaded,
        "rate": loaded / took_s,
        "planted": len(planted),
        "not planted": strange,
        "latencies": latencies,
        "samples": samples,
    }


async def _plant_one(kafka: str) -> None:
    async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS, fresh=False) as planting:
        await planting.ready()
        await plant(planting, 0, time.time() + 0.001)


async def _plant_many(kafka: str, every_s: float, until_s: float) -> dict[str, float]:
    async with Planting(kafka, prefix=PREFIX, partitions=PARTITIONS, fresh=False) as planting:
        await planting.ready()
        return await plant(planting, every_s, until_s)


def show(found: dict[str, Any]) -> bool:
    """Print the figures; return whether all aims are met."""
    latencies, samples = found["latencies"], found["samples"]
    print(f"{found['transactions']:,} transactions, {found['rate']:,.0f} a second")
    print(HEADER)
    for sample in samples:
        print(line(sample))
    shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    texts = (f"{name} {percentile(latencies, share):.1f} s" for name, share in shares.items())
    print(f"visible to event, of {found['planted']}: {', '.join(texts)}")
    met = not found["not planted"]
    print(f"events that were not planted: {found['not planted'][:5] or 'none'}")
    for name, value, most in aims(latencies, samples):
        met = met and value <= most
        print(f"{name}: {value:.2f} ({most:g} at most): {'met' if value <= most else 'NOT met'}")
    return met


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2000.0, help="transactions a second")
    parser.add_argument("--duration-s", type=float, default=3600.0)
    parser.add_argument("--drift-s", type=float, default=3.0, help="interval of planted drift")
    parser.add_argument("--sample-s", type=float, default=20.0)
    parser.add_argument("--memory", default="2g", help="of Spark's process")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--option", action="append", default=[], help="of `audit stream`")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(None if argv is None else list(argv))
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedKafka(Path(name) / "kafka", for_load=True) as kafka,
    ):
        found = measure(arguments, kafka.bootstrap, Path(name))
    if arguments.json:
        print(json.dumps({**found, "samples": [structs.asdict(one) for one in found["samples"]]}))
    return 0 if show(found) else 1


if __name__ == "__main__":
    sys.exit(main())
