"""Find the parts of an overview to which a condition applies."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from txbroker.contract.service import (
    FILE_PROBLEM,
    AuditOverview,
    GroupOverview,
    Overview,
    PartitionOverview,
    ProxyOverview,
)

Finder: TypeAlias = Callable[[Overview], Sequence[Any]]


def proxies(applies: Callable[[ProxyOverview], object]) -> Finder:
    """Return the finder of proxies to which this applies."""
    return lambda overview: [one for one in overview.proxies if applies(one)]


def partitions(applies: Callable[[PartitionOverview], object]) -> Finder:
    """Return the finder of half partitions to which this applies."""
    return lambda overview: [one for one in overview.partitions if applies(one)]


def groups(applies: Callable[[GroupOverview], object]) -> Finder:
    """Return the finder of groups to which this applies."""
    return lambda overview: [one for one in overview.groups if applies(one)]


def audits(applies: Callable[[AuditOverview, float], object]) -> Finder:
    """Return the finder of audits to which this applies; it also takes the age, seconds."""
    return lambda overview: [one for one in overview.audits if applies(one, age_s(overview, one))]


def age_s(overview: Overview, audit: AuditOverview) -> float:
    """Return how long ago a batch ended, or up to when a stream has judged, seconds."""
    return (overview.at_ms - audit.ended_ms) / 1000


def parked_of(overview: Overview) -> int:
    """Return the number of parked transactions: some half partitions or groups may be missing."""
    return max(
        sum(one.parked or 0 for one in overview.partitions),
        sum(one.parked for one in overview.groups),
    )


def own_problems(proxy: ProxyOverview) -> list[str]:
    """Return the problems of a proxy but those of half partitions, which are conditions of their
    own, and of files."""
    return [text for text in proxy.problems if not text.startswith(("partition ", FILE_PROBLEM))]


def file_problems(proxy: ProxyOverview) -> list[str]:
    """Return the problems of the files of a proxy."""
    return [text for text in proxy.problems if text.startswith(FILE_PROBLEM)]


def hindered(proxy: ProxyOverview) -> bool:
    """Return whether a proxy has problems that do not follow from the silence of Kafka."""
    return proxy.reached and proxy.kafka_silent_since_ms is None and bool(own_problems(proxy))
