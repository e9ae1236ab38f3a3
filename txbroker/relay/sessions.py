"""The relay's connection to the database: transactions in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from txbroker.databases.database import Database, steps_in_transaction
from txbroker.databases.sessions import PlainSession, SessionThreads, while_busy
from txbroker.databases.steps import Steps, run
from txbroker.databases.tables import TableSet
from txbroker.errors import ConfigurationError

T = TypeVar("T")


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
        self._thread = SessionThreads(database.open, "txbroker-relay")
        self.close = self._thread.close

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

        A cancelled call that has begun goes on alone; later ones wait for it.
        """
        with self._database.explained(tables=self._tables):
            return await while_busy(self.dialect, lambda: self._thread.call(function))
