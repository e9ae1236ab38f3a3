"""How all stands: each proxy tells of its own half partitions, and whoever is asked joins them.

A proxy reads its ledgers' own counters and walks no transactions, so that this takes milliseconds
also with a million of them pending.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

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
    Readiness,
)
from txbroker.proxy.observe.observed import ObservedPartition

UNREACHABLE = "unreachable"
"""The state of a half partition whose proxy did not answer."""
_NOT_OURS = frozenset({PartitionState.ELSEWHERE, PartitionState.NONE})


class GroupStatus(Struct, frozen=True):
    """What a proxy knows beside transactions.

    Attributes:
        connected: the instances of each group that can be asked by sessions at this proxy.
        unreachable: the groups that could not be asked, each with why.
        unreachable_for_s: the same groups, each with since how many seconds.
        files_not_read: by setting, whether its file as it is now cannot be used.
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
    around: GroupStatus,
    now_ms: int,
    admin_url: str = "",
) -> Overview:
    """Return how this proxy's own part stands.

    Args:
        url: this proxy's URL.
        owners: those of what is this proxy's for sure and caught up.
        now_ms: the brokers' clock.
        admin_url: where it takes operators' calls, "" where that is `url`, too.
    """
    by_number = {owner.partition: owner for owner in owners}
    # Read once, so that the oldest of a partition is never younger than that of its groups.
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
        refused.update(owner.ledger.refused_by_topic)
        for group in _groups(owner, moments[owner.partition]):
            _add_group(groups, group)
    for group in _around(around, now_ms):
        _add_group(groups, group)
    ours = tuple(shown.partition for shown in partitions)
    proxy = ProxyOverview(
        url=url,
        ready=readiness.ready,
        problems=(*readiness.problems, *_not_read(around)),
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


def _not_read(around: GroupStatus) -> Iterable[str]:
    """Yield what operators are to know of files, and who may read `/readyz` alone is not."""
    for name, unread in around.files_not_read().items():
        if unread:
            yield (
                f"{name} as it is now cannot be used, its last content stays in force: see `file "
                "not read` in the log"
            )


def _counted(shown: PartitionOverview, owner: ObservedPartition, now_ms: int) -> PartitionOverview:
    ledger = owner.ledger
    oldest = [
        at_ms
        for group in ledger.pending_by_group
        if (at_ms := ledger.oldest_pending_ms(group)) is not None
    ]
    first = next(iter(ledger.ready.values()), None)
    parked = len(ledger.parked)
    return structs.replace(
        shown,
        pending=ledger.undecided_count - parked,
        parked=parked,
        refused=len(ledger.refused),
        committed=len(ledger.ready),
        oldest_pending_age_s=_age_s(now_ms, min(oldest, default=None)),
        oldest_committed_age_s=_age_s(now_ms, None if first is None else first.decided_at_ms),
        rates=owner.rates.per_second(),
    )


def _age_s(now_ms: int, since_ms: int | None) -> float | None:
    return None if since_ms is None else max(0, now_ms - since_ms) / 1000


def _groups(owner: ObservedPartition, now_ms: int) -> Iterable[GroupOverview]:
    """Yield what each group has left undecided in a partition."""
    ledger = owner.ledger
    pending, parked = ledger.pending_by_group, ledger.parked_by_group
    for name in pending.keys() | parked.keys():
        age_s = _age_s(now_ms, ledger.oldest_pending_ms(name))
        yield GroupOverview(name, pending.get(name, 0), parked.get(name, 0), age_s)


def _around(around: GroupStatus, now_ms: int) -> Iterable[GroupOverview]:
    """Yield what is known of groups beside their transactions."""
    for name, instances in around.connected().items():
        shown = tuple(instances[:INSTANCES_SHOWN_MAX])
        yield GroupOverview(name, sessions=len(instances), instances=shown)
    why = around.unreachable()
    for name, seconds in around.unreachable_for_s().items():
        since_ms = now_ms - round(seconds * 1000)
        yield GroupOverview(name, unreachable_since_ms=since_ms, unreachable_why=why.get(name, ""))


# --- of all proxies --------------------------------------------------------------------------


def joined(
    assigned: Sequence[str], parts: Sequence[Overview], missing: Mapping[str, str], at_ms: int
) -> Overview:
    """Return one overview of what several proxies say of their own parts.

    Args:
        assigned: the URL of each half partition's proxy, "" where none is known.
        parts: what the proxies that answered say.
        missing: the URLs of the others, each with why it did not answer.
        at_ms: the brokers' clock.
    """
    told: dict[int, PartitionOverview] = {}
    groups: dict[str, GroupOverview] = {}
    refused: Counter[str] = Counter()
    proxies = [ProxyOverview(url, reached=False, why=why) for url, why in missing.items()]
    for part in parts:
        proxies.extend(part.proxies)
        refused.update(part.refused_topics)
        for shown in part.partitions:
            # While one moves, two proxies may tell of it: the one that holds it knows more.
            if shown.partition not in told or told[shown.partition].pending is None:
                told[shown.partition] = shown
        for group in part.groups:
            _add_group(groups, group)
    partitions = tuple(
        told.get(number) or _untold(number, url, missing) for number, url in enumerate(assigned)
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


def _untold(number: int, url: str, missing: Mapping[str, str]) -> PartitionOverview:
    if url in missing:
        return PartitionOverview(number, url, UNREACHABLE, missing[url])
    return PartitionOverview(number, url, PartitionState.NONE)


def _add_group(groups: dict[str, GroupOverview], found: GroupOverview) -> None:
    """Join what is told of a group to what was told of it before."""
    known = groups.get(found.group)
    if known is None:
        groups[found.group] = found
        return
    # Who has not reached it for longest says why.
    since = (known.unreachable_since_ms, known.unreachable_why)
    other = (found.unreachable_since_ms, found.unreachable_why)
    if since[0] is None or (other[0] is not None and other[0] < since[0]):
        since = other
    ages = [a for a in (known.oldest_pending_age_s, found.oldest_pending_age_s) if a is not None]
    # An instance has a session at each owner that it needs, and counts once.
    instances = tuple(dict.fromkeys(known.instances + found.instances))
    unnamed = known.sessions + found.sessions - len(known.instances) - len(found.instances)
    groups[found.group] = GroupOverview(
        found.group,
        known.pending + found.pending,
        known.parked + found.parked,
        max(ages, default=None),
        max(known.sessions, found.sessions, len(instances) if not unnamed else 0),
        instances[:INSTANCES_SHOWN_MAX],
        *since,
    )


def _most_needed(groups: Iterable[GroupOverview]) -> tuple[GroupOverview, ...]:
    """Return the groups that an overview names, those that need somebody first."""

    def need(group: GroupOverview) -> tuple[bool, bool, float, str]:
        return (
            group.unreachable_since_ms is None,
            not group.parked,
            -(group.oldest_pending_age_s or 0.0),
            group.group,
        )

    return tuple(sorted(groups, key=need)[:OVERVIEW_GROUPS_MAX])
