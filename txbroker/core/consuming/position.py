"""The position of a consumer in one partition, and the text in which Kafka keeps it.

Every offset below the low-water mark is done, and so are those in the done ranges above it. With
both stored, a restart repeats nothing that was done out of order.
"""

from __future__ import annotations

import math
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from txbroker.core.records import Record

METADATA_LENGTH_MAX = 4096
"""Kafka's default limit of an offset's metadata (`offset.metadata.max.bytes`)."""

_NAME = "txb"
_FORMAT, _DENSE = f"{_NAME}1", f"{_NAME}2"
"""The second one has compressed ranges, where those of the first do not fit."""
_COMPRESSED_MAX = 1 << 14
"""Ranges, so that it takes milliseconds."""
_INFLATED_MAX = 1 << 20
"""Bytes."""
_FIELDS = re.compile(
    rf"({_FORMAT}|{_DENSE}):([0-9]{{1,18}}):([0-9a-f]*):([0-9]{{1,9}}):([A-Za-z0-9_=-]*)"
    r"(?::([A-Za-z0-9_=-]*)(?::([0-9.]+))?)?"
)
_STARTS = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,18})\.([0-9]{1,9}))?")

Ranges = Sequence[tuple[int, int]]
"""Ranges of offsets as `(first, end)`, ascending, not adjacent; `end` is not included."""


class StoredOffset(NamedTuple):
    """A stored position: the offset of the next record to handle, and its metadata; of a group's
    offset at most 4,096 characters."""

    offset: int
    metadata: str


class ForeignMetadata(ValueError):
    """The metadata of an offset are another program's, or a newer version's."""


class Position:
    """The done offsets of one partition.

    Args:
        low: the low-water mark: every offset below it is done.
        ranges: done ranges above it.
    """

    def __init__(self, low: int, ranges: Ranges = ()) -> None:
        self.low = low
        self.next_offset = low
        """Every offset below it has arrived."""
        self._restored = deque(ranges)
        """Done ranges of which not everything has arrived yet."""
        self._ends: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        for first, end in ranges:
            self.done(first, end)

    def arrive(self, records: Sequence[Record], next_offset: int) -> Sequence[Record]:
        """Return the records that are not done yet. Offsets without a record become done.

        Args:
            records: the next ones, in offset order.
            next_offset: every offset below it has arrived now.
        """
        expected, count = self.next_offset, len(records)
        self.next_offset = max(next_offset, expected)
        if not count or records[-1].offset - expected + 1 != count:
            for record in records:
                if record.offset > expected:
                    self._skip(expected, record.offset)
                expected = record.offset + 1
        else:
            expected += count
        if next_offset > expected:
            self._skip(expected, next_offset)
        return self._without_restored(records) if self._restored else records

    def _without_restored(self, records: Sequence[Record]) -> Sequence[Record]:
        restored, fresh = self._restored, []
        for record in records:
            while restored and restored[0][1] <= record.offset:
                restored.popleft()
            if not restored or record.offset < restored[0][0]:
                fresh.append(record)
        return fresh

    def _skip(self, first: int, end: int) -> None:
        """Mark offsets without a record as done; some may be in restored ranges."""
        if self._restored:
            for part in self._undone(first, end):
                self.done(*part)
        else:
            self.done(first, end)

    def done_all(self, offsets: list[int]) -> None:
        """Mark offsets as done, as `done`; sorts the list."""
        offsets.sort()
        first = end = -1
        for offset in offsets:
            if offset == end:
                end += 1
                continue
            if end >= 0:
                self.done(first, end)
            first, end = offset, offset + 1
        if end >= 0:
            self.done(first, end)

    def _undone(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are not done."""
        first = max(first, self.low)
        for done_first, done_end in sorted(self._ends.items()):
            if done_end <= first or done_first >= end:
                continue
            if first < done_first:
                yield first, done_first
            first = done_end
        if first < end:
            yield first, end

    def done(self, first: int, end: int) -> None:
        """Mark the offsets from `first` up to, not including, `end` as done. They must be above the
        low-water mark and not be done yet."""
        # Hot path: joins the neighbours by two look-ups, whatever the number of ranges.
        later = self._ends.pop(end, None)
        if later is not None:
            del self._firsts[later]
            end = later
        if first == self.low:
            self.low = end
            return
        earlier = self._firsts.pop(first, None)
        if earlier is not None:
            first = earlier
        self._ends[first] = end
        self._firsts[end] = first

    def with_done(self, offsets: Iterable[int]) -> Position:
        """Return a copy in which these offsets are done, too."""
        position = Position(self.low, self.ranges())
        position.done_all(list(offsets))
        return position

    def undone(self, offsets: Iterable[int]) -> list[int]:
        """Return those of the offsets that are not done, in order."""
        ranges = self.ranges()
        found = []
        for offset in sorted(set(offsets)):
            before = bisect_right(ranges, (offset, math.inf)) - 1
            if offset >= self.low and (before < 0 or ranges[before][1] <= offset):
                found.append(offset)
        return found

    def ranges_from(self, low: int) -> list[tuple[int, int]]:
        """Return the done ranges above an offset."""
        return [(max(first, low), end) for first, end in self.ranges() if end > low]

    def without(self, offsets: Sequence[int]) -> Position:
        """Return a copy in which these offsets, in order, are not done."""
        low = min(self.low, *offsets[:1])
        ranges, rest = [], [(low, self.low), *self.ranges()]
        for first, end in rest:
            for offset in (*(at for at in offsets if first <= at < end), end):
                if first < offset:
                    ranges.append((first, offset))
                first = offset + 1
        return Position(low, ranges)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the done ranges above the low-water mark, in order."""
        return sorted(self._ends.items())


class Starts(Struct, frozen=True):
    """Owners of a partition that ended without releasing it, as a killed process does.

    Attributes:
        count: how many in a row began, since messages were done.
        offset: of the message whose handler was called while no other one was; -1: none.
        failures: of this message, before.
    """

    count: int = 0
    offset: int = -1
    failures: int = 0

    def __str__(self) -> str:
        if self.offset < 0:
            return str(self.count)
        return f"{self.count}.{self.offset}.{self.failures}"

    @classmethod
    def parse(cls, text: str) -> Starts:
        """Return what `str` wrote.

        Raises:
            ValueError: it did not.
        """
        match = _STARTS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} are no starts")
        return cls(*(int(each) for each in match.groups() if each is not None))


NO_STARTS = Starts()


class Metadata(Struct, frozen=True):
    """The metadata of an offset.

    Attributes:
        token: rises with each owner of the partition.
        topic_id: as hexadecimal digits; a topic that was created again has another one.
        aside: number of set-aside keys.
        ranges: done ranges above the offset.
        later: offsets whose later stages are done, too; None: the same ones.
        starts: owners that ended without a release.
    """

    token: int
    topic_id: str = ""
    aside: int = 0
    ranges: Ranges = ()
    later: LaterPosition | None = None
    starts: Starts = NO_STARTS


class LaterPosition(NamedTuple):
    """The low-water mark of the later stages, and the done ranges above it."""

    low: int
    ranges: Ranges = ()


def encode_metadata(
    offset: int, metadata: Metadata, length_max: int = METADATA_LENGTH_MAX
) -> tuple[str, int]:
    """Return the metadata of an offset as text of at most `length_max` characters.

    The ranges are base64 of varints: from each end to the next first offset, and the length. If
    they do not fit, they are compressed, in a format that older versions refuse.

    Returns:
        The text, and the number of done offsets in the ranges that do not fit. Ranges of later
        stages that do not fit are left out and not counted.
    """
    text, left_out = _encode(_FORMAT, offset, metadata, length_max)
    return _encode(_DENSE, offset, metadata, length_max) if left_out else (text, left_out)


def _encode(format_: str, offset: int, metadata: Metadata, length_max: int) -> tuple[str, int]:
    head = f"{format_}:{metadata.token}:{metadata.topic_id}:{metadata.aside}:"
    later = metadata.later
    low = b"" if later is None else _varint(offset - later.low)
    encode = _encode_ranges if format_ == _FORMAT else _compress_ranges
    tail = f":{metadata.starts}" if metadata.starts.count else ""
    room = (length_max - len(head) - len(tail) - len(_base64(low)) - 1) // 4 * 3
    data, left_out = encode(offset, metadata.ranges, room)
    text = head + _base64(data)
    if later is not None:
        data, _left_out = encode(later.low, later.ranges, room - len(data) - 3)
        text += f":{_base64(low + data)}"
    elif tail:
        text += ":"
    return text + tail, left_out


def _compress_ranges(end: int, ranges: Ranges, room: int) -> tuple[bytes, int]:
    count = min(len(ranges), _COMPRESSED_MAX)
    while count:
        data = zlib.compress(_encode_ranges(end, ranges[:count], _INFLATED_MAX)[0])
        if len(data) <= room:
            return data, sum(last - first for first, last in ranges[count:])
        count = min(count - 1, count * max(0, room) // len(data))
    return b"", sum(last - first for first, last in ranges)


def _encode_ranges(end: int, ranges: Ranges, room: int) -> tuple[bytes, int]:
    data, left_out = bytearray(), 0
    for first, last in ranges:
        more = _varint(first - end) + _varint(last - first)
        if left_out or len(data) + len(more) > room:
            left_out += last - first
            continue
        data += more
        end = last
    return bytes(data), left_out


def _base64(data: bytes) -> str:
    return urlsafe_b64encode(data).decode()


def decode_metadata(offset: int, text: str) -> Metadata | None:
    """Return the metadata of an offset; None if there are none.

    Raises:
        ForeignMetadata: another program wrote them, or a newer version of this one.
    """
    if not text:
        return None
    match = _FIELDS.fullmatch(text)
    if match is None:
        raise ForeignMetadata(text)
    format_, token, topic_id, aside, encoded, encoded_later, starts = match.groups()
    try:
        ranges = _decode_ranges(offset, urlsafe_b64decode(encoded), format_)
        later = None
        if encoded_later or (encoded_later is not None and starts is None):
            data = urlsafe_b64decode(encoded_later)
            length = next((at for at, byte in enumerate(data, 1) if byte < 0x80), 1)
            (before,) = _numbers(data[:length])
            low = offset - before
            later = LaterPosition(low, _decode_ranges(low, data[length:], format_))
        begun = Starts.parse(starts) if starts is not None else NO_STARTS
    except (ValueError, zlib.error):
        raise ForeignMetadata(text) from None
    return Metadata(int(token), topic_id, int(aside), ranges, later, begun)


def _decode_ranges(at: int, data: bytes, format_: str) -> Ranges:
    """Return ranges after an offset.

    Raises:
        ValueError, zlib.error: these are no ranges.
    """
    if data and format_ == _DENSE:
        inflating = zlib.decompressobj()
        data = inflating.decompress(data, _INFLATED_MAX)
        if not inflating.eof:
            raise ValueError("the ranges are cut, or too many")
    numbers = list(_numbers(data))
    if len(numbers) % 2 or 0 in numbers:
        raise ValueError("ranges are neither empty nor adjacent")
    ranges = []
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return tuple(ranges)


def is_newer_metadata(text: str) -> bool:
    """Return whether a newer version of txbroker wrote these metadata."""
    return re.match(rf"{_NAME}\d+:", text) is not None and not text.startswith(
        (f"{_FORMAT}:", f"{_DENSE}:")
    )


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _numbers(data: Iterable[int]) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
    if shift:
        raise ValueError("the last number is incomplete")
