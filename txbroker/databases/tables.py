"""Sets of tables: how they are created, migrated and checked; the tables of consumers.

The version of a set is a number in the database: that of the last migration that was applied.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct

from txbroker.databases.dialect import MARIADB, SQLITE, Dialect, Fault
from txbroker.databases.steps import Query, Steps
from txbroker.errors import BadRequest, ConfigurationError

KEY_MAX = 255
FORGET_S_MIN = 86400
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


Migration: TypeAlias = Callable[[Dialect], Iterable[str]]
"""Returns the SQL that takes tables from one version to the next. Each statement can be repeated:
MariaDB commits it at once, so a migration that was killed begins again."""


class TableSet(Struct, frozen=True, kw_only=True):
    """Tables that are created, migrated and checked together.

    Attributes:
        name: short, for the set itself.
        names: of its tables.
        versioned: the table with the column `version`.
        migrations: number 1 creates the tables and stores version 1.
        hint: how to create them; "": that of the database.
        check: further checks of existing tables; its argument is the database's name for messages.
    """

    name: str
    names: tuple[str, ...]
    versioned: str
    migrations: tuple[Migration, ...]
    hint: str = ""
    check: Callable[[Dialect, str], Steps[None]] | None = None

    @property
    def version(self) -> int:
        """The version that this txbroker uses."""
        return len(self.migrations)

    def statements(self, dialect: Dialect, since: int = 0) -> Iterator[str]:
        """Yield the SQL that takes the tables from version `since` to this one; 0: creates them."""
        for number, migration in enumerate(self.migrations[since:], since + 1):
            yield from migration(dialect)
            if number > 1:
                yield f"UPDATE {self.versioned} SET version = {number}"


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
    return sql + (dialect.clustered if name in _KEYED else "")


def _migration_1(dialect: Dialect) -> Iterator[str]:
    for name in _TABLES:
        yield create_table(name, dialect)
    yield (
        f"CREATE INDEX IF NOT EXISTS {ASIDE}_due ON {ASIDE} "
        "(group_name, topic, state, partition_id, due_ms)"
    )
    yield (
        f"INSERT INTO {SCHEMA} (version) SELECT 1 FROM (SELECT 1 AS one) AS once "
        f"WHERE NOT EXISTS (SELECT 1 FROM {SCHEMA})"
    )


CONSUMING = TableSet(name="consuming", names=NAMES, versioned=SCHEMA, migrations=(_migration_1,))


def create(dialect: Dialect, database: str, tables: TableSet = CONSUMING) -> Steps[None]:
    """Create the tables that do not exist. The steps are a transaction.

    Args:
        database: its name for messages.

    Raises:
        ConfigurationError: others of the set exist, of another version.
    """
    yield from _lock_tables(dialect)
    versions = yield from stored_versions(dialect, tables)
    if versions:
        check_versions(database, tables, versions)
    for sql in tables.statements(dialect):
        try:
            yield Query(sql)
        except Exception as error:
            # SQLite has no IF NOT EXISTS for columns.
            if dialect is not SQLITE or dialect.fault(error) is not Fault.DUPLICATE:
                raise
    yield from _unlock_tables(dialect)


def migrate(
    dialect: Dialect, database: str, sets: Iterable[TableSet], *, dry_run: bool = False
) -> Steps[list[str]]:
    """Take the tables that exist to the version that this txbroker uses; return the SQL. The steps
    are a transaction.

    Args:
        database: its name for messages.
        dry_run: only return the SQL.

    Raises:
        ConfigurationError: tables are of a newer version, or of none.
    """
    if not dry_run:
        yield from _lock_tables(dialect)
    executed = []
    for tables in sets:
        versions = yield from stored_versions(dialect, tables)
        if versions is None:
            continue
        check_versions(database, tables, versions, oldest=1)
        for sql in tables.statements(dialect, min(versions)):
            executed.append(sql)
            if not dry_run:
                yield Query(sql)
    if not dry_run:
        yield from _unlock_tables(dialect)
    return executed


def _lock_tables(dialect: Dialect) -> Steps[None]:
    for sql in filter(None, (dialect.newest_read, dialect.lock_tables)):
        yield Query(sql)


def _unlock_tables(dialect: Dialect) -> Steps[None]:
    if dialect.unlock_tables:
        yield Query(dialect.unlock_tables)


def check(dialect: Dialect, database: str, tables: TableSet = CONSUMING) -> Steps[str]:
    """Check that the tables exist, have this version and take part in transactions; return the
    file of an SQLite database, else "".

    Args:
        database: its name for messages.

    Raises:
        ConfigurationError: names the next step.
        Exception: the driver's, of a missing table.
    """
    file = (yield from file_of(database)) if dialect is SQLITE else ""
    check_versions(database, tables, (yield from _versions(tables)))
    if dialect is MARIADB:
        yield from _check_engines(database, tables)
    if tables.check is not None:
        yield from tables.check(dialect, database)
    return file


def stored_versions(dialect: Dialect, tables: TableSet) -> Steps[list[int] | None]:
    """Return the versions in the database; None: the tables are to be created."""
    found = yield Query(dialect.columns, (tables.versioned,))
    return (yield from _versions(tables)) if found.rows else None


def _versions(tables: TableSet) -> Steps[list[int]]:
    result = yield Query(f"SELECT DISTINCT version FROM {tables.versioned}")
    return [int(row[0]) for row in result.rows]


def check_versions(
    database: str, tables: TableSet, versions: Sequence[int], *, oldest: int | None = None
) -> None:
    """Check that tables are of the version that this txbroker uses.

    Args:
        database: its name for messages.
        versions: those in the database.
        oldest: the oldest version to accept, by default the one that this txbroker uses.

    Raises:
        ConfigurationError: names the tables and the next step.
    """
    oldest = tables.version if oldest is None else oldest
    if versions and oldest <= min(versions) <= max(versions) <= tables.version:
        return
    shown = ", ".join(map(str, versions)) or "none"
    step = "run `txbroker databases migrate URL`"
    if min(versions, default=0) < 1:
        step = f"restore the rows of {tables.versioned}"
    elif max(versions) > tables.version:
        step = "use the newer txbroker that migrated them"
    raise ConfigurationError(
        f"{database} has the tables {', '.join(tables.names)} of version {shown}; this txbroker "
        f"uses version {tables.version}: {step}"
    )


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
