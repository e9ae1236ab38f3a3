"""How many done rows a consumer keeps while keys are stuck: all messages of a topic in order `key`,
exactly once into SQLite, on a Kafka in memory.

The handler counts the rows of `txbroker_done` in its transaction, before it adds its own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.consumers.places import places, rows_of
from benchmarks.consumers.rounds import Bound
from tests.kit.processing import Doors
from txbroker.consumer import Consumer, InDatabase, Later
from txbroker.consumer.settings import DONE_ROWS
from txbroker.core.records import Record
from txbroker.databases.steps import Query
from txbroker.databases.tables import DONE
from txbroker.testing.memory import MemoryKafka

MESSAGES, KEYS, STUCK = 1_000_000, 5_000, 10
PARTITIONS = 8
BATCH = 100
MOST = 2 * DONE_ROWS
"""Those of a round, and those that are done until it has ended."""
_EVERY = 10
_AHEAD = 50_000
_STUCK_S = 3_600.0


def bounds(_rounds: int) -> Iterator[Bound]:
    """Measure once."""
    with tempfile.TemporaryDirectory() as folder:
        yield uvloop.run(stuck(Path(folder), MESSAGES))


async def stuck(folder: Path, messages: int) -> Bound:
    """Handle all messages whose keys are not stuck.

    Raises:
        SystemExit: a message has no result, or two.
    """
    kafka = MemoryKafka()
    kafka.create_topic("orders", PARTITIONS)
    with places(["sqlite"], folder) as (place,):
        place.prepare()
        expected = sum(number % KEYS >= STUCK for number in range(messages))
        handled, calls, most = 0, 0, 0
        began_s = time.monotonic()

        def handle(batch: list[Any], connection: Any) -> None:
            nonlocal handled, calls, most
            calls += 1
            if calls % _EVERY == 0:
                most = max(most, connection.execute(f"SELECT count(*) FROM {DONE}").fetchone()[0])
            for message in batch:
                if int(message.key) < STUCK:
                    message.failed(Later(_STUCK_S))
                    return
            place.insert(connection, rows_of(batch))
            handled += len(batch)
            if handled >= expected:
                consumer.stop()

        consumer = Consumer(
            Doors.to(kafka),
            group="bench",
            topics=["orders"],
            mode="exactly-once",
            order="key",
            store=InDatabase(place.database),
        )
        async with consumer:
            running = asyncio.create_task(consumer.run(handle, batch=BATCH))
            for first in range(0, messages, _AHEAD // 5):
                while first - handled > _AHEAD and not running.done():
                    await asyncio.sleep(0.01)
                for partition in range(PARTITIONS):
                    numbers = range(first + partition, first + _AHEAD // 5, PARTITIONS)
                    records = [Record(b"%d" % (number % KEYS), b"") for number in numbers]
                    kafka.write("orders", partition, records, None)
            await running
        if place.stored() != expected:
            raise SystemExit(f"{place.stored()} of {expected} messages are stored")
        with closing(place.database.open()) as session:
            left = session.execute(Query(f"SELECT count(*) FROM {DONE}")).rows[0][0]
    print(f"{handled:,} messages handled", file=sys.stderr, flush=True)
    what = f"most done rows, {STUCK} of {KEYS:,} keys stuck, {messages:,} messages"
    details = {"at_the_end": left, "took_s": round(time.monotonic() - began_s)}
    return Bound(what, MOST, most, details)
