"""The settled window: what is remembered of transactions that came to their end.

The newest are remembered whole, for show. Of all others only what answers need is kept, some
hundred of them packed together in a *segment*: there may be hundreds of thousands within the dedup
window. A segment never changes and is named after its content, so a snapshot stores each once and
a restart takes it as it is, without looking at every transaction in it.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from struct import Struct as Packing

import msgspec
from msgspec import Struct

from txbroker.core.alike import alike
from txbroker.core.ids import LENGTH, parse_id
from txbroker.core.records import Decision, Half, State
from txbroker.core.shares import ShareOf, Use, own_share
from txbroker.core.transaction import Place, Transaction, Verdict, bare_of

SHOWN_MAX = 1000
"""Settled transactions that are remembered whole."""
SEGMENT_ENTRIES = 500
"""Transactions in a full segment: a millisecond of work, and about 50 kB."""
_VERSION = 1
"""Of the packing below."""
_ROW = Packing(">16s16sqqqqIB")
_SHAPE = 6
"""Which of a row's fields is its shape."""
_NONE = bytes(16)
_STATES = (State.PROMOTED, State.ROLLED_BACK)
_DECISIONS = {State.PROMOTED: Decision.COMMIT, State.ROLLED_BACK: Decision.ROLLBACK}


class Brief(Struct, frozen=True, gc=False):
    """What is remembered of a settled transaction.

    Attributes:
        fingerprint, contents_fingerprint: of the prepared and of the replacing messages; the
            latter is empty where none were replaced.
        offset, op_offset: of the half message and of the deciding marker.
        prepared_at_ms, decided_at_ms: when, by the log clocks.
        places: where its messages went: topics and partitions.
        dedup_key: the client's own key, if it gave one.
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


class _Shape(Struct, frozen=True, array_like=True, gc=False):
    """What many transactions have in common."""

    group: str
    places: tuple[tuple[str, int], ...]


class _Packed(Struct, array_like=True):
    """A segment as it is stored: all ids in one text, one row of fixed length for each.

    `keys`: the `dedup_key` of each row that has one.
    """

    v: int
    ids: str
    rows: bytes
    shapes: list[_Shape]
    keys: list[tuple[int, str]]
    newest_ms: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


class Segment:
    """Settled transactions, packed.

    Attributes:
        name: the digest of its value, in hex.
        value: all there is to it, as it is stored.
        count: how many transactions it holds.
        newest_ms: the latest of all their ids' and append times: what is older than the dedup
            window by this can be forgotten.
    """

    __slots__ = ("count", "name", "newest_ms", "value")

    def __init__(self, value: bytes) -> None:
        """Take a segment as it was stored.

        Raises:
            ValueError: it is none, or of a newer version.
        """
        packed = _decode(value)
        if packed.v != _VERSION:
            raise ValueError(f"a segment of version {packed.v}")
        self.name = hashlib.blake2b(value, digest_size=16).hexdigest()
        self.value = value
        self.count = len(packed.ids) // LENGTH
        self.newest_ms = packed.newest_ms

    def ids(self) -> list[str]:
        """Return the ids, the one first that was settled first."""
        return _split(_decode(self.value).ids)

    def briefs(self) -> Iterator[Brief]:
        """Yield what is remembered of each, the one first that was settled first."""
        packed = _decode(self.value)
        keys = dict(packed.keys)
        for row in range(self.count):
            yield _brief(packed, row, keys.get(row))

    def keyed(self) -> list[Brief]:
        """Return what is remembered of those that have a client's own key."""
        packed = _decode(self.value)
        return [_brief(packed, row, key) for row, key in packed.keys]

    def groups(self) -> Mapping[str, tuple[int, int]]:
        """Return of each group the latest of its ids' and append times, and how many it has."""
        packed = _decode(self.value)
        groups = [shape.group for shape in packed.shapes]
        if len(set(groups)) == 1:
            return {groups[0]: (packed.newest_ms, self.count)}
        found: dict[str, tuple[int, int]] = {}
        rows = _ROW.iter_unpack(packed.rows)
        for id, (*_, prepared_ms, _, shape, _) in zip(_split(packed.ids), rows, strict=True):
            newest_ms, count = found.get(groups[shape], (0, 0))
            last_ms = max(newest_ms, prepared_ms, parse_id(id).time_ms)
            found[groups[shape]] = last_ms, count + 1
        return found

    def get(self, id: str) -> Brief:
        """Return what is remembered of one of its transactions.

        Raises:
            ValueError: it is not in here.
        """
        packed = _decode(self.value)
        row = _split(packed.ids).index(id)
        return _brief(packed, row, dict(packed.keys).get(row))


def _split(ids: str) -> list[str]:
    return [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)]


def _brief(packed: _Packed, row: int, dedup_key: str | None) -> Brief:
    mark, contents, offset, op_offset, prepared_ms, decided_ms, shape, state = _ROW.unpack_from(
        packed.rows, row * _ROW.size
    )
    return Brief(
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
        dedup_key,
    )


def brief(transaction: Transaction) -> Brief:
    """Return what is remembered of a settled transaction."""
    half, verdict = transaction.half, transaction.verdict
    assert verdict is not None
    return Brief(
        half.id,
        half.group,
        transaction.state,
        transaction.fingerprint,
        verdict.contents_fingerprint,
        transaction.offset,
        verdict.op_offset,
        transaction.prepared_at_ms,
        verdict.at_ms,
        tuple([(place.topic, place.partition) for place in transaction.places]),
        half.dedup_key,
    )


def whole(brief: Brief) -> Transaction:
    """Return a settled transaction as far as it is remembered: neither its attempts nor who decided
    it and why, which stands in its marker."""
    verdict = Verdict(
        _DECISIONS[brief.state],
        brief.op_offset,
        brief.decided_at_ms,
        contents_fingerprint=brief.contents_fingerprint,
    )
    places = tuple([Place(alike(topic), partition, 0) for topic, partition in brief.places])
    messages = bare_of(places)
    half = Half(brief.id, alike(brief.group), messages, dedup_key=brief.dedup_key)
    return Transaction(
        half,
        brief.offset,
        brief.prepared_at_ms,
        brief.fingerprint,
        places,
        None,
        brief.state,
        False,
        verdict=verdict,
    )


def pack(briefs: Iterable[Brief]) -> Segment:
    """Return what is remembered of some transactions as a segment."""
    shapes: dict[_Shape, int] = {}
    ids: list[str] = []
    rows, keys, newest_ms = bytearray(), [], 0
    for each in briefs:
        rows += _ROW.pack(
            each.fingerprint,
            each.contents_fingerprint or _NONE,
            each.offset,
            each.op_offset,
            each.prepared_at_ms,
            each.decided_at_ms,
            shapes.setdefault(_Shape(each.group, each.places), len(shapes)),
            _STATES.index(each.state),
        )
        if each.dedup_key is not None:
            keys.append((len(ids), each.dedup_key))
        ids.append(each.id)
        newest_ms = max(newest_ms, each.last_ms)
    packed = _Packed(_VERSION, "".join(ids), bytes(rows), list(shapes), keys, newest_ms)
    return Segment(_encode(packed))


class SettledWindow:
    """Settled transactions by id, in the order in which they were settled."""

    def __init__(self) -> None:
        self.shown: dict[str, Transaction] = {}
        """The newest, whole."""
        self.segments: deque[Segment] = deque()
        """All but the newest, packed."""
        self._in_segment: dict[str, Segment] = {}
        self._loose: dict[str, Transaction] = {}
        # A heap of what may be within the dedup window: of each group in each segment its own
        # newest time and how many. An id may be of the future: that prolongs no other's count.
        self._recent: list[tuple[int, str, int]] = []
        self._recent_use = Use()
        self._share_of: ShareOf = own_share

    def __len__(self) -> int:
        return len(self._in_segment) + len(self._loose)

    def __iter__(self) -> Iterator[Transaction]:
        for briefs in self.parts():
            for each in briefs:
                yield self.shown.get(each.id) or whole(each)

    def __contains__(self, id: str) -> bool:
        return id in self._loose or id in self._in_segment

    def parts(self) -> Iterator[Iterable[Brief]]:
        """Yield what is remembered, some hundred at a time; others may be settled or forgotten in
        between."""
        segments, loose = list(self.segments), list(self._loose.values())
        for segment in segments:
            yield segment.briefs()
        yield [brief(transaction) for transaction in loose]

    def add(self, transaction: Transaction) -> None:
        """Remember one that was settled just now."""
        self.shown[transaction.id] = self._loose[transaction.id] = transaction
        if len(self._loose) >= SEGMENT_ENTRIES:
            self.seal()

    def seal(self) -> None:
        """Pack what is not packed yet."""
        if not self._loose:
            return
        self.add_segment(pack([brief(transaction) for transaction in self._loose.values()]))
        self._loose = {}
        if len(self.shown) > SHOWN_MAX:
            # Some at a time: taking the first key of a dict over and over gets slower.
            for id in list(self.shown)[: len(self.shown) - SHOWN_MAX // 2]:
                del self.shown[id]

    def add_segment(self, segment: Segment) -> None:
        """Remember some that were settled before all that are not packed."""
        self.segments.append(segment)
        self._in_segment |= dict.fromkeys(segment.ids(), segment)
        for group, (newest_ms, count) in segment.groups().items():
            heapq.heappush(self._recent, (newest_ms, group, count))
            self._recent_use.add(self._share_of(group), count)

    def recent_of(self, share: str, since_ms: int) -> int:
        """Return how many of a share are in segments where their group has an id's or append time
        from then on. Earlier ones are not counted again, even if a later call asks for them."""
        while self._recent and self._recent[0][0] < since_ms:
            _, group, count = heapq.heappop(self._recent)
            self._recent_use.add(self._share_of(group), -count)
        return self._recent_use.of(share)

    def share_by(self, share_of: ShareOf) -> None:
        """Count groups to other shares from now on, and what is remembered already, too."""
        self._share_of, self._recent_use = share_of, Use()
        for _, group, count in self._recent:
            self._recent_use.add(share_of(group), count)

    def get(self, id: str) -> Transaction | None:
        """Return a transaction as far as it is remembered."""
        found = self.shown.get(id)
        if found is None:
            segment = self._in_segment.get(id)
            return None if segment is None else whole(segment.get(id))
        return found

    def is_brief(self, id: str) -> bool:
        """Say whether only what answers need is remembered of a transaction."""
        return id in self._in_segment and id not in self.shown

    def oldest_ms(self) -> int:
        """Return the latest id's or append time among those that would be forgotten next; 0
        without any."""
        if self.segments:
            return self.segments[0].newest_ms
        first = next(iter(self._loose.values()), None)
        return 0 if first is None else brief(first).last_ms

    def forget(self, before_ms: int, count_max: int, held: Mapping[str, object]) -> list[Brief]:
        """Forget what is older, as long as more than so many are left.

        Args:
            before_ms: whatever has an id's or append time from then on is kept.
            count_max: how many may be remembered although they are older.
            held: ids that are not to be forgotten, nor what was settled after them.

        Returns:
            Those of them that had a client's own key.
        """
        keyed: list[Brief] = []
        while self.segments and len(self) - self.segments[0].count >= count_max:
            segment = self.segments[0]
            if segment.newest_ms >= before_ms:
                break
            ids = segment.ids()
            if held and not held.keys().isdisjoint(ids):
                break
            self.segments.popleft()
            keyed += segment.keyed()
            for id in ids:
                del self._in_segment[id]
                self.shown.pop(id, None)
        while not self.segments and len(self._loose) > count_max:
            oldest = brief(next(iter(self._loose.values())))
            if oldest.last_ms >= before_ms or oldest.id in held:
                break
            del self._loose[oldest.id], self.shown[oldest.id]
            if oldest.dedup_key is not None:
                keyed.append(oldest)
        return keyed
