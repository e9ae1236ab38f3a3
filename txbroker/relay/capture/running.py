"""A capture that runs: its source, and the pump that moves messages to Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import structlog

from txbroker.door.delivering import WriterFenced
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.relay.capture.plan import Capture, CaptureSource
from txbroker.relay.connections import open_door
from txbroker.relay.metrics import RelayCollector, RelayFigures
from txbroker.relay.pump import Pump
from txbroker.relay.relay import StillWaiting
from txbroker.relay.sink import RelaySink
from txbroker.relay.source import Delivery, Refusal

log = structlog.wrap_logger(logging.getLogger(__name__))

_LAG_S = 5.0
_STOP_S = 10.0


class RunningCapture:
    """Moves the changes of a capture to Kafka.

    Args:
        kafka: bootstrap servers.
        topic_prefix: of the topic of positions, `PREFIX.relay`.
        security: settings of the connection to Kafka, see `RelayOptions`.
        on_gap: "skip": go on where changes were lost.
        skip: ids of changes that are left out.
    """

    def __init__(
        self,
        capture: Capture,
        kafka: str,
        *,
        topic_prefix: str,
        security: Mapping[str, Any] | None = None,
        on_gap: Literal["stop", "skip"] = "stop",
        skip: Collection[str] = (),
    ) -> None:
        self._capture = capture
        self._kafka = kafka
        self._positions = f"{topic_prefix}.relay"
        self._security = security
        self._on_gap: Literal["stop", "skip"] = on_gap
        self._skip = skip
        self._figures = RelayFigures(lambda: 1)
        self._stack = contextlib.AsyncExitStack()
        self._position: bytes | None = None
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        """Connect and begin.

        Raises:
            ConfigurationError: the mapping does not fit the database, or Kafka refuses.
            DatabaseUnavailable, KafkaUnavailable
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        name = self._capture.mapping.name
        source = await self._capture.source(on_gap=self._on_gap, skip=self._skip)
        self._stack.push_async_callback(source.close)
        door = await open_door(self._kafka, self._security, self._positions)
        self._stack.push_async_callback(door.close)
        key = f"{name}/capture"
        writer = door.delivery_writer(f"{self._positions}.{name}.capture", self._positions, key)
        sink = RelaySink(door, writer, self._positions)
        pump = Pump(key, _Watched(source, self._delivered), sink, self._figures)
        self._task = asyncio.create_task(pump.run(), name=f"txbroker {key}")
        self._task.add_done_callback(lambda _: self._moved.set())
        self._stack.push_async_callback(self._stop, pump)
        self._figures.lag_bytes = 0
        lag = asyncio.create_task(self._watch_lag(source))
        self._stack.callback(lag.cancel)

    async def _stop(self, pump: Pump) -> None:
        """End after the delivery in flight."""
        pump.stop()
        if not self._task.done():
            await asyncio.wait([self._task], timeout=_STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def run(self) -> None:
        """Run until an error that a retry does not cure, and raise it.

        Raises:
            ConfigurationError: the database cannot be captured any more, or another process has
                taken over.
        """
        try:
            await asyncio.shield(self._task)
        except WriterFenced:
            raise ConfigurationError(
                f"another process has taken over capture {self._capture.mapping.name}: if it "
                "should not, two captures have this name; stop one, or give it another name"
            ) from None

    async def drain(self, timeout_s: float) -> None:
        """Wait until all that is committed now is in Kafka.

        Raises:
            StillWaiting: not after `timeout_s` seconds.
            ConfigurationError: see `run`.
        """
        reached = await self._capture.end()
        try:
            async with asyncio.timeout(timeout_s):
                while self._position is None or not reached(self._position):
                    if self._task.done():
                        await self.run()
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise StillWaiting(
                f"capture {self._capture.mapping.name} is not at the end after {timeout_s:g} s"
            ) from None

    def collector(self) -> RelayCollector:
        """Return its metrics for `prometheus_client.REGISTRY.register`."""
        return RelayCollector(self._capture.mapping.name, self._figures)

    async def close(self) -> None:
        """End after the delivery in flight, and close the connections."""
        await self._stack.aclose()

    def _delivered(self, position: bytes) -> None:
        self._position = position
        self._moved.set()

    async def _watch_lag(self, source: CaptureSource) -> None:
        while True:
            try:
                self._figures.lag_bytes = await source.lag_bytes()
            except TxbrokerError as error:
                log.warning("lag of capture unknown", error=safe_repr(error))
            await asyncio.sleep(_LAG_S)


class _Watched:
    """A source whose delivered positions are reported."""

    def __init__(self, source: CaptureSource, delivered: Callable[[bytes], None]) -> None:
        self.next = source.next
        self.close = source.close
        self._source = source
        self._report = delivered

    async def resume(self, position: bytes | None) -> None:
        """See `Source.resume`: a predecessor may have delivered this position a moment ago."""
        await self._source.resume(position)
        if position is not None:
            self._report(position)

    async def delivered(self, delivery: Delivery) -> None:
        """See `Source.delivered`."""
        await self._source.delivered(delivery)
        self._report(delivery.position)

    async def refused(self, delivery: Delivery, refusals: Sequence[Refusal]) -> None:
        """See `Source.refused`."""
        await self._source.refused(delivery, refusals)
