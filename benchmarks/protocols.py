"""Compares both versions of Kafka's transaction protocol: requests and time of a transaction.

    python -m benchmarks.protocols --turns 400 --rounds 6 --targets 3

Both write to the same Kafka, an embedded one or that of `--bootstrap`, in alternating rounds, so
that other work on the machine affects both alike. A transaction is one record to each of
`--targets` topics, and the checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

from txbroker.core.records import LOG_VERSION, Checkpoint, Claim, Record
from txbroker.door.consuming import TopicSpec
from txbroker.door.protocols import PromotionTxn, PromotionTxnHandle
from txbroker.door.writing import Copy
from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka
from txbroker.kafka import KafkaDoor, KafkaSettings
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.protocol.encoder import Request

_WARM_UP = 50


class Side:
    """One version of the protocol, with its door and topics."""

    def __init__(self, bootstrap: str, version: int, targets: int) -> None:
        self.version = version
        self.requests: Counter[str] = Counter()
        prefix = f"{time.time_ns()}.v{version}"
        self.targets = [f"{prefix}.target{number}" for number in range(targets)]
        self.answers_s: defaultdict[str, list[float]] = defaultdict(list)
        self.apart_s: list[float] = []
        self.together_s: list[float] = []
        self._turns = 0
        names = ("half", "op", "checkpoint", "parked", "groups", "audit")
        topics: dict[str, Any] = {f"{name}_topic": f"{prefix}.{name}" for name in names}
        self.settings = KafkaSettings(
            bootstrap_servers=(bootstrap,),
            instance_id=f"v{version}",
            group_id=prefix,
            drift_topic=f"{prefix}.drift",
            partitions=1,
            transactions=version,
            **topics,
        )
        self.door = KafkaDoor(self.settings, self._open)

    async def _open(self, *address: Any, **arguments: Any) -> Any:
        connection = await open_connection(*address, **arguments)
        send = connection.send

        async def timed(name: str, answer: Any, began_s: float) -> Any:
            result = await answer
            self.answers_s[name].append(time.perf_counter() - began_s)
            return result

        def counted(request: Request) -> Any:
            name = type(request).__name__
            self.requests[name] += 1
            return timed(name, send(request), time.perf_counter())

        connection.send = counted  # type: ignore[method-assign]
        return connection

    async def start(self) -> None:
        """Create the topics, claim, and write some transactions as warm-up."""
        client = Client(self.settings)
        await client.refresh(())
        await Admin(client).create([TopicSpec(name, 1, -1, {}) for name in self.targets])
        await client.close()
        await self.door.start()
        self.partition = self.door.partition(0)
        await self.partition.claim(Claim(LOG_VERSION, "c", "one", "http://127.0.0.1:1"))
        for _ in range(_WARM_UP):
            await (await self._write()).committed()
        self.requests.clear()
        self.answers_s.clear()
        self._turns = 0

    async def _write(self) -> PromotionTxnHandle:
        self._turns += 1
        promoted = tuple(
            Copy(topic, 0, Record(b"key", bytes(1000), (), 1)) for topic in self.targets
        )
        progress = Checkpoint(LOG_VERSION, "c", self._turns, self._turns)
        return await self.partition.write(PromotionTxn(promoted, (), progress))

    async def round(self, turns: int, pause_s: float) -> None:
        """Write transactions sequentially with pauses, then as many of which two overlap."""
        for _ in range(turns):
            await asyncio.sleep(pause_s)
            began_s = time.perf_counter()
            await (await self._write()).committed()
            self.apart_s.append(time.perf_counter() - began_s)
        if pause_s:
            return
        began_s = time.perf_counter()
        for _ in range(turns):
            last = await self._write()
        await last.committed()
        self.together_s.append((time.perf_counter() - began_s) / turns)

    def figures(self) -> dict[str, float]:
        turns = self._turns
        return {
            "requests": sum(self.requests.values()) / turns,
            "mean_ms": statistics.mean(self.apart_s) * 1000,
            "p50_ms": statistics.median(self.apart_s) * 1000,
            "p99_ms": statistics.quantiles(self.apart_s, n=100)[98] * 1000,
            "overlapping_ms": statistics.median(self.together_s or [0]) * 1000,
        }


async def run(bootstrap: str, turns: int, rounds: int, targets: int, pause_s: float) -> None:
    """Measure both versions, and print the figures and their ratio."""
    sides = [Side(bootstrap, version, targets) for version in (1, 2)]
    for side in sides:
        await side.start()
    for number in range(rounds):
        for side in sides if number % 2 else sides[::-1]:
            await side.round(turns, pause_s)
    first, second = (side.figures() for side in sides)
    print(f"{'':16}{'first':>10}{'second':>10}{'ratio':>10}")
    for name in first:
        one, two = first[name], second[name]
        print(f"{name:16}{one:10.2f}{two:10.2f}{two / one if one else 1:10.2f}")
    for side in sides:
        for name, answers_s in side.answers_s.items():
            if len(answers_s) > 1:
                middle, tail = (statistics.quantiles(answers_s, n=100)[n] * 1000 for n in (49, 98))
                print(f"{side.version} {name:28}{len(answers_s):8}{middle:8.2f} ms{tail:8.2f} ms")
        await side.door.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="both versions of Kafka's transactions")
    parser.add_argument("--turns", type=int, default=400, help="of a round, each way")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--targets", type=int, default=3, help="topics that a turn writes to")
    parser.add_argument("--kafka", default=DEFAULT_VERSION, help="version of the embedded Kafka")
    parser.add_argument("--bootstrap", default="", help="HOST:PORT of a Kafka that runs already")
    parser.add_argument(
        "--pause-ms", type=float, default=0, help="before a turn; none overlap then"
    )
    given = parser.parse_args()
    how = (given.turns, given.rounds, given.targets, given.pause_ms / 1000)
    if given.bootstrap:
        asyncio.run(run(given.bootstrap, *how))
        return
    with EmbeddedKafka(version=given.kafka) as kafka:
        asyncio.run(run(kafka.bootstrap, *how))


if __name__ == "__main__":
    main()
