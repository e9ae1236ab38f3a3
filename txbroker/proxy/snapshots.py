"""Snapshots of one half partition, written beside its work and never in its way."""

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Protocol

import structlog

from txbroker.core.ledger import Ledger
from txbroker.core.snapshot import SLOTS, Capture
from txbroker.door import AppendRefused, PartitionDoor
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.recovery import Recovered

LOOK_S = 1.0
"""How often it is looked at whether another snapshot is due."""
ENTRIES_PER_RECORD = 4
"""A snapshot of N transactions is worth writing after N divided by this records: so it costs a
bounded share of the work, however many transactions there are."""
FAILED_PAUSE_S = 30.0
"""After one that Kafka did not take."""

log = structlog.get_logger()


class SnapshotEvents(Protocol):
    """Who is told of snapshots; called from the event loop."""

    def snapshot_written(self, seconds: float, entries: int) -> None:
        """One of so many transactions was written."""
        ...

    def snapshot_failed(self) -> None:
        """Kafka did not take one; the one before stands."""
        ...


class SnapshotWriter:
    """Writes a snapshot whenever enough has happened since the last.

    Args:
        door: where it is stored.
        ledger: what is captured.
        events: told of every snapshot.
        record_version: the version of the records to write.
        records_min: how many records there must be since the last one at least.
        writable: while this is not set nothing is begun.
    """

    def __init__(
        self,
        door: PartitionDoor,
        ledger: Ledger,
        events: SnapshotEvents,
        record_version: Callable[[], int],
        records_min: int,
        writable: asyncio.Event,
    ) -> None:
        self._door = door
        self._ledger = ledger
        self._events = events
        self._record_version = record_version
        self._records_min = records_min
        self._writable = writable
        self._written_to = 0
        self._slot = 0
        self._chunks = [0] * SLOTS

    def begin(self, recovered: Recovered) -> None:
        """Go on from what recovery has found."""
        self._written_to = recovered.replayed_from
        self._slot = recovered.slot
        self._chunks = list(recovered.chunks)

    @property
    def due(self) -> bool:
        """Whether a restart now would have to read more than is worth a snapshot."""
        ledger = self._ledger
        entries = len(ledger.transactions) + ledger.settled_count
        enough = max(self._records_min, entries // ENTRIES_PER_RECORD)
        return ledger.half_position + ledger.op_position - self._written_to >= enough

    async def run(self) -> None:
        """Write snapshots until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._writable.wait()
            if self.due and not await self.write():
                await asyncio.sleep(FAILED_PAUSE_S)

    async def write(self) -> bool:
        """Write one; say whether it is stored whole."""
        started = time.monotonic()
        ledger = self._ledger
        position = ledger.half_whole + ledger.op_whole
        capture = Capture(
            ledger, uuid.uuid4().hex, self._slot, self._record_version(), self._chunks[self._slot]
        )
        try:
            for record in capture.records():
                await self._door.store([record])
                # One chunk is some milliseconds of work: everybody else has a turn now.
                await asyncio.sleep(0)
        except (AppendRefused, KafkaUnavailable) as error:
            # Of what is stored by now nothing counts.
            log.warning("snapshot not written", partition=self._door.partition, why=str(error))
            self._chunks[self._slot] = max(self._chunks[self._slot], capture.chunks)
            self._events.snapshot_failed()
            return False
        finally:
            capture.abandon()
        self._chunks[self._slot] = capture.chunks
        self._slot = (self._slot + 1) % SLOTS
        self._written_to = position
        took_s = time.monotonic() - started
        self._events.snapshot_written(took_s, capture.entries)
        log.info(
            "snapshot written",
            partition=self._door.partition,
            transactions=capture.entries,
            seconds=round(took_s, 3),
        )
        return True
