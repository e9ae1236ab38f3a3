"""Waiting for messages: one taker is woken at a time, and wakes the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Waiting:
    """Those who wait for a message (takers), and those who wait for any change (watchers).

    A woken taker that gets a message wakes the next one if there may be more: when handlers never
    wait, one taker handles everything and the others sleep.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._takers: deque[asyncio.Future[int]] = deque()
        self._watchers: deque[asyncio.Future[int]] = deque()
        self._woken = 0
        """Takers that were woken and have not run yet."""

    @property
    def idle(self) -> bool:
        """Whether a taker sleeps and none is about to run."""
        return bool(self._takers) and not self._woken

    @property
    def watched(self) -> bool:
        """Whether there is a watcher."""
        return bool(self._watchers)

    async def take(self) -> None:
        """Wait until there may be a message."""
        await self._wait(self._takers)

    async def watch(self) -> None:
        """Wait until anything has changed."""
        await self._wait(self._watchers)

    async def _wait(self, waiters: deque[asyncio.Future[int]]) -> None:
        waiter: asyncio.Future[int] = self._loop.create_future()
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):
                    waiters.remove(waiter)
            else:
                self._woken -= waiter.result()
                self.wake()
            raise
        self._woken -= waiter.result()

    def wake(self) -> None:
        """Wake one taker, and all watchers."""
        _end(self._watchers)
        while self._takers and not self._woken:
            waiter = self._takers.popleft()
            if not waiter.done():
                self._woken += 1
                waiter.set_result(1)

    def wake_all(self) -> None:
        """Wake all takers and watchers."""
        _end(self._takers)
        _end(self._watchers)


def _end(waiters: deque[asyncio.Future[int]]) -> None:
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(0)
