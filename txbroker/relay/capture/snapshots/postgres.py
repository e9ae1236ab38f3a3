"""Rows of PostgreSQL's tables at one moment, and the place of that moment in the WAL.

A transaction writes its commit record, at the LSN that `txb-id` has, and becomes visible to new
snapshots after that, when it leaves the list of running ones. So where the end of the WAL is read
after the snapshot was taken:

- a transaction that the rows show has its commit record before that end;
- one whose commit record is at that end or later is not shown;
- one before that end may still not be shown: it was between both steps, for as long as a
  synchronous standby takes, or ended after the snapshot. The snapshot names the running
  transactions, and envelopes the transaction's number, so `pgfacts.shows` decides exactly.

The snapshot is that of the first statement of a REPEATABLE READ transaction, which also reads
`pg_current_snapshot()` and the end of the WAL; all later statements see the same. The end of what
is *inserted* counts: an asynchronous commit is visible before its record is flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from txbroker.contract.captured import LogPlace
from txbroker.databases.postgres import Postgres
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query, one, run
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.envelope import TableWriter
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.pg.pgoutput import SESSION, converters, lsn_text, parse_lsn
from txbroker.relay.capture.pg.position import decode
from txbroker.relay.capture.snapshots.shown import Columns, RowSnapshot, without_primary_key

_BEGIN = (
    *SESSION,
    # An error, where a policy would leave rows out.
    "SET row_security = off",
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
)
_PLACE = """
SELECT pg_current_snapshot()::text,
  CASE WHEN pg_is_in_recovery() THEN '' ELSE pg_current_wal_insert_lsn()::text END,
  current_setting('wal_block_size')::int, (extract(epoch FROM clock_timestamp()) * 1000)::bigint
"""
_HEADER_BYTES = 40
"""Of a page of the WAL, at most: between its begin and there, no record begins."""
_COLUMNS = """
SELECT attname, atttypid::bigint FROM pg_attribute WHERE attrelid = CAST(? AS bigint)
  AND attnum > 0 AND NOT attisdropped AND (attgenerated = '' OR (attgenerated = 's' AND ?))
ORDER BY attnum
"""
_CURSOR = "txbroker_rows"


def _place(
    database: Postgres, snapshot: str, inserted: str, block_bytes: int, at_ms: int
) -> LogPlace:
    if not inserted:
        raise ConfigurationError(
            f"{database.name}: a standby does not name its running transactions: give the URL of "
            "its primary"
        )
    end = parse_lsn(inserted)
    if end % block_bytes <= _HEADER_BYTES:  # the position of a capture ends before the header
        end -= end % block_bytes
    return LogPlace(lsn_text(end), {0: end - 1}, snapshot, at_ms)


class PgSnapshot(RowSnapshot):
    """The rows of the captured tables."""

    def __init__(self, session: PlainSession, mapping: TableMappings, database: Postgres) -> None:
        super().__init__(session, mapping, _BEGIN)
        self.place = _place(database, *session.execute(Query(_PLACE)).rows[0])
        # An idle server flushes the end of the WAL only after some seconds, and sends nothing
        # before that. A transaction that has a number and writes nothing wakes the WAL writer.
        with suppress(Exception):  # a user may read only
            database.apart(one(Query("SELECT pg_current_xact_id()")))
        self._facts = run(pgfacts.read(mapping), session.execute)

    def reached(self, position: bytes) -> bool:
        return parse_lsn(decode(position).lsn) > self.place.ends[0]

    def _why_not(self, name: tuple[str, str], writer: TableWriter) -> str:
        table = self._facts.tables.get(name)
        if table is None or table.kind not in "rp":
            return "it is no table any more: correct the mapping"
        return without_primary_key(writer, table.primary)

    @contextmanager
    def _reading(self, writer: TableWriter) -> Iterator[tuple[Columns, Any]]:
        table = self._facts.tables[writer.schema, writer.table]
        columns = self._columns(table.oid)
        names = ", ".join(_quoted(name) for name, _ in columns)
        only = "" if table.kind == "p" else "ONLY "  # as in the publication
        place = f"{_quoted(writer.schema)}.{_quoted(writer.table)}"
        with self._session.connection.cursor() as cursor:
            cursor.execute(
                f"DECLARE {_CURSOR} NO SCROLL CURSOR FOR SELECT {names} FROM {only}{place}"
            )

            def fetch(count: int) -> list[list[bytes | None]]:
                cursor.execute(f"FETCH {count} FROM {_CURSOR}")
                found = cursor.pgresult  # text, as the server writes it
                numbers = range(len(columns))
                return [[found.get_value(row, n) for n in numbers] for row in range(found.ntuples)]

            yield columns, fetch
            cursor.execute(f"CLOSE {_CURSOR}")

    def _columns(self, oid: int) -> Columns:
        """Return the columns that the server sends, as it does."""
        publication, server = self._facts.publication, self._facts.server
        generated = server.version >= pgfacts.SENDS_GENERATED and (
            publication is not None and publication.generated
        )
        by_type = converters(server.money_digits)
        rows: Any = self._session.execute(Query(_COLUMNS, (oid, generated))).rows
        return [(name, by_type.get(type_oid, bytes.decode)) for name, type_oid in rows]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
