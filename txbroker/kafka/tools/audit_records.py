"""Read records of any topic for an audit, without Spark: any codec, any kind of timestamp."""

from __future__ import annotations

import zlib
from collections.abc import Container
from contextlib import aclosing
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatch

from txbroker.core.records import Record
from txbroker.door.protocols import LogTruncated
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.batch import (
    HEADER_BYTES,
    Unreadable,
    decode_batch,
    plain_batch,
)

_CHANNEL = "audit"
_SOME_BYTES = 32 << 20
_SOME_RECORDS = 50_000
"""A small record takes many times its bytes in memory."""
_INFLATED_BYTES_MAX = 256 << 20
_SNAPPY = 2
_STREAMED = {1: "gzip", 3: "lz4", 4: "zstd"}
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_BYTES = 16


class Stored(Record, frozen=True):
    """A record, and whether its timestamp is the broker's append time."""

    append_time: bool = False


async def some_records(
    settings: KafkaSettings, topic: str, partition: int, position: int, end: int
) -> tuple[list[Record], int]:
    """Return some committed records from `position` on, before `end`, and the next position.

    A batch that does not decode becomes one record that is no `Stored`.

    Raises:
        KafkaUnavailable: Kafka does not answer, or retention removed the records.
    """
    client = Client(settings)
    try:
        reader = Reader(client, topic, partition, _CHANNEL, append_time=False, decode=_decode)
        return await _some(reader, position, end)
    except (LogTruncated, InvariantBroken) as error:
        raise KafkaUnavailable(str(error)) from None
    finally:
        await client.close()


async def _some(reader: Reader, position: int, end: int) -> tuple[list[Record], int]:
    taken: list[Record] = []
    size = 0
    async with aclosing(reader.read(position, end)) as pieces:
        async for records in pieces:
            taken += records
            size += sum(map(_size, records))
            if size > _SOME_BYTES or len(taken) >= _SOME_RECORDS:
                return taken, taken[-1].offset + 1
    return taken, end


def _size(record: Record) -> int:
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(content or b"") for name, content in record.headers)


def _decode(
    batch: Any, data: bytes | memoryview, offsets: Container[int], producer: int
) -> list[Record]:
    """Decode a batch like `decode_batch`, of any codec.

    Raises:
        Unreadable: it exceeds 256 MiB, or is malformed.
    """
    append_time = bool(batch.timestamp_type)
    if batch.compression_type:
        data = _inflated(batch.compression_type, bytes(data))
        batch = DefaultRecordBatch(data)
    return [
        Stored(r.key, r.value, r.headers, r.timestamp_ms, r.offset, append_time=append_time)
        for r in decode_batch(batch, data, offsets, producer)
    ]


def _inflated(codec: int, data: bytes) -> bytes:
    """Return a compressed batch uncompressed."""
    body = data[HEADER_BYTES:]
    try:
        inflated = _snappy(body) if codec == _SNAPPY else _streamed(codec, body)
    except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
        raise Unreadable(str(error)) from None
    return plain_batch(data, inflated)


def _streamed(codec: int, body: bytes) -> bytes:
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.BufferReader(body), _STREAMED[codec]) as stream:
        inflated = bytes(stream.read(_INFLATED_BYTES_MAX + 1))
    if len(inflated) > _INFLATED_BYTES_MAX:
        raise ValueError(f"it exceeds {_INFLATED_BYTES_MAX >> 20} MiB uncompressed")
    return inflated


def _snappy(body: bytes) -> bytes:
    """Return the uncompressed data of one block, or of the framed blocks of Java's library."""
    if not body.startswith(_XERIAL):
        return _block(body, _INFLATED_BYTES_MAX)
    blocks: list[bytes] = []
    room, at = _INFLATED_BYTES_MAX, _XERIAL_BYTES
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        blocks.append(_block(body[at + 4 : at + 4 + size], room))
        room -= len(blocks[-1])
        at += 4 + size
    return b"".join(blocks)


def _block(body: bytes, room: int) -> bytes:
    from pyarrow import Codec

    size = 0
    for place, byte in enumerate(body[:5]):
        size |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    if size > room:
        raise ValueError(f"it exceeds {_INFLATED_BYTES_MAX >> 20} MiB uncompressed")
    return bytes(Codec("snappy").decompress(body, size, asbytes=True))
