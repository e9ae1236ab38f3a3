"""Records of changes: the envelope, its key and its headers."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.core.records import Header, Message
from txbroker.door.placing import Refusal
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import (
    CapturedTable,
    Change,
    Operation,
    Row,
    TransactionInfo,
)
from txbroker.relay.source import DeliveryRefused

_encode = msgspec.json.Encoder().encode
_NOTHING: tuple[Message, ...] = ()


def identified(transaction: TransactionInfo, number: int, part: int | str = "") -> bytes:
    """Return the `txb-id` of a record.

    Args:
        part: distinguishes further records of the same change.
    """
    return f"{transaction.id}@{transaction.mark_ms}/{number}/{part}".rstrip("/").encode()


def refused_change(refusal: Refusal, transaction: re.Pattern[str]) -> DeliveryRefused:
    """Return the error of a transaction that cannot be delivered.

    Args:
        transaction: matches the id of a transaction at the beginning of a record's.
    """
    message, cause = refusal.message, refusal.cause
    record_id = (dict(message.headers).get(ID_HEADER) or b"").decode()
    found = re.match(rf"({transaction.pattern})@\d+(/\d+)", record_id)
    change_id = found[1] + found[2] if found else record_id
    return DeliveryRefused(
        f"Kafka refuses change {change_id} for topic {message.topic}: {cause}: correct the topic; "
        f"to leave this change out, run with --skip {change_id}"
    )


class TableWriter(CapturedTable, frozen=True, kw_only=True):
    """Makes the records of one table's changes; see `mapping.TableMapping`.

    Attributes:
        name: of the capture.
        key: () until the primary key is known.
        key_as_text: the key is the text of its one column, otherwise a JSON object.
    """

    name: str
    topic: str
    key_as_text: bool
    column: str | None
    binary: bool
    tombstones: bool
    headers: tuple[Header, ...]
    header_columns: tuple[tuple[str, str], ...]

    def with_key(self, key: tuple[str, ...]) -> TableWriter:
        """Return the same for a table with this key."""
        return msgspec.structs.replace(self, key=key)

    def messages(
        self, transaction: TransactionInfo, number: int, change: Change
    ) -> Sequence[Message]:
        """Return the records of a change.

        Raises:
            ConfigurationError: a column is missing.
        """
        operation = change.operation
        if operation not in self.operations:
            return _NOTHING
        before, after = change.before, change.after
        old_key = change.key if change.key is not None else before
        if operation == "truncate":
            return (self._message(transaction, number, "", operation, None, None, change),)
        if after is None:
            key = self._key(old_key)
            return (self._message(transaction, number, "", operation, key, old_key, change),)
        key = self._key(after)
        if old_key is not None and operation == "update":
            old = self._key(old_key)
            if old != key:
                self._expect_whole(change)
                return (
                    self._message(transaction, number, "old", "delete", old, old_key, change),
                    self._message(transaction, number, "", "insert", key, after, change),
                )
        return (self._message(transaction, number, "", operation, key, after, change),)

    def shown(self, row: Row) -> tuple[bytes, bytes | None]:
        """Return the key of a row's record, and what it shows of the row: the JSON of `after`, or
        the value."""
        return self._key(row) or b"", _encode(row) if self.column is None else self._column(row)

    def _message(
        self,
        transaction: TransactionInfo,
        number: int,
        part: str,
        operation: Operation,
        key: bytes | None,
        row: Row | None,
        change: Change,
    ) -> Message:
        headers = (
            (INSTALLATION_HEADER, self.name.encode()),
            (ID_HEADER, identified(transaction, number, part)),
            *self.headers,
        )
        if self.header_columns and row is not None:
            # Of a deleted row the database may send the key only.
            read = row.get if operation == "delete" else partial(self._value, row)
            headers += tuple((name, _as_text(read(column))) for name, column in self.header_columns)
        value: bytes | None = None
        if self.column is not None:
            if operation not in ("delete", "truncate"):
                value = self._column(row)
        elif not (operation == "delete" and self.tombstones):
            value = self._envelope(transaction, number, operation, change)
        return Message(self.topic, key, value, headers)

    def _envelope(
        self, transaction: TransactionInfo, number: int, operation: Operation, change: Change
    ) -> bytes:
        before: Row | None = None
        if operation == "delete":
            old = change.before if change.before is not None else change.key
            before = old if self.before else self._of_key(old)
        elif operation == "update" and self.before:
            before = change.before
        content: dict[str, Any] = {
            "operation": operation,
            "before": before,
            "after": None if operation == "delete" else change.after,
            "time_ms": transaction.time_ms,
            "source": {
                **transaction.source,
                "capture": self.name,
                "schema": self.schema,
                "table": self.table,
                "transaction": transaction.id,
                "number": number,
            },
        }
        if change.unchanged and operation != "delete":
            content["unchanged"] = change.unchanged
        return _encode(content)

    def _expect_whole(self, change: Change) -> None:
        """Refuse a new key whose record would lack columns: no record of that key has them."""
        if change.unchanged and "unchanged" not in self.accept:
            raise ConfigurationError(
                f"the key changes, and PostgreSQL does not send the large columns "
                f"{', '.join(change.unchanged)}, which stay as they are: ALTER TABLE "
                f'"{self.schema}"."{self.table}" REPLICA IDENTITY FULL; if records may lack them, '
                'add accept = ["unchanged"] to the table in the mapping'
            )

    # --- columns -----------------------------------------------------------------------------

    def _value(self, row: Row | None, column: str) -> Any:
        if row is None or column not in row:
            raise ConfigurationError(
                f"a change of {self.schema}.{self.table} has no column {column!r}, which the "
                "mapping uses: correct the mapping; if the column is a large value that an update "
                "left unchanged: ALTER TABLE … REPLICA IDENTITY FULL"
            )
        return row[column]

    def _of_key(self, row: Row | None) -> dict[str, Any]:
        return {column: self._value(row, column) for column in self.key}

    def _key(self, row: Row | None) -> bytes | None:
        if self.key_as_text:
            return _as_text(self._value(row, self.key[0]))
        return _encode(self._of_key(row))

    def _column(self, row: Row | None) -> bytes | None:
        assert self.column is not None
        value = self._value(row, self.column)
        if not self.binary or value is None:
            return _as_text(value)
        try:
            return base64.b64decode(value, validate=True)
        except (TypeError, binascii.Error):
            raise ConfigurationError(
                f"column {self.column!r} of {self.schema}.{self.table} is not binary: remove "
                "`binary` from the mapping"
            ) from None


def _as_text(value: Any) -> bytes | None:
    """Return text as it is, and other values as JSON."""
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else _encode(value)
