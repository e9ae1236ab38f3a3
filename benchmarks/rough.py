"""A first rough measurement: complete transactions per second at 1, 64 and 512 in flight.

One proxy, one broker and one producer on this machine, messages of 1 KiB. A transaction counts
when its commit is acknowledged; promoted are those that a `read_committed` consumer has seen.
Run as `make bench`, or `python benchmarks/rough.py --help`.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from aiokafka import AIOKafkaConsumer

from txbroker.sdk import Message, TransactionalProducer

TOPIC = "bench"


async def produce(url: str, in_flight: int, duration_s: float, size: int) -> list[float]:
    """Run transactions in `in_flight` lanes, each one after another; return how long each took."""
    body = os.urandom(size)
    latencies: list[float] = []
    async with TransactionalProducer(url, group="bench", check=lambda request: None) as producer:
        end = time.monotonic() + duration_s

        async def lane(number: int) -> None:
            count = 0
            while time.monotonic() < end:
                count += 1
                key = f"{number}-{count}".encode()
                began = time.monotonic()
                async with producer.transaction(Message(TOPIC, key=key, value=body)):
                    pass
                latencies.append(time.monotonic() - began)

        await asyncio.gather(*[lane(number) for number in range(in_flight)])
    return latencies


async def count_visible(kafka: str, wanted: int, deadline_s: float) -> tuple[int, int]:
    """Return how many messages and how many different ids a `read_committed` consumer sees."""
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=kafka,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        fetch_max_bytes=8 << 20,
    )
    await consumer.start()
    try:
        seen: set[str] = set()
        count = 0
        end = time.monotonic() + deadline_s
        while count < wanted and time.monotonic() < end:
            batch = await consumer.getmany(timeout_ms=500, max_records=10_000)
            for records in batch.values():
                for record in records:
                    count += 1
                    seen.add(dict(record.headers)["txb-id"].decode())
        return count, len(seen)
    finally:
        await consumer.stop()


def run(url: str, in_flight: int, duration_s: float, size: int) -> list[float]:
    """Run a producer in a process of its own and return the latencies of its transactions."""
    command = [sys.executable, __file__, "--produce-to", url, "--in-flight", str(in_flight)]
    command += ["--duration-s", str(duration_s), "--size", str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def promoted(url: str) -> float:
    """Return how many messages the proxy has promoted: consumers can see them."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if "txbroker_promoted_total{" in line)


@contextmanager
def broker(folder: Path) -> Iterator[tuple[str, str]]:
    """Run `txbroker dev` and yield its URL and its Kafka's address."""
    command = [str(Path(sys.executable).with_name("txbroker")), "dev"]
    command += ["--listen", "127.0.0.1:0"]
    command += ["--data-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dev:
        try:
            assert dev.stdout is not None
            _, url, _, kafka = dev.stdout.readline().split()
            yield url, kafka
        finally:
            dev.terminate()


def main() -> int:
    """Measure and print a table; fail if anything is lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration-s", type=float, default=10.0)
    parser.add_argument("--warmup-s", type=float, default=10.0)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--produce-to", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.produce_to:
        produced = produce(
            arguments.produce_to, arguments.in_flight[0], arguments.duration_s, arguments.size
        )
        print(*uvloop.run(produced))
        return 0
    failed = False
    print("in flight   tx/s acked   promoted/s   p50 ms   p99 ms   visible   lost   doubled")
    for in_flight in arguments.in_flight:
        with tempfile.TemporaryDirectory() as folder, broker(Path(folder)) as (url, kafka):
            warm = run(url, in_flight, arguments.warmup_s, arguments.size)
            before = promoted(url)
            latencies = run(url, in_flight, arguments.duration_s, arguments.size)
            promoted_s = (promoted(url) - before) / arguments.duration_s
            wanted = len(warm) + len(latencies)
            visible, different = asyncio.run(count_visible(kafka, wanted, 60))
        quantiles = statistics.quantiles(latencies, n=100)
        lost, doubled = wanted - different, visible - different
        failed = failed or bool(lost or doubled)
        print(
            f"{in_flight:9}   {len(latencies) / arguments.duration_s:10.0f}   {promoted_s:10.0f}   "
            f"{quantiles[49] * 1000:6.1f}   {quantiles[98] * 1000:6.1f}   {visible:7}   "
            f"{lost:4}   {doubled:7}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
