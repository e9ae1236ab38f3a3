"""`InKafka`: the outputs of a handler and the position of its message in one Kafka transaction."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from txbroker.consumer.engine.calls import call_of
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.engine.workers import (
    Call,
    Handler,
    RolledBack,
    is_coroutine_function,
    until_end,
)
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.pending import Pending
from txbroker.consumer.rounds import StoreTraits
from txbroker.core.consuming.failure import Reject
from txbroker.core.records import Cause, Message
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.placing import MessagesRefused, Placing
from txbroker.door.writing import Copy, Refused
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S, _PAUSE_MAX_S = 0.1, 5.0
_INT32_MAX, _INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
_BYTES = (bytes, type(None))
_sending = threading.Lock()
"""Held while `Outputs` change: a thread may send while the handler ends."""


class InKafka:
    """Stores what handlers send, and positions, in one Kafka transaction: of up to 1,000 messages,
    at most every 100 ms. No handler runs inside it."""

    traits = StoreTraits(exact=True)


class Outputs:
    """What one call of a handler sends: `out.send(message)`, in any thread.

    It is written after the handler has returned, with the position of its message. If the handler
    fails, it is not written.
    """

    __slots__ = ("_ended", "_messages")

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._ended = False

    def send(self, message: Message) -> None:
        """Send a message. Its partition, if None, is chosen by its key as Kafka's clients do;
        without a key by the partition of the message that is handled.

        Raises:
            ConfigurationError: it is no `Message`, has a field of a wrong type or range, or the
                handler has ended.
        """
        if not isinstance(message, Message):
            raise ConfigurationError(
                f"out.send({message!r}): give a Message(topic, key=…, value=…) of txbroker.consumer"
            )
        if wrong := _wrong_field(message):
            raise ConfigurationError(f"out.send: {wrong} of a message for topic {message.topic!r}")
        with _sending:
            if self._ended:
                raise ConfigurationError(
                    "out.send after the end of the handler: wait in the handler for all it sends"
                )
            self._messages.append(message)

    def end(self) -> Sequence[Message]:
        """Accept no further messages; return them."""
        with _sending:
            self._ended = True
        return self._messages


class _FirstStage:
    """Takes the result of the first stage's outputs, and of its marks; see `Storing`."""

    def __init__(self, engine: Engine, future: asyncio.Future[None], marks: Sequence[Copy]) -> None:
        self._engine = engine
        self._future = future
        self._marks = marks

    def stored(self, pendings: Sequence[Pending]) -> None:
        self._engine.settlement.store_stage([each.message for each in pendings if each.message])
        if not self._future.done():
            self._future.set_result(None)

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        if all(pending.copies[n] in self._marks for n in error.indexes):
            return None
        self._end(Reject(str(error)))
        return ()

    def dropped(self, pending: Pending) -> None:
        self._end(RolledBack())

    def _end(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class KafkaResults:
    """The `ResultStore` of handlers that send messages.

    Args:
        prefix: of txbroker's own topics, which are no targets.
        threads: for plain handlers.
    """

    second_argument = "out"

    def __init__(self, door: ConsumingDoor, prefix: str, threads: int) -> None:
        self._door = door
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._placing = Placing(self._target, prefix)
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """End the threads that do not run a handler."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self, handler: Handler, *, batch: bool) -> None:
        """See `ResultStore.check`."""
        if batch:
            raise ConfigurationError(
                "batch is not for InKafka, which collects the outputs of many messages in a "
                "transaction: leave batch out"
            )

    def around(self, engine: Engine, handler: Handler) -> Call:
        """See `ResultStore.around`: the outputs go to the messages' call, and are stored after it;
        with later stages they are stored before it returns."""
        run = handler if is_coroutine_function(handler) else self._in_thread(handler)
        placing = self._placing

        async def call(messages: list[ReceivedMessage], argument: Any) -> None:
            message, out = messages[0], Outputs()
            try:
                await run(argument, out)
            finally:
                sent = out.end()
            if (by := call_of(message)) is None:
                raise RolledBack  # its partition is lost
            by.untimed = True
            try:
                time_ms = message.record.timestamp_ms
                copies = await placing.copies(sent, message.partition, time_ms)
                failpoint("consumer.outputs_collected")
                if engine.settlement.staged:
                    await self._store(engine, message, copies, message.feed.stage_mark(message))
                elif call_of(message) is by:
                    by.outputs = [*copies, *message.feed.clearance(message)]
            except MessagesRefused as error:
                raise Reject(str(error)) from None
            finally:
                by.resume_timeout(engine.time())

        return call

    def _in_thread(self, handler: Handler) -> Handler:
        self._pool = pool = ThreadPoolExecutor(self._threads, "txbroker-handler")

        async def call(argument: Any, out: Outputs) -> None:
            await until_end(self._loop.run_in_executor(pool, handler, argument, out))

        return call

    async def _store(
        self,
        engine: Engine,
        message: ReceivedMessage,
        outputs: Sequence[Copy],
        marks: Sequence[Copy],
    ) -> None:
        """Store outputs now, for the stages that follow.

        Raises:
            Reject: Kafka refuses one.
            RolledBack: they are not stored, or the partition is lost.
        """
        partition, stored = message.feed.partition, self._loop.create_future()
        commits = engine.partitions.commits.get(partition)
        if commits is None:
            raise RolledBack
        owner = _FirstStage(engine, stored, marks)
        pending = Pending(partition, message, [*outputs, *marks], owner, first=True)
        commits.store(pending)
        try:
            await asyncio.shield(stored)
        except asyncio.CancelledError:
            if not commits.withdraw(pending):
                await stored  # or the message would be handled again
            raise

    async def finished(self, engine: Engine, messages: Sequence[ReceivedMessage]) -> None:
        """See `ResultStore.finished`."""

    # --- outputs -----------------------------------------------------------------------------

    async def _target(self, topic: str, prefix: str) -> int | Cause:
        """Return a topic's number of partitions, see `ConsumingDoor.target`."""
        failures = 0
        while True:
            try:
                return await self._door.target(topic, prefix)
            except KafkaUnavailable as error:
                failures += 1
                log.warning("output waits", topic=topic, error=str(error))
                await asyncio.sleep(grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S))


def _wrong_field(message: Any) -> str:
    """Return which field of a `Message` cannot be written, and what it must be; "" if all can."""
    if not isinstance(message.key, _BYTES):
        return "key is not bytes or None"
    if not isinstance(message.value, _BYTES):
        return "value is not bytes or None"
    if not _is_text(message.topic):
        return "topic is not a text that can be encoded"
    if message.partition is not None and not _is_whole(message.partition, 0, _INT32_MAX):
        return f"partition {message.partition!r} is not a whole number from 0 to {_INT32_MAX}"
    time_ms = message.timestamp_ms
    if time_ms is not None and not _is_whole(time_ms, -1, _INT64_MAX):
        return f"timestamp_ms {time_ms!r} is not a whole number from -1 to {_INT64_MAX}"
    if not isinstance(message.headers, (tuple, list)):
        return "headers are not a tuple or list"
    for header in message.headers:
        match header:
            case (str() as name, bytes() | None) if _is_text(name):
                continue
        return f"headers hold {header!r}, which is not a pair of name and bytes or None"
    return ""


def _is_text(value: object) -> bool:
    """Return whether it is a text without parts of characters, which have no encoding."""
    if not isinstance(value, str):
        return False
    return value.isascii() or value.encode(errors="ignore").decode() == value


def _is_whole(number: object, least: int, largest: int) -> bool:
    return type(number) is int and least <= number <= largest
