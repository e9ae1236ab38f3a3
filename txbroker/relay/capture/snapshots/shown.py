"""The rows of captured tables, as their records show them, with the place in the database's log.

Values become JSON by the functions that decode the log, so a row and its record differ only where
their values do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from txbroker.contract.captured import CapturedRow, LogPlace
from txbroker.databases.database import Database, DatabaseUnavailable
from txbroker.databases.dialect import Fault
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.envelope import TableWriter

FIRST_ROWS, _ROWS_MAX, _PIECE_BYTES = 100, 5000, 4 << 20
"""Rows that are in memory at a time, at first and at most, and their bytes, about."""
Convert: TypeAlias = Callable[[Any], Any]
"""Returns a value as JSON holds it; raises ValueError if it cannot be shown."""


class RowSnapshot(Protocol):
    """The rows of one moment.

    Attributes:
        place: which changes they have.
        refused: why tables cannot be compared, by schema and table.
    """

    place: LogPlace
    refused: dict[tuple[str, str], str]

    def reached(self, position: bytes) -> bool:
        """Return whether a position of the capture in Kafka includes all that the rows show.

        Raises:
            ValueError, MsgspecError: it is none of this kind of database.
        """

    def pieces(self, writer: TableWriter) -> Iterator[Sequence[CapturedRow]]:
        """Yield the rows of a table that is not refused."""


def without_primary_key(writer: TableWriter, primary: Sequence[str]) -> str:
    """Return why the keys of records do not identify rows; "" if they do."""
    if primary and set(primary) <= set(writer.key):
        return ""
    why = "is not its primary key" if primary else "may be that of many rows without a primary key"
    return f"the key of its records ({', '.join(writer.key)}) {why}: map the primary key"


def captured_row(
    writer: TableWriter, columns: Sequence[tuple[str, Convert]], values: Sequence[Any]
) -> CapturedRow:
    """Return a row for comparison.

    Args:
        columns: names, with what converts a value that is not None.
    """
    row, whole = {}, True
    for (name, convert), value in zip(columns, values, strict=True):
        try:
            row[name] = None if value is None else convert(value)
        except (LookupError, ValueError):
            row[name], whole = None, False
    return CapturedRow(*writer.shown(row), whole)


def rows_after(piece: Sequence[CapturedRow]) -> int:
    """Return how many rows may be read after a piece, so that large ones are few."""
    size = sum(len(row.key) + len(row.shown or b"") for row in piece)
    return max(1, min(_ROWS_MAX, _PIECE_BYTES * len(piece) // (size + 1)))


def unreadable(database: Database, error: Exception) -> BaseException:
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
