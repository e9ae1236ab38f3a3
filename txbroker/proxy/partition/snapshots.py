"""Snapshots are written beside the work: chunk by chunk, never in its way, never two at once.

One that cannot be written is given up: the next owner replays more, and that is all.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

from txbroker.core.records import Record
from txbroker.core.snapshot import (
    CHUNK_BYTES,
    SLOTS,
    Capture,
    Whole,
    chunks_in,
    segment_key,
    segments_in,
)
from txbroker.door.protocols import AppendRefused, PartitionDoor
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.context import PartitionContext

LOOK_S = 1.0
"""How often it is seen whether a snapshot is due, seconds."""
REST = 1.0
"""After each chunk a rest of so many times what it took, beside the one that storing it takes."""
REST_MIN_S, REST_MAX_S = 0.002, 0.02
"""Not longer: what comes while a snapshot is written is replayed by a restart."""
LAST_S = 5.0
"""How long closing may take for a last one, seconds: as long as calls under way are waited for."""
PAUSE_S = 30.0
"""After a snapshot that could not be written, seconds."""
REMOVED_AT_ONCE = 1000
"""Segments."""
ENTRIES_SHARE = 4
"""A snapshot of many transactions is due only when a fraction of as many records have come: so
writing snapshots costs less than a fixed share of what is written anyway."""
SOON_MS = 60_000
"""After this time, what has come since only needs to be that fraction: a proxy that is killed
leaves few records that no snapshot holds."""
FIRST_RECORDS = 1
"""Enough for the first one of a partition: without any, nobody could tell that records which the
partition began with were deleted."""
AGE_MAX_MS, AGE_SHARE = 3_600_000, 4
"""Where anything has come since, a snapshot is due after so long, and after this share of half's
retention: retention never deletes what no snapshot holds while a proxy runs, so what is missing
behind the newest one was deleted by somebody."""

log = get_logger(__name__)


class SnapshotWriter:
    """Writes the snapshots of one half partition.

    Args:
        context: what all parts of the partition share.
        door: where they are stored.
    """

    def __init__(self, context: PartitionContext, door: PartitionDoor) -> None:
        settings = context.settings
        self._context = context
        self._door = door
        self._ledger = context.ledger
        self._events = context.events
        self._records_min = settings.snapshot_records_min
        self._age_max_ms = min(AGE_MAX_MS, settings.half_retention_ms // AGE_SHARE)
        self._at_ms = 0
        self._half = 0
        """The half offset below which the newest whole one holds everything."""
        self._half_start = 0
        self._wanted = False
        self._slot = 0
        self._chunks = [0] * SLOTS
        self._segments: set[str] = set()
        """Names of those that are stored."""
        self._greatest: frozenset[str] = frozenset()
        """Names of those in the greatest whole snapshot."""
        self._last = 0
        self._told = -1
        """The `op` of the progress in the newest whole one; -1 without one."""
        self._capture: Capture | None = None

    def found(self, greatest: Whole | None, stored: Sequence[Record], position: int) -> None:
        """Begin with what recovery has found.

        Args:
            greatest: the greatest whole snapshot, never to be overwritten; None without one.
            stored: the records of all snapshots.
            position: the sum of the offsets from which on the logs were replayed.
        """
        self._slot = 0 if greatest is None else _other(greatest.slot)
        self._chunks = [chunks_in(slot, stored) for slot in range(SLOTS)]
        self._segments = segments_in(stored)
        segments = () if greatest is None else greatest.closing.segments
        self._greatest = frozenset(segments)
        self._last = position
        self._told = -1 if greatest is None else greatest.closing.progress
        if greatest is not None:
            self._half, self._at_ms = greatest.closing.half, greatest.closing.at_ms
            # An older version wrote it, and may have let retention pass it.
            self._wanted = not self._at_ms

    def deleted_before(self, half_start: int) -> None:
        """The half topic begins here by now: what lies below is to be in a snapshot."""
        self._half_start = max(self._half_start, half_start)

    def want(self) -> None:
        """Something has changed that no log tells: write one as soon as possible."""
        self._wanted = True

    def abandon(self) -> None:
        """Give up the one that is being written, if any: the ledger is to be changed otherwise
        than by records and acknowledged turns, or nothing may be written now."""
        if self._capture is not None:
            self._capture.abandon()
            self._capture = None

    @property
    def _tail(self) -> int:
        """How many records have come since the newest one."""
        return self._ledger.half_whole + self._ledger.op_whole - self._last

    @property
    def due(self) -> bool:
        """Whether so much has come since the last one, or it is so old, that the next should be
        written; or whether the logs do not tell any more what only the ledger knows."""
        ledger, tail = self._ledger, self._tail
        age_ms = self._context.clock.now_ms() - self._at_ms
        if self._wanted or self._half < min(self._half_start, ledger.half_whole):
            return True
        if self._told == 0 < ledger.op_committed:
            return True  # without it the removal of the first progress of all would not show
        stored = self._told >= 0
        if stored and tail > 0 and age_ms >= self._age_max_ms:
            return True
        least = 1 if stored and age_ms >= SOON_MS else self._records_min
        enough = max(least, len(ledger.index.transactions) // ENTRIES_SHARE)
        return tail >= (enough if stored else min(enough, FIRST_RECORDS))

    async def run(self) -> None:
        """Write a snapshot whenever one is due, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.due and not await self.write():
                await asyncio.sleep(PAUSE_S)

    async def last(self) -> None:
        """Before the owner closes for good, write one if anything has come since the newest one,
        or is due: retention may pass it before the next owner claims."""
        if self._tail > 0 or self.due:
            try:
                async with asyncio.timeout(LAST_S):
                    await self.write()
            except TimeoutError:
                log.warning("snapshot not written", partition=self._ledger.partition, why="closing")
                self._events.snapshot_failed()

    async def write(self) -> bool:
        """Write a snapshot of the ledger as it is now; say whether it is stored whole."""
        ledger, slot = self._ledger, self._slot
        half, position = ledger.half_whole, ledger.half_whole + ledger.op_whole
        told = ledger.op_committed
        began_s, at_ms = time.monotonic(), self._context.clock.now_ms()
        wanted, self._wanted, whole = self._wanted, False, False
        capture = self._capture = Capture(
            ledger,
            uuid.uuid4().hex,
            slot,
            self._context.record_version(),
            self._chunks[slot],
            self._segments,
            at_ms,
        )
        try:
            whole = await self._store(capture, slot)
        except (AppendRefused, KafkaUnavailable) as error:
            log.warning("snapshot not written", partition=ledger.partition, why=str(error))
            self._events.snapshot_failed()
            return False
        finally:
            self._wanted |= wanted and not whole
            capture.abandon()
            if self._capture is capture:
                self._capture = None
        if whole:
            self._last, self._half, self._at_ms = position, half, at_ms
            self._told = told
            self._slot = _other(slot)
            await self._tidy(capture, slot)
            took_s = time.monotonic() - began_s
            self._events.snapshot_written(took_s, capture.entries)
            log.debug(
                "snapshot written",
                partition=ledger.partition,
                entries=capture.entries,
                seconds=round(took_s, 3),
            )
        return whole

    async def _store(self, capture: Capture, slot: int) -> bool:
        """Store record after record; False where the snapshot was abandoned before its end.

        Raises:
            AppendRefused, KafkaUnavailable: before its end.
        """
        since_s = time.monotonic()
        for records in _batches(capture.records()):
            if self._capture is not capture:
                return False
            # Even where it is not stored: nobody knows.
            self._chunks[slot] = max(self._chunks[slot], capture.chunks)
            await self._context.gate.wait()
            await self._door.store(records)
            rest_s = REST * (time.monotonic() - since_s)
            await asyncio.sleep(min(max(rest_s, REST_MIN_S), REST_MAX_S))
            since_s = time.monotonic()
        return True

    async def _tidy(self, capture: Capture, slot: int) -> None:
        """Remove what neither this snapshot, which is whole, nor the one before it holds."""
        kept = frozenset(capture.segments)
        self._segments |= kept
        superfluous = self._segments - kept - self._greatest
        self._greatest = kept
        tombstones = [Record(segment_key(name), None) for name in superfluous]
        tombstones += capture.superfluous()
        try:
            for at in range(0, len(tombstones), REMOVED_AT_ONCE):
                await self._context.gate.wait()
                await self._door.store(tombstones[at : at + REMOVED_AT_ONCE])
        except (AppendRefused, KafkaUnavailable) as error:
            # They are in nobody's way: next time.
            log.info("old snapshot not removed", partition=self._ledger.partition, why=str(error))
            return
        self._segments -= superfluous
        self._chunks[slot] = capture.chunks


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield records in batches of about a chunk's size, the last one alone: it may only be stored
    when all others are."""
    batch: list[Record] = []
    size = 0
    for record in records:
        length = len(record.value or b"")
        if batch and size + length > CHUNK_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += length
    if batch[:-1]:
        yield batch[:-1]
    yield batch[-1:]


def _other(slot: int) -> int:
    return (slot + 1) % SLOTS
