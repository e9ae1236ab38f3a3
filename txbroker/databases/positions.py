"""Positions of a consumer group: owners of partitions, and done messages, as steps.

A claim raises the partition's token and reads its position in one transaction. An owner that stores
a result compares the token in the same transaction, so that an earlier one stores nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from itertools import groupby, pairwise
from operator import itemgetter

import msgspec
from msgspec import Struct

from txbroker.core.consuming.position import NO_STARTS, LaterPosition, Metadata, Position, Starts
from txbroker.core.records import Partition
from txbroker.databases.dialect import Dialect, Fault, TransactionGone
from txbroker.databases.steps import Query, Steps
from txbroker.databases.tables import ASIDE, DONE, POSITION
from txbroker.errors import ConfigurationError, InvariantBroken

_OF_PARTITION = "group_name = ? AND topic = ? AND partition_id = ?"
_COLUMNS = "token, topic_id, next, done_ranges, later_next, later_ranges"
_KEY = "group_name, topic, partition_id"


class Stored(StrEnum):
    """The outcome of storing a result."""

    NOW = "now"
    BEFORE = "before"
    """An earlier transaction has stored it."""
    FENCED = "fenced"
    """Another owner has taken the partition over."""


class ClaimedPosition(Struct, frozen=True):
    """The stored state that a claim found.

    Attributes:
        next: the offset below which everything is done; -1: no position is stored.
        metadata: with the token of the owner before.
        rows: offsets of done rows, which are in the ranges of the metadata if there is a position.
    """

    next: int
    metadata: Metadata
    rows: Sequence[int]


class Settled(Struct, frozen=True):
    """Messages of one partition that are done, to be stored with their results.

    Attributes:
        offsets: of messages in the topic, ascending.
        kept: offsets of messages that are rows of `txbroker_aside`.
        position: to store in place of done rows: everything below it is done.
        stages: later stages follow: rows are kept for them.
    """

    place: Partition
    token: int
    offsets: Sequence[int]
    kept: Sequence[int] = ()
    position: tuple[int, Metadata] | None = None
    stages: bool = False


class PositionTable:
    """The positions of one group.

    Args:
        group: the consumer group's name.
    """

    def __init__(self, dialect: Dialect, group: str) -> None:
        self._dialect = dialect
        self._group = group

    # --- claim -------------------------------------------------------------------------------

    def claim(
        self, places: Collection[Partition], first_token: int
    ) -> Steps[dict[Partition, ClaimedPosition]]:
        """Take partitions over: from now on their earlier owners store nothing.

        Args:
            first_token: of a partition that never had an owner.
        """
        yield from self._see_newest()
        # Two consumers lock rows in the same order.
        by_topic = [
            (topic, json.dumps([number for _topic, number in group]))
            for topic, group in groupby(sorted(places), key=itemgetter(0))
        ]
        numbers, key = self._dialect.numbers, self._dialect.upsert.format(key=_KEY)
        for topic, partitions in by_topic:
            yield Query(
                f"INSERT INTO {POSITION} ({_KEY}, {_COLUMNS}) "
                f"SELECT ?, ?, numbers.n, ?, '', NULL, '[]', NULL, '[]' "
                f"FROM {numbers} WHERE 1 = 1 ORDER BY numbers.n{key}token = {POSITION}.token + 1",
                (self._group, topic, first_token, partitions),
            )
        found = {}
        for topic, partitions in by_topic:
            claimed = yield self._select_all(POSITION, _COLUMNS, topic, partitions)
            done = yield self._select_all(DONE, "message_offset", topic, partitions)
            rows: dict[int, list[int]] = {}
            for number, offset in done.rows:
                rows.setdefault(int(number), []).append(int(offset))
            for number, *row in claimed.rows:
                try:
                    found[topic, int(number)] = _read_claim(row, sorted(rows.get(int(number), ())))
                except ValueError as error:
                    raise ConfigurationError(
                        f"the row of {topic}-{number} of group {self._group} in {POSITION} cannot "
                        f"be read: another program changed it ({error}): correct it, or set its "
                        "next to NULL, and the partition begins at `start`"
                    ) from error
        return found

    def _select_all(self, table: str, columns: str, topic: str, partitions: str) -> Query:
        return Query(
            f"SELECT partition_id, {columns} FROM {table} CROSS JOIN {self._dialect.numbers} "
            "WHERE group_name = ? AND topic = ? AND partition_id = numbers.n",
            (partitions, self._group, topic),
        )

    def _see_newest(self) -> Steps[None]:
        """Begin a transaction that reads what others have committed while it waited for them."""
        if self._dialect.newest_read:
            yield Query(self._dialect.newest_read)

    def _select(self, columns: str, place: Partition, lock: str = "") -> Query:
        return Query(
            f"SELECT {columns} FROM {POSITION} WHERE {_OF_PARTITION}{lock}", (self._group, *place)
        )

    # --- results -----------------------------------------------------------------------------

    def settle(self, settled: Settled) -> Steps[Stored]:
        """Store that messages are done, in the transaction of their results."""
        if settled.position is not None:
            stored = yield from self._advance(settled)
        elif settled.offsets:
            stored = yield from self._add_rows(settled)
        else:
            stored = (yield from self._compare(settled, self._dialect.lock_shared)) or Stored.NOW
        for offset in settled.kept if stored is Stored.NOW else ():
            change = (
                f"UPDATE {ASIDE} SET stage = 1, due_ms = 0" if settled.stages else _DELETE_ASIDE
            )
            values = (self._group, *settled.place, offset)
            result = yield Query(
                f"{change} WHERE {_OF_PARTITION} AND message_offset = ? AND stage = 0"
                f"{self._dialect.transaction_guard}",
                values,
            )
            if not result.count:
                yield from self._check_within()
                return Stored.BEFORE
        return stored

    def _advance(self, settled: Settled) -> Steps[Stored]:
        assert settled.position is not None
        low, metadata = settled.position
        result = yield Query(
            f"{_ADVANCE}{self._dialect.transaction_guard}",
            (
                *_position_values(low, metadata),
                self._group,
                *settled.place,
                settled.token,
                settled.offsets[0],
            ),
        )
        if result.count:
            return Stored.NOW
        return (yield from self._reason(settled))

    def _add_rows(self, settled: Settled) -> Steps[Stored]:
        try:
            result = yield Query(
                f"INSERT INTO {DONE} ({_KEY}, message_offset) "
                f"SELECT owned.group_name, owned.topic, owned.partition_id, numbers.n "
                f"FROM {POSITION} AS owned CROSS JOIN {self._dialect.numbers} "
                "WHERE owned.group_name = ? AND owned.topic = ? AND owned.partition_id = ? "
                f"AND owned.token = ? AND owned.next <= ?{self._dialect.transaction_guard}"
                f"{self._dialect.lock_shared}",
                (
                    json.dumps(list(settled.offsets)),
                    self._group,
                    *settled.place,
                    settled.token,
                    settled.offsets[0],
                ),
            )
        except Exception as error:
            if self._dialect.fault(error) is Fault.DUPLICATE:
                return Stored.BEFORE
            raise
        if result.count == len(settled.offsets):
            return Stored.NOW
        return (yield from self._reason(settled))

    def _reason(self, settled: Settled) -> Steps[Stored]:
        """Return why nothing was stored."""
        yield from self._check_within()
        reason = yield from self._compare(settled, self._dialect.lock)
        if reason is None:
            topic, number = settled.place
            raise InvariantBroken(
                f"the row of {topic}-{number} in {POSITION} has no position, but its partition is "
                "in use: another program changed it; start the consumer again"
            )
        return reason

    def _check_within(self) -> Steps[None]:
        """Raise TransactionGone if what the handler wrote is not part of this transaction: a
        position would be stored without it."""
        sql = f"SELECT 1 FROM (SELECT 1) AS one WHERE 1 = 1{self._dialect.transaction_guard}"
        if self._dialect.transaction_guard and not (yield Query(sql)).rows:
            raise TransactionGone

    def _compare(self, settled: Settled, lock: str) -> Steps[Stored | None]:
        """Return FENCED if the token is another owner's, BEFORE if the messages are done."""
        result = yield self._select("token, next", settled.place, lock)
        if not result.rows or int(result.rows[0][0]) != settled.token:
            return Stored.FENCED
        passed = settled.offsets and int(result.rows[0][1] or 0) > settled.offsets[0]
        return Stored.BEFORE if passed else None

    def lock(self, place: Partition) -> Steps[None]:
        """Let rounds and claims wait for the end of this transaction."""
        yield self._select("token", place, self._dialect.lock_shared)

    def look(self, settled: Settled) -> Steps[Stored | None]:
        """Return whether results were stored whose commit was not answered; None: they were not.

        Waits for the transaction that was not answered, if it is still open.
        """
        yield from self._see_newest()
        found = yield self._select("token, next", settled.place, self._dialect.lock)
        if not found.rows:  # an operator deleted it
            return Stored.FENCED
        row = found.rows[0]
        if settled.offsets:
            first = settled.offsets[0]
            rows = yield Query(
                f"SELECT 1 FROM {DONE} WHERE {_OF_PARTITION} AND message_offset = ?",
                (self._group, *settled.place, first),
            )
            if int(row[1] or 0) > first or rows.rows:
                return Stored.BEFORE
        elif settled.kept:
            rows = yield Query(
                f"SELECT stage FROM {ASIDE} WHERE {_OF_PARTITION} AND message_offset = ?",
                (self._group, *settled.place, settled.kept[0]),
            )
            if not rows.rows or int(rows.rows[0][0]):
                return Stored.BEFORE
        return None if int(row[0]) == settled.token else Stored.FENCED

    # --- positions ---------------------------------------------------------------------------

    def known(self) -> Steps[bool]:
        """Return whether the group has positions or failed messages here."""
        for table in (POSITION, ASIDE):
            sql = f"SELECT 1 FROM {table} WHERE group_name = ? LIMIT 1"
            if (yield Query(sql, (self._group,))).rows:
                return True
        return False

    def touch(self, place: Partition) -> Steps[None]:
        """Write something, to see whether that is possible."""
        yield Query(
            f"UPDATE {POSITION} SET token = token WHERE {_OF_PARTITION}", (self._group, *place)
        )

    def save(
        self, place: Partition, position: tuple[int, Metadata], rows: Iterable[int], *, lower: bool
    ) -> Steps[bool]:
        """Store a position, and delete done rows that it includes. Return False if another owner
        has taken the partition over: nothing is changed.

        Args:
            position: with this owner's token.
            rows: their offsets.
            lower: it may be lower than the stored one. Otherwise a higher one stays, which a
                handler has stored meanwhile.
        """
        low, token = position[0], position[1].token
        result = yield Query(
            f"UPDATE {POSITION} SET {_SET_POSITION} WHERE {_OF_PARTITION} AND token = ?"
            + ("" if lower else " AND next <= ?"),
            (*_position_values(*position), self._group, *place, token, *(() if lower else (low,))),
        )
        if not result.count:
            # A higher position; or the same one, as MariaDB counts rows that change.
            now = yield self._select("token", place, self._dialect.lock)
            if not now.rows or int(now.rows[0][0]) != token:
                return False
        for first, last in _runs(rows):
            yield Query(
                f"DELETE FROM {DONE} WHERE {_OF_PARTITION} AND message_offset BETWEEN ? AND ?",
                (self._group, *place, first, last),
            )
        return True


_DELETE_ASIDE = f"DELETE FROM {ASIDE}"
_SET_POSITION = "topic_id = ?, next = ?, done_ranges = ?, later_next = ?, later_ranges = ?"
_ADVANCE = (
    f"UPDATE {POSITION} SET {_SET_POSITION} WHERE {_OF_PARTITION} AND token = ? AND next <= ?"
)


def _position_values(low: int, metadata: Metadata) -> tuple[str | int | None, ...]:
    later = metadata.later
    starts = f" {metadata.starts}" if metadata.starts.count else ""
    return (
        f"{metadata.topic_id}{starts}",
        low,
        json.dumps(list(metadata.ranges)),
        None if later is None else later.low,
        "[]" if later is None else json.dumps(list(later.ranges)),
    )


def _read_claim(row: Sequence[object], rows: Sequence[int]) -> ClaimedPosition:
    """Return what a row of the table holds.

    Raises:
        ValueError: no owner has written it so.
    """
    token, topic_id, next_, ranges, later_next, later_ranges = row
    owner_before = _whole(token, 1) - 1
    if next_ is None:
        return ClaimedPosition(
            -1, Metadata(owner_before), rows
        )  # whose position an operator deleted
    low = _whole(next_, 0)
    position = Position(low, _ranges(ranges, low))
    position = position.with_done(position.undone(rows))
    later: LaterPosition | None
    if later_next is not None:
        later_low = _whole(later_next, 0)
        later = LaterPosition(later_low, _ranges(later_ranges, later_low))
        if later_low > low:
            raise ValueError(f"later_next {later_low} is above next {low}")
    else:  # whether later stages followed the done rows is unknown
        later = LaterPosition(low, _ranges(ranges, low)) if rows else None
    topic, _, text = str(topic_id).partition(" ")
    starts = Starts.parse(text) if text else NO_STARTS
    metadata = Metadata(owner_before, topic, 0, tuple(position.ranges()), later, starts)
    return ClaimedPosition(position.low, metadata, rows)


def _whole(value: object, least: int) -> int:
    number = int(str(value))
    if number < least:
        raise ValueError(f"{number} is less than {least}")
    return number


def _ranges(text: object, low: int) -> tuple[tuple[int, int], ...]:
    """Return done ranges, which ascend from above `low` and are apart."""
    found = msgspec.json.decode(str(text), type=tuple[tuple[int, int], ...])
    for (_first, end), (first, after) in pairwise(((low, low), *found)):
        if not end < first < after:
            raise ValueError(f"the range from {first} to {after} does not follow {end}")
    return found


def _runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Return offsets as first and last of adjacent ones."""
    ordered = sorted(set(offsets))
    if not ordered:
        return []
    breaks = [(a, b) for a, b in pairwise(ordered) if b != a + 1]
    firsts = [ordered[0], *(b for _a, b in breaks)]
    lasts = [*(a for a, _b in breaks), ordered[-1]]
    return list(zip(firsts, lasts, strict=True))
