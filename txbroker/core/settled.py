"""The settled window: recently settled transactions, remembered to answer repeated calls.

The newest are remembered whole, for display. Of all others only what answers need is kept, packed
by the thousand into *segments* (`txbroker.core.segment`), because the dedup window may hold
millions. A restart loads segments without looking at each transaction in them.

There is no index of ids. The ids of one segment were made at about the time at which it was filled,
so their times show which segments can hold an id. Transactions settled late have a separate lane;
otherwise every segment would reach far back.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from txbroker.core.records import (
    NO_ATTRIBUTES,
    Attributes,
    Decision,
    Half,
    Place,
    State,
    intern,
)
from txbroker.core.routing import IdParts, parse_id
from txbroker.core.segment import ROW_BYTES, SEGMENT_VERSION, Segment, SettledSummary, pack
from txbroker.core.transaction import Transaction, Verdict, bare

BEYOND_MAX = 10_000
"""Settled transactions that are remembered although they are older than the dedup window."""
SHOWN_MAX = 1000
"""Settled transactions that are remembered whole, besides those not packed yet."""
SEGMENT_ENTRIES = 4096
"""Transactions in a full segment: a few milliseconds of work, and about 150 kB."""
LATE_MS = 30_000
"""A transaction settled this long after its preparation is *late*."""
_DECISIONS = {State.PROMOTED: Decision.COMMIT, State.ROLLED_BACK: Decision.ROLLBACK}


# --- shares ----------------------------------------------------------------------------------
# A *share* is one group, or all groups of one principal: no share may use a pooled limit up alone.
# It follows from the group's name, which is in every half message, so every owner counts the same.

ShareOf: TypeAlias = Callable[[str], str]
"""Returns the share of a group."""


def own_share(group: str) -> str:
    """Return a group as its own share: the rule without principals."""
    return group


def share_max(pool: int) -> int:
    """Return how much of a pool one share may use: four fifths.

    A share whose work stands still for hours fills its part. A fifth is then left for the others,
    while a single busy share still gets nearly everything.
    """
    return max(1, pool * 4 // 5)


class ShareUse:
    """How much of a pool each share uses.

    Attributes:
        total: the use of all shares.
    """

    __slots__ = ("_of", "total")

    def __init__(self, shares: Iterable[tuple[str, int]] = ()) -> None:
        self._of: dict[str, int] = {}
        self.total = 0
        for share, count in shares:
            self.add(share, count)

    def of(self, share: str) -> int:
        """Return the use of one share."""
        return self._of.get(share, 0)

    def add(self, share: str, count: int = 1) -> None:
        """Add to the use of a share; a negative count releases."""
        self.total += count
        left = self._of.get(share, 0) + count
        if left:
            self._of[share] = left
        else:
            self._of.pop(share, None)


# --- summaries -------------------------------------------------------------------------------


def summaries_of(transactions: Iterable[Transaction]) -> list[SettledSummary]:
    """Return the summaries of settled transactions."""
    # Most have the same places as many others.
    cache: dict[tuple[Place, ...], tuple[tuple[str, int], ...]] = {}
    summaries = []
    for transaction in transactions:
        half, verdict, sized = transaction.half, transaction.verdict, transaction.places
        places = cache.get(sized)
        if places is None:
            places = cache[sized] = tuple([(place.topic, place.partition) for place in sized])
        summaries.append(
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
                half.attributes.dedup_key,
            )
        )
    return summaries


def summary_of(transaction: Transaction) -> SettledSummary:
    """Return the summary of a settled transaction."""
    return summaries_of([transaction])[0]


def to_transaction(summary: SettledSummary) -> Transaction:
    """Return a settled transaction as far as its summary goes.

    It has no attempts, nor who decided it and why, which its marker holds; of its fingerprint it
    may have only the start.
    """
    verdict = Verdict(
        _DECISIONS[summary.state],
        summary.op_offset,
        summary.decided_at_ms,
        contents_fingerprint=summary.contents_fingerprint,
    )
    places = tuple([Place(intern(topic), partition, 0) for topic, partition in summary.places])
    dedup_key = summary.dedup_key
    attributes = NO_ATTRIBUTES if dedup_key is None else Attributes(dedup_key=dedup_key)
    half = Half(summary.id, intern(summary.group), bare(places), attributes)
    return Transaction(
        half,
        summary.offset,
        summary.prepared_at_ms,
        summary.fingerprint,
        places,
        None,
        summary.state,
        False,
        verdict=verdict,
    )


class _Lane:
    """Segments in the order in which they were filled, and the transactions not packed yet.

    `highs[i]` is the greatest time of ids in segments up to i, `lows[i]` the least from i on: two
    bisections give the range of segments that can hold an id.
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
        shown: the newest, whole.
        size: their memory, bytes; of those remembered whole what they will take once packed.
        version: the record version that all proxies read as far as known. Below 2, fingerprints
            are kept whole, as version 1 of a segment stores them.
    """

    def __init__(self) -> None:
        self.shown: dict[str, Transaction] = {}
        self.size = 0
        self.version = SEGMENT_VERSION
        self._count = 0
        self._clock_ms = 0
        self._usual, self._late = self._lanes = (_Lane(), _Lane())
        # Ids whose times do not lead to their segment.
        self._odd: dict[str, Segment] = {}
        # A heap of what may be within the dedup window: the newest time and the bytes of each
        # group in each segment. An id may lie in the future: that prolongs only its group's use.
        self._recent: list[tuple[int, str, int]] = []
        self._recent_use = ShareUse()
        self._share_of: ShareOf = own_share

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Transaction]:
        for summaries in self.parts():
            for summary in summaries:
                id = summary.id
                shown = self.shown.get(id) or self._usual.loose.get(id) or self._late.loose.get(id)
                yield shown or to_transaction(summary)

    @property
    def segments(self) -> list[Segment]:
        """All but those not packed yet."""
        return [*self._usual.segments, *self._late.segments]

    def parts(self) -> Iterator[Iterable[SettledSummary]]:
        """Yield summaries, some thousand at a time; the window may change in between."""
        segments = self.segments
        loose = [*self._usual.loose.values(), *self._late.loose.values()]
        for segment in segments:
            yield segment.summaries()
        yield summaries_of(loose)

    # --- adding ------------------------------------------------------------------------------

    def settle_many(self, transactions: Iterable[Transaction]) -> None:
        """Add transactions that were settled just now; pack what fills a segment."""
        shown, clock_ms = self.shown, self._clock_ms
        for transaction in transactions:
            id, verdict = transaction.half.id, transaction.verdict
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
        """Pack all transactions that are not packed yet."""
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
            # Many at a time: removing the first key of a dict again and again gets slower.
            for id in list(self.shown)[: len(self.shown) - SHOWN_MAX // 2]:
                del self.shown[id]

    def add_segment(self, segment: Segment) -> None:
        """Add transactions that were settled before all that are not packed."""
        if self.version >= SEGMENT_VERSION:
            segment.tails = b""
        elif not segment.tails:
            self.version = SEGMENT_VERSION
        (self._late if segment.late else self._usual).append(segment)
        self._count += segment.count
        self.size += segment.memory_bytes
        self._odd |= dict.fromkeys(segment.odd, segment)
        for use in segment.groups:
            heapq.heappush(self._recent, (use.newest_ms, use.group, use.size))
            self._recent_use.add(self._share_of(use.group), use.size)

    def store_as(self, version: int) -> int:
        """Return the version in which to store segments where this is the lowest of all proxies:
        cut fingerprints cannot be restored, so it never goes back."""
        if version < self.version:
            return self.version
        if version >= SEGMENT_VERSION > self.version:
            self.version = SEGMENT_VERSION
            for segment in self.segments:
                self.size -= len(segment.tails)
                segment.tails = b""
        return version

    # --- use by share ------------------------------------------------------------------------

    def recent_of(self, share: str, since_ms: int) -> int:
        """Return the bytes of a share's segments with an id's or append time from `since_ms` on.

        Older ones leave the count for good, even if a later call names an earlier time.
        """
        while self._recent and self._recent[0][0] < since_ms:
            _, group, size = heapq.heappop(self._recent)
            self._recent_use.add(self._share_of(group), -size)
        return self._recent_use.of(share)

    def share_by(self, share_of: ShareOf) -> None:
        """Count groups to other shares from now on, and recount what there is."""
        self._share_of, self._recent_use = share_of, ShareUse()
        for _, group, size in self._recent:
            self._recent_use.add(share_of(group), size)

    # --- look-up -----------------------------------------------------------------------------

    def get(self, id: str) -> Transaction | None:
        """Return a transaction as far as it is remembered."""
        # Inlined: every prepare looks an id up that is not here.
        shown = self.shown.get(id) or self._usual.loose.get(id) or self._late.loose.get(id)
        if shown is None and (packed := self._packed(id)) is not None:
            segment, row = packed
            return to_transaction(segment.summary(row))
        return shown

    def _packed(self, id: str) -> tuple[Segment, int] | None:
        if (segment := self._odd.get(id)) is not None:
            return segment, segment.odd[id]
        try:
            parts = parse_id(id)
        except ValueError:
            return None
        for lane in self._lanes:
            # Most ids are new: younger than all that is packed.
            if lane.highs and parts.time_ms <= lane.highs[-1]:
                packed = lane.find(parts)
                if packed is not None:
                    return packed
        return None

    # --- forgetting --------------------------------------------------------------------------

    def oldest_ms(self) -> int:
        """Return the newest id's or append time among those forgotten next; 0 if empty."""
        return min(
            [lane.oldest_ms() for lane in self._lanes if lane.segments or lane.loose], default=0
        )

    def forget(
        self, before_ms: int, count_max: int, held: Mapping[str, object]
    ) -> list[SettledSummary]:
        """Forget transactions that are older, down to `count_max`.

        Args:
            before_ms: those with an id's or append time from then on are kept.
            count_max: how many may be remembered although they are older.
            held: ids that are kept, and with them everything settled later.

        Returns:
            The forgotten ones that had a `dedup_key`.
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
            old = [id for id, shown in self.shown.items() if shown.prepared_at_ms <= newest_ms]
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
