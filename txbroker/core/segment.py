"""Segments: settled transactions, packed into columns of numbers.

A segment never changes and is named after its content, so snapshots store each once. Its value is
the stored record: a header, then little-endian columns with one row for each transaction, ordered
by the randomness of the ids. A row takes 36 bytes, 35 with few *shapes* (group and places):
randomness 8, the first 8 bytes of the fingerprint (it is compared only under one id); the id's
time, both offsets and the time of the decision as distances from the segment's bases, 4 each; the
time of preparation as a distance from the id's time, 2; shape and state.

The header holds what few have: a `dedup_key`, the fingerprint of replacing messages, and all facts
of *odd* transactions, whose numbers do not fit their columns.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from struct import Struct as Packing
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from txbroker.core.records import State
from txbroker.core.routing import LENGTH, TIME_MAX_MS, IdParts, make_id, numbers_of, parse_id

ROW_BYTES = 36
"""The memory of a settled transaction without rare facts."""
SEGMENT_BYTES = 1200
"""The memory of a segment without rows, shapes and rare facts."""
MARK_BYTES = 8
"""The bytes of a fingerprint in a row."""
SEGMENT_VERSION = 2
"""The first record version that stores segments as they are in memory."""
_V1 = 1
_Code: TypeAlias = Literal["Q", "I", "H", "B"]
_CODES: tuple[_Code, ...] = ("Q", "Q", "I", "I", "I", "I", "H")
_SIZES: dict[_Code, int] = {"Q": 8, "I": 4, "H": 2, "B": 1}
_SWAPPED = array("H", [1]).tobytes() != b"\1\0"
"""Whether this machine is big-endian."""
_FEW_SHAPES = 128
"""This number of shapes, and the state, fit one byte."""
_STATES = (State.PROMOTED, State.ROLLED_BACK)
_UINT16, _UINT32, _UINT64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
_AHEAD_MS = 1 << 30
"""A row's times reach from 37 days before the segment's newest decision to 12 days after it."""
_EARLY_MS = 1 << 14
"""The most that a preparation may precede its id's time: clocks differ."""
_ODD_BYTES, _KEY_BYTES, _CONTENTS_BYTES = 400, 350, 20
"""The memory of each rare fact, with its index entry."""


Fact = TypeVar("Fact")
_row_of, _first = attrgetter("row"), itemgetter(0)
_by_decision = attrgetter("op_offset", "id")


class SettledSummary(Struct, frozen=True, gc=False):
    """The facts that are remembered of a settled transaction.

    Attributes:
        fingerprint: of the prepared messages: at least its first `MARK_BYTES` bytes.
        contents_fingerprint: of the replacing messages; empty without.
        offset, op_offset: of the half message and of the deciding marker.
        prepared_at_ms, decided_at_ms: when, by the log clocks.
        places: topics and partitions of its messages.
        dedup_key: the client's key, if it gave one.
    """

    id: str
    group: str
    state: State
    fingerprint: bytes
    contents_fingerprint: bytes
    offset: int
    op_offset: int
    prepared_at_ms: int
    decided_at_ms: int
    places: tuple[tuple[str, int], ...]
    dedup_key: str | None = None

    @property
    def last_ms(self) -> int:
        """The later of the id's time and the append time."""
        return max(self.prepared_at_ms, parse_id(self.id).time_ms)


class _SegmentShape(Struct, frozen=True, array_like=True, gc=False):
    """What many transactions share."""

    group: str
    places: tuple[tuple[str, int], ...]


class _Odd(Struct, frozen=True, array_like=True, gc=False):
    """A transaction whose numbers do not fit its columns."""

    row: int
    id: str
    offset: int
    op_offset: int
    prepared_at_ms: int
    decided_at_ms: int


class GroupUse(Struct, frozen=True, array_like=True, gc=False):
    """The part of one group in a segment.

    Attributes:
        newest_ms: the latest of its ids' and append times.
        size: the memory of its transactions, and its part of the segment's overhead, bytes.
    """

    group: str
    newest_ms: int
    size: int


class _Packed(Struct, array_like=True):
    """A segment as it is stored.

    `low_ms` and `high_ms` are the least and the greatest time of its ids without odd ones. `keys`
    and `contents` hold row numbers, in order.
    """

    v: int
    late: bool
    partition: int
    count: int
    newest_ms: int
    low_ms: int
    high_ms: int
    base_ms: int
    base_half: int
    base_op: int
    groups: list[GroupUse]
    shapes: list[_SegmentShape]
    keys: list[tuple[int, str]]
    contents: list[tuple[int, bytes]]
    odd: list[_Odd]
    columns: memoryview


class _SegmentVersion(Struct, array_like=True):
    v: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode
_decode_version = msgspec.msgpack.Decoder(_SegmentVersion).decode


def name_of(value: bytes) -> str:
    """Return the name of a stored segment: the digest of its value, in hex."""
    return hashlib.blake2b(value, digest_size=16).hexdigest()


class Segment:
    """Settled transactions, packed.

    Attributes:
        value: as it is stored.
        count: of its transactions.
        late: whether they were settled long after their ids' times, which are far apart then.
        newest_ms: the latest id's or append time: older than the dedup window, it can be forgotten.
        low_ms, high_ms: the least and the greatest time of its ids; see `odd`.
        groups: the part of each group.
        odd: rows of ids that `row_of` does not find.
        tails: the second halves of the fingerprints, row by row, if known.
    """

    __slots__ = (
        "_base_ms",
        "_keys",
        "_name",
        "_name_v1",
        "_partition",
        "_times",
        "count",
        "groups",
        "high_ms",
        "late",
        "low_ms",
        "newest_ms",
        "odd",
        "size",
        "tails",
        "value",
    )  # fmt: skip

    def __init__(self, value: bytes, tails: bytes = b"") -> None:
        """Decode a stored segment; raise ValueError if it is invalid or of another version."""
        packed = _decode(value)
        count = packed.count
        size = _row_bytes(len(packed.shapes)) * count
        if packed.v != SEGMENT_VERSION or len(packed.columns) != size or not count:
            raise ValueError(f"a segment of version {packed.v} and {count} rows")
        self.value = value
        self.count = count
        self.late = packed.late
        self.newest_ms = packed.newest_ms
        self.low_ms, self.high_ms = packed.low_ms, packed.high_ms
        self.groups = packed.groups
        self.odd = {each.id: each.row for each in packed.odd}
        self.size = sum([each.size for each in packed.groups])
        self.tails = tails
        self._partition = packed.partition
        self._base_ms = packed.base_ms
        self._keys, self._times = _column(packed, 0), _column(packed, 2)
        self._name = ""
        self._name_v1: str = ""

    @property
    def memory_bytes(self) -> int:
        """Its memory, bytes."""
        return self.size + len(self.tails)

    @property
    def name(self) -> str:
        """Its name, computed at the first use."""
        self._name = self._name or name_of(self.value)
        return self._name

    def row_of(self, id: IdParts) -> int:
        """Return the row of an id; -1 if it is missing or odd."""
        partition, time_ms, randomness = id
        if not self.low_ms <= time_ms <= self.high_ms or partition != self._partition:
            return -1
        keys, count, distance = self._keys, self.count, time_ms - self._base_ms
        row = bisect_left(keys, randomness)
        while row < count and keys[row] == randomness:
            # Only odd ones have the distance 0.
            if self._times[row] == distance > 0:
                return row
            row += 1
        return -1

    def summary(self, row: int) -> SettledSummary:
        """Return the summary of a row."""
        packed = _decode(self.value)
        return _summary(packed, row, [_column(packed, number) for number in range(8)], self.tails)

    def summaries(self) -> Iterator[SettledSummary]:
        """Yield the summaries of all rows."""
        packed = _decode(self.value)
        columns = [_column(packed, number).tolist() for number in range(8)]
        for row in range(self.count):
            yield _summary(packed, row, columns, self.tails)

    def keyed(self) -> list[SettledSummary]:
        """Return the summaries with a `dedup_key`."""
        packed = _decode(self.value)
        columns = [_column(packed, number) for number in range(8)] if packed.keys else []
        return [_summary(packed, row, columns, self.tails) for row, _ in packed.keys]

    def name_in(self, version: int) -> str:
        """Return its name in a record version."""
        if version >= SEGMENT_VERSION:
            return self.name
        self._name_v1 = self._name_v1 or name_of(self.value_in(version))
        return self._name_v1

    def value_in(self, version: int) -> bytes:
        """Return its stored value in a record version; below 2 only with `tails`."""
        if version >= SEGMENT_VERSION:
            return self.value
        return _pack_v1(sorted(self.summaries(), key=_by_decision))


def read(value: bytes) -> Segment:
    """Return the segment of a stored value in either version; raise ValueError if it is invalid or
    newer."""
    if _decode_version(value).v != _V1:
        return Segment(value)
    packed = _decode_v1(value)
    summaries = list(_summaries_v1(packed))
    if not summaries:
        raise ValueError("a segment without rows")
    times = [parse_id(each.id).time_ms for each in summaries]
    segment = pack(summaries, late=max(times) - min(times) > _EARLY_MS, tails=True)
    segment._name_v1 = name_of(value)
    return segment


def _row_bytes(shapes: int) -> int:
    return ROW_BYTES - 1 if shapes <= _FEW_SHAPES else ROW_BYTES


def _codes(shapes: int) -> tuple[_Code, ...]:
    return (*_CODES, "B" if shapes <= _FEW_SHAPES else "H")


def _column(packed: _Packed, number: int) -> memoryview[int]:
    codes = _codes(len(packed.shapes))
    at = sum([_SIZES[code] for code in codes[:number]]) * packed.count
    found = packed.columns[at : at + _SIZES[codes[number]] * packed.count]
    if _SWAPPED:
        swapped = array(codes[number], found.tobytes())
        swapped.byteswap()
        return memoryview(swapped)
    return found.cast(codes[number])


def _bytes_of(code: _Code, numbers: Sequence[int]) -> bytes:
    column = array(code, numbers)
    if _SWAPPED:
        column.byteswap()
    return column.tobytes()


def _summary(
    packed: _Packed,
    row: int,
    columns: Sequence[Sequence[int]] | Sequence[memoryview[int]],
    tails: bytes,
) -> SettledSummary:
    key, mark, time, half, op, decided, prepared, kind = [column[row] for column in columns]
    shape = packed.shapes[kind >> 1]
    time_ms = packed.base_ms + time
    place = _Odd(
        row,
        "",
        packed.base_half + half,
        packed.base_op + op,
        time_ms + prepared - _EARLY_MS,
        packed.base_ms + decided,
    )
    if not time:
        place = packed.odd[bisect_left(packed.odd, row, key=_row_of)]
    return SettledSummary(
        place.id or make_id(packed.partition, time_ms, key),
        shape.group,
        _STATES[kind & 1],
        mark.to_bytes(MARK_BYTES, "little") + tails[row * MARK_BYTES : (row + 1) * MARK_BYTES],
        _fact(packed.contents, row) or b"",
        place.offset,
        place.op_offset,
        place.prepared_at_ms,
        place.decided_at_ms,
        shape.places,
        _fact(packed.keys, row),
    )


def _fact(facts: list[tuple[int, Fact]], row: int) -> Fact | None:
    """Return the rare fact of a row."""
    if not facts:
        return None
    at = bisect_left(facts, row, key=_first)
    return facts[at][1] if at < len(facts) and facts[at][0] == row else None


def pack(
    summaries: Sequence[SettledSummary], *, late: bool = False, tails: bool = False
) -> Segment:
    """Return summaries as a segment.

    Args:
        summaries: at least one; with `tails`, with whole fingerprints.
        late: see `Segment`.
        tails: keep the second halves of the fingerprints in memory.
    """
    numbers = numbers_of([each.id for each in summaries])
    randomness = [number & _UINT64 for number in numbers]
    order = sorted(range(len(randomness)), key=randomness.__getitem__)
    summaries = [summaries[at] for at in order]
    numbers = [numbers[at] >> 64 for at in order]
    times = [number & TIME_MAX_MS for number in numbers]
    decided_ms = max([each.decided_at_ms for each in summaries])
    base_ms = decided_ms + _AHEAD_MS - _UINT32
    base_half = max([each.offset for each in summaries]) - _UINT32
    base_op = max([each.op_offset for each in summaries]) - _UINT32
    odd = _odd_ones(summaries, numbers, (base_ms, base_half, base_op))
    usual = [time_ms for row, time_ms in enumerate(times) if row not in odd] if odd else times
    shapes, kinds = _shapes_of(summaries)
    prepared = [each.prepared_at_ms for each in summaries]
    columns = (
        [time_ms - base_ms for time_ms in times],
        [each.offset - base_half for each in summaries],
        [each.op_offset - base_op for each in summaries],
        [each.decided_at_ms - base_ms for each in summaries],
        [at_ms - time_ms + _EARLY_MS for at_ms, time_ms in zip(prepared, times, strict=True)],
    )
    for row in odd:
        for column in columns:
            column[row] = 0
    newest_ms = max(max(times), max(prepared))
    codes = _codes(len(shapes))
    keys, contents = _rare(summaries)
    packed = _Packed(
        SEGMENT_VERSION,
        late,
        numbers[0] >> 48,
        len(summaries),
        newest_ms,
        min(usual, default=decided_ms),
        max(usual, default=decided_ms),
        base_ms,
        base_half,
        base_op,
        _uses(summaries, shapes, (keys, contents, odd), newest_ms),
        shapes,
        keys,
        contents,
        list(odd.values()),
        memoryview(
            b"".join(
                [
                    _bytes_of("Q", [randomness[at] for at in order]),
                    *[each.fingerprint[:MARK_BYTES] for each in summaries],
                    *map(_bytes_of, codes[2:], (*columns, kinds)),
                ]
            )
        ),
    )
    rest = b"".join([each.fingerprint[MARK_BYTES:] for each in summaries]) if tails else b""
    # A copy: the encoder's bytes keep the capacity to which they grew.
    return Segment(bytes(memoryview(_encode(packed))), rest)


def _odd_ones(
    summaries: Sequence[SettledSummary], numbers: Sequence[int], bases: tuple[int, int, int]
) -> dict[int, _Odd]:
    """Return the odd transactions by row, given the partitions and times of their ids, and the
    bases of times, half offsets and op offsets."""
    base_ms, base_half, base_op = bases
    partition, times_max = numbers[0] >> 48, base_ms + _UINT32
    return {
        row: _Odd(
            row, each.id, each.offset, each.op_offset, each.prepared_at_ms, each.decided_at_ms
        )
        for row, (each, number) in enumerate(zip(summaries, numbers, strict=True))
        if not (
            base_ms < (time_ms := number & TIME_MAX_MS) <= times_max
            and 0 <= each.prepared_at_ms - time_ms + _EARLY_MS <= _UINT16
            and base_ms <= each.decided_at_ms
            and base_half <= each.offset
            and base_op <= each.op_offset
            and number >> 48 == partition
        )
    }


def _shapes_of(summaries: Sequence[SettledSummary]) -> tuple[list[_SegmentShape], list[int]]:
    """Return the shapes, and for each row its shape's number and its state."""
    shapes: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    rolled_back = State.ROLLED_BACK
    kinds = [
        shapes.setdefault((each.group, each.places), len(shapes)) << 1 | (each.state is rolled_back)
        for each in summaries
    ]
    return [_SegmentShape(group, places) for group, places in shapes], kinds


def _rare(
    summaries: Sequence[SettledSummary],
) -> tuple[list[tuple[int, str]], list[tuple[int, bytes]]]:
    """Return `dedup_key`s and fingerprints of replacing messages, by row."""
    return (
        [(row, each.dedup_key) for row, each in enumerate(summaries) if each.dedup_key is not None],
        [
            (row, each.contents_fingerprint)
            for row, each in enumerate(summaries)
            if each.contents_fingerprint
        ],
    )


def _uses(
    summaries: Sequence[SettledSummary],
    shapes: Sequence[_SegmentShape],
    rare: tuple[list[tuple[int, str]], list[tuple[int, bytes]], Iterable[int]],
    newest_ms: int,
) -> list[GroupUse]:
    """Return the memory of each group, with the shapes and rare facts of its transactions."""
    row_bytes = _row_bytes(len(shapes))
    sizes = dict.fromkeys([shape.group for shape in shapes], 0)
    newest = dict.fromkeys(sizes, newest_ms)
    for group in sizes:
        sizes[group] = SEGMENT_BYTES // len(sizes)
    for shape in shapes:
        sizes[shape.group] += len(_encode(shape))
    if len(sizes) == 1:
        sizes[summaries[0].group] += row_bytes * len(summaries)
    else:
        newest = dict.fromkeys(sizes, 0)
        for each in summaries:
            sizes[each.group] += row_bytes
            newest[each.group] = max(newest[each.group], each.last_ms)
    keys, contents, odd = rare
    for row, key in keys:
        sizes[summaries[row].group] += _KEY_BYTES + 2 * len(key)
    for row, _ in contents:
        sizes[summaries[row].group] += _CONTENTS_BYTES
    for row in odd:
        sizes[summaries[row].group] += _ODD_BYTES
    return [GroupUse(group, newest[group], size) for group, size in sizes.items()]


# --- version 1: decoded, and written while a proxy of the group reads no other -----------------

_NONE = bytes(16)
_ROW_V1 = Packing(">16s16sqqqqIB")


class _PackedV1(Struct, array_like=True):
    """Version 1: all ids in one text, one row of fixed length for each."""

    v: int
    ids: str
    rows: bytes
    shapes: list[_SegmentShape]
    keys: list[tuple[int, str]]
    newest_ms: int


_decode_v1 = msgspec.msgpack.Decoder(_PackedV1).decode


def _summaries_v1(packed: _PackedV1) -> Iterator[SettledSummary]:
    keys: Mapping[int, str] = dict(packed.keys)
    for row, facts in enumerate(_ROW_V1.iter_unpack(packed.rows)):
        mark, contents, offset, op_offset, prepared_ms, decided_ms, shape, state = facts
        yield SettledSummary(
            packed.ids[row * LENGTH : (row + 1) * LENGTH],
            packed.shapes[shape].group,
            _STATES[state],
            mark,
            b"" if contents == _NONE else contents,
            offset,
            op_offset,
            prepared_ms,
            decided_ms,
            packed.shapes[shape].places,
            keys.get(row),
        )


def _pack_v1(summaries: Sequence[SettledSummary]) -> bytes:
    shapes: dict[_SegmentShape, int] = {}
    rows = [
        _ROW_V1.pack(
            each.fingerprint,
            each.contents_fingerprint or _NONE,
            each.offset,
            each.op_offset,
            each.prepared_at_ms,
            each.decided_at_ms,
            shapes.setdefault(_SegmentShape(each.group, each.places), len(shapes)),
            _STATES.index(each.state),
        )
        for each in summaries
    ]
    keys = [
        (row, each.dedup_key) for row, each in enumerate(summaries) if each.dedup_key is not None
    ]
    ids = "".join([each.id for each in summaries])
    newest_ms = max([each.last_ms for each in summaries])
    return _encode(_PackedV1(_V1, ids, b"".join(rows), list(shapes), keys, newest_ms))
