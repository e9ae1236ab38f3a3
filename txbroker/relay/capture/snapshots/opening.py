"""Which captured tables can be compared with their records, and their rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from txbroker.contract.captured import AuditedTable
from txbroker.databases.database import Database
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.snapshots.shown import RowSnapshot


def open_snapshot(
    mapping: TableMappings, database: Database
) -> AbstractContextManager[RowSnapshot]:
    """Return the rows of the tables at one moment, read in the block.

    Args:
        mapping: with keys.
        database: PostgreSQL or MariaDB.

    Raises:
        ConfigurationError: a right is missing, or the server is a standby.
        DatabaseUnavailable
    """
    opening: Any
    if database.dialect.name == "postgresql":
        from txbroker.relay.capture.snapshots import postgres as opening
    else:
        from txbroker.relay.capture.snapshots import mariadb as opening
    found: AbstractContextManager[RowSnapshot] = opening.open_snapshot(mapping, database)
    return found


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
