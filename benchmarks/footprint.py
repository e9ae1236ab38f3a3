"""Footprint of a transaction in Kafka: bytes in each topic, and requests to the brokers.

One proxy with the default settings and the embedded Kafka, one producer with the SDK, one message
of `--size` bytes a transaction. The bytes are those of the segments' files on one broker, so all
copies together take as many times more. A test bounds the requests (`BOUNDS`).
`python -m benchmarks.footprint --help`.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from txbroker.config.settings import load_settings
from txbroker.core.records import Decision
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka import KafkaDoor
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.proxy.observe.logging import configure_logging
from txbroker.proxy.process import Proxy, run_proxy
from txbroker.sdk import Message, TransactionalProducer

# Maximum number of requests to Kafka per transaction, by transactions in flight: 7 % and 20 % above
# the measurement. Lower them with the measurement, never raise them without a reason.
BOUNDS = {512: 0.03, 64: 0.14}

IN_FLIGHT = (1, 64, 512)
TARGET = "footprint"
OWN = ("half", "op", "checkpoint", "parked")
DEADLINE_S = 300.0
IDLE_S = 5.0
WARMUP = 500


class Counting:
    """Opens connections to Kafka, and counts their requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()

    async def open(self, host: str, port: int, **arguments: Any) -> Any:
        connection = await open_connection(host, port, **arguments)
        send = connection.send

        def counted(request: Any, answer: Any = None) -> Any:
            self.requests[re.sub(r"(Request|V\d+)$", "", type(request).__name__)] += 1
            return send(request, answer)

        connection.send = counted  # type: ignore[method-assign]
        return connection


class Footprint:
    """Measures the footprint of a phase."""

    def __init__(self, folder: Path, counting: Counting) -> None:
        self._folder = folder
        self._counting = counting
        self.rows: list[tuple[str, int, dict[str, float], dict[str, float]]] = []

    def _bytes(self) -> Counter[str]:
        """Return the bytes of each topic's segments."""
        sizes: Counter[str] = Counter()
        for file in self._folder.rglob("*.log"):
            topic = file.parent.name.rpartition("-")[0]
            if topic == TARGET or topic.startswith("txbroker."):
                sizes[topic.removeprefix("txbroker.")] += file.stat().st_size
        return sizes

    async def phase(self, name: str, count: int, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work of `count` transactions and note what one of them has cost."""
        before, asked = self._bytes(), Counter(self._counting.requests)
        await work()
        after, now = self._bytes(), self._counting.requests
        sizes = {topic: (after[topic] - before[topic]) / count for topic in (*OWN, TARGET)}
        requests = {kind: (now[kind] - asked[kind]) / count for kind in now}
        self.rows.append((name, count, sizes, requests))

    def requests(self) -> dict[str, dict[str, float]]:
        """Return how many requests of each kind a transaction took, by phase."""
        return {name: requests for name, _, _, requests in self.rows}

    def show(self) -> None:
        topics = (*OWN, TARGET)
        print("bytes a transaction".ljust(30) + "".join(f"{topic:>12}" for topic in topics))
        for name, count, sizes, _ in self.rows:
            shown = "".join(f"{sizes[topic]:12,.0f}" for topic in topics)
            print(f"{name} ({count})".ljust(30) + shown)
        print()
        kinds = [kind for kind, count in self._total().most_common() if count >= 0.001]
        print(
            "requests a transaction".ljust(30) + "".join(f" {kind:>12}" for kind in ["all", *kinds])
        )
        for name, _, _, requests in self.rows:
            asked = [sum(requests.values()), *[requests.get(kind, 0.0) for kind in kinds]]
            widths = [max(12, len(kind)) for kind in ["all", *kinds]]
            shown = "".join(f" {n:{width}.3f}" for n, width in zip(asked, widths, strict=True))
            print(name.ljust(30) + shown)

    def _total(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for _, _, _, requests in self.rows:
            for kind, count in requests.items():
                total[kind] += count  # type: ignore[assignment]
        return total


async def transactions(
    producer: TransactionalProducer, decision: Decision, count: int, in_flight: int, size: int
) -> None:
    """Prepare and decide `count` transactions, `in_flight` at a time."""
    body = os.urandom(size)
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            id = await producer.prepare(Message(TARGET, key=b"key-%08d" % number, value=body))
            if decision is Decision.COMMIT:
                await producer.commit(id)
            elif decision is Decision.ROLLBACK:
                await producer.rollback(id)

    await asyncio.gather(*[client() for _ in range(in_flight)])


async def settled(proxy: Proxy) -> None:
    """Wait until no transaction is pending or committed, and one second longer."""
    open_states = ("pending", "committed")
    async with aiohttp.ClientSession(proxy.url) as http, asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get("/v1/overview") as answer:
                partitions = (await answer.json())["partitions"]
            if not any(each[state] for each in partitions for state in open_states):
                break
            await asyncio.sleep(0.05)
    # For the coordinator's last writes, and the tombstones of settled transactions.
    await asyncio.sleep(1.0)


def phase_of(in_flight: int) -> str:
    """Return the name of the phase with commits and `in_flight` transactions in flight."""
    return f"committed, {in_flight} in flight"


def exceeded(requests: dict[str, dict[str, float]]) -> list[str]:
    taken = {each: sum(requests.get(phase_of(each), {}).values()) for each in BOUNDS}
    return [
        f"{phase_of(each)}: {taken[each]:.4f} requests a transaction are more than {bound}"
        for each, bound in BOUNDS.items()
        if taken[each] > bound
    ]


async def measure(
    kafka: str,
    footprint: Footprint,
    counting: Counting,
    count: int,
    size: int,
    in_flights: Sequence[int],
    *,
    commits_only: bool,
) -> None:
    """Run all phases, or only those that commit."""
    given = {"kafka": kafka, "listen": "127.0.0.1:0", "instance": "footprint", "insecure": True}
    checks = {"check_after_s": 1.0, "check_interval_s": 1.0, "check_attempts_max": 1}
    settings = load_settings({**given, **checks, "create_target_topics": True})
    async with run_proxy(
        KafkaDoor(KafkaSettings.from_configuration(settings), counting.open), settings
    ) as proxy:
        async with asyncio.timeout(DEADLINE_S):
            while (
                not proxy.broker.readiness().ready or len(proxy.broker.mine()) < settings.partitions
            ):
                await asyncio.sleep(0.05)

        async with TransactionalProducer(
            proxy.url, group="footprint", check=lambda request: Decision.UNKNOWN
        ) as producer:

            async def run(decision: Decision, number: int, in_flight: int) -> None:
                await transactions(producer, decision, number, in_flight, size)
                await settled(proxy)

            await run(Decision.COMMIT, WARMUP, 64)
            for in_flight in in_flights:
                number = max(in_flight, count // 5 if in_flight == 1 else count)
                await footprint.phase(
                    phase_of(in_flight),
                    number,
                    lambda n=number, f=in_flight: run(Decision.COMMIT, n, f),  # type: ignore[misc]
                )
            if commits_only:
                return
            await footprint.phase(
                "rolled back, 64 in flight", count, lambda: run(Decision.ROLLBACK, count, 64)
            )
            few = max(1, count // 5)

            async def parked() -> None:
                await transactions(producer, Decision.UNKNOWN, few, 64, size)
                await settled(proxy)

            await footprint.phase("parked after one attempt", few, parked)
            await footprint.phase("nothing, for a second", round(IDLE_S), _idle)


async def _idle() -> None:
    await asyncio.sleep(IDLE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="transactions in a phase")
    parser.add_argument("--size", type=int, default=1024, help="bytes of each message")
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--commits", action="store_true", help="only commit transactions")
    parser.add_argument("--json", action="store_true", help="only show the requests")
    given = parser.parse_args()
    configure_logging("console", "error")
    counting = Counting()
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka(Path(folder) / "kafka") as kafka:
        footprint = Footprint(Path(folder), counting)
        uvloop.run(
            measure(
                kafka.bootstrap,
                footprint,
                counting,
                given.count,
                given.size,
                given.in_flight,
                commits_only=given.commits,
            )
        )
    requests = footprint.requests()
    if given.json:
        print(json.dumps({"requests": requests, "bounds": BOUNDS}))
    else:
        footprint.show()
    for each in exceeded(requests):
        print(each, file=sys.stderr)
    return bool(exceeded(requests))


if __name__ == "__main__":
    raise SystemExit(main())
