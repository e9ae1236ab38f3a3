"""Rows of MariaDB's tables at one moment, and the GTIDs of that moment in the binary log.

`START TRANSACTION WITH CONSISTENT SNAPSHOT` takes InnoDB's snapshot and the end of the binary log
under the lock under which transactions become visible in the order of the log: the rows show the
transactions up to that place, and no other.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from txbroker.contract.captured import LogPlace
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query, Steps, run
from txbroker.relay.capture.envelope import TableWriter
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.maria.binlog import gtids, includes, log_end
from txbroker.relay.capture.maria.rows import shortest
from txbroker.relay.capture.mariadb_setup import Column, TableName, columns_of
from txbroker.relay.capture.snapshots.shown import (
    Columns,
    Convert,
    RowSnapshot,
    without_primary_key,
)

_BEGIN = (
    "SET time_zone = '+00:00', sql_mode = '', net_write_timeout = 600",
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
)
_TABLE = (
    "SELECT engine, table_type FROM information_schema.tables "
    "WHERE table_schema = ? AND table_name = ?"
)
_PRIMARY = (
    "SELECT column_name FROM information_schema.statistics "
    "WHERE table_schema = ? AND table_name = ? AND index_name = 'PRIMARY' ORDER BY seq_in_index"
)


def _place(database: MariaDB) -> Steps[LogPlace]:
    file, position = yield from log_end("SESSION")
    found = yield Query(
        "SELECT BINLOG_GTID_POS(?, ?), CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS INTEGER)",
        (file, position),
    )
    text, at_ms = found.rows[0]
    if text is None:
        raise DatabaseUnavailable(
            f"{database.name}: the binary log {file} is not there: `txbroker capture plan` shows "
            "whether it is on; if it was removed meanwhile, run the audit again"
        )
    ends = {domain: int(gtid.split("-")[2]) for domain, gtid in gtids(text).items()}
    return LogPlace(text, ends, "", int(at_ms))


class MariaSnapshot(RowSnapshot):
    """The rows of the captured tables."""

    def __init__(self, session: PlainSession, mapping: TableMappings, database: MariaDB) -> None:
        super().__init__(session, mapping, _BEGIN)
        self.place = run(_place(database), session.execute)

    def reached(self, position: bytes) -> bool:
        return includes(position, self.place.text)

    def _why_not(self, name: TableName, writer: TableWriter) -> str:
        tables = self._session.execute(Query(_TABLE, name)).rows
        if not (tables and self._columns(name)):
            return "it is no table any more: correct the mapping"
        engine, kind = tables[0]
        if kind == "SYSTEM VERSIONED":
            return "it is system-versioned: records show earlier versions of rows, too"
        if engine != "InnoDB":
            return f"its engine {engine} has no snapshots: use InnoDB"
        primary = [str(column) for (column,) in self._session.execute(Query(_PRIMARY, name)).rows]
        return without_primary_key(writer, primary)

    def _columns(self, name: TableName) -> Sequence[Column]:
        return run(columns_of(name), self._session.execute)

    @contextmanager
    def _reading(self, writer: TableWriter) -> Iterator[tuple[Columns, Any]]:
        from pymysql.cursors import SSCursor

        columns = self._columns((writer.schema, writer.table))
        read = [(each.name, *_reading(each)) for each in columns]
        values = ", ".join(sql.format(_quoted(name)) for name, sql, _ in read)
        with self._session.connection.cursor(SSCursor) as cursor:
            cursor.execute(f"SELECT {values} FROM {_quoted(writer.schema)}.{_quoted(writer.table)}")
            yield [(name, convert) for name, _, convert in read], cursor.fetchmany


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


# --- values ----------------------------------------------------------------------------------

_AS_IS, _TEXT = "{}", "CAST({} AS CHAR)"


def _reading(column: Column) -> tuple[str, Convert]:
    """Return the SQL of a column's value, and what turns that into the value of a record, which
    `rows` decodes from the log."""
    if column.kind in _READINGS:
        return _READINGS[column.kind]
    if column.kind == "bit":
        return "{} + 0", partial(_bits, int(column.description[4:-1]))
    if column.kind in ("char", "varchar", "tinytext", "text", "mediumtext", "longtext"):
        return _AS_IS, str
    if column.kind in ("enum", "set", "uuid", "inet4", "inet6"):
        return _TEXT, str
    return _AS_IS, _base64  # bytes, and geometry


def _float(value: float) -> float:
    return shortest(struct.pack("<f", value))


def _bits(count: int, value: int) -> str:
    return f"{value:0{count}b}"


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decimal(text: str) -> str:
    """Return a decimal without the zeros that ZEROFILL writes before it."""
    whole, point, fraction = text.lstrip("-").partition(".")
    sign = "-" if text.startswith("-") else ""
    return f"{sign}{whole.lstrip('0') or '0'}{point}{fraction}"


def _date(text: str) -> str | None:
    return None if text == "0000-00-00" else text


def _moment(zone: str, text: str) -> str | None:
    if not text.strip("0-: ."):
        return None
    day, _, clock = text.partition(" ")
    return f"{day}T{_clock(clock)}{zone}"


def _clock(text: str) -> str:
    """Return a time with no, three or six digits after the point."""
    whole, point, fraction = text.partition(".")
    return f"{whole}.{fraction.ljust(3 if len(fraction) <= 3 else 6, '0')}" if point else whole


_READINGS: Mapping[str, tuple[str, Convert]] = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year"), (_AS_IS, int)),
    "decimal": (_TEXT, _decimal),
    # As a FLOAT the server shows six digits.
    "float": ("CAST({} AS DOUBLE)", _float),
    "double": (_AS_IS, float),
    "date": (_TEXT, _date),
    "datetime": (_TEXT, partial(_moment, "")),
    "timestamp": (_TEXT, partial(_moment, "+00:00")),
    "time": (_TEXT, _clock),
}
