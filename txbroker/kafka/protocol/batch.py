"""Encode and decode record batches, which Kafka stores all or none of."""

import struct
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import google_crc32c
from aiokafka.errors import KafkaError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import decode_varint
from msgspec import Struct

from txbroker.core.encoding import NULL, SMALL, encode_headers, varint
from txbroker.core.records import Encoded, Header, Record
from txbroker.kafka.protocol.codecs import CODECS, BatchUndecodable, InflatedTooLarge, inflate

if google_crc32c.implementation != "c":
    raise ImportError(
        "google-crc32c lacks its C extension, which makes it a thousand times slower: "
        "install a wheel of it for this platform and Python"
    )

_FRONT = struct.Struct(">qiibI")
"""Base offset (set by the broker), bytes that follow, leader epoch, format version, CRC-32C of the
rest."""
_MIDDLE = struct.Struct(">hiqqqhii")
"""Attributes, last offset delta, first and largest timestamp, producer id, epoch, sequence, number
of records."""
_MAGIC = 2
_LENGTH_BEGINS = 12
_NO_LEADER_EPOCH = -1
_UNBOUNDED = (1 << 31) - 1
_TRANSACTIONAL = 0x10
_CODEC_BITS = 0x07
_ATTRIBUTES_AT = 22
_COUNT_AT = 57
INFLATED_BYTES_MAX = 16 << 20
"""Maximum memory of a compressed batch once decoded. txbroker compresses none, but brokers
configured to compress and tools that copy topics do."""
RECORD_BYTES = 256
"""Memory of a decoded record without key and value."""
_SIGN, _BITS = 1 << 63, (1 << 64) - 1
HEADER_BYTES = _FRONT.size + _MIDDLE.size
"""Bytes of an empty batch."""

Decode = Callable[[Any, bytes | memoryview, Container[int], int], list[Record]]
"""Decodes a batch, like `decode_batch`."""


class Body(Struct, frozen=True):
    """The encoded records of a batch, without the header, which depends on the producer."""

    encoded: bytes
    count: int
    first_ms: int
    largest_ms: int

    @property
    def batch_bytes(self) -> int:
        """Size of the batch."""
        return HEADER_BYTES + len(self.encoded)


def batch_body(records: Sequence[Record], bytes_max: int = _UNBOUNDED) -> Body:
    """Encode as many records as fit a batch of `bytes_max`, at least one.

    A record without a timestamp gets the current time. With LogAppendTime the broker replaces both.
    """
    now_ms = int(time.time() * 1000)
    first_ms = largest_ms = records[0].timestamp_ms if records[0].timestamp_ms >= 0 else now_ms
    # Hot path: per record it calls only C functions, except for large or new values.
    small, bound, null = SMALL, len(SMALL), NULL
    encoded: list[bytes] = []
    count, size = 0, HEADER_BYTES
    for record in records:
        at_ms, key, value, headers = record.timestamp_ms, record.key, record.value, record.headers
        if at_ms < 0:
            at_ms = now_ms
        n = at_ms - first_ms
        age = small[n] if 0 <= n < bound else varint(n)
        delta = small[count] if count < bound else varint(count)
        if key is None:
            key_size, key = null, b""
        else:
            n = len(key)
            key_size = small[n] if n < bound else varint(n)
        if value is None:
            value_size, value = null, b""
        else:
            n = len(value)
            value_size = small[n] if n < bound else varint(n)
        data = (headers if type(headers) is Encoded else encode_headers(headers)).data
        n = 1 + len(age) + len(delta) + len(key_size) + len(key)
        n += len(value_size) + len(value) + len(data)
        record_size = small[n] if n < bound else varint(n)
        size += len(record_size) + n
        if size > bytes_max and count:
            break
        encoded += record_size, b"\0", age, delta, key_size, key, value_size, value, data
        count += 1
        if at_ms > largest_ms:
            largest_ms = at_ms
    return Body(b"".join(encoded), count, first_ms, largest_ms)


def encode_batch(
    body: Body, *, producer_id: int, epoch: int, sequence: int, transactional: bool = False
) -> bytes:
    """Return a batch of an idempotent producer."""
    attributes = _TRANSACTIONAL if transactional else 0
    times = body.first_ms, body.largest_ms
    producer = producer_id, epoch, sequence
    middle = _MIDDLE.pack(attributes, body.count - 1, *times, *producer, body.count)
    checksum = google_crc32c.extend(google_crc32c.value(middle), body.encoded)
    size = body.batch_bytes - _LENGTH_BEGINS
    return _FRONT.pack(0, size, _NO_LEADER_EPOCH, _MAGIC, checksum) + middle + body.encoded


def decode_batch(
    batch: Any,
    data: bytes | memoryview,
    offsets: Container[int],
    producer: int,
    inflated_bytes_max: int = INFLATED_BYTES_MAX,
) -> list[Record]:
    """Return the records of a batch at the given offsets.

    Invalid UTF-8 in a header's name becomes U+FFFD, as in Kafka's Java client.

    Args:
        producer: the records' producer id.
        inflated_bytes_max: limit of a compressed batch's memory once decoded.

    Raises:
        BatchUndecodable: the batch exceeds the limit, or is malformed.
    """
    codec = batch.compression_type
    try:
        if codec:
            data = _inflated(codec, data, inflated_bytes_max)
            batch = DefaultRecordBatch(data)
        try:
            # Hot path: per record it calls only C functions.
            records = [
                Record(
                    r.key,
                    r.value,
                    tuple(headers) if (headers := r.headers) else (),
                    r.timestamp,
                    r.offset,
                    0,
                    producer,
                )
                for r in batch
            ]
        except UnicodeDecodeError:
            records = list(_lenient(batch, data, producer))
    except (KafkaError, ValueError, IndexError) as error:
        how = f" (compressed with {CODECS[codec]})" if codec else ""
        raise BatchUndecodable(f"{error or type(error).__name__}{how}") from None
    if isinstance(offsets, range) and _covers(offsets, records):
        return records
    return [record for record in records if record.offset in offsets]


def _covers(offsets: range, records: list[Record]) -> bool:
    """Return whether all records are at `offsets`; they ascend, unless a client is at fault."""
    if not records:
        return True
    first, last = records[0].offset, records[-1].offset
    return offsets.step == 1 and offsets.start <= first and last < offsets.stop


def _inflated(codec: int, data: bytes | memoryview, bytes_max: int) -> bytes:
    """Return a compressed batch uncompressed."""
    room = bytes_max - int.from_bytes(data[_COUNT_AT:HEADER_BYTES], "big") * RECORD_BYTES
    try:
        inflated = inflate(codec, memoryview(data)[HEADER_BYTES:], max(0, room))
    except InflatedTooLarge:
        raise BatchUndecodable(
            f"it exceeds {bytes_max >> 20} MiB uncompressed (compressed with {CODECS[codec]})"
        ) from None
    header = bytearray(data[:HEADER_BYTES])
    header[_ATTRIBUTES_AT] &= ~_CODEC_BITS & 0xFF
    return bytes(header) + inflated


def _lenient(batch: Any, data: bytes | memoryview, producer: int) -> Iterator[Record]:
    """Yield the records of an uncompressed batch, with any header names.

    The client library decodes names strictly, else no record of the batch.
    """
    buffer, at = bytearray(data), HEADER_BYTES

    def number() -> int:
        nonlocal at
        value, at = decode_varint(buffer, at)
        return int(value)

    def field() -> bytes | None:
        nonlocal at
        size = number()
        if size < 0:
            return None
        start, at = at, at + size
        if at > len(buffer):
            raise IndexError("a field exceeds its batch")
        return bytes(buffer[start:at])

    for _ in range(int.from_bytes(data[_COUNT_AT:HEADER_BYTES], "big")):
        number()  # the record's length
        at += 1  # its attributes
        # Sums wrap to 64 bits with a sign, as in the client library and in Java.
        at_ms = (batch.first_timestamp + number() + _SIGN & _BITS) - _SIGN
        offset = batch.base_offset + number()
        key, value = field(), field()
        headers: list[Header] = [
            ((field() or b"").decode(errors="replace"), field()) for _ in range(number())
        ]
        if batch.timestamp_type:
            at_ms = batch.max_timestamp
        yield Record(key, value, tuple(headers), at_ms, offset, producer=producer)
