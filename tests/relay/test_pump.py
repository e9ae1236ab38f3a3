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

    async def abort(self) -> None:
        """See `RelaySink.abort`."""

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


class Claiming(Silent):
    """A sink whose claim gets no answer."""

    def __init__(self) -> None:
        self.claiming, self.aborted = asyncio.Event(), False

    async def claim(self) -> None:
        """See `RelaySink.claim`."""
        self.claiming.set()
        await asyncio.Event().wait()

    async def abort(self) -> None:
        """See `RelaySink.abort`."""
        self.aborted = True


async def test_cancelled_claim_leaves_no_transaction_open() -> None:
    """It holds the position: the claims of other shards would wait for its end."""
    sink = Claiming()
    running = asyncio.create_task(Pump("test", cast(Any, sink), cast(Any, sink), Events()).run())
    await sink.claiming.wait()
    running.cancel()
    await asyncio.wait([running])
    assert sink.aborted


async def test_pump_that_pauses_after_a_failure_stops() -> None:
    events, silent = Events(), cast(Any, Silent())
    pump = Pump("test", silent, silent, events)
    running = asyncio.create_task(pump.run())
    await events.noted.wait()
    pump.stop()
    await asyncio.wait_for(running, 5)
