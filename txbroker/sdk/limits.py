"""Limits on what a producer keeps in memory and on how long it tries."""

import asyncio
import random
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from txbroker.errors import ConfigurationError

RETRY_SHARE_OF_WINDOW = 0.75
"""A prepare is repeated for this share of the dedup window: later its id could be void."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a producer holds and how long it waits; every time in seconds.

    Attributes:
        retry_s: for how long a call is repeated until it fails as `owner_unavailable`.
        connect_timeout_s: for one attempt to open a session.
        answer_timeout_s: after this long without an answer a call is sent again.
        heartbeat_s: a session whose proxy answers no ping for this long is given up.
        session_idle_s: a session with a proxy that owns nothing, and with which nothing is under
            way, is closed after this long; one session is always kept.
        backoff_first_s, backoff_max_s: between attempts, growing, with jitter.
        in_flight_max: prepares under way, and as many decisions; more wait their turn.
        in_flight_bytes_max: the size of their messages, likewise; bounds the memory.
        checks_max: checks answered at one time; for further ones, other instances of the group are
            asked, then its check URL.
        check_threads_max: threads that plain check functions run in.
        running_again_s: while a block runs here, its check is put off for so long.
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
        """Return how long to wait after so many failures in a row: 0 after none, else up to
        twice as long each time, the second half of it at random so that clients spread."""
        if failures <= 0:
            return 0.0
        whole = min(self.backoff_max_s, self.backoff_first_s * 2.0 ** min(failures - 1, 30))
        return whole * random.uniform(0.5, 1.0)


class InFlightLimit:
    """A bound on calls in flight and on their bytes; who does not fit waits, first come first.

    One call larger than all the bytes is let in alone, so that nothing waits for ever.
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
        """Hold room for one call of `size` bytes; return False where it has to `wait`."""
        calls, taken = self._calls, self._bytes + size
        if self._waiting or (calls and (calls >= self._calls_max or taken > self._bytes_max)):
            return False
        self._calls, self._bytes = calls + 1, taken
        return True

    def leave(self, size: int) -> None:
        """Give the room of one call of `size` bytes back."""
        self._calls -= 1
        self._bytes -= size
        if self._waiting:
            self._admit()

    async def wait(self, size: int) -> None:
        """Wait until there is room for one call of `size` bytes, and hold it."""
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)  # the room had just been given to us
            else:
                # Who left in the same round has passed it by already.
                with suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise

    def _admit(self) -> None:
        """Let those in, in turn, for whom there is room now."""
        waiting, self._waiting = self._waiting, deque()
        while waiting and (waiting[0][1].done() or self.enter(waiting[0][0])):
            _, turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
        self._waiting = waiting
