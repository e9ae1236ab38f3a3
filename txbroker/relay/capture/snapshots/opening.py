"""Which captured tables can be compared with their records, and their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from txbroker.contract.captured import AuditedTable
from txbroker.databases.database import Database, DatabaseUnavailable
from txbroker.databases.dialect import Fault
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.snapshots.shown import RowSnapshot


@contextmanager
def open_snapshot(mapping: TableMappings, database: Database) -> Iterator[RowSnapshot]:
    """Yield the rows of the tables at one moment.

    Args:
        mapping: with keys.
        database: PostgreSQL or MariaDB.

    Raises:
        ConfigurationError: a right is missing, or the server is a standby.
        DatabaseUnavailable
    """
    kind: Any
    if database.dialect.name == "postgresql":
        from txbroker.relay.capture.snapshots.postgres import PgSnapshot as kind
    else:
        from txbroker.relay.capture.snapshots.mariadb import MariaSnapshot as kind
    try:
        session = database.open_apart()
        try:
            yield kind(session, mapping, database)
        finally:
            session.close()
    except Exception as error:
        raise _unreadable(database, error) from error


def _unreadable(database: Database, error: Exception) -> BaseException:
    """Return the error to raise for one of reading rows."""
    if not type(error).__module__.startswith(("psycopg", "pymysql")):
        return error
    text = " ".join(str(error).split())
    if database.dialect.fault(error) is Fault.DENIED:
        return ConfigurationError(
            f"{database.name}: {text}: grant this user SELECT on each captured table, and all of "
            "its rows"
        )
    return DatabaseUnavailable(
        f"{database.name}: the rows cannot be read: {text}: start the database if it is down, and "
        "run the audit again"
    )


def audited(mapping: TableMappings) -> tuple[dict[tuple[str, str], AuditedTable], dict[str, str]]:
    """Return the tables whose records can be compared, and why others cannot, by their name.

    Args:
        mapping: with keys.
    """
    writers = mapping.writers.values()
    tables, refused = {}, {}
    for place, each in mapping.writers.items():
        others = sum(other.topic == each.topic for other in writers) > 1 or mapping.emitted
        found = AuditedTable(
            each.schema, each.table, each.topic, each.column, each.operations, not others
        )
        if others and (each.column is not None or each.tombstones):
            refused[found.name] = (
                f"other records of the capture may be in topic {each.topic}, and records without "
                "an envelope do not name their table: give the table a separate topic"
            )
        else:
            tables[place] = found
    return tables, refused
