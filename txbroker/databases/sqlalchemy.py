"""`from_sqlalchemy`: the database of an SQLAlchemy engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from txbroker.databases.connections import (
    driver_connection,
    execute_asyncpg,
    execute_sqlalchemy,
    join_sqlalchemy,
)
from txbroker.databases.database import IDLE_S, LOCK_WAIT_S, Database, DatabaseUnavailable
from txbroker.databases.dialect import SQLITE, Dialect
from txbroker.databases.restoring import Restorer, restorer
from txbroker.databases.sessions import (
    driver_of,
    execute,
    handler_ended,
    in_transaction,
    refuse_control,
)
from txbroker.databases.steps import Query, Result, run
from txbroker.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine, RootTransaction
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


def from_sqlalchemy(engine: Engine | AsyncEngine, *, create_tables: bool = False) -> Database:
    """Return the database of an engine; handlers receive SQLAlchemy's `Connection`, coroutines its
    `AsyncConnection`.

    Args:
        create_tables: create txbroker's tables at the first use.

    Raises:
        ConfigurationError: it is no engine, or of another kind of database than SQLite, PostgreSQL
            and MariaDB.
    """
    from sqlalchemy.engine import Engine

    if isinstance(engine, Engine):
        return EngineDatabase(engine, create_tables)
    # Only an asynchronous engine imports it: it needs greenlet, which SQLAlchemy does not bring.
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is not None and isinstance(engine, asynchronous.AsyncEngine):
        return AsyncEngineDatabase(engine, create_tables)
    raise ConfigurationError(
        f"from_sqlalchemy takes an Engine or AsyncEngine, not {type(engine).__name__}: pass what "
        "create_engine or create_async_engine returns"
    )


class EngineDatabase(Database):
    """The database of an `Engine`."""

    def __init__(self, engine: Engine, create_tables: bool) -> None:
        super().__init__(
            engine.connect,
            engine.dialect.name,
            style=engine.dialect.paramstyle,
            name=engine.url.render_as_string(hide_password=True),
            create_tables=create_tables,
        )
        self._engine = engine
        self.writers_max = 1 if self.dialect is SQLITE else self.writers_max

    def open(self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S) -> EngineSession:
        """Open a session, see `Database.open`."""
        session = EngineSession(self._engine.connect(), self.dialect)
        try:
            session.start(self, lock_wait_s, idle_s)
        except BaseException:
            session.close()
            raise
        return session


class AsyncEngineDatabase(Database):
    """The database of an `AsyncEngine`."""

    plain = False
    asynchronous = True

    def __init__(self, engine: AsyncEngine, create_tables: bool) -> None:
        super().__init__(
            engine.connect,
            engine.dialect.name,
            style=engine.dialect.paramstyle,
            name=engine.url.render_as_string(hide_password=True),
            create_tables=create_tables,
        )
        self._engine = engine
        self.writers_max = 1 if self.dialect is SQLITE else self.writers_max

    def open(self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S) -> EngineSession:
        """Refuse: its connections belong to an event loop.

        Raises:
            ConfigurationError
        """
        raise ConfigurationError(
            f"{self.name} is of an AsyncEngine: await the method whose name ends with _async, or "
            "pass an Engine to from_sqlalchemy"
        )

    async def open_async(
        self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S
    ) -> AsyncEngineSession:
        """Open a session for asyncio, see `Database.open`."""
        connection = await self._engine.connect()
        session = AsyncEngineSession(connection, self.dialect)
        try:
            await connection.run_sync(lambda _: session.plain.start(self, lock_wait_s, idle_s))
        except BaseException:
            await session.close()
            raise
        return session


class EngineSession:
    """A `PlainSession` on SQLAlchemy's `Connection`."""

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self.connection = connection
        self.dialect = dialect
        self.reusable = True
        self._taken: Any = connection.connection.dbapi_connection
        """The connection that the pool gave; of an asynchronous driver, its adapter."""
        self._transaction: RootTransaction | None = None
        self._restorer: Restorer | None = None
        self._options: Mapping[str, Any] = {}

    def start(self, database: Database, lock_wait_s: float, idle_s: float) -> None:
        """Take the connection out of its pool, which must not receive its limits, and set them.

        Raises:
            ConfigurationError: the engine commits each statement.
        """
        self.connection.detach()
        join_sqlalchemy(self.connection, database)
        self.connection.rollback()
        for sql in self.dialect.session_limits(lock_wait_s, idle_s):
            self.execute(Query(sql))

    @property
    def _driver(self) -> Any:
        return getattr(self._taken, "driver_connection", self._taken)

    @property
    def _is_lost(self) -> bool:
        """True if SQLAlchemy has dropped the connection, as after a cancelled statement, and has
        opened another one, or would."""
        connection = self.connection
        return connection.invalidated or connection.connection.dbapi_connection is not self._taken

    @property
    def in_transaction(self) -> bool:
        """True while the transaction that was begun is open."""
        if self._transaction is None or not self._transaction.is_active:
            return False
        if handler_ended(self._restorer):
            return False
        return in_transaction(driver_connection(self.connection)) is not False

    def lend(self) -> None:
        """Handlers will use the session, see `PlainSession.lend`."""
        self._restorer = restorer(self._driver, driver_of(self._driver))
        self._options = self.connection.get_execution_options()
        run(self._restorer.opened(), self.execute)

    def execute(self, query: Query) -> Result:
        """Execute a statement; commit it, unless a transaction was begun."""
        if self._transaction is not None:
            return execute_sqlalchemy(self.connection, query)
        try:
            result = execute_sqlalchemy(self.connection, query)
            self.connection.commit()
        except BaseException:
            with suppress(Exception):  # the first error is the one to raise
                self.connection.rollback()
            raise
        return result

    def begin(self) -> None:
        """Begin a transaction that may write."""
        from sqlalchemy import event

        self.reusable = self._restorer is None
        self._transaction = self.connection.begin()
        if self.dialect.release or not in_transaction(driver_connection(self.connection)):
            execute_sqlalchemy(self.connection, Query(self.dialect.begin_by_statement))
        event.listen(self.connection, "commit", refuse_control)
        if self._restorer is not None:
            self._restorer.begun()

    def commit(self) -> None:
        """Commit it."""
        assert self._transaction is not None
        if self._restorer is not None:
            self._restorer.ending()
            if self.dialect.release:
                self.execute(Query(self.dialect.release))
        self._allow_commit()
        transaction, self._transaction = self._transaction, None
        transaction.commit()
        self._restore()

    def rollback(self) -> None:
        """Roll it back, if one is open.

        Raises:
            DatabaseUnavailable: SQLAlchemy has opened another connection, or would, without the
                session's limits.
        """
        transaction, self._transaction = self._transaction, None
        if self._restorer is not None:
            self._restorer.ending()
        if transaction is not None:
            self._allow_commit()
            transaction.rollback()
        if self._is_lost:
            raise DatabaseUnavailable("the connection of SQLAlchemy's session was lost")
        if transaction is not None:
            # After a refused commit, SQLAlchemy takes it for ended.
            self.connection.connection.rollback()
        self._restore()

    def _restore(self) -> None:
        """Restore what a handler changed, with one more statement: SQLAlchemy's COMMIT takes
        none along."""
        if self._restorer is not None and not self.reusable:
            # No public method takes an option away.
            self.connection._execution_options = self._options  # type: ignore[assignment]
            with suppress(Exception):
                self.reusable = run(self._restorer.ended(""), self._execute_on_driver)

    def _execute_on_driver(self, query: Query) -> Result:
        """Execute statements on the driver's connection, outside a transaction."""
        driver, name = self._driver, driver_of(self._driver)
        if self.connection.dialect.is_async:
            return _await_on_driver(driver, name, query)
        driver.autocommit = True
        try:
            return execute(driver, query, getattr(sys.modules[name], "paramstyle", "format"))
        finally:
            driver.autocommit = False

    def close(self) -> None:
        """Close the connection."""
        try:
            if not self.connection.closed and self._is_lost:
                # SQLAlchemy only forgets one without a pool: its transaction would stay open.
                with suppress(Exception):
                    self.connection.dialect.do_terminate(self._taken)
        finally:
            self.connection.close()

    def _allow_commit(self) -> None:
        from sqlalchemy import event

        if event.contains(self.connection, "commit", refuse_control):
            event.remove(self.connection, "commit", refuse_control)


def _await_on_driver(driver: Any, name: str, query: Query) -> Result:
    """Execute statements on an asynchronous driver's connection, outside a transaction."""
    from sqlalchemy.util import await_only

    from txbroker.databases.postgres import execute_async

    async def executed() -> Result:
        if name == "asyncpg":
            return await execute_asyncpg(driver, query)
        await driver.set_autocommit(True)
        try:
            return await execute_async(driver, query)
        finally:
            await driver.set_autocommit(False)

    return await_only(executed())


class AsyncEngineSession:
    """An `AsyncSession` on SQLAlchemy's `AsyncConnection`."""

    def __init__(self, connection: AsyncConnection, dialect: Dialect) -> None:
        assert connection.sync_connection is not None
        self.connection = connection
        self.plain = EngineSession(connection.sync_connection, dialect)

    @property
    def in_transaction(self) -> bool:
        return self.plain.in_transaction

    @property
    def reusable(self) -> bool:
        return self.plain.reusable

    async def lend(self) -> None:
        """Handlers will use the session, see `PlainSession.lend`."""
        await self.connection.run_sync(lambda _: self.plain.lend())

    async def execute(self, query: Query) -> Result:
        """Execute a statement; commit it, unless a transaction was begun."""
        return await self.connection.run_sync(lambda _: self.plain.execute(query))

    async def begin(self) -> None:
        """Begin a transaction that may write."""
        await self.connection.run_sync(lambda _: self.plain.begin())

    async def commit(self) -> None:
        """Commit it."""
        await self.connection.run_sync(lambda _: self.plain.commit())

    async def rollback(self) -> None:
        """Roll it back, if one is open."""
        await self.connection.run_sync(lambda _: self.plain.rollback())

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.run_sync(lambda _: self.plain.close())
