"""Overviews: each proxy reports its own half partitions, and the called proxy joins the reports.

Overviews and gauges read counters that the ledgers keep, and walk no transactions, so that a scrape
takes milliseconds even with a million pending transactions."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from msgspec import structs

from txbroker import __version__
from txbroker.contract.service import (
    FILE_PROBLEM,
    INSTANCES_SHOWN_MAX,
    OVERVIEW_GROUPS_MAX,
    PARKED_ANSWERS_MAX,
    UNREACHABLE,
    AuditOverview,
    CheckCounts,
    GroupChecks,
    GroupOverview,
    HalfPartitionState,
    Overview,
    ParkedAnswer,
    PartitionOverview,
    ProxyOverview,
    Readiness,
)
from txbroker.proxy.observe.observed import Observed, ObservedBroker, ObservedPartition, Past

PARKED_LOOKED_AT_MAX = 1000
"""Parked transactions of a half partition whose last answers an overview counts."""


_NOT_OURS = frozenset({HalfPartitionState.ELSEWHERE, HalfPartitionState.NONE})


class Unobserved(Observed):
    """A proxy of which only the broker is known."""

    def __init__(self, broker: ObservedBroker) -> None:
        self.broker = broker
        self.past = Past()


def unobserved(broker: ObservedBroker) -> Observed:
    """Return a proxy of which only the broker is known."""
    return Unobserved(broker)


# --- of one proxy ----------------------------------------------------------------------------


def local_overview(observed: Observed) -> Overview:
    """Return the overview of one proxy."""
    broker = observed.broker
    url, readiness, now_ms = broker.partitions.url, broker.readiness(), broker.now_ms()
    owners = broker.partitions.open().values()
    by_number = {owner.partition: owner for owner in owners}
    # Read once, so that the oldest age of a partition is never below that of its groups.
    moments = {number: _moment(owner) for number, owner in by_number.items()}
    partitions = []
    for number, text in sorted(readiness.partitions.items()):
        state, _, why = text.partition(": ")
        if state in _NOT_OURS:
            continue
        shown = PartitionOverview(number, url, state, why)
        moment = moments.get(number)
        partitions.append(shown if moment is None else _count(shown, moment))
    groups: dict[str, GroupOverview] = {}
    refused: Counter[str] = Counter()
    for moment in moments.values():
        refused.update(moment.owner.ledger.index.refused_by_topic)
        for group in _groups(moment):
            _add_group(groups, group)
    for group in _reachability(observed, now_ms):
        _add_group(groups, group)
    for name, checks in observed.checks(now_ms).items():
        # A group that was only checked, and not in vain, needs no line.
        if name in groups or checks.counts.failing:
            _add_group(groups, GroupOverview(name, checks=checks))
    named = _most_needed(groups.values())
    return Overview(
        at_ms=now_ms,
        complete=all(_current(shown) for shown in partitions),
        proxies=(
            structs.replace(
                _proxy(url, readiness, observed, moments),
                partitions=tuple(shown.partition for shown in partitions),
                now_ms=now_ms,
                admin_url=broker.partitions.own_admin_url,
            ),
        ),
        partitions=tuple(partitions),
        groups=_complete(named, observed),
        groups_left_off=len(groups) - len(named),
        refused_topics=dict(refused),
        audits=tuple(observed.audits()),
    )


class _Moment(NamedTuple):
    """An owner, and its clock and state while an overview is made.

    Attributes:
        silent_since_ms: since when Kafka has not answered it; None if it answers.
        as_of_ms: the time of its counts; None if they are current.
    """

    owner: ObservedPartition
    now_ms: int
    silent_since_ms: int | None
    as_of_ms: int | None


def _moment(owner: ObservedPartition) -> _Moment:
    now_ms = owner.clock.now_ms()
    silent_ms = owner.kafka.silent_since_ms(now_ms)
    since = [at_ms for at_ms in (silent_ms, owner.suspended_since_ms) if at_ms is not None]
    return _Moment(owner, now_ms, silent_ms, min(since, default=None))


def _current(shown: PartitionOverview) -> bool:
    return shown.pending is not None and shown.as_of_ms is None


def _proxy(
    url: str, readiness: Readiness, observed: Observed, moments: Mapping[int, _Moment]
) -> ProxyOverview:
    silent = {n: m.silent_since_ms for n, m in moments.items() if m.silent_since_ms is not None}
    whys = [m.owner.kafka.why for n, m in moments.items() if n in silent and m.owner.kafka.why]
    retention_s, headroom_s = observed.retention()
    return ProxyOverview(
        url=url,
        ready=readiness.ready,
        problems=(*readiness.problems, *_not_read(observed)),
        version=__version__,
        kafka_silent_since_ms=min(silent.values(), default=None),
        kafka_why=whys[0] if whys else "",
        kafka_partitions=tuple(silent),
        lost_last_hour=observed.past.lost(),
        prepare_p99_s=observed.past.prepare_p99_s(),
        half_retention_s=retention_s,
        half_retention_headroom_s=headroom_s,
    )


def _complete(groups: Sequence[GroupOverview], observed: Observed) -> tuple[GroupOverview, ...]:
    """Return groups with what only those that are listed need."""
    urls, past = observed.check_urls(), observed.past
    return tuple(
        structs.replace(
            group,
            check_url=group.group in urls,
            pending_growth_per_s=past.growth_per_s(group.group),
        )
        for group in groups
    )


def _not_read(observed: Observed) -> Iterable[str]:
    """Yield the problems of files: for operators only, so `/readyz` leaves them out."""
    for name, unread in observed.files_not_read().items():
        if unread:
            yield (
                f"{FILE_PROBLEM}{name} cannot be used, so its last content stays in force: see "
                "`file not read` in the log"
            )


def _count(shown: PartitionOverview, moment: _Moment) -> PartitionOverview:
    index = moment.owner.ledger.index
    oldest = [
        at_ms
        for group in index.pending_by_group
        if (at_ms := index.oldest_pending_ms(group)) is not None
    ]
    first = next(iter(index.ready.values()), None)
    parked = len(index.parked)
    return structs.replace(
        shown,
        pending=index.undecided_count - parked,
        parked=parked,
        refused=len(index.refused),
        committed=len(index.ready),
        settled=len(index.settled),
        oldest_pending_age_s=_age_s(moment.now_ms, min(oldest, default=None)),
        oldest_committed_age_s=_age_s(
            moment.now_ms, None if first is None else first.verdict.at_ms
        ),
        rates=moment.owner.rates.per_second(),
        as_of_ms=moment.as_of_ms,
    )


def _age_s(now_ms: int, since_ms: int | None) -> float | None:
    return None if since_ms is None else max(0, now_ms - since_ms) / 1000


def _groups(moment: _Moment) -> Iterable[GroupOverview]:
    index = moment.owner.ledger.index
    pending, parked = index.pending_by_group, index.parked_by_group
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for transaction in islice(index.parked.values(), PARKED_LOOKED_AT_MAX):
        answers[transaction.half.group][transaction.last_answer] += 1
    for name in pending.keys() | parked.keys():
        yield GroupOverview(
            name,
            pending.get(name, 0),
            parked.get(name, 0),
            _age_s(moment.now_ms, index.oldest_pending_ms(name)),
            parked_answers=_most_frequent(answers[name]) if name in answers else (),
            as_of_ms=moment.as_of_ms,
        )


def _most_frequent(answers: Counter[str]) -> tuple[ParkedAnswer, ...]:
    return tuple(ParkedAnswer(*pair) for pair in answers.most_common(PARKED_ANSWERS_MAX))


def _reachability(observed: Observed, now_ms: int) -> Iterable[GroupOverview]:
    """Yield the sessions of groups, and since when groups are unreachable."""
    for name, instances in observed.connected().items():
        shown = tuple(instances[:INSTANCES_SHOWN_MAX])
        yield GroupOverview(name, sessions=len(instances), instances=shown)
    why = observed.unreachable()
    for name, seconds in observed.unreachable_for_s().items():
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
    audits: dict[str, AuditOverview] = {}
    proxies = [ProxyOverview(url, reached=False, why=why) for url, why in missing.items()]
    for part in parts:
        proxies.extend(part.proxies)
        refused.update(part.refused_topics)
        for shown in part.partitions:
            # While a partition moves, two proxies may report it: the owner's report has counts,
            # and they are current.
            if shown.partition not in known or _rank(shown) > _rank(known[shown.partition]):
                known[shown.partition] = shown
        for audit in part.audits:
            audits[audit.mode] = max(
                audits.get(audit.mode, audit), audit, key=attrgetter("ended_ms")
            )
        for group in part.groups:
            _add_group(groups, group)
    partitions = tuple(
        known.get(number) or _unknown(number, url, missing) for number, url in enumerate(assigned)
    )
    named = _most_needed(groups.values())
    left_off = len(groups) - len(named) + sum(part.groups_left_off for part in parts)
    return Overview(
        at_ms=at_ms,
        complete=not missing and all(_current(shown) for shown in partitions),
        proxies=tuple(sorted(proxies, key=attrgetter("url"))),
        partitions=partitions,
        groups=named,
        groups_left_off=left_off,
        refused_topics=dict(refused),
        audits=tuple(audits.values()),
    )


def _rank(shown: PartitionOverview) -> tuple[bool, bool]:
    """Order reports of one half partition by how much they know."""
    return (shown.pending is not None, _current(shown))


def _unknown(number: int, url: str, missing: Mapping[str, str]) -> PartitionOverview:
    if url in missing:
        return PartitionOverview(number, url, UNREACHABLE, missing[url])
    return PartitionOverview(number, url, HalfPartitionState.NONE)


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
    growth = [known.pending_growth_per_s, report.pending_growth_per_s]
    grown = [per_s for per_s in growth if per_s is not None]
    times = [at_ms for at_ms in (known.as_of_ms, report.as_of_ms) if at_ms is not None]
    groups[report.group] = GroupOverview(
        report.group,
        known.pending + report.pending,
        known.parked + report.parked,
        max(ages, default=None),
        max(known.sessions, report.sessions, len(instances) if not unnamed else 0),
        instances[:INSTANCES_SHOWN_MAX],
        *since,
        check_url=known.check_url or report.check_url,
        checks=_both_checks(known.checks, report.checks),
        parked_answers=_both_answers(known.parked_answers, report.parked_answers),
        pending_growth_per_s=sum(grown) if grown else None,
        as_of_ms=min(times, default=None),
    )


def _both_checks(one: GroupChecks, other: GroupChecks) -> GroupChecks:
    if other == _NO_CHECKS:
        return one
    if one == _NO_CHECKS:
        return other
    reports = [r for r in (one.undecided, other.undecided) if r is not None]
    return GroupChecks(
        sum_of_checks(one.counts, other.counts), max(reports, key=attrgetter("at_ms"), default=None)
    )


_NO_CHECKS = GroupChecks()


def sum_of_checks(one: CheckCounts, other: CheckCounts) -> CheckCounts:
    counts = zip(structs.astuple(one), structs.astuple(other), strict=True)
    return CheckCounts(*map(sum, counts))


def _both_answers(
    one: tuple[ParkedAnswer, ...], other: tuple[ParkedAnswer, ...]
) -> tuple[ParkedAnswer, ...]:
    if not (one and other):
        return one or other
    counts: Counter[str] = Counter()
    for answer in one + other:
        counts[answer.answer] += answer.count
    return _most_frequent(counts)


def _most_needed(groups: Iterable[GroupOverview]) -> tuple[GroupOverview, ...]:
    """Return the groups that an overview lists, those that need attention first."""

    def need(group: GroupOverview) -> tuple[bool, bool, float, str]:
        return (
            group.unreachable_since_ms is None and not group.checks.counts.failing,
            not group.parked,
            -(group.oldest_pending_age_s or 0.0),
            group.group,
        )

    return tuple(sorted(groups, key=need)[:OVERVIEW_GROUPS_MAX])
