"""Snapshots: the ledger at one pair of positions, as records of the checkpoint topic.

A snapshot is captured in pieces while the ledger keeps changing: a transaction that is about to
change is saved first (copy on write), so the snapshot is as of the positions where the capture
began. It holds the effects of acknowledged promotion transactions only, like the ledger.

Chunks have the keys `snapshot/SLOT/N`, in two slots alternately, and are valid only with the
closing record `snapshot/SLOT`, which holds their number and hash. Of several complete snapshots the
one with the greatest positions is used, regardless of when it was written.

A chunk holds the *shapes* of its transactions once: group, check policy and places.

Settled transactions are in segments (`txbroker.core.settled`) with the keys
`snapshot/settled/NAME`. A segment never changes and is named after its content, so it is stored
once and named by the closing records of all snapshots that hold it. So a snapshot costs what is
unsettled and what was settled since the last one, not the whole dedup window.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from txbroker.core.decoding import UNREADABLE, version_of
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import SETTLED, MarkerEntry
from txbroker.core.records import (
    ATTRIBUTES,
    NO_ATTRIBUTES,
    NO_CHECKS,
    RECORD_VERSION,
    Anchor,
    Cause,
    CheckPolicy,
    Checks,
    Half,
    Message,
    Place,
    Record,
    State,
    attributes_of,
    intern,
)
from txbroker.core.segment import Segment, name_of, read
from txbroker.core.transaction import NO_VERDICT, Transaction, Verdict, bare

CHUNK_ENTRIES = 2000
CHUNK_BYTES = 256 * 1024
"""Transactions and bytes in one chunk: a few milliseconds of work, and far below the topic's limit.
A transaction of very many messages has a separate chunk, which may be larger."""
SLOTS = 2
_CHUNK_DIGITS = 5
"""100,000 chunks are 25 GB."""
_PREFIX = b"snapshot/"
_SEGMENTS = _PREFIX + b"settled/"
_LOOK_AHEAD = 64
_LENGTH = 4
_SHAPES_MAX = 100_000
_SHAPE_BYTES = 32
"""An upper bound of a group, a policy or a place without its name."""


class _Shape(Struct, frozen=True, array_like=True, gc=False):
    """What many transactions share."""

    group: str
    policy: CheckPolicy
    places: tuple[Place, ...]


# Rare fields of a transaction. A field is only added at the end, so that old and new builds
# understand each other: two attributes stand after the state, later ones after all.
_TEXTS = [(name, str | None, None) for name in ATTRIBUTES]
_More = msgspec.defstruct(
    "_More",
    [
        ("state", State, State.PENDING),
        *_TEXTS[:2],
        ("checks", Checks | None, None),
        ("verdict", Verdict | None, None),
        ("cause", Cause | None, None),
        ("lost", bool, False),
        *_TEXTS[2:],
    ],
    array_like=True,
    gc=False,
)
_NO_MORE = _More()


class _Facts(Struct, array_like=True, gc=False):
    """The fields of an unsettled transaction that differ from the others'."""

    id: str
    offset: int
    prepared_at_ms: int
    fingerprint: bytes
    order: int | None
    instance: str
    more: _More | None  # type: ignore[valid-type]  # made above


class _Chunk(Struct, array_like=True):
    """A part of a snapshot.

    Attributes:
        open: unsettled transactions, each with the number of its shape.
        waiting: the next part of all waiting markers, each after its length: with contents one
            can be larger than a chunk.
    """

    v: int
    snapshot: str
    shapes: list[_Shape]
    open: list[tuple[int, _Facts]]
    waiting: bytes


class _EncodedEntry(Struct, gc=False):
    """The next entry of a chunk, encoded: a transaction with its shape, or a part of the waiting
    markers."""

    data: bytes
    shape: _Shape | None = None


class Closing(Struct, frozen=True, omit_defaults=True):
    """The record that completes a snapshot.

    Attributes:
        v: the record version.
        snapshot: the snapshot's id, as in its chunks.
        chunks: how many there are.
        digest: over all of them, in hex.
        segments: the names of segments, in the order in which they were filled.
        half, op: the first offsets that it does not cover.
        half_clock_ms, op_clock_ms: the log clocks there.
        half_anchor, op_anchor: records that identify the logs.
        entries: transactions in its chunks.
        at_ms: when it was taken, by the owner's clock; 0 if written by an older proxy.
        progress: the `op` of the newest checkpoint; 0 before the first promotion transaction, or
            if written by an older proxy.
    """

    v: int
    snapshot: str
    chunks: int
    digest: str
    segments: list[str]
    half: int
    op: int
    half_clock_ms: int
    op_clock_ms: int
    half_anchor: Anchor | None = None
    op_anchor: Anchor | None = None
    entries: int = 0
    at_ms: int = 0
    progress: int = 0


class Whole(Struct, frozen=True):
    """A complete snapshot, not decoded yet."""

    slot: int
    closing: Closing
    chunks: tuple[bytes, ...]
    segments: tuple[Segment, ...]


class _ChunkHead(Struct, array_like=True):
    v: int = 0
    snapshot: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_chunk = msgspec.msgpack.Decoder(_Chunk).decode
_decode_waiting = msgspec.msgpack.Decoder(MarkerEntry).decode
_decode_head = msgspec.msgpack.Decoder(_ChunkHead).decode
_decode_closing = msgspec.json.Decoder(Closing).decode


def is_snapshot(key: bytes | None) -> bool:
    """Return whether a key of the checkpoint topic belongs to a snapshot."""
    return key is not None and key.startswith(_PREFIX)


def chunk_key(slot: int, number: int) -> bytes:
    """Return the key of a chunk."""
    return b"%s%d/%d" % (_PREFIX, slot, number)


def segment_key(name: str) -> bytes:
    """Return the key of a segment of settled transactions."""
    return _SEGMENTS + name.encode()


def closing_key(slot: int) -> bytes:
    """Return the key of a closing record."""
    return b"%s%d" % (_PREFIX, slot)


CLOSING_KEYS = frozenset(closing_key(slot) for slot in range(SLOTS))
"""Their records are replaced and never removed: a tombstone is another client's."""


class SnapshotCapture:
    """A ledger as it is now, encoded in pieces while it keeps changing.

    Transactions are encoded in offset order; one that changes before its turn is saved first.

    Args:
        ledger: is watched until the last record is taken, or the capture is abandoned.
        id: a unique name of the snapshot.
        slot: 0 or 1, but not that of the newest complete snapshot.
        version: the record version to write; raised if it cannot hold the settled transactions.
        chunks_before: the chunks of the slot's last snapshot; superfluous ones are removed.
        stored: names of segments that are stored already.
        now_ms: the owner's clock.

    Raises:
        ValueError: another capture of the ledger is in progress.
    """

    def __init__(
        self,
        ledger: Ledger,
        id: str,
        slot: int,
        version: int,
        chunks_before: int = 0,
        stored: Collection[str] = (),
        now_ms: int = 0,
    ) -> None:
        if ledger.watcher is not None:
            raise ValueError("the ledger is being captured already: one snapshot at a time")
        self._ledger = ledger
        self._id = id
        self._slot = slot
        self._version = ledger.index.settled.store_as(version)
        self._chunks_before = chunks_before
        self._stored = stored
        self._now_ms = now_ms
        self._progress = ledger.op_committed
        self._half, self._op = ledger.half_whole, ledger.op_whole
        self._clocks = (ledger.half_clock_ms, ledger.op_clock_ms)
        self._anchors = (ledger.half_whole_anchor, ledger.op_whole_anchor)
        # Up to this offset all are encoded; after it those that were saved.
        self._taken_to = -1
        self._saved_pieces: list[_EncodedEntry] = []
        self._saved_offsets: set[int] = set()
        ledger.index.settled.seal()
        since_ms = ledger.half_clock_ms - ledger.dedup_window_ms
        # Half messages with older ids would be void.
        self._segments = [s for s in ledger.index.settled.segments if s.newest_ms >= since_ms]
        self._waiting = [entry for entries in ledger.waiting.values() for entry in entries]
        self._pieces = self._all_pieces()
        self._held_over: _EncodedEntry | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self._count = 0
        self.entries = 0
        """Transactions in the chunks so far."""
        ledger.watcher = self

    def before(self, transaction: Transaction) -> None:
        """Save a transaction that is about to change, unless it is encoded already or was prepared
        after the snapshot."""
        offset = transaction.offset
        if (
            self._taken_to < offset < self._half
            and transaction.state not in SETTLED
            and offset not in self._saved_offsets
        ):
            self._saved_offsets.add(offset)
            self._saved_pieces.append(_piece(transaction))

    def abandon(self) -> None:
        """Stop watching the ledger."""
        if self._ledger.watcher is self:
            self._ledger.watcher = None

    def records(self) -> Iterator[Record]:
        """Yield the snapshot's records: chunks, segments that are not stored yet, the closing
        record. The ledger may change between two of them."""
        while (value := self._chunk()) is not None:
            self._digest.update(value)
            self._count += 1
            yield Record(chunk_key(self._slot, self._count - 1), value)
        self.abandon()
        for segment in self._segments:
            name = segment.name_in(self._version)
            if name not in self._stored:
                yield Record(segment_key(name), segment.value_in(self._version))
        closing = Closing(
            self._version,
            self._id,
            self._count,
            self._digest.hexdigest(),
            list(self.segments),
            self._half,
            self._op,
            *self._clocks,
            *self._anchors,
            self.entries,
            self._now_ms,
            self._progress,
        )
        yield Record(closing_key(self._slot), msgspec.json.encode(closing))

    def superfluous(self) -> list[Record]:
        """Return tombstones of the slot's old chunks, to be stored after the closing record."""
        numbers = range(self._count, self._chunks_before)
        return [Record(chunk_key(self._slot, number), None) for number in numbers]

    @property
    def chunks(self) -> int:
        """The number of chunks so far."""
        return self._count

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the segments that belong to it."""
        return tuple([segment.name_in(self._version) for segment in self._segments])

    def _chunk(self) -> bytes | None:
        """Return the next chunk; None after the last."""
        shapes: dict[_Shape, int] = {}
        rows: list[object] = []
        waiting: list[bytes] = []
        size = pieces = 0
        while pieces < CHUNK_ENTRIES:
            piece = self._held_over or next(self._pieces, None)
            if piece is None:
                break
            shape, more = piece.shape, len(piece.data)
            if shape is not None and shape not in shapes:
                more += _shape_bytes(shape)
            if size and size + more > CHUNK_BYTES:
                self._held_over = piece
                break
            self._held_over = None
            pieces += 1
            size += more
            if shape is not None:
                place = shapes.setdefault(shape, len(shapes))
                rows.append((place, msgspec.Raw(piece.data)))
            else:
                waiting.append(piece.data)
        if not pieces:
            return None
        self.entries += len(rows)
        return _encode((self._version, self._id, list(shapes), rows, b"".join(waiting)))

    def _all_pieces(self) -> Iterator[_EncodedEntry]:
        """Yield everything as it was when the capture began; the ledger may change in between."""
        while ahead := self._ahead():
            for transaction in ahead:
                yield from self._saved_entries()
                self._taken_to = transaction.offset
                if transaction.offset in self._saved_offsets:
                    self._saved_offsets.remove(transaction.offset)
                else:
                    yield _piece(transaction)
        self._taken_to = self._half
        yield from self._saved_entries()
        for entry in self._waiting:
            data = _encode(entry)
            data = len(data).to_bytes(_LENGTH, "big") + data
            for at in range(0, len(data), CHUNK_BYTES):
                yield _EncodedEntry(data[at : at + CHUNK_BYTES])

    def _ahead(self) -> list[Transaction]:
        ahead = self._ledger.index.by_offset.after(self._taken_to, _LOOK_AHEAD)
        return [transaction for transaction in ahead if transaction.offset < self._half]

    def _saved_entries(self) -> Iterator[_EncodedEntry]:
        while self._saved_pieces:
            yield self._saved_pieces.pop()


def _piece(transaction: Transaction) -> _EncodedEntry:
    half = transaction.half
    more: Any = None
    if (
        transaction.state is not State.PENDING
        or transaction.checks is not NO_CHECKS
        or half.attributes != NO_ATTRIBUTES
        or transaction.lost
    ):
        more = _More(
            state=transaction.state,
            checks=None if transaction.checks is NO_CHECKS else transaction.checks,
            verdict=None if transaction.verdict is NO_VERDICT else transaction.verdict,
            cause=transaction.cause if transaction.state is State.REFUSED else None,
            lost=transaction.lost,
            **asdict(half.attributes),
        )
    facts = _Facts(
        half.id,
        transaction.offset,
        transaction.prepared_at_ms,
        transaction.fingerprint,
        transaction.order,
        transaction.instance,
        more,
    )
    return _EncodedEntry(_encode(facts), _Shape(half.group, half.policy, transaction.places))


def _shape_bytes(shape: _Shape) -> int:
    names = [shape.group, *[place.topic for place in shape.places]]
    return sum([_SHAPE_BYTES + 4 * len(name) for name in names])


# --- reading ---------------------------------------------------------------------------------


def find_whole(records: Iterable[Record]) -> list[Whole]:
    """Return the complete snapshots among these records, the greatest positions first.

    Damaged ones, mixtures of two snapshots and those of a newer version are left out.
    """
    newest = {record.key: record.value for record in records if is_snapshot(record.key)}
    segments: dict[str, Segment] = {}
    slots = [_whole(slot, newest, segments) for slot in range(SLOTS)]
    return sorted(
        [whole for whole in slots if whole is not None],
        key=lambda whole: (whole.closing.op, whole.closing.half, whole.closing.at_ms),
        reverse=True,
    )


def chunks_in(slot: int, records: Iterable[Record]) -> int:
    """Return how many chunks a slot may hold: one more than the greatest number.

    Numbers greater than any snapshot has are another client's: removing up to them would take for
    ever.
    """
    start = closing_key(slot) + b"/"
    numbers = [
        int(record.key[len(start) :])
        for record in records
        if record.key is not None
        and record.key.startswith(start)
        and record.key[len(start) :].isdigit()
        and len(record.key) - len(start) <= _CHUNK_DIGITS
        and record.value is not None
    ]
    return max(numbers, default=-1) + 1


def segments_in(records: Iterable[Record]) -> set[str]:
    """Return the names of the stored segments."""
    newest = {record.key: record.value for record in records}
    return {
        key[len(_SEGMENTS) :].decode(errors="replace")
        for key, value in newest.items()
        if key is not None and key.startswith(_SEGMENTS) and value is not None
    }


def _whole(
    slot: int, newest: dict[bytes | None, bytes | None], known: dict[str, Segment]
) -> Whole | None:
    value = newest.get(closing_key(slot))
    try:
        if value is None or version_of(value) > RECORD_VERSION:
            return None
        closing = _decode_closing(value)
        chunks = []
        digest = hashlib.blake2b(digest_size=16)
        for number in range(closing.chunks):
            chunk = newest.get(chunk_key(slot, number))
            if chunk is None:
                return None
            head = _decode_head(chunk)
            if head.v > RECORD_VERSION or head.snapshot != closing.snapshot:
                return None
            digest.update(chunk)
            chunks.append(chunk)
        segments = [_segment(name, newest, known) for name in closing.segments]
    except UNREADABLE:
        return None
    if digest.hexdigest() != closing.digest:
        return None
    return Whole(slot, closing, tuple(chunks), tuple(segments))


def _segment(
    name: str, newest: dict[bytes | None, bytes | None], known: dict[str, Segment]
) -> Segment:
    segment = known.get(name)
    if segment is None:
        value = newest.get(segment_key(name))
        if value is None:
            raise ValueError(f"segment {name} is missing")
        if name_of(value) != name:
            raise ValueError(f"segment {name} is damaged")
        segment = known[name] = read(value)
    return segment


def load(whole: Whole, ledger: Ledger) -> Iterator[None]:
    """Load a snapshot into an empty ledger.

    Yields after each chunk and segment, so that the caller can do something else in between; the
    ledger is complete only at the end.
    """
    closing = whole.closing
    shapes: dict[_Shape, tuple[_Shape, tuple[Message, ...]]] = {}
    waiting = bytearray()
    for chunk_bytes in whole.chunks:
        chunk = _decode_chunk(chunk_bytes)
        known = [_share(shape, shapes) for shape in chunk.shapes]
        for number, facts in chunk.open:
            ledger.index.add(_transaction(facts, *known[number]))
        waiting += chunk.waiting
        for entry in _complete(waiting):
            ledger.waiting.setdefault(entry.marker.id, []).append(entry)
        yield
    for segment in whole.segments:
        ledger.index.add_segment(segment)
        yield
    ledger.start_at(closing.half, closing.op)
    ledger.half_clock_ms, ledger.op_clock_ms = closing.half_clock_ms, closing.op_clock_ms
    ledger.half_anchor, ledger.op_anchor = closing.half_anchor, closing.op_anchor


def _share(
    shape: _Shape, shapes: dict[_Shape, tuple[_Shape, tuple[Message, ...]]]
) -> tuple[_Shape, tuple[Message, ...]]:
    """Return a shape and the bare messages of its places, shared by all its transactions."""
    shared = shapes.get(shape)
    if shared is None:
        if len(shapes) >= _SHAPES_MAX:
            shapes.clear()
        messages = bare(shape.places)
        places = tuple([Place(intern(p.topic), p.partition, p.size) for p in shape.places])
        own = _Shape(intern(shape.group), shape.policy, places)
        shared = shapes[shape] = (own, messages)
    return shared


def _complete(waiting: bytearray) -> Iterator[MarkerEntry]:
    """Remove the complete markers from `waiting` and yield them."""
    at = 0
    while at + _LENGTH <= len(waiting):
        begin = at + _LENGTH
        end = begin + int.from_bytes(waiting[at:begin], "big")
        if end > len(waiting):
            break
        yield _decode_waiting(waiting[begin:end])
        at = end
    del waiting[:at]


def _transaction(facts: _Facts, shape: _Shape, messages: tuple[Message, ...]) -> Transaction:
    more: Any = facts.more or _NO_MORE
    return Transaction(
        Half(facts.id, shape.group, messages, attributes_of(more), shape.policy),
        facts.offset,
        facts.prepared_at_ms,
        facts.fingerprint,
        shape.places,
        facts.order,
        more.state,
        has_bodies=False,
        lost=more.lost,
        checks=more.checks or NO_CHECKS,
        verdict=more.verdict or NO_VERDICT,
        instance=intern(facts.instance),
        cause=more.cause,
    )
