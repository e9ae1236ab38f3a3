"""Inflate compressed batches, up to a limit: a small batch can hold gigabytes."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

cramjam: Any = None
with contextlib.suppress(ImportError):  # without it gzip still works
    cramjam = importlib.import_module("cramjam")
_DECOMPRESSION: type[Exception] = getattr(cramjam, "DecompressionError", ValueError)

CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
"""The codecs by their number in a batch's attributes."""
_XERIAL = b"\x82SNAPPY\0"
"""Begins the format of snappy-java: blocks, each after its size. Other clients write one block."""
_XERIAL_HEADER_BYTES = 16
_BLOCK_SIZE = struct.Struct(">i")
_USUAL_RATIO, _USUAL_BYTES = 8, 64 << 10


class BatchUndecodable(Exception):
    """A batch with a valid checksum does not decode: another client wrote it."""


class InflatedTooLarge(Exception):
    """The inflated records exceed the limit."""


def inflate(codec: int, data: memoryview, bytes_max: int) -> bytes:
    """Return the inflated records of a batch.

    Args:
        codec: a key of `CODECS`.
        bytes_max: limit of the inflated size.

    Raises:
        BatchUndecodable: the data are malformed.
        InflatedTooLarge
    """
    name = CODECS.get(codec)
    if name is None:
        raise BatchUndecodable(f"it is compressed with the unknown codec {codec}")
    if name != "gzip" and cramjam is None:
        raise BatchUndecodable(f"it is compressed with {name}: install the package cramjam")
    try:
        if name == "gzip":
            inflated = _gzip(data, bytes_max)
        elif name == "snappy":
            inflated = b"".join(_snappy(data, bytes_max))
        else:
            inflated = _framed(cramjam.lz4 if name == "lz4" else cramjam.zstd, data, bytes_max)
    except (ValueError, OSError, EOFError, zlib.error, struct.error, _DECOMPRESSION) as error:
        raise BatchUndecodable(f"it does not inflate as {name}: {error}") from None
    return inflated


def _gzip(data: memoryview, bytes_max: int) -> bytes:
    with gzip.GzipFile(fileobj=BytesIO(data)) as file:
        inflated = file.read(bytes_max + 1)
    if len(inflated) > bytes_max:
        raise InflatedTooLarge
    return inflated


def _snappy(data: memoryview, bytes_max: int) -> Iterator[bytes]:
    if data[: len(_XERIAL)] != _XERIAL:
        yield _snappy_block(data, bytes_max)
        return
    at = _XERIAL_HEADER_BYTES
    while at < len(data):
        (size,) = _BLOCK_SIZE.unpack_from(data, at)
        at += _BLOCK_SIZE.size
        if not 0 < size <= len(data) - at:
            raise ValueError("a block is truncated")
        block = _snappy_block(data[at : at + size], bytes_max)
        bytes_max -= len(block)
        at += size
        yield block


def _snappy_block(data: memoryview, bytes_max: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(data) > bytes_max:
        raise InflatedTooLarge
    return bytes(cramjam.snappy.decompress_raw(data))


def _framed(codec: Any, data: memoryview, bytes_max: int) -> bytes:
    # Clearing the largest buffer would take longer than inflating a usual batch.
    usual = len(data) * _USUAL_RATIO + _USUAL_BYTES
    into: Callable[[memoryview, bytearray], int] = codec.decompress_into
    if usual < bytes_max:
        buffer = bytearray(usual)
        try:
            return bytes(memoryview(buffer)[: into(data, buffer)])
        except _DECOMPRESSION:
            pass  # too small, or malformed
    buffer = bytearray(bytes_max)
    try:
        size = into(data, buffer)
    except _DECOMPRESSION as error:
        if "whole buffer" in str(error):
            raise InflatedTooLarge from None
        raise
    return bytes(memoryview(buffer)[:size])
