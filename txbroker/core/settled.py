"""The settled window: what is remembered of transactions that came to their end.

The newest are remembered whole, for show. Of all others only what answers need is kept, thousands
of them packed together in a *segment* (`txbroker.core.segment`): there may be millions within the
dedup window. A restart takes segments as they are, without looking at every transaction in them.

There is no index of ids. The ids of one segment are of about the time at which it was filled, so
their times tell which segments can hold an id. What is settled late lies in a lane of its own: else
every segment would reach far back.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from txbroker.core.alike import intern
from txbroker.core.index import ShareOf, ShareUse, own_share
from txbroker.core.records import Decision, Half, Place, State
from txbroker.core.routing import IdParts, parse_id
from txbroker.core.segment import ROW_BYTES, SEGMENT_VERSION, Segment, SettledSummary, pack
from txbroker.core.transaction import Transaction, Verdict, bare_of

SHOWN_MAX = 1000
"""Settled transactions that are remembered whole, beside those that are not packed yet."""
SEGMENT_ENTRIES = 4096
"""Transactions in a full segment: some milliseconds of work, and about 150 kB."""
LATE_MS = 30_000
"""What is settled so long after its preparation is *late*."""
_DECISIONS = {State.PROMOTED: Decision.COMMIT, State.ROLLED_BACK: Decision.ROLLBACK}


def summaries_of(transactions: Iterable[Transaction]) -> list[SettledSummary]:
    """Return what is remembered of settled transactions."""
    # Most go to the same places as many others.
    known: dict[tuple[Place, ...], tuple[tuple[str, int], ...]] = {}
    found = []
    for transaction in transactions:
        half, verdict, went = transaction.half, transaction.verdict, transaction.places
        assert verdict is not None
        places = known.get(went)
        if places is None:
            places = known[went] = tuple([(place.topic, place.partition) for place in went])
        found.append(
            SettledSummary(
                half.id,
                half.group,
                transaction.state,
                transaction.fingerprint,
                verdict.contents_fingerprint,
                transaction.offset,
                verdict.op_offset,
                transaction.prepared_at_ms,
                verdict.at_ms,
                places,
                half.dedup_key,
            )
        )
    return found


def summary_of(transaction: Transaction) -> SettledSummary:
    """Return what is remembered of a settled transaction."""
    return summaries_of([transaction])[0]


def to_transaction(summary_of: SettledSummary) -> Transaction:
    """Return a settled transaction as far as it is remembered: neither its attempts nor who decided
    it and why, which stands in its marker; of its fingerprint maybe only the start."""
    verdict = Verdict(
        _DECISIONS[summary_of.state],
        summary_of.op_offset,
        summary_of.decided_at_ms,
        contents_fingerprint=summary_of.contents_fingerprint,
    )
    places = tuple([Place(intern(topic), partition, 0) for topic, partition in summary_of.places])
    messages = bare_of(places)
    half = Half(summary_of.id, intern(summary_of.group), messages, dedup_key=summary_of.dedup_key)
    return Transaction(
        half,
        summary_of.offset,
        summary_of.prepared_at_ms,
        summary_of.fingerprint,
        places,
        None,
        summary_of.state,
        False,
        verdict=verdict,
    )


class _Lane:
    """Segments in the order in which they were filled, and what the next one is to hold.

    `highs` are the greatest times of ids up to each segment, `lows` the least from it on: so what
    lies between two bisections can hold an id, and nothing else.
    """

    __slots__ = ("highs", "loose", "lows", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.highs: list[int] = []
        self.lows: list[int] = []
        self.loose: dict[str, Transaction] = {}

    def append(self, segment: Segment) -> None:
        highs, lows, low_ms = self.highs, self.lows, segment.low_ms
        highs.append(max(segment.high_ms, highs[-1]) if highs else segment.high_ms)
        at = len(lows) - 1
        while at >= 0 and lows[at] > low_ms:
            lows[at] = low_ms
            at -= 1
        lows.append(low_ms)
        self.segments.append(segment)

    def pop(self) -> Segment:
        del self.highs[0], self.lows[0]
        return self.segments.pop(0)

    def oldest_ms(self) -> int:
        if self.segments:
            return self.segments[0].newest_ms
        oldest = next(iter(self.loose.values()))
        return max(oldest.prepared_at_ms, parse_id(oldest.half.id).time_ms)

    def find(self, id: IdParts) -> tuple[Segment, int] | None:
        segments, time_ms = self.segments, id.time_ms
        for at in range(bisect_left(self.highs, time_ms), bisect_right(self.lows, time_ms)):
            segment = segments[at]
            if segment.low_ms <= time_ms <= segment.high_ms:
                row = segment.row_of(id)
                if row >= 0:
                    return segment, row
        return None


class SettledWindow:
    """Settled transactions by id.

    Attributes:
        size: what they take in memory, bytes; of those that are remembered whole what they will
            take.
        version: the record version that all proxies read as far as known. Below 2, fingerprints
            are remembered as a whole, as version 1 of a segment has them.
    """

    def __init__(self) -> None:
        self.shown: dict[str, Transaction] = {}
        """The newest, whole."""
        self.size = 0
        self.version = SEGMENT_VERSION
        self._count = 0
        self._clock_ms = 0
        self._usual, self._late = self._lanes = (_Lane(), _Lane())
        # Ids that their times do not find.
        self._odd: dict[str, Segment] = {}
        # A heap of what may be within the dedup window: of each group in each segment its own
        # newest time and its bytes. An id may be of the future: that prolongs no other's use.
        self._recent: list[tuple[int, str, int]] = []
        self._recent_use = ShareUse()
        self._share_of: ShareOf = own_share

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Transaction]:
        for briefs in self.parts():
            for each in briefs:
                yield self._whole(each.id) or to_transaction(each)

    def __contains__(self, id: str) -> bool:
        return self._whole(id) is not None or self._packed(id) is not None

    @property
    def segments(self) -> list[Segment]:
        """All but the newest, packed."""
        return [*self._usual.segments, *self._late.segments]

    def parts(self) -> Iterator[Iterable[SettledSummary]]:
        """Yield what is remembered, some thousand at a time; others may be settled or forgotten in
        between."""
        segments = self.segments
        loose = [*self._usual.loose.values(), *self._late.loose.values()]
        for segment in segments:
            yield segment.briefs()
        yield summaries_of(loose)

    # --- coming in ---------------------------------------------------------------------------

    def settle_many(self, transactions: Iterable[Transaction]) -> None:
        """Remember some that were settled just now, and pack what makes a full segment."""
        shown, clock_ms = self.shown, self._clock_ms
        for transaction in transactions:
            id, verdict = transaction.half.id, transaction.verdict
            assert verdict is not None
            if verdict.at_ms > clock_ms:
                clock_ms = self._clock_ms = verdict.at_ms
            late = clock_ms - transaction.prepared_at_ms > LATE_MS
            lane = self._late if late else self._usual
            shown[id] = lane.loose[id] = transaction
            self._count += 1
            self.size += ROW_BYTES
            if len(lane.loose) >= SEGMENT_ENTRIES:
                self._seal(lane)

    def seal(self) -> None:
        """Pack what is not packed yet."""
        for lane in self._lanes:
            self._seal(lane)

    def _seal(self, lane: _Lane) -> None:
        if not lane.loose:
            return
        late, tails = lane is self._late, self.version < SEGMENT_VERSION
        segment = pack(summaries_of(lane.loose.values()), late=late, tails=tails)
        self._count -= len(lane.loose)
        self.size -= ROW_BYTES * len(lane.loose)
        lane.loose = {}
        self.add_segment(segment)
        if len(self.shown) > SHOWN_MAX:
            # Some at a time: taking the first key of a dict over and over gets slower.
            for id in list(self.shown)[: len(self.shown) - SHOWN_MAX // 2]:
                del self.shown[id]

    def add_segment(self, segment: Segment) -> None:
        """Remember some that were settled before all that are not packed."""
        if self.version >= SEGMENT_VERSION:
            segment.tails = b""
        elif not segment.tails:
            self.version = SEGMENT_VERSION
        (self._late if segment.late else self._usual).append(segment)
        self._count += segment.count
        self.size += segment.memory_bytes
        self._odd |= dict.fromkeys(segment.odd, segment)
        for each in segment.groups:
            heapq.heappush(self._recent, (each.newest_ms, each.group, each.size))
            self._recent_use.add(self._share_of(each.group), each.size)

    def store_as(self, version: int) -> int:
        """Prepare segments for being stored where this record version is the lowest of all
        proxies; return the one to write: once fingerprints are cut there is no way back."""
        if version < self.version:
            return self.version
        if version >= SEGMENT_VERSION > self.version:
            self.version = SEGMENT_VERSION
            for segment in self.segments:
                self.size -= len(segment.tails)
                segment.tails = b""
        return version

    # --- what one share takes ----------------------------------------------------------------

    def recent_of(self, share: str, since_ms: int) -> int:
        """Return how many bytes a share takes in segments where its groups have an id's or append
        time from then on. Earlier ones are not counted again, even if a later call asks for
        them."""
        while self._recent and self._recent[0][0] < since_ms:
            _, group, size = heapq.heappop(self._recent)
            self._recent_use.add(self._share_of(group), -size)
        return self._recent_use.of(share)

    def share_by(self, share_of: ShareOf) -> None:
        """Count groups to other shares from now on, and what is remembered already, too."""
        self._share_of, self._recent_use = share_of, ShareUse()
        for _, group, size in self._recent:
            self._recent_use.add(share_of(group), size)

    # --- looking up --------------------------------------------------------------------------

    def get(self, id: str) -> Transaction | None:
        """Return a transaction as far as it is remembered."""
        # In line, as every prepare asks for an id that is not here.
        found = self.shown.get(id) or self._usual.loose.get(id) or self._late.loose.get(id)
        if found is None and (place := self._packed(id)) is not None:
            segment, row = place
            return to_transaction(segment.brief(row))
        return found

    def _whole(self, id: str) -> Transaction | None:
        return self.shown.get(id) or self._usual.loose.get(id) or self._late.loose.get(id)

    def _packed(self, id: str) -> tuple[Segment, int] | None:
        if (segment := self._odd.get(id)) is not None:
            return segment, segment.odd[id]
        try:
            parts = parse_id(id)
        except ValueError:
            return None
        for lane in self._lanes:
            # Most that are asked for are new: younger than all that is packed.
            if lane.highs and parts.time_ms <= lane.highs[-1]:
                found = lane.find(parts)
                if found is not None:
                    return found
        return None

    # --- forgetting --------------------------------------------------------------------------

    def oldest_ms(self) -> int:
        """Return the latest id's or append time among those that would be forgotten next; 0
        without any."""
        return min(
            [lane.oldest_ms() for lane in self._lanes if lane.segments or lane.loose], default=0
        )

    def forget(
        self, before_ms: int, count_max: int, held: Mapping[str, object]
    ) -> list[SettledSummary]:
        """Forget what is older, as long as more than so many are left.

        Args:
            before_ms: whatever has an id's or append time from then on is kept.
            count_max: how many may be remembered although they are older.
            held: ids that are not to be forgotten, nor what was settled after them.

        Returns:
            Those of them that had a client's own key.
        """
        keyed: list[SettledSummary] = []
        if self._count > count_max:
            for lane in self._lanes:
                if (lane.segments or lane.loose) and lane.oldest_ms() < before_ms:
                    keyed += self._forget(lane, before_ms, count_max, held)
        return keyed

    def _forget(
        self, lane: _Lane, before_ms: int, count_max: int, held: Mapping[str, object]
    ) -> Sequence[SettledSummary]:
        keyed: list[SettledSummary] = []
        while lane.segments and self._count - lane.segments[0].count >= count_max:
            segment = lane.segments[0]
            if segment.newest_ms >= before_ms or any(_holds(segment, id) for id in held):
                break
            lane.pop()
            keyed += segment.keyed()
            self._count -= segment.count
            self.size -= segment.memory_bytes
            for id in segment.odd:
                self._odd.pop(id, None)
            newest_ms = segment.newest_ms
            old = [id for id, each in self.shown.items() if each.prepared_at_ms <= newest_ms]
            for id in old:
                if _holds(segment, id):
                    del self.shown[id]
        while not lane.segments and lane.loose and self._count > count_max:
            oldest = summary_of(next(iter(lane.loose.values())))
            if oldest.last_ms >= before_ms or oldest.id in held:
                break
            del lane.loose[oldest.id]
            self.shown.pop(oldest.id, None)
            self._count -= 1
            self.size -= ROW_BYTES
            if oldest.dedup_key is not None:
                keyed.append(oldest)
        return keyed


def _holds(segment: Segment, id: str) -> bool:
    return id in segment.odd or segment.row_of(parse_id(id)) >= 0
