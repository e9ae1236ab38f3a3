"""How fast an exactly-once consumer stores results in a database, relative to the same inserts
alone.

Rounds of both alternate while one consumer lives: it is suspended between its rounds. Its messages
were written to Kafka before, and most are in its memory when a round begins, as are the rows of the
plain loop. The time of a round is that from the begin of its first handler to that of its last one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvloop

from benchmarks.consumers.load import VALUE_BYTES, fill, new_name
from benchmarks.consumers.places import NAMES, Message, Place, Rows, places, rows_of
from benchmarks.consumers.rounds import Ratio
from txbroker.consumer import Consumer, InDatabase
from txbroker.consumer.stores.database import CONNECTIONS_MAX
from txbroker.embedded import EmbeddedKafka

KEYS = 1_000
_REST_S = 0.1
"""Before a round, so that nothing is left to do from the one before."""


class Case(NamedTuple):
    """What a consumer does.

    Attributes:
        what: in words.
        least: what the ratio should be.
        order: of the consumer.
        batch: messages in a transaction.
        calls: of the handler in a round.
    """

    what: str
    least: float
    order: Literal["partition", "key", "none"]
    batch: int
    calls: int

    @property
    def messages(self) -> int:
        """Messages of a round."""
        return self.batch * self.calls


CASES = {
    "one": Case("one by one", 0.7, "partition", 1, 200),
    "batch": Case("batches of 100", 0.9, "partition", 100, 40),
    "key": Case("batches of 100 in order `key`", 0.5, "key", 100, 40),
    "none": Case("batches of 100 without order", 0.5, "none", 100, 40),
}


class Rounds:
    """Counts the calls of a handler, and suspends its consumer at the end of a round."""

    def __init__(self, place: Place, case: Case, loop: asyncio.AbstractEventLoop) -> None:
        self.consumer: Consumer
        self._batch = case.batch
        self._insert, self._insert_async = place.insert, place.insert_async
        self.handler = self._coroutine if place.coroutine else self._plain
        self._loop = loop
        self.stored = 0
        self._calls = 0
        self._times: list[float] = []
        self._ended = asyncio.Event()

    async def round(self, calls: int) -> float:
        """Let the consumer call its handler so often; return the calls a second."""
        self._calls, self._times = calls, []
        self._ended.clear()
        self.consumer.resume()
        await self._ended.wait()
        begun = 0
        while begun < len(self._times):  # those that had begun before the consumer was suspended
            begun = len(self._times)
            await asyncio.sleep(_REST_S)
        return (calls - 1) / (self._times[calls - 1] - self._times[0])

    def _begin(self, argument: Any) -> Rows:
        self._times.append(time.perf_counter())
        if len(self._times) == self._calls:
            self.consumer.suspend()
            self._loop.call_soon_threadsafe(self._ended.set)
        messages = argument if self._batch > 1 else [argument]
        self.stored += len(messages)
        return rows_of(messages)

    def _plain(self, argument: Any, connection: Any) -> None:
        self._insert(connection, self._begin(argument))

    async def _coroutine(self, argument: Any, connection: Any) -> None:
        await self._insert_async(connection, self._begin(argument))


async def ratio(
    kafka: Any, topic: str, place: Place, case: Case, rounds: int, connections_max: int
) -> Ratio:
    """Compare a consumer and the plain loop.

    Args:
        topic: has enough messages.
        connections_max: transactions at the same time; the plain loop has one.

    Raises:
        SystemExit: a message has no result, or two.
    """
    place.prepare()
    value = bytes(VALUE_BYTES)
    messages = [Message(-1, number, value) for number in range(case.messages)]
    of_round = Rounds(place, case, asyncio.get_running_loop())
    of_round.consumer = consumer = Consumer(
        kafka,
        group=new_name("bench"),
        topics=[topic],
        mode="exactly-once",
        order=case.order,
        store=InDatabase(place.database, connections_max=connections_max),
        in_flight_max=2 * connections_max,
    )
    alone, consumed = [], []
    async with consumer:
        consumer.suspend()
        batch = case.batch if case.batch > 1 else 0
        running = asyncio.create_task(consumer.run(of_round.handler, batch=batch))
        for number in range(rounds + 1):
            rates = await place.alone(messages, case.batch), await of_round.round(case.calls)
            show(place, case, rates)
            if number:  # the first round opens connections and warms up
                alone.append(rates[0] * case.batch)
                consumed.append(rates[1] * case.batch)
        consumer.stop()
        await running
    if place.stored() != of_round.stored:
        raise SystemExit(f"{place.name}: {place.stored()} of {of_round.stored} messages are stored")
    medians = statistics.median(consumed), statistics.median(alone)
    what = f"{place.name}, {case.what}, {connections_max} at a time: times the inserts alone"
    has_aim = connections_max == min(CONNECTIONS_MAX, place.database.writers_max)
    return Ratio(what, case.least if has_aim else 0.0, medians)


def show(place: Place, case: Case, rates: tuple[float, float]) -> None:
    alone, consumed = (f"{rate * case.batch:,.0f}" for rate in rates)
    print(f"{place.name}, {case.what}: {consumed}, alone {alone}", file=sys.stderr, flush=True)


def messages_of(case: Case, rounds: int) -> int:
    """Return how many messages the rounds take."""
    return case.batch * (case.calls + 2 * CONNECTIONS_MAX) * (rounds + 2)


async def fill_topic(kafka: Any, cases: Sequence[Case], rounds: int) -> str:
    """Create a topic with enough messages, and return its name."""
    topic = new_name("bench")
    await fill(kafka, topic, max(messages_of(case, rounds) for case in cases), KEYS)
    return topic


def ratios(rounds: int) -> Iterator[Ratio]:
    """Measure each case on each database: with as many connections as the consumer takes by
    default, and, without an aim, with one as the plain loop has. SQLite has one writer."""
    cases = list(CASES.values())
    with (
        tempfile.TemporaryDirectory() as folder,
        places(NAMES, Path(folder)) as found,
        EmbeddedKafka() as kafka,
    ):
        topic = uvloop.run(fill_topic(kafka.bootstrap, cases, rounds))
        for case in cases:
            for place in found:
                for count in (CONNECTIONS_MAX, 1)[place.database.writers_max == 1 :]:
                    yield uvloop.run(ratio(kafka.bootstrap, topic, place, case, rounds, count))
