"""Connections of a consumer to its database: one for each thread, or borrowed by a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from txbroker.databases.database import (
    Database,
    DatabaseUnavailable,
    steps_in_transaction,
    steps_in_transaction_async,
)
from txbroker.databases.sessions import (
    AsyncSession,
    PlainSession,
    SessionThreads,
    close_quietly,
    note_lost,
    while_busy,
)
from txbroker.databases.steps import Steps
from txbroker.door.consuming import StoreUnavailable
from txbroker.errors import ConfigurationError

T = TypeVar("T")


class Connections:
    """Sessions of one database.

    Args:
        count: of handlers, at most; the consumer needs another one.
        idle_s: see `Database.open`.
    """

    def __init__(self, database: Database, count: int, idle_s: float) -> None:
        self.database = database
        self._idle_s = idle_s
        count = min(count, database.writers_max)

        def opened() -> PlainSession:
            return database.open(idle_s=idle_s)

        def lent() -> PlainSession:
            session = opened()
            try:
                session.lend()
            except BaseException:
                close_quietly(session)
                raise
            return session

        self._handlers = SessionThreads(lent, "txbroker-handler", count)
        single = database.writers_max == 1
        self._own = self._handlers if single else SessionThreads(opened, "txbroker-positions")
        self._closed = False
        self._idle: list[AsyncSession] = []
        self._own_idle: list[AsyncSession] = []
        self._own_opened = 0
        self._turns = asyncio.Semaphore(count)

    @property
    def own_opened(self) -> int:
        """Sessions of the consumer's own that were opened: one more shows that the server was out
        of reach."""
        return self._own.opened + self._own_opened

    # --- threads -----------------------------------------------------------------------------

    async def in_thread(self, use: Callable[[PlainSession], T]) -> T:
        """Call a function with the session of a handler's thread. A cancelled call that has begun
        ends first; one that waits for a thread does not begin."""
        running = self._handlers.submit(use)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if running.cancel():
                raise
            return await future

    # --- coroutines --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def for_handler(self) -> AsyncIterator[AsyncSession]:
        """Lend a session to a handler. After an error it is rolled back, or closed if it cannot be
        used."""
        async with self._turns, self._borrowed(self._idle) as session:
            yield session

    @contextlib.asynccontextmanager
    async def _borrowed(self, idle: list[AsyncSession]) -> AsyncIterator[AsyncSession]:
        if idle:
            session = idle.pop()
        else:
            session = await self._open(lent=idle is not self._own_idle)
        try:
            yield session
        except BaseException as error:
            if not await asyncio.shield(self._take_back(session, idle)):
                note_lost(error)
            raise
        await self._take_back(session, idle)

    async def _open(self, *, lent: bool) -> AsyncSession:
        session = await self.database.open_async(idle_s=self._idle_s)
        self._own_opened += not lent
        if lent:
            try:
                await session.lend()
            except BaseException:
                with contextlib.suppress(Exception):
                    await session.close()
                raise
        return session

    async def _take_back(self, session: AsyncSession, idle: list[AsyncSession]) -> bool:
        """Roll back, and keep the session if it is clean; return False if it is lost."""
        try:
            await session.rollback()
        except Exception:
            with contextlib.suppress(Exception):
                await session.close()
            return False
        if self._closed or not session.reusable:
            await session.close()
        else:
            idle.append(session)
        return True

    # --- the consumer ------------------------------------------------------------------------

    async def transaction(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps in one transaction, repeated while others are in its way.

        Raises:
            StoreUnavailable: the database does not answer, or refuses.
        """
        try:
            return await while_busy(self.database.dialect, lambda: self._once(steps))
        except ConfigurationError:
            raise
        except Exception as error:
            raise self.unavailable(error) from error

    async def _once(self, steps: Callable[[], Steps[T]]) -> T:
        if self.database.plain:
            return await self._own.call(lambda session: steps_in_transaction(steps(), session))
        async with self._borrowed(self._own_idle) as session:
            return await steps_in_transaction_async(steps(), session)

    def unavailable(self, error: BaseException) -> BaseException:
        """Return the error of a store for one of the driver; others as they are."""
        explained = self.database.explain(error)
        if isinstance(explained, DatabaseUnavailable):
            return StoreUnavailable(str(explained))
        if isinstance(explained, ConfigurationError):
            lasting = StoreUnavailable(str(explained))
            lasting.lasting = True
            return lasting
        return explained

    async def close(self) -> None:
        """Close all sessions; those of handlers that still run are closed when these end."""
        self._closed = True
        await asyncio.gather(*(each.close() for each in {self._handlers, self._own}))
        for idle in self._idle + self._own_idle:
            with contextlib.suppress(Exception):
                await idle.close()
