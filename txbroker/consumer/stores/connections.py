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

from txbroker.databases.database import (
    Database,
    DatabaseUnavailable,
    steps_in_transaction,
    steps_in_transaction_async,
)
from txbroker.databases.dialect import Fault
from txbroker.databases.sessions import AsyncSession, PlainSession
from txbroker.databases.steps import Query, Steps
from txbroker.door.consuming import StoreUnavailable
from txbroker.errors import ConfigurationError

log = structlog.wrap_logger(logging.getLogger(__name__))
T = TypeVar("T")

_BUSY_ATTEMPTS = 20
_PROBE = Query("SELECT 1")
_CANCELLED_S = 5.0
"""How long a cancelled statement may take to end; then it goes on alone, guarded by its token."""
_BUSY_PAUSE_S, _BUSY_PAUSE_MAX_S = 0.005, 0.5


class HandlerFailed(Exception):
    """The handler raised an error, whatever its class.

    Attributes:
        session_lost: the connection that it received cannot be used any more.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
        self.session_lost = False


class Connections:
    """Sessions of one database.

    Args:
        count: of handlers, at most; the consumer needs another one.
        idle_s: see `Database.open`.

    Attributes:
        own_opened: sessions of the consumer's own that were opened: one more shows that the server
            was out of reach.
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
        self._used: set[PlainSession] = set()
        self._closed = False
        self._idle: list[AsyncSession] = []
        self._own_idle: list[AsyncSession] = []
        self.own_opened = 0
        self._turns = asyncio.Semaphore(count)

    # --- threads -----------------------------------------------------------------------------

    async def in_thread(self, use: Callable[[PlainSession], T]) -> T:
        """Call a function with the session of a handler's thread. A cancelled call that has begun
        ends first; one that waits for a thread does not begin."""
        running = self._handlers.submit(self._with_session, use)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if running.cancel():
                raise
            return await future

    def _with_session(self, use: Callable[[PlainSession], T], *, own: bool = False) -> T:
        session: PlainSession | None = getattr(self._of_thread, "session", None)
        if session is None:
            session = self._of_thread.session = self.database.open(idle_s=self._idle_s)
            self.own_opened += own
            self._opened.add(session)
        self._used.add(session)
        try:
            return use(session)
        except BaseException as error:
            if not self._can_be_used(session):
                self._of_thread.session = None
                self._opened.discard(session)
                _close(session)
                _note_lost(error)
            raise
        finally:
            self._used.discard(session)
            if self._closed:
                _close(session)

    def _can_be_used(self, session: PlainSession) -> bool:
        """Roll back, and return whether the session can be used again."""
        try:
            session.rollback()
            session.execute(_PROBE)  # PyMySQL does not show that its connection is lost
        except Exception:
            return False
        return True

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
            session = await self.database.open_async(idle_s=self._idle_s)
            self.own_opened += idle is self._own_idle
        try:
            yield session
        except BaseException as error:
            if not await asyncio.shield(self._take_back(session, idle)):
                _note_lost(error)
            raise
        await self._take_back(session, idle)

    async def _take_back(self, session: AsyncSession, idle: list[AsyncSession]) -> bool:
        """Roll back, and keep the session if it can be used again; return whether it can."""
        try:
            await session.rollback()
        except Exception:
            with contextlib.suppress(Exception):
                await session.close()
            return False
        if self._closed:
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
            running = self._own.submit(self._with_session, call, own=True)
            future = asyncio.wrap_future(running)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not running.cancel():  # of a server that does not answer it never ends
                    await asyncio.wait([future], timeout=_CANCELLED_S)
                if future.done() and not future.cancelled():
                    future.exception()  # or it is reported as never retrieved
                raise
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
        self._handlers.shutdown(wait=False, cancel_futures=True)
        self._own.shutdown(wait=False, cancel_futures=True)
        for session in self._opened - self._used:
            _close(session)
        for idle in self._idle + self._own_idle:
            with contextlib.suppress(Exception):
                await idle.close()


def _close(session: PlainSession) -> None:
    with contextlib.suppress(Exception):
        session.close()


def _note_lost(error: BaseException) -> None:
    if isinstance(error, HandlerFailed):
        error.session_lost = True


async def busy_pause(attempt: int) -> None:
    """Wait for a random time, which grows with each attempt, so that others can end."""
    longest_s = min(_BUSY_PAUSE_MAX_S, _BUSY_PAUSE_S * 2**attempt)
    await asyncio.sleep(random.uniform(longest_s / 2, longest_s))
