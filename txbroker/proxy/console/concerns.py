"""Find problems for the overview: what is wrong, where, and the next step.

The thresholds are those of the alerts, so that page and pager agree: `Concern.alert` names the
alert that fires for the same reason, and `NOT_HERE` the alerts whose facts no proxy knows.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from txbroker.contract.audit import STREAM_KEY
from txbroker.contract.service import GroupOverview, Overview, PartitionState, ProxyOverview
from txbroker.core.records import State
from txbroker.proxy.console.formatting import age, count, link, number, rate, sentence, time_of
from txbroker.proxy.observe.overview import FILE_PROBLEM, UNREACHABLE

PENDING_AGE_S = 900.0
"""All attempts of the default policy end after 7 minutes."""
PENDING_MIN, GROWTH_MIN_PER_S = 1000, 0.5
"""Fewer pending transactions, or a slower growth in 15 minutes, are no concern."""
COMMITTED_AGE_S = 60.0
"""Normally a commit is visible within a second."""
PREPARE_S = 1.0
"""Normally a prepare takes milliseconds."""
HEADROOM_MIN = 0.4
"""Part of the retention: copies are made when half of it is over."""
AUDIT_AGE_MAX_S = 2 * 86400.0
STREAM_LAG_MAX_S = 300.0
NAMED_MAX = 5
"""Groups or topics named in one line."""
_PROXIES = (("Proxies", "/#proxies"),)


class Severity(StrEnum):
    """The severity of a concern."""

    BAD = "bad"
    """Calls fail, or an operator must act."""
    WARN = "warn"
    """It may resolve itself; an operator should know."""


@dataclass(frozen=True)
class Concern:
    """One problem.

    Attributes:
        alert: the alert that fires for this reason, "" without one.
        todo: the next step.
        links: pairs of text and target.
        actions: more links, to operators' actions.
        headline: it explains the others, so the page begins with it.
        groups: the producer groups that it is about.
    """

    severity: Severity
    alert: str
    title: str
    detail: str
    todo: str
    links: tuple[tuple[str, str], ...] = ()
    actions: tuple[tuple[str, str], ...] = ()
    headline: bool = False
    groups: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The problem in the words of its alert, which do not change while it lasts."""
        if self.headline:
            return "Kafka does not answer"
        return sentence(
            re.sub("([A-Z])", r" \1", self.alert.removeprefix("TxBroker")).lower().strip()
        )


NOT_HERE = {
    "TxBrokerConsumerStuck": "consumers export it: run `txbroker consumers show GROUP`",
    "TxBrokerConsumerSetAside": "consumers export it: run `txbroker consumers aside GROUP`",
    "TxBrokerRelayStalled": "relays export it: run `txbroker outbox list URL`",
    "TxBrokerRelayErrors": "relays export it: run `txbroker outbox list URL`",
    "TxBrokerSlotHoldingLog": "captures export it: run `txbroker capture plan FILE`",
}
"""Alerts on facts that no proxy knows, with where to look instead. Of `TxBrokerNotReady` the page
cannot show the case that no proxy runs: then there is no page, and `txbroker top` reports it."""

_PARTITIONS: dict[str, tuple[Severity, str, str]] = {
    UNREACHABLE: (
        Severity.BAD,
        "are unreachable",
        "Their proxy does not answer. Another one takes over within seconds; if not, look at that "
        "proxy and its network.",
    ),
    PartitionState.NONE: (
        Severity.BAD,
        "have no owner",
        "Calls for them wait. A change of owner takes seconds; if it lasts, check that proxies run "
        "and reach Kafka.",
    ),
    PartitionState.CLAIMING: (
        Severity.WARN,
        "are being claimed",
        "A claim takes seconds. If it lasts, see the owner's log: Kafka may not answer.",
    ),
    PartitionState.REPLAYING: (
        Severity.WARN,
        "are being replayed by their new owner",
        "Calls for them wait until the replay is done.",
    ),
    PartitionState.SUSPENDED: (
        Severity.WARN,
        "are suspended",
        "Their proxy has lost contact with the group coordinator. It resumes, or another proxy "
        "takes over, within seconds.",
    ),
    PartitionState.HANGING: (
        Severity.BAD,
        "wait for a hanging Kafka transaction",
        "Run txbroker doctor: it names the transaction and the command that ends it.",
    ),
    PartitionState.TRUNCATED: (
        Severity.BAD,
        "are stopped: their topics were truncated or recreated",
        "Nothing is promoted, so that no message is lost or duplicated. See the owner's log, and "
        "restore the topics.",
    ),
    PartitionState.NEWER: (
        Severity.BAD,
        "are stopped: a newer txbroker wrote to them",
        "Upgrade the proxies; no message was dropped.",
    ),
    PartitionState.STOPPED: (
        Severity.BAD,
        "are stopped",
        "An invariant is broken. See the owner's log, and keep the topics.",
    ),
}
"""Per state of half partitions but `owned`: severity, wording, next step."""


def problems_of(overview: Overview) -> Iterator[tuple[str, str]]:
    """Yield each problem and the group that it is about, "" for none: the same as long as it
    lasts."""
    for concern in concerns_of(overview):
        for group in concern.groups or ("",):
            yield str(concern), group


def concerns_of(overview: Overview) -> list[Concern]:
    """Return the problems, the worst first."""
    finders: Sequence[Callable[[Overview], Iterator[Concern]]] = (
        _kafka,
        _proxies,
        _partitions,
        _stalled,
        _refused,
        _lost,
        _retention,
        _drift,
        _failed_checks,
        _parked,
        _failing,
        _unreachable,
        _old,
        _growing,
        _slow,
        _stale,
        _lagging,
    )
    concerns = [concern for find in finders for concern in find(overview)]
    return sorted(concerns, key=lambda concern: concern.severity is not Severity.BAD)


def _kafka(overview: Overview) -> Iterator[Concern]:
    for proxy in overview.proxies:
        since_ms = proxy.kafka_silent_since_ms
        if since_ms is None:
            continue
        one = len(overview.proxies) == 1
        whom = "this proxy" if one else f"the proxy at {proxy.url}"
        some = not set(proxy.partitions) <= set(proxy.kafka_partitions)
        which = f" for {_numbered(proxy.kafka_partitions)}" if some else ""
        yield Concern(
            Severity.BAD,
            "TxBrokerNotReady",
            f"Kafka has not answered {whom}{which} since {time_of(since_ms)} UTC",
            ". ".join(filter(None, (proxy.kafka_why, *_own_problems(proxy)))),
            "Check that Kafka's brokers run and that the proxy can reach them. Nothing is lost: "
            "the proxy continues as soon as they answer. Numbers are of the time beside them.",
            _PROXIES,
            headline=True,
        )


def _slow(overview: Overview) -> Iterator[Concern]:
    slow = [proxy for proxy in overview.proxies if (proxy.prepare_p99_s or 0.0) > PREPARE_S]
    if slow:
        worst = max(slow, key=lambda proxy: proxy.prepare_p99_s or 0.0)
        yield Concern(
            Severity.WARN,
            "TxBrokerPrepareSlow",
            f"Prepares take up to {age(worst.prepare_p99_s)}",
            f"99 % of those of the last 5 minutes at {worst.url} took at most as long.",
            "Check the latency of Kafka's disks and network, and the load of the proxy; see "
            "the runbook.",
            _PROXIES,
        )


def _numbered(partitions: Sequence[int]) -> str:
    noun = "half partition" if len(partitions) == 1 else "half partitions"
    more = " …" if len(partitions) > 20 else ""
    return f"{noun} {', '.join(map(str, partitions[:20]))}{more}"


def _own_problems(proxy: ProxyOverview) -> list[str]:
    """Return the problems of a proxy but those of half partitions, which are concerns of their
    own, and of files."""
    return [text for text in proxy.problems if not text.startswith(("partition ", FILE_PROBLEM))]


def _proxies(overview: Overview) -> Iterator[Concern]:
    for proxy in overview.proxies:
        if not proxy.reached:
            yield Concern(
                Severity.BAD,
                "TxBrokerNotReady",
                f"The proxy at {proxy.url} does not answer",
                proxy.why,
                "Check that it runs and that this proxy can reach it.",
                _PROXIES,
            )
            continue
        problems = _own_problems(proxy)
        if problems and proxy.kafka_silent_since_ms is None:
            yield Concern(
                Severity.BAD,
                "TxBrokerNotReady",
                f"The proxy at {proxy.url} {'reports problems' if proxy.ready else 'is not ready'}",
                "; ".join(problems[:NAMED_MAX]),
                "Run txbroker doctor: it tests what a proxy needs and names the fix.",
                _PROXIES,
            )
        files = [text for text in proxy.problems if text.startswith(FILE_PROBLEM)]
        if files:
            yield Concern(
                Severity.WARN,
                "TxBrokerFileNotRead",
                f"The proxy at {proxy.url} cannot use "
                + ("a file" if len(files) == 1 else f"{len(files)} files"),
                "; ".join(files[:NAMED_MAX]),
                "Correct the file: it is read again when it changes. Until then credentials that "
                "were taken out of it still count.",
                _PROXIES,
            )


def _partitions(overview: Overview) -> Iterator[Concern]:
    by_state: dict[str, list[int]] = defaultdict(list)
    whys: dict[str, str] = {}
    for partition in overview.partitions:
        if partition.state != PartitionState.OWNED:
            by_state[partition.state].append(partition.partition)
            whys.setdefault(partition.state, partition.why)
    for state, numbers in by_state.items():
        severity, wording, todo = _PARTITIONS.get(
            state, (Severity.BAD, f"are {state}", "See the owner's log.")
        )
        yield Concern(
            severity,
            "TxBrokerNotReady",
            f"{sentence(_numbered(numbers))} {_agree(wording, len(numbers))}",
            whys[state],
            todo,
            (("Half partitions", "/#partitions"),),
        )


def _agree(wording: str, number: int) -> str:
    """Return the singular or plural wording."""
    if number != 1:
        return wording
    verb, _, rest = wording.partition(" ")
    singular = {"are": "is", "have": "has", "wait": "waits", "need": "needs"}
    return f"{singular.get(verb, verb)} {rest}".replace("their topics", "its topics")


def _stalled(overview: Overview) -> Iterator[Concern]:
    late = [p for p in overview.partitions if (p.oldest_committed_age_s or 0.0) > COMMITTED_AGE_S]
    if late:
        worst = max(p.oldest_committed_age_s or 0.0 for p in late)
        which = _numbered([p.partition for p in late])
        yield Concern(
            Severity.BAD,
            "TxBrokerPromotionStalled",
            "Committed messages do not become visible",
            f"The oldest commit waits for {age(worst)}, in {which}.",
            "A target topic may have no leader. Check the oldest committed ones, and Kafka.",
            (("Committed transactions", link("/transactions", state=State.COMMITTED)),),
        )


def _refused(overview: Overview) -> Iterator[Concern]:
    total = sum(p.refused or 0 for p in overview.partitions)
    if total:
        topics = [topic for topic in sorted(overview.refused_topics) if topic]
        yield Concern(
            Severity.BAD,
            "TxBrokerRefusing",
            f"{count(total, 'committed transaction')} {_agree('are refused by a target', total)}",
            _named("Topic", topics),
            "Fix the topic (create it, raise its max.message.bytes, grant the right); the "
            "transactions are then retried automatically, or at once with Revive.",
            (("Show them", link("/transactions", state=State.REFUSED)),),
            (("Revive all…", link("/actions/revive", state=State.REFUSED)),),
        )


def _lost(overview: Overview) -> Iterator[Concern]:
    total = sum(proxy.lost_last_hour for proxy in overview.proxies)
    if total:
        yield Concern(
            Severity.BAD,
            "TxBrokerUndecidedLost",
            f"The messages of {count(total, 'transaction')} that "
            f"{_agree('are not settled', total)} are gone",
            "In the last hour their half messages were found deleted from Kafka, and there is no "
            "copy of them. They cannot be promoted any more.",
            "Find out what deletes records of the half topic before their retention, and prepare "
            "the transactions again. The log has their ids (`bodies lost`).",
            (("Refused ones", link("/transactions", state=State.REFUSED)),),
        )


def _retention(overview: Overview) -> Iterator[Concern]:
    risky = [
        (proxy.half_retention_headroom_s, proxy.half_retention_s)
        for proxy in overview.proxies
        if proxy.half_retention_headroom_s is not None
        and proxy.half_retention_s is not None
        and proxy.half_retention_headroom_s < HEADROOM_MIN * proxy.half_retention_s
    ]
    if risky:
        left_s, retention_s = min(risky)
        yield Concern(
            Severity.BAD,
            "TxBrokerHalfRetentionAtRisk",
            "Kafka will delete messages of transactions that are not settled",
            f"In {age(max(0.0, left_s))} the retention of half messages ({age(retention_s)}) "
            "reaches one that has no copy.",
            "Raise retention.ms of the half topic now, then see the owner's log: copies should "
            "have been made when half of the retention was over.",
            (("The oldest", link("/transactions")),),
        )


def _drift(overview: Overview) -> Iterator[Concern]:
    for audit in overview.audits:
        if any(audit.drift.values()):
            kinds = [f"{found} {kind}" for kind, found in sorted(audit.drift.items()) if found]
            yield Concern(
                Severity.BAD,
                "TxBrokerAuditDrift",
                "The audit found transactions that did not end as they were decided",
                f"The {audit.mode} audit of {time_of(audit.ended_ms)} UTC: {', '.join(kinds)}.",
                "Run txbroker audit show last, then txbroker tx show for the transactions that it "
                "names.",
            )


def _failed_checks(overview: Overview) -> Iterator[Concern]:
    for audit in overview.audits:
        if audit.failed_checks:
            critical = "critical" in audit.failed_checks.values()
            failed = [f"{name} ({grade})" for name, grade in sorted(audit.failed_checks.items())]
            yield Concern(
                Severity.BAD if critical else Severity.WARN,
                "TxBrokerAuditCheckFailed",
                "Checks of the audit failed",
                f"The {audit.mode} audit of {time_of(audit.ended_ms)} UTC: {', '.join(failed)}.",
                "Run txbroker audit show last: it has the values and their limits.",
            )


def _stale(overview: Overview) -> Iterator[Concern]:
    for audit in overview.audits:
        age_s = (overview.at_ms - audit.ended_ms) / 1000
        if age_s > AUDIT_AGE_MAX_S:
            yield Concern(
                Severity.WARN,
                "TxBrokerAuditStale",
                f"The {audit.mode} audit does not run any more",
                f"The newest one ended {age(age_s)} ago.",
                "See the log of its job, and start it again.",
            )


def _lagging(overview: Overview) -> Iterator[Concern]:
    for audit in overview.audits:
        lag_s = (overview.at_ms - audit.ended_ms) / 1000
        if audit.mode == STREAM_KEY and lag_s > STREAM_LAG_MAX_S:
            yield Concern(
                Severity.WARN,
                "TxBrokerAuditStreamLagging",
                "The streaming audit does not keep up",
                f"It has judged what happened until {age(lag_s)} ago.",
                "See whether it runs, then its log and the records that it has not read.",
            )


def _failing(overview: Overview) -> Iterator[Concern]:
    for group in (group for group in overview.groups if group.checks.counts.failing):
        counts = group.checks.counts
        counted = counts.commit + counts.rollback + counts.undecided
        last = group.checks.undecided
        answer = "" if last is None else f" The last, of {last.endpoint}: {last.answer}"
        yield Concern(
            Severity.WARN,
            "TxBrokerChecksFailing",
            f"Checks of group {group.group} bring no decision",
            f"{number(counts.undecided)} of {count(counted, 'check')} in 15 minutes.{answer}",
            "Fix the group's check: each answer like this uses up an attempt, and after the last "
            "one the transaction is parked.",
            (
                ("The group", link("/group", name=group.group)),
                ("Its transactions", link("/transactions", state=State.PENDING, group=group.group)),
            ),
            groups=(group.group,),
        )


def _growing(overview: Overview) -> Iterator[Concern]:
    growing = [
        group
        for group in overview.groups
        if group.pending > PENDING_MIN and (group.pending_growth_per_s or 0.0) > GROWTH_MIN_PER_S
    ]
    if growing:
        worst = max(growing, key=lambda group: group.pending_growth_per_s or 0.0)
        yield Concern(
            Severity.WARN,
            "TxBrokerPendingGrowing",
            f"Group {worst.group} prepares more than is decided",
            f"{number(worst.pending)} are pending, {rate(worst.pending_growth_per_s)} more a "
            "second in the last 15 minutes."
            + (" " + _named("Group", [g.group for g in growing]) if len(growing) > 1 else ""),
            "See whether the service still decides, and whether its checks are answered. At "
            "pending_group_max further prepares are refused.",
            (("The group", link("/group", name=worst.group)),),
            groups=tuple(group.group for group in growing),
        )


def _parked(overview: Overview) -> Iterator[Concern]:
    total = sum(p.parked or 0 for p in overview.partitions)
    if total:
        groups = [group.group for group in overview.groups if group.parked]
        first = next((group for group in overview.groups if group.parked_answers), None)
        yield Concern(
            Severity.BAD,
            "TxBrokerParking",
            f"{count(total, 'parked transaction')} {_agree('need a manual decision', total)}",
            " ".join(filter(None, (_named("Group", groups), _why_parked(first)))),
            "Look up in the group's database whether the local transaction was committed, then "
            "commit or roll back; or revive it if the group can answer again.",
            (("Show them", link("/transactions", state=State.PARKED)),),
            (("Revive all…", link("/actions/revive", state=State.PARKED)),),
            groups=tuple(groups),
        )


def _why_parked(group: GroupOverview | None) -> str:
    if group is None:
        return ""
    answer = group.parked_answers[0].answer
    if not answer:
        return f"The last answers of {group.group} were lost with the proxy that got them."
    return f"The last answer of {group.group}: {answer}"


def _unreachable(overview: Overview) -> Iterator[Concern]:
    away = [group for group in overview.groups if group.unreachable_since_ms is not None]
    if not away:
        return
    waiting = sum(group.pending for group in away)
    first = away[0]
    since_s = (overview.at_ms - (first.unreachable_since_ms or overview.at_ms)) / 1000
    title, named = f"Group {first.group} is unreachable", ""
    if len(away) > 1:
        title = f"{len(away)} groups are unreachable"
        named = _named("Group", [group.group for group in away]) + " "
    yield Concern(
        Severity.WARN,
        "TxBrokerGroupUnreachable",
        title,
        f"{named}For {age(since_s)}: "
        f"{first.unreachable_why or 'no connection'}. {count(waiting, 'transaction')} "
        f"{_agree('wait for an answer', waiting)}; no attempt is used up.",
        "Start an instance of the service, or fix its check URL. Checks resume automatically.",
        (
            ("The group", link("/group", name=first.group)),
            ("Its transactions", link("/transactions", state=State.PENDING, group=first.group)),
        ),
        groups=tuple(group.group for group in away),
    )


def _old(overview: Overview) -> Iterator[Concern]:
    old = [group for group in overview.groups if _is_old(group)]
    if old:
        worst = max(old, key=lambda group: group.oldest_pending_age_s or 0.0)
        query = {"state": State.PENDING, "group": worst.group, "older": f"{round(PENDING_AGE_S)}"}
        yield Concern(
            Severity.WARN,
            "TxBrokerPendingTooOld",
            f"Transactions are undecided for up to {age(worst.oldest_pending_age_s)}",
            _named("Group", [group.group for group in old]),
            "See the answers of the group's checks: they may repeat “not yet”.",
            (("The oldest", link("/transactions", **query)),),
            groups=tuple(group.group for group in old),
        )


def _is_old(group: GroupOverview) -> bool:
    # An unreachable group is already a concern.
    return (
        group.unreachable_since_ms is None and (group.oldest_pending_age_s or 0.0) > PENDING_AGE_S
    )


def _named(noun: str, names: Sequence[str]) -> str:
    """Return a sentence with the first few names."""
    if not names:
        return ""
    shown = ", ".join(names[:NAMED_MAX])
    more = len(names) - NAMED_MAX
    return f"{noun if len(names) == 1 else noun + 's'} {shown}" + (
        f" and {more} more." if more > 0 else "."
    )
