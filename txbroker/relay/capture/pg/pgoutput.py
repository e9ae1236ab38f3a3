"""Decoding of pgoutput, the output plugin of PostgreSQL's own logical replication, protocol 1.

Pure: bytes in, events out. Values are decoded as `changes` lists them. The server writes them with
the settings `SESSION`. Of a table that is not wanted, rows are not even looked at.

What PostgreSQL sends, and what not:

- A large column that an update left unchanged is not sent (`Change.unchanged`), except with REPLICA
  IDENTITY FULL, where the old row has it.
- The old row is sent with REPLICA IDENTITY FULL; else the old key, of deletes, and of updates that
  change it.
- After a change of the schema the table is described again, before its next row.
- Generated columns are not sent before PostgreSQL 18; from then on if the publication
  includes them.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from msgspec import Raw, Struct

from txbroker.errors import TxbrokerError
from txbroker.relay.capture.changes import Change

SESSION = (
    "SET client_encoding = 'UTF8'",
    "SET bytea_output = 'hex'",
    "SET datestyle = 'ISO'",
    "SET intervalstyle = 'iso_8601'",
    "SET timezone = 'UTC'",
    "SET extra_float_digits = 3",
)
"""Statements before START_REPLICATION: values depend on nothing else."""
_EPOCH_MS = 946_684_800_000
"""2000-01-01, where PostgreSQL's clock begins."""
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_KEY, _NEW, _OLD = b"KNO"
_BEGIN, _COMMIT = struct.Struct(">QqI"), struct.Struct(">BQQq")
_MESSAGE, _TRUNCATE = struct.Struct(">BQ"), struct.Struct(">IB")
_COLUMN = struct.Struct(">Ii")


class PgoutputError(TxbrokerError):
    """The server sent what pgoutput does not send: update txbroker, or report the message."""


class Begin(Struct, frozen=True, gc=False):
    """The changes of a committed transaction follow.

    Attributes:
        lsn: where its commit begins in the WAL.
        time_ms: of the commit.
        xid: its id, 32 bits.
    """

    lsn: int
    time_ms: int
    xid: int


class Commit(Struct, frozen=True, gc=False):
    """The transaction is complete.

    Attributes:
        end_lsn: where its commit ends in the WAL: what follows belongs to others.
    """

    end_lsn: int


class LogicalMessage(Struct, frozen=True, gc=False):
    """What `pg_logical_emit_message` wrote.

    Attributes:
        transactional: whether it belongs to the transaction; otherwise it is sent even if that was
            rolled back.
        lsn: where it is in the WAL.
    """

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


Event: TypeAlias = Begin | Commit | LogicalMessage | Change | tuple[Change, ...]
"""A tuple is a TRUNCATE of these tables."""


def lsn_text(lsn: int) -> str:
    """Return a position in the WAL as PostgreSQL writes it: `0/16B3748`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the position that a text is.

    Raises:
        ValueError: it is none.
    """
    high, separator, low = text.partition("/")
    if not separator:
        raise ValueError(f"{text!r} is no LSN such as 0/16B3748")
    return (int(high, 16) << 32) | int(low, 16)


# --- values ----------------------------------------------------------------------------------


def _float(data: bytes) -> float | str:
    number = float(data)
    return number if number - number == 0 else data.decode()


def _bool(data: bytes) -> bool:
    if data not in (b"t", b"f"):
        raise ValueError("a boolean is t or f")
    return data == b"t"


def _bytea(data: bytes) -> str:
    if data[:2] != b"\\x":
        raise ValueError("a bytea is not in hex")
    return b64encode(bytes.fromhex(data[2:].decode("ascii"))).decode()


def _timestamp(data: bytes) -> str:
    """Turn `2026-11-27 00:57:50.123+00` to ISO 8601, which has neither infinity nor BC."""
    text = data.decode()
    if text[-1] == "C":
        return text
    text = text.replace(" ", "T", 1)
    return f"{text}:00" if text[-3] in "+-" and "T" in text else text


_INT, _FLOAT, _TIMESTAMP = (20, 21, 23, 26), (700, 701), (1114, 1184)
_JSON, _BOOL, _BYTEA = (114, 3802), 16, 17
_CONVERTERS: Mapping[int, Callable[[bytes], Any]] = {
    **dict.fromkeys(_INT, int),
    **dict.fromkeys(_FLOAT, _float),
    **dict.fromkeys(_TIMESTAMP, _timestamp),
    **dict.fromkeys(_JSON, Raw),
    _BOOL: _bool,
    _BYTEA: _bytea,
}
"""By the type's OID; others are text."""


# --- messages --------------------------------------------------------------------------------


class Relation(NamedTuple):
    """A table as rows are decoded.

    Attributes:
        columns: names, with the function for values.
        key: columns of the replica identity.
        wanted: whether its rows are decoded.
    """

    schema: str
    table: str
    columns: Sequence[tuple[str, Callable[[bytes], Any]]]
    key: Sequence[str]
    wanted: bool


class Decoder:
    """Decodes the messages of one stream, in order.

    Args:
        tables: schemas and names of the tables that are wanted.

    Attributes:
        relations: the tables that the stream has described, by OID.
    """

    def __init__(self, tables: Collection[tuple[str, str]]) -> None:
        self.relations: dict[int, Relation] = {}
        self._tables = frozenset(tables)

    def decode(self, data: bytes, at: int = 0) -> Event | None:
        """Decode a message; return None if nothing follows from it.

        Args:
            at: where it begins in `data`.

        Raises:
            PgoutputError: it is malformed.
        """
        try:
            kind = data[at]
            if kind == 73:  # I
                relation = self.relations[int.from_bytes(data[at + 1 : at + 5], "big")]
                return self._insert(relation, data, at + 5) if relation.wanted else None
            return _DECODERS[kind](self, data, at + 1)
        except (LookupError, ValueError, struct.error) as error:
            raise _malformed(data, at, error) from error

    def _insert(self, relation: Relation, data: bytes, at: int) -> Change:
        _expect(data[at] == _NEW, "a new row")
        row, unchanged, at = _row(relation, data, at + 1)
        _expect(at == len(data), "its end")
        return Change(relation.schema, relation.table, "insert", None, row, None, unchanged)

    def _update(self, data: bytes, at: int) -> Change | None:
        relation = self.relations[int.from_bytes(data[at : at + 4], "big")]
        if not relation.wanted:
            return None
        at += 4
        before = key = None
        if data[at] in (_KEY, _OLD):
            before, key, at = _old(relation, data, at)
        _expect(data[at] == _NEW, "a new row")
        row, unchanged, at = _row(relation, data, at + 1)
        _expect(at == len(data), "its end")
        if unchanged and before is not None:
            # In the order of the columns.
            row = {name: row.get(name, before[name]) for name in before}
            unchanged = ()
        return Change(relation.schema, relation.table, "update", before, row, key, unchanged)

    def _delete(self, data: bytes, at: int) -> Change | None:
        relation = self.relations[int.from_bytes(data[at : at + 4], "big")]
        if not relation.wanted:
            return None
        _expect(data[at + 4] in (_KEY, _OLD), "an old row")
        before, key, at = _old(relation, data, at + 4)
        _expect(at == len(data), "its end")
        return Change(relation.schema, relation.table, "delete", before, None, key)

    def _truncate(self, data: bytes, at: int) -> tuple[Change, ...]:
        count, _options = _TRUNCATE.unpack_from(data, at)
        at += _TRUNCATE.size
        _expect(at + 4 * count == len(data), "its end")
        oids = struct.unpack_from(f">{count}I", data, at)
        tables = [self.relations[oid] for oid in oids]
        return tuple(
            Change(relation.schema, relation.table, "truncate")
            for relation in tables
            if relation.wanted
        )

    def _relation(self, data: bytes, at: int) -> None:
        oid = int.from_bytes(data[at : at + 4], "big")
        schema, at = _text(data, at + 4)
        table, at = _text(data, at)
        count = int.from_bytes(data[at + 1 : at + 3], "big")
        at += 3
        columns, key = [], []
        for _ in range(count):
            in_key = data[at] & 1
            name, at = _text(data, at + 1)
            type_oid, _modifier = _COLUMN.unpack_from(data, at)
            at += _COLUMN.size
            columns.append((name, _CONVERTERS.get(type_oid, bytes.decode)))
            if in_key:
                key.append(name)
        _expect(at == len(data), "its end")
        schema = schema or "pg_catalog"
        wanted = (schema, table) in self._tables
        self.relations[oid] = Relation(schema, table, columns, key, wanted)

    def _begin(self, data: bytes, at: int) -> Begin:
        _expect(at + _BEGIN.size == len(data), "its end")
        lsn, time_us, xid = _BEGIN.unpack_from(data, at)
        return Begin(lsn, _EPOCH_MS + time_us // 1000, xid)

    def _commit(self, data: bytes, at: int) -> Commit:
        _expect(at + _COMMIT.size == len(data), "its end")
        _flags, _lsn, end_lsn, _time_us = _COMMIT.unpack_from(data, at)
        return Commit(end_lsn)

    def _message(self, data: bytes, at: int) -> LogicalMessage:
        flags, lsn = _MESSAGE.unpack_from(data, at)
        prefix, at = _text(data, at + _MESSAGE.size)
        size = int.from_bytes(data[at : at + 4], "big")
        _expect(at + 4 + size == len(data), "its end")
        return LogicalMessage(bool(flags & 1), lsn, prefix, data[at + 4 :])

    def _nothing(self, _data: bytes, _at: int) -> None:
        """Pass over a type or an origin: values of other types are text."""


_DECODERS: Mapping[int, Callable[[Decoder, bytes, int], Event | None]] = {
    ord("B"): Decoder._begin,
    ord("C"): Decoder._commit,
    ord("D"): Decoder._delete,
    ord("M"): Decoder._message,
    ord("O"): Decoder._nothing,
    ord("R"): Decoder._relation,
    ord("T"): Decoder._truncate,
    ord("U"): Decoder._update,
    ord("Y"): Decoder._nothing,
}


def _row(relation: Relation, data: bytes, at: int) -> tuple[dict[str, Any], tuple[str, ...], int]:
    """Return the values that begin there, the columns that were not sent, and the end."""
    columns = relation.columns
    _expect(data[at] << 8 | data[at + 1] == len(columns), "the columns of its table")
    at += 2
    row: dict[str, Any] = {}
    unchanged: tuple[str, ...] = ()
    for name, convert in columns:
        kind = data[at]
        if kind == _TEXT:
            start = at + 5
            at = start + int.from_bytes(data[at + 1 : start], "big")
            row[name] = convert(data[start:at])
        elif kind == _NULL:
            row[name] = None
            at += 1
        else:
            _expect(kind == _UNCHANGED, "values as text")
            unchanged = (*unchanged, name)
            at += 1
    return row, unchanged, at


def _old(
    relation: Relation, data: bytes, at: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, int]:
    """Return the old row or the old key that begins there, and its end."""
    row, unchanged, end = _row(relation, data, at + 1)
    _expect(not unchanged, "an old row whole")
    if data[at] == _OLD:
        return row, None, end
    return None, {name: row[name] for name in relation.key}, end


def _text(data: bytes, at: int) -> tuple[str, int]:
    """Return the text that ends with a zero byte, and where it ends."""
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


def _expect(met: bool, what: str) -> None:
    if not met:
        raise ValueError(f"expected {what}")


def _malformed(data: bytes, at: int, error: Exception) -> PgoutputError:
    kind = chr(data[at]) if at < len(data) else ""
    cause = f"unknown {error}" if isinstance(error, LookupError) else str(error)
    return PgoutputError(
        f"a message {kind!r} of {len(data) - at} bytes from pgoutput is malformed: {cause}: check "
        "that the server is PostgreSQL 14 or newer; if it is, report it with the server's version"
    )
