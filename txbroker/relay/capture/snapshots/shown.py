"""The rows of captured tables, as their records show them, with the place in the database's log.

Values become JSON by the functions that decode the log, so a row and its record differ only where
their values do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from txbroker.contract.captured import CapturedRow, LogPlace
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query
from txbroker.relay.capture.envelope import TableWriter
from txbroker.relay.capture.mapping import TableMappings

_FIRST_ROWS, _ROWS_MAX, _PIECE_BYTES = 100, 5000, 4 << 20
"""Rows that are in memory at a time, at first and at most, and their bytes, about."""
Convert: TypeAlias = Callable[[Any], Any]
"""Returns a value as JSON holds it; raises ValueError if it cannot be shown."""
Columns: TypeAlias = Sequence[tuple[str, Convert]]
"""Names, with what converts a value that is not None."""


class RowSnapshot(ABC):
    """The rows of one moment.

    Args:
        session: reads nothing else.
        mapping: with keys.
        begin: the statements that begin the snapshot.

    Attributes:
        place: which changes they have.
    """

    place: LogPlace

    def __init__(self, session: PlainSession, mapping: TableMappings, begin: Sequence[str]) -> None:
        self._session, self._mapping = session, mapping
        for sql in begin:
            session.execute(Query(sql))

    @abstractmethod
    def reached(self, position: bytes) -> bool:
        """Return whether a position of the capture in Kafka includes all that the rows show.

        Raises:
            ValueError, MsgspecError: it is none of this kind of database.
        """

    def refused(self) -> dict[tuple[str, str], str]:
        """Return why tables cannot be compared, by schema and table."""
        writers = self._mapping.writers.items()
        return {name: why for name, writer in writers if (why := self._why_not(name, writer))}

    @abstractmethod
    def _why_not(self, name: tuple[str, str], writer: TableWriter) -> str: ...

    def pieces(self, writer: TableWriter) -> Iterator[Sequence[CapturedRow]]:
        """Yield the rows of a table that is not refused."""
        with self._reading(writer) as (columns, fetch):
            count = _FIRST_ROWS
            while rows := fetch(count):
                piece = [_captured_row(writer, columns, row) for row in rows]
                yield piece
                count = _rows_after(piece)

    @abstractmethod
    def _reading(
        self, writer: TableWriter
    ) -> AbstractContextManager[tuple[Columns, Callable[[int], Sequence[Sequence[Any]]]]]:
        """Return the columns of a table, and what returns the values of its next rows."""


def without_primary_key(writer: TableWriter, primary: Sequence[str]) -> str:
    """Return why the keys of records do not identify rows; "" if they do."""
    if primary and set(primary) <= set(writer.key):
        return ""
    why = "is not its primary key" if primary else "may be that of many rows without a primary key"
    return f"the key of its records ({', '.join(writer.key)}) {why}: map the primary key"


def _captured_row(writer: TableWriter, columns: Columns, values: Sequence[Any]) -> CapturedRow:
    row, whole = {}, True
    for (name, convert), value in zip(columns, values, strict=True):
        try:
            row[name] = None if value is None else convert(value)
        except (LookupError, ValueError):
            row[name], whole = None, False
    return CapturedRow(*writer.shown(row), whole)


def _rows_after(piece: Sequence[CapturedRow]) -> int:
    """Return how many rows may be read after a piece, so that large ones are few."""
    size = sum(len(row.key) + len(row.shown or b"") for row in piece)
    return max(1, min(_ROWS_MAX, _PIECE_BYTES * len(piece) // (size + 1)))
