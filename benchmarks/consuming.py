"""Speed of consumers as ratios, measured in interleaved rounds of one run on an embedded Kafka.

Cases: `empty` (keyed, empty handler), `busy` (a handler that computes for 50 µs), both against
aiokafka's `getmany` with the same work; `sleep` (64 handlers that sleep for 10 ms, against one);
`keys` (100,000 keys against 1,000); `peers` (`empty` of confluent-kafka). A ratio is that of the
medians; every consumer must have handled every record.
`python -m benchmarks.consuming --help`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, TopicPartition

from txbroker.config.settings import load_kafka_access
from txbroker.consumer import Consumer
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka.door.consuming import KafkaConsumingDoor

PARTITIONS = 8
VALUE_BYTES = 200
BUSY_S = 50e-6
SLEEP_S = 0.01
_BATCH = 5000

Round = Callable[[str, str, int], Awaitable[float]]
"""Consumes a topic; returns records a second."""


async def fill(kafka: str, topic: str, count: int, keys: int) -> None:
    """Create a topic with `count` records of `keys` keys."""
    door = KafkaConsumingDoor.from_access(load_kafka_access(kafka))
    try:
        await door.start()
        await door.create([TopicSpec(topic, PARTITIONS, 1, {})])
        value, each = bytes(VALUE_BYTES), count // PARTITIONS
        for partition in range(PARTITIONS):
            for start in range(0, each, _BATCH):
                numbers = range(start, min(each, start + _BATCH))
                records = [
                    Record(b"%d" % ((n * PARTITIONS + partition) % keys), value) for n in numbers
                ]
                await door.append(topic, partition, records)
    finally:
        await door.close()


# --- rounds --------------------------------------------------------------------------------------


def _spend(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def with_txbroker(work: Callable[[], Any] | None = None, **options: Any) -> Round:
    """Return a round of a keyed consumer that commits at least once."""

    async def consume(kafka: str, topic: str, count: int) -> float:
        group = f"bench-{uuid.uuid4().hex[:8]}"
        chosen = {"order": "key", "in_flight_max": 64, **options}
        left, began = count, 0.0
        async with Consumer(kafka, group=group, topics=[topic], **chosen) as consumer:

            async def handle(_message: object) -> None:
                nonlocal left, began
                began = began or time.perf_counter()
                if work is not None:
                    result = work()
                    if result is not None:
                        await result
                left -= 1
                if not left:
                    consumer.stop()

            await consumer.run(handle)
            took_s = time.perf_counter() - began
        if left:
            raise SystemExit(f"{left} of {count} records were not handled")
        return count / took_s

    return consume


def with_aiokafka(work: Callable[[], Any] | None = None) -> Round:
    """Return a round of aiokafka's `getmany`."""

    async def consume(kafka: str, topic: str, count: int) -> float:
        consumer: Any = AIOKafkaConsumer(  # type: ignore[no-untyped-call]
            bootstrap_servers=kafka,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
        await consumer.start()
        try:
            consumer.assign([TopicPartition(topic, n) for n in range(PARTITIONS)])
            left, began = count, 0.0
            while left:
                batches = await consumer.getmany(timeout_ms=1000)
                began = began or time.perf_counter()
                for records in batches.values():
                    for _record in records:
                        if work is not None:
                            work()
                    left -= len(records)
            return count / (time.perf_counter() - began)
        finally:
            await consumer.stop()

    return consume


async def with_confluent(kafka: str, topic: str, count: int) -> float:
    """A round of confluent-kafka's `consume`."""
    from confluent_kafka import Consumer as Librdkafka
    from confluent_kafka import TopicPartition as Place

    def consume() -> float:
        options = {"bootstrap.servers": kafka, "group.id": uuid.uuid4().hex}
        consumer = Librdkafka({**options, "enable.auto.commit": False})
        consumer.assign([Place(topic, n, 0) for n in range(PARTITIONS)])
        left, began = count, 0.0
        while left:
            records = consumer.consume(1000, 1.0)
            began = began or time.perf_counter()
            for record in records:
                record.value()
            left -= len(records)
        took_s = time.perf_counter() - began
        consumer.close()
        return count / took_s

    return await asyncio.to_thread(consume)


# --- cases ---------------------------------------------------------------------------------------


def cases() -> dict[str, tuple[int, dict[str, tuple[int, Round]]]]:
    """Return by case: records, and by name: keys and round. The last round is the base."""

    def sleep() -> Awaitable[None]:
        return asyncio.sleep(SLEEP_S)

    def busy() -> None:
        _spend(BUSY_S)

    return {
        "empty": (
            320_000,
            {"txbroker": (1000, with_txbroker()), "aiokafka": (1000, with_aiokafka())},
        ),
        "busy": (
            64_000,
            {"txbroker": (1000, with_txbroker(busy)), "aiokafka": (1000, with_aiokafka(busy))},
        ),
        "keys": (
            320_000,
            {"100,000 keys": (100_000, with_txbroker()), "1,000 keys": (1000, with_txbroker())},
        ),
        "peers": (
            320_000,
            {"txbroker": (1000, with_txbroker()), "confluent-kafka": (1000, with_confluent)},
        ),
    } | {
        "sleep": (
            6400,
            {
                "64 at a time": (1000, with_txbroker(sleep)),
                "1 at a time": (1000, _tenth(with_txbroker(sleep, in_flight_max=1))),
            },
        )
    }


def _tenth(round_: Round) -> Round:
    """A slow round on a tenth of the records: of the first partition's keys only."""

    async def consume(kafka: str, topic: str, count: int) -> float:
        return await round_(kafka, f"{topic}-few", count // 10)

    return consume


async def measure(kafka: str, name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of a case."""
    count, contenders = cases()[name]
    topics = {}
    for keys in {keys for keys, _round in contenders.values()}:
        topics[keys] = f"{name}-{keys}"
        await fill(kafka, topics[keys], count, keys)
        if name == "sleep":
            await fill(kafka, f"{topics[keys]}-few", count // 10, keys)
    rates: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, (keys, round_) in contenders.items():
            rates[contender].append(await round_(kafka, topics[keys], count))
            print(f"{name}: {contender}: {rates[contender][-1]:,.0f}/s", file=sys.stderr)
    medians = {contender: statistics.median(found) for contender, found in rates.items()}
    first, base = list(medians.values())
    ratio = round(first / base, 3)
    return {"case": name, "rounds": rounds, "per_s": _whole(medians), "ratio": ratio}


def _whole(medians: dict[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in medians.items()}


def _results(names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    with EmbeddedKafka() as kafka:
        for name in names:
            yield uvloop.run(measure(kafka.bootstrap, name, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=sorted(cases()), default=list(cases()))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for result in _results(arguments.cases, arguments.rounds):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
