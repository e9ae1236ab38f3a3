"""Operators' actions as the owners of half partitions applied them, in bounded memory."""

from collections import deque
from collections.abc import Sequence

from txbroker.contract.service import OperatorAction
from txbroker.core.decoding import decode_marker
from txbroker.core.encoding import MarkerRow, Row
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.records import Marker, MarkerKind, Record, Source
from txbroker.core.transaction import Transaction

ACTIONS_MAX = 1000
SAME_MS = 60_000
"""Actions on several transactions within this time are one, if all but the transaction is equal."""
LOOKED_AT = 8
"""The newest actions that another one is compared with."""
TEXT_MAX = 300


class OperatorActions:
    """The newest actions of operators.

    Attributes:
        since_ms: by half partition, from when on all markers were seen.
    """

    def __init__(self) -> None:
        self.since_ms: dict[int, int] = {}
        self._actions: deque[OperatorAction] = deque(maxlen=ACTIONS_MAX)

    def begin(self, partition: int, at_ms: int) -> None:
        """Markers of a half partition are seen from now on."""
        self.since_ms[partition] = at_ms

    def end(self, partition: int) -> None:
        """Another proxy applies the markers of a half partition from now on."""
        self.since_ms.pop(partition, None)

    def applied(self, record: Record, transaction: Transaction) -> None:
        """Note a record of the operation topic that was read and applied."""
        value = record.value or b""
        # Most markers are no operator's: the bytes show it without decoding them.
        if b'"operator"' in value or b'"check"' in value:
            try:
                marker = decode_marker(record)
            except ValueError:
                return  # replaced messages, not a marker
            self._note(marker, transaction, record.timestamp_ms)

    def applied_run(self, rows: Sequence[Row], outcomes: Sequence[ApplyResult], at_ms: int) -> None:
        """Note the rows of the operation topic that were appended and applied together."""
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.effect is not Effect.APPLIED or not isinstance(row, MarkerRow):
                continue
            if outcome.transaction is not None:
                self._note(row.marker, outcome.transaction, at_ms)

    def _note(self, marker: Marker, transaction: Transaction, at_ms: int) -> None:
        asked = marker.kind is MarkerKind.CHECK and marker.by
        if marker.source is not Source.OPERATOR and not asked:
            return
        kind, by = str(marker.kind), marker.by[:TEXT_MAX]
        # The marker of a check has the schedule's reason.
        reason = "" if asked else marker.reason[:TEXT_MAX]
        same = (kind, by, reason, transaction.half.group)
        last = len(self._actions) - 1
        for number in range(last, max(-1, last - LOOKED_AT), -1):
            known = self._actions[number]
            if at_ms - known.at_ms >= SAME_MS:
                break
            if (known.action, known.by, known.reason, known.group) == same:
                more = known.count + 1
                self._actions[number] = OperatorAction(known.at_ms, *same, known.id, more)
                return
        self._actions.append(OperatorAction(at_ms, *same, marker.id))

    def newest(self) -> tuple[OperatorAction, ...]:
        """Return the actions, the newest first."""
        return tuple(reversed(self._actions))
