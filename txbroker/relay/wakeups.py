"""How a relay waits for rows: short pauses after it found some, longer ones later.

| database | without rows for a second |
| --- | --- |
| SQLite | `PRAGMA data_version`, every 20 ms, shows whether another connection has committed |
| PostgreSQL | the relay is marked asleep, and a trigger notifies it; NOTIFY serialises commits |
| MariaDB | a look every second |
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from txbroker.databases.dialect import POSTGRESQL, SQLITE
from txbroker.databases.outbox.leases import Leases
from txbroker.databases.outbox.table import CHANNEL
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query
from txbroker.relay.sessions import DatabaseThread

_FIRST_S, _BUSY_S, _IDLE_S = 0.001, 0.02, 1.0
_BUSY_FOR_S = 1.0
"""After the last rows, the pauses stay short for this time."""
_GROWTH = 1.5
ASLEEP_S = 30.0
"""How long a relay is marked asleep, unless it wakes before; then it marks itself again."""


class Wakeups(Protocol):
    """Waits for rows. One call at a time."""

    @property
    def slow(self) -> bool:
        """Whether the next `wait` may take a second."""

    async def found(self) -> None:
        """Note that there were rows: the next pauses are short."""

    def reset(self) -> None:
        """Note that the session may be another one."""

    async def wait(self) -> bool:
        """Wait until there may be rows. Return True about once a second: time to look for rows
        that are due."""

    async def close(self) -> None: ...


class Pauses:
    """Pauses that grow from a millisecond to 20 ms, and after a second without rows to a second."""

    def __init__(self) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._found_s = self._now_s()
        self._pause_s = _FIRST_S
        self._looked_s = 0.0

    @property
    def slow(self) -> bool:
        return self._now_s() - self._found_s > _BUSY_FOR_S

    async def found(self) -> None:
        """See `Wakeups.found`."""
        self._found_s, self._pause_s = self._now_s(), _FIRST_S

    def reset(self) -> None:
        """See `Wakeups.reset`."""

    def next_s(self) -> float:
        """Return the next pause."""
        longest_s = _IDLE_S if self.slow else _BUSY_S
        self._pause_s = min(longest_s, self._pause_s * _GROWTH)
        return self._pause_s

    def is_second(self) -> bool:
        """Return True about once a second."""
        if self._now_s() - self._looked_s < _IDLE_S:
            return False
        self._looked_s = self._now_s()
        return True

    async def wait(self) -> bool:
        """See `Wakeups.wait`."""
        await asyncio.sleep(self.next_s())
        return self.is_second()

    async def close(self) -> None:
        """See `Wakeups.close`."""


class FileChanges(Pauses):
    """Notices commits to an SQLite file."""

    def __init__(self, thread: DatabaseThread) -> None:
        super().__init__()
        self._thread = thread
        self._version: int | None = None

    async def wait(self) -> bool:
        while True:
            await asyncio.sleep(min(_BUSY_S, self.next_s()))
            version = await self._thread.use(_data_version)
            changed, self._version = version != self._version, version
            second = self.is_second()
            if changed or second:
                return second


class Notifications(Pauses):
    """Marks the relay asleep while there are no rows, and waits for notifications."""

    def __init__(self, thread: DatabaseThread, leases: Leases) -> None:
        super().__init__()
        self._thread = thread
        self._leases = leases
        self._loop = asyncio.get_running_loop()
        self._asleep_s = float("-inf")
        """Since when it is marked asleep."""
        self._listening: Any = None

    async def found(self) -> None:
        await super().found()
        if self._asleep_s > self._now_s() - ASLEEP_S:
            self.reset()
            await self._thread.transaction(self._leases.wake)

    def reset(self) -> None:
        self._asleep_s = float("-inf")

    async def wait(self) -> bool:
        if not self.slow:
            return await super().wait()
        if self._now_s() - self._asleep_s > ASLEEP_S / 2:
            await self._thread.use(self._listen)
            await self._thread.transaction(lambda: self._leases.sleep(ASLEEP_S))
            self._asleep_s = self._now_s()
            return False  # a row may have been committed before the mark
        await self._notified()
        return self.is_second()

    def _listen(self, session: PlainSession) -> None:
        if self._listening is not session.connection:
            session.execute(Query(f"LISTEN {CHANNEL}"))
            self._listening = session.connection

    async def _notified(self) -> None:
        """Wait until the connection has received something, at most a second."""
        future: asyncio.Future[None] = self._loop.create_future()

        def readable() -> None:
            if not future.done():
                future.set_result(None)

        descriptor = self._listening.fileno()
        self._loop.add_reader(descriptor, readable)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, _IDLE_S)
        finally:
            self._loop.remove_reader(descriptor)


def wakeups(thread: DatabaseThread, database: Any, leases: Leases) -> Wakeups:
    """Return how to wait for rows of a database."""
    if database.dialect is SQLITE:
        return FileChanges(thread)
    if database.dialect is POSTGRESQL:
        return Notifications(thread, leases)
    return Pauses()


def _data_version(session: PlainSession) -> int:
    return int(session.execute(Query("PRAGMA data_version")).rows[0][0])
