"""Record batches: what Kafka stores all or none of."""

import gzip
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from io import BytesIO
from typing import Any

from aiokafka.errors import KafkaError
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.util import decode_varint

from txbroker.core.records import Header, Record

_UNBOUNDED = (1 << 31) - 1
_NO_COMPRESSION = 0
_MAGIC = 2
_GZIP = 1
_CODECS = {2: "snappy", 3: "lz4", 4: "zstd"}
_CODEC_BITS = 0x07
_ATTRIBUTES_AT = 22
_COUNT_AT = 57
_INFLATED_BYTES_MAX = 16 << 20
"""Decoded at most of a compressed batch. txbroker writes none; brokers that were configured to
compress, and tools that copy topics, do."""
_RECORD_BYTES = 256
"""Memory that a decoded record takes besides its key and value."""
_SIGN, _BITS = 1 << 63, (1 << 64) - 1
HEADER_BYTES = 61
"""Bytes of an empty batch."""

Decode = Callable[[Any, bytes | memoryview, Container[int], int], list[Record]]
"""What returns the records of a batch, as `decode_batch` does."""


class Unreadable(Exception):
    """A batch whose checksum is right does not decode: another client wrote it."""


def encode_batch(
    records: Sequence[Record],
    *,
    producer_id: int,
    epoch: int,
    sequence: int,
    transactional: bool = False,
) -> bytes:
    """Return `records` as one batch of an idempotent producer.

    A record without a timestamp gets this machine's; in topics with LogAppendTime the broker
    replaces either.
    """
    builder = DefaultRecordBatchBuilder(
        _MAGIC, _NO_COMPRESSION, int(transactional), producer_id, epoch, sequence, _UNBOUNDED
    )
    for number, record in enumerate(records):
        timestamp = record.timestamp_ms if record.timestamp_ms >= 0 else None
        builder.append(number, timestamp, record.key, record.value, list(record.headers))
    return bytes(builder.build())


def record_bytes(record: Record) -> int:
    """Return an upper bound for the bytes that a record takes in a batch."""
    size = DefaultRecordBatchBuilder.estimate_size_in_bytes(
        record.key, record.value, list(record.headers)
    )
    return int(size) - HEADER_BYTES


def batch_bytes(records: Sequence[Record], bytes_max: int) -> int:
    """Return the size of a batch: an upper bound, or exactly where the bound is over the limit."""
    bound = HEADER_BYTES + sum(map(record_bytes, records))
    if bound <= bytes_max:
        return bound
    return len(encode_batch(records, producer_id=-1, epoch=-1, sequence=-1))


def split_by_bytes(records: Sequence[Record], bytes_max: int) -> list[Sequence[Record]]:
    """Cut records into runs whose batches take at most `bytes_max`, in order.

    A record that is too large by itself gets a batch of its own, for the broker to judge.
    """
    runs: list[Sequence[Record]] = []
    start, size = 0, HEADER_BYTES
    for number, record in enumerate(records):
        more = record_bytes(record)
        if number > start and size + more > bytes_max:
            runs.append(records[start:number])
            start, size = number, HEADER_BYTES
        size += more
    if start < len(records):
        runs.append(records[start:])
    return runs


def decode_batch(
    batch: Any, data: bytes | memoryview, wanted: Container[int], producer: int
) -> list[Record]:
    """Return the records of a batch at the wanted offsets.

    Bytes of a header's name that are not UTF-8 become U+FFFD, as in Kafka's Java client.

    Args:
        batch: the batch as the client library has split it off, its checksum verified.
        data: the batch's bytes.
        producer: the producer id to note in each record.

    Raises:
        Unreadable: it is compressed with a codec other than gzip, takes more than 16 MiB of memory,
            or breaks the record format.
    """
    try:
        if batch.compression_type:
            data = _inflated(batch, data)
            batch = DefaultRecordBatch(data)
        try:
            return [
                Record(r.key, r.value, tuple(r.headers), r.timestamp, r.offset, producer=producer)
                for r in batch
                if r.offset in wanted
            ]
        except UnicodeDecodeError:
            return [each for each in _lenient(batch, data, producer) if each.offset in wanted]
    except (KafkaError, ValueError, IndexError, OSError, EOFError, zlib.error) as error:
        raise Unreadable(str(error) or type(error).__name__) from None


def _inflated(batch: Any, data: bytes | memoryview) -> bytes:
    """Return a gzip batch as a plain one."""
    codec = batch.compression_type
    if codec != _GZIP:
        raise Unreadable(f"it is compressed with {_CODECS.get(codec, f'codec {codec}')}")
    room = _INFLATED_BYTES_MAX - int.from_bytes(data[_COUNT_AT:HEADER_BYTES], "big") * _RECORD_BYTES
    with gzip.GzipFile(fileobj=BytesIO(data[HEADER_BYTES:])) as file:
        inflated = file.read(max(0, room) + 1)
    if len(inflated) > room:
        raise Unreadable(f"it takes more than {_INFLATED_BYTES_MAX >> 20} MiB of memory")
    return plain_batch(data, inflated)


def plain_batch(data: bytes | memoryview, inflated: bytes) -> bytes:
    """Return a compressed batch as a plain one, from what its records are once inflated."""
    header = bytearray(data[:HEADER_BYTES])
    header[_ATTRIBUTES_AT] &= ~_CODEC_BITS & 0xFF
    return bytes(header) + inflated


def _lenient(batch: Any, data: bytes | memoryview, producer: int) -> Iterator[Record]:
    """Yield the records of a plain batch, with any header names.

    The client library decodes names strictly, and no record of the batch otherwise.
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
            raise IndexError("a field ends behind its batch")
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
