"""What sources of changes have in common: changes of rows, and who turns them into messages.

Values are what JSON holds, the same for each kind of database:

| type of the column | value |
| --- | --- |
| whole numbers | int |
| floating point | float; infinite and not-a-number as the text "Infinity", "-Infinity", "NaN" |
| boolean | bool |
| exact decimals (numeric, money) | text, as the database writes it |
| JSON | the document itself, as `msgspec.Raw` |
| binary | base64 text |
| date, time, timestamp | ISO 8601 text; with a time zone as `2026-11-27T00:57:50.123+00:00` |
| anything else (uuid, arrays, enums, ranges) | text, as the database writes it |
| NULL | None |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from txbroker.core.records import Message

Operation: TypeAlias = Literal["insert", "update", "delete", "truncate"]
Unshown: TypeAlias = Literal[
    "cascades",
    "partitions",
    "replaced",
    "rewrites",
    "statements",
    "tables",
    "truncates",
    "unchanged",
    "versions",
]
"""Kinds of changes that the log of a database does not show as rows; see `setup.Gap`."""
Row: TypeAlias = Mapping[str, Any]
"""Values by the name of their column."""


class Change(Struct, frozen=True, gc=False):
    """What a committed transaction did to one row, or to a whole table (`truncate`).

    Attributes:
        schema: of the table: PostgreSQL's schema, MariaDB's database, `main`.
        before: the whole row before an update or delete; None where the database does not send it.
        after: the row after an insert or update.
        key: of an update that changes its key, and of a delete: the old key, where the database
            sends only that; `before` is None then.
        unchanged: columns that `after` lacks: large values that an update left as they were, which
            PostgreSQL does not send. If `before` has them, `after` has them, too.
        fault: why a value cannot be shown, with the name of its column, which is None then; "" if
            all can. `Conversion` refuses the change.
    """

    schema: str
    table: str
    operation: Operation
    before: Row | None = None
    after: Row | None = None
    key: Row | None = None
    unchanged: tuple[str, ...] = ()
    fault: str = ""


class Emitted(Struct, frozen=True, gc=False):
    """What a transaction gave to `pg_logical_emit_message(true, 'txbroker', …)`."""

    content: bytes


class TransactionInfo(Struct, frozen=True, gc=False):
    """A committed transaction of a database.

    Attributes:
        id: the same at each reading, and different from any other's of this history: the commit
            LSN (`0/16B3748`), or the GTID.
        time_ms: of the commit, by the database's clock.
        source: facts for the envelope, such as database and transaction id.
        mark_ms: tells it from a transaction of another history with its id: the time of the commit,
            or of its first statement, which MariaDB's replicas have, too. A record's `txb-id` is
            `id@mark_ms/number`, with the number of the change in the transaction.
    """

    id: str
    time_ms: int
    source: Mapping[str, Any]
    mark_ms: int


class CapturedTable(Struct, frozen=True, gc=False):
    """The part of a table that is captured.

    Attributes:
        key: columns of the message key.
        before: whether messages hold the whole row before the change.
        accept: changes that the log does not show, and that the user knows to be missing.
    """

    schema: str
    table: str
    operations: frozenset[Operation]
    key: tuple[str, ...]
    before: bool = False
    accept: frozenset[Unshown] = frozenset()


class CaptureMapping(Protocol):
    """The content of a mapping file, as sources and `setup` use it.

    Attributes:
        name: of the capture: the relay's name, and part of the names of slot and publication.
        tables: without repeats.
        emitted: whether `pg_logical_emit_message` is an outbox.
    """

    @property
    def name(self) -> str: ...

    @property
    def tables(self) -> Sequence[CapturedTable]: ...

    @property
    def emitted(self) -> bool: ...

    def messages(
        self, transaction: TransactionInfo, number: int, change: Change | Emitted
    ) -> Sequence[Message]:
        """Return the messages of a change, with all headers; none for a table or operation that is
        not captured.

        Args:
            number: of the change in the transaction, from 0; each change that a source passes has
                one, whether or not it becomes messages.

        Raises:
            ConfigurationError: the change does not fit the mapping: the relay stops.
        """
