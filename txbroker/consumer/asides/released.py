"""Released keys: their copies are handled before they are free again.

A released key stays set aside until all its copies are done: new messages of it are copied
meanwhile, so its order holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import structlog

from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.message import ReceivedMessage, messages_of
from txbroker.core.consuming.copies import Failed, is_original
from txbroker.core.consuming.partition import Feed, PartitionState
from txbroker.core.consuming.queues import StopReason
from txbroker.core.records import Partition, Record
from txbroker.door.writing import Copy
from txbroker.error_text import safe_repr
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.tasks import Background
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S, _PAUSE_MAX_S = 1.0, 60.0
_ONE_LANE = ""


class OriginalMissing(KafkaUnavailable):
    """A message of which a copy has only a part was deleted."""

    lasting = True


class Reads(Protocol):
    """How records are read, see `ConsumingDoor`."""

    async def read(self, partition: Partition, start: int, end: int) -> list[Record]: ...


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


class KeyFeed(Feed):
    """Copies of a released key.

    Args:
        copies: in order.
        kept: where they are.

    Attributes:
        cleared: how many of the copies are cleared together with their results.
        gave_up: one of them failed again.
    """

    def __init__(
        self,
        partition: PartitionState,
        key: bytes | int,
        copies: Sequence[Record],
        kept: KeptCopies,
    ) -> None:
        super().__init__(partition)
        self._key = key
        self._kept = kept
        self.is_kept = partition.keeps_rows
        self.cleared = 0
        self.gave_up = False
        # Not the messages: they have this feed, in a cycle that the garbage collector does not see.
        self._numbers = {copy.offset: number for number, copy in enumerate(copies)}
        self._counts: dict[int, int] = {}

    @property
    def done(self) -> int:
        """How many of the first ones are done."""
        finished, numbers = set(self.finished), self._numbers
        return next((numbers[at] for at in numbers if at not in finished), len(numbers))

    @property
    def ended(self) -> bool:
        """Whether all are done, or one failed."""
        return self.gave_up or len(self.finished) == len(self._numbers)

    def clearance(self, message: ReceivedMessage) -> Sequence[Copy]:
        """See `Feed.clearance`: with the copies before that have no result to store."""
        number = self._numbers[message.record.offset]
        if number not in self._counts:
            self._counts[number] = number + 1 - self.cleared
            self.cleared = number + 1
        clearance = self._kept.clearance(message, self._counts[number])
        if clearance and number + 1 == len(self._numbers):
            # Before it can be stored, see `TopicAsides.clear`.
            self.partition.stop(StopReason.CLEARING, self._key)
        return clearance

    def stage_mark(self, message: ReceivedMessage) -> Sequence[Copy]:
        """See `Feed.stage_mark`."""
        return self._kept.stage_mark(message)

    def fail_again(self) -> bool:
        """The key stays set aside; return True."""
        self.gave_up = True
        return True


class Asides(Protocol):
    """The set-aside keys of a reader's partitions."""

    async def open(self, partitions: Sequence[PartitionState]) -> None:
        """Learn the set-aside keys of partitions, and follow them until `close`."""

    def begin(self, partition: PartitionState) -> None:
        """Handle the released keys of a partition that the engine has now."""

    def close(self, partition: PartitionState) -> None:
        """Follow a partition no longer."""

    def deliver(self, place: Partition, records: Sequence[Record]) -> None:
        """Take records of the aside topic that arrived."""

    async def end(self) -> None:
        """End all tasks."""


class KeptCopies(Protocol):
    """Where the copies of set-aside keys are."""

    async def chunk(self, partition: PartitionState, key: bytes | int) -> list[Record]:
        """Return the first copies of a key that are not done."""

    async def clear(
        self, partition: PartitionState, key: bytes | int, copies: Sequence[Record], cleared: int
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

    async def keep(self, partition: PartitionState, key: bytes | int, copy: Record) -> None:
        """A copy failed again: end the release of its key, and wait until that is known."""

    async def changed(self) -> None:
        """Wait until copies may have changed."""


class ReleasedKeys:
    """Handles the copies of released keys.

    Args:
        copies: where they are.
    """

    def __init__(self, engine: Engine, copies: KeptCopies) -> None:
        self._engine = engine
        self._copies = copies
        self._tasks: dict[tuple[PartitionState, bytes | int], asyncio.Task[None]] = {}
        self._background = Background(engine.fail)

    def begin(self, partition: PartitionState, key: bytes | int) -> None:
        """Handle a key if it is released."""
        entry = partition.aside.keys.get(key)
        if entry is not None and entry.released and (partition, key) not in self._tasks:
            self._tasks[partition, key] = self._background.start(self._handle(partition, key))

    def end(self, partition: PartitionState) -> None:
        """End with a partition."""
        for key in [key for key in self._tasks if key[0] is partition]:
            self._tasks.pop(key).cancel()

    async def close(self) -> None:
        """End all tasks."""
        await self._background.end()

    async def _handle(self, partition: PartitionState, key: bytes | int) -> None:
        """Handle the copies of a released key until there are none."""
        failures = 0
        try:
            while (entry := partition.aside.keys.get(key)) is not None and entry.released:
                try:
                    copies = await self._copies.chunk(partition, key)
                    failures = 0
                    if not copies:
                        await self._copies.changed()
                        continue
                    released = await self._handle_chunk(partition, key, copies)
                    if done := copies[: released.done]:
                        await self._copies.clear(partition, key, done, released.cleared)
                    if released.gave_up:
                        await self._copies.keep(partition, key, copies[0])
                        log.warning("released key failed again", partition=partition.place)
                except KafkaUnavailable as error:
                    failures += 1
                    log.warning("released key not read", error=safe_repr(error), attempt=failures)
                    await asyncio.sleep(grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S))
            if entry is None:
                log.info("released key is done", partition=partition.place)
        finally:
            self._tasks.pop((partition, key), None)
            partition.go_on(StopReason.CLEARING, key)
            self._engine.waiting.wake()

    async def _handle_chunk(
        self, partition: PartitionState, key: bytes | int, copies: Sequence[Record]
    ) -> KeyFeed:
        """Return the feed of some copies, which has ended."""
        feed = KeyFeed(partition, key, copies, self._copies)
        self._engine.partitions.add_feed(feed)
        try:
            self._engine.arrivals.accept(feed, messages_of(feed, self._engine, copies, _ONE_LANE))
            while not feed.ended:
                await self._engine.waiting.wait(self._engine.waiting.watchers)
            failpoint("consumer.key_handled")
        finally:
            self._engine.partitions.remove_feed(feed)
        return feed
