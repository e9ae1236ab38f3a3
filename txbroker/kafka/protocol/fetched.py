"""Decode the answer of one fetch: committed records, and the next offset."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import google_crc32c
from aiokafka.errors import KafkaError
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords
from msgspec import structs

from txbroker.core.encoding import PROGRESS_KEY
from txbroker.core.records import Record
from txbroker.errors import InvariantBroken
from txbroker.kafka.protocol.batch import Decode, decode_batch
from txbroker.kafka.protocol.codecs import BatchUndecodable

_LOG_APPEND_TIME = 1
# Decoded in some milliseconds.
_PIECE_BYTES = 1 << 20
_PIECE_RECORDS = 1000
_LENGTH_AT, _FRAME_BYTES = 8, 12
"""A batch begins with its base offset and the length of the rest."""
_CHECKED_FROM = 21
"""What follows is covered by the checksum."""
_BATCH_BYTES = 256
"""Accounted for each batch, even without records for us."""


def _ignore(_offset: int, _reason: str) -> None:
    pass


class Fetched:
    """A fetch's answer for one partition, decoded lazily.

    A batch with a valid checksum that does not decode was written by another client: txbroker
    writes no compressed batches. It becomes one record without key and value at the batch's first
    offset.

    Args:
        name: topic and partition, for messages.
        position: the requested offset.
        answer: the partition's fields of the answer.
        append_time: raise if a record lacks the broker's append time.
        producers: for checkpoint topics: set the producer id of transactional records, and turn a
            batch that does not decode into malformed progress. It may hold any key, and compaction
            may have removed our progress for it.
        unreadable: called with the offset of each batch that does not decode, and the reason.
        decode: decodes a batch instead of `decode_batch`.

    Attributes:
        high_watermark: according to the leader.
        stable_end: the last stable offset.
        next_offset: of the next fetch; the requested one if the answer is empty.
        seen: every offset below it is in the pieces so far, or holds no record.
        skipped: number of offsets right before `next_offset` without record, known after `pieces`.
    """

    def __init__(
        self,
        name: str,
        position: int,
        answer: tuple[Any, ...],
        *,
        append_time: bool,
        producers: bool = False,
        unreadable: Callable[[int, str], None] = _ignore,
        decode: Decode = decode_batch,
    ) -> None:
        self._name = name
        self._position = position
        self._append_time = append_time
        self._producers = producers
        self._unreadable = unreadable
        self._decode = decode
        self._aborted = _aborted(answer)
        self._hidden: set[int] = set()
        self.seen = position
        self._reason = ""
        self.skipped = 0
        self.high_watermark: int = answer[2]
        self.stable_end: int = answer[3]
        data = answer[-1]
        self.size_bytes = len(data) if data else 0
        self._batches = self._split(data) if data else []
        # The last batch's own end: compaction removes records but keeps it.
        ends = [position, *(batch.next_offset for batch, _data in self._batches[-1:])]
        self.next_offset = max(ends)

    @property
    def records(self) -> list[Record]:
        """All records."""
        return [record for piece in self.pieces() for record in piece]

    def pieces(self, skipped: int = 0) -> Iterator[list[Record]]:
        """Yield the records, once, in pieces that take a few milliseconds; some may be empty.

        Raises:
            InvariantBroken: a batch is corrupt, or lacks the broker's append time.
        """
        self.skipped = skipped
        piece: list[Record] = []
        size = 0
        offsets = range(self._position, self.next_offset)
        for batch, data in self._batches:
            before = len(piece)
            visible = self._is_visible(batch, data)
            if batch.base_offset > self.seen:
                self.skipped = 0  # the answer has no batch for the offsets between
            first = max(batch.base_offset, self.seen)
            if visible and self._take(batch, data, piece, offsets):
                self._note_skipped(piece, before)
            elif visible:
                if piece:
                    yield piece
                    piece, size, before = [], 0, 0
                self._unreadable(batch.base_offset, self._reason)
                piece.append(self._placeholder(batch, first))
                self._note_skipped(piece, before)
                self.skipped = batch.next_offset - first - 1
            else:
                self.skipped += batch.next_offset - first
            self.seen = batch.next_offset
            size += len(data) + _BATCH_BYTES
            if batch.compression_type:
                size += sum(len(record.value or b"") for record in piece[before:])
            if size >= _PIECE_BYTES or len(piece) >= _PIECE_RECORDS:
                yield piece
                piece, size = [], 0
        self._batches = []
        yield piece

    def among(self, offsets: Sequence[int]) -> list[Record]:
        """Return the records at ascending offsets, once."""
        records: list[Record] = []
        for batch, data in self._batches:
            first = bisect_left(offsets, batch.base_offset)
            last = bisect_left(offsets, batch.next_offset)
            if self._is_visible(batch, data) and first < last:
                some = frozenset(offsets[first:last])
                # As for `pieces`: an owner picks the last record that it read again.
                if not self._take(batch, data, records, some) and batch.base_offset in some:
                    self._unreadable(batch.base_offset, self._reason)
                    records.append(self._placeholder(batch, batch.base_offset))
        self._batches = []
        return records

    def _split(self, data: bytes) -> list[tuple[Any, memoryview]]:
        memory = MemoryRecords(data)
        batches: list[tuple[Any, memoryview]] = []
        rest = memoryview(data)
        try:
            while memory.has_next():
                size = _FRAME_BYTES + int.from_bytes(rest[_LENGTH_AT:_FRAME_BYTES], "big")
                batches.append((memory.next_batch(), rest[:size]))
                rest = rest[size:]
        except KafkaError as error:
            raise self._corrupt(f"after {len(batches)} batches", error) from None
        return batches

    def _is_visible(self, batch: Any, data: memoryview) -> bool:
        """Return whether a batch holds committed records; track aborted transactions."""
        # The client library's checksum takes ten times as long.
        if google_crc32c.value(bytes(data[_CHECKED_FROM:])) != batch.crc:
            raise self._corrupt(str(batch.base_offset), "its checksum is wrong")
        while self._aborted and self._aborted[0][0] <= batch.base_offset:
            self._hidden.add(self._aborted.pop(0)[1])
        if batch.is_control_batch:
            # A marker matters only if it aborts records of this fetch.
            if batch.producer_id in self._hidden and _is_abort(batch):
                self._hidden.discard(batch.producer_id)
            return False
        return not (batch.is_transactional and batch.producer_id in self._hidden)

    def _take(
        self, batch: Any, data: memoryview, piece: list[Record], offsets: Container[int]
    ) -> bool:
        """Append the records of a batch at `offsets`; return False, and note the reason, if it does
        not decode."""
        if self._append_time and batch.timestamp_type != _LOG_APPEND_TIME:
            raise InvariantBroken(
                f"{self._name}: the record at offset {batch.base_offset} lacks the append time: "
                "set message.timestamp.type=LogAppendTime"
            )
        try:
            piece += self._decode(batch, data, offsets, self._producer(batch))
        except BatchUndecodable as error:
            self._reason = str(error)
            return False
        return True

    def _producer(self, batch: Any) -> int:
        return int(batch.producer_id) if self._producers and batch.is_transactional else -1

    def _placeholder(self, batch: Any, offset: int) -> Record:
        key, value = (PROGRESS_KEY, b"") if self._producers else (None, None)
        by = self._producer(batch)
        return Record(key, value, (), int(batch.max_timestamp), offset, producer=by)

    def _note_skipped(self, piece: list[Record], first: int) -> None:
        """Set on a batch's first record the number of offsets before it without record."""
        if self.skipped and len(piece) > first:
            record = piece[first]
            piece[first] = structs.replace(record, skipped=self.skipped)
        self.skipped = 0

    def _corrupt(self, where: str, error: object) -> InvariantBroken:
        return InvariantBroken(f"{self._name}: a batch at {where} is corrupt: {error}")


def _is_abort(batch: Any) -> bool:
    marker = next(iter(batch), None)
    return marker is not None and ControlRecord.parse(marker.key) == ABORT_MARKER


def _aborted(answer: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return (first offset, producer id) of aborted transactions from a fetch's answer."""
    for item in answer[4:-1]:
        if isinstance(item, list):
            return sorted((first, producer) for producer, first in item)
    return []
