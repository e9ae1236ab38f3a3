"""The relay's connection to the database: transactions in one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from txbroker.databases.database import Database, DatabaseUnavailable, steps_in_transaction
from txbroker.databases.dialect import Fault
from txbroker.databases.sessions import PlainSession, SessionThreads, while_busy
from txbroker.databases.steps import Query, Steps, run
from txbroker.databases.tables import TableSet
from txbroker.errors import ConfigurationError

T = TypeVar("T")
_LOCK_WAIT_S = 0.2
"""MariaDB counts seconds: it does not wait."""


class RowsLocked(DatabaseUnavailable):
    """Another transaction holds rows that a relay changes: try again."""


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
        self.dialect = database.dialect
        self._tables = tables
        self._thread = SessionThreads(lambda: database.open_own(_LOCK_WAIT_S), "txbroker-relay")
        self.close = self._thread.close

    async def transaction(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps in one transaction, repeated while others are in its way.

        Raises:
            DatabaseUnavailable: the database does not answer, or refuses what it may take later.
            ConfigurationError: a table or a right is missing.
        """
        return await self.use(lambda session: steps_in_transaction(steps(), session))

    async def attempt(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps in one transaction, once.

        Raises:
            RowsLocked: others are in its way.
            DatabaseUnavailable, ConfigurationError: see `transaction`.
        """
        with self._database.explained(tables=self._tables):
            try:
                return await self._thread.call(lambda s: steps_in_transaction(steps(), s))
            except Exception as error:
                if self.dialect.fault(error) is not Fault.BUSY:
                    raise
                raise RowsLocked(await self._locked()) from error

    async def read(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps that only read, each statement alone. Errors as of `transaction`."""
        return await self.use(lambda session: run(steps(), session.execute))

    async def use(self, function: Callable[[PlainSession], T]) -> T:
        """Call a function with the session, again while others are in its way. Errors as of
        `transaction`.

        A cancelled call that has begun goes on alone; later ones wait for it.
        """
        with self._database.explained(tables=self._tables):
            try:
                return await while_busy(self.dialect, lambda: self._thread.call(function))
            except Exception as error:
                if self.dialect.fault(error) is not Fault.BUSY:
                    raise
                raise RowsLocked(await self._locked()) from error

    async def _locked(self) -> str:
        """Return who holds rows, as a sentence with the next step."""
        found = "another transaction"
        if self.dialect.holders:
            names = ", ".join(f"'{name}'" for name in self._tables.names)
            query = Query(self.dialect.holders.format(tables=names))
            with contextlib.suppress(Exception):  # the right to see others is missing
                rows = await self._thread.call(lambda session: session.execute(query).rows)
                found = f"probably {rows[0][0]}" if rows else found
        return (
            f"{self._database.name}: rows of {self._tables.names[0]} are locked by {found}: end it"
        )
