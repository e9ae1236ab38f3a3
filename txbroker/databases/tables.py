"""Sets of tables, their versions, and how they are created; the tables of consumers.

| table | rows |
| --- | --- |
| `txbroker_schema` | one: the version of the tables |
| `txbroker_position` | a partition of a consumer group: its owner's token, and its position |
| `txbroker_done` | a message that was done above the stored position |
| `txbroker_aside` | a message that waits for a retry or a release, or is a dead letter |
| `txbroker_barrier` | a transaction: its local transaction has committed, or a check was first |
| `txbroker_inbox` | a message that was accepted |
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from txbroker.databases.dialect import MARIADB, SQLITE, Dialect, Fault
from txbroker.databases.steps import Query, Steps
from txbroker.errors import BadRequest, ConfigurationError

VERSION = 1
KEY_MAX = 255
FORGET_S_MIN = 86400
_CREATE_ATTEMPTS = 5
_PIECE = 500
"""Rows that one statement deletes; SQLite takes at most 999 values."""
SCHEMA, BARRIER, INBOX = "txbroker_schema", "txbroker_barrier", "txbroker_inbox"
POSITION, DONE, ASIDE = "txbroker_position", "txbroker_done", "txbroker_aside"

_KEYED = frozenset({DONE, BARRIER, INBOX})
_PARTITION = "group_name {key} NOT NULL, topic {key} NOT NULL, partition_id {whole} NOT NULL"
_TABLES = {
    SCHEMA: "version {whole} NOT NULL PRIMARY KEY",
    POSITION: f"""{_PARTITION},
        token {{whole}} NOT NULL,
        topic_id {{key}} NOT NULL,
        next {{whole}},
        done_ranges {{text}} NOT NULL,
        later_next {{whole}},
        later_ranges {{text}} NOT NULL,
        PRIMARY KEY (group_name, topic, partition_id)""",
    DONE: f"""{_PARTITION},
        message_offset {{whole}} NOT NULL,
        PRIMARY KEY (group_name, topic, partition_id, message_offset)""",
    ASIDE: f"""{_PARTITION},
        message_offset {{whole}} NOT NULL,
        state {{key}} NOT NULL,
        stage {{whole}} NOT NULL,
        step {{whole}} NOT NULL,
        attempts {{whole}} NOT NULL,
        due_ms {{whole}} NOT NULL,
        cause {{text}} NOT NULL,
        reason {{text}} NOT NULL,
        timestamp_ms {{whole}} NOT NULL,
        message_key {{blob}},
        message_value {{blob}},
        headers {{text}} NOT NULL,
        PRIMARY KEY (group_name, topic, partition_id, message_offset)""",
    BARRIER: """id {key} NOT NULL PRIMARY KEY,
        decision {key} NOT NULL CHECK (decision IN ('commit', 'rollback')),
        at_s {whole} NOT NULL""",
    INBOX: """consumer {key} NOT NULL, id {key} NOT NULL,
        at_s {whole} NOT NULL,
        PRIMARY KEY (consumer, id)""",
}
NAMES = tuple(_TABLES)


class TableSet(Struct, frozen=True, kw_only=True):
    """Tables that are created, checked and changed together.

    Attributes:
        name: short, for the set itself.
        version: of its tables.
        versions: a SELECT of the version in the database.
        names: of its tables.
        statements: returns the SQL that creates them; each statement can be repeated.
        hint: how to create them; "": that of the database.
        check: further checks of existing tables; its argument is the database's name for messages.
    """

    name: str
    version: int
    versions: str
    names: tuple[str, ...]
    statements: Callable[[Dialect], Iterable[str]]
    hint: str = ""
    check: Callable[[Dialect, str], Steps[None]] | None = None


def table_sql(name: str, columns: str, dialect: Dialect, **more: str) -> str:
    """Return SQL that creates a table if it does not exist.

    Args:
        columns: with `{key}`, `{text}`, `{whole}` and `{blob}` for types.
        more: what else stands in braces.
    """
    types = {"key": dialect.key, "text": dialect.text, "whole": dialect.whole, "blob": dialect.blob}
    text = " ".join(columns.format(**types, **more).split())
    return f"CREATE TABLE IF NOT EXISTS {name} ({text}){dialect.options}"


def create_table(name: str, dialect: Dialect, table: str = "") -> str:
    """Return SQL that creates a table of consumers if it does not exist.

    Args:
        table: its name in the database, `name` by default.
    """
    sql = table_sql(table or name, _TABLES[name], dialect)
    return sql + (dialect.keyed if name in _KEYED else "")


def statements(dialect: Dialect) -> Iterable[str]:
    """Yield the SQL that creates the tables of consumers."""
    for name in _TABLES:
        yield create_table(name, dialect)
    yield (
        f"CREATE INDEX IF NOT EXISTS {ASIDE}_due ON {ASIDE} "
        "(group_name, topic, state, partition_id, due_ms)"
    )
    yield (
        f"INSERT INTO {SCHEMA} (version) SELECT {VERSION} FROM (SELECT 1 AS one) AS once "
        f"WHERE NOT EXISTS (SELECT 1 FROM {SCHEMA})"
    )


CONSUMING = TableSet(
    name="consuming",
    version=VERSION,
    versions=f"SELECT version FROM {SCHEMA}",
    names=NAMES,
    statements=statements,
)


def create(dialect: Dialect, tables: TableSet = CONSUMING) -> Steps[None]:
    """Create the tables that do not exist; several processes may at the same time."""
    if dialect is MARIADB:  # else the look for a row locks its place, against other processes
        yield Query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    for sql in tables.statements(dialect):
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                yield Query(sql)
                break
            except Exception as error:
                fault = dialect.fault(error)
                if fault is Fault.DUPLICATE:
                    break  # another process has created the table, or inserted the version
                if fault is not Fault.BUSY or attempt + 1 == _CREATE_ATTEMPTS:
                    raise  # a deadlock with another process can be repeated


def prepare(
    dialect: Dialect, database: str, *, create_tables: bool, tables: TableSet = CONSUMING
) -> Steps[str]:
    """Check that the tables exist, have this version and take part in transactions; return the
    file of an SQLite database, else "".

    Args:
        database: its name for messages.
        create_tables: create them if they are missing.

    Raises:
        ConfigurationError: names the next step.
    """
    file = (yield from file_of(database)) if dialect is SQLITE else ""
    try:
        versions = yield from _versions(tables)
    except Exception as error:
        if dialect.fault(error) is not Fault.NO_TABLE or not create_tables:
            raise
        versions = []
    if create_tables and not versions:  # or another process is creating them
        yield from create(dialect, tables)
        versions = yield from _versions(tables)
    if versions != [tables.version]:
        shown = ", ".join(map(str, versions)) or "none"
        raise ConfigurationError(
            f"{database} has txbroker tables of version {shown}; this txbroker uses version "
            f"{tables.version}: upgrade the older of the two"
        )
    if dialect is MARIADB:
        yield from _check_engines(database, tables)
    if tables.check is not None:
        yield from tables.check(dialect, database)
    return file


def _versions(tables: TableSet) -> Steps[list[int]]:
    result = yield Query(tables.versions)
    return [int(row[0]) for row in result.rows]


def file_of(database: str) -> Steps[str]:
    """Return the file of an SQLite database.

    Raises:
        ConfigurationError: it is in memory.
    """
    file = yield from _main_file()
    if not file:
        raise ConfigurationError(
            f"{database} is in memory: txbroker needs a file, which several connections open"
        )
    return file


def _main_file() -> Steps[str]:
    result = yield Query("PRAGMA database_list")
    file = next(row[2] for row in result.rows if row[1] == "main")
    return os.path.realpath(file) if file else ""


def _check_engines(database: str, tables: TableSet) -> Steps[None]:
    names = ", ".join(f"'{name}'" for name in tables.names)
    result = yield Query(
        "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE() "
        f"AND table_name IN ({names}) AND engine <> 'InnoDB'"
    )
    for name, engine in result.rows:
        raise ConfigurationError(
            f"{database}: table {name} is of engine {engine}, which has no transactions: change it "
            f"with ALTER TABLE {name} ENGINE=InnoDB"
        )


def check_file(file: str) -> Steps[None]:
    """Refuse a connection to another SQLite file, where the row would not be found.

    Raises:
        ConfigurationError
    """
    if (yield from _main_file()) != file:
        raise ConfigurationError(
            f"the transaction is in another database than {file}, which has the txbroker tables: "
            "pass a connection to that file"
        )


# --- rows ------------------------------------------------------------------------------------


def is_key(text: str) -> bool:
    """Return whether a column for keys can hold a text unchanged."""
    return 0 < len(text) <= KEY_MAX and text.isascii() and text.isprintable()


def insert_new(dialect: Dialect, sql: str, values: Sequence[Any]) -> Steps[bool]:
    """Insert a row; return False if one with this key exists.

    Raises:
        ConfigurationError: the driver does not report the number of inserted rows.
    """
    try:
        result = yield Query(sql + dialect.ignore_duplicate, values)
    except Exception as error:
        if dialect.ignore_duplicate or dialect.fault(error) is not Fault.DUPLICATE:
            raise
        return False
    if result.count not in (0, 1):
        raise ConfigurationError(
            "the driver does not report the number of inserted rows: leave its pipeline mode first"
        )
    return result.count == 1


def forget(
    dialect: Dialect, table: str, older_than_s: float, of: Mapping[str, str] = MappingProxyType({})
) -> Steps[int]:
    """Delete old rows in pieces, each statement committed, and return their number.

    Args:
        older_than_s: their age, in seconds.
        of: only rows with these values in these columns.

    Raises:
        BadRequest: less than a day.
    """
    if not isinstance(older_than_s, int | float) or not FORGET_S_MIN <= older_than_s < math.inf:
        raise BadRequest(
            f"older_than_s must be at least {FORGET_S_MIN}, not {older_than_s!r}: rows are kept "
            "for a day"
        )
    old = "".join(f"{column} = ? AND " for column in of) + f"at_s < {dialect.now_s} - ?"
    values = (*of.values(), int(older_than_s))
    count, last = 0, ""
    while True:
        # A DELETE that looked for them would lock the rows between them, too.
        found = yield Query(
            f"SELECT id FROM {table} WHERE {old} AND id > ? ORDER BY id LIMIT {_PIECE}",
            (*values, last),
        )
        ids = [row[0] for row in found.rows]
        if ids:
            marks = ", ".join("?" * len(ids))
            deleted = yield Query(
                f"DELETE FROM {table} WHERE {old} AND id IN ({marks})", (*values, *ids)
            )
            count += deleted.count
        if len(ids) < _PIECE:
            return count
        last = ids[-1]
