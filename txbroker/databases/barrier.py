"""A row by which a check and a late local transaction exclude each other.

"There is no row" proves nothing while the local transaction may still commit. So both sides write
the same primary key: the local transaction a row `commit`, in its own database transaction; the
check a row `rollback`, if it finds none. The database accepts only one of them, and the second side
learns of the first: the check reads `commit`, or the local transaction fails with `TooLate`.

A second INSERT waits until the transaction of the first ends. If that committed, the row is read
where it is visible: in the same transaction at read committed; on MariaDB by a locking read, at
every level; on PostgreSQL, where a transaction with an older snapshot is aborted, on another
connection.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from txbroker.contract.checks import CheckRequest, NotYet, Rollback
from txbroker.core.records import Decision
from txbroker.databases import tables
from txbroker.databases.connections import run_on, run_on_async
from txbroker.databases.database import Database, check_database
from txbroker.databases.dialect import SQLITE, Fault
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.postgres import Postgres
from txbroker.databases.sqlite import SQLite
from txbroker.databases.steps import Query, Steps
from txbroker.errors import BadRequest, ConfigurationError, TxbrokerError

LOCK_WAIT_S = 2.0
"""How long a check waits for a lock: less than the proxy waits for an answer."""
CONNECT_S = 2
"""How long a check waits for a connection: then it reports that the database does not answer."""
READ_S = 3
"""How long it waits for an answer on it: longer than for a lock."""
BUSY_AGAIN_S = 2.0
"""The "not yet" of a check that found the row or the database locked."""
_COMMIT, _ROLLBACK = Decision.COMMIT.value, Decision.ROLLBACK.value
_TRIES = 3


class TooLate(Rollback):
    """The transaction was checked and rolled back before its local transaction recorded itself.

    Raised in the local transaction, it must roll that back. It is a `Rollback`, so it ends a
    producer's block with a rollback and without an error.
    """


class AlreadyRecorded(TxbrokerError):
    """The local transaction of this id has committed before: it must not run twice."""


class Barrier:
    """A barrier in one database; may be used from many threads and processes.

    Args:
        database: that of the local transactions.
    """

    def __init__(self, database: Database) -> None:
        check_database(type(self).__name__, database)
        self.database = database
        self._dialect = database.dialect
        self._table = tables.BARRIER
        self._lock_wait_s = LOCK_WAIT_S

    def create(self) -> None:
        """Create the tables that do not exist, see `Database.create`."""
        self.database.create()

    def record(self, connection: Any, transaction_id: str) -> None:
        """Insert the row of a transaction inside its local transaction on `connection`. Call it
        first, so that a local transaction that is too late does nothing.

        Raises:
            TooLate: a check was first: roll the local transaction back.
            AlreadyRecorded: this local transaction has committed before.
            ConfigurationError: the row would not be part of a local transaction, or the table
                cannot be used.
            BadRequest: the id is not a text of 1 to 255 ASCII characters.
            DatabaseUnavailable: the tables cannot be checked.
            Exception: the driver's: roll back and repeat the local transaction.
        """
        run_on(self.database, connection, self._record(_id_of(transaction_id)))

    async def record_async(self, connection: Any, transaction_id: str) -> None:
        """`record` on a connection whose statements are awaited."""
        await run_on_async(self.database, connection, self._record(_id_of(transaction_id)))

    def check(self, transaction: str | CheckRequest) -> Decision | NotYet:
        """Return the decision about a transaction, never unknown; usable as a check function.

        COMMIT if its local transaction has committed; else ROLLBACK, and its local transaction
        cannot commit any more. `NotYet` only while the row or the database is locked.

        Raises:
            DatabaseUnavailable: the check is repeated, and uses no attempt.
            ConfigurationError
        """
        transaction_id = _id_of(transaction)
        with self.database.explained():
            self.database.ready()
            return self.database.apart(self._check(transaction_id), self._lock_wait_s)

    async def check_async(self, transaction: str | CheckRequest) -> Decision | NotYet:
        """`check` for asyncio."""
        transaction_id = _id_of(transaction)
        with self.database.explained():
            await self.database.ready_async()
            return await self.database.apart_async(self._check(transaction_id), self._lock_wait_s)

    def forget(self, older_than_s: float) -> int:
        """Delete rows that were written more than `older_than_s` seconds ago; return how many.

        Keep rows longer than a transaction can be undecided: a check of a transaction whose row is
        deleted would roll back a committed one. Parked transactions wait for ever.

        Raises:
            BadRequest: less than a day.
            ConfigurationError, DatabaseUnavailable
        """
        with self.database.explained():
            return self.database.apart(self._forget(older_than_s))

    async def forget_async(self, older_than_s: float) -> int:
        """`forget` for asyncio."""
        return await self.database.ask(self._forget(older_than_s))

    def _record(self, transaction_id: str) -> Steps[None]:
        if self._dialect is SQLITE:
            yield from tables.check_file(self.database.file)
        try:
            standing = yield from self._insert(transaction_id, _COMMIT)
        except Exception as error:
            if self._dialect.fault(error) is not Fault.BUSY:
                raise
            standing = yield from self._read_apart(transaction_id)
            if standing is None:
                raise
        if standing == _ROLLBACK:
            raise TooLate(
                f"{transaction_id} was checked and rolled back before its local transaction"
            )
        if standing is not None:
            raise AlreadyRecorded(f"the local transaction of {transaction_id} has committed before")

    def _check(self, transaction_id: str) -> Steps[Decision | NotYet]:
        try:
            standing = yield from self._read(transaction_id)
            if standing is None:
                standing = yield from self._insert(transaction_id, _ROLLBACK)
        except Exception as error:
            if self._dialect.fault(error) is not Fault.BUSY:
                raise
            return NotYet(BUSY_AGAIN_S)
        return Decision(standing or _ROLLBACK)

    def _insert(self, transaction_id: str, decision: str) -> Steps[str | None]:
        """Insert a row, and return None; if there is one, return its decision."""
        sql = f"INSERT INTO {self._table} (id, decision, at_s) VALUES (?, ?, {self._dialect.now_s})"
        for _ in range(_TRIES):
            if (yield from tables.insert_new(self._dialect, sql, (transaction_id, decision))):
                return None
            standing = yield from self._read(transaction_id)
            if standing is not None:
                return standing
        raise TxbrokerError(
            f"{self.database.name}: the row of {transaction_id} exists but cannot be read: keep "
            f"triggers and further constraints off {self._table}"
        )

    def _read(self, transaction_id: str, *, apart: bool = False) -> Steps[str | None]:
        sql = f"SELECT decision FROM {self._table} WHERE id = ?{self._dialect.newest}"
        result = yield Query(sql, (transaction_id,), apart)
        return str(result.rows[0][0]) if result.rows else None

    def _read_apart(self, transaction_id: str) -> Steps[str | None]:
        """Read the decision on another connection; None also if that fails."""
        try:
            return (yield from self._read(transaction_id, apart=True))
        except Exception:
            return None

    def _forget(self, older_than_s: float) -> Steps[int]:
        return tables.forget(self._dialect, self._table, older_than_s)


def _id_of(transaction: str | CheckRequest) -> str:
    """Return the id of a transaction.

    Raises:
        BadRequest
    """
    found = transaction.id if isinstance(transaction, CheckRequest) else transaction
    if not isinstance(found, str) or not tables.is_key(found):
        raise BadRequest(
            f"a transaction's id is a text of 1 to {tables.KEY_MAX} ASCII characters, not {found!r}"
        )
    return found


# --- kinds of databases ----------------------------------------------------------------------


class PostgresBarrier(Barrier):
    """A barrier in PostgreSQL.

    Args:
        database: `Postgres`, or its `conninfo`.
        options: of `Postgres`, such as `create_tables`. `connect_timeout` is 2 seconds by default,
            which is less than a proxy waits for an answer.

    Raises:
        ConfigurationError: see `Postgres`.
    """

    def __init__(self, database: str | Postgres = "", **options: Any) -> None:
        if isinstance(database, str):
            if "connect_timeout" not in database:
                options = {"connect_timeout": CONNECT_S, **options}
            database = Postgres(database, **options)
        super().__init__(database)


class MariaDBBarrier(Barrier):
    """A barrier in MariaDB.

    Args:
        database: `MariaDB`, or its URL.
        options: of `MariaDB`, such as `create_tables`. `connect_timeout` is 2 seconds and
            `read_timeout` 3 by default, which is less than a proxy waits for an answer.

    Raises:
        ConfigurationError: see `MariaDB`.
    """

    def __init__(self, database: str | MariaDB = "", **options: Any) -> None:
        if isinstance(database, str):
            for name, seconds in (("connect_timeout", CONNECT_S), ("read_timeout", READ_S)):
                if name not in database:
                    options.setdefault(name, seconds)
            database = MariaDB(database, **options)
        super().__init__(database)


class SqliteBarrier(Barrier):
    """A barrier in an SQLite file; creates its table at once, and no other.

    SQLite has one writer at a time: a check waits for the local transaction that holds the write
    lock. If that takes longer than `busy_timeout_s`, the answer is `NotYet`.

    Args:
        database: the path of the file, or a function that opens a connection to it.
        table: the table's name.
        busy_timeout_s: how long a check waits for the write lock; a function sets its own timeout.

    Raises:
        ConfigurationError: the database is in memory, or the table's name is not a plain word.
        DatabaseUnavailable
    """

    def __init__(
        self,
        database: str | Path | Callable[[], sqlite3.Connection],
        table: str = tables.BARRIER,
        *,
        busy_timeout_s: float = LOCK_WAIT_S,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", table):
            raise ConfigurationError(f"a table's name must be a plain word, not {table!r}")
        if callable(database):
            super().__init__(Database(_opener(database), "sqlite", style="qmark", name="SQLite"))
            with self.database.explained(), closing(database()) as connection:
                busy_timeout_s = connection.execute("PRAGMA busy_timeout").fetchone()[0] / 1000
        else:
            super().__init__(SQLite(database, create_tables=True))
        self._table = table
        self._lock_wait_s = busy_timeout_s
        self.create()

    def create(self) -> None:
        """Create the table if it does not exist."""

        def create() -> Steps[str]:
            file = yield from tables.file_of(self.database.name)
            versions = yield from tables.stored_versions(SQLITE, tables.CONSUMING)
            if versions:
                tables.check_versions(self.database.name, tables.CONSUMING, versions)
            yield Query(tables.create_table(tables.BARRIER, SQLITE, self._table))
            return file

        with self.database.explained():
            self.database.file = self.database.apart(create(), self._lock_wait_s)
        self.database.prepared.add(tables.CONSUMING.name)


def _opener(connect: Callable[[], sqlite3.Connection]) -> Callable[[], sqlite3.Connection]:
    """Return a function that opens connections as the caller's does, which commit every
    statement."""

    def open_one() -> sqlite3.Connection:
        connection = connect()
        if getattr(connection, "autocommit", True) is False:  # of Python 3.12
            connection.autocommit = True  # type: ignore[attr-defined, unused-ignore]
        else:
            connection.isolation_level = None
        return connection

    return open_one
