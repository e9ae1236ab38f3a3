"""`Database`: how to open connections to one database, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from txbroker.databases.dialect import Fault, dialect_named, original
from txbroker.databases.outbox.table import outbox_tables
from txbroker.databases.sessions import (
    AsyncSession,
    DriverSession,
    PlainSession,
    in_thread,
    read_any_text,
    set_up_own,
)
from txbroker.databases.steps import Query, Steps, run, run_async
from txbroker.databases.tables import CONSUMING, TableSet, check, create, migrate, stored_versions
from txbroker.errors import ConfigurationError, TxbrokerError

T = TypeVar("T")
LOCK_WAIT_S = 10.0
IDLE_S = 60.0
PREPARE_WAIT_S = 2.0
TABLE_SETS = (CONSUMING, outbox_tables())
_FIRST_STEP = ": start the database, or correct its address, name, user or password"
_BUSY_STEP = ": another transaction uses the tables: end it, or try again"


class DatabaseUnavailable(TxbrokerError):
    """The database does not answer, or its tables are in use by another transaction: try again."""


class Database:
    """A database. Opens connections; creates, migrates and checks txbroker's tables.

    Args:
        connect: opens a DB-API connection that commits every statement (autocommit).
        dialect: `sqlite`, `postgresql` or `mariadb`.
        style: the driver's `paramstyle`.
        name: for messages, without a password.
        create_tables: create missing tables at the first use.

    Attributes:
        style: the driver's `paramstyle`.
        plain, asynchronous: which sessions it opens.
        hint: how to create the tables.
        writers_max: how many transactions may write at the same time without waiting.
        prepared: the names of the sets of tables that were checked.
        file: of an SQLite database, once it is prepared.

    Raises:
        ConfigurationError: the dialect is another one.
    """

    plain = True
    asynchronous = False
    writers_max = 1000
    hint = "create the tables with `txbroker databases create`, or pass create_tables=True"

    def __init__(
        self,
        connect: Callable[[], Any],
        dialect: str,
        *,
        style: str,
        name: str,
        create_tables: bool = False,
    ) -> None:
        self.dialect = dialect_named(dialect)
        self.name = name
        self.create_tables = create_tables
        self.prepared: set[str] = set()
        self.file = ""
        self._connect = connect
        self.style = style

    def open(self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S) -> PlainSession:
        """Open a session.

        Args:
            lock_wait_s: how long a statement waits for a lock, seconds.
            idle_s: how long a transaction may wait for its next statement until the server ends
                it, seconds: a process that was stopped must not hold its locks for ever.

        Raises: the driver's error.
        """
        session = DriverSession(self._connect(), self.dialect, self.style)
        try:
            for sql in self.dialect.session_limits(lock_wait_s, idle_s):
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

    def open_apart(self, lock_wait_s: float = LOCK_WAIT_S) -> PlainSession:
        """Open a session on a connection that is part of no transaction of the caller's."""
        return self.open_own(lock_wait_s)

    def open_own(self, lock_wait_s: float = LOCK_WAIT_S) -> PlainSession:
        """Open a session for txbroker's statements alone; see `open`."""
        session = self.open(lock_wait_s)
        try:
            set_up_own(session)
        except BaseException:
            session.close()
            raise
        return session

    def apart(self, steps: Steps[T], lock_wait_s: float = LOCK_WAIT_S, *, whole: bool = False) -> T:
        """Execute steps on a connection opened for them.

        Args:
            whole: in one transaction; otherwise each statement commits.

        Raises: the driver's error.
        """
        session = self.open_apart(lock_wait_s)
        try:
            return steps_in_transaction(steps, session) if whole else run(steps, session.execute)
        finally:
            session.close()

    async def apart_async(
        self, steps: Steps[T], lock_wait_s: float = LOCK_WAIT_S, *, whole: bool = False
    ) -> T:
        """`apart` for asyncio; in a thread if the driver is not asynchronous."""
        if not self.asynchronous:
            return await in_thread(lambda: self.apart(steps, lock_wait_s, whole=whole))
        session = await self.open_async(lock_wait_s)
        try:
            for sql in self.dialect.own:
                await session.execute(Query(sql))
            read_any_text(session)
            if whole:
                return await steps_in_transaction_async(steps, session)
            return await run_async(steps, session.execute)
        finally:
            await session.close()

    async def ask(self, steps: Steps[T]) -> T:
        """`apart_async`; its errors are sentences.

        Raises:
            ConfigurationError, DatabaseUnavailable
        """
        with self.explained():
            return await self.apart_async(steps)

    # --- tables ------------------------------------------------------------------------------

    def create(self, tables: TableSet = CONSUMING) -> None:
        """Create the tables that do not exist.

        Args:
            tables: those of consumers, barriers and inboxes by default.

        Raises:
            ConfigurationError: no right, or tables of another version.
            DatabaseUnavailable
        """
        with self.explained(_FIRST_STEP, tables):
            self.apart(create(self.dialect, self.name, tables), whole=True)

    async def create_async(self, tables: TableSet = CONSUMING) -> None:
        """`create` for asyncio."""
        with self.explained(_FIRST_STEP, tables):
            await self.apart_async(create(self.dialect, self.name, tables), whole=True)

    def migrate(self, *, dry_run: bool = False) -> list[str]:
        """Take txbroker's tables that exist to the version that this txbroker uses, and return the
        SQL: in one transaction, but on MariaDB, which commits each statement.

        Args:
            dry_run: only return the SQL.

        Raises:
            ConfigurationError: tables of a newer version or of none, or no right: nothing is
                changed.
            DatabaseUnavailable: also while another session uses the tables.
        """
        with self.explained(_FIRST_STEP):
            steps = migrate(self.dialect, self.name, TABLE_SETS, dry_run=dry_run)
            return self.apart(steps, whole=not dry_run)

    async def migrate_async(self, *, dry_run: bool = False) -> list[str]:
        """`migrate` for asyncio."""
        with self.explained(_FIRST_STEP):
            steps = migrate(self.dialect, self.name, TABLE_SETS, dry_run=dry_run)
            return await self.apart_async(steps, whole=not dry_run)

    def prepare(self, tables: TableSet = CONSUMING) -> None:
        """Check the tables; create them if they are missing and `create_tables`.

        Raises:
            ConfigurationError: a table is missing, of another version or may not be used; with the
                next step.
            DatabaseUnavailable
        """
        with self.explained(_FIRST_STEP, tables):
            if self.create_tables and not self.apart(
                stored_versions(self.dialect, tables), PREPARE_WAIT_S
            ):
                steps = create(self.dialect, self.name, tables)
                self.apart(steps, PREPARE_WAIT_S, whole=True)
            self.file = self.apart(check(self.dialect, self.name, tables), PREPARE_WAIT_S)
        self.prepared.add(tables.name)

    async def prepare_async(self, tables: TableSet = CONSUMING) -> None:
        """`prepare` for asyncio."""
        with self.explained(_FIRST_STEP, tables):
            if self.create_tables and not await self.apart_async(
                stored_versions(self.dialect, tables), PREPARE_WAIT_S
            ):
                steps = create(self.dialect, self.name, tables)
                await self.apart_async(steps, PREPARE_WAIT_S, whole=True)
            self.file = await self.apart_async(
                check(self.dialect, self.name, tables), PREPARE_WAIT_S
            )
        self.prepared.add(tables.name)

    def ready(self, tables: TableSet = CONSUMING) -> None:
        """`prepare`, once."""
        if tables.name not in self.prepared:
            self.prepare(tables)

    async def ready_async(self, tables: TableSet = CONSUMING) -> None:
        """`ready` for asyncio."""
        if tables.name not in self.prepared:
            await self.prepare_async(tables)

    @contextmanager
    def explained(self, unavailable: str = "", tables: TableSet = CONSUMING) -> Iterator[None]:
        """Turn errors of the driver into sentences with the next step.

        Args:
            unavailable: the next step if the database is.
            tables: those that are used.

        Raises:
            ConfigurationError, DatabaseUnavailable
        """
        try:
            yield
        except TxbrokerError:
            raise
        except Exception as error:
            found = self.explain(error, tables)
            if unavailable and isinstance(found, DatabaseUnavailable):
                busy = self.dialect.fault(error) is Fault.BUSY
                found = DatabaseUnavailable(f"{found}{_BUSY_STEP if busy else unavailable}")
            raise found from error

    def explain(self, error: BaseException, tables: TableSet = CONSUMING) -> BaseException:
        """Return the error to raise for one of the driver; other errors as they are."""
        text = f"{self.name}: {_text(original(error))}"
        match self.dialect.fault(error):
            case Fault.UNAVAILABLE | Fault.BUSY:
                return DatabaseUnavailable(text)
            case Fault.NO_TABLE:
                return ConfigurationError(f"{text}: {tables.hint or self.hint}")
            case Fault.DENIED:
                return ConfigurationError(
                    f"{text}: grant this user SELECT, INSERT, UPDATE and DELETE on txbroker's "
                    "tables; create and migrate them as their owner, in MariaDB with CREATE, ALTER "
                    "and INDEX"
                )
        return error


def check_database(user: str, database: object) -> None:
    """Check that an argument is a `Database`.

    Args:
        user: the class that takes it.

    Raises:
        ConfigurationError
    """
    if not isinstance(database, Database):
        raise ConfigurationError(
            f"{user}({database!r}): give a database, such as Postgres('dbname=shop') of "
            "txbroker.databases"
        )


def _text(error: BaseException) -> str:
    """Return the text of a driver's error on one line; PyMySQL's have a number and a text."""
    text = error.args[1] if len(error.args) == 2 and isinstance(error.args[0], int) else error
    return " ".join(str(text).split()) or type(error).__name__


def steps_in_transaction(steps: Steps[T], session: PlainSession) -> T:
    """Execute steps in one transaction of a session, and commit it."""
    session.begin()
    try:
        result = run(steps, session.execute)
        session.commit()
    except BaseException:
        with suppress(Exception):  # the first error is the one to raise, a cancellation above all
            session.rollback()
        raise
    return result


async def steps_in_transaction_async(steps: Steps[T], session: AsyncSession) -> T:
    """`steps_in_transaction` for asyncio."""
    await session.begin()
    try:
        result = await run_async(steps, session.execute)
        await session.commit()
    except BaseException:
        with suppress(Exception):
            await session.rollback()
        raise
    return result
