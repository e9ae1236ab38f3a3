"""Undecided rows, as a relay checks them; as steps.

The number of an attempt is stored before its question is sent, so that neither a crash nor another
relay asks once more than `CHECKS_MAX`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txbroker.core.records import Decision, Message
from txbroker.databases.barrier import TooLate
from txbroker.databases.dialect import Dialect
from txbroker.databases.outbox.rows import Prepared, decide, siblings
from txbroker.databases.outbox.table import OUTBOX, UNKNOWN
from txbroker.databases.outbox.waiting import FullRow
from txbroker.databases.steps import Query, Steps
from txbroker.databases.tables import is_key
from txbroker.errors import BadRequest

CHECKS_MAX = 15
_OF_ONE = f"state = '{UNKNOWN}'"


class StoredAttempt(NamedTuple):
    """An attempt that is stored: its number, from 1, and the rows to be decided, in order."""

    number: int
    rows: Sequence[FullRow]


class UndecidedRows:
    """Rows that are checked, each with those that were prepared together with it.

    Args:
        after_s: how long rows may be undecided before, seconds.
        interval_s: between checks.
    """

    def __init__(self, dialect: Dialect, after_s: float, interval_s: float) -> None:
        self._dialect = dialect
        self._after_ms = round(after_s * 1000)
        self._interval_ms = round(interval_s * 1000)

    def due(self, count: int) -> Steps[list[str]]:
        """Return the first ids of prepared messages whose check is due, at most `count`."""
        now_ms = self._dialect.now_ms
        found = yield Query(
            f"SELECT id, position FROM {OUTBOX} WHERE position IN (SELECT first FROM (SELECT "
            f"MIN(position) AS first FROM {OUTBOX} WHERE {_OF_ONE} AND next_at <= {now_ms} "
            f"AND created_at <= {now_ms} - {self._after_ms} "
            f"GROUP BY CASE WHEN unit = '' THEN id ELSE unit END ORDER BY 1 LIMIT {count}) AS due) "
            "ORDER BY position"
        )
        ids: list[str] = []
        for id, position in found.rows:
            if is_key(str(id)):
                ids.append(str(id))
                continue
            # No instance can be asked about it. With an attempt, it is still undecided.
            yield Query(
                f"UPDATE {OUTBOX} SET state = 'MESSAGE_ERROR', check_attempts = 1, cause = ? "
                f"WHERE position = ? AND {_OF_ONE}",
                ("undecided: its id is not 1 to 255 ASCII characters", position),
            )
        return ids

    def attempt(self, id: str) -> Steps[StoredAttempt | None]:
        """Store an attempt, and return it; None: the rows are decided, given up now, or no longer
        due, as another relay has begun an attempt."""
        prepared = yield from self._find_prepared(id)
        if prepared is None:
            return None
        marks = ", ".join("?" * len(prepared.ids))
        of_rows = f"WHERE id IN ({marks}) AND {_OF_ONE}"
        now_ms = self._dialect.now_ms
        begun = yield Query(
            f"UPDATE {OUTBOX} SET check_attempts = check_attempts + 1, changed_at = {now_ms}, "
            f"next_at = {now_ms} + {self._interval_ms} {of_rows} AND next_at <= {now_ms}",
            prepared.ids,
        )
        if not begun.count:
            return None
        found = yield Query(f"SELECT MAX(check_attempts) FROM {OUTBOX} {of_rows}", prepared.ids)
        number = int(found.rows[0][0])
        if number > CHECKS_MAX:
            yield from self._note(prepared, "cause = ?, check_attempts = check_attempts - 1", "")
            yield from self._give_up(prepared, "no answer to the last check")
            return None
        rows = yield Query(
            f"SELECT {', '.join(FullRow._fields)} FROM {OUTBOX} {of_rows} ORDER BY position",
            prepared.ids,
        )
        return StoredAttempt(number, [FullRow(*row) for row in rows.rows]) if rows.rows else None

    def decide(
        self, id: str, decision: Decision, messages: Sequence[Message] | None, cause: str
    ) -> Steps[str]:
        """Decide rows, unless they are decided; return why the answer cannot be used, or ""."""
        prepared = yield from self._find_prepared(id)
        if prepared is None:
            return ""
        try:
            yield from decide(
                self._dialect,
                prepared,
                decision,
                messages,
                cause=cause,
            )
        except TooLate:
            return ""
        except BadRequest as error:
            return str(error)
        return ""

    def undecided(self, id: str, number: int, cause: str) -> Steps[None]:
        """Note an attempt without a decision; the last one gives the rows up."""
        prepared = yield from self._find_prepared(id)
        if prepared is None:
            return
        if number >= CHECKS_MAX:
            yield from self._give_up(prepared, cause)
            return
        yield from self._note(prepared, f"cause = ?, changed_at = {self._dialect.now_ms}", cause)

    def give_back(self, id: str, after_s: float | None, cause: str) -> Steps[None]:
        """Take an attempt back, which reached no instance or was answered "not yet".

        Args:
            after_s: when to ask again; None: after the interval.
        """
        prepared = yield from self._find_prepared(id)
        if prepared is None:
            return
        now_ms = self._dialect.now_ms
        pause_ms = self._interval_ms if after_s is None else round(after_s * 1000)
        change = f"check_attempts = check_attempts - 1, next_at = {now_ms} + {pause_ms}, cause = ?"
        yield from self._note(prepared, change, cause)

    def _give_up(self, prepared: Prepared, cause: str) -> Steps[None]:
        change = (
            f"state = 'MESSAGE_ERROR', next_at = 0, cause = ?, changed_at = {self._dialect.now_ms}"
        )
        why = f"undecided after {CHECKS_MAX} checks: {cause}"
        yield from self._note(prepared, change, why)

    def _note(self, prepared: Prepared, change: str, cause: str) -> Steps[None]:
        marks = ", ".join("?" * len(prepared.ids))
        yield Query(
            f"UPDATE {OUTBOX} SET {change} WHERE id IN ({marks}) AND {_OF_ONE}",
            (cause, *prepared.ids),
        )

    def _find_prepared(self, id: str) -> Steps[Prepared | None]:
        try:
            return (yield from siblings(self._dialect, id))
        except BadRequest:
            return None
