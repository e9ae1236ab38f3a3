"""`InKafka`: the outputs of a handler and the position of its message in one Kafka transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import structlog

from txbroker.consumer.committer import Pending, StoreTraits
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.workers import Call, Handler, is_coroutine_function, until_end
from txbroker.core.consuming.failure import Reject
from txbroker.core.records import Message, Record
from txbroker.core.routing import murmur2
from txbroker.door.consuming import ConsumingDoor, Copy
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine

log = structlog.wrap_logger(logging.getLogger(__name__))

_KNOWN_S = 300.0
"""How long the number of a topic's partitions is used."""
_PAUSE_S, _PAUSE_MAX_S = 0.1, 5.0


class InKafka:
    """Stores what handlers send, and positions, in one Kafka transaction: of up to 1,000 messages,
    at most every 100 ms. No handler runs inside it."""

    traits = StoreTraits(exact=True)


class Outputs:
    """What one call of a handler sends: `out.send(message)`.

    It is written after the handler has returned, with the position of its message. If the handler
    fails, it is not written.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._ended = False

    def send(self, message: Message) -> None:
        """Send a message. Its partition, if None, is chosen by its key as Kafka's clients do;
        without a key by the partition of the message that is handled.

        Raises:
            ConfigurationError: it is no `Message`, or the handler has ended.
        """
        if not isinstance(message, Message):
            raise ConfigurationError(
                f"out.send({message!r}): give a Message(topic, key=…, value=…) of txbroker.consumer"
            )
        if self._ended:
            raise ConfigurationError(
                "out.send after the end of the handler: wait in the handler for all it sends"
            )
        self.messages.append(message)

    def end(self) -> Sequence[Message]:
        """Accept no further messages; return them."""
        self._ended = True
        return self.messages


class KafkaResults:
    """The `Results` of handlers that send messages.

    Args:
        threads: for plain handlers.
    """

    second_argument = "out"

    def __init__(self, door: ConsumingDoor, threads: int) -> None:
        self._door = door
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._partitions: dict[str, tuple[float, int]] = {}
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """End the threads that do not run a handler."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self, handler: Handler, *, batch: bool) -> None:
        """See `Results.check`."""
        if batch:
            raise ConfigurationError(
                "batch is not for InKafka, which collects the outputs of many messages in a "
                "transaction: leave batch out"
            )

    def around(self, engine: Engine, handler: Handler) -> Call:
        """See `Results.around`: the outputs go to the messages' holder, and are stored after the
        call; with later stages they are stored before it returns."""
        run = handler if is_coroutine_function(handler) else self._in_thread(handler)

        async def call(messages: list[ReceivedMessage], argument: Any) -> None:
            message, out = messages[0], Outputs()
            await run(argument, out)
            copies = [await self._copy(each, message) for each in out.end()]
            failpoint("consumer.outputs_collected")
            holder = engine.in_flight.get(message)
            if engine.staged:
                await self._store(engine, message, copies)
            elif holder is not None:
                holder.outputs = copies

        return call

    def _in_thread(self, handler: Handler) -> Handler:
        self._pool = pool = ThreadPoolExecutor(self._threads, "txbroker-handler")

        async def call(argument: Any, out: Outputs) -> None:
            await until_end(self._loop.run_in_executor(pool, handler, argument, out))

        return call

    async def _store(self, engine: Engine, message: ReceivedMessage, copies: list[Copy]) -> None:
        """Store outputs now, for the stages that follow.

        Raises:
            Reject: Kafka refuses one.
        """
        work, stored = message.work, self._loop.create_future()

        def succeeded() -> None:
            engine.first_stored([message])
            if not stored.done():
                stored.set_result(None)

        def refused(cause: str) -> Sequence[Copy]:
            if not stored.done():
                stored.set_exception(Reject(cause))
            return ()

        commits = work.commits
        if commits is None:
            return
        pending = Pending(work.owner, message, copies, succeeded, refused, first=True)
        commits.store(pending)
        try:
            await asyncio.shield(stored)
        except asyncio.CancelledError:
            if not commits.withdraw(pending):
                await stored  # or the message would be handled again
            raise

    async def finished(self, messages: Sequence[ReceivedMessage]) -> None:
        """See `Results.finished`."""

    # --- outputs -----------------------------------------------------------------------------

    async def _copy(self, output: Message, message: ReceivedMessage) -> Copy:
        """Return an output with its partition.

        Raises:
            Reject: its topic or partition does not exist.
        """
        count = await self._count(output.topic)
        partition = output.partition
        if partition is None:
            key = output.key
            partition = message.partition % count if key is None else murmur2(key) % count
        if not 0 <= partition < count:
            raise Reject(
                f"topic {output.topic} has {count} partitions, and no partition {partition}"
            )
        timestamp_ms = message.timestamp_ms if output.timestamp_ms is None else output.timestamp_ms
        record = Record(output.key, output.value, tuple(output.headers), timestamp_ms)
        return Copy(output.topic, partition, record)

    async def _count(self, topic: str) -> int:
        now_s = self._loop.time()
        until_s, count = self._partitions.get(topic, (0.0, 0))
        failures = 0
        while now_s >= until_s:
            try:
                found = (await self._door.topics([topic])).get(topic)
            except ConfigurationError as error:
                raise Reject(str(error)) from None
            except KafkaUnavailable as error:
                failures += 1
                log.warning("output waits", topic=topic, error=str(error))
                await asyncio.sleep(grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S))
                continue
            if found is None:
                raise Reject(f"topic {topic} does not exist, or this login may not describe it")
            count = found.partitions
            until_s = now_s + _KNOWN_S
            self._partitions[topic] = (until_s, count)
        return count
