"""One relay or capture as a separate process, for `tests.faults.relays.fleet`.

Its argument is `Given` as JSON. SIGTERM ends it in order; SIGUSR1 lets it lose Kafka's answers for
a moment.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from typing import Any, cast

import msgspec

from tests.faults.consuming.instance import NO_KAFKA, Losing, Moment
from txbroker import failpoints
from txbroker.databases import from_url
from txbroker.databases.database import DatabaseUnavailable
from txbroker.errors import KafkaUnavailable
from txbroker.relay import Outbox, Relay
from txbroker.relay.capture.plan import open_capture
from txbroker.relay.capture.running import RunningCapture


class Given(msgspec.Struct, kw_only=True):
    """What an instance is started with.

    Attributes:
        url: of the outbox; "": `mapping` is the file of a capture.
        options: of `Relay` or `RunningCapture`.
        point, skip, stops: see `tests.faults.consuming.instance.Given`.
    """

    bootstrap: str
    url: str
    mapping: str = ""
    name: str
    options: dict[str, Any]
    seed: int
    point: str = ""
    skip: int = 0
    stops: bool = False


def no_history(_event: str, **_fields: Any) -> None:
    """Write nothing: the fleet sees how a process ends."""


async def main(given: Given) -> None:
    """Relay until SIGTERM."""
    moment = Moment(given, no_history)
    if given.point:
        failpoints.hook = moment.reached
    losing = Losing(given.bootstrap, random.Random(f"{given.seed}/{given.name}"))
    relay: Relay | RunningCapture
    if given.url:
        relay = Relay(Outbox(from_url(given.url)), losing, **given.options)
    else:
        kafka = cast(str, losing)  # which opens its door, as that of a relay
        relay = RunningCapture(open_capture(given.mapping), kafka, **given.options)
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    loop.add_signal_handler(signal.SIGUSR1, losing.lose)
    try:
        await relay.start()
    except (KafkaUnavailable, DatabaseUnavailable):
        sys.exit(NO_KAFKA)
    running = asyncio.ensure_future(relay.run())
    ended = asyncio.ensure_future(end.wait())
    await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    await relay.close()
    await running
    await losing.relay.close()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Given)))
