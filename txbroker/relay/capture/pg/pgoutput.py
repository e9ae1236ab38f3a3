"""Decoding of pgoutput, the output plugin of PostgreSQL's own logical replication, protocol 1.

Pure: bytes in, events out. Values are decoded as `changes` lists them. The server writes them with
the settings `SESSION`. Of a table that is not wanted, rows are not even looked at.

What PostgreSQL sends, and what not:

- A large column that an update left unchanged is not sent (`Change.unchanged`), except with REPLICA
  IDENTITY FULL, where the old row has it.
- The old row is sent with REPLICA IDENTITY FULL; else the old key, of deletes, and of updates that
  change it or have a large value in it.
- Of a partition, the table that has it is described first, then the partition, each after the types
  of its columns that are not built in; the identity of the table decides whether an old row counts
  as one.
- After a change of the schema the table is described again, before its next row.
- Generated columns are not sent before PostgreSQL 18; from then on if the publication
  includes them.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from msgspec import Raw, Struct, structs

from txbroker.errors import TxbrokerError
from txbroker.relay.capture.changes import Change

SESSION = (
    "SET client_encoding = 'UTF8'",
    "SET bytea_output = 'hex'",
    "SET datestyle = 'ISO'",
    "SET intervalstyle = 'iso_8601'",
    "SET timezone = 'UTC'",
    "SET extra_float_digits = 3",
    "SET lc_monetary = 'C'",
    "SET search_path = ''",
    "SET quote_all_identifiers = off",
)
"""Statements before START_REPLICATION: values depend on nothing else."""
_EPOCH_MS = 946_684_800_000
"""2000-01-01, where PostgreSQL's clock begins."""
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_KEY, _NEW, _OLD = b"KNO"
(_FULL,) = b"f"
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


class TableDescribed(Struct, frozen=True, gc=False):
    """A wanted table is described, before its next row.

    Attributes:
        identity: of its rows.
    """

    schema: str
    table: str
    identity: ReplicaIdentity


class CommitMessage(Struct, frozen=True, gc=False):
    """The transaction is complete.

    Attributes:
        end_lsn: where its commit ends in the WAL: what follows belongs to others.
    """

    end_lsn: int


class ReplicaIdentity(NamedTuple):
    """The replica identity of a table: which columns of the old row its changes have.

    Attributes:
        full: all.
        columns: of its key otherwise; of all partitions.
        mixed: pgoutput passes old rows of partitions off as whole that are not.
    """

    full: bool
    columns: frozenset[str]
    mixed: bool = False

    def of_partition(self, partition: ReplicaIdentity) -> ReplicaIdentity:
        """Return what changes of the table have, if they may be of this partition, too."""
        return ReplicaIdentity(
            self.full and partition.full,
            self.columns & partition.columns,
            self.mixed or (self.full and not partition.full),
        )


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


Event: TypeAlias = (
    Begin | CommitMessage | TableDescribed | LogicalMessage | Change | tuple[Change, ...]
)
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

Convert: TypeAlias = Callable[[bytes], Any]
"""Returns a value; raises ValueError with the reason why it cannot be shown."""


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


def _money(digits: int, data: bytes) -> str:
    """Turn `-$1,234.56`, which is whole hundredths with lc_monetary C, to a decimal."""
    text = data.decode("ascii")
    number = "".join(each for each in text if each.isdigit())
    sign = "-" if "-" in text or "(" in text else ""
    if not digits:
        return f"{sign}{int(number)}"
    padded = number.zfill(digits + 1)
    return f"{sign}{int(padded[:-digits])}.{padded[-digits:]}"


def _timestamp(data: bytes) -> str:
    """Turn `2026-11-27 00:57:50.123+00` to ISO 8601, as PostgreSQL's JSON has it, too: which has
    neither infinity nor BC."""
    text, bc, _ = data.decode().partition(" BC")
    text = text.replace(" ", "T", 1)
    return f"{text}:00{bc}" if text[-3] in "+-" else f"{text}{bc}"


_INT, _FLOAT, _TIMESTAMP = (20, 21, 23, 26), (700, 701), (1114, 1184, 1266)
_JSON, _BOOL, _BYTEA, _MONEY = (114, 3802), 16, 17, 790
_CONVERTERS: Mapping[int, Convert] = {
    **dict.fromkeys(_INT, int),
    **dict.fromkeys(_FLOAT, _float),
    **dict.fromkeys(_TIMESTAMP, _timestamp),
    **dict.fromkeys(_JSON, Raw),
    _BOOL: _bool,
    _BYTEA: _bytea,
}
"""By the type's OID; others are text."""


def converters(money_digits: int) -> Mapping[int, Convert]:
    """Return functions for values by the type's OID; others are text.

    Args:
        money_digits: how many digits a `money` has after the point.
    """
    return {**_CONVERTERS, _MONEY: partial(_money, money_digits)}


# --- messages --------------------------------------------------------------------------------


class Relation(NamedTuple):
    """A table as rows are decoded.

    Attributes:
        schema, table: its names in the mapping, also while it has others.
        columns: names, with the function for values.
        key: columns of the replica identity.
        wanted: whether its rows are decoded.
    """

    schema: str
    table: str
    columns: Sequence[tuple[str, Convert]]
    key: Sequence[str]
    wanted: bool


class Decoder:
    """Decodes the messages of one stream, in order.

    Args:
        tables: schemas and names of the tables that are wanted.
        oids: of those that are known: a table that is renamed stays the same.
        partitioned: those that have partitions.
        money_digits: how many digits a `money` has after the point.

    Attributes:
        relations: the tables that the stream has described, by OID.
        partitions: OIDs of partitions with rows that it has described, each with its table.
    """

    def __init__(
        self,
        tables: Collection[tuple[str, str]],
        oids: Mapping[int, tuple[str, str]] = {},
        partitioned: Collection[tuple[str, str]] = (),
        money_digits: int = 2,
    ) -> None:
        self.relations: dict[int, Relation] = {}
        self.partitions: dict[int, tuple[str, str]] = {}
        self._tables = frozenset(tables)
        self._oids = oids
        self._partitioned = frozenset(partitioned)
        self._converters = converters(money_digits)
        self._parent: TableDescribed | None = None
        """The partitioned table that was described last: its partition may follow."""

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
                self._parent = None
                relation = self.relations[int.from_bytes(data[at + 1 : at + 5], "big")]
                return self._insert(relation, data, at + 5) if relation.wanted else None
            if kind not in b"RY":
                self._parent = None
            return _DECODERS[kind](self, data, at + 1)
        except (LookupError, ValueError, struct.error) as error:
            raise _error_of(data, at, error) from error

    def skip(self, data: bytes, at: int) -> None:
        """Pass over a message that describes no table."""
        if data[at : at + 1] != b"Y":
            self._parent = None

    def _insert(self, relation: Relation, data: bytes, at: int) -> Change:
        _expect(data[at] == _NEW, "a new row")
        row, unchanged, fault, at = _row(relation, data, at + 1)
        _expect(at == len(data), "its end")
        return Change(relation.schema, relation.table, "insert", None, row, None, unchanged, fault)

    def _update(self, data: bytes, at: int) -> Change | None:
        relation = self.relations[int.from_bytes(data[at : at + 4], "big")]
        if not relation.wanted:
            return None
        at += 4
        before = key = None
        old_fault = ""
        if data[at] in (_KEY, _OLD):
            before, key, old_fault, at = _old(relation, data, at)
        _expect(data[at] == _NEW, "a new row")
        row, unchanged, fault, at = _row(relation, data, at + 1)
        _expect(at == len(data), "its end")
        if unchanged and (old := before or key) is not None:
            both = {**old, **row}  # in the order of the columns
            row = {name: both[name] for name, _ in relation.columns if name in both}
            unchanged = tuple(name for name in unchanged if name not in old)
        fault = old_fault or fault
        return Change(relation.schema, relation.table, "update", before, row, key, unchanged, fault)

    def _delete(self, data: bytes, at: int) -> Change | None:
        relation = self.relations[int.from_bytes(data[at : at + 4], "big")]
        if not relation.wanted:
            return None
        _expect(data[at + 4] in (_KEY, _OLD), "an old row")
        before, key, fault, at = _old(relation, data, at + 4)
        _expect(at == len(data), "its end")
        return Change(relation.schema, relation.table, "delete", before, None, key, (), fault)

    def _truncate(self, data: bytes, at: int) -> tuple[Change, ...]:
        count, _options = _TRUNCATE.unpack_from(data, at)
        at += _TRUNCATE.size
        _expect(at + 4 * count == len(data), "its end")
        oids = struct.unpack_from(f">{count}I", data, at)
        tables = [self.relations[oid] for oid in oids]
        for oid in oids:  # another published table, described after a partitioned one
            self.partitions.pop(oid, None)
        return tuple(
            Change(relation.schema, relation.table, "truncate")
            for relation in tables
            if relation.wanted
        )

    def _relation(self, data: bytes, at: int) -> TableDescribed | None:
        oid = int.from_bytes(data[at : at + 4], "big")
        schema, at = _text(data, at + 4)
        table, at = _text(data, at)
        full = data[at] == _FULL
        count = int.from_bytes(data[at + 1 : at + 3], "big")
        at += 3
        columns: list[tuple[str, Convert]] = []
        key: list[str] = []
        for _ in range(count):
            in_key = data[at] & 1
            name, at = _text(data, at + 1)
            type_oid, _modifier = _COLUMN.unpack_from(data, at)
            at += _COLUMN.size
            columns.append((name, self._converters.get(type_oid, bytes.decode)))
            if in_key:
                key.append(name)
        _expect(at == len(data), "its end")
        place = self._oids.get(oid, (schema or "pg_catalog", table))
        wanted = place in self._tables
        self.relations[oid] = Relation(*place, columns, key, wanted)
        found = ReplicaIdentity(full, frozenset(key))
        parent, self._parent = self._parent, None
        if wanted:
            described = TableDescribed(*place, found)
            self._parent = described if place in self._partitioned else None
            return described
        if parent is not None:  # the partition whose rows follow
            self.partitions[oid] = parent.schema, parent.table
            return structs.replace(parent, identity=parent.identity.of_partition(found))
        return None

    def _begin(self, data: bytes, at: int) -> Begin:
        _expect(at + _BEGIN.size == len(data), "its end")
        lsn, time_us, xid = _BEGIN.unpack_from(data, at)
        return Begin(lsn, _EPOCH_MS + time_us // 1000, xid)

    def _commit(self, data: bytes, at: int) -> CommitMessage:
        _expect(at + _COMMIT.size == len(data), "its end")
        _flags, _lsn, end_lsn, _time_us = _COMMIT.unpack_from(data, at)
        return CommitMessage(end_lsn)

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


def _row(
    relation: Relation, data: bytes, at: int
) -> tuple[dict[str, Any], tuple[str, ...], str, int]:
    """Return the values that begin there, the columns that were not sent, which value cannot be
    shown, and the end."""
    columns = relation.columns
    _expect(data[at] << 8 | data[at + 1] == len(columns), "the columns of its table")
    at += 2
    row: dict[str, Any] = {}
    unchanged: tuple[str, ...] = ()
    fault = ""
    for name, convert in columns:
        kind = data[at]
        if kind == _TEXT:
            start = at + 5
            at = start + int.from_bytes(data[at + 1 : start], "big")
            try:
                row[name] = convert(data[start:at])
            except (LookupError, ValueError) as error:
                row[name] = None
                _expect(at <= len(data), "its end")
                fault = fault or f"column {name}: {_reason(error)}"
        elif kind == _NULL:
            row[name] = None
            at += 1
        else:
            _expect(kind == _UNCHANGED, "values as text")
            unchanged = (*unchanged, name)
            at += 1
    return row, unchanged, fault, at


def _reason(error: Exception) -> str:
    """Return why a value cannot be shown, without the value."""
    return (
        "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).partition(":")[0]
    )


def _old(
    relation: Relation, data: bytes, at: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, str, int]:
    """Return the old row or the old key that begins there, which value of it cannot be shown, and
    its end."""
    row, unchanged, fault, end = _row(relation, data, at + 1)
    _expect(not unchanged, "an old row whole")
    if data[at] == _OLD:
        return row, None, fault, end
    return None, {name: row[name] for name in relation.key}, fault, end


def _text(data: bytes, at: int) -> tuple[str, int]:
    """Return the text that ends with a zero byte, and where it ends."""
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


def _expect(met: bool, what: str) -> None:
    if not met:
        raise ValueError(f"expected {what}")


def _error_of(data: bytes, at: int, error: Exception) -> PgoutputError:
    kind = chr(data[at]) if at < len(data) else ""
    cause = f"unknown {error}" if isinstance(error, LookupError) else str(error)
    return PgoutputError(
        f"a message {kind!r} of {len(data) - at} bytes from pgoutput is malformed: {cause}: check "
        "that the server is PostgreSQL 14 or newer; if it is, report it with the server's version"
    )
