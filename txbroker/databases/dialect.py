"""The differences between SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct


class Fault(StrEnum):
    """What an error of a database means for the caller."""

    BUSY = "busy"
    """Another transaction was in the way; this one has no effect and can be repeated."""
    DUPLICATE = "duplicate"
    """A row with this primary key exists."""
    UNAVAILABLE = "unavailable"
    """The server, file or connection cannot be used now; of a commit the result is unknown."""
    NO_TABLE = "no table"
    DENIED = "denied"
    OTHER = "other"


class Dialect(Struct, frozen=True, kw_only=True):
    """SQL of one kind of database.

    Attributes:
        name: `sqlite`, `postgresql` or `mariadb`.
        begin: begins a transaction that may write.
        lock, lock_shared: end of a SELECT that locks its rows and sees their newest version.
        ignore_duplicate: end of an INSERT that skips a row whose key exists; "": it fails instead,
            and its transaction can continue.
        keep: middle of an upsert, before the columns to set.
        numbers: a table with a column `n`, of a JSON list of whole numbers.
        now_s: seconds since 1970.
        text, key, long_text, blob, whole: types of columns. `key` is a text of at most 255 ASCII
            characters.
        options: end of CREATE TABLE.
        tables_lock, tables_unlock: one process at a time creates tables; "": not necessary.
        fault_of: returns what an error of a driver means.
    """

    name: str
    begin: str
    lock: str
    lock_shared: str
    ignore_duplicate: str
    keep: str
    numbers: str
    now_s: str
    text: str
    key: str
    blob: str
    whole: str
    options: str
    tables_lock: str
    tables_unlock: str
    fault_of: Callable[[BaseException], Fault]

    def fault(self, error: BaseException) -> Fault:
        """Return what an error means, also one that SQLAlchemy or Django has wrapped."""
        found = self.fault_of(error)
        cause = getattr(error, "orig", None) or error.__cause__
        if found is Fault.OTHER and isinstance(cause, BaseException):
            return self.fault(cause)
        return found


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
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return Fault.DENIED
    return Fault.NO_TABLE if "no such table" in str(error) else Fault.OTHER


_BY_STATE: Mapping[str, Fault] = {
    "40001": Fault.BUSY,  # serialization failure
    "40P01": Fault.BUSY,  # deadlock
    "55P03": Fault.BUSY,  # lock timeout
    "23505": Fault.DUPLICATE,
    "42P01": Fault.NO_TABLE,
    "3F000": Fault.NO_TABLE,  # no schema
    "42501": Fault.DENIED,
    "25P03": Fault.UNAVAILABLE,  # idle in a transaction for too long
    "53300": Fault.UNAVAILABLE,  # too many connections
    "25006": Fault.UNAVAILABLE,  # read only, as a standby is
}


def _postgresql_fault(error: BaseException) -> Fault:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state:
        gone = state.startswith(("08", "57P"))
        return Fault.UNAVAILABLE if gone else _BY_STATE.get(state, Fault.OTHER)
    lost = type(error).__name__ in (
        "OperationalError",
        "InterfaceError",
        "ConnectionDoesNotExistError",
    )
    return Fault.UNAVAILABLE if lost or isinstance(error, OSError) else Fault.OTHER


_BY_NUMBER: Mapping[int, Fault] = {
    **dict.fromkeys((1213, 1205, 1020), Fault.BUSY),  # deadlock, lock timeout, snapshot too old
    1062: Fault.DUPLICATE,
    1146: Fault.NO_TABLE,
    **dict.fromkeys((1044, 1045, 1142, 1143, 1227), Fault.DENIED),
    **dict.fromkeys(
        (0, 1040, 1053, 1129, 1158, 1159, 1160, 1161, 1203, 1290, 1836, 1927, 4031),
        Fault.UNAVAILABLE,  # no connection, too many of them, shutdown, killed, read only
    ),
    **dict.fromkeys((2002, 2003, 2006, 2013, 2014, 2055), Fault.UNAVAILABLE),  # of the client
}


def _mariadb_fault(error: BaseException) -> Fault:
    number = error.args[0] if error.args else None
    if isinstance(error, OSError):
        return Fault.UNAVAILABLE
    return _BY_NUMBER.get(number, Fault.OTHER) if isinstance(number, int) else Fault.OTHER


# --- dialects --------------------------------------------------------------------------------

SQLITE = Dialect(
    name="sqlite",
    begin="BEGIN IMMEDIATE",
    lock="",
    lock_shared="",
    ignore_duplicate=" ON CONFLICT DO NOTHING",
    keep=" ON CONFLICT ({key}) DO UPDATE SET ",
    numbers="(SELECT value AS n FROM json_each(?)) AS numbers",
    now_s="CAST(strftime('%s', 'now') AS INTEGER)",
    text="TEXT",
    key="TEXT",
    blob="BLOB",
    whole="INTEGER",
    options="",
    tables_lock="",
    tables_unlock="",
    fault_of=_sqlite_fault,
)
POSTGRESQL = Dialect(
    name="postgresql",
    begin="BEGIN",
    lock=" FOR UPDATE",
    lock_shared=" FOR SHARE",
    ignore_duplicate=" ON CONFLICT DO NOTHING",
    keep=" ON CONFLICT ({key}) DO UPDATE SET ",
    numbers=(
        "(SELECT CAST(value AS bigint) AS n FROM json_array_elements_text(CAST(? AS json))) "
        "AS numbers"
    ),
    now_s="CAST(floor(extract(epoch FROM clock_timestamp())) AS bigint)",
    text="text",
    key='text COLLATE "C"',
    blob="bytea",
    whole="bigint",
    options="",
    tables_lock="SELECT pg_advisory_xact_lock(8390876194214)",
    tables_unlock="",
    fault_of=_postgresql_fault,
)
MARIADB = Dialect(
    name="mariadb",
    begin="START TRANSACTION",
    lock=" FOR UPDATE",
    lock_shared=" LOCK IN SHARE MODE",
    ignore_duplicate="",
    keep=" ON DUPLICATE KEY UPDATE ",
    numbers="JSON_TABLE(?, '$[*]' COLUMNS (n BIGINT PATH '$')) AS numbers",
    now_s="UNIX_TIMESTAMP()",
    text="LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    key="VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin",
    blob="LONGBLOB",
    whole="BIGINT",
    options=" ENGINE=InnoDB",
    tables_lock="SELECT GET_LOCK('txbroker tables', 60)",
    tables_unlock="SELECT RELEASE_LOCK('txbroker tables')",
    fault_of=_mariadb_fault,
)
DIALECTS: Mapping[str, Dialect] = {each.name: each for each in (SQLITE, POSTGRESQL, MARIADB)}


def dialect_named(name: str) -> Dialect | Any:
    """Return the dialect that SQLAlchemy, Django or a URL names; None if there is none."""
    return DIALECTS.get({"mysql": "mariadb", "postgres": "postgresql"}.get(name, name))
