"""Tells in the log when the proxy becomes ready to take calls, and when it no longer is."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from txbroker.contract.service import PartitionState, Readiness
from txbroker.proxy.observe.logging import get_logger

LOOK_S = 1.0
"""How often to look, in case that nobody tells of a change."""
PROBLEMS_SHOWN = 5
"""Problems that a line names: with many partitions they are much the same."""

log = get_logger(__name__)


class ReadinessLog:
    """Follows the readiness of a proxy.

    Args:
        readiness: what `/readyz` says.
    """

    def __init__(self, readiness: Callable[[], Readiness]) -> None:
        self._readiness = readiness
        self._ready = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look by itself, too."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Say nothing more: a proxy that stops on purpose is not ready."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Say it where it is otherwise than before. A proxy begins as not ready."""
        found = self._readiness()
        if self._closed or found.ready == self._ready:
            return
        self._ready = found.ready
        if found.ready:
            states = found.partitions.values()
            log.info("ready", owned=sum(state == PartitionState.OWNED for state in states))
        else:
            shown = list(found.problems[:PROBLEMS_SHOWN])
            log.warning("not ready", problems=shown, count=len(found.problems))

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)
