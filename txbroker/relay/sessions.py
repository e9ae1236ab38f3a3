"""The relay's connection to the database: transactions in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from txbroker.databases.database import Database, steps_in_transaction
from txbroker.databases.dialect import Fault
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Steps, run
from txbroker.databases.tables import TableSet
from txbroker.errors import ConfigurationError

T = TypeVar("T")
_BUSY_ATTEMPTS = 20
_BUSY_PAUSE_S, _BUSY_PAUSE_MAX_S = 0.005, 0.5
_LOCK_WAIT_S = 10.0


class DatabaseThread:
    """Executes steps on one session, one after another.

    Args:
        tables: those that the steps use, for messages.

    Raises:
        ConfigurationError: the database has an asynchronous driver.
    """

    def __init__(self, database: Database, tables: TableSet) -> None:
        if not database.plain:
            raise ConfigurationError(
                f"{database.name} has an asynchronous driver: give the relay a database of "
                "txbroker.databases, such as Postgres(…)"
            )
        self._database = database
        self._tables = tables
        self._pool = ThreadPoolExecutor(1, "txbroker-relay")
        self._session: PlainSession | None = None

    async def transaction(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps in one transaction, repeated while others are in its way.

        Raises:
            DatabaseUnavailable: the database does not answer, or refuses what it may take later.
            ConfigurationError: a table or a right is missing.
        """
        return await self.use(lambda session: steps_in_transaction(steps(), session))

    async def read(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps that only read, each statement alone. Errors as of `transaction`."""
        return await self.use(lambda session: run(steps(), session.execute))

    async def use(self, function: Callable[[PlainSession], T]) -> T:
        """Call a function with the session, again while others are in its way. Errors as of
        `transaction`.

        A cancelled call that has begun ends first.
        """
        for attempt in range(_BUSY_ATTEMPTS):
            try:
                return await self._call(function)
            except Exception as error:
                busy = self._database.dialect.fault(error) is Fault.BUSY
                if not busy or attempt + 1 == _BUSY_ATTEMPTS:
                    found = self._database.explain(error, self._tables)
                    raise found from (None if found is error else error)
            longest_s = min(_BUSY_PAUSE_MAX_S, _BUSY_PAUSE_S * 2**attempt)
            await asyncio.sleep(random.uniform(longest_s / 2, longest_s))
        raise AssertionError("unreachable")

    async def _call(self, function: Callable[[PlainSession], T]) -> T:
        running = self._pool.submit(self._with_session, function)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not running.cancel():
                await asyncio.wait([future], timeout=_LOCK_WAIT_S)
            raise

    def _with_session(self, function: Callable[[PlainSession], T]) -> T:
        session = self._session
        if session is None:
            session = self._session = self._database.open(_LOCK_WAIT_S)
        try:
            return function(session)
        except BaseException as error:
            if self._database.dialect.fault(error) is not Fault.BUSY:
                self._session = None
                with contextlib.suppress(Exception):
                    session.close()
            raise

    async def close(self) -> None:
        """Close the session."""
        self._pool.submit(self._close)
        self._pool.shutdown(wait=False)

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
