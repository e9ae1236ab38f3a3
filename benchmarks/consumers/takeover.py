"""Seconds from the assignment of 64 partitions until a message of each is handled, after another
consumer has left, exactly once into each database."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvloop

from benchmarks.consumers.load import door_to, new_name, until
from benchmarks.consumers.places import NAMES, Place, places
from benchmarks.consumers.rounds import Bound
from txbroker.consumer import Consumer, InDatabase
from txbroker.consumer.claims import PartitionReader
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import TopicSpec
from txbroker.embedded import EmbeddedKafka

MOVED = 64
AIM_S = 1.0
_EACH = 5
"""Messages in a partition."""
_BATCH = 100
"""Of which a transaction has so many: what counts is the takeover, not the handlers' commits."""


@contextmanager
def noting_assignments() -> Iterator[list[float]]:
    """Yield a list of the times when a reader was assigned all partitions."""
    at_s: list[float] = []
    assigned = PartitionReader.assigned

    def noted(reader: PartitionReader, partitions: frozenset[Partition]) -> None:
        if len(partitions) == 2 * MOVED:
            at_s.append(time.perf_counter())
        assigned(reader, partitions)

    with patch.object(PartitionReader, "assigned", noted):
        yield at_s


def bounds(rounds: int) -> Iterator[Bound]:
    """Measure each database."""
    with (
        tempfile.TemporaryDirectory() as folder,
        places(NAMES, Path(folder)) as found,
        EmbeddedKafka() as kafka,
    ):
        for place in found:
            took = [uvloop.run(takeover(kafka.bootstrap, place)) for _ in range(rounds)]
            what = f"{place.name}: seconds until {MOVED} partitions are taken over"
            each = [round(each, 3) for each in took]
            yield Bound(what, AIM_S, max(each), {"each_s": each})


async def takeover(kafka: str, place: Place) -> float:
    """Return the seconds; the consumer that leaves has handled nothing."""
    place.prepare()
    topic, group = new_name("moves"), new_name("bench")
    async with door_to(kafka) as door:
        await door.create([TopicSpec(topic, 2 * MOVED, 1, {})])
        for number in range(2 * MOVED):
            await door.append(topic, number, [Record(None, b"") for _ in range(_EACH)])
    first_s: dict[int, float] = {}

    def plain(messages: list[Any], _connection: Any) -> None:
        for message in messages:
            first_s.setdefault(message.partition, time.perf_counter())

    async def coroutine(messages: list[Any], connection: Any) -> None:
        plain(messages, connection)

    given: dict[str, Any] = {"mode": "exactly-once", "order": "partition"}
    store = InDatabase(place.database)
    leaver = Consumer(kafka, group=group, topics=[topic], store=store, **given)
    one = Consumer(kafka, group=group, topics=[topic], store=store, **given)
    with noting_assignments() as assigned_s:
        async with leaver, one:
            handler = coroutine if place.coroutine else plain
            running = asyncio.create_task(one.run(handler, batch=_BATCH, max_wait_s=0.01))
            await until(lambda: len(first_s) == MOVED, "half of the partitions have moved")
            assigned_s.clear()
            await leaver.aclose()
            await until(lambda: len(first_s) == 2 * MOVED, "the others have moved")
            one.stop()
            await running
    took_s = max(first_s.values()) - assigned_s[0]
    print(f"{place.name}: {took_s:.3f} s", file=sys.stderr, flush=True)
    return took_s
