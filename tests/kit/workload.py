"""A business on SQLite that publishes through the SDK, and records its history."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.judge import Asked, Body, Call, History, Note
from txbroker.errors import RequestError
from txbroker.sdk import (
    CheckRequest,
    Decision,
    Message,
    NotYet,
    Rollback,
    SqliteBarrier,
    Transaction,
    TransactionalProducer,
)


class LocalFailure(Exception):
    """Raised by the business when it does not know how its transaction ended."""


class Shop:
    """The business database: one row an order, and the barrier's rows beside them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, timeout=10)
        self._connection.execute("PRAGMA journal_mode=WAL")
        # Only processes are killed here, never the machine.
        self._connection.execute("PRAGMA synchronous=OFF")
        self._connection.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT, token TEXT)")
        self._connection.commit()
        self.barrier = SqliteBarrier(path)

    def place_order(self, id: str, token: str) -> None:
        """The local transaction.

        Raises:
            TooLate: a check was first.
        """
        with self._connection:
            self.barrier.record(self._connection, id)
            self._connection.execute("INSERT INTO orders VALUES (?, ?)", (id, token))

    def rows(self) -> list[str]:
        return [id for (id,) in self._connection.execute("SELECT id FROM orders")]

    def close(self) -> None:
        self._connection.close()


class Recorder:
    """Writes a history while it happens."""

    def __init__(self) -> None:
        self.history = History()
        self.finished = 0

    def means(self, token: str, messages: Sequence[Message], *, business: bool) -> None:
        """A client is about to send these under a token."""
        self.history.sent[token] = tuple(
            Body(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in messages
        )
        if business:
            self.history.business.add(token)

    @contextmanager
    def call(self, what: str, token: str, id: str = "") -> Iterator[Call]:
        """Record one call; without an exception inside it is ok."""
        call = Call(what, token, time.time(), id)
        self.history.calls.append(call)
        try:
            yield call
        except RequestError as error:
            call.result = "unknown" if error.retryable else "fail"
            call.code = error.code
            call.id = call.id or str(error.details.get("id", ""))
            call.decision = str(error.details.get("decision", ""))
            raise
        else:
            call.result = "ok"
        finally:
            call.ended = time.time()

    def asked(self, request: CheckRequest, answer: Decision | NotYet) -> None:
        text = str(answer) if isinstance(answer, Decision) else "not yet"
        self.history.asked.append(Asked(request.id, time.time(), text, request.attempt))

    def note(self, what: str, who: str = "") -> None:
        """Something else happened: a fault, or the end of it."""
        self.history.notes.append(Note(time.time(), what, who))


class Lane:
    """One of the business's threads of work: transactions one after the other, of one order key.

    Args:
        fate: the random choices of this lane.
    """

    def __init__(
        self,
        name: str,
        producer: TransactionalProducer,
        shop: Shop,
        recorder: Recorder,
        topics: Sequence[str],
        fate: random.Random,
    ) -> None:
        self._name = name
        self._producer = producer
        self._shop = shop
        self._recorder = recorder
        self._topics = topics
        self._fate = fate
        self._numbers = itertools.count()

    async def run(self, transactions: int) -> None:
        for _ in range(transactions):
            # The check decides unknown outcomes; the judge verifies all of them.
            with suppress(RequestError, LocalFailure):
                await self._one()
            self._recorder.finished += 1

    async def _one(self) -> None:
        token = f"{self._name}/{next(self._numbers)}"
        messages = self._messages(token)
        ordered = self._fate.random() < 0.5
        business = self._fate.random() < 0.8
        self._recorder.means(token, messages, business=business)
        block = self._producer.transaction(
            *messages, order_key=f"order {self._name}" if ordered else None
        )
        with self._recorder.call("prepare", token) as call:
            transaction = await block.__aenter__()
            call.id = transaction.id
        try:
            await self._inside(transaction, token, business=business)
        except BaseException as error:
            # Leaving with Rollback rolls back; any other exception decides nothing.
            leaving = block.__aexit__(type(error), error, error.__traceback__)
            if isinstance(error, Rollback):
                with self._recorder.call("rollback", token, transaction.id):
                    await leaving
                return
            await leaving
            raise
        with self._recorder.call("commit", token, transaction.id):
            await block.__aexit__(None, None, None)

    async def _inside(self, transaction: Transaction, token: str, *, business: bool) -> None:
        draw = self._fate.random()
        if draw > 0.98:
            # A business that takes longer than the first check has patience.
            await asyncio.sleep(self._fate.uniform(0.5, 2.5))
        if draw < 0.06 and business:
            raise LocalFailure("before its local transaction")
        if draw < 0.16:
            raise Rollback("does not want it")
        if business:
            self._shop.place_order(transaction.id, token)
            if draw < 0.24:
                raise LocalFailure("after its local transaction")

    def _messages(self, token: str) -> list[Message]:
        count = 1 if self._fate.random() < 0.8 else self._fate.randint(2, 5)
        return [self._message(token, number) for number in range(count)]

    def _message(self, token: str, number: int) -> Message:
        fate = self._fate
        headers: list[tuple[str, bytes | None]] = [("token", token.encode())]
        if fate.random() < 0.2:
            headers += [("same", b"\x00\xff"), ("same", b""), ("null", None), ("txb-id", b"mine")]
        value = f"{token} {number}".encode() * fate.randint(1, 9)
        return Message(
            fate.choice(self._topics),
            key=fate.choice([None, self._name.encode()]),
            value=None if fate.random() < 0.05 else value,
            headers=tuple(headers),
            timestamp_ms=1_700_000_000_000 if fate.random() < 0.1 else None,
        )


def answering(shop: Shop, recorder: Recorder) -> Callable[[CheckRequest], Decision | NotYet]:
    """Return a check function that asks the barrier and records its answer."""

    def check(request: CheckRequest) -> Decision | NotYet:
        answer = shop.barrier.check(request)
        recorder.asked(request, answer)
        return answer

    return check


async def work(
    producers: Sequence[TransactionalProducer],
    shop: Shop,
    recorder: Recorder,
    topics: Sequence[str],
    *,
    seed: int,
    lanes: int,
    transactions: int,
) -> None:
    """Run `transactions` in `lanes` concurrent lanes, with random choices from `seed`."""
    async with asyncio.TaskGroup() as group:
        for number in range(lanes):
            lane = Lane(
                f"lane-{number}",
                producers[number % len(producers)],
                shop,
                recorder,
                topics,
                random.Random(f"{seed}/{number}"),
            )
            group.create_task(lane.run(transactions // lanes))
