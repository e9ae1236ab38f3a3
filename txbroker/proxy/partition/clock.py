"""The brokers' clock, whether Kafka answers, and limits for long work and promotions."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence

from txbroker.core.ledger import Ledger
from txbroker.core.transaction import Transaction
from txbroker.net.timers import Backoff

CLOCKS_APART_MS = 1000
"""Tolerated difference of two brokers' clocks; `txbroker doctor` warns above it."""


class LogTime:
    """The append time of a record, plus the monotonic time since it was read.

    The wall clock of this machine is not used: it may be hours off, or jump.
    """

    def __init__(self, timestamp_ms: int) -> None:
        self._base_ms = timestamp_ms
        self._base = time.monotonic()

    def follow(self, log_clock_ms: int) -> None:
        """Set the time to the log clock after an append; go back if it is ahead by more than the
        tolerated difference."""
        if self.now_ms() - log_clock_ms > CLOCKS_APART_MS:
            self._base_ms, self._base = log_clock_ms, time.monotonic()
        else:
            self.at_least(log_clock_ms)

    def at_least(self, timestamp_ms: int) -> None:
        """Put the time forward to the append time of a record."""
        if timestamp_ms > self.now_ms():
            # Restart both parts: keeping the fraction of a millisecond that had passed would put
            # this clock ahead of the brokers, and attempts before their time are not accepted.
            self._base_ms = timestamp_ms
            self._base = time.monotonic()

    def now_ms(self) -> int:
        return self._base_ms + int((time.monotonic() - self._base) * 1000)


class LogClockFollower:
    """Keeps a clock at or after the clocks of both logs."""

    def __init__(self, clock: LogTime, ledger: Ledger) -> None:
        self._clock = clock
        self._ledger = ledger

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records were applied: follow their append times."""
        self._clock.at_least(max(self._ledger.half_clock_ms, self._ledger.op_clock_ms))


KAFKA_SILENT_S = 5.0
"""Kafka answers an idle owner every second; after this time its counts are not current."""


class KafkaAnswers:
    """Whether Kafka answers the regular reads of one owner.

    Attributes:
        why: the error of the last read, "" if it succeeded.
    """

    def __init__(self) -> None:
        self.why = ""
        self._asked_ms: int | None = None

    def asked(self, now_ms: int) -> None:
        """A read begins."""
        if self._asked_ms is None:
            self._asked_ms = now_ms

    def answered(self) -> None:
        """It has ended."""
        self._asked_ms, self.why = None, ""

    def silent_since_ms(self, now_ms: int) -> int | None:
        """Return since when Kafka has not answered, None if it answers."""
        asked_ms = self._asked_ms
        if asked_ms is None or now_ms - asked_ms < KAFKA_SILENT_S * 1000:
            return None
        return asked_ms


PIECE_S = 0.004
"""How long work may block the event loop, seconds."""
LOOK_EVERY = 32
"""Steps between two reads of the clock; each takes microseconds."""


class Yielder:
    """Yields to the event loop after every few milliseconds of work."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._steps = 0

    async def step(self) -> None:
        self._steps += 1
        if self._steps >= LOOK_EVERY:
            await self.piece()

    async def piece(self) -> None:
        """Yield if the time is up, after a step that may have taken longer."""
        self._steps = 0
        if time.monotonic() - self._since_s >= PIECE_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()


AT_ONCE = 1
"""Promotion transactions in flight at which others wait, so that each takes more."""
WAIT_MAX_S = 0.02
"""Maximum time that others wait for one promotion transaction, seconds."""


class Slot:
    """The admission of one promotion transaction."""

    def __init__(self, limiter: "TxnLimiter", wait_max_s: float) -> None:
        self._limiter: TxnLimiter | None = limiter
        self._timer = asyncio.get_running_loop().call_later(wait_max_s, self._slow)

    def release(self) -> None:
        """Admit another one: the result of this one is known. Idempotent."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            self._timer.cancel()
            limiter._released()

    def _slow(self) -> None:
        limiter = self._limiter
        self.release()
        if limiter is not None:
            limiter._admit_all()


class TxnLimiter:
    """Admits the promotion transactions of all half partitions of a proxy.

    Args:
        at_once: promotion transactions in flight at which others wait.
        wait_max_s: maximum time that others wait for one, seconds. If one takes longer, waiting
            saves nothing: all waiting ones are admitted.
    """

    def __init__(self, at_once: int = AT_ONCE, wait_max_s: float = WAIT_MAX_S) -> None:
        self._at_once = at_once
        self._wait_max_s = wait_max_s
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> Slot:
        """Wait for admission, in order of arrival."""
        if self._in_flight < self._at_once:
            self._in_flight += 1
        else:
            admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(admitted)
            try:
                await admitted
            except asyncio.CancelledError:
                if not admitted.cancelled():
                    self._released()
                raise
        return Slot(self, self._wait_max_s)

    def _released(self) -> None:
        self._in_flight -= 1
        if self._in_flight < self._at_once:
            self._admit_next()

    def _admit_all(self) -> None:
        while self._waiting:
            self._admit_next()

    def _admit_next(self) -> None:
        """Admit the first waiting one in the place of a released one."""
        while self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.cancelled():
                self._in_flight += 1
                admitted.set_result(None)
                break


CLAIM_PAUSE_S, CLAIM_PAUSE_MAX_S = 0.2, 2.0


def claim_backoff() -> Backoff:
    """Return the pauses between claims of a partition; they have no end."""
    return Backoff(math.inf, CLAIM_PAUSE_S, CLAIM_PAUSE_MAX_S)
