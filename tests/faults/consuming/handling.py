"""Handlers of an instance: they follow a message's value, and write it to the history."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tests.faults.consuming.tables import SEEN, Tables, execute
from txbroker.consumer import Later, Message, Outputs, ReceivedMessage, Reject

Step = float | tuple[str, tuple[Any, ...]]
"""What a handler waits for: a time, seconds, or a statement and its values."""
HANDLER = "handler"
"""A moment within a handler: its transaction is open, its effect is written."""

Write = Callable[..., None]


class Planned(ValueError):
    """A message's value asks for it."""


class Plans:
    """The meaning of messages' values.

    Args:
        healed: a file; once it exists, no message fails but those that are rejected.
        slowed: a file; while it exists, calls take up to `slow_s` longer.
    """

    def __init__(self, healed: str, slowed: str = "", slow_s: float = 0.0) -> None:
        self._file = healed
        self._slowed = slowed
        self._slow_s = slow_s
        self._healed = False
        self._stages_failed: set[tuple[Any, ...]] = set()

    @property
    def healed(self) -> bool:
        self._healed = self._healed or os.path.exists(self._file)
        return self._healed

    def takes_s(self, messages: Sequence[ReceivedMessage]) -> float:
        """Return how long a call takes."""
        slow_s = random.uniform(0, self._slow_s) if os.path.exists(self._slowed) else 0.0
        return sum((instructions(each).get("takes_s", 0.0) for each in messages), slow_s)

    def error(self, message: ReceivedMessage) -> Exception | None:
        """Return what the first stage raises."""
        what = instructions(message)
        if what.get("reject"):
            return Reject("never")
        if self.healed:
            return None
        if what.get("fails_until", 0.0) > time.time():
            return Planned("not yet")
        if what.get("flaky") and message.attempt == 1:
            return Planned("once")
        if (seconds := what.get("later_s")) and message.attempt == 1:
            return Later(seconds)
        return None

    def session(self, message: ReceivedMessage) -> str | None:
        """Return what changes the session."""
        what = instructions(message)
        found: str | None = what.get("session")
        return found if what.get("session_until", math.inf) > time.time() else None

    def stage_error(self, number: int, message: ReceivedMessage) -> Exception | None:
        """Return what a later stage raises: the first time, or until a time."""
        what = instructions(message)
        at = (number, message.topic, message.partition, message.offset)
        if self.healed or what.get("stage") != number:
            return None
        if what.get("stage_fails_until", 0.0) > time.time():
            return Planned("stage: not yet")
        if at in self._stages_failed:
            return None
        self._stages_failed.add(at)
        return Planned("stage: once")


def instructions(message: ReceivedMessage) -> dict[str, Any]:
    """Return the value of a message."""
    found: dict[str, Any] = json.loads(message.value or b"{}")
    return found


class Calls:
    """Writes the begin and the end of calls."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def call(self, messages: Sequence[ReceivedMessage]) -> Generator[None]:
        """Write a call of the handler, and how it ends."""
        numbers = [self._begin(message) for message in messages]
        result = "cancelled"
        try:
            yield
            result = "ok"
        except Later:
            result = "later"
            raise
        except Reject:
            result = "reject"
            raise
        except Planned:
            result = "error"
            raise
        finally:
            for number in numbers:
                self._write("end", call=number, result=result)

    def _begin(self, message: ReceivedMessage) -> int:
        number = next(self._numbers)
        self._write(
            "begin",
            call=number,
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            key=message.key.decode() if message.key is not None else None,
            place=message.feed.partition.place,
            token=message.token,
            attempt=message.attempt,
        )
        return number


class Handling:
    """The handler without a transaction: its end is its effect."""

    def __init__(self, plans: Plans, write: Write) -> None:
        self._plans = plans
        self._calls = Calls(write)

    async def __call__(self, message: ReceivedMessage) -> None:
        with self._calls.call([message]):
            if seconds := self._plans.takes_s([message]):
                await asyncio.sleep(seconds)
            if error := self._plans.error(message):
                raise error


class ExactHandling:
    """Handlers whose effects are rows, or messages, that are stored with the position.

    Args:
        name: of the instance.
        order: of the consumer.
        tables: of the effects; None: they are messages of the topic `output`.
        reached: called at `HANDLER`.
    """

    def __init__(
        self,
        name: str,
        order: str,
        tables: Tables | None,
        output: str,
        plans: Plans,
        write: Write,
        reached: Callable[[str], None],
    ) -> None:
        self._name = name
        self._order = order
        self._tables = tables
        self._output = output
        self._plans = plans
        self._write = write
        self._calls = Calls(write)
        self._reached = reached

    # --- the first stage ---------------------------------------------------------------------

    def plain(self, given: ReceivedMessage | list[ReceivedMessage], connection: Any) -> None:
        """The handler in a thread."""
        steps = self._steps(given)
        found: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(found)
                except StopIteration:
                    return
                if isinstance(step, float):
                    time.sleep(step)
                    found = None
                else:
                    found = execute(connection, *step)

    async def coroutine(
        self, given: ReceivedMessage | list[ReceivedMessage], connection: Any
    ) -> None:
        """The handler on the event loop, with a connection of psycopg."""
        steps = self._steps(given)
        found: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(found)
                except StopIteration:
                    return
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    found = None
                else:
                    cursor = await connection.execute(*step)
                    found = await cursor.fetchall() if cursor.description else []

    async def sending(self, message: ReceivedMessage, out: Outputs) -> None:
        """The handler whose effect is a message."""
        with self._calls.call([message]):
            if seconds := self._plans.takes_s([message]):
                await asyncio.sleep(seconds)
            out.send(Message(self._output, key=message.key, value=self._sent(message)))
            self._reached(HANDLER)
            if error := self._plans.error(message):
                raise error

    def _sent(self, message: ReceivedMessage) -> bytes:
        effect = {
            "topic": message.topic,
            "partition": message.partition,
            "offset": message.offset,
            "value": instructions(message)["n"],
            "token": message.token,
            "owned": message.feed.partition.place,
            "instance": self._name,
        }
        return json.dumps(effect).encode()

    def _steps(self, given: ReceivedMessage | list[ReceivedMessage]) -> Generator[Step, Any, None]:
        """Yield the steps of a call; an error comes after the effect, which must go with it."""
        messages = given if isinstance(given, list) else [given]
        assert self._tables is not None
        with self._calls.call(messages):
            if sql := SEEN.get(self._tables.kind):
                rows = yield sql, ()
                first = messages[0]
                source = {"topic": first.topic, "partition": first.partition}
                self._write("session", **source, offset=first.offset, seen=str(rows[0]))
            numbers: dict[ReceivedMessage, int] = {}
            for message in messages if instructions(messages[0]).get("early") else ():
                numbers[message] = yield from self._next_of_lane(message)
            yield self._plans.takes_s(messages)
            for message in messages:
                number = numbers.get(message)
                if number is None:
                    number = yield from self._next_of_lane(message)
                yield from self._insert(message, number)
            for message in messages:
                if (sql := self._plans.session(message)) is not None:
                    yield sql, ()
                    break
            self._reached(HANDLER)
            for message in messages:
                error = self._plans.error(message)
                if error is not None and isinstance(given, list):
                    message.failed(error)
                elif error is not None:
                    raise error

    def _next_of_lane(self, message: ReceivedMessage) -> Generator[Step, Any, int]:
        """Count in the row of its lane, which one transaction at a time can change: its
        numbers are in the order of the commits."""
        assert self._tables is not None
        if self._order == "none":
            return 0
        lane = self._lane(message)
        yield self._tables.count_up, (lane,)
        rows = yield self._tables.counted, (lane,)
        return int(rows[0][0])

    def _lane(self, message: ReceivedMessage) -> str:
        key = message.key.decode() if message.key is not None and self._order == "key" else ""
        return f"{message.topic}/{message.partition}/{key}"

    def _insert(self, message: ReceivedMessage, number: int) -> Generator[Step, Any, None]:
        assert self._tables is not None
        values = (
            *(message.topic, message.partition, message.offset),
            message.key.decode() if message.key is not None else None,
            *(instructions(message)["n"], self._lane(message), number),
            *(message.token, message.attempt, self._name),
        )
        yield self._tables.insert, values

    # --- later stages ------------------------------------------------------------------------

    def later(self, count: int) -> list[Callable[[Any], Any]]:
        """Return later stages, coroutine functions and plain ones in turn."""
        return [self._later(number) for number in range(2, 2 + count)]

    def _later(self, number: int) -> Callable[[Any], Any]:
        def stage(given: ReceivedMessage | list[ReceivedMessage]) -> None:
            failed: dict[str, Exception] = {}
            for message in given if isinstance(given, list) else [given]:
                lane = self._lane(message)
                # Of a batch, those after one that failed have to wait for it.
                error = failed.get(lane) or self._plans.stage_error(number, message)
                if error is None:
                    self._note_stage(number, message)
                    continue
                if not isinstance(given, list):
                    raise error
                message.failed(error)
                if self._order != "none":
                    failed[lane] = error

        async def waiting(given: ReceivedMessage | list[ReceivedMessage]) -> None:
            await asyncio.to_thread(stage, given)

        return waiting if number % 2 == 0 else stage

    def _note_stage(self, number: int, message: ReceivedMessage) -> None:
        source = (message.topic, message.partition, message.offset)
        seen = None if self._tables is None else self._tables.effects_of(source)
        self._write(
            "stage",
            stage=number,
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            seen=seen,
        )
