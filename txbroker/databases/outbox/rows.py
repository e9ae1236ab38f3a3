"""Rows of the outbox as services write them: inserted, decided, replaced; as steps."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from txbroker.contract.json import TARGET_PARTITION_MAX, TIMESTAMP_MS_MAX, headers_to_json
from txbroker.core.records import Decision, Message
from txbroker.databases.barrier import TooLate
from txbroker.databases.dialect import POSTGRESQL, Dialect
from txbroker.databases.outbox.table import (
    GLOBAL_COMMIT,
    LOCAL_COMMIT,
    LOCAL_ROLLBACK,
    MAYBE_UNDECIDED,
    MESSAGE_ERROR,
    OUTBOX,
    SEQUENCE,
    SHARDS_MAX,
    UNKNOWN,
)
from txbroker.databases.steps import Query, Steps
from txbroker.errors import BadRequest, ConfigurationError

MESSAGE_BYTES_MAX = 7 * 2**20
"""The largest message: twice its size, as it is in SQL at worst, fits in a packet of MariaDB's
default `max_allowed_packet`. Kafka's topics take 1 MiB by default."""
_ORDER_KEY_MAX = 1024
_ROWS = 80
"""Rows of one INSERT: SQLite takes 999 values where it is old."""
_PIECE = 500
"""Rows of one other statement."""
_PIECE_BYTES = 2**20
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_topics = lru_cache(maxsize=1024)(_TOPIC.fullmatch)
_encode_json = msgspec.json.Encoder().encode
NO_HEADERS = "[]"
_DEFAULTS = (NO_HEADERS, None, None, None)
"""The defaults of the last fields of `NewRow`."""


class NewRow(NamedTuple):
    """The values of a row, by column."""

    id: str
    topic: str
    message_key: bytes | None
    message_value: bytes | None
    shard: int
    headers: str = NO_HEADERS
    partition_id: int | None = None
    timestamp_ms: int | None = None
    order_key: str | None = None


_ALWAYS = 5
"""Columns of each INSERT; the others are left out where all rows have their default."""


# --- messages as rows ------------------------------------------------------------------------


def new_rows(messages: Sequence[Message], order_key: str | None) -> list[NewRow]:
    """Return messages as rows, with new ids that grow with time.

    Raises:
        BadRequest: a message, or the order key, cannot be stored or delivered.
    """
    if not messages:
        raise BadRequest("there are no messages: give at least one")
    if order_key is not None:
        _check_order_key(order_key)
    now, count = f"{time.time_ns() // 1_000_000:012x}", len(messages)
    # Random bytes for all at once: the call costs more than they do.
    random = os.urandom(10 * count).hex()
    ordered = None if order_key is None else crc32(order_key.encode()) % SHARDS_MAX
    rows = []
    for number, message in enumerate(messages):
        _check(message, number)
        id = now + random[20 * number : 20 * number + 20]
        key = message.key
        shard = ordered
        if shard is None:
            shard = crc32(id.encode() if key is None else key) % SHARDS_MAX
        headers = message.headers
        rows.append(
            NewRow(
                id,
                message.topic,
                key,
                message.value,
                shard,
                _encode_json(headers_to_json(headers)).decode() if headers else NO_HEADERS,
                message.partition,
                message.timestamp_ms,
                order_key,
            )
        )
    return rows


def _check(message: Message, number: int) -> None:
    """Raise BadRequest if a message cannot be delivered."""
    if not isinstance(message, Message):
        raise BadRequest(f"messages[{number}] is a Message of txbroker.relay, not {message!r:.100}")
    check_message(message, f"messages[{number}]: ")
    size = len(message.key or b"") + len(message.value or b"")
    if message.headers:
        size += sum(len(name) + len(value or b"") for name, value in message.headers)
    if size > MESSAGE_BYTES_MAX:
        raise BadRequest(
            f"messages[{number}] has {size:,} bytes, more than {MESSAGE_BYTES_MAX:,}: store the "
            "content elsewhere and send a reference to it"
        )


def check_message(message: Message, where: str = "") -> None:
    """Raise BadRequest if Kafka has no such topic, or its records no such value.

    Args:
        where: begins the error.
    """
    check_topic(message.topic)
    for name, value, largest in (
        ("partition", message.partition, TARGET_PARTITION_MAX),
        ("timestamp_ms", message.timestamp_ms, TIMESTAMP_MS_MAX),
    ):
        if value is not None and not 0 <= value <= largest:
            raise BadRequest(f"{where}{name} is between 0 and {largest}, not {value}: correct it")
    for header, _ in message.headers:
        if not _is_utf8(header):
            raise BadRequest(
                f"{where}the header name {header!r} cannot be written as UTF-8: correct it"
            )


def check_topic(topic: object) -> None:
    """Raise BadRequest if Kafka has no topic of a name."""
    if not isinstance(topic, str) or not _topics(topic) or topic in (".", ".."):
        raise BadRequest(
            "a topic has 1 to 249 letters, digits, '.', '_' and '-', not "
            f"{topic!r:.300}: correct its name"
        )


def _check_order_key(order_key: object) -> None:
    if (
        not isinstance(order_key, str)
        or not 0 < len(order_key) <= _ORDER_KEY_MAX
        or "\0" in order_key
        or not _is_utf8(order_key)
    ):
        raise BadRequest(
            f"order_key is a text of 1 to {_ORDER_KEY_MAX} characters, not {order_key!r:.100}"
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- inserted --------------------------------------------------------------------------------


def insert(
    dialect: Dialect,
    rows: Sequence[NewRow],
    *,
    unit: str = "",
    state: str = LOCAL_COMMIT,
    timeout_ms: int | None = None,
) -> Steps[str]:
    """Insert rows, many with one statement; return their unit, "" on PostgreSQL.

    Args:
        unit: of the transaction; "": a new one. PostgreSQL sets it.
        timeout_ms: until their `timeout_at`.
    """
    unit = unit or (yield from _new_unit(dialect))
    further: tuple[Any, ...] = (unit,) if unit else ()
    if timeout_ms is not None:
        further += (timeout_ms,)
    fields = _used_fields(rows)
    columns = tuple([NewRow._fields[field] for field in fields])
    columns += ("unit",) * bool(unit) + ("timeout_at",) * (timeout_ms is not None)
    values = itemgetter(*fields)
    if dialect is POSTGRESQL and len(rows) > 1:
        for piece in _pieces(rows, _PIECE):
            given = _encode_json([values(row) for row in piece]).decode()
            yield Query(_json_sql(columns, state), [*further, given])
        return unit
    for piece in _pieces(rows, _ROWS):
        sql = _insert_sql(dialect, columns, state, len(piece))
        yield Query(sql, [*chain.from_iterable((*values(row), *further) for row in piece)])
    return unit


def _new_unit(dialect: Dialect) -> Steps[str]:
    """Return a new unit for the rows of a transaction, "" on PostgreSQL, which sets it."""
    if dialect is POSTGRESQL:
        return ""
    if not dialect.unit:
        return os.urandom(16).hex()
    drawn = yield Query(f"SELECT {dialect.unit.format(sequence=SEQUENCE)}")
    return str(drawn.rows[0][0])


def _used_fields(rows: Sequence[NewRow]) -> tuple[int, ...]:
    """Return the fields that differ from the columns' defaults in any row."""
    fields = tuple(range(_ALWAYS))
    for field, default in enumerate(_DEFAULTS, _ALWAYS):
        if any(row[field] != default for row in rows):
            fields += (field,)
    return fields


@lru_cache(maxsize=1024)
def _insert_sql(dialect: Dialect, columns: Sequence[str], state: str, count: int) -> str:
    row = ", ".join(
        f"{dialect.now_ms} + ?" if column == "timeout_at" else "?" for column in columns
    )
    names = ", ".join(columns)
    if state != LOCAL_COMMIT:
        names, row = names + ", state", f"{row}, '{state}'"
    return f"INSERT INTO {OUTBOX} ({names}) VALUES {', '.join([f'({row})'] * count)}"


@lru_cache(maxsize=256)
def _json_sql(columns: Sequence[str], state: str) -> str:
    """Return SQL that inserts rows of JSON: drivers take a tenth of the time of many values."""
    kinds = {"message_key": "decode({}, 'base64')", "message_value": "decode({}, 'base64')"}
    kinds |= dict.fromkeys(("shard", "partition_id", "timestamp_ms"), "CAST({} AS bigint)")
    row = ", ".join(
        f"{POSTGRESQL.now_ms} + ?"
        if column == "timeout_at"
        else kinds.get(column, "{}").format(f"item->>{number}")
        for number, column in enumerate(columns)
    )
    return (
        f"INSERT INTO {OUTBOX} ({', '.join(columns)}, state) SELECT {row}, '{state}' "
        "FROM json_array_elements(CAST(? AS json)) WITH ORDINALITY AS given(item, number) "
        "ORDER BY number"
    )


def _pieces(rows: Sequence[NewRow], most: int) -> Iterator[Sequence[NewRow]]:
    """Divide rows by number and size."""
    if len(rows) == 1:
        yield rows
        return
    begin = size = 0
    for end, row in enumerate(rows):
        more = len(row.message_key or b"") + len(row.message_value or b"") + len(row.headers)
        if end > begin and (end - begin == most or size + more > _PIECE_BYTES):
            yield rows[begin:end]
            begin, size = end, 0
        size += more
    yield rows[begin:]


# --- decided ---------------------------------------------------------------------------------

UNDECIDED = f"(state = '{UNKNOWN}' OR state = '{MESSAGE_ERROR}' AND check_attempts > 0)"


class Prepared(msgspec.Struct, frozen=True):
    """Rows to be decided. As text, `str(prepared)`, it can be stored and given to `decide`.

    Attributes:
        ids: of the rows, in order.
    """

    ids: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(self.ids)

    @classmethod
    def of(cls, given: Prepared | str) -> Prepared:
        """Return prepared rows from their text.

        Raises:
            BadRequest
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given and all(part for part in given.split(",")):
            return cls(tuple(given.split(",")))
        raise BadRequest(f"prepared is what `prepare` returned, or its text, not {given!r:.100}")


_REPLACED = "message_key", "message_value", "headers", "partition_id", "timestamp_ms", "shard"


class _Standing(NamedTuple):
    id: str
    state: str
    topic: str
    order_key: str | None
    check_attempts: int

    @property
    def undecided(self) -> bool:
        given_up = self.state == MESSAGE_ERROR and self.check_attempts > 0
        return self.state == UNKNOWN or given_up


def decide(
    dialect: Dialect,
    prepared: Prepared,
    decision: Decision,
    messages: Sequence[Message] | None = None,
    *,
    unit: str = "",
    cause: str = "",
) -> Steps[str]:
    """Commit or roll back prepared rows, unless they were before. The rows of a commit get new
    positions, so that their order is that of commits; return their unit, "" if they have no new one
    or on PostgreSQL.

    Args:
        messages: replace the prepared ones: the same number, for the same topics.
        unit: of the transaction; "": a new one. PostgreSQL sets it.
        cause: who decides and why, kept in the rows.

    Raises:
        TooLate: they were decided otherwise, or were deleted since.
        BadRequest: the messages do not fit.
        ConfigurationError: the rows contradict each other.
    """
    standing = yield from _lock(dialect, prepared)
    wanted: tuple[str, ...] = (LOCAL_COMMIT, GLOBAL_COMMIT, MESSAGE_ERROR)
    if decision is Decision.ROLLBACK:
        wanted = (LOCAL_ROLLBACK,)
    if not all(row.undecided for row in standing):
        states = sorted({row.state for row in standing})
        if all(not row.undecided and row.state in wanted for row in standing):
            return ""
        if len(states) > 1 and not set(states) <= {LOCAL_COMMIT, GLOBAL_COMMIT, MESSAGE_ERROR}:
            raise ConfigurationError(
                f"the rows of {prepared.ids[0]} are in states {', '.join(states)}: another program "
                "changed some of them. See them with `txbroker outbox show`, and set one state"
            )
        raise TooLate(
            f"the rows of {prepared.ids[0]} are {', '.join(states)}, decided before by this "
            f"service, a check or an operator: {decision.value} is too late. Roll this transaction "
            "back"
        )
    if decision is Decision.ROLLBACK:
        yield from _roll_back(dialect, prepared.ids, cause)
        return ""
    rows = None if messages is None else _replacing(standing, messages)
    unit = unit or (yield from _new_unit(dialect))
    yield from _commit(dialect, prepared.ids, rows, unit, cause)
    return unit


def _lock(dialect: Dialect, prepared: Prepared) -> Steps[list[_Standing]]:
    """Return rows in the order of their ids, locked.

    Raises:
        TooLate: some are missing.
    """
    found: dict[str, _Standing] = {}
    for ids in _divide(prepared.ids):
        result = yield Query(
            f"SELECT {', '.join(_Standing._fields)} FROM {OUTBOX} WHERE id IN ({_marks(ids)}) "
            f"ORDER BY id{dialect.lock}",
            ids,
        )
        found |= {row[0]: _Standing(*row) for row in result.rows}
    missing = [id for id in prepared.ids if id not in found]
    if missing:
        raise TooLate(
            f"row {missing[0]} is not in {OUTBOX}: it was decided and deleted since, or belongs to "
            "another database. Roll this transaction back"
        )
    return [found[id] for id in prepared.ids]


def _replacing(standing: Sequence[_Standing], messages: Sequence[Message]) -> list[NewRow]:
    """Return the rows of final messages.

    Raises:
        BadRequest: they do not fit.
    """
    final = [message.topic if isinstance(message, Message) else "" for message in messages]
    topics = [row.topic for row in standing]
    rows = new_rows(messages, standing[0].order_key)
    if final != topics:
        raise BadRequest(
            f"final messages have the topics {', '.join(topics)} of the prepared ones, in this "
            f"order, not {', '.join(final)}"
        )
    return rows


def _commit(
    dialect: Dialect,
    ids: Sequence[str],
    rows: Sequence[NewRow] | None,
    unit: str,
    cause: str,
) -> Steps[None]:
    now_ms = dialect.now_ms
    position = dialect.next_identity.format(sequence=SEQUENCE, table=OUTBOX)
    change = (
        f"state = '{LOCAL_COMMIT}', position = {position}, next_at = 0, check_attempts = 0, "
        f"cause = ?, changed_at = {now_ms}, unit = "
    )
    values: list[Any] = [cause]
    if unit:
        change += "?"
        values.append(unit)
    else:
        change += dialect.unit
    if rows is not None:
        change += "".join(f", {column} = ?" for column in _REPLACED)
    # One statement each: their order is that of the new positions.
    for number, id in enumerate(ids):
        final: tuple[Any, ...] = ()
        if rows is not None:
            final = tuple(getattr(rows[number], column) for column in _REPLACED)
        if dialect.draw_identity:
            yield Query(dialect.draw_identity.format(table=OUTBOX))
        yield Query(f"UPDATE {OUTBOX} SET {change} WHERE id = ?", (*values, *final, id))


def _roll_back(dialect: Dialect, ids: Sequence[str], cause: str) -> Steps[None]:
    for some in _divide(ids):
        yield Query(
            f"UPDATE {OUTBOX} SET state = '{LOCAL_ROLLBACK}', next_at = 0, check_attempts = 0, "
            f"cause = ?, changed_at = {dialect.now_ms} WHERE id IN ({_marks(some)})",
            (cause, *some),
        )


def confirm(dialect: Dialect, ids: Sequence[str]) -> Steps[int]:
    """Let rows that this transaction has inserted as UNKNOWN be delivered; return their number.

    Their positions and their unit are this transaction's already.
    """
    count = 0
    for some in _divide(ids):
        result = yield Query(
            f"UPDATE {OUTBOX} SET state = '{LOCAL_COMMIT}', changed_at = {dialect.now_ms} "
            f"WHERE id IN ({_marks(some)}) AND state = '{UNKNOWN}'",
            some,
        )
        count += result.count
    return count


def _divide(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(ids), _PIECE):
        yield ids[begin : begin + _PIECE]


def _marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))


def siblings(dialect: Dialect, id: str) -> Steps[Prepared]:
    """Return the undecided rows that were prepared together with an undecided one, in order.

    Raises:
        BadRequest: there is no such row, or it is decided.
    """
    found = yield Query(f"SELECT unit, {UNDECIDED} FROM {OUTBOX} WHERE id = ?", (id,))
    if not found.rows or not found.rows[0][1]:
        raise BadRequest(
            f"row {id} is not undecided: `txbroker outbox list --state {UNKNOWN}` lists those rows"
        )
    unit = found.rows[0][0]
    if not unit:
        return Prepared((id,))
    result = yield Query(
        f"SELECT id FROM {OUTBOX} WHERE unit = ? AND {MAYBE_UNDECIDED} AND {UNDECIDED} "
        "ORDER BY position",
        (unit,),
    )
    return Prepared(tuple(row[0] for row in result.rows))
