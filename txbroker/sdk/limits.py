"""Limits on a producer's memory and times."""

import asyncio
import random
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from txbroker.errors import ConfigurationError
from txbroker.net.timers import grown_pause_s

RETRY_SHARE_OF_WINDOW = 0.75
"""A prepare is retried for this share of the dedup window: later its id could be void."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a producer holds and how long it waits; all times in seconds.

    Attributes:
        retry_s: how long a call is retried until it fails as `owner_unavailable`.
        connect_timeout_s: for one attempt to open a session.
        answer_timeout_s: how long a call waits for an answer until it is sent again.
        heartbeat_s: a session whose proxy answers no ping for this long is closed.
        session_idle_s: an unused session with a proxy that owns nothing is closed after this long;
            one session is always kept.
        backoff_first_s, backoff_max_s: pauses between attempts, growing, with jitter.
        in_flight_max: prepares in flight, and as many decisions; further ones wait.
        in_flight_bytes_max: the total size of their messages, likewise; limits the memory.
        checks_max: checks answered at one time; for further ones, other instances of the group are
            asked, then its check URL.
        check_threads_max: threads for plain check functions.
        running_again_s: while a block runs here, its check is postponed by this.
    """

    retry_s: float = 60.0
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 10.0
    heartbeat_s: float = 10.0
    session_idle_s: float = 60.0
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    in_flight_max: int = 1000
    in_flight_bytes_max: int = 64 * 1024 * 1024
    checks_max: int = 64
    check_threads_max: int = 8
    running_again_s: float = 10.0

    def validate(self) -> "Limits":
        """Return self.

        Raises:
            ConfigurationError: a limit is not above 0.
        """
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, not {getattr(self, name)!r}")
        return self

    def backoff_s(self, failures: int) -> float:
        """Return the pause after a number of failures in a row, 0 after none. It doubles each time;
        jitter of up to half of it spreads the clients."""
        if failures <= 0:
            return 0.0
        pause_s = grown_pause_s(failures, self.backoff_first_s, self.backoff_max_s)
        return pause_s * random.uniform(0.5, 1.0)


class InFlightLimit:
    """A limit on calls in flight and on their bytes; further calls wait in order of arrival.

    A call larger than the limit on bytes is admitted alone, so that no call waits for ever.
    """

    def __init__(self, calls_max: int, bytes_max: int) -> None:
        self._calls_max = calls_max
        self._bytes_max = bytes_max
        self._calls = 0
        self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def calls(self) -> int:
        """How many calls are in flight."""
        return self._calls

    def enter(self, size: int) -> bool:
        """Admit a call of `size` bytes; return False if it must `wait`."""
        calls, taken = self._calls, self._bytes + size
        if self._waiting or (calls and (calls >= self._calls_max or taken > self._bytes_max)):
            return False
        self._calls, self._bytes = calls + 1, taken
        return True

    def leave(self, size: int) -> None:
        """End a call of `size` bytes."""
        self._calls -= 1
        self._bytes -= size
        if self._waiting:
            self._admit()

    async def wait(self, size: int) -> None:
        """Wait until a call of `size` bytes is admitted."""
        admitted = asyncio.get_running_loop().create_future()
        entry = (size, admitted)
        self._waiting.append(entry)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.leave(size)  # it had just been admitted
            else:
                # `_admit` may have removed it already.
                with suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise

    def _admit(self) -> None:
        """Admit waiting calls, in order, while there is room."""
        waiting, self._waiting = self._waiting, deque()
        while waiting and (waiting[0][1].done() or self.enter(waiting[0][0])):
            _, admitted = waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
        self._waiting = waiting
