"""Fewer, larger turns under load.

A turn costs the proxy and the brokers the same few requests whatever is in it. While as many are
under way as pay, those of other partitions wait a moment, and what is decided meanwhile goes along.
Nobody waits while there is little to do, nor for long behind a turn that does not come through.
"""

import asyncio
from collections import deque

AT_ONCE = 4
"""Turns under way from which on others wait. Measured, on two cores: fewer save nothing more."""
WAIT_MAX_S = 0.02
"""So long a turn waits at most: less than one takes on a machine that is busy."""


class UnderWay:
    """A turn that was begun; `over` says once that it is known how it ended."""

    def __init__(self, pace: "TurnPace") -> None:
        self._pace: TurnPace | None = pace

    def over(self) -> None:
        """Let another one begin; nothing happens if this was said before."""
        pace, self._pace = self._pace, None
        if pace is not None:
            pace._over()


class TurnPace:
    """Lets turns of all half partitions of a proxy begin.

    Args:
        at_once: turns under way from which on others wait.
        wait_max_s: how long one waits at most, seconds.
    """

    def __init__(self, at_once: int = AT_ONCE, wait_max_s: float = WAIT_MAX_S) -> None:
        self._at_once = at_once
        self._wait_max_s = wait_max_s
        self._under_way = 0
        self._waiting: deque[asyncio.Event] = deque()

    async def begin(self) -> UnderWay:
        """Wait until it is worth while to begin a turn, in the order of those that ask."""
        if self._under_way >= self._at_once:
            called = asyncio.Event()
            self._waiting.append(called)
            try:
                async with asyncio.timeout(self._wait_max_s):
                    await called.wait()
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                if called.is_set():
                    self._call_next()
                raise
            finally:
                if called in self._waiting:
                    self._waiting.remove(called)
        self._under_way += 1
        return UnderWay(self)

    def _over(self) -> None:
        self._under_way -= 1
        if self._under_way < self._at_once:
            self._call_next()

    def _call_next(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
