"""Messages that failed, as rows of `txbroker_aside`, as steps.

| state | meaning |
| --- | --- |
| `retry` | is handled again when it is due |
| `aside` | its key is set aside: the row waits for a release |
| `released` | an operator has released its key |
| `dead` | a dead letter; an operator can send it back |
| `unpublished` | a dead letter that is to go to a topic, too |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from txbroker.core.consuming.copies import (
    Failed,
    MessageSource,
    headers_of,
    make_copy,
    read_left_out,
)
from txbroker.core.records import Header, Record
from txbroker.databases.dialect import MARIADB, Dialect
from txbroker.databases.steps import Query, Steps
from txbroker.databases.tables import ASIDE

RETRY, SET_ASIDE, RELEASED = "retry", "aside", "released"
DEAD, UNPUBLISHED = "dead", "unpublished"

_CHECKED_MIN = 1 << 20
"""To a statement of 16 MB that is too large, MariaDB answers by closing the connection."""
_KEY = "group_name, topic, partition_id, message_offset"
_FIELDS = (
    "stage",
    "step",
    "attempts",
    "due_ms",
    "cause",
    "timestamp_ms",
    "message_key",
    "message_value",
    "headers",
)
_COLUMNS = f"topic, partition_id, message_offset, state, {', '.join(_FIELDS)}"
_OF_PARTITION = "group_name = ? AND topic = ? AND partition_id = ?"
_OF_MESSAGE = f"{_OF_PARTITION} AND message_offset = ?"


class RowTooLarge(Exception):
    """The database would not take a row."""


class Kept(Struct, frozen=True):
    """A message of the table.

    Attributes:
        failed: where it was first read, and its history.
        record: the message.
    """

    state: str
    failed: Failed
    record: Record

    @property
    def copy(self) -> Record:
        """The message with its history in headers, as in a topic, and its first offset."""
        copy = make_copy(self.record, self.failed)
        return structs.replace(copy, offset=self.failed.source.offset)


class KeptTable:
    """The messages of one group."""

    def __init__(self, dialect: Dialect, group: str) -> None:
        self._dialect = dialect
        self._group = group

    # --- by the owner of the partition -------------------------------------------------------

    def keep(self, kept: Kept, *, in_ascii: bool = False) -> Steps[None]:
        """Store a message, over an earlier row of it.

        Args:
            in_ascii: for a database whose encoding lacks characters of the cause.
        """
        failed, record = kept.failed, kept.record
        cause = failed.cause.replace("\0", "\\0")
        if in_ascii:
            cause = cause.encode("ascii", "backslashreplace").decode()
        values = (
            kept.state,
            failed.stage,
            failed.step,
            failed.attempts,
            failed.due_ms,
            cause,
            record.timestamp_ms,
            record.key,
            record.value,
            json.dumps(msgspec.to_builtins(headers_of(record, failed))),
        )
        if self._dialect is MARIADB and len(record.value or b"") > _CHECKED_MIN:
            ((size_max,),) = (yield Query("SELECT @@max_allowed_packet")).rows
            if 2 * _escaped_length(record.value or b"") > size_max:  # the statement has it twice
                raise RowTooLarge(f"the row does not fit into max_allowed_packet, {size_max} bytes")
        columns = ("state", *_FIELDS)
        marks = ", ".join("?" * (5 + len(columns)))
        changes = ", ".join(f"{column} = ?" for column in columns)
        yield Query(
            f"INSERT INTO {ASIDE} ({_KEY}, reason, {', '.join(columns)}) VALUES ({marks})"
            f"{self._dialect.upsert.format(key=_KEY)}{changes}",
            (self._group, *failed.source, "", *values, *values),
        )

    def due(
        self, state: str, topic: str, partitions: Collection[int], now_ms: int, count: int
    ) -> Steps[list[Kept]]:
        """Return up to `count` messages of a state that are due, the oldest first."""
        result = yield Query(
            f"SELECT {_COLUMNS} FROM {ASIDE} CROSS JOIN {self._dialect.numbers} "
            "WHERE group_name = ? AND topic = ? AND state = ? AND partition_id = numbers.n "
            "AND due_ms <= ? ORDER BY due_ms, message_offset LIMIT ?",
            (json.dumps(sorted(partitions)), self._group, topic, state, now_ms, count),
        )
        return [_read_kept(row) for row in result.rows]

    def keys(
        self, topic: str, partitions: Collection[int], state: str
    ) -> Steps[list[tuple[int, bytes | int, int]]]:
        """Return the keys of partitions that have rows of a state, each with its partition and the
        number of rows. A message without a key is alone: its offset stands for the key."""
        result = yield Query(
            "SELECT partition_id, message_key, min(message_offset), count(*) "
            f"FROM {ASIDE} CROSS JOIN {self._dialect.numbers} "
            "WHERE group_name = ? AND topic = ? AND state = ? AND partition_id = numbers.n "
            "GROUP BY partition_id, message_key, "
            "CASE WHEN message_key IS NULL THEN message_offset ELSE -1 END",
            (json.dumps(sorted(partitions)), self._group, topic, state),
        )
        return [
            (int(number), int(offset) if key is None else bytes(key), int(count))
            for number, key, offset, count in result.rows
        ]

    def released(self, topic: str, partitions: Collection[int]) -> Steps[list[int]]:
        """Return the partitions that have released keys."""
        result = yield Query(
            f"SELECT DISTINCT partition_id FROM {ASIDE} CROSS JOIN {self._dialect.numbers} "
            "WHERE group_name = ? AND topic = ? AND state = ? AND partition_id = numbers.n",
            (json.dumps(sorted(partitions)), self._group, topic, RELEASED),
        )
        return [int(row[0]) for row in result.rows]

    def of_key(self, place: tuple[str, int], key: bytes | int, count: int) -> Steps[list[Kept]]:
        """Return the first `count` set-aside messages of a key, in order."""
        what, value = _matches(key)
        result = yield Query(
            f"SELECT {_COLUMNS} FROM {ASIDE} WHERE {_OF_PARTITION} AND state IN (?, ?) AND {what} "
            "ORDER BY message_offset LIMIT ?",
            (self._group, *place, SET_ASIDE, RELEASED, value, count),
        )
        return [_read_kept(row) for row in result.rows]

    def set_aside_again(self, place: tuple[str, int], key: bytes | int) -> Steps[None]:
        """End the release of a key: a message of it failed again."""
        what, value = _matches(key)
        yield Query(
            f"UPDATE {ASIDE} SET state = ? WHERE {_OF_PARTITION} AND state = ? AND {what}",
            (SET_ASIDE, self._group, *place, RELEASED, value),
        )

    def remove(self, source: MessageSource) -> Steps[None]:
        """Delete the row of a message."""
        yield Query(f"DELETE FROM {ASIDE} WHERE {_OF_MESSAGE}", (self._group, *source))

    def published(self, source: MessageSource) -> Steps[None]:
        """A dead letter is in its topic."""
        yield Query(
            f"UPDATE {ASIDE} SET state = ? WHERE {_OF_MESSAGE} AND state = ?",
            (DEAD, self._group, *source, UNPUBLISHED),
        )

    # --- by an operator ----------------------------------------------------------------------

    def list(self, states: Sequence[str], limit: int = -1) -> Steps[list[Kept]]:
        """Return messages in these states; with a limit the newest, by when they came there."""
        states = [*states, *states][:2]
        order = "due_ms DESC" if limit >= 0 else "topic, partition_id, message_offset"
        query = f"SELECT {_COLUMNS} FROM {ASIDE} WHERE group_name = ? AND state IN (?, ?) "
        values: list[Any] = [self._group, *states]
        query += f"ORDER BY {order}"
        if limit >= 0:
            query += " LIMIT ?"
            values.append(limit)
        result = yield Query(query, values)
        return [_read_kept(row) for row in result.rows]

    def release(self, place: tuple[str, int], key: bytes | int, reason: str) -> Steps[int]:
        """Let the owner of the partition handle a set-aside key; return the number of messages."""
        what, value = _matches(key)
        result = yield Query(
            f"UPDATE {ASIDE} SET state = ?, reason = ? WHERE {_OF_PARTITION} AND state = ? "
            f"AND {what}",
            (RELEASED, reason, self._group, *place, SET_ASIDE, value),
        )
        return result.count

    def retry(self, source: MessageSource, reason: str) -> Steps[int]:
        """Send a dead letter back to its handler; return 0 if it is none any more."""
        result = yield Query(
            f"UPDATE {ASIDE} SET state = ?, reason = ?, due_ms = 0, step = -1 "
            f"WHERE {_OF_MESSAGE} AND state IN (?, ?)",
            (RETRY, reason, self._group, *source, DEAD, UNPUBLISHED),
        )
        return result.count


def _matches(key: bytes | int) -> tuple[str, bytes | int]:
    """Return the condition of a key's rows; of a message without a key, alone, of its offset."""
    if isinstance(key, bytes):
        return "message_key = ?", key
    return "message_offset = ?", key


def _escaped_length(value: bytes) -> int:
    return len(value) + sum(map(value.count, (b"\0", b"\n", b"\r", b"\x1a", b"'", b'"', b"\\")))


def _read_kept(row: Sequence[Any]) -> Kept:
    topic, partition, offset, state, *fields = row
    stage, step, attempts, due_ms, cause, timestamp_ms, key, value, headers = fields
    left_out, names = read_left_out(tuple(msgspec.json.decode(headers, type=list[Header])))
    failed = Failed(
        MessageSource(topic, int(partition), int(offset)),
        int(attempts),
        int(due_ms),
        cause,
        int(step),
        int(stage),
        left_out,
    )
    record = Record(
        _bytes(key),
        _bytes(value),
        names,
        timestamp_ms=int(timestamp_ms),
    )
    return Kept(state, failed, record)


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
