"""Where partitions begin: at stored positions, or at the start that the user chose."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import structlog
from msgspec import Struct

from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.position import (
    ForeignMetadata,
    Metadata,
    Position,
    StoredOffset,
    decode_metadata,
    is_newer_metadata,
)
from txbroker.core.consuming.starts import StartCount
from txbroker.core.records import Partition
from txbroker.door.consuming import EARLIEST, LATEST, ConsumingDoor, TopicIdentity
from txbroker.errors import ConfigurationError, TxbrokerError

log = structlog.wrap_logger(logging.getLogger(__name__))


class RecordsDeleted(TxbrokerError):
    """Unread records were deleted, or the topic is another one: records were not read."""


class StartOptions(Struct, frozen=True, kw_only=True):
    """Where partitions begin.

    Attributes:
        time: as for `ConsumingDoor.offsets`, where no position is stored.
        offsets: where no position is stored; they take precedence.
        on_gap: "stop"; "skip": go on after records that were deleted unread, and count them;
            "continue": also go on at the stored offset where the topic has another id.
        first_counts: partitions of each topic when the consumer first saw it: later ones are read
            from their beginning, as they have no older records.
    """

    time: int
    offsets: Mapping[Partition, int]
    on_gap: str
    first_counts: Mapping[str, int]


class Positions:
    """Restores positions.

    Args:
        counts: events of the consumer; skipped offsets are counted as `gap`.
    """

    def __init__(self, door: ConsumingDoor, options: StartOptions, counts: Counter[str]) -> None:
        self._door = door
        self._options = options
        self._counts = counts

    async def restore(
        self,
        partitions: Sequence[PartitionState],
        stored: Mapping[Partition, StoredOffset],
        identities: Mapping[str, TopicIdentity],
    ) -> None:
        """Set positions and tokens of partitions that were assigned.

        Raises:
            ConfigurationError: another program wrote the metadata of a stored offset.
            RecordsDeleted: unread records are missing.
        """
        places = [partition.place for partition in partitions]
        first = await self._door.offsets(places, EARLIEST)
        ends = await self._door.offsets(places, LATEST)
        timed = [
            partition.place for partition in partitions if self._begins_at_time(partition, stored)
        ]
        at = self._options.time
        times = await self._door.offsets(timed, at) if at not in (EARLIEST, LATEST) else {}
        for partition in partitions:
            place = partition.place
            partition.end = ends.get(place, 0)
            begin = first.get(place, 0)
            known_topic_id = _take_over(partition, stored.get(place), identities.get(place[0]))
            if _has_position(stored, place):
                self._check_gap(partition, begin, known_topic_id)
            elif place in timed:
                at_time = times.get(place, partition.end)
                partition.progress.begin_at(
                    Position({EARLIEST: begin, LATEST: partition.end}.get(at, at_time))
                )
            else:
                partition.progress.begin_at(Position(self._options.offsets.get(place, begin)))

    def _begins_at_time(
        self, partition: PartitionState, stored: Mapping[Partition, StoredOffset]
    ) -> bool:
        topic, number = partition.place
        new = number >= self._options.first_counts.get(topic, 0)
        given = _has_position(stored, partition.place) or partition.place in self._options.offsets
        return not (given or new or partition.log.retries)

    def _check_gap(self, partition: PartitionState, begin: int, known_topic_id: str) -> None:
        low, name = partition.progress.position.low, f"{partition.place[0]}-{partition.place[1]}"
        if known_topic_id not in ("", partition.topic_id):
            self._go_on_in_another(partition, name, low, begin)
        elif low > partition.end:
            self._skip(
                partition,
                begin,
                f"{name} ends at {partition.end}, before the stored position {low}",
            )
            partition.progress.begin_at(Position(begin))
        elif low < begin:
            self._skip(partition, begin, _deleted(name, low, begin))
            progress = partition.progress
            ahead = [offset for offset in progress.ahead if offset >= begin]
            progress.begin_at(Position(begin, progress.position.ranges_from(begin)), ahead)

    def _go_on_in_another(self, partition: PartitionState, name: str, low: int, begin: int) -> None:
        """Continue in a topic with another id than the stored one, at the stored offset or at its
        beginning. The done ranges are of the other topic."""
        why = f"{name}: the stored position {low} is of a topic with another id"
        if self._options.on_gap == "skip":
            self._skip(partition, begin, why)
            low = begin
        elif self._options.on_gap == "continue" and low <= partition.end:
            low = max(low, begin)
            log.warning("position taken", partition=name, offset=low, why=why)
        else:
            raise RecordsDeleted(
                f"{why}: this one, which holds {begin} to {partition.end}, was deleted and created "
                "again, or it is a mirror. Start once with on_gap='continue' if it is a mirror for "
                "which offsets are translated, and holds the position: the offset is taken, the "
                f"done ranges above it are dropped; with on_gap='skip' to begin at {begin}"
            )
        partition.progress.begin_at(Position(low))

    def _skip(self, partition: PartitionState, begin: int, why: str) -> None:
        """Raise RecordsDeleted, or count a gap before offset `begin`."""
        if self._options.on_gap == "stop":
            raise RecordsDeleted(
                f"{why}: find out which are lost, then start with on_gap='skip', which continues "
                f"at offset {begin}"
            )
        log.error("gap skipped", why=why, continues_at=begin)
        self._counts["gap"] += max(1, begin - partition.progress.position.next_offset)

    async def begin_after_gap(self, partition: PartitionState) -> int:
        """Return the offset after records that were deleted while the consumer runs.

        Raises:
            RecordsDeleted: gaps are not skipped, or the log is another one.
        """
        begin = (await self._door.offsets([partition.place], EARLIEST))[partition.place]
        low, name = (
            partition.progress.position.next_offset,
            f"{partition.place[0]}-{partition.place[1]}",
        )
        if begin <= low:
            raise RecordsDeleted(
                f"{name} does not hold offset {low}: the topic was deleted and created again, or "
                "cut: start the consumer again; with on_gap='skip' it continues at the beginning"
            )
        self._skip(partition, begin, _deleted(name, low, begin))
        return begin


def _deleted(name: str, low: int, begin: int) -> str:
    return (
        f"{name}: offsets {low} to {begin} were deleted unread (they may hold records of aborted "
        "transactions alone, which no consumer sees)"
    )


def _has_position(stored: Mapping[Partition, StoredOffset], place: Partition) -> bool:
    """Return whether there is more than a token."""
    return place in stored and stored[place].offset >= 0


def _take_over(
    partition: PartitionState, stored: StoredOffset | None, identity: TopicIdentity | None
) -> str:
    """Set a partition's token and stored position; return the topic id of that."""
    metadata = _metadata(partition.place, stored)
    partition.aside.stored = metadata.aside if metadata is not None else None
    if metadata is None:
        # Offsets expire: above any token that was given out before.
        metadata = Metadata(round(time.time() * 1000))
    partition.token = metadata.token + 1
    partition.starts = StartCount(metadata.starts)
    partition.topic_id = identity.id.hex() if identity is not None else metadata.topic_id
    if stored is not None and metadata.later is None:
        partition.progress.begin_at(Position(stored.offset, metadata.ranges))
    elif stored is not None and metadata.later is not None:
        later = Position(*metadata.later)
        first = Position(stored.offset, metadata.ranges)
        done = itertools.chain(range(metadata.later.low, first.low), *map(_offsets, first.ranges()))
        partition.progress.begin_at(later, later.undone(done))
    return metadata.topic_id


def _offsets(limits: tuple[int, int]) -> range:
    return range(*limits)


def _metadata(place: Partition, stored: StoredOffset | None) -> Metadata | None:
    if stored is None:
        return None
    try:
        return decode_metadata(stored.offset, stored.metadata)
    except ForeignMetadata:
        why = "another program wrote them: use another group"
        if is_newer_metadata(stored.metadata):
            why = "a newer version of txbroker wrote them: upgrade this one"
        shown = repr(stored.metadata[:40])
        raise ConfigurationError(
            f"the group's offset of {place[0]}-{place[1]} has metadata {shown}: {why}"
        ) from None
