"""How fast an exactly-once consumer stores results in a database, relative to the same inserts
alone.

Rounds of both alternate while one consumer lives: it is suspended between its rounds. Its messages
were written to Kafka before, and most are in its memory when a round begins, as are the rows of the
plain loop. The time of a round is that from the begin of its first handler to that of its last one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.consumers.load import VALUE_BYTES, fill, new_name
from benchmarks.consumers.places import Message, Place, Rows, rows_of
from txbroker.consumer import Consumer, InDatabase

KEYS = 1_000
_REST_S = 0.1
"""Before a round, so that nothing is left to do from the one before."""


class Case(NamedTuple):
    """What a consumer does.

    Attributes:
        order: of the consumer.
        batch: messages in a transaction.
        calls: of the handler in a round.
    """

    order: str
    batch: int
    calls: int

    @property
    def count(self) -> int:
        """Messages of a round."""
        return self.batch * self.calls


CASES = {
    "one": Case("partition", 1, 200),
    "batch": Case("partition", 100, 40),
    "key": Case("key", 100, 40),
    "none": Case("none", 100, 40),
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
    kafka: Any, topic: str, place: Place, case: Case, rounds: int, connections_max: int = 1
) -> dict[str, Any]:
    """Return the figures of a case on a database.

    Args:
        topic: has enough messages.
        connections_max: transactions at the same time; the plain loop has one.

    Raises:
        SystemExit: a message has no result, or two.
    """
    place.prepare()
    value = bytes(VALUE_BYTES)
    messages = [Message(-1, number, value) for number in range(case.count)]
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
            if number:  # the first round opens connections and warms up
                alone.append(rates[0] * case.batch)
                consumed.append(rates[1] * case.batch)
        consumer.stop()
        await running
    if place.count() != of_round.stored:
        raise SystemExit(f"{place.name}: {place.count()} of {of_round.stored} messages are stored")
    medians = statistics.median(consumed), statistics.median(alone)
    return {
        "figure": round(medians[0] / medians[1], 3),
        "of_pairs": round(
            statistics.median(a / b for a, b in zip(consumed, alone, strict=True)), 3
        ),
        "rounds": rounds,
        "per_s": {"consumer": round(medians[0]), "alone": round(medians[1])},
    }


def messages_of(case: Case, rounds: int) -> int:
    """Return how many messages the rounds take."""
    return case.batch * (case.calls + 2) * (rounds + 2)


async def fill_topic(kafka: Any, cases: Sequence[Case], rounds: int) -> str:
    """Create a topic with enough messages, and return its name."""
    topic = new_name("bench")
    await fill(kafka, topic, max(messages_of(case, rounds) for case in cases), KEYS)
    return topic
