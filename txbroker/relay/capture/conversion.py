"""From changes to messages: which changes are left out, and which stop the capture."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import structlog

from txbroker.core.records import Message
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CaptureMapping, Change, Emitted, TransactionInfo, Unshown
from txbroker.relay.capture.setup import Gap, Step, StepState

log = structlog.wrap_logger(logging.getLogger(__name__))

LEFT_OUT = ("skip", *get_args(Unshown))
"""Reasons why a change has no messages: `--skip`, or consent."""


class Conversion:
    """Turns the changes of a source into messages.

    Args:
        skip: ids of changes, as errors name them, that are left out.

    Attributes:
        accepted_gaps: how many the database has now.
        left_out: changes by the reason why they have no messages: "skip", or the kind of a gap.
    """

    def __init__(self, mapping: CaptureMapping, skip: Collection[str] = ()) -> None:
        self.accepted_gaps = 0
        self.left_out: Counter[str] = Counter()
        self._mapping = mapping
        self._skip = frozenset(skip)
        self._tables = {(each.schema, each.table): each for each in mapping.tables}

    def begin(self, steps: Iterable[Step]) -> None:
        """Log and count the accepted gaps among the steps of a plan."""
        accepted = [each.text for each in steps if each.state is StepState.ACCEPTED]
        for text in accepted:
            log.warning("capture accepts a gap", capture=self._mapping.name, gap=text)
        self.accepted_gaps = len(accepted)

    def messages(
        self, transaction: TransactionInfo, number: int, change: Change | Emitted | Gap
    ) -> Sequence[Message]:
        """Return the messages of a change; see `CaptureMapping.messages`.

        Args:
            change: a gap: a change that the log has, but not its rows.

        Raises:
            ConfigurationError: it cannot be shown, or does not fit the mapping; the text has the
                id of the change, its table and the key of its row.
        """
        if self._skip and self.skips(f"{transaction.id}/{number}"):
            return ()
        try:
            if isinstance(change, Change) and change.operation == "truncate":
                change = self._truncate_or_gap(change)
            if isinstance(change, Gap):
                self.accept(change, f"{transaction.id}/{number}")
                return ()
            if isinstance(change, Change) and change.fault and self._captures(change):
                raise ConfigurationError(f"{change.fault}: change the value or the column")
            return self._mapping.messages(transaction, number, change)
        except ConfigurationError as error:
            change_id = f"{transaction.id}/{number}"
            raise ConfigurationError(
                f"change {change_id}{self._row(change)}: {error}; to leave it out, run with --skip "
                f"{change_id}"
            ) from error

    def accept(self, gap: Gap, change_id: str = "") -> None:
        """Count and log changes that are not shown.

        Args:
            change_id: of the change that the log has; "": of several.

        Raises:
            ConfigurationError: the mapping does not consent.
        """
        if not gap.accepted:
            raise ConfigurationError(gap.step.text)
        self.left_out[gap.kind] += 1
        log.warning(
            "capture accepts a gap",
            capture=self._mapping.name,
            change=change_id,
            gap=gap.step.text,
        )

    def _truncate_or_gap(self, change: Change) -> Change | Gap:
        """Return a truncate, as a gap where it removes rows whose deletes are captured."""
        table = self._tables.get((change.schema, change.table))
        if table is None or table.operations & {"delete", "truncate"} != {"delete"}:
            return change
        problem = "a TRUNCATE removes rows, and the log does not show them"
        return Gap(table, "truncates", problem, 'add "truncate" to its operations')

    def _captures(self, change: Change) -> bool:
        table = self._tables.get((change.schema, change.table))
        return table is not None and change.operation in table.operations

    def skips(self, change_id: str) -> bool:
        """Return whether a change is to be left out, and log that."""
        if change_id not in self._skip:
            return False
        self.left_out["skip"] += 1
        log.warning("capture leaves a change out", capture=self._mapping.name, change=change_id)
        return True

    def _row(self, change: Change | Emitted | Gap) -> str:
        """Return the table and the key of a change, for an error."""
        if not isinstance(change, Change):
            return ""
        row: Mapping[str, Any] = change.after or change.before or change.key or {}
        table = self._tables.get((change.schema, change.table))
        key = table.key if table is not None and row else ()
        values = ", ".join(f"{column} = {row.get(column)!r}" for column in key)
        where = f", {change.operation} in {change.schema}.{change.table}"
        return f"{where} ({values})" if values else where
