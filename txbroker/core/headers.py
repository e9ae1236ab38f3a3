"""Headers of records as Kafka holds them: encoded once where a record is made, decoded where
somebody looks at them, which for what this proxy writes itself is nearly never.

The bytes are those of the record format (`kafka/batch.py`): their number, then name and value of
each behind its length. What is known of many records alike is encoded once and joined.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias, overload

from msgspec import Struct

Header: TypeAlias = tuple[str, bytes | None]
"""A record header: its name and its bytes. Order and repeats are kept."""
_NAME_BYTES_MAX, _NAMES_MAX = 64, 1024


def varint(number: int) -> bytes:
    """Return a number as records hold it: its sign in the lowest bit, seven bits a byte."""
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    encoded = bytearray()
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


SMALL = tuple(map(varint, range(1 << 13)))
"""Numbers as records hold them, by number."""
NULL = varint(-1)
"""The length of what is None."""


class _Names(dict[str, bytes]):
    """Names of headers with their lengths in front, as records hold them. Remembers some."""

    def __missing__(self, name: str) -> bytes:
        plain = name.encode()
        encoded = varint(len(plain)) + plain
        if len(encoded) <= _NAME_BYTES_MAX:
            if len(self) >= _NAMES_MAX:
                self.clear()
            self[name] = encoded
        return encoded


_names = _Names()


def encode_field(name: str, value: bytes) -> bytes:
    """Return one header, without the number of all in front."""
    n = len(value)
    return _names[name] + (SMALL[n] if n < len(SMALL) else varint(n)) + value


def encode_fields(headers: Iterable[Header]) -> bytes:
    """Return headers one after another, without their number in front."""
    small, bound, names = SMALL, len(SMALL), _names
    fields: list[bytes] = []
    for name, value in headers:
        if value is None:
            fields += names[name], NULL
        else:
            n = len(value)
            fields += names[name], small[n] if n < bound else varint(n), value
    return b"".join(fields)


class Encoded(Struct, frozen=True, eq=False, gc=False):
    """Encoded headers of one record; to a reader the sequence of their names and values.

    Attributes:
        data: their number and the headers, as they stand in the record.
    """

    data: bytes

    def __iter__(self) -> Iterator[Header]:
        data = self.data
        count, at = _number(data, 0)
        for _ in range(count):
            size, at = _number(data, at)
            name, at = data[at : at + size].decode(), at + size
            size, at = _number(data, at)
            if size < 0:
                yield name, None
            else:
                yield name, data[at : at + size]
                at += size

    def __len__(self) -> int:
        return _number(self.data, 0)[0]

    @overload
    def __getitem__(self, at: int) -> Header: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Header, ...]: ...
    def __getitem__(self, at: int | slice) -> Header | tuple[Header, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Encoded):
            return self.data == other.data
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


NO_HEADERS = Encoded(varint(0))

Headers: TypeAlias = tuple[Header, ...] | Encoded
"""The headers of a record, in order."""


def encode_headers(headers: Headers) -> Encoded:
    """Return headers encoded."""
    if isinstance(headers, Encoded):
        return headers
    return Encoded(varint(len(headers)) + encode_fields(headers))


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins there, and where it ends."""
    rest = shift = 0
    while True:
        byte = data[at]
        rest |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return rest >> 1 ^ -(rest & 1), at
