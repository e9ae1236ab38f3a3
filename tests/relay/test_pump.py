"""The loop of a relay, alone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from txbroker.databases.database import DatabaseUnavailable
from txbroker.relay.pump import Pump, PumpEvents


class Silent:
    """A sink that can be claimed, and a source whose database does not answer."""

    async def claim(self) -> None:
        """See `RelaySink.claim`."""

    async def resume(self, _position: bytes | None) -> None:
        """See `Source.resume`."""
        raise DatabaseUnavailable("no answer")


class Events(PumpEvents):
    """Waits for a failure."""

    def __init__(self) -> None:
        self.noted = asyncio.Event()

    def failed(self, error: Exception) -> None:
        """See `PumpEvents.failed`."""
        self.noted.set()


async def test_pump_that_pauses_after_a_failure_stops() -> None:
    events, silent = Events(), cast(Any, Silent())
    pump = Pump("test", silent, silent, events)
    running = asyncio.create_task(pump.run())
    await events.noted.wait()
    pump.stop()
    await asyncio.wait_for(running, 5)
