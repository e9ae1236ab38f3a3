"""The loop of every relay: claim, resume, and then deliveries, each in one Kafka transaction.

Kafka holds the position of the last delivery, and the source everything before: a new pump claims
first, so that nothing more is committed by its predecessor, and only then reads the position.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from txbroker.databases.database import DatabaseUnavailable
from txbroker.door.placing import MessagesRefused
from txbroker.door.writing import Fenced
from txbroker.error_text import safe_repr
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s
from txbroker.relay.sink import RelaySink
from txbroker.relay.source import DeliveryRefused, DeliverySource

T = TypeVar("T")
log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S, _PAUSE_MAX_S = 0.1, 10.0
_ABORT_S = 2.0


class PumpEvents:
    """Receives the events of a pump, and ignores them."""

    def delivered(self, messages: int) -> None:
        """A delivery is committed, and its source knows it."""

    def reached(self, position: bytes) -> None:
        """All up to a position is in Kafka, perhaps by a predecessor."""

    def refused(self, messages: int) -> None:
        """Kafka refuses messages."""

    def failed(self, error: Exception) -> None:
        """Kafka or the database does not answer, or refuses; the pump tries again."""


class _Stopped(Exception):
    """`stop` was called."""


class Pump:
    """Moves messages from a source to Kafka.

    Args:
        name: of the relay and its shard, for the log.
    """

    def __init__(
        self, name: str, source: DeliverySource, sink: RelaySink, events: PumpEvents
    ) -> None:
        self._name = name
        self._source = source
        self._sink = sink
        self._events = events
        self._failures = 0
        self._stopping = False
        self._waiting: asyncio.Future[Any] | None = None

    def stop(self) -> None:
        """End `run` after the delivery in flight."""
        self._stopping = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> None:
        """Run until `stop`, or until an error that a retry does not cure.

        Raises:
            ConfigurationError: the source cannot go on.
            Fenced: another pump has claimed the position.
        """
        try:
            with contextlib.suppress(_Stopped):
                while not self._stopping:
                    await self._run()
        finally:
            await self._abort()

    async def _run(self) -> None:
        """Claim and deliver until a failure, and pause."""
        try:
            position = await self._sink.claim()
            await self._idle(self._source.resume(position))
            failpoint("relay.resumed")
            if position is not None:
                self._events.reached(position)
            while not self._stopping:
                await self._deliver()
                self._failures = 0
        except Fenced:
            raise
        except (KafkaUnavailable, DatabaseUnavailable, DeliveryRefused) as error:
            self._events.failed(error)
            self._failures += 1
            pause_s = grown_pause_s(self._failures, _PAUSE_S, _PAUSE_MAX_S)
            log.warning("relay waits", relay=self._name, pause_s=pause_s, error=safe_repr(error))
            await self._abort()
            await self._idle(asyncio.sleep(pause_s))

    async def _abort(self) -> None:
        """End the transaction of a claim or delivery, for which readers of its topics wait."""
        with contextlib.suppress(KafkaUnavailable, TimeoutError):
            await asyncio.wait_for(self._sink.abort(), _ABORT_S)

    async def _idle(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something that `stop` may cancel.

        Raises:
            _Stopped
        """
        self._waiting = waiting = asyncio.ensure_future(work)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not waiting.done():
                waiting.cancel()
            if task is not None and task.cancelling():
                raise
            raise _Stopped from None
        finally:
            self._waiting = None

    async def _deliver(self) -> None:
        delivery = await self._idle(self._source.next())
        count = 0
        try:
            async for messages in delivery.pieces():
                await self._sink.write(messages)
                count += len(messages)
            failpoint("relay.written")
            position = delivery.position
            await self._sink.commit(position)
        except MessagesRefused as error:
            log.warning(
                "messages refused",
                relay=self._name,
                count=len(error.refusals),
                topic=error.refusals[0].message.topic,
                cause=str(error),
            )
            self._events.refused(len(error.refusals))
            await self._sink.abort()  # earlier pieces may be written
            await self._source.refused(delivery, error.refusals)
            return
        failpoint("relay.committed")
        await self._source.delivered(delivery)
        failpoint("relay.delivered")
        self._events.delivered(count)
        self._events.reached(position)
