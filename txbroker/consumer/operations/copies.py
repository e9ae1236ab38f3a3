"""Messages of a group that were set aside or are dead, and how they return to their handler."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import groupby

from msgspec import Struct, structs

from txbroker.consumer.asides.released import original
from txbroker.consumer.operations.groups import COUNTED_MAX, GroupView, scan
from txbroker.core.consuming.aside import AsideKeys, release_record
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    Failed,
    MessageSource,
    make_copy,
    parse_source,
    read_copy,
    read_retried,
    retried_record,
    spread,
)
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import EARLIEST, LATEST, ConsumingDoor
from txbroker.door.writing import Copy, Refused
from txbroker.errors import ConfigurationError

_READ_OFFSETS = 1000
_REREAD_OFFSETS = 100
_STORED_RECORDS = 500
_STORED_BYTES = 4 << 20
"""Of one Kafka transaction, which has to end within seconds."""


class SetAsideKey(Struct, frozen=True):
    """A set-aside key of a partition.

    Attributes:
        key: None: a message without a key, alone.
        messages: copies that wait.
        first: the history of the first one.
        released: an operator has released it; its copies are being handled, or failed again.
    """

    key: bytes | None
    messages: int
    first: Failed
    released: bool

    @property
    def id(self) -> tuple[str, int, bytes | int]:
        """What stays the same until it is done: its partition, and its key or offset."""
        source = self.first.source
        return source.topic, source.partition, source.offset if self.key is None else self.key


class DeadLetter(Struct, frozen=True):
    """A dead letter that was not sent back.

    Attributes:
        place: where it is.
        message: without `value` if values were not asked for.
        size: of its value, bytes; None: a tombstone.
    """

    place: MessageSource
    message: Record
    failed: Failed
    size: int | None


# --- set-aside keys --------------------------------------------------------------------------


async def set_aside_keys(door: ConsumingDoor, view: GroupView) -> list[SetAsideKey]:
    """Return the set-aside keys of a group, by partition in the order in which they were set aside.

    Raises:
        ConfigurationError: the group has no aside topic.
    """
    topic = _own(
        view, view.names.aside, "sets no keys aside: its consumers need on_failure='aside'"
    )
    found: list[SetAsideKey] = []
    for number in range(view.topics[topic]):
        found += await _set_aside_keys(door, (topic, number))
    return sorted(found, key=lambda each: each.first.source)


async def _set_aside_keys(door: ConsumingDoor, place: Partition) -> list[SetAsideKey]:
    known: dict[Partition, AsideKeys] = {}
    copies: dict[tuple[Partition, bytes | int], deque[Failed]] = {}
    start, end = await _bounds(door, place)
    async for record in scan(door, place, start, end):
        copy = read_copy(record)
        source = copy[1].source if copy is not None else _concerned(record)
        if source is None:
            continue
        keys = known.setdefault(source[:2], AsideKeys(source[:2]))
        key = keys.note(record)
        if key is None:
            continue
        waiting = copies.setdefault((source[:2], key), deque())
        if copy is not None:
            waiting.append(copy[1])
        entry = keys.keys.get(key)
        while waiting and (entry is None or waiting[0].source.offset <= entry.cleared):
            waiting.popleft()
    return [
        SetAsideKey(
            key if isinstance(key, bytes) else None, entry.count, waiting[0], entry.released
        )
        for partition, keys in known.items()
        for key, entry in keys.keys.items()
        if (waiting := copies[partition, key])
    ]


def _concerned(record: Record) -> MessageSource | None:
    """Return the source in a release or a clearance."""
    for _name, value in record.headers[:1]:
        return parse_source((value or b"").decode(errors="replace"))
    return None


async def release(
    door: ConsumingDoor, view: GroupView, keys: Iterable[SetAsideKey], reason: str
) -> None:
    """Let the owners of the partitions handle set-aside keys again, in order."""
    for each in keys:
        source = each.first.source
        number = spread(source[:2], ASIDE_PARTITIONS)
        record = release_record(source, each.key, reason)
        await door.append(view.names.aside, number, [record])


# --- dead letters ----------------------------------------------------------------------------


async def dead_letters(
    door: ConsumingDoor,
    view: GroupView,
    limit: int,
    *,
    values: bool = False,
    counted_max: int | None = None,
) -> list[DeadLetter]:
    """Return the newest dead letters of a group that were not sent back, the newest first.

    Args:
        values: with the values of the messages.
        counted_max: offsets to look at, from the end of each partition; None: all.

    Raises:
        ConfigurationError: the group has no dead-letter topic.
    """
    topic = _own(
        view,
        view.names.dead,
        "has no dead-letter topic: its consumers drop what fails, or never ran",
    )
    found: list[DeadLetter] = []
    for number in range(view.topics[topic]):
        found += await _dead_letters(door, (topic, number), limit, values, counted_max)
    found.sort(key=lambda each: (each.failed.due_ms, each.place), reverse=True)
    return found[:limit]


async def _dead_letters(
    door: ConsumingDoor, place: Partition, limit: int, values: bool, counted_max: int | None
) -> list[DeadLetter]:
    start, end = await _bounds(door, place)
    if counted_max is not None:
        start = max(start, end - counted_max)
    found: list[DeadLetter] = []
    retried: set[MessageSource] = set()
    # Backwards: the note that a dead letter was sent back follows it.
    for last in range(end, start, -_READ_OFFSETS):
        records = await door.read(place, max(start, last - _READ_OFFSETS), last)
        for record in reversed(records):
            at = read_retried(record)
            copy = read_copy(record)
            letter = MessageSource(*place, record.offset)
            if at is not None:
                retried.add(at)
            elif copy is not None and letter not in retried:
                message, failed = copy
                size = None if message.value is None else len(message.value)
                size = failed.left_out.size if failed.left_out is not None else size
                if not values:
                    message = structs.replace(message, value=None)
                found.append(DeadLetter(letter, message, failed, size))
                if len(found) == limit:
                    return found
    return found


async def count_dead_letters(door: ConsumingDoor, view: GroupView) -> int | None:
    """Return the number of dead letters, counted in the newest `COUNTED_MAX` offsets of each
    partition; None without a topic."""
    if view.names.dead not in view.topics:
        return None
    return len(await dead_letters(door, view, 1 << 62, counted_max=COUNTED_MAX))


async def send_back(
    door: ConsumingDoor, view: GroupView, letters: Sequence[DeadLetter], reason: str
) -> int:
    """Send dead letters to the retry topic, due at once, in offset order.

    A copy, and the note that the dead letter was sent back, are stored together or not at all. A
    failed call has sent the first ones; noted ones are not sent again.

    Returns:
        How many were sent.

    Raises:
        ConfigurationError: the group has no retry topic.
        KafkaUnavailable: a broker refused one, or it is unknown whether the last ones were sent.
    """
    _own(view, view.names.retry, "has no retry topic: start one of its consumers once")
    copies: list[Copy] = []
    size = sent = 0
    async for letter, record in _reread(door, letters):
        copy = read_copy(record)
        assert copy is not None
        message, failed = copy
        if failed.left_out is not None:
            message = await original(door, message, failed)
        again = make_copy(message, structs.replace(failed, due_ms=0, step=-1, left_out=None))
        topic, number, _offset = letter.place
        copies += [
            Copy(view.names.retry, 0, again),
            Copy(topic, number, retried_record(letter.place, reason)),
        ]
        size += len(message.value or b"") + len(message.key or b"")
        if len(copies) >= _STORED_RECORDS or size >= _STORED_BYTES:
            await _store(door, view, copies)
            sent += len(copies) // 2
            copies, size = [], 0
    if copies:
        await _store(door, view, copies)
    return sent + len(copies) // 2


async def _store(door: ConsumingDoor, view: GroupView, copies: Sequence[Copy]) -> None:
    try:
        await door.store(view.group, copies)
    except Refused as error:
        if not error.too_large:
            raise
        why = f"{error}: raise max.message.bytes of {view.names.retry}, then send it back again"
        raise Refused(error.indexes, structs.replace(error.cause, message=why)) from error


async def _reread(
    door: ConsumingDoor, letters: Sequence[DeadLetter]
) -> AsyncIterator[tuple[DeadLetter, Record]]:
    """Yield dead letters with their records, in offset order; without those deleted meanwhile."""
    for partition, each in groupby(sorted(letters, key=_place), key=lambda one: one.place[:2]):
        left = {letter.place.offset: letter for letter in each}
        while left:
            first = next(iter(left))
            window = [offset for offset in left if offset < first + _REREAD_OFFSETS]
            for record in await door.read(partition, first, window[-1] + 1):
                if record.offset in left:
                    yield left[record.offset], record
            for offset in window:
                del left[offset]


def _place(letter: DeadLetter) -> MessageSource:
    return letter.place


async def _bounds(door: ConsumingDoor, place: Partition) -> tuple[int, int]:
    start = (await door.offsets([place], EARLIEST))[place]
    return start, (await door.offsets([place], LATEST))[place]


def _own(view: GroupView, topic: str, why: str) -> str:
    if topic not in view.topics:
        raise ConfigurationError(
            f"group {view.group} {why}; topic {topic} does not exist, or this login may not read it"
        )
    return topic
