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


class Room:
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

    def take(self, size: int) -> "_Place":
        """Hold room for one call of `size` bytes: `async with room.take(size): …`."""
        return _Place(self, size)

    async def enter(self, size: int) -> None:
        """Wait until there is room for one call of `size` bytes, and hold it."""
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._enter(size)

    def leave(self, size: int) -> None:
        """Give the room of one call of `size` bytes back."""
        self._calls -= 1
        self._bytes -= size
        self._admit()

    async def _wait(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
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

    def _fits(self, size: int) -> bool:
        if self._calls == 0:
            return True
        return self._calls < self._calls_max and self._bytes + size <= self._bytes_max

    def _enter(self, size: int) -> None:
        self._calls += 1
        self._bytes += size

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._enter(size)
                turn.set_result(None)


class _Place:
    """The room of one call: a class, as a generator's context costs more."""

    __slots__ = ("_room", "_size")

    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self._size = size

    async def __aenter__(self) -> None:
        await self._room.enter(self._size)

    async def __aexit__(self, *_: object) -> None:
        self._room.leave(self._size)
