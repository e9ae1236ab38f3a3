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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from txbroker.contract.captured import CapturedRow, LogPlace
from txbroker.databases.postgres import Postgres
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query, one, run
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.envelope import TableWriter
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.pg.facts import PgFacts
from txbroker.relay.capture.pg.pgoutput import SESSION, converters, lsn_text, parse_lsn
from txbroker.relay.capture.pg.position import decode
from txbroker.relay.capture.snapshots.shown import (
    FIRST_ROWS,
    Convert,
    captured_row,
    rows_after,
    unreadable,
    without_primary_key,
)

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


@contextmanager
def open_snapshot(mapping: TableMappings, database: Postgres) -> Iterator[PgSnapshot]:
    """Open a snapshot of the tables; see `shown.RowSnapshot`.

    Raises:
        ConfigurationError: a right is missing, or the server is a standby.
        DatabaseUnavailable
    """
    try:
        session = database.open_apart()
        try:
            for sql in _BEGIN:
                session.execute(Query(sql))
            shown = session.execute(Query(_PLACE)).rows[0]
            # An idle server flushes the end of the WAL only after some seconds, and sends nothing
            # before that. A transaction that has a number and writes nothing wakes the WAL writer.
            with suppress(Exception):  # a user may read only
                database.apart(one(Query("SELECT pg_current_xact_id()")))
            facts = run(pgfacts.read(mapping), session.execute)
            yield PgSnapshot(session, mapping, facts, _place(database, *shown))
        finally:
            session.close()
    except Exception as error:
        raise unreadable(database, error) from error


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


class PgSnapshot:
    """The rows of the captured tables; see `shown.RowSnapshot`."""

    def __init__(
        self, session: PlainSession, mapping: TableMappings, facts: PgFacts, place: LogPlace
    ) -> None:
        self.place = place
        self.refused: dict[tuple[str, str], str] = {}
        self._session = session
        self._facts = facts
        for name, writer in mapping.writers.items():
            table = facts.tables.get(name)
            if table is None or table.kind not in "rp":
                self.refused[name] = "it is no table any more: correct the mapping"
            elif why := without_primary_key(writer, table.primary):
                self.refused[name] = why

    def reached(self, position: bytes) -> bool:
        """Return whether a position in Kafka includes all that the rows show."""
        return parse_lsn(decode(position).lsn) > self.place.ends[0]

    def pieces(self, writer: TableWriter) -> Iterator[Sequence[CapturedRow]]:
        """Yield the rows of a table."""
        table = self._facts.tables[writer.schema, writer.table]
        columns = self._columns(table.oid)
        names = ", ".join(_quoted(name) for name, _ in columns)
        only = "" if table.kind == "p" else "ONLY "  # as in the publication
        place = f"{_quoted(writer.schema)}.{_quoted(writer.table)}"
        connection = self._session.connection
        with connection.cursor() as cursor:
            cursor.execute(
                f"DECLARE {_CURSOR} NO SCROLL CURSOR FOR SELECT {names} FROM {only}{place}"
            )
            count = FIRST_ROWS
            while True:
                cursor.execute(f"FETCH {count} FROM {_CURSOR}")
                found = cursor.pgresult  # text, as the server writes it
                if not found.ntuples:
                    break
                piece = [
                    captured_row(
                        writer,
                        columns,
                        [found.get_value(row, column) for column in range(len(columns))],
                    )
                    for row in range(found.ntuples)
                ]
                yield piece
                count = rows_after(piece)
            cursor.execute(f"CLOSE {_CURSOR}")

    def _columns(self, oid: int) -> list[tuple[str, Convert]]:
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
