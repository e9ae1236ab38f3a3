"""Find problems for the overview: what is wrong, where, and the next step.

The thresholds are those of the alerts, so that page and pager agree.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from txbroker.contract.service import GroupOverview, Overview, PartitionState
from txbroker.core.records import State
from txbroker.proxy.console.formatting import age, count, link
from txbroker.proxy.observe.overview import UNREACHABLE

PENDING_AGE_S = 900.0
"""All attempts of the default policy end after 7 minutes."""
COMMITTED_AGE_S = 60.0
"""Normally a commit is visible within a second."""
NAMED_MAX = 5
"""Groups or topics named in one line."""


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
        todo: the next step.
        links: pairs of text and target.
        actions: more links, to operators' actions.
    """

    severity: Severity
    title: str
    detail: str
    todo: str
    links: tuple[tuple[str, str], ...] = ()
    actions: tuple[tuple[str, str], ...] = ()


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


def concerns_of(overview: Overview) -> list[Concern]:
    """Return the problems, the worst first."""
    finders: Sequence[Callable[[Overview], Iterator[Concern]]] = (
        _proxies,
        _partitions,
        _stalled,
        _refused,
        _parked,
        _unreachable,
        _old,
    )
    concerns = [concern for find in finders for concern in find(overview)]
    return sorted(concerns, key=lambda concern: concern.severity is not Severity.BAD)


def _proxies(overview: Overview) -> Iterator[Concern]:
    for proxy in overview.proxies:
        if not proxy.reached:
            yield Concern(
                Severity.BAD,
                f"The proxy at {proxy.url} does not answer",
                proxy.why,
                "Check that it runs and that this proxy can reach it.",
                (("Proxies", "/#proxies"),),
            )
            continue
        # Problems of its half partitions are reported below.
        problems = [text for text in proxy.problems if not text.startswith("partition ")]
        if problems:
            yield Concern(
                Severity.BAD,
                f"The proxy at {proxy.url} is not ready"
                if not proxy.ready
                else f"The proxy at {proxy.url} reports problems",
                "; ".join(problems[:NAMED_MAX]),
                "Run txbroker doctor: it tests what a proxy needs and names the fix.",
                (("Proxies", "/#proxies"),),
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
        named = ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "")
        noun = "Half partition" if len(numbers) == 1 else "Half partitions"
        yield Concern(
            severity,
            f"{noun} {named} {_agree(wording, len(numbers))}",
            whys[state],
            todo,
            (("Half partitions", "/#partitions"),),
        )


def _agree(wording: str, number: int) -> str:
    """Return the singular or plural wording."""
    if number > 1:
        return wording
    verb, _, rest = wording.partition(" ")
    singular = {"are": "is", "have": "has", "wait": "waits"}
    return f"{singular.get(verb, verb)} {rest}".replace("their topics", "its topics")


def _stalled(overview: Overview) -> Iterator[Concern]:
    late = [p for p in overview.partitions if (p.oldest_committed_age_s or 0.0) > COMMITTED_AGE_S]
    if late:
        worst = max(p.oldest_committed_age_s or 0.0 for p in late)
        numbers = ", ".join(str(p.partition) for p in late[:20])
        yield Concern(
            Severity.BAD,
            "Committed messages do not become visible",
            f"The oldest commit waits for {age(worst)}, in half partition {numbers}.",
            "A target topic may have no leader. Check the oldest committed ones, and Kafka.",
            (("Committed transactions", link("/transactions", state=State.COMMITTED)),),
        )


def _refused(overview: Overview) -> Iterator[Concern]:
    total = sum(p.refused or 0 for p in overview.partitions)
    if total:
        topics = [topic for topic in sorted(overview.refused_topics) if topic]
        yield Concern(
            Severity.BAD,
            f"{count(total, 'committed transaction')} {_is(total)} refused by a target",
            _named("Topic", topics),
            "Fix the topic (create it, raise its max.message.bytes, grant the right); the "
            "transactions are then retried automatically, or at once with Revive.",
            (("Show them", link("/transactions", state=State.REFUSED)),),
            (("Revive all…", link("/actions/revive", state=State.REFUSED)),),
        )


def _parked(overview: Overview) -> Iterator[Concern]:
    total = sum(p.parked or 0 for p in overview.partitions)
    if total:
        groups = [group.group for group in overview.groups if group.parked]
        yield Concern(
            Severity.BAD,
            f"{count(total, 'parked transaction')} {'needs' if total == 1 else 'need'} "
            "a manual decision",
            _named("Group", groups),
            "Look up in the group's database whether the local transaction was committed, then "
            "commit or roll back; or revive it if the group can answer again.",
            (("Show them", link("/transactions", state=State.PARKED)),),
            (("Revive all…", link("/actions/revive", state=State.PARKED)),),
        )


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
        title,
        f"{named}For {age(since_s)}: "
        f"{first.unreachable_why or 'no connection'}. {count(waiting, 'transaction')} "
        f"{'waits' if waiting == 1 else 'wait'} for an answer; no attempt is used up.",
        "Start an instance of the service, or fix its check URL. Checks resume automatically.",
        (
            ("Groups", "/groups"),
            ("Its transactions", link("/transactions", state=State.PENDING, group=first.group)),
        ),
    )


def _old(overview: Overview) -> Iterator[Concern]:
    old = [group for group in overview.groups if _is_old(group)]
    if old:
        worst = max(old, key=lambda group: group.oldest_pending_age_s or 0.0)
        yield Concern(
            Severity.WARN,
            f"Transactions are undecided for up to {age(worst.oldest_pending_age_s)}",
            _named("Group", [group.group for group in old]),
            "See the answers of the group's checks: they may repeat “not yet”.",
            (
                (
                    "The oldest",
                    link(
                        "/transactions",
                        state=State.PENDING,
                        group=worst.group,
                        older=f"{round(PENDING_AGE_S)}",
                    ),
                ),
            ),
        )


def _is_old(group: GroupOverview) -> bool:
    # An unreachable group is already a concern.
    return (
        group.unreachable_since_ms is None and (group.oldest_pending_age_s or 0.0) > PENDING_AGE_S
    )


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _named(noun: str, names: Sequence[str]) -> str:
    """Return a sentence with the first few names."""
    if not names:
        return ""
    shown = ", ".join(names[:NAMED_MAX])
    more = len(names) - NAMED_MAX
    return f"{noun if len(names) == 1 else noun + 's'} {shown}" + (
        f" and {more} more." if more > 0 else "."
    )
