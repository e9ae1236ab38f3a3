"""Rows of MariaDB's binary log, with values as JSON holds them, see `changes`.

mysql-replication reads the description of a table. The rows are decoded here: it refuses a whole
event for one value, and takes zero timestamps, empty values and some times for others.
The length of each value is known before the value is decoded, so that a value that cannot be shown
leaves the rest of its event readable.
"""

from __future__ import annotations

import base64
import ipaddress
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from pymysqlreplication.column import Column
from pymysqlreplication.constants import FIELD_TYPE
from pymysqlreplication.row_event import TableMapEvent

from txbroker.relay.capture.maria.charsets import Charsets

Convert: TypeAlias = Callable[[bytes], Any]
"""Returns a value; raises ValueError with the reason why it cannot be shown."""
Row: TypeAlias = dict[str, Any]

BYTE_TYPES = {"uuid": 16, "inet6": 16, "inet4": 4}
"""Types that the log does not distinguish from BINARY, by their length."""
_NUMBERS = {
    FIELD_TYPE.TINY: 1,
    FIELD_TYPE.SHORT: 2,
    FIELD_TYPE.INT24: 3,
    FIELD_TYPE.LONG: 4,
    FIELD_TYPE.LONGLONG: 8,
}
_STRINGS = (FIELD_TYPE.STRING, FIELD_TYPE.VARCHAR, FIELD_TYPE.VAR_STRING)
_OF_CHARSET = frozenset({*_STRINGS, FIELD_TYPE.BLOB, FIELD_TYPE.GEOMETRY})
"""Types whose collation the log has, in the order of the columns."""
_OF_NAMES = frozenset({FIELD_TYPE.ENUM, FIELD_TYPE.SET})
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_GROUP, _GROUP_BYTES = 9, 4
"""Digits of a decimal that are stored together."""
_MICROS = (10**6, 10**4, 10**2, 1)
"""In the unit of a fraction of 0 to 3 bytes."""
_REST_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4)
"""Bytes of fewer digits, by their number."""


class Unreadable(Exception):
    """Rows of a table cannot be decoded; the text has the reason."""


class _Layout(NamedTuple):
    """How a value is stored: with its length in `prefix` bytes before it, or in `width` bytes."""

    prefix: int
    width: int
    convert: Convert


class RowReader:
    """Reads the rows of one version of a table.

    Args:
        byte_types: columns of `BYTE_TYPES`.
    """

    def __init__(
        self, table: TableMapEvent, byte_types: Mapping[str, str], charsets: Charsets
    ) -> None:
        self._fault = ""
        self._columns: list[tuple[str, int, int, Convert]] = []
        columns: Sequence[Column] = table.columns
        self._nulls = (len(columns) + 7) // 8
        of_charset = iter(table.optional_metadata.charset_collation_list)
        of_names = iter(table.optional_metadata.enum_and_set_collation_list)
        for column in columns:
            if not column.name:
                self._fault = (
                    "the binary log lacks the names of its columns: set binlog_row_metadata = FULL"
                )
                return
            collation = 0
            if column.type in _OF_CHARSET or column.type in _OF_NAMES:
                collation = next(of_charset if column.type in _OF_CHARSET else of_names)
            layout = _layout(column, byte_types.get(column.name, ""), collation, charsets)
            if layout is None:
                self._fault = (
                    f"column {column.name} has a type or character set that a capture cannot read"
                )
                return
            self._columns.append((column.name, *layout))

    def rows(self, data: bytes) -> Iterator[tuple[Row, str]]:
        """Yield rows that follow each other, each with the faults of its values.

        Raises:
            Unreadable
        """
        if self._fault:
            raise Unreadable(self._fault)
        at, end = 0, len(data)
        while at < end:
            nulls = int.from_bytes(data[at : at + self._nulls], "little")
            at += self._nulls
            row: Row = {}
            fault = ""
            for name, prefix, width, convert in self._columns:
                if nulls & 1:
                    row[name] = None
                else:
                    if prefix:
                        width = int.from_bytes(data[at : at + prefix], "little")
                        at += prefix
                    if at + width > end:
                        raise Unreadable("their description in the binary log does not fit them")
                    try:
                        row[name] = convert(data[at : at + width])
                    except ValueError as error:
                        row[name] = None
                        fault = f"{fault}; column {name}: {error}".lstrip("; ")
                    at += width
                nulls >>= 1
            yield row, fault


def _layout(column: Column, byte_type: str, collation: int, charsets: Charsets) -> _Layout | None:
    """Return how values of a column are stored, None if it cannot be captured."""
    kind = column.type
    if kind in _NUMBERS:
        read = partial(int.from_bytes, byteorder="little", signed=not column.unsigned)
        return _Layout(0, _NUMBERS[kind], read)
    if kind == FIELD_TYPE.BLOB:
        return _text(column.length_size, 0, collation, charsets)
    if kind in _STRINGS:
        prefix = 1 if column.max_length < 256 else 2
        fixed = column.max_length if kind == FIELD_TYPE.STRING else 0
        if fixed and BYTE_TYPES.get(byte_type) == fixed and charsets.name(collation) == "binary":
            return _Layout(prefix, 0, partial(_convert_padded, fixed, _ADDRESSES[byte_type]))
        return _text(prefix, fixed, collation, charsets)
    if kind in _OF_NAMES:
        return _names(column, charsets.name(collation))
    if kind in _TIMES:
        fraction = (column.fsp + 1) // 2
        width, show = _TIMES[kind]
        return _Layout(0, width + fraction, partial(show, fraction, column.fsp))
    if kind == FIELD_TYPE.NEWDECIMAL:
        return _decimal_layout(column.precision - column.decimals, column.decimals)
    if kind == FIELD_TYPE.BIT:
        return _Layout(0, column.bytes, partial(_bits, column.bits))
    if kind == FIELD_TYPE.GEOMETRY:
        return _Layout(column.length_size, 0, _base64)
    return _OTHERS.get(kind)


# --- text and bytes --------------------------------------------------------------------------


def _text(prefix: int, fixed: int, collation: int, charsets: Charsets) -> _Layout | None:
    decode = charsets.decoder(collation)
    if decode is not None:
        return _Layout(prefix, 0, decode)
    if charsets.name(collation) != "binary":
        return None
    return _Layout(prefix, 0, partial(_convert_padded, fixed, _base64) if fixed else _base64)


def _convert_padded(length: int, convert: Convert, raw: bytes) -> Any:
    """Convert a value of fixed length, of which the log leaves out zeros at the end."""
    return convert(raw.ljust(length, b"\0"))


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _uuid(raw: bytes) -> str:
    return str(uuid.UUID(bytes=raw))


def _inet4(raw: bytes) -> str:
    return str(ipaddress.IPv4Address(raw))


def _inet6(raw: bytes) -> str:
    """Return an address as MariaDB shows it: Python's keeps single zeros and has no dots."""
    words = struct.unpack(">8H", raw)
    begin, length = 0, 0
    for first in range(8):
        run = next((n for n, word in enumerate(words[first:]) if word), 8 - first)
        if run > length:
            begin, length = first, run
    parts = [f"{word:x}" for word in words]
    if begin == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF)):
        parts[6:] = [_inet4(raw[12:])]
    if not length:
        return ":".join(parts)
    return f"{':'.join(parts[:begin])}::{':'.join(parts[begin + length :])}"


def _names(column: Column, charset: str) -> _Layout | None:
    """Return how values with names are stored: as a number, or as a set of bits."""
    names = column.enum_values if column.type == FIELD_TYPE.ENUM else column.set_values
    # mysql-replication takes all names for UTF-8.
    if not charset.startswith("utf8") and not all(map(str.isascii, names)):
        return None
    return _Layout(
        0, column.size, partial(_enum if column.type == FIELD_TYPE.ENUM else _set, names)
    )


def _enum(names: Sequence[str], raw: bytes) -> str:
    number = int.from_bytes(raw, "little")
    if number >= len(names):
        raise ValueError(f"its number {number} has no name")
    return names[number]


def _set(names: Sequence[str], raw: bytes) -> str:
    bits = int.from_bytes(raw, "little")
    if bits >> len(names):
        raise ValueError(f"its bits {bits:b} have no names")
    return ",".join(name for number, name in enumerate(names) if bits >> number & 1)


def _bits(count: int, raw: bytes) -> str:
    return f"{int.from_bytes(raw, 'big'):0{count}b}"


# --- numbers ---------------------------------------------------------------------------------


def shortest(raw: bytes) -> float:
    """Return the number with the fewest digits that is the same in 32 bits."""
    (value,) = struct.unpack("<f", raw)
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == raw:
                return short
        except OverflowError:  # rounded up from the largest
            continue
    return float(f"{value:.9g}")


def _double(raw: bytes) -> float:
    value: float = struct.unpack("<d", raw)[0]
    return value


def _year(raw: bytes) -> int:
    return 1900 + raw[0] if raw[0] else 0


def _decimal_layout(whole: int, fraction: int) -> _Layout:
    groups = [
        whole % _GROUP,
        *[_GROUP] * (whole // _GROUP + fraction // _GROUP),
        fraction % _GROUP,
    ]
    sizes = [
        (digits, _REST_BYTES[digits] if digits < _GROUP else _GROUP_BYTES) for digits in groups
    ]
    return _Layout(0, sum(size for _, size in sizes), partial(_decimal, sizes, fraction))


def _decimal(groups: Sequence[tuple[int, int]], fraction: int, raw: bytes) -> str:
    """Return a decimal with all digits of its fraction."""
    # The first bit is the sign's; those of negative numbers are inverted.
    negative = not raw[0] & 0x80
    bits = int.from_bytes(raw, "big") ^ (1 << (8 * len(raw) - 1))
    if negative:
        bits ^= (1 << 8 * len(raw)) - 1
    raw = bits.to_bytes(len(raw), "big")
    digits, at = "", 0
    for count, size in groups:
        if count:
            digits += f"{int.from_bytes(raw[at : at + size], 'big'):0{count}d}"
            at += size
    whole = digits[: len(digits) - fraction].lstrip("0") or "0"
    text = f"{whole}.{digits[len(digits) - fraction :]}" if fraction else whole
    return f"-{text}" if negative else text


# --- dates and times -------------------------------------------------------------------------


def _date(raw: bytes) -> str | None:
    number = int.from_bytes(raw, "little")
    return _day(number >> 9, number >> 5 & 15, number & 31) if number else None


def _day(year: int, month: int, day: int) -> str:
    return f"{year:04d}-{month:02d}-{day:02d}"


def _datetime(fraction: int, digits: int, raw: bytes) -> str | None:
    number = int.from_bytes(raw[:5], "big") & (1 << 39) - 1
    micros = _micros(fraction, raw[5:])
    if not (number or micros):
        return None
    months = number >> 22
    day = _day(months // 13, months % 13, number >> 17 & 31)
    return f"{day}T{_clock(number >> 12 & 31, number, micros, digits)}"


def _timestamp(fraction: int, digits: int, raw: bytes) -> str | None:
    seconds = int.from_bytes(raw[:4], "big")
    micros = _micros(fraction, raw[4:])
    if not (seconds or micros):
        return None
    days, seconds = divmod(seconds, 86_400)
    number = (seconds // 60 % 60) << 6 | seconds % 60
    day = date.fromordinal(_EPOCH_DAY + days)
    return f"{day.isoformat()}T{_clock(seconds // 3600, number, micros, digits)}+00:00"


def _time(fraction: int, digits: int, raw: bytes) -> str:
    # The number with its fraction is stored above the least one, so that zero is in the middle.
    number = int.from_bytes(raw, "big") - (1 << (8 * len(raw) - 1))
    sign, number = "-" if number < 0 else "", abs(number)
    whole, rest = number >> 8 * fraction, number & (1 << 8 * fraction) - 1
    micros = rest * _MICROS[fraction]
    return f"{sign}{_clock(whole >> 12 & 1023, whole, micros, digits)}"


def _micros(fraction: int, raw: bytes) -> int:
    return int.from_bytes(raw, "big") * _MICROS[fraction]


def _clock(hours: int, number: int, micros: int, digits: int) -> str:
    """Return a time of the day; the lowest bits of `number` are minutes and seconds."""
    text = f"{hours:02d}:{number >> 6 & 63:02d}:{number & 63:02d}"
    return text + f".{micros:06d}"[: 4 if digits <= 3 else 7] if digits else text


_TIMES: Mapping[int, tuple[int, Callable[[int, int, bytes], str | None]]] = {
    FIELD_TYPE.DATETIME2: (5, _datetime),
    FIELD_TYPE.TIMESTAMP2: (4, _timestamp),
    FIELD_TYPE.TIME2: (3, _time),
}
"""By type: bytes without the fraction, and what takes the bytes and the digits of the fraction."""
_ADDRESSES: Mapping[str, Convert] = {"uuid": _uuid, "inet6": _inet6, "inet4": _inet4}
_OTHERS: Mapping[int, _Layout] = {
    FIELD_TYPE.FLOAT: _Layout(0, 4, shortest),
    FIELD_TYPE.DOUBLE: _Layout(0, 8, _double),
    FIELD_TYPE.DATE: _Layout(0, 3, _date),
    FIELD_TYPE.YEAR: _Layout(0, 1, _year),
}
