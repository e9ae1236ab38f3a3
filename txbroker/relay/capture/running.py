"""A capture that runs: its source, and the pump that moves messages to Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import structlog

from txbroker.core.records import Cause
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.writing import Fenced, PositionRecord
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.metrics import Collector, Samples
from txbroker.relay.capture.conversion import LEFT_OUT, Conversion
from txbroker.relay.capture.plan import Capture, CaptureSource
from txbroker.relay.connections import open_door
from txbroker.relay.metrics import RelayFigures
from txbroker.relay.pump import Pump
from txbroker.relay.settings import StillWaiting
from txbroker.relay.sink import RelaySink

log = structlog.wrap_logger(logging.getLogger(__name__))

_LAG_S = 5.0
_STOP_S = 1.5


class _CaptureFigures(RelayFigures):
    """Also which position is in Kafka, and what the source leaves out.

    Attributes:
        moved: is set whenever it has changed.
    """

    def __init__(self) -> None:
        super().__init__(lambda: 1)
        self.conversion: Conversion | None = None
        self.lag_bytes = 0
        self.position: bytes | None = None
        self.moved = asyncio.Event()

    def reached(self, position: bytes) -> None:
        self.position = position
        self.moved.set()

    def samples(self) -> Samples:
        found = dict(super().samples())
        if self.conversion is not None:
            left_out = self.conversion.left_out
            found["accepted_gaps"] = {(): self.conversion.accepted_gaps}
            found["left_out_total"] = {(reason,): left_out[reason] for reason in LEFT_OUT}
        return found


class RunningCapture:
    """Moves the changes of a capture to Kafka.

    Args:
        kafka: bootstrap servers.
        topic_prefix: of the topic of positions, `PREFIX.relay`.
        security, take_position: see `RelayOptions`.
        of_source: options of `Capture.source`.
    """

    def __init__(
        self,
        capture: Capture,
        kafka: str,
        *,
        topic_prefix: str,
        security: Mapping[str, Any] | None = None,
        take_position: bool = False,
        **of_source: Any,
    ) -> None:
        self._capture = capture
        self._kafka = kafka
        self._prefix = topic_prefix
        self._positions = f"{topic_prefix}.relay"
        self._security = security
        self._take_position = take_position
        self._of_source = of_source
        self._figures = _CaptureFigures()
        self._stack: contextlib.AsyncExitStack
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        """Connect and begin.

        Raises:
            ConfigurationError: the mapping does not fit the database, or Kafka refuses.
            DatabaseUnavailable, KafkaUnavailable
        """
        async with contextlib.AsyncExitStack() as stack:
            name = self._capture.mapping.name
            source = await self._capture.source(**self._of_source)
            stack.push_async_callback(source.close)
            self._figures.conversion = source.conversion
            door = await open_door(self._kafka, self._security, self._positions)
            stack.push_async_callback(door.close)
            await self._check_targets(door)
            key = f"{name}/capture"
            position = PositionRecord(self._positions, key)
            id = f"{self._positions}.{name}.capture"
            writer = door.writer(id, position, take=self._take_position)
            sink = RelaySink(door, writer, self._prefix)
            pump = Pump(key, source, sink, self._figures)
            moved = self._figures.moved
            self._task = asyncio.create_task(pump.run(), name=f"txbroker {key}")
            self._task.add_done_callback(lambda _: moved.set())
            stack.push_async_callback(self._stop, pump)
            lag = asyncio.create_task(self._watch_lag(source))
            stack.callback(lag.cancel)
            self._stack = stack.pop_all()

    async def _check_targets(self, door: ConsumingDoor) -> None:
        """Refuse own topics in the mapping; each delivery refuses those that become one later."""
        for topic in sorted({each.topic for each in self._capture.mapping.writers.values()}):
            cause = await door.target(topic, self._prefix)
            if isinstance(cause, Cause) and cause.code == "reserved":
                raise ConfigurationError(f"capture {self._capture.mapping.name}: {cause.message}")

    async def _stop(self, pump: Pump) -> None:
        """End after the delivery in flight."""
        pump.stop()
        if not self._task.done():
            await asyncio.wait([self._task], timeout=_STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def run(self) -> None:
        """Run until `close`, or until an error that a retry does not cure, and raise that.

        Raises:
            ConfigurationError: the database cannot be captured any more, or another process has
                taken over.
        """
        await asyncio.wait([self._task])
        if self._task.cancelled():  # by `close`
            return
        try:
            self._task.result()
        except Fenced:
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
        reached, figures = await self._capture.end(), self._figures
        try:
            async with asyncio.timeout(timeout_s):
                while figures.position is None or not reached(figures.position):
                    if self._task.done():
                        await self.run()
                    figures.moved.clear()
                    await figures.moved.wait()
        except TimeoutError:
            raise StillWaiting(
                f"capture {self._capture.mapping.name} is not at the end after {timeout_s:g} s"
            ) from None

    def collector(self) -> Collector:
        """Return its metrics for `prometheus_client.REGISTRY.register`."""
        return self._figures.collector(self._capture.mapping.name)

    async def close(self) -> None:
        """End after the delivery in flight, and close the connections."""
        await self._stack.aclose()

    async def _watch_lag(self, source: CaptureSource) -> None:
        while True:
            try:
                self._figures.lag_bytes = await source.lag_bytes()
            except TxbrokerError as error:
                log.warning("lag of capture unknown", error=safe_repr(error))
            await asyncio.sleep(_LAG_S)
