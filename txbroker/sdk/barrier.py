"""A row by which a check and a late local transaction exclude each other.

"There is no row" proves nothing while the local transaction may still commit. So both sides write
the same primary key: the local transaction a row `commit`, in its own database transaction; the
check a row `rollback`, if it finds none. The database accepts only one of them, and the second side
learns of the first: the check reads `commit`, or the local transaction fails with `TooLate`.

A `Dialect` holds the differences between databases.
"""

import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from txbroker.core.records import Decision
from txbroker.errors import BadRequest, ConfigurationError, TxbrokerError
from txbroker.sdk.types import CheckRequest, NotYet, Rollback

TABLE = "txbroker_barrier"
BUSY_TIMEOUT_S = 2.0
"""How long a check waits for the database's write lock: less than the proxy waits for an answer."""
BUSY_AGAIN_S = 2.0
"""The "not yet" of a check that found the database locked."""
_COMMIT, _ROLLBACK = Decision.COMMIT.value, Decision.ROLLBACK.value


class TooLate(Rollback):
    """The transaction was checked and rolled back before its local transaction recorded itself.

    Raised in the local transaction, it must roll that back. It is a `Rollback`, so it ends a
    producer's block with a rollback and without an error.
    """


class AlreadyRecorded(TxbrokerError):
    """The local transaction of this id has committed before: it must not run twice."""


class Connection(Protocol):
    """The part of a DB-API connection that a barrier uses."""

    def cursor(self) -> Any:
        """Return a cursor."""
        ...

    def commit(self) -> None:
        """Commit the open transaction."""
        ...

    def rollback(self) -> None:
        """Roll the open transaction back."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


C = TypeVar("C", bound=Connection)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[C]):
    """SQL and calls for one kind of database.

    Attributes:
        create: SQL that creates the table if it does not exist.
        insert: SQL that inserts (id, decision).
        select: SQL that reads the decision of an id.
        delete: SQL that deletes the rows older than a number of seconds.
        join_local: begins or joins the local transaction; refuses a connection that would commit
            the row alone.
        begin_check: begins a transaction that sees every committed insert and blocks others.
        is_busy: returns True for errors after which a retry can succeed.
        duplicate: the error of a second row with the same id.
    """

    create: str
    insert: str
    select: str
    delete: str
    join_local: Callable[[C], None]
    begin_check: Callable[[C], None]
    is_busy: Callable[[Exception], bool]
    duplicate: type[Exception]


class Barrier(Generic[C]):
    """A barrier in one database; may be used from many threads and processes.

    Args:
        connect: opens a new connection to the database of the local transactions.
    """

    def __init__(self, connect: Callable[[], C], dialect: Dialect[C]) -> None:
        self._connect = connect
        self._dialect = dialect

    def create(self) -> None:
        """Create the table if it does not exist."""
        with closing(self._connect()) as connection:
            connection.cursor().execute(self._dialect.create)
            connection.commit()

    def record(self, connection: C, transaction_id: str) -> None:
        """Insert the row of a transaction inside its local transaction on `connection`. Call it
        first, so that a local transaction that is too late does nothing.

        Raises:
            TooLate: a check was first: roll the local transaction back.
            AlreadyRecorded: this local transaction has committed before.
            ConfigurationError: the row would not be part of a local transaction.
        """
        self._dialect.join_local(connection)
        try:
            connection.cursor().execute(self._dialect.insert, (transaction_id, _COMMIT))
        except self._dialect.duplicate:
            decision = self._read(connection, transaction_id)
            if decision == _ROLLBACK:
                raise TooLate(
                    f"{transaction_id} was checked and rolled back before its local transaction"
                ) from None
            if decision is None:
                raise  # another constraint than the primary key
            raise AlreadyRecorded(
                f"the local transaction of {transaction_id} has committed before"
            ) from None

    def check(self, transaction: str | CheckRequest) -> Decision | NotYet:
        """Return the decision about a transaction, never unknown; usable as a check function.

        COMMIT if its local transaction has committed; else ROLLBACK, and its local transaction
        cannot commit any more. `NotYet` only while the database is locked.
        """
        transaction_id = transaction if isinstance(transaction, str) else transaction.id
        try:
            with closing(self._connect()) as connection:
                return self._check(connection, transaction_id)
        except Exception as error:
            if self._dialect.is_busy(error):
                return NotYet(BUSY_AGAIN_S)
            raise

    def forget(self, older_than_s: float) -> int:
        """Delete rows that were written more than `older_than_s` seconds ago; return how many.

        Keep rows longer than a transaction can be undecided: a check of a transaction whose row is
        deleted would roll back a committed one. Parked transactions wait for ever.

        Raises:
            BadRequest: less than a day.
        """
        if older_than_s < 86400:
            raise BadRequest(
                "older_than_s must be at least 86400: a barrier's rows are kept for a day"
            )
        with closing(self._connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(self._dialect.delete, (older_than_s,))
            connection.commit()
            return int(cursor.rowcount)

    def _check(self, connection: C, transaction_id: str) -> Decision:
        decision = self._read(connection, transaction_id)
        if decision is None:
            connection.rollback()  # ends the read: its snapshot must not be used for a write
            self._dialect.begin_check(connection)
            try:
                decision = self._read(connection, transaction_id)
                if decision is None:
                    insert = self._dialect.insert
                    connection.cursor().execute(insert, (transaction_id, _ROLLBACK))
                    decision = _ROLLBACK
                connection.commit()
            except BaseException:
                connection.rollback()
                raise
        return Decision(decision)

    def _read(self, connection: C, transaction_id: str) -> str | None:
        cursor = connection.cursor()
        cursor.execute(self._dialect.select, (transaction_id,))
        row = cursor.fetchone()
        cursor.close()
        return None if row is None else str(row[0])


# --- SQLite ----------------------------------------------------------------------------------


class SqliteBarrier(Barrier[sqlite3.Connection]):
    """A barrier in an SQLite file; creates its table at once.

    SQLite has one writer at a time. The check takes the write lock before it reads (BEGIN
    IMMEDIATE), so it sees every committed local transaction and waits for the one that holds the
    lock. If that takes longer than `busy_timeout_s`, the answer is `NotYet`.

    Args:
        database: the path of the file, or a function that opens a connection to it.
        table: the table's name.
        busy_timeout_s: how long a check waits for the write lock; a function sets its own timeout.

    Raises:
        ConfigurationError: the database is in memory, or the table's name is not a plain word.
    """

    def __init__(
        self,
        database: str | Path | Callable[[], sqlite3.Connection],
        table: str = TABLE,
        *,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", table):
            raise ConfigurationError(f"a table's name must be a plain word, not {table!r}")
        self._file = ""
        if callable(database):
            connect = database
        else:
            path = os.path.abspath(database)
            if str(database).startswith(":memory:") or not str(database):
                raise ConfigurationError("a barrier needs a file: a check opens it a second time")

            def connect() -> sqlite3.Connection:
                return sqlite3.connect(path, timeout=busy_timeout_s)

        super().__init__(connect, self._dialect_of(table))
        with closing(connect()) as connection:
            self._file = _file_of(connection)
        if not self._file:
            raise ConfigurationError("a barrier needs a file: a check opens it a second time")
        self.create()

    def _dialect_of(self, table: str) -> Dialect[sqlite3.Connection]:
        return Dialect(
            create=(
                f"CREATE TABLE IF NOT EXISTS {table} (id TEXT PRIMARY KEY NOT NULL, "
                f"decision TEXT NOT NULL CHECK (decision IN ('{_COMMIT}', '{_ROLLBACK}')), "
                "at_s INTEGER NOT NULL DEFAULT (CAST(strftime('%s', 'now') AS INTEGER))"
                ") WITHOUT ROWID"
            ),
            insert=f"INSERT INTO {table} (id, decision) VALUES (?, ?)",
            select=f"SELECT decision FROM {table} WHERE id = ?",
            delete=f"DELETE FROM {table} WHERE at_s < CAST(strftime('%s', 'now') AS INTEGER) - ?",
            join_local=self._join_local,
            begin_check=_begin_immediate,
            is_busy=_is_busy,
            duplicate=sqlite3.IntegrityError,
        )

    def _join_local(self, connection: sqlite3.Connection) -> None:
        if _file_of(connection) != self._file:
            raise ConfigurationError(
                f"the local transaction is in another database than the barrier, {self._file}: "
                "a check would roll back a committed transaction"
            )
        if connection.in_transaction:
            return
        if connection.isolation_level is None or getattr(connection, "autocommit", -1) is True:
            raise ConfigurationError(
                "the connection commits every statement automatically: BEGIN the local transaction "
                "before you record it"
            )
        connection.execute("BEGIN IMMEDIATE")


def _begin_immediate(connection: sqlite3.Connection) -> None:
    if not connection.in_transaction:
        connection.execute("BEGIN IMMEDIATE")
        return
    # autocommit=False of Python 3.12 has opened a deferred transaction.
    connection.execute("ROLLBACK")
    connection.execute("BEGIN IMMEDIATE")


def _file_of(connection: sqlite3.Connection) -> str:
    for row in connection.execute("PRAGMA database_list"):
        if row[1] == "main":
            return os.path.realpath(row[2]) if row[2] else ""
    return ""


def _is_busy(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    busy = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, sqlite3.OperationalError) and (code or 0) & 0xFF in busy
