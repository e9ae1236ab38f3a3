"""Waiting for messages: one taker is woken at a time, and wakes the next one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_BLOCKED_S = 5.0
"""How long other threads wait for a loop that a handler blocks."""


class Waiting:
    """Those who wait for a message (takers), and those who wait for any change (watchers).

    A taker that gets a message asks for the next one. That one is woken when the first waits in its
    handler: when handlers never wait, one taker handles everything and the others sleep. So an
    iteration of the event loop has one burst of messages, and the fetcher has its turn.

    Args:
        more: returns whether there may be another message.

    Attributes:
        takers, watchers: the sleeping ones.
        asked: the next taker is asked for.
    """

    def __init__(self, more: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._more = more
        self.takers: deque[asyncio.Future[int]] = deque()
        self.watchers: deque[asyncio.Future[int]] = deque()
        self.asked = False
        self._woken = 0
        """Takers that were woken and have not run yet."""
        self._yielding = 0

    async def wait(self, waiters: deque[asyncio.Future[int]]) -> None:
        """Wait among the takers until there may be a message, or among the watchers until
        anything has changed."""
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

    def call(self, call: Callable[..., None], *args: object) -> None:
        """Call a function in the event loop: now if this is its thread."""
        if threading.get_ident() == self._thread:
            call(*args)
        else:
            self.soon(call, *args)

    def soon(self, call: Callable[..., None], *args: object) -> None:
        """Call a function in the event loop soon. Also for signal handlers, which may interrupt any
        function here."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *args)

    def result_of(self, call: Callable[[], T]) -> T:
        """Call a function in the event loop, from any thread, and return its result.

        Raises:
            TimeoutError: the loop is blocked.
        """
        if threading.get_ident() == self._thread or not self._loop.is_running():
            return call()

        async def work() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(_BLOCKED_S)

    def wake(self) -> None:
        """Wake one taker, and all watchers."""
        if self.watchers:
            _end(self.watchers)
        while self.takers and not self._woken:
            waiter = self.takers.popleft()
            if not waiter.done():
                self._woken += 1
                waiter.set_result(1)

    def ask(self) -> None:
        """Wake a taker in the next iteration of the event loop, unless those that run now will take
        the next message."""
        self.asked = True
        self._loop.call_soon(self._answer)

    def _answer(self) -> None:
        self.asked = False
        if not self._yielding and self._more():
            self.wake()

    async def let_others_run(self) -> None:
        """Give way to other tasks, between two messages."""
        self._yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._yielding -= 1

    def wake_all(self) -> None:
        """Wake all takers and watchers."""
        _end(self.takers)
        _end(self.watchers)


def _end(waiters: deque[asyncio.Future[int]]) -> None:
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(0)
