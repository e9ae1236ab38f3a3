"""What is wrong, where, and what to do: the first thing that the overview says.

The bounds are those of the alerts, so that page and pager agree.
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
"""All attempts of the default policy are over after 7 minutes."""
COMMITTED_AGE_S = 60.0
"""A commit is visible within a second where all is well."""
NAMED_MAX = 5
"""Groups or topics that one line names."""


class Severity(StrEnum):
    """How bad it is."""

    BAD = "bad"
    """Calls fail, or somebody must decide."""
    WARN = "warn"
    """It may pass by itself; somebody should know."""


@dataclass(frozen=True)
class Concern:
    """One thing that is wrong.

    Attributes:
        todo: what to do about it.
        links: where, as pairs of what is written and where it leads.
        actions: further links, to what operators alone may do.
    """

    level: Severity
    title: str
    detail: str
    todo: str
    links: tuple[tuple[str, str], ...] = ()
    actions: tuple[tuple[str, str], ...] = ()


_PARTITIONS: dict[str, tuple[Severity, str, str]] = {
    UNREACHABLE: (
        Severity.BAD,
        "cannot be asked",
        "Their proxy does not answer. Another one takes over within seconds; if not, look at that "
        "proxy and its network.",
    ),
    PartitionState.NONE: (
        Severity.BAD,
        "have no owner",
        "Calls for them wait. A change of owner takes seconds; if it lasts, see whether proxies "
        "run and reach Kafka.",
    ),
    PartitionState.CLAIMING: (
        Severity.WARN,
        "are being claimed",
        "This takes seconds. If it lasts, see the owner's log: Kafka may not answer.",
    ),
    PartitionState.REPLAYING: (
        Severity.WARN,
        "are being read by their new owner",
        "Calls for them wait until it has caught up.",
    ),
    PartitionState.SUSPENDED: (
        Severity.WARN,
        "are suspended",
        "Their proxy has lost touch with the others. It goes on, or another one takes over, within "
        "seconds.",
    ),
    PartitionState.HANGING: (
        Severity.BAD,
        "wait for a Kafka transaction that nobody ends",
        "Run txbroker doctor: it names the transaction and how to end it.",
    ),
    PartitionState.TRUNCATED: (
        Severity.BAD,
        "stand still: their topics were truncated or recreated",
        "Nothing is promoted, so that nothing is lost or doubled. See the owner's log, and restore "
        "the topics.",
    ),
    PartitionState.NEWER: (
        Severity.BAD,
        "stand still: a newer txbroker wrote to them",
        "Upgrade the proxies; nothing was dropped.",
    ),
    PartitionState.STOPPED: (
        Severity.BAD,
        "were stopped",
        "Something that must always hold does not. The owner's log says what; keep the topics.",
    ),
}
"""For each state of half partitions but `owned`: how bad, what is said, what to do."""


def concerns_of(found: Overview) -> list[Concern]:
    """Return what is wrong, the worst first."""
    finders: Sequence[Callable[[Overview], Iterator[Concern]]] = (
        _proxies,
        _partitions,
        _stalled,
        _refused,
        _parked,
        _unreachable,
        _old,
    )
    concerns = [concern for find in finders for concern in find(found)]
    return sorted(concerns, key=lambda concern: concern.level is not Severity.BAD)


def _proxies(found: Overview) -> Iterator[Concern]:
    for proxy in found.proxies:
        if not proxy.reached:
            yield Concern(
                Severity.BAD,
                f"The proxy at {proxy.url} does not answer",
                proxy.why,
                "See whether it runs and whether this proxy reaches it.",
                (("Proxies", "/#proxies"),),
            )
            continue
        # What is said of its half partitions is said of them below.
        problems = [text for text in proxy.problems if not text.startswith("partition ")]
        if problems:
            yield Concern(
                Severity.BAD,
                f"The proxy at {proxy.url} is not ready"
                if not proxy.ready
                else f"The proxy at {proxy.url} sees trouble",
                "; ".join(problems[:NAMED_MAX]),
                "Run txbroker doctor: it tests what a proxy needs and says what to mend.",
                (("Proxies", "/#proxies"),),
            )


def _partitions(found: Overview) -> Iterator[Concern]:
    by_state: dict[str, list[int]] = defaultdict(list)
    whys: dict[str, str] = {}
    for shown in found.partitions:
        if shown.state != PartitionState.OWNED:
            by_state[shown.state].append(shown.partition)
            whys.setdefault(shown.state, shown.why)
    for state, numbers in by_state.items():
        level, says, todo = _PARTITIONS.get(
            state, (Severity.BAD, f"are {state}", "See the owner's log.")
        )
        named = ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "")
        noun = "Half partition" if len(numbers) == 1 else "Half partitions"
        yield Concern(
            level,
            f"{noun} {named} {_verb(says, len(numbers))}",
            whys[state],
            todo,
            (("Half partitions", "/#partitions"),),
        )


def _verb(says: str, number: int) -> str:
    """Return what is said of several, said of one where it is one."""
    if number > 1:
        return says
    first, _, rest = says.partition(" ")
    of_one = {"are": "is", "have": "has", "were": "was", "wait": "waits", "stand": "stands"}
    return f"{of_one.get(first, first)} {rest}".replace("their topics", "its topics")


def _stalled(found: Overview) -> Iterator[Concern]:
    late = [p for p in found.partitions if (p.oldest_committed_age_s or 0.0) > COMMITTED_AGE_S]
    if late:
        worst = max(p.oldest_committed_age_s or 0.0 for p in late)
        numbers = ", ".join(str(p.partition) for p in late[:20])
        yield Concern(
            Severity.BAD,
            "Committed messages do not become visible",
            f"The oldest commit waits for {age(worst)}, in half partition {numbers}.",
            "A target topic may have no leader. Look at the oldest committed ones, and at Kafka.",
            (("Committed ones", link("/transactions", state=State.COMMITTED)),),
        )


def _refused(found: Overview) -> Iterator[Concern]:
    total = sum(p.refused or 0 for p in found.partitions)
    if total:
        topics = [topic for topic in sorted(found.refused_topics) if topic]
        yield Concern(
            Severity.BAD,
            f"{count(total, 'committed transaction')} {_is(total)} refused by a target",
            _named("Topic", topics),
            "Mend the topic (create it, raise its max.message.bytes, grant the right); then they "
            "go through by themselves, or at once with Revive.",
            (("Look at them", link("/transactions", state=State.REFUSED)),),
            (("Revive all…", link("/actions/revive", state=State.REFUSED)),),
        )


def _parked(found: Overview) -> Iterator[Concern]:
    total = sum(p.parked or 0 for p in found.partitions)
    if total:
        groups = [group.group for group in found.groups if group.parked]
        yield Concern(
            Severity.BAD,
            f"{count(total, 'parked transaction')} {'waits' if total == 1 else 'wait'} "
            "for a person's decision",
            _named("Group", groups),
            "Find out in the group's database whether its local transaction was committed, then "
            "commit or roll back; or revive, if the group can answer again.",
            (("Look at them", link("/transactions", state=State.PARKED)),),
            (("Revive all…", link("/actions/revive", state=State.PARKED)),),
        )


def _unreachable(found: Overview) -> Iterator[Concern]:
    away = [group for group in found.groups if group.unreachable_since_ms is not None]
    if not away:
        return
    waiting = sum(group.pending for group in away)
    first = away[0]
    since_s = (found.at_ms - (first.unreachable_since_ms or found.at_ms)) / 1000
    title, named = f"Nobody of group {first.group} can be asked", ""
    if len(away) > 1:
        title = f"Nobody of {len(away)} groups can be asked"
        named = _named("Group", [group.group for group in away]) + " "
    yield Concern(
        Severity.WARN,
        title,
        f"{named}For {age(since_s)}: "
        f"{first.unreachable_why or 'no connection'}. {count(waiting, 'transaction')} "
        f"{'waits' if waiting == 1 else 'wait'} for an answer; no attempt is used up.",
        "Start an instance of the service, or mend its check URL. It is asked again by itself.",
        (
            ("Groups", "/groups"),
            ("Its transactions", link("/transactions", state=State.PENDING, group=first.group)),
        ),
    )


def _old(found: Overview) -> Iterator[Concern]:
    old = [group for group in found.groups if _is_old(group)]
    if old:
        worst = max(old, key=lambda group: group.oldest_pending_age_s or 0.0)
        yield Concern(
            Severity.WARN,
            f"Transactions are undecided for up to {age(worst.oldest_pending_age_s)}",
            _named("Group", [group.group for group in old]),
            "See what the group's checks answer: it may say “not yet” again and again.",
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
    # Of an unreachable one it is said already, with what to do.
    return (
        group.unreachable_since_ms is None and (group.oldest_pending_age_s or 0.0) > PENDING_AGE_S
    )


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _named(noun: str, names: Sequence[str]) -> str:
    """Return a sentence that names the first few."""
    if not names:
        return ""
    shown = ", ".join(names[:NAMED_MAX])
    more = len(names) - NAMED_MAX
    return f"{noun if len(names) == 1 else noun + 's'} {shown}" + (
        f" and {more} more." if more > 0 else "."
    )
