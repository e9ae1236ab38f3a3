"""Find each condition in an overview.

A finder returns the half partitions, groups, proxies or audits to which its condition applies.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from txbroker.contract.audit import STREAM_KEY
from txbroker.contract.service import (
    FILE_PROBLEM,
    UNREACHABLE,
    AuditOverview,
    GroupOverview,
    Overview,
    PartitionOverview,
    PartitionState,
    ProxyOverview,
)
from txbroker.diagnosis.limits import DiagnosisLimits

Finder: TypeAlias = Callable[[Overview, DiagnosisLimits], Sequence[Any]]


# --- proxies ---------------------------------------------------------------------------------


def kafka_silent(overview: Overview, _: DiagnosisLimits) -> list[ProxyOverview]:
    return [proxy for proxy in overview.proxies if proxy.kafka_silent_since_ms is not None]


def silent(overview: Overview, _: DiagnosisLimits) -> list[ProxyOverview]:
    return [proxy for proxy in overview.proxies if not proxy.reached]


def not_ready(overview: Overview, _: DiagnosisLimits) -> list[ProxyOverview]:
    return [proxy for proxy in _with_problems(overview) if not proxy.ready]


def troubled(overview: Overview, _: DiagnosisLimits) -> list[ProxyOverview]:
    return [proxy for proxy in _with_problems(overview) if proxy.ready]


def _with_problems(overview: Overview) -> list[ProxyOverview]:
    # Without an answer of Kafka its other problems follow from that.
    return [
        proxy
        for proxy in overview.proxies
        if proxy.reached and proxy.kafka_silent_since_ms is None and own_problems(proxy)
    ]


def own_problems(proxy: ProxyOverview) -> list[str]:
    """Return the problems of a proxy but those of half partitions, which are conditions of their
    own, and of files."""
    return [text for text in proxy.problems if not text.startswith(("partition ", FILE_PROBLEM))]


def files_not_read(overview: Overview, _: DiagnosisLimits) -> list[ProxyOverview]:
    return [proxy for proxy in overview.proxies if file_problems(proxy)]


def file_problems(proxy: ProxyOverview) -> list[str]:
    """Return the problems of the files of a proxy."""
    return [text for text in proxy.problems if text.startswith(FILE_PROBLEM)]


def slow(overview: Overview, limits: DiagnosisLimits) -> list[ProxyOverview]:
    return [one for one in overview.proxies if (one.prepare_p99_s or 0.0) > limits.prepare_s]


def losing(overview: Overview, _: DiagnosisLimits) -> list[ProxyOverview]:
    return [proxy for proxy in overview.proxies if proxy.lost_last_hour]


def short_of_retention(overview: Overview, limits: DiagnosisLimits) -> list[ProxyOverview]:
    return [
        proxy
        for proxy in overview.proxies
        if proxy.half_retention_headroom_s is not None
        and proxy.half_retention_s is not None
        and proxy.half_retention_headroom_s < limits.headroom_share * proxy.half_retention_s
    ]


# --- half partitions -------------------------------------------------------------------------


def in_state(state: str) -> Finder:
    """Return the finder of half partitions in a state."""
    return lambda overview, _: [one for one in overview.partitions if one.state == state]


def in_unknown_state(overview: Overview, _: DiagnosisLimits) -> list[PartitionOverview]:
    known = {*PartitionState, UNREACHABLE}
    return [one for one in overview.partitions if one.state not in known]


def stalled(overview: Overview, limits: DiagnosisLimits) -> list[PartitionOverview]:
    return [
        one
        for one in overview.partitions
        if (one.oldest_committed_age_s or 0.0) > limits.promotion_s
    ]


def refusing(overview: Overview, _: DiagnosisLimits) -> list[PartitionOverview]:
    return [one for one in overview.partitions if one.refused]


def parking(overview: Overview, _: DiagnosisLimits) -> list[PartitionOverview | GroupOverview]:
    # The groups too, to name them: an overview may not list all.
    return [
        *(one for one in overview.partitions if one.parked),
        *(group for group in overview.groups if group.parked),
    ]


# --- groups ----------------------------------------------------------------------------------


def failing(overview: Overview, _: DiagnosisLimits) -> list[GroupOverview]:
    return [group for group in overview.groups if group.checks.counts.failing]


def unreachable(overview: Overview, _: DiagnosisLimits) -> list[GroupOverview]:
    return [group for group in overview.groups if group.unreachable_since_ms is not None]


def old(overview: Overview, limits: DiagnosisLimits) -> list[GroupOverview]:
    # An unreachable group is already a condition.
    return [
        group
        for group in overview.groups
        if group.unreachable_since_ms is None
        and (group.oldest_pending_age_s or 0.0) > limits.pending_age_s
    ]


def growing(overview: Overview, limits: DiagnosisLimits) -> list[GroupOverview]:
    return [
        group
        for group in overview.groups
        if group.pending > limits.pending
        and (group.pending_growth_per_s or 0.0) > limits.growth_per_s
    ]


# --- audits ----------------------------------------------------------------------------------


def drifting(overview: Overview, _: DiagnosisLimits) -> list[AuditOverview]:
    return [audit for audit in overview.audits if any(audit.drift.values())]


def failed_checks(*, critical: bool) -> Finder:
    """Return the finder of audits with failed checks, of which one is critical or none."""
    return lambda overview, _: [
        audit
        for audit in overview.audits
        if audit.failed_checks and ("critical" in audit.failed_checks.values()) == critical
    ]


def stale(overview: Overview, limits: DiagnosisLimits) -> list[AuditOverview]:
    return [one for one in overview.audits if age_s(overview, one) > limits.audit_s]


def lagging(overview: Overview, limits: DiagnosisLimits) -> list[AuditOverview]:
    return [
        audit
        for audit in overview.audits
        if audit.mode == STREAM_KEY and age_s(overview, audit) > limits.stream_s
    ]


def age_s(overview: Overview, audit: AuditOverview) -> float:
    """Return how long ago a batch ended, or up to when a stream has judged, seconds."""
    return (overview.at_ms - audit.ended_ms) / 1000
