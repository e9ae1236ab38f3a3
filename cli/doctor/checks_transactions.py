"""Checks of transactions, and of causes that keep consumers waiting."""

from __future__ import annotations

import asyncio

from txbroker.cli.doctor.findings import CheckLevel, CheckRegistry, Finding, Section, fine, judged
from txbroker.cli.doctor.proxies import RegisteredGroup, Unavailable
from txbroker.cli.doctor.subject import Samples, Subject
from txbroker.cli.output import duration
from txbroker.config.settings import Settings
from txbroker.kafka.tools.examination import OpenTransaction

_OTHER = "other"
"""The label of values beyond a metric's label limit."""

book = CheckRegistry(Section.TRANSACTIONS, needs=("proxies-ready",))
kafka_book = CheckRegistry(Section.TRANSACTIONS, needs=("kafka-reachable",))


@book.check(
    "no transaction is undecided for too long",
    hint="List them with `txbroker tx list --state pending`, and find out why the group's "
    "check fails.",
    doc="docs/runbooks/TxBrokerPendingTooOld.md",
)
async def pending_age(subject: Subject) -> Finding:
    """Whether the oldest undecided transaction is past the time of its decision or parking."""
    overview, registered = await asyncio.gather(subject.overview(), subject.groups())
    policies = {one.group: one for one in registered}
    lines = []
    oldest_s = 0.0
    for one in overview.groups:
        age_s = one.oldest_pending_age_s or 0.0
        oldest_s = max(oldest_s, age_s)
        window_s = _window_s(subject.settings, policies.get(one.group))
        if age_s > subject.limits.pending_windows * window_s:
            lines.append(
                f"group {one.group}: {one.pending} pending, the oldest for {duration(age_s)}, "
                f"though its checks take {duration(window_s)}"
            )
    if lines:
        return judged(CheckLevel.FAILS, f"the oldest for {duration(oldest_s)}", lines)
    if not overview.complete:
        return judged(CheckLevel.WARNING, "unknown for some half partitions")
    total = sum(one.pending or 0 for one in overview.partitions)
    return fine(f"{total} pending, the oldest for {duration(oldest_s)}")


def _window_s(settings: Settings, group: RegisteredGroup | None) -> float:
    """Return the seconds from a group's prepare until the transaction would be parked."""
    if group is None:
        return settings.check_window_s
    after_s = _given(group.check_after_s, settings.check_after_s)
    interval_s = _given(group.check_interval_s, settings.check_interval_s)
    attempts = _given(group.attempts_max, settings.check_attempts_max)
    return after_s + (attempts - 1) * interval_s + _given(group.timeout_s, settings.check_timeout_s)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


@book.check(
    "committed messages become visible",
    hint="Find the cause: the checks hanging-transactions and topics-in-sync, then the "
    "owner's log.",
    doc="docs/runbooks/TxBrokerPromotionStalled.md",
)
async def promotion(subject: Subject) -> Finding:
    """Whether every commit becomes visible in time."""
    overview = await subject.overview()
    limit_s = subject.limits.promotion_s
    lines = [
        f"partition {one.partition} ({one.owner}): {one.committed or 0} waiting, the oldest for "
        f"{duration(one.oldest_committed_age_s)}"
        for one in overview.partitions
        if one.oldest_committed_age_s is not None and one.oldest_committed_age_s > limit_s
    ]
    if lines:
        return judged(CheckLevel.FAILS, "some wait too long", lines)
    waiting = sum(one.committed or 0 for one in overview.partitions)
    return fine(f"{waiting} in progress")


@book.check(
    "no transaction waits for an operator's decision",
    hint="`txbroker tx list --state parked`, find out each one's outcome, then commit, roll back "
    "or revive it.",
    doc="docs/runbooks/TxBrokerParking.md",
)
async def parked(subject: Subject) -> Finding:
    """Whether transactions stayed undecided after their last check."""
    overview = await subject.overview()
    total = sum(one.parked or 0 for one in overview.partitions)
    if not total:
        return fine("none parked")
    lines = [f"group {one.group}: {one.parked}" for one in overview.groups if one.parked]
    return judged(CheckLevel.WARNING, f"{total} are parked, whole and decidable", lines)


@book.check(
    "every target topic accepts committed messages",
    hint="`txbroker tx list --state refused` and `tx show` show the cause; repair the topic, then "
    "revive.",
    doc="docs/runbooks/TxBrokerRefusing.md",
)
async def refused(subject: Subject) -> Finding:
    """Whether committed transactions are refused by their target topic."""
    overview = await subject.overview()
    total = sum(one.refused or 0 for one in overview.partitions)
    if not total:
        return fine("none refused")
    lines = [f"topic {topic}: {count}" for topic, count in overview.refused_topics.items()]
    return judged(CheckLevel.FAILS, f"{total} are committed and not visible", lines)


@kafka_book.check(
    "no Kafka transaction keeps consumers waiting",
    hint="Stop the application that owns the transaction; if it is gone, Kafka's "
    "`kafka-transactions.sh abort` ends it. One of txbroker's, or one whose end was lost, may hold "
    "committed messages: read the page before any abort.",
    doc="docs/operate/lost-end.md",
)
async def hanging_transactions(subject: Subject) -> Finding:
    """Whether a long open transaction hides the end of an own topic or a target."""
    limit_s = subject.limits.transaction_s
    topics = sorted({*subject.own_topics, *await _targets(subject)})
    cluster = await subject.kafka.cluster(topics)
    there = [name for name in topics if name in cluster.topics and cluster.topics[name].partitions]
    open_ = await subject.kafka.open_transactions(there)
    now_s = subject.now_s()
    old = [one for one in open_ if one.lost or _age_s(one, now_s) > limit_s]
    unknown = [one for one in open_ if one.started_ms is None and one not in old]
    if old:
        lines = [_open(one, now_s) for one in old + unknown]
        lost = sum(one.lost for one in old)
        summary = f"{len(old)} open for longer than {limit_s:g} s"
        if lost:
            summary = f"{len(old)} open for long, the end of {lost} of them lost by Kafka"
        return judged(CheckLevel.FAILS, summary, lines)
    if unknown:
        lines = [_open(one, now_s) for one in unknown]
        return judged(CheckLevel.WARNING, "the start of some is unknown", lines)
    return fine(f"none for longer than {limit_s:g} s, in {len(there)} topics")


async def _targets(subject: Subject) -> set[str]:
    """Return the target topics of the proxies' metrics since their start."""
    try:
        metrics = await subject.metrics()
    except Unavailable:
        return set()
    found = (
        one.labels("promoted_total", "topic") | one.labels("prepared_total", "topic")
        for one in metrics.values()
        if isinstance(one, Samples)
    )
    return {topic for topics in found for topic in topics if topic != _OTHER}


def _age_s(one: OpenTransaction, now_s: float) -> float:
    """Return how long it has been open; without a coordinator, since its last record."""
    at_ms = one.started_ms if one.started_ms is not None else one.last_write_ms
    return 0.0 if at_ms is None else now_s - at_ms / 1000


def _open(one: OpenTransaction, now_s: float) -> str:
    who = f"transactional id {one.transactional_id}" if one.transactional_id else (
        f"producer {one.producer_id}, which no readable coordinator knows"
        if one.producer_id >= 0 else "an unknown producer, which this user may not describe"
    )  # fmt: skip
    since = duration(_age_s(one, now_s))
    line = f"{one.topic}-{one.partition}: {who}, for {since}, hides {one.hidden} offsets"
    if not one.lost:
        return line
    # Its start is unknown, because no coordinator knows it any more.
    return f"{line}: its coordinator has it as ended, but it is open from offset {one.first} on"


@book.check(
    "retention removes no undecided transaction",
    hint="Decide the oldest ones now, or raise retention.ms of the half topic (and of the "
    "operation topic) before it is too late.",
    doc="docs/runbooks/TxBrokerHalfRetentionAtRisk.md",
)
async def retention_headroom(subject: Subject) -> Finding:
    """Whether unsettled transactions are copied long before retention removes them."""
    seen = [one for one in (await subject.metrics()).values() if isinstance(one, Samples)]
    kept = [value for one in seen for value in one.values("half_retention_seconds")]
    headroom = [value for one in seen for value in one.values("half_retention_headroom_seconds")]
    if not kept or not headroom:
        return fine("every unsettled transaction is copied")
    left_s, limit_s = min(headroom), subject.limits.headroom_share * min(kept)
    if left_s < limit_s:
        return judged(
            CheckLevel.FAILS,
            f"in {duration(left_s)} it removes the oldest half message without a copy",
        )
    return fine(f"{duration(left_s)} until it would remove one without a copy")


@book.check(
    "no undecided transaction was lost",
    hint="Ask the producers named in the log for the outcome of these transactions; their messages "
    "are gone. Find out who shortened the half topic's retention.",
    doc="docs/runbooks/TxBrokerUndecidedLost.md",
)
async def undecided_lost(subject: Subject) -> Finding:
    """Whether half messages vanished before they were settled."""
    metrics = (await subject.metrics()).items()
    seen = {url: one for url, one in metrics if isinstance(one, Samples)}
    lost = {url: sum(one.values("lost_undecided_total")) for url, one in seen.items()}
    lines = [f"{url}: {count:.0f} since its start" for url, count in lost.items() if count]
    if lines:
        return judged(CheckLevel.FAILS, f"{sum(lost.values()):.0f} were", lines)
    silent = [f"{url}: {one}" for url, one in metrics if not isinstance(one, Samples)]
    if silent:
        return judged(CheckLevel.WARNING, "the metrics of some proxies are missing", silent)
    return fine("none")
