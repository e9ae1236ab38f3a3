"""The requests of every transaction, packed in few calls: Produce, EndTxn and ListOffsets.

The client library puts a request together field by field, which takes a hundred calls and more;
these go out by the hundred a second. They are byte for byte what the library makes of the same
versions. All other requests are its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from aiokafka.errors import IncompatibleBrokerVersion
from msgspec import Struct

Batches: TypeAlias = Sequence[tuple[str, Sequence[tuple[int, bytes]]]]
"""Of each topic, the numbers of partitions and what is to be written to each."""
Versions: TypeAlias = dict[int, tuple[int, int]]
"""Of each kind of request, the first and the last version that a broker speaks."""

_FRONT = struct.Struct(">ihhih")
"""Bytes behind this field, kind, version, correlation id, bytes of the client's name."""
_CONSUMER = -1
_NO_TAGS = b"\0"
_NULL, _COMPACT_NULL = b"\xff\xff", b"\0"
_HOW = struct.Struct(">hi")
"""Acknowledgements, and milliseconds until the broker gives up."""
_SHORT, _INT = struct.Struct(">h"), struct.Struct(">i")
_NUMBER_SIZE = struct.Struct(">ii")
_NUMBER_TIME = struct.Struct(">iq")
_WRITTEN = struct.Struct(">ihqqq")
"""Partition, error, first offset, timestamp, first offset that is kept."""
_END = struct.Struct(">ihqq")
"""Partition, error, timestamp, offset."""
_PRODUCER = struct.Struct(">qh?")
_NEXT = struct.Struct(">qh")
_NAMES_MAX = 4096


class _Names(dict[str, bytes]):
    """Names as requests hold them. Remembers some."""

    def __init__(self, encode: Callable[[bytes], bytes]) -> None:
        self._encode = encode

    def __missing__(self, name: str) -> bytes:
        if len(self) >= _NAMES_MAX:
            self.clear()
        self[name] = encoded = self._encode(name.encode())
        return encoded


def _unsigned(number: int) -> bytes:
    """Return a number, seven bits a byte."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_names = _Names(lambda name: _SHORT.pack(len(name)) + name)
_compact_names = _Names(lambda name: _unsigned(len(name) + 1) + name)


class PackedRequest:
    """A request that encodes itself and reads its answer. It goes out in one version only."""

    API_KEY: ClassVar[int]
    API_VERSION: ClassVar[int]

    def frame(self, versions: Versions, correlation_id: int, client: bytes) -> bytes:
        """Return all bytes of the request.

        Args:
            versions: that the broker speaks.
            correlation_id: comes back in the answer.
            client: the client's name.

        Raises:
            IncompatibleBrokerVersion: the broker does not know this kind of request.
            NotImplementedError: not in this version.
        """
        key, version = self.API_KEY, self.API_VERSION
        if key not in versions:
            raise IncompatibleBrokerVersion(f"{type(self).__name__} is not known to the broker")
        first, last = versions[key]
        if not first <= version <= last:
            raise NotImplementedError(f"{type(self).__name__} in versions {first} to {last}")
        parts = [b"", client]
        self._pack(parts)
        size = _FRONT.size - _INT.size + sum(map(len, parts))
        parts[0] = _FRONT.pack(size, key, version, correlation_id, len(client))
        return b"".join(parts)

    def _pack(self, parts: list[bytes]) -> None:
        """Append what comes behind the client's name."""
        raise NotImplementedError

    def read(self, frame: bytes) -> Any:
        """Return what an answer says; `frame` is what comes behind its size.

        Raises:
            ValueError, IndexError, struct.error: it is not an answer to this request.
        """
        raise NotImplementedError


# --- writing -------------------------------------------------------------------------------------


class ProduceResponse(Struct, frozen=True):
    """What a broker says of a write.

    Attributes:
        topics: name and partitions of each topic: number, error, first offset, timestamp and, in
            the second version of the transaction protocol, a sentence about the error.
    """

    topics: list[tuple[str, list[tuple[Any, ...]]]]


class ProduceV7(PackedRequest):
    """Produce of the first version of the transaction protocol, or outside of transactions."""

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
            _HOW.pack(self._required_acks, self._timeout),
            _INT.pack(len(topics)),
        )
        for topic, batches in topics:
            parts += _names[topic], _INT.pack(len(batches))
            for number, batch in batches:
                parts += _NUMBER_SIZE.pack(number, len(batch)), batch

    def read(self, frame: bytes) -> ProduceResponse:
        """Return what the broker says of each partition."""
        return ProduceResponse(_read_topics(frame, _INT.size, _WRITTEN))


class ProduceV12(ProduceV7):
    """Produce that also puts the partitions into the transaction, and begins it where needed."""

    API_VERSION = 12

    def _pack(self, parts: list[bytes]) -> None:
        id, topics = self._transactional_id, self._topics
        parts += (
            _NO_TAGS,
            _COMPACT_NULL if id is None else _compact_names[id],
            _HOW.pack(self._required_acks, self._timeout),
            _unsigned(len(topics) + 1),
        )
        for topic, batches in topics:
            parts += _compact_names[topic], _unsigned(len(batches) + 1)
            for number, batch in batches:
                parts += _INT.pack(number), _unsigned(len(batch) + 1), batch, _NO_TAGS
            parts.append(_NO_TAGS)
        parts.append(_NO_TAGS)

    def read(self, frame: bytes) -> ProduceResponse:
        """Return what the broker says of each partition."""
        topics = []
        count, at = _read_unsigned(frame, _skip_tags(frame, _INT.size))
        for _ in range(count - 1):
            name, at = _read_text(frame, at)
            partitions = []
            size, at = _read_unsigned(frame, at)
            for _ in range(size - 1):
                number, code, offset, timestamp, _start = _WRITTEN.unpack_from(frame, at)
                errors, at = _read_unsigned(frame, at + _WRITTEN.size)
                for _ in range(errors - 1):  # of single records
                    _error, at = _read_text(frame, at + _INT.size)
                    at = _skip_tags(frame, at)
                message, at = _read_text(frame, at)
                at = _skip_tags(frame, at)
                partitions.append((number, code, offset, timestamp, message))
            topics.append((name or "", partitions))
            at = _skip_tags(frame, at)
        return ProduceResponse(topics)


# --- ends of transactions ------------------------------------------------------------------------


class EndTxnResponse(Struct, frozen=True):
    """What a coordinator says of an end.

    Attributes:
        error_code: 0 where the transaction is over.
        producer_id, producer_epoch: of the next transaction, -1 in the first version of the
            transaction protocol, in which they stay.
    """

    error_code: int
    producer_id: int = -1
    producer_epoch: int = -1


class EndTxnV0(PackedRequest):
    """EndTxn of the first version of the transaction protocol."""

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
        """Return what the coordinator says."""
        return EndTxnResponse(*_SHORT.unpack_from(frame, _INT.size * 2))


class EndTxnV5(EndTxnV0):
    """EndTxn whose answer says with which producer id and epoch the next transaction goes on."""

    API_VERSION = 5

    def _pack(self, parts: list[bytes]) -> None:
        producer = _PRODUCER.pack(self._producer_id, self._producer_epoch, self._committed)
        parts += _NO_TAGS, _compact_names[self._transactional_id], producer, _NO_TAGS

    def read(self, frame: bytes) -> EndTxnResponse:
        """Return what the coordinator says."""
        at = _skip_tags(frame, _INT.size) + _INT.size
        (code,) = _SHORT.unpack_from(frame, at)
        return EndTxnResponse(code, *_NEXT.unpack_from(frame, at + _SHORT.size))


# --- offsets -------------------------------------------------------------------------------------


class ListOffsetsResponse(Struct, frozen=True):
    """What a broker says of offsets.

    Attributes:
        topics: name and partitions of each topic: number, error, timestamp, offset.
    """

    topics: list[tuple[str, list[tuple[Any, ...]]]]


class ListOffsetsV3(PackedRequest):
    """ListOffsets: where partitions begin or end, or what is the first offset from a time on."""

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
            parts += [_NUMBER_TIME.pack(number, time) for number, time in partitions]

    def read(self, frame: bytes) -> ListOffsetsResponse:
        """Return what the broker says of each partition."""
        return ListOffsetsResponse(_read_topics(frame, _INT.size * 2, _END))


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
            raise ValueError("an answer ends before its partitions")
        name = frame[begin : begin + size].decode()
        topics.append((name, list(entry.iter_unpack(frame[first:at]))))
    return topics


def _read_unsigned(frame: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where the next field begins."""
    number = shift = 0
    while (byte := frame[at]) > 0x7F:
        number |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return number | byte << shift, at + 1


def _read_text(frame: bytes, at: int) -> tuple[str | None, int]:
    """Return a text, and where the next field begins."""
    size, at = _read_unsigned(frame, at)
    if not size:
        return None, at
    end = at + size - 1
    if end > len(frame):
        raise ValueError("an answer ends before its text")
    return frame[at:end].decode(), end


def _skip_tags(frame: bytes, at: int) -> int:
    """Return where the next field begins."""
    count, at = _read_unsigned(frame, at)
    for _ in range(count):
        _tag, at = _read_unsigned(frame, at)
        size, at = _read_unsigned(frame, at)
        at += size
    return at
