"""Steps by which operators read and change an outbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from txbroker.contract.json import MessageError, headers_from_json, message_to_json
from txbroker.core.records import Message
from txbroker.databases.dialect import Dialect
from txbroker.databases.outbox.rows import UNDECIDED, check_message
from txbroker.databases.outbox.table import (
    COLUMNS,
    LOCAL_COMMIT,
    MESSAGE_ERROR,
    NUMBER_MAX,
    NUMBERS,
    OUTBOX,
    SHARDS_MAX,
    STATES,
)
from txbroker.databases.steps import Query, Steps
from txbroker.errors import BadRequest

REFUSED = f"state = '{MESSAGE_ERROR}' AND NOT {UNDECIDED}"
"""Rows that are committed and that Kafka did not take."""
_PIECE = 500
LISTED = (*(name for name in COLUMNS if name not in ("message_value", "headers")), "bytes")
SIZE = "length(message_value)"
WHOLE = tuple(COLUMNS)


class Choice(msgspec.Struct, frozen=True):
    """Conditions of rows; of each that is given, a row meets one.

    Attributes:
        before_ms: created before, milliseconds since 1970.
    """

    ids: Sequence[str] = ()
    states: Sequence[str] = ()
    topics: Sequence[str] = ()
    before_ms: int | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition as SQL, and its values."""
        terms, values = ["1 = 1"], list[Any]()
        for column, given in (("id", self.ids), ("state", self.states), ("topic", self.topics)):
            if given:
                terms.append(f"{column} IN ({', '.join('?' * len(given))})")
                values += given
        if self.before_ms is not None:
            terms.append("created_at < ?")
            values.append(self.before_ms)
        return " AND ".join(terms), values


def find(choice: Choice, limit: int, columns: Sequence[str]) -> Steps[list[dict[str, Any]]]:
    """Return rows by column, the newest first."""
    condition, values = choice.condition()
    result = yield Query(
        f"SELECT {selected(columns)} FROM {OUTBOX} WHERE {condition} "
        f"ORDER BY position DESC LIMIT {limit}",
        values,
    )
    return [dict(zip(columns, row, strict=True)) for row in result.rows]


def selected(columns: Sequence[str]) -> str:
    """Return columns for a SELECT; `bytes` is the size of the value."""
    return ", ".join(f"{SIZE} AS bytes" if name == "bytes" else name for name in columns)


def retry(dialect: Dialect, ids: Sequence[str], cause: str) -> Steps[int]:
    """Let rows that Kafka did not take be delivered again; return their number.

    A `timeout_at` that has passed no longer counts.

    Args:
        ids: of the rows; empty: all.
        cause: who retries and why, kept in the rows.
    """
    count = 0
    now_ms = dialect.now_ms
    change = (
        f"UPDATE {OUTBOX} SET state = '{LOCAL_COMMIT}', retries = 0, next_at = 0, "
        f"timeout_at = CASE WHEN timeout_at <= {now_ms} THEN NULL ELSE timeout_at END, "
        f"cause = ?, changed_at = {now_ms} WHERE {REFUSED}"
    )
    if not ids:
        return (yield Query(change, (cause,))).count
    for begin in range(0, len(ids), _PIECE):
        some = ids[begin : begin + _PIECE]
        marks = ", ".join("?" * len(some))
        count += (yield Query(f"{change} AND id IN ({marks})", (cause, *some))).count
    return count


# --- rows by other programs ------------------------------------------------------------------


def problem_of(row: Mapping[str, Any]) -> str:
    """Return why a row is impossible, and the next step; "" if it is possible.

    The columns' constraints prevent it, unless they were dropped.
    """
    state, shard = row["state"], row["shard"]
    if state not in STATES:
        return (
            f"state {state!r} is none of {', '.join(STATES)}: set one of these with UPDATE {OUTBOX}"
        )
    if row["deliver_at"] is not None:
        return f"deliver_at is reserved: set it to NULL with UPDATE {OUTBOX}"
    if not isinstance(shard, int) or not 0 <= shard < SHARDS_MAX:
        return f"shard {shard!r} is not between 0 and {SHARDS_MAX - 1}: no relay finds the row"
    for name in NUMBERS:
        if not isinstance(row[name], int) or not 0 <= row[name] <= NUMBER_MAX:
            return f"{name} {row[name]!r} is no whole number from 0 to {NUMBER_MAX}: correct it"
    try:
        check_message(to_message(row))
    except (BadRequest, MessageError, TypeError, ValueError) as error:
        return f"no message: {error}"
    return ""


def to_message(row: Mapping[str, Any]) -> Message:
    """Return the message of a row; a row without its value is one without a value.

    Raises:
        ValueError, TypeError: another program has written what no message can be.
    """
    text = row.get("headers", "[]")
    for name in ("id", "topic", "order_key"):
        if isinstance(row[name], str):
            row[name].encode()
    return Message(
        row["topic"],
        _bytes(row["message_key"]),
        _bytes(row.get("message_value")),
        () if text == "[]" else headers_from_json(msgspec.json.decode(text)),
        row["partition_id"],
        row["timestamp_ms"],
    )


def _bytes(value: Any) -> Any:
    """Return bytes that a driver returns as a view, or SQLite as text."""
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON data, with its message as in the HTTP API, and `problem`."""
    data = {name: readable(value) for name, value in row.items() if name not in _OF_MESSAGE}
    try:
        message = message_to_json(to_message(row))
    except (MessageError, TypeError, ValueError):
        message = {"topic": readable(row["topic"]), "headers": readable(row.get("headers"))}
        for name in ("message_key", "message_value"):
            value = _bytes(row.get(name))
            if value is not None:
                message[name.removeprefix("message_")] = readable(str(value))
    if "message_value" not in row:
        message.pop("value", None)
        message.pop("headers", None)
    return {**data, **message, "problem": problem_of(row)}


def readable(value: Any) -> Any:
    """Return a value of a row as JSON can hold it: bytes that are no UTF-8 as escapes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return str(bytes(value))
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_OF_MESSAGE = frozenset(
    ("topic", "message_key", "message_value", "headers", "partition_id", "timestamp_ms")
)
