"""A capture of SQLite that runs: the relay of the outbox to which triggers write."""

from __future__ import annotations

import asyncio
from typing import Any

from txbroker.databases.database import DatabaseUnavailable
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.plan import Capture
from txbroker.relay.capture.setup import StepState
from txbroker.relay.outbox import Outbox
from txbroker.relay.relay import Relay

_CHECK_S = 5.0


class TriggerRelay:
    """A relay that ends once the triggers are not as the mapping wants them: a table that is built
    again, as for many changes of its schema, has none.

    Args:
        options: of `Relay`.
    """

    def __init__(
        self, capture: Capture, kafka: str, *, check_s: float = _CHECK_S, **options: Any
    ) -> None:
        self._capture = capture
        self._check_s = check_s
        self._relay = Relay(Outbox(capture.database), kafka, **options)

    async def start(self) -> None:
        """Connect and begin.

        Raises:
            ConfigurationError: the triggers are missing, or Kafka refuses.
            DatabaseUnavailable, KafkaUnavailable
        """
        await self.check()
        await self._relay.start()

    async def check(self) -> None:
        """Compare the triggers with the mapping.

        Raises:
            ConfigurationError: changes are not captured as the mapping wants.
            DatabaseUnavailable
        """
        missing = (StepState.TO_DO, StepState.REFUSED)
        to_do = [each.text for each in await self._capture.plan() if each.state in missing]
        if to_do:
            raise ConfigurationError(
                f"{self._capture.database.name}: {'; '.join(to_do)}: run `txbroker capture apply "
                "FILE`, and fill in what changed without triggers"
            )

    async def run(self) -> None:
        """Run until `close`, or until an error that a retry does not cure, and raise that."""
        tasks = [asyncio.create_task(each) for each in (self._relay.run(), self._checks())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _checks(self) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            try:
                await self.check()
            except DatabaseUnavailable:
                continue  # if it lasts, the relay notices it

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing waits, and check the triggers once more; see `Relay.drain`."""
        await self._relay.drain(timeout_s)
        await self.check()

    def collector(self) -> Any:
        """Return the metrics of the relay."""
        return self._relay.collector()

    async def close(self) -> None:
        """End after the delivery in flight, and close the connections."""
        await self._relay.close()
