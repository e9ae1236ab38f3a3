"""`Relay`: delivers the rows of an outbox to Kafka, exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from txbroker.errors import ConfigurationError, needs
from txbroker.relay.outbox import Outbox
from txbroker.relay.settings import RelayOptions, RelaySettings

if TYPE_CHECKING:
    from txbroker.door.consuming import HasConsumingDoor
    from txbroker.relay.running import RunningRelay


class Relay:
    """Delivers the rows of an outbox: `async with Relay(outbox, "kafka:9092") as relay: …`.

    Each delivery is one Kafka transaction of messages and their position: consumers with
    `isolation.level=read_committed` see each committed row once, also through crashes. Several
    relays of one outbox, in any processes, share its shards.

    Args:
        kafka: bootstrap servers, `host:port`, several separated by commas; or a broker of
            `txbroker.testing`.
        options: see `RelayOptions`.

    Raises:
        ConfigurationError: the options contradict each other.
    """

    def __init__(
        self, outbox: Outbox, kafka: str | HasConsumingDoor, **options: Unpack[RelayOptions]
    ) -> None:
        if not isinstance(outbox, Outbox):
            raise ConfigurationError(f"Relay({outbox!r}, …): give an Outbox of txbroker.relay")
        try:
            self._settings = RelaySettings(**options)
        except TypeError as error:
            raise ConfigurationError(f"unknown option of Relay: {error}") from None
        self._settings.validate()
        self._outbox = outbox
        self._kafka = kafka
        self._running: RunningRelay | None = None

    async def start(self) -> None:
        """Connect, create the topic of positions if it is missing, and begin; `async with` does it.

        Raises:
            ConfigurationError: something is missing or not permitted; names the next step.
            DatabaseUnavailable, KafkaUnavailable: no answer.
        """
        if self._running is not None:
            raise ConfigurationError("a relay starts once: make another one")
        with needs("relay"):
            from txbroker.relay.running import RunningRelay
        self._running = RunningRelay(self._outbox, self._kafka, self._settings)
        await self._running.start()

    async def close(self) -> None:
        """End after the deliveries in flight, and release the shards."""
        if self._running is not None:
            await self._running.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
        if exc is None and self._running is not None:
            self._running.check()

    @property
    def _started(self) -> RunningRelay:
        if self._running is None:
            raise ConfigurationError("the relay is not started: use `async with` or `start`")
        return self._running

    async def run(self) -> None:
        """Run until `close`, or until an error that a retry does not cure, and raise that.

        Raises:
            ConfigurationError: another relay has the name, or the tables or topics were changed.
        """
        await self._started.run()

    async def drain(self, timeout_s: float) -> None:
        """Wait until no committed row waits, whichever relay delivers it.

        Raises:
            StillWaiting: rows still wait after `timeout_s` seconds; names the reason.
            ConfigurationError: the relay has stopped.
        """
        await self._started.drain(timeout_s)

    def statistics(self) -> Mapping[str, float]:
        """Return the figures of this relay by the name of their metric, see `collector`."""
        return self._started.statistics()

    def collector(self) -> Any:
        """Return its metrics for `prometheus_client.REGISTRY.register`."""
        return self._started.collector()
