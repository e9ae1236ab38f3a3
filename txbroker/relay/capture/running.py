"""A capture that runs: its source, and the pump that moves messages to Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from txbroker.door.consuming import ConsumingDoor
from txbroker.door.delivering import WriterFenced
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.pump import Pump, PumpEvents
from txbroker.relay.running import positions_topic
from txbroker.relay.sink import RelaySink
from txbroker.relay.source import Delivery, Refusal, Source


class CaptureRun:
    """Moves the changes of a capture to Kafka.

    Args:
        door: to Kafka, started.
        topic_prefix: of the topic of positions, `PREFIX.relay`.
        until: ends the run at the first position that it accepts.
    """

    def __init__(
        self,
        mapping: TableMappings,
        source: Source,
        door: ConsumingDoor,
        *,
        topic_prefix: str,
        events: PumpEvents,
        until: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._name = mapping.name
        self._source = source
        self._door = door
        self._positions = f"{topic_prefix}.relay"
        self._events = events
        self._until = until

    async def run(self) -> None:
        """Run until the end that was given, an error that a retry does not cure, or cancellation.

        Raises:
            ConfigurationError: the database cannot be captured any more, or another process has
                taken over.
        """
        await self._door.create([positions_topic(self._positions)])
        key = f"{self._name}/capture"
        writer = self._door.delivery_writer(
            f"{self._positions}.{self._name}.capture", self._positions, key
        )
        sink = RelaySink(self._door, writer)
        watched = _Watched(self._source, self._delivered)
        self._pump = Pump(key, watched, sink, self._events)
        if self._until is not None and (stored := await writer.look()) is not None:
            self._delivered(stored)
        try:
            await self._pump.run()
        except WriterFenced:
            raise ConfigurationError(
                f"another process has taken over capture {self._name}: if it should not, two "
                "captures have this name; stop one, or give it another name"
            ) from None
        finally:
            await self._source.close()

    def _delivered(self, position: bytes) -> None:
        if self._until is not None and self._until(position):
            # After the pump has noted this delivery.
            asyncio.get_running_loop().call_soon(self._pump.stop)


class _Watched:
    """A source whose delivered positions are reported."""

    def __init__(self, source: Source, delivered: Callable[[bytes], None]) -> None:
        self.resume = source.resume
        self.next = source.next
        self.close = source.close
        self._source = source
        self._report = delivered

    async def delivered(self, delivery: Delivery) -> None:
        """See `Source.delivered`."""
        await self._source.delivered(delivery)
        self._report(delivery.position)

    async def refused(self, delivery: Delivery, refusals: Sequence[Refusal]) -> None:
        """See `Source.refused`."""
        await self._source.refused(delivery, refusals)
