"""The requests of every transaction, encoded in few calls: Produce, EndTxn and ListOffsets.

The client library encodes field by field, in a hundred calls and more, and a proxy sends hundreds
of these a second. The bytes are the same as the library's for the same versions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from aiokafka.errors import IncompatibleBrokerVersion
from msgspec import Struct

Batches: TypeAlias = Sequence[tuple[str, Sequence[tuple[int, bytes]]]]
"""Each topic with its partition numbers and the encoded batch for each."""
Versions: TypeAlias = dict[int, tuple[int, int]]
"""First and last version of each API key that a broker supports."""

_FRONT = struct.Struct(">ihhih")
"""Bytes after this field, API key, version, correlation id, bytes of the client id."""
_CONSUMER = -1
_NO_TAGS = b"\0"
_NULL, _COMPACT_NULL = b"\xff\xff", b"\0"
_ACKS_TIMEOUT = struct.Struct(">hi")
"""Acknowledgements, and the broker's timeout in milliseconds."""
_SHORT, _INT = struct.Struct(">h"), struct.Struct(">i")
_PARTITION_SIZE = struct.Struct(">ii")
_PARTITION_TIMESTAMP = struct.Struct(">iq")
_PRODUCE_RESULT = struct.Struct(">ihqqq")
"""Partition, error, base offset, timestamp, log start offset."""
_OFFSET_RESULT = struct.Struct(">ihqq")
"""Partition, error, timestamp, offset."""
_PRODUCER = struct.Struct(">qh?")
_IDENTITY = struct.Struct(">qh")
_NAMES_MAX = 4096


class _Names(dict[str, bytes]):
    """A bounded cache of encoded names."""

    def __init__(self, encode: Callable[[bytes], bytes]) -> None:
        self._encode = encode

    def __missing__(self, name: str) -> bytes:
        if len(self) >= _NAMES_MAX:
            self.clear()
        self[name] = encoded = self._encode(name.encode())
        return encoded


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_names = _Names(lambda name: _SHORT.pack(len(name)) + name)
_compact_names = _Names(lambda name: _varint(len(name) + 1) + name)


class PackedRequest:
    """A request in one version that encodes itself and decodes its answer."""

    API_KEY: ClassVar[int]
    API_VERSION: ClassVar[int]

    def frame(self, versions: Versions, correlation_id: int, client: bytes) -> bytes:
        """Return all bytes of the request.

        Raises:
            IncompatibleBrokerVersion: the broker does not support this API.
            NotImplementedError: the broker does not support this version of it.
        """
        key, version = self.API_KEY, self.API_VERSION
        if key not in versions:
            raise IncompatibleBrokerVersion(f"the broker does not support {type(self).__name__}")
        first, last = versions[key]
        if not first <= version <= last:
            raise NotImplementedError(
                f"{type(self).__name__}: the broker supports versions {first} to {last}"
            )
        parts = [b"", client]
        self._pack(parts)
        size = _FRONT.size - _INT.size + sum(map(len, parts))
        parts[0] = _FRONT.pack(size, key, version, correlation_id, len(client))
        return b"".join(parts)

    def _pack(self, parts: list[bytes]) -> None:
        """Append the bytes after the client id."""
        raise NotImplementedError

    def read(self, frame: bytes) -> Any:
        """Return the decoded answer; `frame` begins with the correlation id.

        Raises:
            ValueError, IndexError, struct.error: the bytes are not an answer to this request.
        """
        raise NotImplementedError


# --- writing -------------------------------------------------------------------------------------


class PartitionsResponse(Struct, frozen=True):
    """A decoded answer to a Produce or ListOffsets request.

    Attributes:
        topics: name and partitions of each topic. A partition of Produce: number, error, base
            offset, timestamp and, from version 12 on, an error message and which records of the
            batch are at fault. Of ListOffsets: number, error, timestamp, offset.
    """

    topics: list[tuple[str, list[tuple[Any, ...]]]]


class ProduceV7(PackedRequest):
    """Produce for version 1 of the transaction protocol, and outside of transactions."""

    API_KEY = 0
    API_VERSION = 7

    def __init__(
        self, transactional_id: str | None, required_acks: int, timeout_ms: int, topics: Batches
    ) -> None:
        self._transactional_id = transactional_id
        self._required_acks = required_acks
        self._timeout = timeout_ms
        self._topics = topics

    def _pack(self, parts: list[bytes]) -> None:
        id, topics = self._transactional_id, self._topics
        parts += (
            _NULL if id is None else _names[id],
            _ACKS_TIMEOUT.pack(self._required_acks, self._timeout),
            _INT.pack(len(topics)),
        )
        for topic, batches in topics:
            parts += _names[topic], _INT.pack(len(batches))
            for number, batch in batches:
                parts += _PARTITION_SIZE.pack(number, len(batch)), batch

    def read(self, frame: bytes) -> PartitionsResponse:
        return PartitionsResponse(_read_topics(frame, _INT.size, _PRODUCE_RESULT))


class ProduceV12(ProduceV7):
    """Produce that also adds the partitions to the transaction, beginning it if needed."""

    API_VERSION = 12

    def _pack(self, parts: list[bytes]) -> None:
        id, topics = self._transactional_id, self._topics
        parts += (
            _NO_TAGS,
            _COMPACT_NULL if id is None else _compact_names[id],
            _ACKS_TIMEOUT.pack(self._required_acks, self._timeout),
            _varint(len(topics) + 1),
        )
        for topic, batches in topics:
            parts += _compact_names[topic], _varint(len(batches) + 1)
            for number, batch in batches:
                parts += _INT.pack(number), _varint(len(batch) + 1), batch, _NO_TAGS
            parts.append(_NO_TAGS)
        parts.append(_NO_TAGS)

    def read(self, frame: bytes) -> PartitionsResponse:
        topics = []
        count, at = _read_varint(frame, _skip_tags(frame, _INT.size))
        for _ in range(count - 1):
            name, at = _read_string(frame, at)
            partitions = []
            size, at = _read_varint(frame, at)
            for _ in range(size - 1):
                number, code, offset, timestamp, _start = _PRODUCE_RESULT.unpack_from(frame, at)
                errors, at = _read_varint(frame, at + _PRODUCE_RESULT.size)
                records: list[int] = []
                for _ in range(errors - 1):
                    records += _INT.unpack_from(frame, at)
                    _error, at = _read_string(frame, at + _INT.size)
                    at = _skip_tags(frame, at)
                message, at = _read_string(frame, at)
                at = _skip_tags(frame, at)
                partitions.append((number, code, offset, timestamp, message, records))
            topics.append((name or "", partitions))
            at = _skip_tags(frame, at)
        return PartitionsResponse(topics)


# --- ends of transactions ------------------------------------------------------------------------


class EndTxnResponse(Struct, frozen=True):
    """A decoded answer to an EndTxn request.

    Attributes:
        error_code: 0 when the transaction has ended.
        producer_id, producer_epoch: for the next transaction; -1 in version 1 of the transaction
            protocol, which keeps them.
    """

    error_code: int
    producer_id: int = -1
    producer_epoch: int = -1


class EndTxnV0(PackedRequest):
    """EndTxn for version 1 of the transaction protocol."""

    API_KEY = 26
    API_VERSION = 0

    def __init__(
        self, transactional_id: str, producer_id: int, producer_epoch: int, committed: bool
    ) -> None:
        self._transactional_id = transactional_id
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch
        self._committed = committed

    def _pack(self, parts: list[bytes]) -> None:
        producer = _PRODUCER.pack(self._producer_id, self._producer_epoch, self._committed)
        parts += _names[self._transactional_id], producer

    def read(self, frame: bytes) -> EndTxnResponse:
        return EndTxnResponse(*_SHORT.unpack_from(frame, _INT.size * 2))


class EndTxnV5(EndTxnV0):
    """EndTxn whose answer holds the producer id and epoch for the next transaction."""

    API_VERSION = 5

    def _pack(self, parts: list[bytes]) -> None:
        producer = _PRODUCER.pack(self._producer_id, self._producer_epoch, self._committed)
        parts += _NO_TAGS, _compact_names[self._transactional_id], producer, _NO_TAGS

    def read(self, frame: bytes) -> EndTxnResponse:
        at = _skip_tags(frame, _INT.size) + _INT.size
        (code,) = _SHORT.unpack_from(frame, at)
        return EndTxnResponse(code, *_IDENTITY.unpack_from(frame, at + _SHORT.size))


# --- offsets -------------------------------------------------------------------------------------


class ListOffsetsV3(PackedRequest):
    """ListOffsets: start or end of partitions, or the first offset from a timestamp on."""

    API_KEY = 2
    API_VERSION = 3

    def __init__(
        self, isolation_level: int, topics: Sequence[tuple[str, Sequence[tuple[int, int]]]]
    ) -> None:
        self._isolation_level = isolation_level
        self._topics = topics

    def _pack(self, parts: list[bytes]) -> None:
        parts.append(struct.pack(">ibi", _CONSUMER, self._isolation_level, len(self._topics)))
        for topic, partitions in self._topics:
            parts += _names[topic], _INT.pack(len(partitions))
            parts += [_PARTITION_TIMESTAMP.pack(number, time) for number, time in partitions]

    def read(self, frame: bytes) -> PartitionsResponse:
        return PartitionsResponse(_read_topics(frame, _INT.size * 2, _OFFSET_RESULT))


# --- reading -------------------------------------------------------------------------------------


def _read_topics(
    frame: bytes, at: int, entry: struct.Struct
) -> list[tuple[str, list[tuple[Any, ...]]]]:
    topics = []
    (count,) = _INT.unpack_from(frame, at)
    at += _INT.size
    for _ in range(count):
        (size,) = _SHORT.unpack_from(frame, at)
        begin = at + _SHORT.size
        at = begin + size
        (partitions,) = _INT.unpack_from(frame, at)
        first = at + _INT.size
        at = first + partitions * entry.size
        if size < 0 or partitions < 0 or at > len(frame):
            raise ValueError("the answer is truncated in its partitions")
        name = frame[begin : begin + size].decode()
        topics.append((name, list(entry.iter_unpack(frame[first:at]))))
    return topics


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := frame[at]) > 0x7F:
        number |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return number | byte << shift, at + 1


def _read_string(frame: bytes, at: int) -> tuple[str | None, int]:
    """Return a compact nullable string, and the position of the next field."""
    size, at = _read_varint(frame, at)
    if not size:
        return None, at
    end = at + size - 1
    if end > len(frame):
        raise ValueError("the answer is truncated in a string")
    return frame[at:end].decode(), end


def _skip_tags(frame: bytes, at: int) -> int:
    """Return the position after tagged fields."""
    count, at = _read_varint(frame, at)
    for _ in range(count):
        _tag, at = _read_varint(frame, at)
        size, at = _read_varint(frame, at)
        at += size
    return at
