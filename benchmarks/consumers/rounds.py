"""Rounds: a consumer of some library reads a topic once; the result is records a second.

The time begins with the first record, and ends with the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.consumers.load import PARTITIONS, new_name
from txbroker.consumer import Consumer

IN_FLIGHT = 64
_BATCH = 1000
_THREADS = 4

Round = Callable[[str, str, int], Awaitable[float]]
"""Consumes a topic of a Kafka with so many records."""


class Ratio(NamedTuple):
    """How two contenders compare.

    Attributes:
        what: the contenders, in words.
        least: what the ratio should be; 0: it has no aim.
        per_s: median rate of each.
    """

    what: str
    least: float
    per_s: tuple[float, float]

    @property
    def figure(self) -> float:
        """The ratio."""
        return round(self.per_s[0] / self.per_s[1], 3)

    @property
    def met(self) -> bool:
        """Whether it is what it should be."""
        return self.figure >= self.least

    def __str__(self) -> str:
        mine, other = (f"{rate:,.0f}" for rate in self.per_s)
        judged = f"at least {self.least:g}: {'met' if self.met else 'missed'}"
        judged = judged if self.least else "no aim"
        return f"{self.figure:>9g}  {self.what} ({judged}; {mine} and {other} a second)"


class Bound(NamedTuple):
    """A figure that should be small.

    Attributes:
        what: the figure, in words.
        most: what it should be at most.
        figure: what it is.
        details: what else was measured.
    """

    what: str
    most: float
    figure: float
    details: dict[str, Any]

    @property
    def met(self) -> bool:
        """Whether it is what it should be."""
        return self.figure <= self.most

    def __str__(self) -> str:
        judged = f"at most {self.most:g}: {'met' if self.met else 'missed'}"
        return f"{self.figure:>9g}  {self.what} ({judged}; {self.details})"


def with_txbroker(work: Callable[[], Any] | None = None, **options: Any) -> Round:
    """Return a round of a keyed consumer that commits at least once.

    All rounds are of one group: creating its topics keeps the broker busy for a while.
    """
    group = new_name("bench")

    async def begin(places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return dict.fromkeys(places, 0)

    async def consume(kafka: str, topic: str, count: int) -> float:
        chosen = {"order": "key", "in_flight_max": IN_FLIGHT, "on_assign": begin, **options}
        left, began, took_s = count, 0.0, 0.0
        async with Consumer(kafka, group=group, topics=[topic], **chosen) as consumer:

            async def handle(_message: object) -> None:
                nonlocal left, began, took_s
                began = began or time.perf_counter()
                if work is not None:
                    result = work()
                    if result is not None:
                        await result
                left -= 1
                if not left:
                    took_s = time.perf_counter() - began
                    consumer.stop()

            await consumer.run(handle)
        if left:
            raise SystemExit(f"{left} of {count} records were not handled")
        return count / took_s

    return consume


def with_aiokafka(work: Callable[[], Any] | None = None) -> Round:
    """Return a round of aiokafka's `getmany`, which commits nothing."""

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
    """A round of confluent-kafka's `consume(1000)`, which commits nothing."""

    def consume() -> float:
        with _confluent(kafka, topic) as consumer:
            left, began = count, 0.0
            while left:
                records = consumer.consume(_BATCH, 1.0)
                began = began or time.perf_counter()
                for record in records:
                    record.value()
                left -= len(records)
            return count / (time.perf_counter() - began)

    return await asyncio.to_thread(consume)


async def with_confluent_keyed(kafka: str, topic: str, count: int) -> float:
    """A round of confluent-kafka as a service would write it: batches are spread over threads by
    key, and committed when all their records are handled."""

    def handle(records: list[Any]) -> None:
        for record in records:
            record.value()

    def consume() -> float:
        with (
            _confluent(kafka, topic) as consumer,
            ThreadPoolExecutor(_THREADS) as threads,
        ):
            left, began = count, 0.0
            while left:
                records = consumer.consume(_BATCH, 1.0)
                began = began or time.perf_counter()
                if not records:
                    continue
                shares: list[list[Any]] = [[] for _ in range(_THREADS)]
                for record in records:
                    shares[hash(record.key()) % _THREADS].append(record)
                list(threads.map(handle, shares))
                consumer.commit(asynchronous=True)
                left -= len(records)
            return count / (time.perf_counter() - began)

    return await asyncio.to_thread(consume)


@contextmanager
def _confluent(kafka: str, topic: str) -> Iterator[Any]:
    from confluent_kafka import Consumer as Librdkafka
    from confluent_kafka import TopicPartition as Place

    options = {"bootstrap.servers": kafka, "group.id": new_name("bench")}
    consumer = Librdkafka({**options, "enable.auto.commit": False})
    try:
        consumer.assign([Place(topic, n, 0) for n in range(PARTITIONS)])
        yield consumer
    finally:
        consumer.close()
