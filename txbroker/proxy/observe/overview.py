"""Overviews: each proxy reports its own half partitions, and the called proxy joins the reports.

Overviews and gauges read counters that the ledgers keep, and walk no transactions, so that a scrape
takes milliseconds even with a million pending transactions."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, structs

from txbroker import __version__
from txbroker.contract.service import (
    INSTANCES_SHOWN_MAX,
    OVERVIEW_GROUPS_MAX,
    GroupOverview,
    Overview,
    PartitionOverview,
    PartitionState,
    ProxyOverview,
    Rates,
    Readiness,
)
from txbroker.core.ledger import Ledger

WINDOW_S = 10.0
"""Rates are averages over about this time, seconds."""


class _Sample(NamedTuple):
    at_s: float
    prepared: int
    decided: int
    promoted: int


class RateCounter:
    """Counts the transactions of one half partition.

    Attributes:
        prepared, decided, promoted: transactions so far; the caller adds to them.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.prepared = self.decided = self.promoted = 0
        self._clock_s = clock_s
        self._samples: deque[_Sample] = deque([self._now()])

    def sample(self) -> None:
        now = self._now()
        self._samples.append(now)
        # The first sample kept is the last one before the window.
        while len(self._samples) > 1 and self._samples[1].at_s <= now.at_s - WINDOW_S:
            self._samples.popleft()

    def per_second(self) -> Rates:
        now = self._now()
        # Samples are late while Kafka does not answer; the newest one before the window is the
        # most accurate start.
        before = self._samples[0]
        for sample in self._samples:
            if sample.at_s > now.at_s - WINDOW_S:
                break
            before = sample
        passed_s = now.at_s - before.at_s
        if passed_s <= 0:
            return Rates()
        return Rates(
            (now.prepared - before.prepared) / passed_s,
            (now.decided - before.decided) / passed_s,
            (now.promoted - before.promoted) / passed_s,
        )

    def _now(self) -> _Sample:
        return _Sample(self._clock_s(), self.prepared, self.decided, self.promoted)


class ObservedPartition(Protocol):
    """The owner of a half partition."""

    partition: int
    ledger: Ledger
    rates: RateCounter

    def now_ms(self) -> int:
        """Return the time by the brokers' clock, ms."""


class ObservedBroker(Protocol):
    """The broker of one proxy."""

    def ledgers(self) -> Iterable[ObservedPartition]:
        """Return the owners of the half partitions that are certainly this proxy's."""

    def readiness(self) -> Readiness:
        """Return the state of each half partition."""

    def topic_problems(self) -> Sequence[str]:
        """Return the problems of txbroker's own topics."""


UNREACHABLE = "unreachable"
"""The state of a half partition whose proxy did not answer."""
_NOT_OURS = frozenset({PartitionState.ELSEWHERE, PartitionState.NONE})


class GroupStatus(Struct, frozen=True):
    """Sources of what a proxy knows of groups and files.

    Attributes:
        connected: returns the instances of each group that have a session at this proxy.
        unreachable: returns the reason for each unreachable group.
        unreachable_for_s: returns for how many seconds each of them has been unreachable.
        files_not_read: returns by setting whether the content of its file cannot be used.
    """

    connected: Callable[[], Mapping[str, Sequence[str]]] = dict
    unreachable: Callable[[], Mapping[str, str]] = dict
    unreachable_for_s: Callable[[], Mapping[str, float]] = dict
    files_not_read: Callable[[], Mapping[str, bool]] = dict


# --- of one proxy ----------------------------------------------------------------------------


def local_overview(
    url: str,
    readiness: Readiness,
    owners: Iterable[ObservedPartition],
    status: GroupStatus,
    now_ms: int,
    admin_url: str = "",
) -> Overview:
    """Return the overview of one proxy.

    Args:
        url: the proxy's URL.
        owners: the owners that are caught up and not suspended.
        now_ms: the brokers' clock.
        admin_url: where it takes calls of operators, "" if at `url`.
    """
    by_number = {owner.partition: owner for owner in owners}
    # Read once, so that the oldest age of a partition is never below that of its groups.
    moments = {number: owner.now_ms() for number, owner in by_number.items()}
    partitions = []
    for number, text in sorted(readiness.partitions.items()):
        state, _, why = text.partition(": ")
        if state in _NOT_OURS:
            continue
        shown = PartitionOverview(number, url, state, why)
        owner = by_number.get(number)
        partitions.append(shown if owner is None else _counted(shown, owner, moments[number]))
    groups: dict[str, GroupOverview] = {}
    refused: Counter[str] = Counter()
    for owner in by_number.values():
        refused.update(owner.ledger.index.refused_by_topic)
        for group in _groups(owner, moments[owner.partition]):
            _add_group(groups, group)
    for group in _reachability(status, now_ms):
        _add_group(groups, group)
    ours = tuple(shown.partition for shown in partitions)
    proxy = ProxyOverview(
        url=url,
        ready=readiness.ready,
        problems=(*readiness.problems, *_not_read(status)),
        version=__version__,
        partitions=ours,
        now_ms=now_ms,
        admin_url=admin_url,
    )
    named = _most_needed(groups.values())
    return Overview(
        at_ms=now_ms,
        complete=all(shown.pending is not None for shown in partitions),
        proxies=(proxy,),
        partitions=tuple(partitions),
        groups=named,
        groups_left_off=len(groups) - len(named),
        refused_topics=dict(refused),
    )


def _not_read(status: GroupStatus) -> Iterable[str]:
    """Yield the problems of files: for operators only, so `/readyz` leaves them out."""
    for name, unread in status.files_not_read().items():
        if unread:
            yield (
                f"the file of {name} cannot be used, so its last content stays in force: see `file "
                "not read` in the log"
            )


def _counted(shown: PartitionOverview, owner: ObservedPartition, now_ms: int) -> PartitionOverview:
    ledger = owner.ledger
    oldest = [
        at_ms
        for group in ledger.index.pending_by_group
        if (at_ms := ledger.index.oldest_pending_ms(group)) is not None
    ]
    first = next(iter(ledger.index.ready.values()), None)
    parked = len(ledger.index.parked)
    return structs.replace(
        shown,
        pending=ledger.index.undecided_count - parked,
        parked=parked,
        refused=len(ledger.index.refused),
        committed=len(ledger.index.ready),
        settled=len(ledger.index.settled),
        oldest_pending_age_s=_age_s(now_ms, min(oldest, default=None)),
        oldest_committed_age_s=_age_s(now_ms, None if first is None else first.verdict.at_ms),
        rates=owner.rates.per_second(),
    )


def _age_s(now_ms: int, since_ms: int | None) -> float | None:
    return None if since_ms is None else max(0, now_ms - since_ms) / 1000


def _groups(owner: ObservedPartition, now_ms: int) -> Iterable[GroupOverview]:
    ledger = owner.ledger
    pending, parked = ledger.index.pending_by_group, ledger.index.parked_by_group
    for name in pending.keys() | parked.keys():
        age_s = _age_s(now_ms, ledger.index.oldest_pending_ms(name))
        yield GroupOverview(name, pending.get(name, 0), parked.get(name, 0), age_s)


def _reachability(status: GroupStatus, now_ms: int) -> Iterable[GroupOverview]:
    """Yield the sessions of groups, and since when groups are unreachable."""
    for name, instances in status.connected().items():
        shown = tuple(instances[:INSTANCES_SHOWN_MAX])
        yield GroupOverview(name, sessions=len(instances), instances=shown)
    why = status.unreachable()
    for name, seconds in status.unreachable_for_s().items():
        since_ms = now_ms - round(seconds * 1000)
        yield GroupOverview(name, unreachable_since_ms=since_ms, unreachable_why=why.get(name, ""))


# --- of all proxies --------------------------------------------------------------------------


def joined(
    assigned: Sequence[str], parts: Sequence[Overview], missing: Mapping[str, str], at_ms: int
) -> Overview:
    """Return the joined overview of all proxies.

    Args:
        assigned: the URL of each half partition's proxy, "" where none is known.
        parts: the overviews of the proxies that answered.
        missing: why each other proxy did not answer, by URL.
        at_ms: the brokers' clock.
    """
    known: dict[int, PartitionOverview] = {}
    groups: dict[str, GroupOverview] = {}
    refused: Counter[str] = Counter()
    proxies = [ProxyOverview(url, reached=False, why=why) for url, why in missing.items()]
    for part in parts:
        proxies.extend(part.proxies)
        refused.update(part.refused_topics)
        for shown in part.partitions:
            # While a partition moves, two proxies may report it: the owner's report has counts.
            if shown.partition not in known or known[shown.partition].pending is None:
                known[shown.partition] = shown
        for group in part.groups:
            _add_group(groups, group)
    partitions = tuple(
        known.get(number) or _unknown(number, url, missing) for number, url in enumerate(assigned)
    )
    named = _most_needed(groups.values())
    left_off = len(groups) - len(named) + sum(part.groups_left_off for part in parts)
    return Overview(
        at_ms=at_ms,
        complete=not missing and all(shown.pending is not None for shown in partitions),
        proxies=tuple(sorted(proxies, key=lambda proxy: proxy.url)),
        partitions=partitions,
        groups=named,
        groups_left_off=left_off,
        refused_topics=dict(refused),
    )


def _unknown(number: int, url: str, missing: Mapping[str, str]) -> PartitionOverview:
    if url in missing:
        return PartitionOverview(number, url, UNREACHABLE, missing[url])
    return PartitionOverview(number, url, PartitionState.NONE)


def _add_group(groups: dict[str, GroupOverview], report: GroupOverview) -> None:
    known = groups.get(report.group)
    if known is None:
        groups[report.group] = report
        return
    # The reason comes from the proxy that has not reached it for longest.
    since = (known.unreachable_since_ms, known.unreachable_why)
    other = (report.unreachable_since_ms, report.unreachable_why)
    if since[0] is None or (other[0] is not None and other[0] < since[0]):
        since = other
    ages = [a for a in (known.oldest_pending_age_s, report.oldest_pending_age_s) if a is not None]
    # An instance has sessions at several owners, and counts once.
    instances = tuple(dict.fromkeys(known.instances + report.instances))
    unnamed = known.sessions + report.sessions - len(known.instances) - len(report.instances)
    groups[report.group] = GroupOverview(
        report.group,
        known.pending + report.pending,
        known.parked + report.parked,
        max(ages, default=None),
        max(known.sessions, report.sessions, len(instances) if not unnamed else 0),
        instances[:INSTANCES_SHOWN_MAX],
        *since,
    )


def _most_needed(groups: Iterable[GroupOverview]) -> tuple[GroupOverview, ...]:
    """Return the groups that an overview lists, those that need attention first."""

    def need(group: GroupOverview) -> tuple[bool, bool, float, str]:
        return (
            group.unreachable_since_ms is None,
            not group.parked,
            -(group.oldest_pending_age_s or 0.0),
            group.group,
        )

    return tuple(sorted(groups, key=need)[:OVERVIEW_GROUPS_MAX])
