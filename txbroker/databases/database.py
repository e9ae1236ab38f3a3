"""`Database`: how to open connections to one database, and its tables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from txbroker.databases import tables
from txbroker.databases.dialect import Dialect, Fault
from txbroker.databases.sessions import AsyncSession, DriverSession, PlainSession
from txbroker.databases.steps import Query, Steps, run
from txbroker.errors import ConfigurationError, TxbrokerError

T = TypeVar("T")
LOCK_WAIT_S = 10.0
IDLE_S = 60.0


class DatabaseUnavailable(TxbrokerError):
    """The database does not answer, or its tables are in use by another transaction: try again."""


class Database:
    """A database. Opens connections; creates and checks txbroker's tables.

    Args:
        connect: opens a DB-API connection that commits every statement (autocommit).
        dialect: the kind of database.
        style: the driver's `paramstyle`.
        name: for messages, without a password.
        create_tables: create missing tables at the first use.

    Attributes:
        plain, asynchronous: which sessions it opens.
        writers_max: how many transactions may write at the same time without waiting.
    """

    plain = True
    asynchronous = False
    writers_max = 1000

    def __init__(
        self,
        connect: Callable[[], Any],
        dialect: Dialect,
        *,
        style: str,
        name: str,
        create_tables: bool = False,
    ) -> None:
        self.dialect = dialect
        self.name = name
        self.create_tables = create_tables
        self._connect = connect
        self._style = style

    def open(self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S) -> PlainSession:
        """Open a session.

        Args:
            lock_wait_s: how long a statement waits for a lock, seconds.
            idle_s: how long a transaction may wait for its next statement until the server ends
                it, seconds: a process that was stopped must not hold its locks for ever.

        Raises: the driver's error.
        """
        session = DriverSession(self._connect(), self.dialect, self._style)
        try:
            for sql in self._limits(lock_wait_s, idle_s):
                session.execute(Query(sql))
        except BaseException:
            session.close()
            raise
        return session

    async def open_async(
        self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S
    ) -> AsyncSession:
        """Open a session for asyncio, see `open`.

        Raises:
            ConfigurationError: its driver is not asynchronous.
        """
        raise ConfigurationError(
            f"{self.name} takes plain functions, which run in threads: write `def`, not `async def`"
        )

    def _limits(self, lock_wait_s: float, idle_s: float) -> Collection[str]:
        """Return statements that limit the waits of a session."""
        return ()

    # --- tables ------------------------------------------------------------------------------

    def create(self) -> None:
        """Create the tables that do not exist.

        Raises:
            ConfigurationError: no right, or tables of another version.
            DatabaseUnavailable
        """
        self._with_session(lambda session: tables.create(session, self.dialect))

    def prepare(self) -> None:
        """Create missing tables if `create_tables`, and check them.

        Raises:
            ConfigurationError: a table is missing, of another version or may not be used; with the
                next step.
            DatabaseUnavailable
        """
        if self.create_tables:
            self.create()
        self._with_session(
            lambda session: run(tables.check(self.dialect, self.name), session.execute)
        )

    async def prepare_async(self) -> None:
        """`prepare` for asyncio."""
        await asyncio.to_thread(self.prepare)

    def _with_session(self, use: Callable[[PlainSession], None]) -> None:
        with self.explained():
            session = self.open()
            try:
                use(session)
            finally:
                session.close()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of the driver into sentences with the next step.

        Raises:
            ConfigurationError, DatabaseUnavailable
        """
        try:
            yield
        except TxbrokerError:
            raise
        except Exception as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise for one of the driver; other errors as they are."""
        text = f"{self.name}: {str(error).strip() or type(error).__name__}"
        match self.dialect.fault(error):
            case Fault.UNAVAILABLE | Fault.BUSY:
                return DatabaseUnavailable(text)
            case Fault.NO_TABLE:
                return ConfigurationError(
                    f"{text}: create the tables with `txbroker databases create`, or pass "
                    "create_tables=True"
                )
            case Fault.DENIED:
                return ConfigurationError(
                    f"{text}: grant this user SELECT, INSERT, UPDATE and DELETE on txbroker's "
                    "tables; to create them also CREATE"
                )
        return error


def steps_in_transaction(steps: Steps[T], session: PlainSession) -> T:
    """Execute steps in one transaction of a session, and commit it."""
    session.begin()
    try:
        result = run(steps, session.execute)
        session.commit()
    except BaseException:
        session.rollback()
        raise
    return result


async def steps_in_transaction_async(steps: Steps[T], session: AsyncSession) -> T:
    """`steps_in_transaction` for asyncio."""
    from txbroker.databases.steps import run_async

    await session.begin()
    try:
        result = await run_async(steps, session.execute)
        await session.commit()
    except BaseException:
        await session.rollback()
        raise
    return result


Opener = Callable[[], Awaitable[Any]]
