"""Copies of messages that failed: in the retry, dead-letter and aside topics of their group.

A copy has the key, value, headers and timestamp of the message; further headers before them give
its origin, the number of attempts, when it is due, and why it failed. `txb-origin` is reserved for
links between clusters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from msgspec import Struct, structs

from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER, SEQUENCE_HEADER
from txbroker.core.records import Header, Partition, Record

SOURCE_HEADER = "txb-source"
ATTEMPT_HEADER = "txb-attempt"
STEP_HEADER = "txb-step"
DUE_HEADER = "txb-due"
CAUSE_HEADER = "txb-cause"
TIMESTAMP_HEADER = "txb-timestamp"
STAGE_HEADER = "txb-stage"
"""After the others, on a copy of a message whose first stages are done."""
LEFT_OUT_HEADER = "txb-left-out"
"""After the others, on a copy that is smaller than its message: what it lacks, and the size of the
message's value. The message is in its first place, as long as the topic keeps it."""
RELEASE_HEADER = "txb-release"
"""In the aside topic, on a record of an operator: the partition whose key is released."""
CLEARED_HEADER = "txb-cleared"
"""In the aside topic, on a record of the owner: up to which message a released key is done."""
STAGED_HEADER = "txb-staged"
"""In the aside topic, on a record of the owner: a message whose first stage is stored."""
RETRIED_HEADER = "txb-retried"
"""In the dead-letter topic, on a record of an operator: which dead letter was sent back."""
_COPY_HEADERS = (
    SOURCE_HEADER,
    ATTEMPT_HEADER,
    STEP_HEADER,
    DUE_HEADER,
    CAUSE_HEADER,
    TIMESTAMP_HEADER,
)
_CAUSE_LENGTH_MAX = 1000
_LEFT_OUT = ("value", "value, headers", "value, headers, key")
"""What copies lack, in the order in which it is left out."""
_NUMBER = re.compile(rb"-1|\d{1,15}")
_SOURCE = re.compile(r"([A-Za-z0-9._-]{1,249})/([0-9]{1,10})@([0-9]{1,19})")

GROUP_NAME_MAX = 200
RETRY_PARTITIONS, DEAD_PARTITIONS, ASIDE_PARTITIONS = 16, 4, 16


class GroupTopics(NamedTuple):
    """The names of a group's topics."""

    retry: str
    dead: str
    aside: str

    @classmethod
    def of(cls, prefix: str, group: str) -> GroupTopics:
        """Return the names for an installation's prefix."""
        return cls(*(f"{prefix}.{kind}.{group}" for kind in cls._fields))


class MessageSource(NamedTuple):
    """Where a message was first read."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


class LeftOut(Struct, frozen=True):
    """What the copy of a message lacks, because its topic takes only smaller ones.

    Attributes:
        parts: such as `value`.
        size: of the value, bytes.
    """

    parts: str
    size: int


class Failed(Struct, frozen=True):
    """The history of a message that failed.

    Attributes:
        source: where it was first read.
        attempts: how often a handler was called with it.
        due_ms: when it is to be handled again, milliseconds since 1970; 0 at once. In the
            dead-letter and the aside topic: since when it is there.
        cause: why it failed.
        step: of the retry topic, to which failures have led it; -1 before the first one.
        stage: the handler's stages that are done; the next attempt begins after them.
        left_out: what the copy lacks; None: it is whole.
    """

    source: MessageSource
    attempts: int
    due_ms: int = 0
    cause: str = ""
    step: int = -1
    stage: int = 0
    left_out: LeftOut | None = None

    def due_by(self, latest_ms: int) -> Failed:
        """Return it with a time of at most `latest_ms`, milliseconds since 1970."""
        return self if self.due_ms <= latest_ms else structs.replace(self, due_ms=latest_ms)


def make_copy(record: Record, failed: Failed) -> Record:
    """Return the copy of a message. It is dated when it is written: Kafka's retention counts from
    then, and the message's timestamp is in a header."""
    cause = failed.cause[:_CAUSE_LENGTH_MAX]
    headers: list[Header] = [
        (SOURCE_HEADER, str(failed.source).encode()),
        (ATTEMPT_HEADER, b"%d" % failed.attempts),
        (STEP_HEADER, b"%d" % failed.step),
        (DUE_HEADER, b"%d" % failed.due_ms),
        (CAUSE_HEADER, cause.encode(errors="backslashreplace")),
        (TIMESTAMP_HEADER, b"%d" % record.timestamp_ms),
    ]
    if failed.stage:
        headers.append((STAGE_HEADER, b"%d" % failed.stage))
    return Record(record.key, record.value, (*headers, *headers_of(record, failed)))


def headers_of(record: Record, failed: Failed) -> tuple[Header, ...]:
    """Return the headers of a message, after the one of what its copy lacks."""
    if failed.left_out is None:
        return tuple(record.headers)
    text = f"{failed.left_out.size} bytes: {failed.left_out.parts}"
    return ((LEFT_OUT_HEADER, text.encode()), *record.headers)


def read_copy(record: Record) -> tuple[Record, Failed] | None:
    """Return the message of a copy and its history; None if the record is no copy."""
    headers = tuple(record.headers[: len(_COPY_HEADERS)])
    if tuple(name for name, _value in headers) != _COPY_HEADERS:
        return None
    values = {name: value or b"" for name, value in headers}
    place = parse_source(values[SOURCE_HEADER].decode(errors="replace"))
    numbers = [
        _number(values[name])
        for name in (ATTEMPT_HEADER, DUE_HEADER, STEP_HEADER, TIMESTAMP_HEADER)
    ]
    if place is None or None in numbers:
        return None
    attempts, due_ms, step, timestamp_ms = (number or 0 for number in numbers)
    if min(attempts, due_ms) < 0:
        return None
    cause = values[CAUSE_HEADER].decode(errors="replace")
    rest, stage = tuple(record.headers[len(_COPY_HEADERS) :]), 0
    if rest and rest[0][0] == STAGE_HEADER:
        stage, rest = max(0, _number(rest[0][1] or b"") or 0), rest[1:]
    left_out, rest = read_left_out(rest)
    message = structs.replace(record, headers=rest, timestamp_ms=timestamp_ms)
    return message, Failed(place, attempts, due_ms, cause, step, stage, left_out)


def read_left_out(headers: tuple[Header, ...]) -> tuple[LeftOut | None, tuple[Header, ...]]:
    """Return what `headers_of` wrote: what the copy lacks, and the headers of the message."""
    if not headers or headers[0][0] != LEFT_OUT_HEADER:
        return None, headers
    text = (headers[0][1] or b"").decode(errors="replace")
    size, _bytes, parts = text.partition(" bytes: ")
    return LeftOut(parts or "value", int(size) if size.isdecimal() else 0), headers[1:]


def smaller(copy: Record, *, keyed: bool) -> Record | None:
    """Return a copy that lacks more of its message: the value, then the headers, then the key.

    Args:
        keyed: the key stays.

    Returns:
        None: nothing more can be left out, or the record is no copy.
    """
    found = read_copy(copy)
    if found is None:
        return None
    message, failed = found
    before = failed.left_out
    size = len(message.value or b"") if before is None else before.size
    level = 0 if before is None else _LEFT_OUT.index(before.parts) + 1
    for parts in _LEFT_OUT[level : 2 if keyed else 3]:
        less = Record(
            message.key if "key" not in parts else None,
            None,
            message.headers if "headers" not in parts else (),
            timestamp_ms=message.timestamp_ms,
        )
        if (less.key, less.value, less.headers) != (message.key, message.value, message.headers):
            return make_copy(less, structs.replace(failed, left_out=LeftOut(parts, size)))
    return None


def is_smaller(copy: Record) -> bool:
    """Return whether a copy lacks a part of its message."""
    found = read_copy(copy)
    return found is not None and found[1].left_out is not None


def is_original(record: Record, message: Record, failed: Failed) -> bool:
    """Return whether a record is the message of a copy that lacks a part of it; an offset of a
    topic that was created again holds another one.

    Args:
        message: the rest of it, in the copy.
    """
    assert failed.left_out is not None
    return (
        record.offset == failed.source.offset
        and len(record.value or b"") == failed.left_out.size
        and record.timestamp_ms == message.timestamp_ms
        and (message.key is None or record.key == message.key)
    )


def _number(value: bytes) -> int | None:
    return int(value) if _NUMBER.fullmatch(value) else None


def parse_source(text: str) -> MessageSource | None:
    """Parse `TOPIC/PARTITION@OFFSET`; None if it is none."""
    match = _SOURCE.fullmatch(text)
    return MessageSource(match[1], int(match[2]), int(match[3])) if match else None


def retried_record(letter: MessageSource, reason: str) -> Record:
    """Return the record that marks the dead letter at `letter`, in its topic, as sent back."""
    return Record(None, reason.encode(), ((RETRIED_HEADER, str(letter).encode()),))


def read_retried(record: Record) -> MessageSource | None:
    """Return which dead letter a record marks as sent back; None if it is another record."""
    for name, value in record.headers[:1]:
        if name == RETRIED_HEADER:
            return parse_source((value or b"").decode(errors="replace"))
    return None


def spread(partition: Partition, partitions: int) -> int:
    """Return the partition of a group's topic for copies of messages of `partition`."""
    return crc32(f"{partition[0]}/{partition[1]}".encode()) % partitions


def message_id(topic: str, partition: int, offset: int, headers: Iterable[Header] | None) -> str:
    """Return the identity of a message: the same for every copy and repeat of it.

    For a message that txbroker promoted: installation, transaction id and number in the
    transaction. Otherwise topic, partition and offset of its origin.

    Args:
        headers: as Kafka clients return them; None: there are none.
    """
    source = f"{topic}/{partition}@{offset}"
    promoted: dict[str, str] = {}
    for name, value in headers or ():
        if name == SOURCE_HEADER and value:
            source = value.decode(errors="replace")
        if name in (INSTALLATION_HEADER, ID_HEADER, SEQUENCE_HEADER) and value is not None:
            promoted.setdefault(name, value.decode(errors="replace"))
    if ID_HEADER not in promoted:
        return source
    installation = promoted.get(INSTALLATION_HEADER, "")
    return f"{installation}/{promoted[ID_HEADER]}/{promoted.get(SEQUENCE_HEADER, '0')}"
