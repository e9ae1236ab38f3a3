"""Values of MariaDB's binary log as JSON holds them, see `changes`.

mysql-replication decodes rows. What it leaves open or gets wrong is put right here: a zero date is
None, a year 0000 is 1900, an empty SET is None, a FLOAT has the digits of a double, fixed-length
binary values lack their trailing zeros, UUID and INET values are bytes.
"""

from __future__ import annotations

import base64
import codecs
import ipaddress
import struct
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from math import ceil
from typing import Any, TypeAlias

from pymysqlreplication.column import Column
from pymysqlreplication.constants import FIELD_TYPE, NONE_SOURCE

from txbroker.errors import ConfigurationError

Converter: TypeAlias = Callable[[Any], Any]
Row: TypeAlias = dict[str, Any]

BYTE_TYPES = {"uuid": 16, "inet6": 16, "inet4": 4}
"""Types that the log does not distinguish from BINARY, by their length."""
_AS_DECODED = frozenset(
    {
        FIELD_TYPE.TINY,
        FIELD_TYPE.SHORT,
        FIELD_TYPE.INT24,
        FIELD_TYPE.LONG,
        FIELD_TYPE.LONGLONG,
        FIELD_TYPE.DOUBLE,
        FIELD_TYPE.ENUM,
        FIELD_TYPE.BIT,
    }
)
_TEXTS = frozenset({FIELD_TYPE.VARCHAR, FIELD_TYPE.STRING, FIELD_TYPE.BLOB})
_WRONG_CHARSETS = ("utf16", "utf32", "ucs2")
"""Python's codecs of these names take another byte order."""
_SECONDS_32 = timedelta(seconds=2**32)


class RowReader:
    """Turns the rows of one version of a table into rows of JSON values.

    Args:
        name: of the table, for messages.
        byte_types: columns of `BYTE_TYPES`.

    Raises:
        ConfigurationError: a column cannot be captured.
    """

    def __init__(self, name: str, columns: list[Column], byte_types: Mapping[str, str]) -> None:
        self._sets: dict[str, Converter] = {}
        self._converters: list[tuple[str, Converter]] = []
        for number, column in enumerate(columns):
            if not column.name:
                raise ConfigurationError(
                    f"the binary log lacks the column names of {name}: set binlog_row_metadata = "
                    "FULL; a capture with another name begins after these changes"
                )
            if column.type == FIELD_TYPE.SET:
                self._sets[column.name] = partial(_set, column.set_values)
                continue
            found = _converter(column, byte_types.get(column.name, ""))
            if found is None:
                raise ConfigurationError(
                    f"column {column.name} of {name} (number {number + 1}) has a type or character "
                    "set that a capture cannot read: change it, or leave the table out of the "
                    "mapping"
                )
            if found is not _same:
                self._converters.append((column.name, found))

    def read(self, row: Row, none_sources: Mapping[str, str]) -> Row:
        """Return a decoded row with JSON values; changes it."""
        for name, convert in self._converters:
            value = row[name]
            if value is not None:
                row[name] = convert(value)
        for name, convert in self._sets.items():
            if row[name] is not None or none_sources.get(name) == NONE_SOURCE.EMPTY_SET:
                row[name] = convert(row[name] or ())
        return row


def _same(value: Any) -> Any:
    return value


def _converter(column: Column, byte_type: str) -> Converter | None:
    """Return how to convert values of a column, None if it cannot be captured."""
    kind = column.type
    if kind in _AS_DECODED:
        return _same
    if kind in _TEXTS:
        return _text_converter(column, byte_type)
    if kind in (FIELD_TYPE.DATETIME2, FIELD_TYPE.TIMESTAMP2, FIELD_TYPE.TIME2):
        return partial(_TIMES[kind], column.fsp)
    return _OTHERS.get(kind)


def _text_converter(column: Column, byte_type: str) -> Converter | None:
    charset = column.character_set_name
    if charset is None or charset.startswith(_WRONG_CHARSETS):
        return None
    if charset != "binary":
        try:
            codecs.lookup(charset)
        except LookupError:
            return None
        return _same
    if column.type != FIELD_TYPE.STRING:
        return _base64
    length = column.max_length
    if byte_type and BYTE_TYPES[byte_type] == length:
        return partial(_uuid if byte_type == "uuid" else _address, length)
    return partial(_fixed, length)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _fixed(length: int, value: bytes) -> str:
    return _base64(value.ljust(length, b"\0"))


def _uuid(length: int, value: bytes) -> str:
    return str(uuid.UUID(bytes=value.ljust(length, b"\0")))


def _address(length: int, value: bytes) -> str:
    return str(ipaddress.ip_address(value.ljust(length, b"\0")))


def _decimal(value: Decimal) -> str:
    return format(value, "f")


def _float(value: float) -> float:
    """Return the float with the fewest digits that is the same in 32 bits."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return float(f"{value:.9g}")


def _year(value: int) -> int:
    return 0 if value == 1900 else value


def _set(values: list[str], chosen: Any) -> str:
    return ",".join(each for each in values if each in chosen)


def _datetime(digits: int, value: datetime) -> str:
    return value.isoformat(timespec=_precision(digits))


def _timestamp(digits: int, value: datetime) -> str:
    if value.year < 1970:  # from 2038 on
        value += _SECONDS_32
    return f"{value.isoformat(timespec=_precision(digits))}+00:00"


def _precision(digits: int) -> str:
    return "seconds" if digits == 0 else "milliseconds" if digits <= 3 else "microseconds"


def _time(digits: int, value: timedelta) -> str:
    total = value // timedelta(microseconds=1)
    if total < 0 and total % 1_000_000:
        # mysql-replication takes the fraction of a negative time with the wrong sign.
        seconds = ceil(-total / 1_000_000)
        total = -((2 * seconds - 1) * 1_000_000 + total)
    seconds, micros = divmod(abs(total), 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    if digits:
        text += f".{micros:06d}"[: 4 if digits <= 3 else 7]
    return f"-{text}" if total < 0 else text


_TIMES: Mapping[int, Callable[[int, Any], str]] = {
    FIELD_TYPE.DATETIME2: _datetime,
    FIELD_TYPE.TIMESTAMP2: _timestamp,
    FIELD_TYPE.TIME2: _time,
}
"""By type; they take the number of digits of a second's fraction, too."""
_OTHERS: Mapping[int, Converter] = {
    FIELD_TYPE.FLOAT: _float,
    FIELD_TYPE.NEWDECIMAL: _decimal,
    FIELD_TYPE.DATE: date.isoformat,
    FIELD_TYPE.YEAR: _year,
    FIELD_TYPE.GEOMETRY: _base64,
}
