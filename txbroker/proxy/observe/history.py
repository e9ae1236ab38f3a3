"""The last hour of one proxy, sampled once a second into rings of bounded size; joined histories.

Each series (all groups together, and each of the busiest groups) has one ring for each step: the
newest minutes by the second, an hour by half minutes. A sample is added to all of them, so nothing
is computed later. Transactions are not touched: the sample reads counters and ledgers' sizes."""

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import linear_regression

from msgspec import structs

from txbroker import __version__
from txbroker.contract.service import (
    HISTORY_S,
    HISTORY_STEPS_S,
    CheckCounts,
    HalfPartitionState,
    History,
    HistoryEvent,
    HistoryPoint,
    HistoryRequest,
    Latency,
    OperatorAction,
)
from txbroker.diagnosis.table import PROXY_WORDS
from txbroker.proxy.observe.observed import Observed, ObservedPartition, Past
from txbroker.proxy.observe.overview import sum_of_checks

SPANS_S = (300, 900, HISTORY_S)
"""How far back each step reaches, seconds."""
GROUPS_MAX = 100
"""Groups with a series, 29 KB each; one that was idle for a minute makes room."""
IDLE_S = 60
EVENTS_MAX = 500
TEXT_MAX = 200
PROBLEMS_EVERY_S = 5
"""Interval at which problems that begin or end are looked for."""
LOOKED_AT_MAX, LOOK_EVERY_S = 1000, 10
"""With more groups, the oldest of all is looked for at this interval only, seconds."""
SLOW_S = 300
"""The window of the latency of prepares, seconds."""
GROWTH_S, GROWTH_MIN_S = 900, 600
"""The window of the growth, and the least of it that must have been observed, seconds."""

_CHECKS = CheckCounts.__struct_fields__
_COUNTS = 3 + len(_CHECKS)
"""Prepared, decided, promoted, and checks by outcome."""
_PENDING, _PARKED, _OLDEST = range(_COUNTS, _COUNTS + 3)
_WIDTH = _OLDEST + 1
_LOST, _OBSERVED = _WIDTH, _WIDTH + 1
"""Of all groups together only: lost transactions, and half partitions of known present values."""
_LATENCIES = {
    "prepare": "prepare_latency_seconds",
    "decision": "decision_latency_seconds",
    "promotion": "promotion_latency_seconds",
}
"""The metric of each latency."""
_COUNTED = frozenset(
    {
        HalfPartitionState.OWNED,
        HalfPartitionState.SUSPENDED,
        HalfPartitionState.ELSEWHERE,
        HalfPartitionState.NONE,
    }
)
"""The states in which the transactions of a half partition are known here, or not this proxy's."""


class _Ring:
    """The newest steps of one length: rows of numbers, overwritten in turn."""

    def __init__(self, step_s: int, slots: int, width: int) -> None:
        self.step_s = step_s
        self._slots = slots
        self._width = width
        self._steps = array("q", [-1]) * slots
        self.values = array("f", bytes(4 * slots * width))
        self._empty = array("f", bytes(4 * width))

    def row(self, second: int) -> int:
        """Return where the row of the step of a second begins, emptied if it is new."""
        step = second // self.step_s
        slot = step % self._slots
        at = slot * self._width
        if self._steps[slot] != step:
            self._steps[slot] = step
            self.values[at : at + self._width] = self._empty
        return at

    def find(self, step: int) -> Sequence[float] | None:
        """Return the row of a step, None if there is none."""
        slot = step % self._slots
        if self._steps[slot] != step:
            return None
        at = slot * self._width
        return self.values[at : at + self._width]

    @property
    def nbytes(self) -> int:
        return sum(len(a) * a.itemsize for a in (self._steps, self.values))


class _Series:
    """One series: the same numbers by each step.

    Attributes:
        since_s: before this second nothing is known of it; 0: it was idle.
        active_s: when it was last not idle.
    """

    def __init__(self, since_s: int, width: int = _WIDTH) -> None:
        steps = zip(HISTORY_STEPS_S, SPANS_S, strict=True)
        self.rings = [_Ring(step_s, span_s // step_s + 2, width) for step_s, span_s in steps]
        self.since_s = since_s
        self.active_s = since_s

    def add(self, now_ms: int, second: int, group: "_GroupSample", *, current: bool) -> None:
        """Add a sample, whose present values are known only if they are `current`."""
        pending, parked = (group.pending, group.parked) if current else (math.nan, math.nan)
        since_ms = now_ms if group.oldest_ms is None or not current else group.oldest_ms
        oldest_s = (now_ms - since_ms) / 1000
        for ring in self.rings:
            at, values = ring.row(second), ring.values
            for place, number in group.counts.items():
                values[at + place] += number
            values[at + _PENDING] = pending
            values[at + _PARKED] = parked
            values[at + _OLDEST] = max(values[at + _OLDEST], oldest_s)


class _GroupSample:
    """The part of a sample that is about one group, or about all."""

    __slots__ = ("counts", "oldest_ms", "parked", "pending")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.pending = self.parked = 0
        self.oldest_ms: int | None = None

    @property
    def busy(self) -> bool:
        return bool(self.counts or self.pending or self.parked)

    def waits_since(self, at_ms: int | None) -> None:
        if at_ms is not None and (self.oldest_ms is None or at_ms < self.oldest_ms):
            self.oldest_ms = at_ms


class _Reading:
    """Reads the owners for one sample: all groups together, and those that have a series or may get
    one, so that it hardly costs more with ten thousand groups.

    Attributes:
        oldest_ms: when the oldest pending transaction of each half partition was prepared.
        current: present values are known: Kafka answers all owners, and none is suspended.
    """

    def __init__(self, known: Mapping[str, _Series], second: int) -> None:
        self.whole = _GroupSample()
        # One that was busy within the longest step: its row must not keep old values.
        self.groups = {
            name: _GroupSample()
            for name, series in known.items()
            if series.active_s >= second - HISTORY_STEPS_S[-1]
        }
        self.oldest_ms: dict[int, int | None] = {}
        self.current = True
        self._known = known
        self._second = second
        self._room = GROUPS_MAX

    def _group(self, name: str) -> _GroupSample | None:
        group = self.groups.get(name)
        if group is None and (self._room or name in self._known):
            group = self.groups[name] = _GroupSample()
            if name not in self._known:
                self._room -= 1
        return group

    def count(self, name: str, counts: Iterable[tuple[int, int]]) -> None:
        """Add counts of a group, as pairs of place and number."""
        found = {place: number for place, number in counts if number}
        self.whole.counts.update(found)
        group = self._group(name)
        if group is not None:
            group.counts.update(found)

    def read(self, owner: ObservedPartition, oldest_ms: int | None) -> None:
        """Add an owner. `oldest_ms` is used while there are too many groups to look at each."""
        whole, index = self.whole, owner.ledger.index
        taken, lost = owner.rates.take()
        whole.counts[_LOST] += lost
        for place, counts in enumerate(taken):
            for name, number in counts.items():
                self.count(name, ((place, number),))
        silent = owner.kafka.silent_since_ms(owner.clock.now_ms())
        if owner.suspended_since_ms is not None or silent:
            self.current = False
        pending, parked = index.pending_by_group, index.parked_by_group
        whole.pending += sum(pending.values())
        whole.parked += sum(parked.values())
        all_looked_at = len(pending) <= LOOKED_AT_MAX or self._second % LOOK_EVERY_S == 0
        if all_looked_at:
            known = (index.oldest_pending_ms(name) for name in pending)
            oldest_ms = min((at_ms for at_ms in known if at_ms is not None), default=None)
        self.oldest_ms[owner.partition] = oldest_ms
        whole.waits_since(oldest_ms)
        for name, number in pending.items():
            group = self._group(name)
            if group is not None:
                group.pending += number
                group.waits_since(index.oldest_pending_ms(name))
        for name, number in parked.items():
            group = self._group(name)
            if group is not None:
                group.parked += number


class ProxyHistory(Past):
    """The last hour of one proxy; `sample` is to be called once a second."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._broker = observed.broker
        self._second = 0
        self._places: dict[str, int] = {}
        self._bounds: dict[str, tuple[float, ...]] = {}
        self._before: dict[str, list[int]] = {}
        width = _OBSERVED + 1
        for name, metric in _LATENCIES.items():
            bounds, counts = observed.latencies()[metric]
            self._places[name], self._bounds[name] = width, tuple(bounds)
            self._before[name] = list(counts)
            width += len(counts)
        self._all = _Series(0, width)
        self._groups: dict[str, _Series] = {}
        self._dropped_s = 0
        self._events: deque[HistoryEvent] = deque(maxlen=EVENTS_MAX)
        self._owned: frozenset[int] = frozenset()
        self._moved_s = 0
        self._problems: dict[tuple[str, str], None] = {}
        self._oldest_ms: dict[int, int | None] = {}
        self._looked_s = 0

    # --- sampling ----------------------------------------------------------------------------

    def sample(self) -> None:
        """Add what happened since the last sample."""
        now_ms = self._broker.now_ms()
        # The clock may go back; steps never do.
        second = self._second = max(self._second, now_ms // 1000)
        if not self._looked_s:
            self._note(now_ms, "start", f"version {__version__}")
            self._looked_s = second - 1  # a takeover now is a move since then
        owners = list(self._broker.partitions.open().values())
        self._note_owned(now_ms, frozenset(owner.partition for owner in owners))
        reading = _Reading(self._groups, second)
        states = self._broker.readiness().partitions.values()
        reading.current = all(state.partition(":")[0] in _COUNTED for state in states)
        for owner in owners:
            reading.read(owner, self._oldest_ms.get(owner.partition))
        for name, counts in self._observed.take_checks().items():
            reading.count(name, enumerate(counts, 3))
        whole = reading.whole
        for name, at in self._places.items():
            whole.counts.update({at + place: number for place, number in self._fresh(name)})
        self._oldest_ms = reading.oldest_ms
        self._all.add(now_ms, second, whole, current=reading.current)
        for ring in self._all.rings:
            ring.values[ring.row(second) + _OBSERVED] = len(owners) if reading.current else 0
        for name, group in reading.groups.items():
            series = self._groups.get(name)
            if group.busy:
                series = series or self._admit(name, second)
                if series is not None:
                    series.active_s = second
            if series is not None:
                series.add(now_ms, second, group, current=reading.current)
        if second - self._looked_s >= PROBLEMS_EVERY_S:
            self._note_problems(now_ms)
            self._looked_s = second

    def _fresh(self, name: str) -> Iterator[tuple[int, int]]:
        _, counts = self._observed.latencies()[_LATENCIES[name]]
        before, self._before[name] = self._before[name], list(counts)
        for place, (now, then) in enumerate(zip(counts, before, strict=True)):
            if now != then:
                yield place, now - then

    def _admit(self, name: str, second: int) -> _Series | None:
        if len(self._groups) >= GROUPS_MAX:
            idlest = min(self._groups, key=lambda known: self._groups[known].active_s)
            self._dropped_s = second
            if self._groups[idlest].active_s > second - IDLE_S:
                return None
            del self._groups[idlest]
        # As long as no group was left out, one without a series was idle.
        series = self._groups[name] = _Series(second if self._dropped_s else 0)
        return series

    # --- events ------------------------------------------------------------------------------

    def _note(self, at_ms: int, kind: str, text: str, group: str = "") -> None:
        event = HistoryEvent(at_ms, kind, text[:TEXT_MAX], self._broker.partitions.url, group)
        self._events.append(event)

    def _note_owned(self, now_ms: int, owned: frozenset[int]) -> None:
        if owned == self._owned:
            return
        came, went = owned - self._owned, self._owned - owned
        for kind, numbers in (("takeover", came), ("handover", went)):
            if numbers:
                noun = "half partition" if len(numbers) == 1 else "half partitions"
                self._note(now_ms, kind, f"{noun} {', '.join(map(str, sorted(numbers)))}")
        self._owned = owned
        self._moved_s = self._second

    def _note_problems(self, now_ms: int) -> None:
        # What came or went with the transactions of half partitions has neither begun nor ended.
        moved = self._moved_s > self._looked_s
        problems = dict.fromkeys(self._observed.problems())
        for kind, these, others in (
            ("problem", problems, self._problems),
            ("solved", self._problems, problems),
        ):
            for text, group in these:
                if (text, group) not in others and (text in PROXY_WORDS or not moved):
                    self._note(now_ms, kind, text, group)
        self._problems = problems

    # --- reading -----------------------------------------------------------------------------

    def lost(self) -> int:
        rows = self._rows(self._all.rings[-1], HISTORY_S)
        return round(sum(row[_LOST] for _, row in rows))

    def prepare_p99_s(self) -> float | None:
        at = self._places["prepare"]
        bounds = self._bounds["prepare"]
        counts = [0] * (len(bounds) + 1)
        for _, row in self._rows(self._all.rings[-1], SLOW_S):
            counts = [count + round(row[at + n]) for n, count in enumerate(counts)]
        return _latency(counts, bounds).p99_s if any(counts) else None

    def growth_per_s(self, group: str) -> float | None:
        # After half partitions have moved, its transactions came from another proxy.
        series, ring = self._groups.get(group), self._all.rings[-1]
        if series is None or self._second - self._moved_s < GROWTH_MIN_S:
            return None
        points = []
        for step, row in self._rows(ring, GROWTH_S):
            own = series.rings[-1].find(step)
            pending = 0.0 if own is None else own[_PENDING]
            if not (math.isnan(row[_PENDING]) or math.isnan(pending)):
                points.append((step * ring.step_s, pending))
        if len(points) * ring.step_s < GROWTH_MIN_S or points[0][0] < series.since_s:
            return None
        # As the alert does, by least squares.
        return linear_regression(*zip(*points, strict=True)).slope

    async def history(self, request: HistoryRequest) -> History:
        # Without percentiles yet.
        history = self.read(request)
        if not request.actions:
            return history
        actions, since_ms = await self._observed.actions()
        return structs.replace(history, actions=actions, actions_since_ms=since_ms)

    def read(self, request: HistoryRequest) -> History:
        """Return the history of this proxy without operators' actions."""
        now_ms = self._broker.now_ms()
        since_s = min(max(request.since_s, 1.0), float(HISTORY_S))
        number = _step_number(since_s, request.step_s)
        ring = self._all.rings[number]
        series = self._all if not request.group else self._groups.get(request.group)
        points = []
        for step, row in self._rows(ring, min(since_s, SPANS_S[number])):
            own: Sequence[float] | None = row
            if series is not self._all:
                own = None if series is None else series.rings[number].find(step)
                left_out = self._dropped_s if series is None else series.since_s
                if own is None and step * ring.step_s < left_out:
                    continue
            points.append(self._point(step * ring.step_s * 1000, row, own))
        since_ms = now_ms - round(since_s * 1000)
        events = tuple(
            event
            for event in self._events
            if event.at_ms >= since_ms and event.group in ("", request.group or event.group)
        )
        return History(
            step_s=ring.step_s,
            points=tuple(points),
            events=events,
            checks=tuple(self._observed.reports(request.group, now_ms)) if request.group else (),
            instances=tuple(
                structs.replace(instance, proxy=self._broker.partitions.url)
                for instance in (self._observed.instances(request.group) if request.group else ())
            ),
            bounds_s=dict(self._bounds),
            half_partitions=len(self._broker.partitions.assigned()),
        )

    def _rows(self, ring: _Ring, since_s: float) -> Iterator[tuple[int, Sequence[float]]]:
        """Yield the complete steps and their rows, oldest first."""
        last = self._second // ring.step_s
        for step in range(max(0, last - int(since_s) // ring.step_s), last):
            row = ring.find(step)
            if row is not None:
                yield step, row

    def _point(
        self, at_ms: int, all_: Sequence[float], own: Sequence[float] | None
    ) -> HistoryPoint:
        """Return a point of a series; without a row it was idle. Latencies are those of all."""
        known, observed = not math.isnan(all_[_PENDING]), round(all_[_OBSERVED])
        buckets = {}
        for name, at in self._places.items():
            found = tuple(map(round, all_[at : at + len(self._before[name])]))
            if any(found):
                buckets[name] = found
        if own is None:
            none = 0 if known else None
            return HistoryPoint(
                at_ms, pending=none, parked=none, buckets=buckets, observed=observed
            )
        counts = [round(number) for number in own[:_COUNTS]]
        oldest_s = own[_OLDEST]
        return HistoryPoint(
            at_ms,
            prepared=counts[0],
            decided=counts[1],
            promoted=counts[2],
            pending=_known(own[_PENDING]) if known else None,
            parked=_known(own[_PARKED]) if known else None,
            oldest_pending_age_s=round(oldest_s, 1) if oldest_s > 0 else None,
            checks=CheckCounts(*counts[3:]),
            buckets=buckets,
            observed=observed,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the rings."""
        return sum(r.nbytes for s in (self._all, *self._groups.values()) for r in s.rings)


def _known(value: float) -> int | None:
    """Return a present value, None if it was not known. An idle group's last sample may be older
    than that of all groups, and from a time when Kafka did not answer."""
    return None if math.isnan(value) else round(value)


def _step_number(since_s: float, step_s: float | None) -> int:
    """Return which step to answer with."""
    for number, (step, span) in enumerate(zip(HISTORY_STEPS_S, SPANS_S, strict=True)):
        if step >= step_s if step_s is not None else span >= since_s:
            return number
    return len(HISTORY_STEPS_S) - 1


# --- of all proxies --------------------------------------------------------------------------


def joined_history(parts: Sequence[History], *, complete: bool) -> History:
    """Return the history of all proxies that answered: counts summed, percentiles computed.

    Pending, parked and oldest are only known where each half partition was observed.

    Args:
        complete: all proxies answered.
    """
    points: dict[int, HistoryPoint] = {}
    bounds: dict[str, tuple[float, ...]] = {}
    for part in parts:
        for name, found in part.bounds_s.items():
            bounds.setdefault(name, found)
        for point in part.points:
            known = points.get(point.at_ms)
            points[point.at_ms] = point if known is None else _add(known, point)
    times = sorted(points)
    # The newest step may be complete at some proxies only.
    while len(times) > 1 and points[times[-1]].proxies < points[times[-2]].proxies:
        points.pop(times.pop())
    half_partitions = max((part.half_partitions for part in parts), default=0)
    for at_ms, point in points.items():
        # Older versions do not tell what they observed.
        all_observed = not half_partitions or point.observed in (None, half_partitions)
        if not complete or not all_observed:
            points[at_ms] = structs.replace(
                point, pending=None, parked=None, oldest_pending_age_s=None
            )
    first = parts[0] if parts else History(HISTORY_STEPS_S[-1])
    since: dict[int, int] = {}
    for part in parts:
        for partition, since_ms in part.actions_since_ms.items():
            since[partition] = min(since.get(partition, since_ms), since_ms)
    actions: dict[tuple[int, str, str], OperatorAction] = {}
    for action in (action for part in parts for action in part.actions):
        # A half partition that moved: both owners have seen the markers.
        key = (action.at_ms, action.action, action.id)
        known_action = actions.setdefault(key, action)
        if action.count > known_action.count:
            actions[key] = action
    by_time = attrgetter("at_ms")
    events = sorted((event for part in parts for event in part.events), key=by_time)
    checks = sorted((check for part in parts for check in part.checks), key=by_time)
    return History(
        step_s=first.step_s,
        points=tuple(_with_latency(points[at_ms], bounds) for at_ms in sorted(points)),
        events=tuple(events[-EVENTS_MAX:]),
        complete=complete,
        checks=tuple(checks[::-1]),
        instances=tuple(instance for part in parts for instance in part.instances),
        actions=tuple(sorted(actions.values(), key=by_time)[::-1]),
        actions_since_ms=since,
        half_partitions=half_partitions,
    )


def _add(one: HistoryPoint, other: HistoryPoint) -> HistoryPoint:
    ages = [a for a in (one.oldest_pending_age_s, other.oldest_pending_age_s) if a is not None]
    buckets = dict(one.buckets)
    for name, counts in other.buckets.items():
        known = buckets.get(name, (0,) * len(counts))
        if len(known) == len(counts):
            buckets[name] = tuple(map(sum, zip(known, counts, strict=True)))
    return HistoryPoint(
        one.at_ms,
        one.prepared + other.prepared,
        one.decided + other.decided,
        one.promoted + other.promoted,
        _known_sum(one.pending, other.pending),
        _known_sum(one.parked, other.parked),
        max(ages, default=None),
        sum_of_checks(one.checks, other.checks),
        buckets=buckets,
        proxies=one.proxies + other.proxies,
        observed=_known_sum(one.observed, other.observed),
    )


def _known_sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _with_latency(point: HistoryPoint, bounds: Mapping[str, Sequence[float]]) -> HistoryPoint:
    if not point.buckets:
        return point
    latency = {
        name: _latency(counts, bounds[name])
        for name, counts in point.buckets.items()
        if name in bounds and len(counts) == len(bounds[name]) + 1
    }
    return structs.replace(point, latency=latency, buckets={})


def _latency(counts: Sequence[int], bounds: Sequence[float]) -> Latency:
    """Return percentiles, within their buckets by linear interpolation; above the last bound, that
    bound."""
    total = sum(counts)
    found = []
    for rank in (0.5 * total, 0.99 * total):
        below, lower, value = 0, 0.0, bounds[-1]
        for count, upper in zip(counts, bounds, strict=False):
            if below + count >= rank:
                value = lower + (upper - lower) * (rank - below) / count
                break
            below, lower = below + count, upper
        found.append(round(value, 6))
    return Latency(total, *found)
