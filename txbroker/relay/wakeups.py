"""How a relay waits for rows: short pauses after it found some, longer ones later.

| database | without rows for a second |
| --- | --- |
| SQLite | `PRAGMA data_version`, every 20 ms, shows whether another connection has committed |
| PostgreSQL | the relay holds a lock, by which a trigger knows that it has to notify |
| MariaDB | a look every second |
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from txbroker.databases.database import Database
from txbroker.databases.dialect import POSTGRESQL, SQLITE
from txbroker.databases.outbox.table import ASLEEP, CHANNEL
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query
from txbroker.relay.sessions import DatabaseThread

_FIRST_S, _BUSY_S, _IDLE_S = 0.001, 0.02, 1.0
_BUSY_FOR_S = 1.0
"""After the last rows, the pauses stay short for this time."""
_GROWTH = 1.5
_AWAKE_S = 0.1
"""Between looks of a relay that cannot sleep."""


class Wakeups:
    """Waits for rows, by pauses that grow from a millisecond to 20 ms, and after a second without
    rows to a second. One call at a time."""

    def __init__(self) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._found_s = self._now_s()
        self._pause_s = _FIRST_S
        self._looked_s = 0.0

    @property
    def slow(self) -> bool:
        return self._now_s() - self._found_s > _BUSY_FOR_S

    async def found(self) -> None:
        """Note that there were rows: the next pauses are short."""
        self._found_s, self._pause_s = self._now_s(), _FIRST_S

    def reset(self) -> None:
        """Note that the session may be another one."""

    def next_s(self) -> float:
        """Return the next pause."""
        longest_s = _IDLE_S if self.slow else _BUSY_S
        self._pause_s = min(longest_s, self._pause_s * _GROWTH)
        return self._pause_s

    def is_second(self) -> bool:
        """Return True about once a second: time to look for rows that are due."""
        if self._now_s() - self._looked_s < _IDLE_S:
            return False
        self._looked_s = self._now_s()
        return True

    async def wait(self) -> None:
        """Wait until there may be rows, at most about a second."""
        await asyncio.sleep(self.next_s())


class FileChanges(Wakeups):
    """Notices commits to an SQLite file."""

    def __init__(self, thread: DatabaseThread) -> None:
        super().__init__()
        self._thread = thread
        self._version: int | None = None

    async def wait(self) -> None:
        end_s = self._now_s() + _IDLE_S
        while self._now_s() < end_s:
            await asyncio.sleep(min(_BUSY_S, self.next_s()))
            version = await self._thread.use(_data_version)
            changed, self._version = version != self._version, version
            if changed:
                return


class Notifications(Wakeups):
    """Has writers notify this relay while there are no rows.

    A sleeping relay holds a lock that each writer tries to share, until it commits: who gets it
    does not notify. So no row that was committed before the lock was taken is missed by a look
    after it, and each later one is announced. The lock ends with the connection.
    """

    def __init__(self, thread: DatabaseThread) -> None:
        super().__init__()
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._asleep = False
        self._locked = False
        self._arrived = False
        """A notification came together with the answer to a query."""
        self._listening: Any = None

    async def found(self) -> None:
        await super().found()
        if self._locked:
            self._asleep = self._locked = False
            await self._thread.use(_unlock)

    def reset(self) -> None:
        self._asleep = False

    async def wait(self) -> None:
        if not self.slow:
            return await super().wait()
        # A lost session was replaced, without its lock.
        if not self._asleep or self._listening.closed:
            self._asleep = self._locked = await self._thread.use(self._lock)
            if self._asleep:
                return None
        if self._arrived:
            self._arrived = False
            return None
        # Otherwise a transaction of a writer is open, or another shard's relay sleeps.
        return await self._notified(_IDLE_S if self._asleep else _AWAKE_S)

    def _note(self, _notification: object) -> None:
        self._arrived = True

    def _lock(self, session: PlainSession) -> bool:
        if self._listening is not session.connection:
            if hasattr(session.connection, "add_notify_handler"):  # psycopg's
                session.connection.add_notify_handler(self._note)
            session.execute(Query(f"LISTEN {CHANNEL}"))
            self._listening = session.connection
        return bool(session.execute(Query(f"SELECT pg_try_advisory_lock({ASLEEP})")).rows[0][0])

    async def _notified(self, timeout_s: float) -> None:
        """Wait until the connection has received something."""
        future: asyncio.Future[None] = self._loop.create_future()

        def readable() -> None:
            if not future.done():
                future.set_result(None)

        descriptor = self._listening.fileno()
        self._loop.add_reader(descriptor, readable)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, timeout_s)
        finally:
            self._loop.remove_reader(descriptor)


def wakeups(thread: DatabaseThread, database: Database) -> Wakeups:
    """Return how to wait for rows of a database."""
    if database.dialect is SQLITE:
        return FileChanges(thread)
    if database.dialect is POSTGRESQL:
        return Notifications(thread)
    return Wakeups()


def _data_version(session: PlainSession) -> int:
    return int(session.execute(Query("PRAGMA data_version")).rows[0][0])


def _unlock(session: PlainSession) -> None:
    session.execute(Query("SELECT pg_advisory_unlock_all()"))
