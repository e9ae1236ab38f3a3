"""Time: the brokers' clock as far as it is known, and the pace of long work and of turns."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from txbroker.core.ledger import Ledger
from txbroker.core.transaction import Transaction

CLOCKS_APART_MS = 1000
"""How far the clocks of two brokers may be apart; `txbroker doctor` alarms beyond that."""


class LogTime:
    """The append time of a record, plus the monotonic time since it was read.

    The wall clock of this machine plays no part: it may be hours off, or jump.
    """

    def __init__(self, timestamp_ms: int) -> None:
        self._base_ms = timestamp_ms
        self._base = time.monotonic()

    def follow(self, log_clock_ms: int) -> None:
        """A record was appended just now, and the log clock stands here: so it is that late, give
        or take how far brokers' clocks may be apart, also where this one says later."""
        if self.now_ms() - log_clock_ms > CLOCKS_APART_MS:
            self._base_ms, self._base = log_clock_ms, time.monotonic()
        else:
            self.at_least(log_clock_ms)

    def at_least(self, timestamp_ms: int) -> None:
        """A record was appended at this time just now or earlier, so it is that late at least."""
        if timestamp_ms > self.now_ms():
            # Anew from here: with the fraction of a millisecond that had passed before it would
            # run ahead of the brokers, and what comes before its time is not accepted.
            self._base_ms = timestamp_ms
            self._base = time.monotonic()

    def now_ms(self) -> int:
        """Return the time, ms since 1970."""
        return self._base_ms + int((time.monotonic() - self._base) * 1000)


class LogClockFollower:
    """Keeps a clock no earlier than where the clocks of both logs stand.

    Args:
        clock: is put forward.
        ledger: has applied the logs.
    """

    def __init__(self, clock: LogTime, ledger: Ledger) -> None:
        self._clock = clock
        self._ledger = ledger

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these, and told the time."""
        self._clock.at_least(max(self._ledger.half_clock_ms, self._ledger.op_clock_ms))


PIECE_S = 0.004
"""How long one piece of work may hold everybody else up, seconds."""
LOOK_EVERY = 32
"""Steps between two looks at the clock; each takes microseconds."""


class Yielder:
    """Gives way to everybody else after each few milliseconds of work."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._steps = 0

    async def step(self) -> None:
        """A small step was done."""
        self._steps += 1
        if self._steps >= LOOK_EVERY:
            await self.piece()

    async def piece(self) -> None:
        """Something was done that may have taken longer."""
        self._steps = 0
        if time.monotonic() - self._since_s >= PIECE_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()


AT_ONCE = 1
"""Turns in flight from which on others wait, so that each takes more."""
WAIT_MAX_S = 0.02
"""A turn waits no longer than this for one that takes longer, seconds."""


class Slot:
    """A turn that was begun; `release` says once that it is known how it ended."""

    def __init__(self, limiter: "TxnLimiter", wait_max_s: float) -> None:
        self._limiter: TxnLimiter | None = limiter
        self._timer = asyncio.get_running_loop().call_later(wait_max_s, self._slow)

    def release(self) -> None:
        """Let another one begin; nothing happens if this was said before."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            self._timer.cancel()
            limiter._over()

    def _slow(self) -> None:
        limiter = self._limiter
        self.release()
        if limiter is not None:
            limiter._call_all()


class TxnLimiter:
    """Lets turns of all half partitions of a proxy begin.

    Args:
        at_once: turns in flight from which on others wait.
        wait_max_s: how long others wait for one at most, seconds. Where one takes longer, waiting
            saves nothing: all that wait begin.
    """

    def __init__(self, at_once: int = AT_ONCE, wait_max_s: float = WAIT_MAX_S) -> None:
        self._at_once = at_once
        self._wait_max_s = wait_max_s
        self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> Slot:
        """Wait until it is worth while to begin a turn, in the order of those that ask."""
        if self._under_way < self._at_once:
            self._under_way += 1
        else:
            called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(called)
            try:
                await called
            except asyncio.CancelledError:
                if not called.cancelled():
                    self._over()
                raise
        return Slot(self, self._wait_max_s)

    def _over(self) -> None:
        self._under_way -= 1
        if self._under_way < self._at_once:
            self._call_next()

    def _call_all(self) -> None:
        while self._waiting:
            self._call_next()

    def _call_next(self) -> None:
        """Let the first one that waits begin, in the place of one that is over."""
        while self._waiting:
            called = self._waiting.popleft()
            if not called.cancelled():
                self._under_way += 1
                called.set_result(None)
                break
