"""Rows of captured tables as an audit compares them with the records of their topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct


class LogPlace(Struct, frozen=True):
    """The place in a database's log at which rows were read, all at one moment.

    Attributes:
        text: for people: an LSN, or a list of GTIDs.
        ends: the number of the last transaction that the rows may show, by domain: of MariaDB the
            sequence numbers of GTIDs; of PostgreSQL one domain, 0, whose numbers are LSNs.
        snapshot: of PostgreSQL, which transactions up to there the rows show, as
            `pg_current_snapshot()` has it; "": all of them.
        at_ms: when, by the database's clock, ms since 1970.
    """

    text: str
    ends: Mapping[int, int]
    snapshot: str
    at_ms: int


class CapturedRow(NamedTuple):
    """A row as its record shows it.

    Attributes:
        key: of the record.
        shown: the JSON of `after`, or the value of a record that is one column.
        whole: False: it has a value that no record can show.
    """

    key: bytes
    shown: bytes | None
    whole: bool


class AuditedTable(Struct, frozen=True):
    """A captured table whose rows are compared.

    Attributes:
        column: the value of its records is this column alone; None: an envelope.
        operations: that are captured.
        alone: no other records of the capture are in its topic.
    """

    schema: str
    table: str
    topic: str
    column: str | None
    operations: frozenset[str]
    alone: bool

    @property
    def name(self) -> str:
        """Schema and table."""
        return f"{self.schema}.{self.table}"
