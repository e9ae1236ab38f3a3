"""The differences between SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from msgspec import Struct

from txbroker.errors import ConfigurationError


class Fault(StrEnum):
    """The meaning of a database's error for the caller."""

    BUSY = "busy"
    """Another transaction was in the way; this one has no effect and can be repeated."""
    DUPLICATE = "duplicate"
    """A row with this primary key exists, or a table, column, trigger or function."""
    UNAVAILABLE = "unavailable"
    """The server, file or connection cannot be used now; of a commit the result is unknown."""
    NO_TABLE = "no table"
    DENIED = "denied"
    ABORTED = "aborted"
    """An earlier error has aborted the transaction, and was not raised."""
    OTHER = "other"


class TransactionGone(Exception):
    """The transaction has ended: the server has rolled it back because of an error that was not
    raised, or the handler has ended it."""


class Dialect(Struct, frozen=True, kw_only=True):
    """SQL of one kind of database.

    Attributes:
        name: `sqlite`, `postgresql` or `mariadb`.
        begin: begins a transaction that may write.
        begin_marked: begins one with a mark that ends with it, so that a handler which ends it and
            begins another one is noticed; SQLite reports such statements.
        begin_by_statement: does the same where a driver or library begins the transaction with the
            first statement, and shows it only then.
        release: fails if the mark is gone; "": `transaction_guard` sees it.
        lock, lock_shared: end of a SELECT that locks its rows and sees their newest version.
        lock_free: a statement that executes `{select}` and locks its rows, without those that
            another transaction has locked.
        newest: end of a SELECT by a duplicate key, which sees the row also if it is newer than the
            transaction's snapshot; "": not necessary.
        newest_read: first statement of a transaction whose SELECTs see what others have committed
            while it waited for their locks; "": they do in any case.
        ignore_duplicate: end of an INSERT that skips a row whose key exists; "": it fails instead,
            and its transaction can continue.
        upsert: middle of an upsert, before the columns to set.
        numbers: a table with a column `n`, of a JSON list of whole numbers.
        now_s, now_ms: seconds and milliseconds since 1970.
        text, key, blob, whole: types of columns. `key` is a text of at most 255 ASCII
            characters.
        identity: type of a primary key whose values grow and are never used again; `{sequence}` is
            the name of its sequence.
        sequence: creates that sequence, "" if the column has its own.
        draw_identity: to be executed before an UPDATE with the next value, if not "".
        drawn: a SELECT of the last value drawn for the column `position` of `{table}`; of null if
            this user may not know it.
        set_drawn: sets it to `{position}`; "": the database keeps it above all rows.
        next_identity: the next value of the column of `{table}`, in an UPDATE of one row.
        random_id: a new text for a `key`.
        unit: a new text for a `key`, greater than those of transactions that have committed before
            this one began; on PostgreSQL that of the transaction. "": SQL has none.
        columns: a SELECT of the names and types of a table's columns; `?` is its name.
        options: end of CREATE TABLE.
        clustered: further end, which stores rows in their key's index; for rows that are hardly
            longer than their key.
        limits: statements that limit the waits of a session.
        own: statements that set what an administrator may have set otherwise, on sessions that no
            handler receives.
        lock_tables: first statement of a transaction that changes txbroker's tables: it waits until
            no other one does; "": `begin` does.
        unlock_tables: its last statement; "": the end of the transaction does.
        holders: a SELECT of who may hold locks on `{tables}`, the longest first, as text; "": the
            database does not show it.
        in_transaction: a SELECT that returns whether it is part of an open transaction.
        transaction_guard: end of a condition that no row meets outside the marked transaction; on
            MariaDB, where an error may roll a transaction back and the driver does not show it,
            outside any.
        isolation: the transaction's isolation level; "": no level makes a duplicate key abort it.
        fault_of: returns what an error of a driver means.
    """

    name: str
    begin: str
    begin_marked: str
    begin_by_statement: str
    release: str
    lock: str
    lock_shared: str
    lock_free: str
    newest: str
    newest_read: str
    ignore_duplicate: str
    upsert: str
    numbers: str
    now_s: str
    now_ms: str
    text: str
    key: str
    blob: str
    whole: str
    identity: str
    sequence: str
    draw_identity: str
    drawn: str
    set_drawn: str
    next_identity: str
    random_id: str
    unit: str
    columns: str
    options: str
    clustered: str
    limits: tuple[str, ...]
    own: tuple[str, ...]
    lock_tables: str
    unlock_tables: str
    holders: str
    in_transaction: str
    transaction_guard: str
    isolation: str
    fault_of: Callable[[BaseException], Fault]

    def fault(self, error: BaseException) -> Fault:
        """Return what an error means, also one that SQLAlchemy or Django has wrapped."""
        if type(error).__module__ == "sqlalchemy.exc" and type(error).__name__ == "TimeoutError":
            return Fault.UNAVAILABLE  # its pool has no connection
        if isinstance(error, TransactionGone):
            return Fault.ABORTED
        return self.fault_of(original(error))

    def session_limits(self, lock_wait_s: float, idle_s: float) -> Iterator[str]:
        """Yield the statements that limit how long a session waits for a lock, and how long its
        transaction may wait for the next statement."""
        for sql in self.limits:
            yield sql.format(
                lock_ms=round(lock_wait_s * 1000),
                lock_s=round(lock_wait_s),
                idle_ms=round(idle_s * 1000),
                idle_s=max(1, round(idle_s)),
            )


def original(error: BaseException) -> BaseException:
    """Return the driver's error in one of SQLAlchemy or Django; others as they are."""
    wrapped = type(error).__module__.startswith(("sqlalchemy.exc", "django.db.utils"))
    cause = getattr(error, "orig", None) or error.__cause__
    return cause if wrapped and isinstance(cause, BaseException) else error


# --- errors ----------------------------------------------------------------------------------


def _sqlite_fault(error: BaseException) -> Fault:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or not isinstance(error, sqlite3.Error):
        closed = isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error)
        return Fault.UNAVAILABLE if closed else Fault.OTHER
    if code in (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE):
        return Fault.DUPLICATE
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Fault.BUSY
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_FULL:
            return Fault.UNAVAILABLE
        case sqlite3.SQLITE_NOTADB:
            return Fault.UNAVAILABLE  # the path is wrong
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return Fault.DENIED
    if "duplicate column name" in str(error):
        return Fault.DUPLICATE
    return Fault.NO_TABLE if "no such table" in str(error) else Fault.OTHER


_BY_STATE: Mapping[str, Fault] = {
    **dict.fromkeys(
        ("42P07", "42710", "42723"), Fault.DUPLICATE
    ),  # a table, trigger or function exists
    "40001": Fault.BUSY,  # serialization failure
    "40P01": Fault.BUSY,  # deadlock
    "55P03": Fault.BUSY,  # lock timeout
    "23505": Fault.DUPLICATE,
    "42P01": Fault.NO_TABLE,
    "3F000": Fault.NO_TABLE,  # no schema
    "42501": Fault.DENIED,
    "57014": Fault.UNAVAILABLE,  # the statement was cancelled, or took too long
    "25P02": Fault.ABORTED,
    "25P03": Fault.UNAVAILABLE,  # idle in a transaction for too long
    "25006": Fault.UNAVAILABLE,  # read only, as a standby is
}


def _postgresql_fault(error: BaseException) -> Fault:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state:
        gone = state.startswith(("08", "53", "57P", "58"))  # also: disk or memory is full
        return Fault.UNAVAILABLE if gone else _BY_STATE.get(state, Fault.OTHER)
    # Also subclasses, such as psycopg's ConnectionTimeout and the PoolTimeout of its pool.
    lost = {"OperationalError", "InterfaceError", "ConnectionDoesNotExistError"}.intersection(
        kind.__name__ for kind in type(error).__mro__
    )
    return Fault.UNAVAILABLE if lost or isinstance(error, OSError) else Fault.OTHER


_BY_NUMBER: Mapping[int, Fault] = {
    **dict.fromkeys((1213, 1205, 1020), Fault.BUSY),  # deadlock, lock timeout, snapshot too old
    1062: Fault.DUPLICATE,
    **dict.fromkeys((1109, 1146), Fault.NO_TABLE),  # 1109: in information_schema
    1305: Fault.ABORTED,  # the savepoint is gone
    **dict.fromkeys((1142, 1143, 1227), Fault.DENIED),
    **dict.fromkeys((1044, 1045, 1049), Fault.UNAVAILABLE),  # wrong user, password or database
    **dict.fromkeys((1040, 1129, 1203), Fault.UNAVAILABLE),  # too many connections, host blocked
    **dict.fromkeys((0, 1158, 1159, 1160, 1161), Fault.UNAVAILABLE),  # connection lost
    **dict.fromkeys((1053, 1927, 4031), Fault.UNAVAILABLE),  # shutdown, killed, idle for too long
    **dict.fromkeys((1180, 1181), Fault.UNAVAILABLE),  # the same, during COMMIT or ROLLBACK
    **dict.fromkeys((1317, 1969), Fault.UNAVAILABLE),  # the statement was ended, or took too long
    **dict.fromkeys((1290, 1836), Fault.UNAVAILABLE),  # read only
    **dict.fromkeys((1021, 1037, 1041), Fault.UNAVAILABLE),  # disk or memory is full
    **dict.fromkeys((2002, 2003, 2006, 2013, 2014, 2055), Fault.UNAVAILABLE),  # of the client
}


def _mariadb_fault(error: BaseException) -> Fault:
    of_driver = type(error).__module__ != "builtins"  # a KeyError may have a number, too
    number = error.args[0] if error.args and of_driver else None
    if isinstance(error, OSError):
        return Fault.UNAVAILABLE
    return _BY_NUMBER.get(number, Fault.OTHER) if isinstance(number, int) else Fault.OTHER


# --- dialects --------------------------------------------------------------------------------

SQLITE = Dialect(
    name="sqlite",
    begin="BEGIN IMMEDIATE",
    begin_marked="BEGIN IMMEDIATE",
    begin_by_statement="BEGIN IMMEDIATE",
    release="",
    lock="",
    lock_shared="",
    lock_free="{select}",
    newest="",
    newest_read="",
    ignore_duplicate=" ON CONFLICT DO NOTHING",
    upsert=" ON CONFLICT ({key}) DO UPDATE SET ",
    numbers="(SELECT value AS n FROM json_each(?)) AS numbers",
    # Without `%`, which has a meaning for some drivers.
    now_s="CAST((julianday('now') - 2440587.5) * 86400 AS INTEGER)",
    now_ms="CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)",
    text="TEXT",
    key="TEXT",
    blob="BLOB",
    whole="INTEGER",
    identity="INTEGER PRIMARY KEY AUTOINCREMENT",
    sequence="",
    draw_identity="UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = '{table}'",
    drawn="SELECT MAX(seq) FROM sqlite_sequence WHERE name = '{table}'",
    set_drawn="",
    next_identity="(SELECT seq FROM sqlite_sequence WHERE name = '{table}')",
    random_id="lower(hex(randomblob(16)))",
    unit="",
    columns="SELECT name, lower(type) FROM pragma_table_info(?)",
    options="",
    clustered=" WITHOUT ROWID",
    limits=("PRAGMA busy_timeout = {lock_ms}",),
    own=(),
    lock_tables="",
    unlock_tables="",
    holders="",
    in_transaction="",
    transaction_guard="",
    isolation="",
    fault_of=_sqlite_fault,
)
# Unlike a SELECT it takes no snapshot, which would fix the isolation level.
_POSTGRESQL_MARK = "SET LOCAL txbroker.transaction = 'open'"
POSTGRESQL = Dialect(
    name="postgresql",
    begin="BEGIN",
    begin_marked=f"BEGIN; {_POSTGRESQL_MARK}",
    begin_by_statement=_POSTGRESQL_MARK,
    release="",
    lock=" FOR UPDATE",
    lock_shared=" FOR SHARE",
    lock_free="{select} FOR UPDATE SKIP LOCKED",
    newest="",
    newest_read="SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ignore_duplicate=" ON CONFLICT DO NOTHING",
    upsert=" ON CONFLICT ({key}) DO UPDATE SET ",
    numbers=(
        "(SELECT CAST(value AS bigint) AS n FROM json_array_elements_text(CAST(? AS json))) "
        "AS numbers"
    ),
    now_s="CAST(floor(extract(epoch FROM clock_timestamp())) AS bigint)",
    # In double precision: numeric, as of extract(), takes longer.
    now_ms="CAST(date_part('epoch', clock_timestamp()) * 1000 AS bigint)",
    text="text",
    key='text COLLATE "C"',
    blob="bytea",
    whole="bigint",
    identity="bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
    sequence="",
    draw_identity="",
    drawn=(
        "SELECT CASE WHEN has_sequence_privilege(own, 'SELECT, USAGE') "
        "THEN pg_sequence_last_value(own) END "
        "FROM (SELECT CAST(pg_get_serial_sequence('{table}', 'position') AS regclass) AS own) AS it"
    ),
    set_drawn="SELECT setval(pg_get_serial_sequence('{table}', 'position'), {position})",
    next_identity="DEFAULT",
    random_id="CAST(gen_random_uuid() AS text)",
    # As texts they have the order in which they were assigned.
    unit="lpad(CAST(pg_current_xact_id() AS text), 20, '0')",
    columns=(
        "SELECT CAST(attname AS text), format_type(atttypid, NULL) FROM pg_attribute "
        "WHERE attrelid = to_regclass(CAST(? AS text)) AND attnum > 0 AND NOT attisdropped"
    ),
    options="",
    clustered="",
    limits=(
        "SET lock_timeout = {lock_ms}",
        "SET idle_in_transaction_session_timeout = {idle_ms}",
    ),
    own=(
        "SET default_transaction_read_only = off",
        "SET default_transaction_isolation = 'read committed'",
        "SET statement_timeout = 0",
    ),
    lock_tables="SELECT pg_advisory_xact_lock(1954046575, 2)",  # the numbers are arbitrary
    unlock_tables="",
    # A row's lock shows nowhere. Its transaction has one on the table, too.
    holders=(
        "SELECT concat('process ', pid, ' of user ', usename, ' (', application_name, "
        "'), in a transaction since ', xact_start) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND pid IN (SELECT pid FROM pg_locks WHERE granted "
        "AND mode <> 'AccessShareLock' AND relation IN (SELECT to_regclass(name) "
        "FROM unnest(ARRAY[{tables}]) AS name)) ORDER BY xact_start LIMIT 1"
    ),
    # A statement that is its transaction begins when that does.
    in_transaction="SELECT now() <> statement_timestamp()",
    transaction_guard=" AND current_setting('txbroker.transaction', true) = 'open'",
    isolation="current_setting('transaction_isolation')",
    fault_of=_postgresql_fault,
)
_MARIADB_BEGIN = "BEGIN NOT ATOMIC START TRANSACTION; SAVEPOINT txbroker; END"
_MARIADB_TABLES = "CONCAT('txbroker.', MD5(DATABASE()))"
MARIADB = Dialect(
    name="mariadb",
    begin="START TRANSACTION",
    begin_marked=_MARIADB_BEGIN,
    begin_by_statement=_MARIADB_BEGIN,
    release="RELEASE SAVEPOINT txbroker",
    lock=" FOR UPDATE",
    lock_shared=" LOCK IN SHARE MODE",
    # In a session that does not wait, a locked row ends the transaction in place of being skipped.
    lock_free="SET STATEMENT innodb_lock_wait_timeout = 1 FOR {select} FOR UPDATE SKIP LOCKED",
    newest=" LOCK IN SHARE MODE",
    newest_read="",
    ignore_duplicate="",
    upsert=" ON DUPLICATE KEY UPDATE ",
    numbers="JSON_TABLE(?, '$[*]' COLUMNS (n BIGINT PATH '$')) AS numbers",
    now_s="UNIX_TIMESTAMP()",
    # Of local time, one hour of the year is there twice.
    now_ms="(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)",
    text="LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    key="VARCHAR(255) CHARACTER SET ascii COLLATE ascii_nopad_bin",
    blob="LONGBLOB",
    whole="BIGINT",
    identity="BIGINT NOT NULL PRIMARY KEY DEFAULT (NEXT VALUE FOR {sequence})",
    sequence="CREATE SEQUENCE IF NOT EXISTS {sequence}",
    draw_identity="",
    drawn="SELECT NEXT VALUE FOR {sequence}",  # what it shows is ahead by its cache
    set_drawn="SELECT SETVAL({sequence}, {position})",
    next_identity="NEXT VALUE FOR {sequence}",
    random_id="REPLACE(UUID(), '-', '')",
    unit="LPAD(NEXT VALUE FOR {sequence}, 20, '0')",
    columns=(
        "SELECT column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = DATABASE() AND table_name = ?"
    ),
    options=" ENGINE=InnoDB",
    clustered="",
    limits=(
        "SET innodb_lock_wait_timeout = {lock_s}, idle_transaction_timeout = {idle_s}, "
        # Uncommitted rows may never become true.
        "tx_isolation = IF(@@tx_isolation = 'READ-UNCOMMITTED', 'READ-COMMITTED', @@tx_isolation)",
    ),
    own=(
        "SET sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0, "
        "sql_select_limit = 18446744073709551615, max_statement_time = 0, tx_read_only = 0",
    ),
    # A statement that changes a table keeps all others waiting while it waits for an open
    # transaction: a day, by default.
    lock_tables=(
        "BEGIN NOT ATOMIC SET lock_wait_timeout = 10; "
        f"IF COALESCE(GET_LOCK({_MARIADB_TABLES}, 10), 0) = 0 THEN SIGNAL SQLSTATE 'HY000' SET "
        "MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'another session changes the tables'; END IF; END"
    ),
    unlock_tables=f"DO RELEASE_LOCK({_MARIADB_TABLES})",
    # Needs PROCESS.
    holders=(
        "SELECT CONCAT('connection ', trx_mysql_thread_id, ', in a transaction since ', "
        "trx_started) FROM information_schema.innodb_trx WHERE trx_rows_locked > 0 "
        "AND trx_mysql_thread_id <> CONNECTION_ID() ORDER BY trx_started LIMIT 1"
    ),
    in_transaction="SELECT @@in_transaction OR NOT @@autocommit",
    transaction_guard=" AND @@in_transaction = 1",
    isolation="",
    fault_of=_mariadb_fault,
)
DIALECTS: Mapping[str, Dialect] = {each.name: each for each in (SQLITE, POSTGRESQL, MARIADB)}


def dialect_named(name: str) -> Dialect:
    """Return the dialect that SQLAlchemy, Django or a URL names.

    Raises:
        ConfigurationError: there is none.
    """
    found = DIALECTS.get({"mysql": "mariadb", "postgres": "postgresql"}.get(name, name))
    if found is None:
        raise ConfigurationError(
            f"txbroker has no tables for {name!r}: use PostgreSQL, MariaDB or SQLite"
        )
    return found
