"""Writes snapshots in the background, chunk by chunk, one at a time.

If one fails, the next owner replays more records; nothing else depends on it.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

from txbroker.core.records import Record
from txbroker.core.snapshot import (
    CHUNK_BYTES,
    SLOTS,
    SnapshotCapture,
    Whole,
    chunks_in,
    segment_key,
    segments_in,
)
from txbroker.door.protocols import AppendRefused
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.context import PartitionContext

LOOK_S = 1.0
"""Interval at which the writer checks whether a snapshot is due, seconds."""
REST = 1.0
"""Pause after each chunk, as a multiple of the time to make and store it."""
REST_MIN_S, REST_MAX_S = 0.002, 0.02
"""Bounds of this pause: records that arrive during a snapshot are replayed by a restart."""
LAST_S = 5.0
"""Time limit of the last snapshot at close, seconds; the same as for calls in flight."""
PAUSE_S = 30.0
"""Pause after a failed snapshot, seconds."""
REMOVED_AT_ONCE = 1000
"""Tombstones in one batch."""
ENTRIES_SHARE = 4
"""With many transactions, the next snapshot needs this fraction of as many new records, which
bounds the cost of snapshots relative to all writes."""
SOON_MS = 60_000
"""After this time that fraction alone is enough: a killed proxy leaves few records without a
snapshot."""
FIRST_RECORDS = 1
"""Enough for the first one of a partition: without any, a deletion of its first records could not
be detected."""
AGE_MAX_MS, AGE_SHARE = 3_600_000, 4
"""With any new record, a snapshot is due after this time, and after this share of half's retention:
while a proxy runs, retention deletes only records that a snapshot holds, so records missing after
the newest one were deleted by an operator or another client."""

log = get_logger(__name__)


class SnapshotWriter:
    """Writes the snapshots of one half partition."""

    def __init__(self, context: PartitionContext) -> None:
        settings = context.settings
        self._context = context
        self._door = context.door
        self._ledger = context.ledger
        self._events = context.events
        self._records_min = settings.snapshot_records_min
        self._age_max_ms = min(AGE_MAX_MS, settings.half_retention_ms // AGE_SHARE)
        self._at_ms = 0
        self._half = 0
        """The newest complete snapshot covers the half topic below this offset."""
        self._half_start = 0
        self._wanted = False
        self._slot = 0
        self._chunks = [0] * SLOTS
        self._segments: set[str] = set()
        """Names of stored segments."""
        self._greatest: frozenset[str] = frozenset()
        """Names of the segments in the newest complete snapshot."""
        self._last = 0
        self._checkpoint_op = -1
        """The `op` of the checkpoint in the newest complete snapshot; -1 without one."""
        self._capture: SnapshotCapture | None = None

    def start_from(self, greatest: Whole | None, stored: Sequence[Record], position: int) -> None:
        """Start with the result of the recovery.

        Args:
            greatest: the newest complete snapshot, never to be overwritten; None without one.
            stored: the records of all snapshots.
            position: the sum of the offsets at which the replay of both logs began.
        """
        self._slot = 0 if greatest is None else _other(greatest.slot)
        self._chunks = [chunks_in(slot, stored) for slot in range(SLOTS)]
        self._segments = segments_in(stored)
        segments = () if greatest is None else greatest.closing.segments
        self._greatest = frozenset(segments)
        self._last = position
        self._checkpoint_op = -1 if greatest is None else greatest.closing.progress
        if greatest is not None:
            self._half, self._at_ms = greatest.closing.half, greatest.closing.at_ms
            # Without a time, an older version wrote it, and may have let retention pass it.
            self._wanted = not self._at_ms

    def deleted_before(self, half_start: int) -> None:
        """Note the new start of the half topic: a snapshot must cover the records below it."""
        self._half_start = max(self._half_start, half_start)

    def want(self) -> None:
        """Write one as soon as possible: the ledger holds a change that no log shows."""
        self._wanted = True

    def abandon(self) -> None:
        """Abandon the snapshot in progress: the ledger is about to be reconciled, or nothing may
        be written now."""
        if self._capture is not None:
            self._capture.abandon()
            self._capture = None

    @property
    def _tail(self) -> int:
        return self._ledger.half_whole + self._ledger.op_whole - self._last

    @property
    def due(self) -> bool:
        """Whether the next snapshot should be written: enough records, enough time, or a change
        that the logs no longer show."""
        ledger, tail = self._ledger, self._tail
        age_ms = self._context.clock.now_ms() - self._at_ms
        if self._wanted or self._half < min(self._half_start, ledger.half_whole):
            return True
        if self._checkpoint_op == 0 < ledger.op_committed:
            return True  # without it, a deletion of the very first checkpoint could not be detected
        stored = self._checkpoint_op >= 0
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
        """Write a last snapshot before the owner closes, if there are new records or one is due:
        retention may pass the newest one before the next owner claims."""
        if self._tail > 0 or self.due:
            try:
                await asyncio.wait_for(self.write(), LAST_S)
            except TimeoutError:
                log.warning("snapshot not written", partition=self._ledger.partition, why="closing")
                self._events.snapshot_failed()

    async def write(self) -> bool:
        """Write a snapshot of the current ledger; return whether it is complete."""
        ledger, slot = self._ledger, self._slot
        half, position = ledger.half_whole, ledger.half_whole + ledger.op_whole
        checkpoint_op = ledger.op_committed
        began_s, at_ms = time.monotonic(), self._context.clock.now_ms()
        wanted, self._wanted, whole = self._wanted, False, False
        capture = self._capture = SnapshotCapture(
            ledger,
            uuid.uuid4().hex,
            slot,
            self._context.proxy.record_version,
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
            self._checkpoint_op = checkpoint_op
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

    async def _store(self, capture: SnapshotCapture, slot: int) -> bool:
        """Store the records; return False if the snapshot was abandoned before its end."""
        since_s = time.monotonic()
        for records in _batches(capture.records()):
            if self._capture is not capture:
                return False
            # Before it is stored: after an error it is unknown whether it was.
            self._chunks[slot] = max(self._chunks[slot], capture.chunks)
            await self._store_batch(records)
            rest_s = REST * (time.monotonic() - since_s)
            await asyncio.sleep(min(max(rest_s, REST_MIN_S), REST_MAX_S))
            since_s = time.monotonic()
        return True

    async def _store_batch(self, records: Sequence[Record]) -> None:
        await self._context.gate.wait()
        await self._door.store(records)

    async def _tidy(self, capture: SnapshotCapture, slot: int) -> None:
        """Remove records that neither this complete snapshot nor the one before it needs."""
        kept = frozenset(capture.segments)
        self._segments |= kept
        superfluous = self._segments - kept - self._greatest
        self._greatest = kept
        tombstones = [Record(segment_key(name), None) for name in superfluous]
        tombstones += capture.superfluous()
        try:
            for at in range(0, len(tombstones), REMOVED_AT_ONCE):
                await self._store_batch(tombstones[at : at + REMOVED_AT_ONCE])
        except (AppendRefused, KafkaUnavailable) as error:
            # They do no harm; the next snapshot removes them.
            log.info("old snapshot not removed", partition=self._ledger.partition, why=str(error))
            return
        self._segments -= superfluous
        self._chunks[slot] = capture.chunks


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield records in batches of about a chunk's size. The last record comes alone: it may be
    stored only after all others."""
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
