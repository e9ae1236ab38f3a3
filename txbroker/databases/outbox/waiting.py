"""Steps by which a relay reads the outbox and marks its rows.

Rows that wait are in the state LOCAL_COMMIT. `next_at` is 0 for those to be sent at once, in the
order of their positions, else the time before which a row is not sent: because Kafka refused it, or
a row of its order key, or of its unit.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from txbroker.databases.dialect import MARIADB, POSTGRESQL, SQLITE, Dialect
from txbroker.databases.outbox.operations import readable
from txbroker.databases.outbox.restored import RestoredRows
from txbroker.databases.outbox.table import OUTBOX, READY
from txbroker.databases.steps import Query, Steps

_PIECE = 2000
"""Positions of one statement."""
_UNITS = 500
"""Values of one statement: SQLite takes at most 999."""
_LATER = "state = 'LOCAL_COMMIT' AND next_at > 0"
_UNFINISHED = (
    ("LOCAL_COMMIT", READY),
    ("LOCAL_COMMIT", _LATER),
    ("UNKNOWN", "state = 'UNKNOWN'"),
    ("MESSAGE_ERROR", "state = 'MESSAGE_ERROR'"),
)
_BEHIND = "an earlier row of its order or unit waits"
"""The cause of a row that Kafka has not refused."""
_OLDEST_UNIT = "lpad(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text), 20, '0')"
"""The unit of the oldest transaction that has not ended."""
_LOCKED_MS = 5000
"""How long rows wait behind locked ones, before they are looked at again."""
_ROWS_OVERHEAD = 200
"""Bytes of a row beside key, value and headers."""


Group: TypeAlias = str | int
"""Rows of one group become visible together: it is their unit, or the position of a row alone."""


class WaitingRow(NamedTuple):
    """A row to be sent, without its large columns.

    Attributes:
        unit: rows of the same one become visible together; "": it stands alone.
        size: bytes, about.
        expired: its `timeout_at` has passed.
    """

    position: int
    unit: str
    order_key: str | None
    message_key: bytes | None
    size: int
    expired: bool

    @property
    def group(self) -> Group:
        """See `Group`."""
        return self.unit or self.position

    @property
    def orders_by(self) -> str | bytes | None:
        """The key whose rows keep their order; None: the row has none."""
        return self.message_key if self.order_key is None else self.order_key


class Selection(NamedTuple):
    """Rows to be sent, by position.

    Attributes:
        rows: of whole units; or the first ones of a unit that is longer.
        longer: `WaitingRows.rest` returns the others.
    """

    rows: Sequence[WaitingRow]
    longer: bool = False


class FullRow(NamedTuple):
    """A row with its message, as the database returns it: another program may have written it."""

    position: int
    id: str
    topic: str
    message_key: Any
    message_value: Any
    headers: str
    partition_id: int | None
    timestamp_ms: int | None
    created_at: int
    order_key: str | None


class RefusedRows(Struct, frozen=True):
    """Rows that Kafka refused for one reason.

    Attributes:
        retries_max: they are given up with this refusal; None: never, as waiting can help.
    """

    positions: Sequence[int]
    cause: str
    retries_max: int | None


class Held(NamedTuple):
    """Rows that are not sent now: Kafka refused them, or earlier ones of their order or unit.

    Attributes:
        keys: until when they are held, milliseconds since 1970, by order key.
        rows: how many.
    """

    keys: Mapping[str | bytes, int]
    rows: int


class Purged(NamedTuple):
    """Deleted rows.

    Attributes:
        last: up to which position rows were finished before; None: there were no more.
    """

    deleted: int
    last: int | None


class WaitingRows:
    """The rows of a relay's shards.

    Args:
        shards: their numbers; empty: all rows.
        keep: whether delivered rows stay until `purge`.

    Attributes:
        restored: the same rows, before a relay works on them.
    """

    def __init__(self, dialect: Dialect, shards: Sequence[int] = (), *, keep: bool = True) -> None:
        self._dialect = dialect
        self._keep = keep
        self._of_shards = f" AND shard IN ({', '.join(map(str, shards))})" if shards else ""
        self.restored = RestoredRows(dialect, min(shards, default=0), self._of_shards)

    # --- rows to be sent -----------------------------------------------------------------------

    def floor(self) -> Steps[str]:
        """Return a unit below which no row can appear any more, except one that was held or given
        up; "": unknown."""
        if self._dialect is not POSTGRESQL:
            return ""
        return str((yield Query(f"SELECT {_OLDEST_UNIT}")).rows[0][0])

    def select(
        self,
        count: int,
        visible: Sequence[int] = (),
        floor: str = "",
        put_off: Collection[Group] = (),
    ) -> Steps[Selection]:
        """Return the first rows to be sent by position, at most `count`.

        Args:
            visible: positions of rows that were sent, and cannot be marked yet.
            floor: a unit below which there are none. A search from the beginning reads all rows
                that were sent since the oldest snapshot in use.
            put_off: without these.

        A unit that may continue after them is left out; but if it is the first one, its rows are
        all that is returned.
        """
        # In the order in which transactions began to write: it fits that of keys, and has the rows
        # of a unit beside each other. On SQLite, with one writer at a time, that of positions.
        order = "position" if self._dialect is SQLITE else "unit, position"
        among, values = _among(put_off)
        without = f"AND NOT {among} "
        if floor:
            without += "AND unit >= ? "
            values += (floor,)
        if visible:
            without += f"AND position NOT IN (SELECT n FROM {self._dialect.numbers}) "
            values += (json.dumps(list(visible)),)
        found = yield Query(self._select(f"{without}ORDER BY {order} LIMIT {count}"), values)
        rows = [_waiting(row) for row in found.rows]
        last = rows[-1].unit if len(rows) == count else ""
        if not last:
            return Selection(sorted(rows))
        # On SQLite rows of the unit may come again, before or after those of others.
        end = count - sum(1 for _ in takewhile(lambda row: row.unit == last, reversed(rows)))
        return Selection(sorted(rows[:end] or rows), longer=not end)

    def rest(self, last: WaitingRow, count: int) -> Steps[Sequence[WaitingRow]]:
        """Return the next rows of a unit after one of them, at most `count`."""
        condition, values = f"AND position > {last.position}", tuple[str, ...]()
        if self._dialect is not SQLITE:  # there, no index has the unit
            condition, values = f"{condition} AND unit = ?", (last.unit,)
        # With its other index, MariaDB reads all earlier rows of the unit.
        hint = f" FORCE INDEX ({OUTBOX}_ready)" if self._dialect is MARIADB else ""
        condition = f"{condition} ORDER BY position LIMIT {count}"
        found = yield Query(self._select(condition, hint), values)
        return list(takewhile(lambda row: row.unit == last.unit, map(_waiting, found.rows)))

    def _select(self, condition: str, hint: str = "") -> str:
        return (
            "SELECT position, unit, order_key, message_key, "
            "COALESCE(LENGTH(message_value), 0) + LENGTH(headers), "
            f"CASE WHEN timeout_at <= {self._dialect.now_ms} THEN 1 ELSE 0 END "
            f"FROM {OUTBOX}{hint} WHERE {READY}{self._of_shards} {condition}"
        )

    def fetch(self, positions: Sequence[int]) -> Steps[list[FullRow]]:
        """Return rows with their messages."""
        columns = ", ".join(f"kept.{name}" for name in FullRow._fields)
        found = yield Query(
            f"SELECT {columns} FROM {self._dialect.numbers} CROSS JOIN {OUTBOX} AS kept "
            "WHERE kept.position = numbers.n ORDER BY kept.position",
            (json.dumps(list(positions)),),
        )
        return [FullRow(*row) for row in found.rows]

    # --- their outcomes ------------------------------------------------------------------------

    def mark(self, positions: Iterable[int]) -> Steps[int]:
        """Note that rows are visible, or delete them if they are not kept; return how many were not
        marked before."""
        # Its last refusal is no longer true; the reason of an operator or a check stays.
        of_refusal = f"retries > 0 OR cause = '{_BEHIND}'"
        change = (
            f"state = 'GLOBAL_COMMIT', cause = CASE WHEN {of_refusal} THEN '' ELSE cause END"
            if self._keep
            else ""
        )
        return (yield from self._change_rows(change, "state = 'LOCAL_COMMIT'", positions))

    def ids_waiting(self, positions: Iterable[int]) -> Steps[list[tuple[int, str]]]:
        """Return position and id of those rows that are not marked."""
        found: list[tuple[int, str]] = []
        for piece in _pieces(positions):
            some = yield Query(
                f"SELECT kept.position, kept.id FROM {self._dialect.numbers} CROSS JOIN {OUTBOX} "
                "AS kept WHERE kept.position = numbers.n AND kept.state = 'LOCAL_COMMIT' "
                "ORDER BY kept.position",
                (json.dumps(piece),),
            )
            found += [(int(position), str(id)) for position, id in some.rows]
        return found

    def locked(
        self, positions: Iterable[int], among: Iterable[int] | None = None
    ) -> Steps[set[Group]]:
        """Return the groups that have rows that others have locked.

        Args:
            among: only groups of these rows; None: of all.
        """
        locked: list[int] = []
        for piece in _pieces(positions, _UNITS):
            free = yield from self._free(piece)
            locked += (position for position in piece if position not in free)
        groups = set((yield from self._groups(locked)).values())
        return groups if among is None else groups & set((yield from self._groups(among)).values())

    def _free(self, positions: Sequence[int]) -> Steps[set[int]]:
        """Return those rows that no other transaction has locked; at most `_UNITS`."""
        if not positions:
            return set()
        marks = ", ".join("?" * len(positions))
        select = f"SELECT position FROM {OUTBOX} WHERE position IN ({marks})"
        found = yield Query(self._dialect.lock_free.format(select=select), positions)
        return {int(row[0]) for row in found.rows}

    def _groups(self, positions: Iterable[int]) -> Steps[dict[int, Group]]:
        groups: dict[int, Group] = {}
        for piece in _pieces(positions):
            found = yield Query(
                f"SELECT kept.position, kept.unit FROM {self._dialect.numbers} CROSS JOIN {OUTBOX} "
                "AS kept WHERE kept.position = numbers.n",
                (json.dumps(piece),),
            )
            groups |= {int(position): unit or int(position) for position, unit in found.rows}
        return groups

    def expire(self, positions: Iterable[int]) -> Steps[int]:
        """Give up rows whose `timeout_at` has passed."""
        change = (
            "state = 'MESSAGE_ERROR', "
            "cause = CASE WHEN cause = '' THEN 'not sent before its timeout_at' ELSE cause END"
        )
        return (yield from self._change_rows(change, READY, positions))

    def hold(self, positions: Iterable[int], until_ms: int) -> Steps[int]:
        """Send rows not before a time, milliseconds since 1970."""
        why = f"cause = CASE WHEN cause = '' THEN '{_BEHIND}' ELSE cause END"
        change = f"next_at = {until_ms}, {why}"
        return (yield from self._change_rows(change, READY, positions))

    def refuse(
        self,
        refused: Sequence[RefusedRows],
        positions: Iterable[int],
        pauses_ms: Sequence[int],
    ) -> Steps[None]:
        """Note refusals: each row is sent again after a pause, together with the others of its
        unit, or is given up.

        Args:
            positions: of the delivery, with all rows of its units.
            pauses_ms: by the number of earlier retries; the last one for all further ones.
        """
        now_ms = self._dialect.now_ms
        steps = "".join(
            f"WHEN {retries} THEN {pause_ms} " for retries, pause_ms in enumerate(pauses_ms[:-1])
        )
        pause = f"CASE retries {steps}ELSE {pauses_ms[-1]} END"
        late = f"COALESCE(timeout_at <= {now_ms}, FALSE)"
        units, latest_ms = set[str](), 0
        for each in refused:
            last = late
            if each.retries_max is not None:
                last = f"({late} OR retries + 1 >= {each.retries_max})"
            for begin in range(0, len(each.positions), _UNITS):
                some = each.positions[begin : begin + _UNITS]
                marks = ", ".join("?" * len(some))
                of_rows = f"WHERE position IN ({marks}) AND state = 'LOCAL_COMMIT'"
                # The last assignment first: MariaDB reads what an earlier one has set.
                yield Query(
                    f"UPDATE {OUTBOX} SET "
                    f"state = CASE WHEN {last} THEN 'MESSAGE_ERROR' ELSE state END, "
                    f"next_at = CASE WHEN {last} THEN 0 ELSE {now_ms} + {pause} END, "
                    f"cause = ?, changed_at = {now_ms}, retries = retries + 1 {of_rows}",
                    (each.cause, *some),
                )
                waiting = yield Query(
                    f"SELECT unit, next_at FROM {OUTBOX} {of_rows} AND unit <> ''", some
                )
                for unit, until_ms in waiting.rows:
                    units.add(unit)
                    latest_ms = max(latest_ms, int(until_ms))
        mates = array("q")
        for piece in _pieces(positions if units else ()):
            groups = yield from self._groups(piece)
            mates.extend(position for position, group in groups.items() if group in units)
        # All at one time, also those with different retries: they are sent together.
        yield from self._change_rows(f"next_at = {latest_ms}", "state = 'LOCAL_COMMIT'", mates)

    def due(self, put_off: Collection[Group] = ()) -> Steps[list[int]]:
        """Return the positions of held rows whose time has come, without those put off."""
        among, units = _among(put_off)
        query = f"SELECT position FROM {OUTBOX} WHERE {self._due} AND NOT {among}"
        return [int(row[0]) for row in (yield Query(query, units)).rows]

    def release(self, positions: Iterable[int]) -> Steps[int]:
        """Let held rows be sent."""
        return (yield from self._change_rows("next_at = 0", _LATER, positions))

    @property
    def _due(self) -> str:
        due = f"next_at <= (SELECT {self._dialect.now_ms})"  # one time for all rows of a unit
        if self._dialect is SQLITE:  # whose texts are above all numbers
            due = f"({due} OR next_at >= '')"
        return f"{_LATER} AND {due}{self._of_shards}"

    def held(self, put_off: Collection[Group] = ()) -> Steps[Held]:
        """Return the rows that are held, also those put off."""
        select = "SELECT order_key, message_key, {}, COUNT(*) FROM {} WHERE {} GROUP BY 1, 2".format
        later = select("MAX(next_at)", OUTBOX, f"{_LATER}{self._of_shards}")
        found = list((yield Query(later)).rows)
        if put_off:
            among, units = _among(put_off)
            until = f"{self._dialect.now_ms} + {_LOCKED_MS}"
            locked = select(until, OUTBOX, f"{READY}{self._of_shards} AND {among}")
            found += (yield Query(locked, units)).rows
        keys: dict[str | bytes, int] = {}
        for order_key, message_key, until_ms, _count in found:
            key = message_key if order_key is None else order_key
            if key is not None:
                until_ms = until_ms if isinstance(until_ms, int) else 0  # another program's text
                keys[key] = max(keys.get(key, 0), until_ms)
        return Held(keys, sum(int(row[3]) for row in found))

    def _change_rows(self, change: str, condition: str, positions: Iterable[int]) -> Steps[int]:
        """Change rows by position, or delete them if there is no change."""
        dialect, count = self._dialect, 0
        change = change and f" SET {change}, changed_at = {dialect.now_ms}"
        if dialect is MARIADB:  # a subquery here would be executed for each row of the table
            # A scan, which it takes for small tables, would lock other rows.
            tables = f"{dialect.numbers} STRAIGHT_JOIN {OUTBOX} AS kept FORCE INDEX (PRIMARY)"
            sql = f"UPDATE {tables}{change}" if change else f"DELETE kept FROM {tables}"
            among = "kept.position = numbers.n"
        else:
            sql = f"UPDATE {OUTBOX}{change}" if change else f"DELETE FROM {OUTBOX}"
            among = f"position IN (SELECT n FROM {dialect.numbers})"
        sql += f" WHERE {among} AND {condition}"
        for piece in _pieces(positions):
            count += (yield Query(sql, (json.dumps(piece),))).count
        return count

    def purge(self, keep_s: float, after: int = 0) -> Steps[Purged]:
        """Delete some rows that were finished before, the oldest first, without those that others
        have locked.

        Args:
            after: a position. While a transaction keeps its snapshot, deleted rows are read again.
        """
        done = "state IN ('GLOBAL_COMMIT', 'LOCAL_ROLLBACK')"
        # Young ones are at the end: without them in the condition, few rows are read.
        found = yield Query(
            f"SELECT position, changed_at <= {self._dialect.now_ms} - ? FROM {OUTBOX} "
            f"WHERE {done} AND position > {after} ORDER BY position LIMIT {_UNITS}",
            (round(keep_s * 1000),),
        )
        positions = [int(row[0]) for row in found.rows if row[1]]
        last = positions[-1] if positions else None
        positions = [*(yield from self._free(positions))]
        if not positions:
            return Purged(0, last)
        marks = ", ".join("?" * len(positions))
        sql = f"DELETE FROM {OUTBOX} WHERE position IN ({marks}) AND {done}"
        return Purged((yield Query(sql, positions)).count, last)

    def purge_all(self, keep_s: float) -> Steps[int]:
        """Delete all rows that were finished before, each statement committed; return their
        number."""
        count, found = 0, Purged(0, 0)
        while found.last is not None:
            found = yield from self.purge(keep_s, found.last)
            count += found.deleted
        return count

    # --- counts ----------------------------------------------------------------------------------

    def counts(self) -> Steps[dict[str, tuple[int, float]]]:
        """Return the number of unfinished rows and the age of the oldest one, seconds, by state."""
        found: dict[str, tuple[int, float]] = {}
        for state, condition in _UNFINISHED:  # each has an index
            some = yield Query(
                f"SELECT COUNT(*), ({self._dialect.now_ms} - MIN(created_at)) / 1000.0 "
                f"FROM {OUTBOX} WHERE {condition}"
            )
            count, age_s = some.rows[0]
            before, older_s = found.get(state, (0, 0.0))
            found[state] = before + int(count), max(older_s, float(age_s or 0))
        return {state: figures for state, figures in found.items() if figures[0]}

    def waiting(self) -> Steps[int]:
        """Return the number of rows that wait, of all shards."""
        # One statement: a relay may hold rows meanwhile.
        counts = (f"(SELECT COUNT(*) FROM {OUTBOX} WHERE {each})" for each in (READY, _LATER))
        found = yield Query(f"SELECT {' + '.join(counts)}")
        return int(found.rows[0][0])

    def causes(self, count: int) -> Steps[list[tuple[str, str]]]:
        """Return topic and cause of rows that wait because Kafka refused them."""
        found = yield Query(
            f"SELECT topic, cause FROM {OUTBOX} WHERE state = 'LOCAL_COMMIT' AND retries > 0 "
            f"AND cause <> '' GROUP BY topic, cause LIMIT {count}"
        )
        return [(readable(topic), readable(cause)) for topic, cause in found.rows]


def _waiting(row: Sequence[Any]) -> WaitingRow:
    position, unit, order_key, key, size, expired = row
    size = int(size) + (0 if key is None else len(key)) + _ROWS_OVERHEAD
    return WaitingRow(int(position), unit, order_key, key, size, bool(expired))


def _among(groups: Collection[Group]) -> tuple[str, tuple[str, ...]]:
    """Return the condition of the rows of groups, and its values."""
    units = tuple(group for group in groups if isinstance(group, str))
    alone = [str(group) for group in groups if isinstance(group, int)]
    terms = [f"unit IN ({', '.join('?' * len(units))})"] if units else []
    terms += [f"position IN ({', '.join(alone)})"] if alone else []
    return f"({' OR '.join(terms) or '1 = 0'})", units


def _pieces(positions: Iterable[int], count: int = _PIECE) -> Iterator[list[int]]:
    piece: list[int] = []
    for position in positions:
        piece.append(position)
        if len(piece) == count:
            yield piece
            piece = []
    if piece:
        yield piece
