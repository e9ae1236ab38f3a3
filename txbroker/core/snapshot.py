"""Snapshots: the ledger at one pair of positions, as records of the checkpoint topic.

A snapshot is captured piece by piece while the ledger goes on changing: whatever is about to change
is put aside as it was (copy on write), so the whole is as of the positions where the capture began.
It holds what acknowledged turns did and no more, because the ledger does not know more.

Chunks lie under the keys `snapshot/SLOT/N`, two slots in turn, and count only with the closing
record `snapshot/SLOT`, which names their number and hash. Of several whole ones the greatest
positions count, whenever they were written.

A chunk tells the *shapes* of its transactions once: group, check policy and places.
"""

import hashlib
from collections.abc import Iterable, Iterator
from sys import intern
from typing import Any

import msgspec
from msgspec import Struct

from txbroker.core.ledger import Ledger
from txbroker.core.outcome import Waiting
from txbroker.core.records import RECORD_VERSION, Anchor, Cause, CheckPolicy, Half, Record, State
from txbroker.core.settled import Brief
from txbroker.core.transaction import Checks, Place, Transaction, Verdict, bare_of

CHUNK_ENTRIES = 2000
"""Transactions in one chunk: a few milliseconds of work, and far below the topic's limit."""
SLOTS = 2
_PREFIX = b"snapshot/"


class _Shape(Struct, frozen=True, array_like=True):
    """What many transactions have in common."""

    group: str
    policy: CheckPolicy
    places: tuple[Place, ...]


class _More(Struct, array_like=True):
    """What few transactions have."""

    state: State
    order_key: str | None
    dedup_key: str | None
    checks: Checks | None
    verdict: Verdict | None
    cause: Cause | None
    lost: bool


# id, shape, offset, prepared_at_ms, fingerprint, order, instance, more
_Row = tuple[str, int, int, int, bytes, int | None, str, _More | None]


class _Chunk(Struct, array_like=True):
    """A part of a snapshot; its version and snapshot first."""

    v: int
    snapshot: str
    shapes: list[_Shape]
    rows: list[_Row]
    settled: list[tuple[str, int, State, bytes, str | None]]
    waiting: list[Waiting]


class Closing(Struct, frozen=True, omit_defaults=True):
    """The record that makes a snapshot whole.

    Attributes:
        v: the record version.
        snapshot: the snapshot's id, as in its chunks.
        chunks: how many there are.
        digest: over all of them, in hex.
        half, op: the first offsets that it does not hold any more.
        half_clock_ms, op_clock_ms: the log clocks there.
        half_anchor, op_anchor: the records by which the logs are recognised.
        entries: transactions in it.
    """

    v: int
    snapshot: str
    chunks: int
    digest: str
    half: int
    op: int
    half_clock_ms: int
    op_clock_ms: int
    half_anchor: Anchor | None = None
    op_anchor: Anchor | None = None
    entries: int = 0


class Whole(Struct, frozen=True):
    """A snapshot that is whole, not decoded yet."""

    slot: int
    closing: Closing
    chunks: tuple[bytes, ...]


class _Version(Struct):
    v: int = 0


class _ChunkHead(Struct, array_like=True):
    v: int = 0
    snapshot: str = ""


_encode_chunk = msgspec.msgpack.Encoder().encode
_decode_chunk = msgspec.msgpack.Decoder(_Chunk).decode
_decode_head = msgspec.msgpack.Decoder(_ChunkHead).decode
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_closing = msgspec.json.Decoder(Closing).decode
_UNREADABLE = (ValueError, msgspec.DecodeError, RecursionError)


def is_snapshot(key: bytes | None) -> bool:
    """Say whether a key of the checkpoint topic belongs to a snapshot."""
    return key is not None and key.startswith(_PREFIX)


def chunk_key(slot: int, number: int) -> bytes:
    """Return the key of a chunk."""
    return b"%s%d/%d" % (_PREFIX, slot, number)


def closing_key(slot: int) -> bytes:
    """Return the key of a closing record."""
    return b"%s%d" % (_PREFIX, slot)


class Capture:
    """A ledger as it is now, encoded piece by piece while it goes on changing.

    Args:
        ledger: is watched until the last record is taken, or the capture abandoned.
        id: names the snapshot; no other one may have it.
        slot: 0 or 1; never that of the greatest whole snapshot.
        version: the record version to write.
        chunks_before: how many chunks the slot held before; superfluous ones are removed.
    """

    def __init__(
        self, ledger: Ledger, id: str, slot: int, version: int, chunks_before: int = 0
    ) -> None:
        self._ledger = ledger
        self._id = id
        self._slot = slot
        self._version = version
        self._chunks_before = chunks_before
        self._half, self._op = ledger.half_whole, ledger.op_whole
        self._clocks = (ledger.half_clock_ms, ledger.op_clock_ms)
        self._anchors = (ledger.half_whole_anchor, ledger.op_whole_anchor)
        self._left = dict(ledger.transactions)
        # In the order of offsets, but for those that change meanwhile.
        self._ids = iter(list(self._left))
        since_ms = ledger.half_clock_ms - ledger.dedup_window_ms
        self._settled = ledger.settled.since(since_ms)
        self._waiting = [entry for found in ledger.waiting.values() for entry in found]
        self._aside: list[Transaction] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._count = 0
        self.entries = 0
        ledger.watcher = self

    def before(self, transaction: Transaction) -> None:
        """This one is about to change: put it aside as it is."""
        if self._left.pop(transaction.id, None) is not None:
            self._aside.append(_copied(transaction))

    def abandon(self) -> None:
        """Watch no longer."""
        self._left.clear()
        if self._ledger.watcher is self:
            self._ledger.watcher = None

    def records(self) -> Iterator[Record]:
        """Yield the snapshot's records: chunks, the closing record, then tombstones of what the
        slot held before. A caller may do anything between two of them."""
        while True:
            chunk = self._chunk()
            if chunk is None:
                break
            value = _encode_chunk(chunk)
            self._digest.update(value)
            yield Record(chunk_key(self._slot, self._count), value)
            self._count += 1
        self.abandon()
        closing = Closing(
            self._version,
            self._id,
            self._count,
            self._digest.hexdigest(),
            self._half,
            self._op,
            *self._clocks,
            *self._anchors,
            self.entries,
        )
        yield Record(closing_key(self._slot), msgspec.json.encode(closing))
        for number in range(self._count, self._chunks_before):
            yield Record(chunk_key(self._slot, number), None)

    @property
    def chunks(self) -> int:
        """How many chunks were made so far."""
        return self._count

    def _chunk(self) -> _Chunk | None:
        """Return the next chunk; None at the end."""
        shapes: dict[_Shape, int] = {}
        chunk = _Chunk(self._version, self._id, [], [], [], self._waiting)
        self._waiting = []
        room = CHUNK_ENTRIES
        while room and (transaction := self._next()) is not None:
            chunk.rows.append(_row(transaction, shapes))
            room -= 1
        while room and (settled := next(self._settled, None)) is not None:
            id, brief = settled
            shape = _shape(brief.group, CheckPolicy(), brief.places, shapes)
            chunk.settled.append((id, shape, brief.state, brief.facts, brief.dedup_key))
            room -= 1
        if room == CHUNK_ENTRIES and not chunk.waiting:
            return None
        chunk.shapes = list(shapes)
        self.entries += CHUNK_ENTRIES - room
        return chunk

    def _next(self) -> Transaction | None:
        if self._aside:
            return self._aside.pop()
        for id in self._ids:
            transaction = self._left.pop(id, None)
            if transaction is not None:
                return transaction
        return None


def _copied(transaction: Transaction) -> Transaction:
    """Return a transaction that stays as it is; parts that change are copied."""
    checks, verdict = transaction.checks, transaction.verdict
    return msgspec.structs.replace(
        transaction,
        checks=None if checks is None else msgspec.structs.replace(checks),
        verdict=None if verdict is None else msgspec.structs.replace(verdict),
    )


def _shape(
    group: str, policy: CheckPolicy, places: tuple[Place, ...], shapes: dict[_Shape, int]
) -> int:
    return shapes.setdefault(_Shape(group, policy, places), len(shapes))


def _row(transaction: Transaction, shapes: dict[_Shape, int]) -> _Row:
    half = transaction.half
    more: _More | None = None
    if (
        transaction.state is not State.PENDING
        or transaction.checks is not None
        or half.order_key is not None
        or half.dedup_key is not None
        or transaction.lost
    ):
        more = _More(
            transaction.state,
            half.order_key,
            half.dedup_key,
            transaction.checks,
            transaction.verdict,
            transaction.cause if transaction.state is State.REFUSED else None,
            transaction.lost,
        )
    return (
        half.id,
        _shape(half.group, half.policy, transaction.places, shapes),
        transaction.offset,
        transaction.prepared_at_ms,
        transaction.fingerprint,
        transaction.order,
        transaction.instance,
        more,
    )


# --- reading ---------------------------------------------------------------------------------


def find_whole(records: Iterable[Record]) -> list[Whole]:
    """Return the snapshots among these records that are whole, the greatest positions first.

    Those that are damaged, in part another's, or of a newer version are left out.
    """
    newest = {record.key: record.value for record in records if is_snapshot(record.key)}
    found = [_whole(slot, newest) for slot in range(SLOTS)]
    return sorted(
        [whole for whole in found if whole is not None],
        key=lambda whole: (whole.closing.op, whole.closing.half),
        reverse=True,
    )


def chunks_in(slot: int, records: Iterable[Record]) -> int:
    """Return how many chunks a slot may hold: one more than the greatest number."""
    start = closing_key(slot) + b"/"
    numbers = [
        int(record.key[len(start) :])
        for record in records
        if record.key is not None
        and record.key.startswith(start)
        and record.key[len(start) :].isdigit()
        and record.value is not None
    ]
    return max(numbers, default=-1) + 1


def _whole(slot: int, newest: dict[bytes | None, bytes | None]) -> Whole | None:
    value = newest.get(closing_key(slot))
    try:
        if value is None or _decode_version(value).v > RECORD_VERSION:
            return None
        closing = _decode_closing(value)
        chunks = []
        digest = hashlib.blake2b(digest_size=16)
        for number in range(closing.chunks):
            chunk = newest.get(chunk_key(slot, number))
            if chunk is None or _decode_head(chunk).snapshot != closing.snapshot:
                return None
            digest.update(chunk)
            chunks.append(chunk)
    except _UNREADABLE:
        return None
    if digest.hexdigest() != closing.digest:
        return None
    return Whole(slot, closing, tuple(chunks))


def load(whole: Whole, ledger: Ledger) -> Iterator[None]:
    """Bring an empty ledger to where a snapshot was taken. Yields after each chunk, so that a
    caller can do something else in between; the ledger is right when all is done."""
    closing = whole.closing
    shapes: dict[_Shape, _Shape] = {}
    for chunk_bytes in whole.chunks:
        chunk = _decode_chunk(chunk_bytes)
        known = [_interned(shape, shapes) for shape in chunk.shapes]
        for row in chunk.rows:
            ledger.take_in(_transaction(row, known))
        for id, shape, state, facts, dedup_key in chunk.settled:
            group, places = known[shape].group, known[shape].places
            ledger.remember(id, Brief(group, state, facts, places, dedup_key))
        for entry in chunk.waiting:
            ledger.waiting.setdefault(entry.marker.id, []).append(entry)
        yield
    ledger.start_at(closing.half, closing.op)
    ledger.half_clock_ms, ledger.op_clock_ms = closing.half_clock_ms, closing.op_clock_ms
    ledger.half_anchor, ledger.op_anchor = closing.half_anchor, closing.op_anchor


def _interned(shape: _Shape, shapes: dict[_Shape, _Shape]) -> _Shape:
    found = shapes.get(shape)
    if found is None:
        places = tuple([Place(intern(p.topic), p.partition, p.size) for p in shape.places])
        found = shapes[shape] = _Shape(intern(shape.group), shape.policy, places)
    return found


def _transaction(row: _Row, shapes: list[_Shape]) -> Transaction:
    id, number, offset, prepared_at_ms, mark, order, instance, more = row
    shape = shapes[number]
    messages = bare_of(shape.places)
    if more is None:
        half = Half(id, shape.group, messages, None, None, shape.policy)
        return Transaction(
            half, offset, prepared_at_ms, mark, shape.places, order, State.PENDING, False,
            instance=intern(instance),
        )  # fmt: skip
    half = Half(id, shape.group, messages, more.order_key, more.dedup_key, shape.policy)
    extra: dict[str, Any] = {"instance": intern(instance), "cause": more.cause}
    return Transaction(
        half, offset, prepared_at_ms, mark, shape.places, order, more.state, False,
        lost=more.lost, checks=more.checks, verdict=more.verdict, **extra,
    )  # fmt: skip
