"""Connections of a consumer to its database: one for each thread, or borrowed by a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from txbroker.consumer.workers import until_end
from txbroker.databases.database import (
    Database,
    DatabaseUnavailable,
    steps_in_transaction,
    steps_in_transaction_async,
)
from txbroker.databases.dialect import Fault
from txbroker.databases.sessions import AsyncSession, PlainSession
from txbroker.databases.steps import Steps
from txbroker.door.consuming import StoreUnavailable
from txbroker.errors import ConfigurationError

log = structlog.wrap_logger(logging.getLogger(__name__))
T = TypeVar("T")

_BUSY_ATTEMPTS = 20
_BUSY_PAUSE_S, _BUSY_PAUSE_MAX_S = 0.005, 0.5


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
        self._handlers = ThreadPoolExecutor(count, "txbroker-handler")
        single = database.writers_max == 1
        self._own = self._handlers if single else ThreadPoolExecutor(1, "txbroker-positions")
        self._of_thread = threading.local()
        self._opened: set[PlainSession] = set()
        self._idle: list[AsyncSession] = []
        self._turns = asyncio.Semaphore(count)

    # --- threads -----------------------------------------------------------------------------

    async def in_thread(self, use: Callable[[PlainSession], T]) -> T:
        """Call a function with the session of a handler's thread; a cancelled call ends first."""
        loop = asyncio.get_running_loop()
        return await until_end(loop.run_in_executor(self._handlers, self._with_session, use))

    def _with_session(self, use: Callable[[PlainSession], T]) -> T:
        session: PlainSession | None = getattr(self._of_thread, "session", None)
        if session is None:
            session = self._of_thread.session = self.database.open(idle_s=self._idle_s)
            self._opened.add(session)
        try:
            return use(session)
        except BaseException as error:
            # PyMySQL does not show that its connection is lost.
            lost = self.database.dialect.fault(error) is Fault.UNAVAILABLE
            if lost or not self._roll_back(session):
                self._of_thread.session = None
                self._opened.discard(session)
                with contextlib.suppress(Exception):
                    session.close()
            raise

    def _roll_back(self, session: PlainSession) -> bool:
        """Roll back; return False if the session cannot be used any more."""
        try:
            session.rollback()
        except Exception:
            return False
        return True

    # --- coroutines --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[AsyncSession]:
        """Lend a session. After an error it is rolled back, or closed if it cannot be used."""
        async with self._turns:
            if self._idle:
                session = self._idle.pop()
            else:
                session = await self.database.open_async(idle_s=self._idle_s)
            try:
                yield session
                if session.in_transaction:
                    await session.rollback()
            except BaseException:
                await asyncio.shield(self._take_back(session))
                raise
            self._idle.append(session)

    async def _take_back(self, session: AsyncSession) -> None:
        try:
            await session.rollback()
        except Exception:
            with contextlib.suppress(Exception):
                await session.close()
        else:
            self._idle.append(session)

    # --- the consumer ------------------------------------------------------------------------

    async def transaction(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps in one transaction, repeated while others are in its way.

        Raises:
            StoreUnavailable: the database does not answer, or refuses.
        """
        for attempt in range(_BUSY_ATTEMPTS):
            try:
                return await self._once(steps)
            except ConfigurationError:
                raise
            except Exception as error:
                if attempt + 1 == _BUSY_ATTEMPTS or (
                    self.database.dialect.fault(error) is not Fault.BUSY
                ):
                    raise self.unavailable(error) from error
                await busy_pause(attempt)
        raise AssertionError("unreachable")

    async def _once(self, steps: Callable[[], Steps[T]]) -> T:
        if self.database.plain:
            call = lambda session: steps_in_transaction(steps(), session)  # noqa: E731
            loop = asyncio.get_running_loop()
            return await until_end(loop.run_in_executor(self._own, self._with_session, call))
        async with self.borrowed() as session:
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
        """Close all sessions; those of handlers that still run end with their threads."""
        self._handlers.shutdown(wait=False, cancel_futures=True)
        self._own.shutdown(wait=False, cancel_futures=True)
        for session in list(self._opened):
            with contextlib.suppress(Exception):
                session.close()
        for idle in self._idle:
            with contextlib.suppress(Exception):
                await idle.close()


async def busy_pause(attempt: int) -> None:
    """Wait for a random time, which grows with each attempt, so that others can end."""
    longest_s = min(_BUSY_PAUSE_MAX_S, _BUSY_PAUSE_S * 2**attempt)
    await asyncio.sleep(random.uniform(longest_s / 2, longest_s))
