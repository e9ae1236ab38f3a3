"""Set-aside keys whose copies are in the aside topic."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec import structs

from txbroker.consumer.asides.released import Reads, ReleasedKeys, original
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.message import ReceivedMessage, source_of
from txbroker.consumer.pending import Pending
from txbroker.consumer.rounds import Rounds
from txbroker.core.consuming.aside import clearance_record, failed_again_record, staged_record
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    MessageSource,
    make_copy,
    read_copy,
    spread,
)
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.queues import StopReason
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import EARLIEST, LATEST, Fetcher
from txbroker.door.writing import Copy

_CHUNK = 500
"""Copies of a released key that are handled between two clearances."""
_READ_OFFSETS = 5000


class AsideReads(Reads, Protocol):
    """How the aside topic is read, see `ConsumingDoor`."""

    async def offsets(
        self, partitions: Collection[Partition], time_ms: int
    ) -> dict[Partition, int]: ...

    async def settled_end(self, partition: Partition) -> int: ...


class TopicAsides:
    """The set-aside keys of a reader's partitions, in the aside topic.

    Args:
        topic: the aside topic.
    """

    def __init__(
        self, engine: Engine, rounds: Rounds, door: AsideReads, fetcher: Fetcher, topic: str
    ) -> None:
        self._engine = engine
        self._rounds = rounds
        self._door = door
        self._fetcher = fetcher
        self._topic = topic
        self._partitions: dict[int, dict[PartitionState, int]] = {}
        """By partition of the aside topic: the offset from which each partition follows it."""
        self._arrived: dict[PartitionState, list[Record]] = {}
        """Records that arrived while a partition reads the earlier ones."""
        self._released = ReleasedKeys(engine, self)
        self._noted = asyncio.Event()

    async def open(self, partitions: Sequence[PartitionState]) -> None:
        """See `Asides.open`."""
        for partition in partitions:
            await self._open(partition)

    async def _open(self, partition: PartitionState) -> None:
        number = spread(partition.place, ASIDE_PARTITIONS)
        place = (self._topic, number)
        partition.aside.known = True
        self._arrived[partition] = []
        partitions = self._partitions.setdefault(number, {})
        begun = bool(partitions)
        partitions[partition] = 0
        end = (await self._door.offsets([place], LATEST))[place]
        if not begun:
            self._fetcher.add(place, end)
        if partition.aside.stored != 0:
            end = await self._door.settled_end(place)  # an open transaction may hide copies
            begin = (await self._door.offsets([place], EARLIEST))[place]
            for start in range(begin, end, _READ_OFFSETS):
                for record in await self._door.read(place, start, min(end, start + _READ_OFFSETS)):
                    self._note(partition, record)
        partitions[partition] = end
        for record in self._arrived.pop(partition, []):
            if record.offset >= end:
                self._note(partition, record)

    def close(self, partition: PartitionState) -> None:
        """Follow a partition no longer."""
        number = spread(partition.place, ASIDE_PARTITIONS)
        partitions = self._partitions.get(number, {})
        self._arrived.pop(partition, None)
        if partitions.pop(partition, None) is not None and not partitions:
            self._fetcher.remove((self._topic, number))
        self._released.end(partition)

    def deliver(self, place: Partition, records: Sequence[Record]) -> None:
        """Take records of the aside topic that arrived."""
        for partition, start in list(self._partitions.get(place[1], {}).items()):
            if partition in self._arrived:
                self._arrived[partition] += records
                continue
            for record in records:
                if record.offset >= start:
                    self._note(partition, record)
        self._noted.set()
        self._noted = asyncio.Event()

    def _note(self, partition: PartitionState, record: Record) -> None:
        key = partition.aside.note(record)
        if key is None:
            return
        if partition in self._engine.partitions:
            self._released.begin(partition, key)

    def begin(self, partition: PartitionState) -> None:
        """Handle the released keys of a partition that the engine has now."""
        for key in partition.aside.keys:
            self._released.begin(partition, key)

    async def end(self) -> None:
        """See `Asides.end`."""
        await self._released.close()

    # --- copies ------------------------------------------------------------------------------

    async def chunk(self, partition: PartitionState, key: bytes | int) -> list[Record]:
        """Return the first copies of a key that are not done."""
        entry = partition.aside.keys[key]
        place = (self._topic, spread(partition.place, ASIDE_PARTITIONS))
        end = (await self._door.offsets([place], LATEST))[place]
        found: list[Record] = []
        for start in range(entry.first, end, _READ_OFFSETS):
            for record in await self._door.read(place, start, min(end, start + _READ_OFFSETS)):
                copy = read_copy(record)
                if copy is None or copy[1].source[:2] != partition.place:
                    continue
                message, failed = copy
                source = failed.source
                mine = source.offset if record.key is None else record.key
                if mine == key and source.offset > entry.cleared:
                    if not found:
                        entry.first = record.offset
                    if failed.left_out is not None:
                        message = await original(self._door, message, failed)
                        failed = structs.replace(failed, left_out=None)
                        record = structs.replace(make_copy(message, failed), offset=record.offset)
                    if source.offset in entry.staged:
                        failed = structs.replace(failed, stage=max(1, failed.stage))
                        record = structs.replace(make_copy(message, failed), offset=record.offset)
                    found.append(record)
                    if len(found) == _CHUNK:
                        return found
        return found

    async def clear(
        self, partition: PartitionState, key: bytes | int, copies: Sequence[Record], cleared: int
    ) -> None:
        """Store that copies are done, and wait until the aside topic shows it.

        Meanwhile no message is handed out: one of the key would be copied after the clearance that
        makes the key free, or handled before such a copy.
        """
        last = _source(copies[-1])
        partition.stop(StopReason.CLEARING, key)
        try:
            if cleared < len(copies):
                count = len(copies) - cleared
                self._store(partition, clearance_record(last, copies[-1].key, count))
            while (
                entry := partition.aside.keys.get(key)
            ) is not None and entry.cleared < last.offset:
                await self._noted.wait()
        finally:
            partition.go_on(StopReason.CLEARING, key)
            self._engine.waiting.wake()

    def clearance(self, message: ReceivedMessage, count: int) -> Sequence[Copy]:
        """See `KeptCopies.clearance`."""
        source = source_of(message)
        return [self._about(source[:2], clearance_record(source, message.key, count))]

    def stage_mark(self, message: ReceivedMessage) -> Sequence[Copy]:
        """See `KeptCopies.stage_mark`."""
        source = source_of(message)
        return [self._about(source[:2], staged_record(source, message.key))]

    async def keep(self, partition: PartitionState, key: bytes | int, copy: Record) -> None:
        """See `KeptCopies.keep`."""
        entry = partition.aside.keys.get(key)
        if entry is None:
            return
        failures = entry.failures
        self._store(partition, failed_again_record(_source(copy), copy.key))
        # `released` does not tell: the next release may arrive together with this record.
        while partition.aside.keys.get(key) is entry and entry.failures == failures:
            await self._noted.wait()

    async def changed(self) -> None:
        """See `KeptCopies.changed`."""
        await self._noted.wait()

    def _store(self, partition: PartitionState, record: Record) -> None:
        self._rounds.store(Pending(partition, None, [self._about(partition.place, record)]))

    def _about(self, place: Partition, record: Record) -> Copy:
        """Return a record of the aside topic about messages of a partition."""
        return Copy(self._topic, spread(place, ASIDE_PARTITIONS), record)


def _source(record: Record) -> MessageSource:
    copy = read_copy(record)
    assert copy is not None
    return copy[1].source
