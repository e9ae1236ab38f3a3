"""From changes to messages: which changes are left out, and which stop the capture."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog

from txbroker.core.records import Message
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CaptureMapping, Change, Emitted, TransactionInfo

log = structlog.wrap_logger(logging.getLogger(__name__))


class Conversion:
    """Turns the changes of a source into messages.

    Args:
        skip: ids of changes, as errors name them, that are left out.
    """

    def __init__(self, mapping: CaptureMapping, skip: Collection[str] = ()) -> None:
        self._mapping = mapping
        self._skip = frozenset(skip)
        self._keys = {(each.schema, each.table): each.key for each in mapping.tables}

    def messages(
        self, transaction: TransactionInfo, number: int, change: Change | Emitted
    ) -> Sequence[Message]:
        """Return the messages of a change; see `CaptureMapping.messages`.

        Raises:
            ConfigurationError: it cannot be shown, or does not fit the mapping; the text has the
                id of the change, its table and the key of its row.
        """
        if self._skip and self.skips(f"{transaction.id}/{number}"):
            return ()
        try:
            if isinstance(change, Change) and change.fault:
                raise ConfigurationError(f"{change.fault}: change the value or the column")
            return self._mapping.messages(transaction, number, change)
        except ConfigurationError as error:
            change_id = f"{transaction.id}/{number}"
            raise ConfigurationError(
                f"change {change_id}{self._row(change)}: {error}; to leave it out, run with --skip "
                f"{change_id}"
            ) from error

    def skips(self, change_id: str) -> bool:
        """Return whether a change is to be left out, and log that."""
        if change_id not in self._skip:
            return False
        log.warning("capture leaves a change out", capture=self._mapping.name, change=change_id)
        return True

    def _row(self, change: Change | Emitted) -> str:
        """Return the table and the key of a change, for an error."""
        if isinstance(change, Emitted):
            return ""
        row: Mapping[str, Any] = change.after or change.before or change.key or {}
        key = self._keys.get((change.schema, change.table), ())
        values = ", ".join(f"{column} = {row.get(column)!r}" for column in key)
        return f", {change.operation} in {change.schema}.{change.table} ({values})"
