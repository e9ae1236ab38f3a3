"""What one fetch brought, taken apart: committed records only, and where to go on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from aiokafka.errors import KafkaError
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords
from msgspec import structs

from txbroker.core.encoding import PROGRESS_KEY
from txbroker.core.records import Record
from txbroker.errors import InvariantBroken
from txbroker.kafka.protocol.batch import Decode, Unreadable, decode_batch

_LOG_APPEND_TIME = 1
# As many as are decoded in some milliseconds.
_PIECE_BYTES = 1 << 20
_PIECE_RECORDS = 1000
_LENGTH_AT, _FRAME_BYTES = 8, 12
"""A batch begins with its first offset and the length of what follows."""
_BATCH_BYTES = 256
"""Counted for a batch that is looked at but holds nothing for us."""


def _ignore(_offset: int, _reason: str) -> None:
    pass


class Fetched:
    """A fetch's answer for one partition. Its records are decoded when they are asked for.

    A batch whose checksum is right but that does not decode was not written by txbroker, which
    writes plain batches. It shows as one record without key and value at the batch's first offset;
    its other offsets are skipped.

    Args:
        append_time: raise where a record does not carry the broker's append time.
        producers: of a checkpoint topic: say of each record which transactional producer wrote it,
            and show a batch that does not decode as progress that does not read. The batch may
            hold any key, and compaction may have removed our progress for it.
        unreadable: called with the offset of each batch that does not decode, and why.
        decode: what decodes a batch, in place of `decode_batch`.

    Attributes:
        high_watermark: where the log ends, as far as its leader knows.
        stable_end: where it ends for `read_committed` readers.
        next_offset: from where to go on; the position asked for if nothing came.
        skipped: how many offsets right before `next_offset` hold no record. Known once all
            `pieces` were taken.
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
        self._seen = position
        self.skipped = 0
        self.high_watermark: int = answer[2]
        self.stable_end: int = answer[3]
        data = answer[-1]
        self.size_bytes = len(data) if data else 0
        self._batches = self._split(data) if data else []
        # The last batch's own end: compaction takes records away, but leaves that.
        ends = [position, *(batch.next_offset for batch, _data in self._batches[-1:])]
        self.next_offset = max(ends)

    @property
    def records(self) -> list[Record]:
        """All records."""
        return [record for piece in self.pieces() for record in piece]

    def pieces(self, skipped: int = 0) -> Iterator[list[Record]]:
        """Yield the records in pieces of a few milliseconds' work, some of them empty. Once.

        Args:
            skipped: how many offsets right before the position hold no record.

        Raises:
            InvariantBroken: a batch is damaged, or does not carry the broker's append time.
        """
        self.skipped = skipped
        piece: list[Record] = []
        size = 0
        wanted = range(self._position, self.next_offset)
        for batch, data in self._batches:
            before = len(piece)
            shown = self._shown(batch)
            if batch.base_offset > self._seen:
                self.skipped = 0  # what lies between came in no batch
            first = max(batch.base_offset, self._seen)
            if shown and self._take(batch, data, piece, wanted):
                self._place(piece, before)
            elif shown:
                piece.append(self._in_place_of(batch, first))
                self._place(piece, before)
                self.skipped = batch.next_offset - first - 1
            else:
                self.skipped += batch.next_offset - first
            self._seen = batch.next_offset
            new = piece[before:]
            size += sum(len(record.value or b"") for record in new) + _BATCH_BYTES
            if size >= _PIECE_BYTES or len(piece) >= _PIECE_RECORDS:
                yield piece
                piece, size = [], 0
        self._batches = []
        yield piece

    def among(self, offsets: Sequence[int]) -> list[Record]:
        """Return the records at these offsets, which grow; no others are kept. Once.

        Raises:
            InvariantBroken: as for `pieces`.
        """
        found: list[Record] = []
        for batch, data in self._batches:
            first = bisect_left(offsets, batch.base_offset)
            last = bisect_left(offsets, batch.next_offset)
            if self._shown(batch) and first < last:
                self._take(batch, data, found, frozenset(offsets[first:last]))
        self._batches = []
        return found

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
            raise self._damaged(f"behind {len(batches)} batches", error) from None
        return batches

    def _shown(self, batch: Any) -> bool:
        """Say whether a batch holds records of ours, and follow which producers' were aborted."""
        if not batch.validate_crc():
            raise self._damaged(str(batch.base_offset), "its checksum is wrong")
        while self._aborted and self._aborted[0][0] <= batch.base_offset:
            self._hidden.add(self._aborted.pop(0)[1])
        if batch.is_control_batch:
            # What a marker ended only matters where it was an abort of records in this fetch.
            if batch.producer_id in self._hidden and _is_abort(batch):
                self._hidden.discard(batch.producer_id)
            return False
        return not (batch.is_transactional and batch.producer_id in self._hidden)

    def _take(
        self, batch: Any, data: memoryview, piece: list[Record], wanted: Container[int]
    ) -> bool:
        """Append the wanted records of a batch, and return True; False if it does not decode."""
        if self._append_time and batch.timestamp_type != _LOG_APPEND_TIME:
            raise InvariantBroken(
                f"{self._name}: the record at {batch.base_offset} does not carry the broker's "
                "append time; set message.timestamp.type=LogAppendTime"
            )
        try:
            piece += self._decode(batch, data, wanted, self._producer(batch))
        except Unreadable as error:
            self._unreadable(batch.base_offset, str(error))
            return False
        return True

    def _producer(self, batch: Any) -> int:
        return int(batch.producer_id) if self._producers and batch.is_transactional else -1

    def _in_place_of(self, batch: Any, offset: int) -> Record:
        key, value = (PROGRESS_KEY, b"") if self._producers else (None, None)
        by = self._producer(batch)
        return Record(key, value, (), int(batch.max_timestamp), offset, producer=by)

    def _place(self, piece: list[Record], first: int) -> None:
        """Say on the first of a batch's records how many offsets before it hold none."""
        if self.skipped and len(piece) > first:
            record = piece[first]
            piece[first] = structs.replace(record, skipped=self.skipped)
        self.skipped = 0

    def _damaged(self, where: str, error: object) -> InvariantBroken:
        return InvariantBroken(f"{self._name}: a batch at {where} is damaged: {error}")


def _is_abort(batch: Any) -> bool:
    marker = next(iter(batch), None)
    return marker is not None and ControlRecord.parse(marker.key) == ABORT_MARKER


def _aborted(answer: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return (first offset, producer id) of aborted transactions from a fetch's answer."""
    for item in answer[4:-1]:
        if isinstance(item, list):
            return sorted((first, producer) for producer, first in item)
    return []
