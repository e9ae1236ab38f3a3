"""The time by the brokers' clock, as far as an owner knows it."""

import time
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
