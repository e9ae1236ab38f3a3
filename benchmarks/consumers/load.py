"""Topics with records for consumers: filled before, or written steadily."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from txbroker.config.settings import load_kafka_access
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.door.consuming import KafkaConsumingDoor

PARTITIONS = 8
VALUE_BYTES = 200
_BATCH = 100
"""Records of a batch: 21 KiB, somewhat more than a producer's default."""
_PERIOD_S = 0.02
_POLL_S = 0.05


@asynccontextmanager
async def door_to(kafka: str) -> AsyncIterator[KafkaConsumingDoor]:
    """Open a door for the block."""
    door = KafkaConsumingDoor.from_access(load_kafka_access(kafka))
    try:
        await door.start()
        yield door
    finally:
        await door.close()


async def fill(kafka: str, topic: str, count: int, keys: int) -> None:
    """Create a topic with `count` records of `keys` keys."""
    value, each = bytes(VALUE_BYTES), count // PARTITIONS
    async with door_to(kafka) as door:
        await door.create([TopicSpec(topic, PARTITIONS, 1, {})])

        async def append(partition: int) -> None:
            for start in range(0, each, _BATCH):
                numbers = range(start, min(each, start + _BATCH))
                records = [
                    Record(b"%d" % ((n * PARTITIONS + partition) % keys), value) for n in numbers
                ]
                await door.append(topic, partition, records)

        await asyncio.gather(*map(append, range(PARTITIONS)))


@asynccontextmanager
async def steady_load(kafka: str, topic: str) -> AsyncIterator[None]:
    """Create a topic, and append a record to each partition every 20 ms during the block."""
    value = bytes(VALUE_BYTES)
    async with door_to(kafka) as door:
        await door.create([TopicSpec(topic, PARTITIONS, 1, {})])

        async def append(partition: int) -> None:
            due_s = time.monotonic()
            while True:
                await door.append(topic, partition, [Record(b"%d" % partition, value)])
                due_s = max(due_s + _PERIOD_S, time.monotonic() - 1)
                await asyncio.sleep(due_s - time.monotonic())

        tasks = [asyncio.create_task(append(number)) for number in range(PARTITIONS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)


def new_name(word: str) -> str:
    """Return the name of a new group or topic."""
    return f"{word}-{uuid.uuid4().hex[:8]}"


async def until(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> float:
    """Wait until a condition holds; return the seconds.

    Raises:
        SystemExit: it does not within the deadline.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > deadline_s:
            _give_up(f"within {deadline_s:g} s not true: {what}")
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - began


def _give_up(why: str) -> NoReturn:
    raise SystemExit(why)
