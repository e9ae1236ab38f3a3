"""Failed messages that are rows of a database: retries, and released keys."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

import structlog
from msgspec import structs

from txbroker.consumer.asides.released import OriginalMissing, ReleasedKeys, original
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.message import ReceivedMessage, messages_of
from txbroker.consumer.rounds import Rounds
from txbroker.consumer.stores.database import OpenDatabase
from txbroker.core.consuming.aside import AsideKey
from txbroker.core.consuming.copies import MessageSource, spread
from txbroker.core.consuming.partition import Feed, PartitionState
from txbroker.core.records import Partition, Record
from txbroker.databases.kept import DEAD, RELEASED, RETRY, SET_ASIDE, UNPUBLISHED, Kept
from txbroker.databases.steps import Steps
from txbroker.door.consuming import ConsumingDoor
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.net.tasks import Background

log = structlog.wrap_logger(logging.getLogger(__name__))
T = TypeVar("T")

_POLL_S = 1.0
"""Between looks for messages that are due, and for releases."""
_TAKEN_MAX = 500
_CHUNK = 500


class RowFeed(Feed):
    """The rows of a partition that are due.

    Attributes:
        taken: offsets of those that the engine has, or had since the last look.
    """

    is_kept = True
    retries = True

    def __init__(self, partition: PartitionState) -> None:
        super().__init__(partition)
        self.taken: set[int] = set()

    def forget_finished(self) -> int:
        """Take done rows off those that are taken; return how many are left."""
        self.taken.difference_update(self.finished)
        self.finished.clear()
        return len(self.taken)


class DeadLetterTopic:
    """A topic that receives dead letters.

    Args:
        prefix: of txbroker's own topics, which are no targets.
    """

    def __init__(self, name: str, door: ConsumingDoor, prefix: str) -> None:
        self.name = name
        self._door = door
        self._prefix = prefix

    async def partitions(self) -> int:
        """Return how many it has.

        Raises:
            ConfigurationError: it is an own topic.
            NoDeadLetterTopic: it does not exist.
            KafkaUnavailable
        """
        found = await self._door.target(self.name, self._prefix)
        if isinstance(found, int):
            return found
        why = f"dead_letter_topic: {found.message}"
        if found.code == "reserved":
            raise ConfigurationError(why)
        raise NoDeadLetterTopic(f"{why}: create it or correct its name")


class NoDeadLetterTopic(KafkaUnavailable):
    """The topic of dead letters does not exist."""

    lasting = True


class TableAsides:
    """The failed messages of a reader's partitions.

    Args:
        dead_letters: a topic that receives them, too, at least once.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: Rounds,
        store: OpenDatabase,
        door: ConsumingDoor,
        dead_letters: DeadLetterTopic | None,
    ) -> None:
        self._engine = engine
        self._rounds = rounds
        self._store = store
        self._door = door
        self._dead_letters = dead_letters
        self._retried: dict[PartitionState, RowFeed] = {}
        self._released = ReleasedKeys(engine, self)
        self._background = Background(engine.fail)
        self._poll: asyncio.Task[None] | None = None

    async def open(self, partitions: Sequence[PartitionState]) -> None:
        """See `Asides.open`."""
        asides = {partition.place: partition.aside for partition in partitions}
        for partition in partitions:
            partition.keeps_rows = partition.aside.known = True
        for topic, group in groupby(sorted(asides), key=itemgetter(0)):
            numbers = [number for _topic, number in group]
            for state in (SET_ASIDE, RELEASED):
                for number, key, count in await self._keys(topic, numbers, state):
                    entry = asides[topic, number].keys.setdefault(key, AsideKey(0))
                    entry.count += count
                    entry.released |= state == RELEASED

    def begin(self, partition: PartitionState) -> None:
        """Handle the rows of a partition that the engine has now."""
        self._retried[partition] = rows = RowFeed(partition)
        self._engine.partitions.add_feed(rows)
        for key in partition.aside.keys:
            self._released.begin(partition, key)
        if self._poll is None:
            self._poll = self._background.start(self._look_often())

    def close(self, partition: PartitionState) -> None:
        """End with a partition; the engine has removed its rows with it."""
        self._retried.pop(partition, None)
        self._released.end(partition)

    def deliver(self, place: Partition, records: Sequence[Record]) -> None:
        """No topic is followed."""

    async def end(self) -> None:
        """End all tasks."""
        await self._released.close()
        await self._background.end()

    async def _do(self, steps: Callable[[], Steps[T]]) -> T:
        return await self._store.connections.transaction(steps)

    # --- rows that are due -------------------------------------------------------------------

    async def _look_often(self) -> None:
        available = True
        while True:
            try:
                await self._look()
                available = True
            except KafkaUnavailable as error:
                if available:
                    log.warning("failed messages not read", error=safe_repr(error))
                available = False
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        """Take rows that are due, and released keys, of the partitions of each topic."""
        places = sorted(partition.place for partition in self._retried)
        for topic, group in groupby(places, key=lambda place: place[0]):
            numbers = [number for _topic, number in group]
            await self._take_due(topic, numbers)
            await self._find_released(topic, numbers)
            if self._dead_letters is not None:
                await self._publish(topic, numbers, self._dead_letters)

    async def _take_due(self, topic: str, numbers: Sequence[int]) -> None:
        taken = sum(rows.forget_finished() for rows in self._retried.values())
        if taken >= _TAKEN_MAX:
            return
        rows = await self._due(RETRY, topic, numbers, taken + _TAKEN_MAX)
        unstored = self._rounds.copies.messages
        by_place = {partition.place: each for partition, each in self._retried.items()}
        for kept in rows:
            source = kept.failed.source
            mine = by_place.get(source[:2])
            if mine is not None and source.offset not in mine.taken and source not in unstored:
                try:
                    copy = await self._whole(kept)
                except OriginalMissing as error:
                    log.error("message not read", source=str(source), error=safe_repr(error))
                    await self._bury(kept)
                    continue
                if self._retried.get(mine.partition) is not mine:
                    continue  # lost meanwhile
                mine.taken.add(source.offset)
                messages = messages_of(mine, self._engine, [copy], None)
                self._engine.arrivals.accept(mine, messages)

    async def _due(self, state: str, topic: str, numbers: Sequence[int], count: int) -> list[Kept]:
        now_ms = round(time.time() * 1000)
        return await self._do(lambda: self._store.kept.due(state, topic, numbers, now_ms, count))

    async def _whole(self, kept: Kept) -> Record:
        """Return the copy of a message, whose row may lack a part of it.

        Raises:
            OriginalMissing
            KafkaUnavailable
        """
        if kept.failed.left_out is None:
            return kept.copy
        message = await original(self._door, kept.record, kept.failed)
        failed = structs.replace(kept.failed, left_out=None)
        return Kept(kept.state, failed, message).copy

    async def _bury(self, kept: Kept) -> None:
        await self._do(lambda: self._store.kept.keep(structs.replace(kept, state=DEAD)))

    async def _find_released(self, topic: str, numbers: Sequence[int]) -> None:
        for number in await self._do(lambda: self._store.kept.released(topic, numbers)):
            await self._note_released((topic, number))

    async def _keys(
        self, topic: str, numbers: Sequence[int], state: str
    ) -> list[tuple[int, bytes | int, int]]:
        return await self._do(lambda: self._store.kept.keys(topic, numbers, state))

    async def _note_released(self, place: Partition) -> None:
        keys = await self._keys(place[0], [place[1]], RELEASED)
        partition = next((each for each in self._retried if each.place == place), None)
        if partition is None:
            return  # lost meanwhile
        for _number, key, count in keys:
            entry = partition.aside.keys.setdefault(key, AsideKey(0, count))
            entry.released = True
            self._released.begin(partition, key)

    async def _publish(self, topic: str, numbers: Sequence[int], to: DeadLetterTopic) -> None:
        """Copy dead letters to their topic, at least once."""
        for kept in await self._due(UNPUBLISHED, topic, numbers, _CHUNK):
            number = spread(kept.failed.source[:2], await to.partitions())
            await self._door.append(to.name, number, [kept.copy])
            await self._mark(kept.failed.source)

    async def _mark(self, source: MessageSource) -> None:
        await self._do(lambda: self._store.kept.published(source))

    # --- copies of released keys -------------------------------------------------------------

    async def chunk(self, partition: PartitionState, key: bytes | int) -> list[Record]:
        """See `KeptCopies.chunk`."""
        entry = partition.aside.keys[key]
        count = 0 if self._stores(partition, key) else entry.count
        rows = await self._do(lambda: self._store.kept.of_key(partition.place, key, _CHUNK))
        if not rows and entry.count == count:
            del partition.aside.keys[key]  # a message that was read again is counted twice
        unstored = self._rounds.copies.messages
        return [await self._whole(kept) for kept in rows if kept.failed.source not in unstored]

    def _stores(self, partition: PartitionState, key: bytes | int) -> bool:
        """Return whether messages of a key wait to be stored."""
        messages = (each.message for each in self._rounds.copies.of(partition))
        return any(
            key == (one.offset if one.key is None else one.key)
            for one in messages
            if one is not None
        )

    def clearance(self, message: ReceivedMessage, count: int) -> tuple[()]:
        """See `KeptCopies.clearance`: the rows are deleted with the results."""
        return ()

    def stage_mark(self, message: ReceivedMessage) -> tuple[()]:
        """See `KeptCopies.stage_mark`: the rows show it."""
        return ()

    async def clear(
        self, partition: PartitionState, key: bytes | int, copies: Sequence[Record], cleared: int
    ) -> None:
        """See `KeptCopies.clear`: their rows were deleted with their results."""
        entry = partition.aside.keys[key]
        entry.count -= len(copies)
        if entry.count <= 0:
            del partition.aside.keys[key]

    async def keep(self, partition: PartitionState, key: bytes | int, copy: Record) -> None:
        """See `KeptCopies.keep`."""
        await self._do(lambda: self._store.kept.set_aside_again(partition.place, key))
        if key in partition.aside.keys:
            partition.aside.keys[key].released = False

    async def changed(self) -> None:
        """See `KeptCopies.changed`."""
        await asyncio.sleep(_POLL_S)
