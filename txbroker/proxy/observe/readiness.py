"""Logs when the proxy becomes ready to take calls, and when it stops being ready."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from txbroker.contract.service import PartitionState, Readiness
from txbroker.proxy.observe.logging import get_logger

LOOK_S = 1.0
"""Interval of the poll for changes without a notification, seconds."""
PROBLEMS_SHOWN = 5
"""Problems that a line lists: those of many partitions are alike."""

log = get_logger(__name__)


class ReadinessLog:
    """Logs changes of a proxy's readiness.

    Args:
        readiness: returns the current readiness.
    """

    def __init__(self, readiness: Callable[[], Readiness]) -> None:
        self._readiness = readiness
        self._ready = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to poll."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Log nothing more: a proxy that stops on purpose is not ready."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Log the readiness if it has changed. A proxy starts as not ready."""
        current = self._readiness()
        if self._closed or current.ready == self._ready:
            return
        self._ready = current.ready
        if current.ready:
            states = current.partitions.values()
            log.info("ready", owned=sum(state == PartitionState.OWNED for state in states))
        else:
            shown = list(current.problems[:PROBLEMS_SHOWN])
            log.warning("not ready", problems=shown, count=len(current.problems))

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)
