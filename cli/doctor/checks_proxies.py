"""Checks of the proxies, producer groups, transactions and audits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txbroker.cli.doctor.findings import (
    CheckLevel,
    CheckRegistry,
    Finding,
    Section,
    fine,
    judged,
    unknown,
)
from txbroker.cli.doctor.subject import (
    Samples,
    Subject,
    Unavailable,
)
from txbroker.cli.output import duration
from txbroker.contract.audit import STREAM_KEY, AuditNews, decode_news
from txbroker.contract.groups import GroupAnswer, TestedBody
from txbroker.contract.service import GroupOverview, HalfPartitionState, Overview
from txbroker.core.decoding import Malformed, NewerVersion
from txbroker.diagnosis import table
from txbroker.diagnosis.limits import LIMITS
from txbroker.diagnosis.overview import parked_of
from txbroker.diagnosis.rows import Diagnosis
from txbroker.kafka.tools.examination import OpenTransaction

TESTS_PARALLEL = 8
"""Test calls in flight, few enough not to overload a group."""
TESTS_S = 12.0
"""Time for all test calls; those not made in time are reported."""
_DENIED = frozenset({401, 403})
_INCOMPLETE = unknown("some half partitions are not reported")

proxies_book = CheckRegistry(Section.PROXIES, needs=("proxies-ready",))
groups_book = CheckRegistry(Section.GROUPS, needs=("proxies-ready",))


@proxies_book.check(
    "the proxies are ready",
    hint="A proxy's log and `/readyz` have the reason; it needs Kafka, its topics and its "
    "partitions. Name proxies by --url and --proxy.",
    doc=table.PROXY_NOT_READY.runbook,
    reaches=True,
)
async def proxies_ready(subject: Subject) -> Finding:
    named = subject.proxies.named
    problems: dict[str, str] = {}
    answers = await asyncio.gather(
        *(subject.proxies.ready(url) for url in named), return_exceptions=True
    )
    for url, answer in zip(named, answers, strict=True):
        if isinstance(answer, BaseException):
            if not isinstance(answer, Unavailable):
                raise answer
            problems[url] = str(answer)
        elif not answer.ready:
            problems[url] = f"{url} is not ready: {_why(answer.partitions, answer.problems)}"
    if len(problems) == len(named):
        return judged(CheckLevel.FAILS, "none is", list(problems.values()))
    overview = await subject.overview()
    for proxy in table.PROXY_SILENT.parts(overview):
        problems.setdefault(proxy.url, f"{proxy.url} does not answer: {proxy.why}")
    for proxy in table.KAFKA_SILENT.parts(overview):
        since = duration(subject.now_s() - proxy.kafka_silent_since_ms / 1000)
        why = f"Kafka has not answered {proxy.url} for {since}: {proxy.kafka_why}"
        problems.setdefault(proxy.url, why)
    for proxy in overview.proxies:
        if not proxy.ready and proxy.url not in named:
            why = "; ".join(proxy.problems) or "it has not caught up"
            problems.setdefault(proxy.url, f"{proxy.url} is not ready: {why}")
    if problems:
        return judged(CheckLevel.FAILS, f"{len(problems)} are not", list(problems.values()))
    # A named proxy may report another URL.
    proxies = overview.proxies
    if remarks := [f"{one.url}: {why}" for one in proxies for why in one.problems]:
        return judged(CheckLevel.WARNING, "they are, with problems", remarks)
    count = len(proxies)
    return fine(f"{count} {'proxy' if count == 1 else 'proxies'}")


def _why(partitions: dict[str, str], problems: list[str]) -> str:
    settled = (HalfPartitionState.OWNED, HalfPartitionState.ELSEWHERE)
    waiting = [f"partition {p} is {state}" for p, state in partitions.items() if state not in
               settled]  # fmt: skip
    return "; ".join([*problems, *waiting]) or "without a reason"


@proxies_book.check(
    "every half partition is owned by exactly one proxy",
    hint="If one has no owner, start a proxy or find out why the claim fails; if two seem to own "
    "it, repeat the check: only one can write.",
    doc="docs/how-to/run-several-proxies.md",
)
async def proxies_owners(subject: Subject) -> Finding:
    overview = await subject.overview()
    owners: dict[int, list[str]] = defaultdict(list)
    for proxy in overview.proxies:
        for number in proxy.partitions:
            owners[number].append(proxy.url)
    lines = [
        f"partition {number} is claimed by {' and '.join(sorted(urls))}"
        for number, urls in sorted(owners.items())
        if len(urls) > 1
    ]
    unowned = {one: row.critical for row in table.STATES for one in row.parts(overview)}
    lines += [
        f"partition {one.partition} is {one.state}{f' ({one.why})' if one.why else ''}, owner "
        f"{one.owner or 'none'}"
        for one in sorted(unowned, key=lambda one: one.partition)
    ]
    if lines:
        critical = len(lines) > len(unowned) or any(unowned.values())
        return judged(CheckLevel.FAILS if critical else CheckLevel.WARNING, "some are not", lines)
    if not overview.partitions:
        return judged(CheckLevel.FAILS, "the proxies report no half partition")
    return fine(f"{len(overview.partitions)} partitions")


@proxies_book.check(
    "there is a half partition for every proxy",
    hint="Run fewer proxies or `workers`, or migrate to more half partitions, as their number "
    "is fixed.",
    doc="docs/operate/partition-count.md",
)
async def proxies_partitions(subject: Subject) -> Finding:
    overview = await subject.overview()
    proxies, partitions = len(overview.proxies), len(overview.partitions)
    if proxies > partitions:
        idle = [f"{one.url} owns none" for one in overview.proxies if not one.partitions]
        return judged(
            CheckLevel.WARNING, f"{proxies} proxies share {partitions} half partitions", idle
        )
    return fine(f"{partitions} half partitions for {proxies} proxies")


@proxies_book.check(
    "all proxies run the same version", hint="Finish the upgrade, or return to one version on all."
)
async def proxies_version(subject: Subject) -> Finding:
    by_version: dict[str, list[str]] = defaultdict(list)
    for proxy in (await subject.overview()).proxies:
        if proxy.reached:
            by_version[proxy.version].append(proxy.url)
    if len(by_version) > 1:
        lines = [f"{version}: {', '.join(urls)}" for version, urls in sorted(by_version.items())]
        return judged(CheckLevel.WARNING, f"{len(by_version)} versions run", lines)
    if silent := [one.url for one in (await subject.overview()).proxies if not one.reached]:
        return unknown("some proxies do not answer", silent)
    return fine(next(iter(by_version), "none reported"))


@proxies_book.diagnosis(table.PREPARE_SLOW)
async def proxies_latency(subject: Subject) -> Finding:
    return _applied(
        table.PREPARE_SLOW,
        await subject.overview(),
        "some are not",
        lambda one: f"{one.url}: 1 % take longer than {one.prepare_p99_s:.1f} s",
    )


def _applied(
    row: Diagnosis,
    overview: Overview,
    found: str,
    lines: Sequence[str] | Callable[[Any], str],
    well: str = "all",
) -> Finding:
    """Return the finding of a condition over the overview, with these lines, or one for each
    part."""
    if parts := row.parts(overview):
        level = CheckLevel.FAILS if row.critical else CheckLevel.WARNING
        shown = filter(None, map(lines, parts)) if callable(lines) else lines
        return judged(level, found, list(shown))
    return fine(well) if overview.complete else _INCOMPLETE


# --- groups ----------------------------------------------------------------------------------


@groups_book.diagnosis(table.GROUP_UNREACHABLE)
async def groups_reachable(subject: Subject) -> Finding:
    """Whether each group has a connected instance or answers a test call, which is no check."""
    groups = {one.group: one for one in await subject.groups()}
    overview = await subject.overview()
    seen = {one.group: one for one in overview.groups}
    away = table.GROUP_UNREACHABLE.parts(overview)
    since = {
        one.group: f", for {duration(subject.now_s() - one.unreachable_since_ms / 1000)}"
        for one in away
    }
    why = {
        one.group: f"{since[one.group]}: {one.unreachable_why or 'no connection'}" for one in away
    }
    tested = await _test_calls(subject, [one for one in groups.values() if one.check_url])
    fails: list[str] = []
    remarks: list[str] = []
    untested: list[str] = []
    for name in sorted(groups.keys() | seen.keys()):
        connected = _sessions(groups.get(name), seen.get(name))
        call = tested.get(name)
        if isinstance(call, Unavailable):
            if name in why:
                remarks.append(f"{name}: its check URL fails{why[name]}")
            if not connected:
                untested.append(f"{name}: its check URL was not tested: {call}")
        elif call is not None and not call.answered:
            line = f"{name}: {call.endpoint or 'its check URL'}: {call.why}"
            (fails if not connected and _no_use(call) else remarks).append(line)
        elif call is None and not connected:
            undecided = seen[name].pending if name in seen else 0
            line = (
                f"{name}: no instance with a check function is connected and no check URL is "
                f"registered{since.get(name, '')}"
            )
            (fails if undecided else remarks).append(line)
        elif name in why:
            remarks.append(f"{name}: unreachable{why[name]}")
    total = len(groups.keys() | seen.keys())
    if fails:
        return judged(
            CheckLevel.FAILS, f"{len(fails)} of {total} cannot", fails + remarks + untested
        )
    if remarks:
        return judged(
            CheckLevel.WARNING, f"{len(remarks)} of {total} need a look", remarks + untested
        )
    if untested:
        return unknown(f"{len(untested)} of {total} were not tested", untested)
    return fine(f"{total} group{'s' * (total != 1)}")


async def _test_calls(
    subject: Subject, groups: list[GroupAnswer]
) -> dict[str, TestedBody | Unavailable]:
    """Make a test call to each check URL, a few in parallel, within a time limit."""
    slots = asyncio.Semaphore(TESTS_PARALLEL)
    made: dict[str, TestedBody | Unavailable] = {
        one.group: Unavailable("there was no time") for one in groups
    }

    async def make(group: GroupAnswer) -> None:
        timeout_s = group.timeout_s or subject.settings.check_timeout_s
        async with slots:
            try:
                made[group.group] = await subject.proxies.test_group(group.group, timeout_s)
            except Unavailable as error:
                made[group.group] = error

    try:
        async with asyncio.timeout(TESTS_S):
            await asyncio.gather(*(make(group) for group in groups))
    except TimeoutError:
        pass
    return made


@groups_book.diagnosis(table.CHECKS_FAILING)
async def groups_answering(subject: Subject) -> Finding:
    return _applied(
        table.CHECKS_FAILING,
        await subject.overview(),
        "some bring no decision",
        lambda one: (
            f"{one.group}: {one.checks.counts.undecided} in 15 minutes"
            + (f", the last: {last.answer}" if (last := one.checks.undecided) else "")
        ),
    )


@groups_book.diagnosis(table.PENDING_GROWING)
async def groups_deciding(subject: Subject) -> Finding:
    return _applied(
        table.PENDING_GROWING,
        await subject.overview(),
        "some do not",
        lambda one: (
            f"{one.group}: {one.pending} pending, {one.pending_growth_per_s:.1f} more a second"
        ),
    )


@groups_book.check(
    "the proxies can use every group's registration",
    hint="Correct the registration as its details require, or allow it on every proxy: "
    "`secrets_dir`, `secret_env_allow`, `check_url_allow`.",
    doc="docs/how-to/write-a-check.md",
)
async def groups_usable(subject: Subject) -> Finding:
    groups = await subject.groups()
    lines = [f"{one.group}: {one.problem}" for one in groups if one.problem]
    seen = {one.group: one for one in (await subject.overview()).groups}
    both = [
        f"{one.group}: its check URL {one.check_url} decides for instances that died, beside "
        f"{_sessions(one, seen.get(one.group))} connected with a check function: remove the URL if "
        "it is not the same service, or register it with --signed-answers"
        for one in groups
        if one.check_url and not one.signed_answers and _sessions(one, seen.get(one.group))
    ]
    if lines:
        found = f"{len(lines)} of {len(groups)} cannot be used"
        return judged(CheckLevel.FAILS, found, lines + both)
    if both:
        return judged(CheckLevel.WARNING, f"{len(both)} of {len(groups)} need a look", both)
    return fine(f"{len(groups)} registered")


def _no_use(call: TestedBody) -> bool:
    """Return True if a check would fail, too; other statuses may depend on the check's body."""
    return call.status is None or call.status in _DENIED or call.status in (404, 405)


def _sessions(group: GroupAnswer | None, seen: GroupOverview | None) -> int:
    return max(group.sessions if group else 0, seen.sessions if seen else 0)


# --- transactions ------------------------------------------------------------------------------


_OTHER = "other"
"""The label of values beyond a metric's label limit."""

transactions_book = CheckRegistry(Section.TRANSACTIONS, needs=("proxies-ready",))
kafka_book = CheckRegistry(Section.TRANSACTIONS, needs=("kafka-reachable",))


@transactions_book.diagnosis(table.PENDING_TOO_OLD)
async def pending_age(subject: Subject) -> Finding:
    overview = await subject.overview()
    total = sum(one.pending or 0 for one in overview.partitions)
    oldest_s = max((one.oldest_pending_age_s or 0.0 for one in overview.groups), default=0.0)
    oldest = f"the oldest for {duration(oldest_s)}"
    return _applied(
        table.PENDING_TOO_OLD,
        overview,
        oldest,
        lambda one: (
            f"group {one.group}: {one.pending} pending, the oldest for "
            f"{duration(one.oldest_pending_age_s)}"
        ),
        f"{total} pending, {oldest}",
    )


@transactions_book.diagnosis(table.PROMOTION_STALLED)
async def promotion(subject: Subject) -> Finding:
    overview = await subject.overview()
    return _applied(
        table.PROMOTION_STALLED,
        overview,
        "some wait too long",
        lambda one: (
            f"partition {one.partition} ({one.owner}): {one.committed or 0} waiting, the "
            f"oldest for {duration(one.oldest_committed_age_s)}"
        ),
        f"{sum(one.committed or 0 for one in overview.partitions)} in progress",
    )


@transactions_book.diagnosis(table.PARKING)
async def parked(subject: Subject) -> Finding:
    overview = await subject.overview()
    return _applied(
        table.PARKING,
        overview,
        f"{parked_of(overview)} are parked, whole and decidable",
        lambda one: f"group {one.group}: {one.parked}" if isinstance(one, GroupOverview) else "",
        "none parked",
    )


@transactions_book.diagnosis(table.REFUSING)
async def refused(subject: Subject) -> Finding:
    overview = await subject.overview()
    total = sum(one.refused or 0 for one in overview.partitions)
    lines = [f"topic {topic}: {count}" for topic, count in overview.refused_topics.items()]
    found = f"{total} are committed and not visible"
    return _applied(table.REFUSING, overview, found, lines, "none refused")


@kafka_book.check(
    "no Kafka transaction keeps consumers waiting",
    hint="Stop the application that owns the transaction; if it is gone, Kafka's "
    "`kafka-transactions.sh abort` ends it. One of txbroker's, or one whose end was lost, may hold "
    "committed messages: read the page before any abort.",
    doc="docs/operate/lost-end.md",
)
async def hanging_transactions(subject: Subject) -> Finding:
    limit_s = LIMITS.transaction_s
    targets, untold = await _targets(subject)
    topics = sorted({*subject.own_topics, *targets})
    cluster = await subject.kafka.cluster(topics)
    there = [name for name in topics if name in cluster.topics and cluster.topics[name].partitions]
    open_ = await subject.kafka.open_transactions(there)
    now_s = subject.now_s()
    old = [one for one in open_ if one.lost or _age_s(one, now_s) > limit_s]
    unclear = [one for one in open_ if one.started_ms is None and one not in old]
    if old:
        lines = [_open(one, now_s) for one in old + unclear]
        lost = sum(one.lost for one in old)
        summary = f"{len(old)} open for longer than {limit_s:g} s"
        if lost:
            summary = f"{len(old)} open for long, the end of {lost} of them lost by Kafka"
        return judged(CheckLevel.FAILS, summary, lines)
    if unclear:
        return unknown("the start of some", [_open(one, now_s) for one in unclear])
    if untold:
        return unknown(f"none in {len(there)} topics, but proxies do not name all targets", untold)
    return fine(f"none for longer than {limit_s:g} s, in {len(there)} topics")


async def _targets(subject: Subject) -> tuple[set[str], list[str]]:
    """Return the target topics of the proxies' metrics since their start, and which are missing."""
    try:
        metrics = await subject.metrics()
    except Unavailable as error:
        return set(), [str(error)]
    found = (
        one.labels("promoted_total", "topic") | one.labels("prepared_total", "topic")
        for one in metrics.values()
        if isinstance(one, Samples)
    )
    return {topic for topics in found for topic in topics if topic != _OTHER}, _silent(metrics)


def _silent(metrics: Mapping[str, Samples | Unavailable]) -> list[str]:
    """Return the proxies whose metrics are missing, with the reason."""
    return [f"{url}: {one}" for url, one in metrics.items() if not isinstance(one, Samples)]


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


@transactions_book.diagnosis(table.HALF_RETENTION_AT_RISK)
async def retention_headroom(subject: Subject) -> Finding:
    overview = await subject.overview()
    left_s = min(
        (
            one.half_retention_headroom_s
            for one in overview.proxies
            if one.half_retention_headroom_s is not None
        ),
        default=None,
    )
    return _applied(
        table.HALF_RETENTION_AT_RISK,
        overview,
        f"in {duration(left_s or 0.0)} it removes the oldest half message without a copy",
        (),
        "every unsettled transaction is copied"
        if left_s is None
        else f"{duration(left_s)} until it would remove one without a copy",
    )


@transactions_book.diagnosis(table.UNDECIDED_LOST)
async def undecided_lost(subject: Subject) -> Finding:
    overview = await subject.overview()
    return _applied(
        table.UNDECIDED_LOST,
        overview,
        f"{sum(one.lost_last_hour for one in overview.proxies)} were",
        lambda one: f"{one.url}: {one.lost_last_hour} in the last hour",
        "none",
    )


# --- audits ------------------------------------------------------------------------------------


audit_book = CheckRegistry(Section.AUDIT, needs=("kafka-reachable",))


@audit_book.diagnosis(table.AUDIT_STALE)
async def audit_fresh(subject: Subject) -> Finding:
    news = await _news(subject)
    if not news:
        return judged(CheckLevel.WARNING, "no audit has run yet")
    oldest = min(news.values(), key=lambda one: one.ended_ms)
    age_s = subject.now_s() - oldest.ended_ms / 1000
    text = f"the newest ({oldest.mode}, {oldest.run}) ended {duration(age_s)} ago"
    others = [f"{one.mode} {one.run} is newer" for one in news.values() if one is not oldest]
    return _applied(table.AUDIT_STALE, _overview(subject, news), text, others, text)


@audit_book.diagnosis(table.STREAM_LAGGING)
async def audit_stream(subject: Subject) -> Finding:
    news = await _news(subject)
    if STREAM_KEY not in news:
        return fine("there is none")
    lag_s = subject.now_s() - news[STREAM_KEY].ended_ms / 1000
    text = f"it has judged what happened until {duration(lag_s)} ago"
    return _applied(table.STREAM_LAGGING, _overview(subject, news), text, (), text)


@audit_book.diagnosis(table.AUDIT_DRIFT)
async def audit_drift(subject: Subject) -> Finding:
    news = await _news(subject)
    lines = [
        f"{kind}: {count}, by {one.mode} {one.run}"
        for one in news.values()
        for kind, count in one.drift.items()
        if count
    ]
    judged_ones = sum(one.transactions for one in news.values())
    well = f"none in {judged_ones} transactions" if news else "no audit has run yet"
    return _applied(table.AUDIT_DRIFT, _overview(subject, news), "there is drift", lines, well)


@audit_book.diagnosis(table.CHECK_FAILED)
async def audit_checks(subject: Subject) -> Finding:
    news = await _news(subject)
    overview = _overview(subject, news)
    checks = [check for one in news.values() for check in one.checks]
    failed = [f"{check.name} ({check.severity})" for check in checks if not check.ok]
    critical = table.CRITICAL_CHECK_FAILED.parts(overview)
    row = table.CRITICAL_CHECK_FAILED if critical else table.CHECK_FAILED
    well = f"{len(checks)} checks hold" if checks else "the audits have no checks"
    return _applied(row, overview, "some failed", failed, well)


def _overview(subject: Subject, news: Mapping[str, AuditNews]) -> Overview:
    """Return the audits as an overview has them, read from Kafka, so that no proxy is needed."""
    audits = tuple(one.overview(key) for key, one in news.items())
    at_ms = round(subject.now_s() * 1000)
    return Overview(at_ms, True, (), (), (), 0, {}, audits=audits)


async def _news(subject: Subject) -> dict[str, AuditNews]:
    if subject.kafka.settings.audit_topic not in await subject.found():
        return {}
    try:
        return {key: decode_news(value) for key, value in (await subject.audit_news()).items()}
    except (Malformed, NewerVersion) as error:
        raise Unavailable(f"this doctor cannot read the audit topic: {error}") from None
