"""Set-aside keys: follows the aside topic, and handles the copies of released keys.

A released key stays set aside until all its copies are done: new messages of it are copied
meanwhile, so its order holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec import structs

from txbroker.consumer.committer import Committer
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work, size_of, source_of
from txbroker.consumer.stores.pending import Pending
from txbroker.core.consuming.aside import (
    AsideKeys,
    clearance_record,
    failed_again_record,
    staged_record,
)
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    Failed,
    Source,
    is_original,
    make_copy,
    read_copy,
    spread,
)
from txbroker.core.records import Record
from txbroker.door.consuming import EARLIEST, LATEST, Fetcher, Partition
from txbroker.door.writing import Copy
from txbroker.error_text import safe_repr
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.tasks import Background
from txbroker.net.timers import grown_pause_s

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine

log = structlog.wrap_logger(logging.getLogger(__name__))

_CHUNK = 500
"""Copies of a released key that are handled between two clearances."""
_READ_OFFSETS = 5000
_PAUSE_S, _PAUSE_MAX_S = 1.0, 60.0
_ONE_LANE = ""


class OriginalMissing(KafkaUnavailable):
    """A message of which a copy has only a part was deleted."""

    lasting = True


class Reads(Protocol):
    """How records are read, see `ConsumingDoor`."""

    async def read(self, partition: Partition, start: int, end: int) -> list[Record]: ...


class AsideReads(Reads, Protocol):
    """How the aside topic is read, see `ConsumingDoor`."""

    async def offsets(
        self, partitions: Collection[Partition], time_ms: int
    ) -> dict[Partition, int]: ...

    async def settled_end(self, partition: Partition) -> int: ...


async def original(door: Reads, message: Record, failed: Failed) -> Record:
    """Read the message of a copy that lacks a part of it, in its first place.

    Args:
        message: the rest of it, in the copy.

    Raises:
        OriginalMissing
        KafkaUnavailable
    """
    topic, partition, offset = failed.source
    for record in await door.read((topic, partition), offset, offset + 1):
        if is_original(record, message, failed):
            return record
    raise OriginalMissing(
        f"the copy of {failed.source} lacks {failed.left_out and failed.left_out.parts}, for which "
        "its topic was too small, and the message itself was deleted: it cannot be handled again"
    )


class ReleasedKey(Work):
    """The copies of a released key, as a separate partition for the engine.

    Attributes:
        parent: the partition that they come from.
        done: the number of copies that are done, in order.
    """

    def __init__(self, parent: Work, key: bytes | int, copies: KeptCopies) -> None:
        super().__init__(parent.engine, parent.place, parent.lease)
        self.parent = parent
        self._copies = copies
        self._key = key
        self.cleared = 0
        """How many of the copies are cleared together with their results."""
        self._numbers: dict[ReceivedMessage, int] = {}
        self._counts: dict[int, int] = {}
        self.token = parent.token
        self.is_kept = parent.keeps_rows
        self.done = 0
        self.gave_up = False
        self.ended = asyncio.Event()
        self._count = 0
        self.finished = self._one_more

    @property
    def owner(self) -> Work:
        return self.parent

    def begin(self, copies: Sequence[Record]) -> None:
        messages = messages_of(self, copies)
        self._count = len(messages)
        self._numbers = {message: number for number, message in enumerate(messages)}
        self.bytes = sum(message.size for message in messages)
        self.engine.admit(self, messages)

    def _one_more(self, _offset: int) -> None:
        self.done += 1
        if self.done == self._count:
            self.ended.set()

    def clearance(self, message: ReceivedMessage) -> Sequence[Copy]:
        """See `Work.clearance`: with the copies before that have no result to store."""
        number = self._numbers[message]
        if number not in self._counts:
            self._counts[number] = number + 1 - self.cleared
            self.cleared = number + 1
        clearance = self._copies.clearance(message, self._counts[number])
        if clearance and number + 1 == self._count:
            # Before it can be stored, see `TopicAsides.clear`.
            self.engine.suspensions.hold(self.parent, self._key)
        return clearance

    def stage_mark(self, message: ReceivedMessage) -> Sequence[Copy]:
        """See `Work.stage_mark`."""
        return self._copies.stage_mark(message)

    def fails_again(self) -> bool:
        """The key stays set aside; return True."""
        self.gave_up = True
        self.ended.set()
        return True


class Parts:
    """What the engine needs for a released key: nothing is committed or fetched for it alone."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self.store = committer.store
        self.withdraw = committer.withdraw
        self.unavailable = committer.unavailable
        self.flush = committer.flush
        self.fenced = committer.fenced

    def changed(self, work: Work, count: int = 1) -> None: ...

    def pause(self, partition: Partition) -> None: ...

    def resume(self, partition: Partition) -> None: ...


class Asides(Protocol):
    """The set-aside keys of a reader's partitions."""

    async def open(self, works: Sequence[Work]) -> None:
        """Learn the set-aside keys of partitions, and follow them until `close`."""

    def begin(self, work: Work) -> None:
        """Handle the released keys of a partition that the engine has now."""

    def close(self, work: Work) -> None:
        """Follow a partition no longer."""

    def deliver(self, partition: Partition, records: Sequence[Record]) -> None:
        """Take records of the aside topic that arrived."""

    async def end(self) -> None:
        """End all tasks."""


class KeptCopies(Protocol):
    """Where the copies of set-aside keys are."""

    async def chunk(self, work: Work, key: bytes | int) -> list[Record]:
        """Return the first copies of a key that are not done."""

    async def clear(
        self, work: Work, key: bytes | int, copies: Sequence[Record], cleared: int
    ) -> None:
        """Copies are done: store that, and wait until it is known.

        Args:
            cleared: how many of the first ones were cleared with their results.
        """

    def clearance(self, message: ReceivedMessage, count: int) -> Sequence[Copy]:
        """Return what clears a copy, and those before it, if it is stored with its result.

        Args:
            count: of all these copies.
        """

    def stage_mark(self, message: ReceivedMessage) -> Sequence[Copy]:
        """Return what marks the first stage of a copy as done, if it is stored with its result."""

    async def keep(self, work: Work, key: bytes | int, copy: Record) -> None:
        """A copy failed again: end the release of its key, and wait until that is known."""

    async def changed(self) -> None:
        """Wait until copies may have changed."""


class ReleasedKeys:
    """Handles the copies of released keys.

    Args:
        copies: where they are.
    """

    def __init__(self, engine: Engine, committer: Committer, copies: KeptCopies) -> None:
        self._engine = engine
        self._committer = committer
        self._copies = copies
        self._tasks: dict[tuple[Work, bytes | int], asyncio.Task[None]] = {}
        self._background = Background(engine.fail)

    def begin(self, work: Work, key: bytes | int) -> None:
        """Handle a key if it is released."""
        assert work.aside is not None
        entry = work.aside.keys.get(key)
        if entry is not None and entry.released and (work, key) not in self._tasks:
            self._tasks[work, key] = self._background.start(self._handle(work, key))

    def end(self, work: Work) -> None:
        """End with a partition."""
        for key in [key for key in self._tasks if key[0] is work]:
            self._tasks.pop(key).cancel()

    async def close(self) -> None:
        """End all tasks."""
        await self._background.end()

    async def _handle(self, work: Work, key: bytes | int) -> None:
        """Handle the copies of a released key until there are none."""
        assert work.aside is not None
        failures = 0
        try:
            while (entry := work.aside.keys.get(key)) is not None and entry.released:
                try:
                    copies = await self._copies.chunk(work, key)
                    failures = 0
                    if not copies:
                        await self._copies.changed()
                        continue
                    released = await self._handle_chunk(work, key, copies)
                    if done := copies[: released.done]:
                        await self._copies.clear(work, key, done, released.cleared)
                    if released.gave_up:
                        await self._copies.keep(work, key, copies[0])
                        log.warning("released key failed again", partition=work.place)
                except KafkaUnavailable as error:
                    failures += 1
                    log.warning("released key not read", error=safe_repr(error), attempt=failures)
                    await asyncio.sleep(grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S))
            if entry is None:
                log.info("released key is done", partition=work.place)
        finally:
            self._tasks.pop((work, key), None)
            self._engine.suspensions.release(work, key)
            self._engine.waiting.wake()

    async def _handle_chunk(
        self, work: Work, key: bytes | int, copies: Sequence[Record]
    ) -> ReleasedKey:
        released = ReleasedKey(work, key, self._copies)
        parts = Parts(self._committer)
        self._engine.add(released, parts, parts)
        try:
            released.begin(copies)
            await released.ended.wait()
            failpoint("consumer.key_handled")
        finally:
            self._engine.remove(released)
        return released


class TopicAsides:
    """The set-aside keys of a reader's partitions, in the aside topic.

    Args:
        topic: the aside topic.
    """

    def __init__(
        self, engine: Engine, committer: Committer, door: AsideReads, fetcher: Fetcher, topic: str
    ) -> None:
        self._engine = engine
        self._committer = committer
        self._door = door
        self._fetcher = fetcher
        self._topic = topic
        self._works: dict[int, dict[Work, int]] = {}
        """By partition of the aside topic: the offset from which each work follows it."""
        self._arrived: dict[Work, list[Record]] = {}
        """Records that arrived while a work reads the earlier ones."""
        self._released = ReleasedKeys(engine, committer, self)
        self._noted = asyncio.Event()

    async def open(self, works: Sequence[Work]) -> None:
        """See `Asides.open`."""
        for work in works:
            await self._open(work)

    async def _open(self, work: Work) -> None:
        number = spread(work.place, ASIDE_PARTITIONS)
        place = (self._topic, number)
        work.aside = AsideKeys(work.place)
        self._arrived[work] = []
        works = self._works.setdefault(number, {})
        begun = bool(works)
        works[work] = 0
        end = (await self._door.offsets([place], LATEST))[place]
        if not begun:
            self._fetcher.add(place, end)
        if work.aside_stored != 0:
            end = await self._door.settled_end(place)  # an open transaction may hide copies
            begin = (await self._door.offsets([place], EARLIEST))[place]
            for start in range(begin, end, _READ_OFFSETS):
                for record in await self._door.read(place, start, min(end, start + _READ_OFFSETS)):
                    self._note(work, record)
        works[work] = end
        for record in self._arrived.pop(work, []):
            if record.offset >= end:
                self._note(work, record)

    def close(self, work: Work) -> None:
        """Follow a partition no longer."""
        number = spread(work.place, ASIDE_PARTITIONS)
        works = self._works.get(number, {})
        self._arrived.pop(work, None)
        if works.pop(work, None) is not None and not works:
            self._fetcher.remove((self._topic, number))
        self._released.end(work)

    def deliver(self, partition: Partition, records: Sequence[Record]) -> None:
        """Take records of the aside topic that arrived."""
        for work, start in list(self._works.get(partition[1], {}).items()):
            if work in self._arrived:
                self._arrived[work] += records
                continue
            for record in records:
                if record.offset >= start:
                    self._note(work, record)
        self._noted.set()
        self._noted = asyncio.Event()

    def _note(self, work: Work, record: Record) -> None:
        assert work.aside is not None
        key = work.aside.note(record)
        if key is None:
            return
        work.setting_aside.discard(key)
        if work in self._engine.works:
            self._released.begin(work, key)

    def begin(self, work: Work) -> None:
        """Handle the released keys of a partition that the engine has now."""
        for key in work.aside.keys if work.aside is not None else ():
            self._released.begin(work, key)

    async def end(self) -> None:
        """See `Asides.end`."""
        await self._released.close()

    # --- copies ------------------------------------------------------------------------------

    async def chunk(self, work: Work, key: bytes | int) -> list[Record]:
        """Return the first copies of a key that are not done."""
        assert work.aside is not None
        entry = work.aside.keys[key]
        place = (self._topic, spread(work.place, ASIDE_PARTITIONS))
        end = (await self._door.offsets([place], LATEST))[place]
        found: list[Record] = []
        for start in range(entry.first, end, _READ_OFFSETS):
            for record in await self._door.read(place, start, min(end, start + _READ_OFFSETS)):
                copy = read_copy(record)
                if copy is None or copy[1].source[:2] != work.place:
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
        self, work: Work, key: bytes | int, copies: Sequence[Record], cleared: int
    ) -> None:
        """Store that copies are done, and wait until the aside topic shows it.

        Meanwhile no message is handed out: one of the key would be copied after the clearance that
        makes the key free, or handled before such a copy.
        """
        assert work.aside is not None
        last = _source(copies[-1])
        self._engine.suspensions.hold(work, key)
        try:
            if cleared < len(copies):
                count = len(copies) - cleared
                self._store(work, clearance_record(last, copies[-1].key, count))
            while (entry := work.aside.keys.get(key)) is not None and entry.cleared < last.offset:
                await self._noted.wait()
        finally:
            self._engine.suspensions.release(work, key)
            self._engine.waiting.wake()

    def clearance(self, message: ReceivedMessage, count: int) -> Sequence[Copy]:
        """See `KeptCopies.clearance`."""
        source = source_of(message)
        return [self._about(source[:2], clearance_record(source, message.key, count))]

    def stage_mark(self, message: ReceivedMessage) -> Sequence[Copy]:
        """See `KeptCopies.stage_mark`."""
        source = source_of(message)
        return [self._about(source[:2], staged_record(source, message.key))]

    async def keep(self, work: Work, key: bytes | int, copy: Record) -> None:
        """See `KeptCopies.keep`."""
        assert work.aside is not None
        entry = work.aside.keys.get(key)
        if entry is None:
            return
        failures = entry.failures
        self._store(work, failed_again_record(_source(copy), copy.key))
        # `released` does not tell: the next release may arrive together with this record.
        while work.aside.keys.get(key) is entry and entry.failures == failures:
            await self._noted.wait()

    async def changed(self) -> None:
        """See `KeptCopies.changed`."""
        await self._noted.wait()

    def _store(self, work: Work, record: Record) -> None:
        self._committer.store(Pending(work, None, [self._about(work.place, record)]))

    def _about(self, place: Partition, record: Record) -> Copy:
        """Return a record of the aside topic about messages of a partition."""
        return Copy(self._topic, spread(place, ASIDE_PARTITIONS), record)


def _source(record: Record) -> Source:
    copy = read_copy(record)
    assert copy is not None
    return copy[1].source


def messages_of(
    work: Work, copies: Sequence[Record], lane: Hashable = _ONE_LANE
) -> list[ReceivedMessage]:
    """Return the messages of copies, in order.

    Args:
        lane: of all of them; None: each is alone.
    """
    messages = []
    for record in copies:
        copy = read_copy(record)
        assert copy is not None
        message, failed = copy
        size, attempt, stage = size_of(message), failed.attempts + 1, failed.stage
        messages.append(
            ReceivedMessage(message, work, size, lane, attempt, failed_before=failed, stage=stage)
        )
    return messages
