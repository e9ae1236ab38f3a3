"""The problems of the overview: conditions of the table of diagnoses, with details and links."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from txbroker.contract.service import GroupOverview, Overview
from txbroker.core.records import State
from txbroker.diagnosis import table
from txbroker.diagnosis.limits import LIMITS
from txbroker.diagnosis.overview import age_s, file_problems, own_problems, parked_of
from txbroker.diagnosis.rows import Diagnosis, Occurrence, Wording
from txbroker.diagnosis.table import occurrences
from txbroker.proxy.console.formatting import age, count, link, number, rate, sentence, time_of

NAMED_MAX = 5
"""Groups or topics named in one line."""
_PROXIES = (("Proxies", "/#proxies"),)
_WAITING = Wording("{count} transaction waits", "{count} transactions wait")


@dataclass(frozen=True)
class Concern:
    """One problem.

    Attributes:
        links: pairs of text and target.
        actions: more links, to operators' actions.
    """

    diagnosis: Diagnosis
    title: str
    detail: str
    links: tuple[tuple[str, str], ...] = ()
    actions: tuple[tuple[str, str], ...] = ()


def concerns_of(overview: Overview) -> list[Concern]:
    """Return the problems, the worst first."""
    concerns = [
        concern
        for found in occurrences(overview)
        for concern in SHOWN[found.diagnosis](found, overview)
    ]
    return sorted(concerns, key=lambda concern: not concern.diagnosis.act)


def _kafka(found: Occurrence, overview: Overview) -> Iterator[Concern]:
    for proxy in found.parts:
        one = len(overview.proxies) == 1
        some = not set(proxy.partitions) <= set(proxy.kafka_partitions)
        title = found.diagnosis.title.text(
            whom=("this proxy" if one else f"the proxy at {proxy.url}")
            + (f" for {_numbered(proxy.kafka_partitions)}" if some else ""),
            time=time_of(proxy.kafka_silent_since_ms),
        )
        detail = ". ".join(filter(None, (proxy.kafka_why, *own_problems(proxy))))
        yield Concern(found.diagnosis, title, detail, _PROXIES)


def _silent(found: Occurrence, _: Overview) -> Iterator[Concern]:
    for proxy in found.parts:
        title = found.diagnosis.title.text(url=proxy.url)
        yield Concern(found.diagnosis, title, proxy.why, _PROXIES)


def _troubled(found: Occurrence, _: Overview) -> Iterator[Concern]:
    for proxy in found.parts:
        title = found.diagnosis.title.text(url=proxy.url)
        detail = "; ".join(own_problems(proxy)[:NAMED_MAX])
        yield Concern(found.diagnosis, title, detail, _PROXIES)


def _files(found: Occurrence, _: Overview) -> Iterator[Concern]:
    for proxy in found.parts:
        files = file_problems(proxy)
        title = found.diagnosis.title.text(len(files), url=proxy.url, count=number(len(files)))
        yield Concern(found.diagnosis, title, "; ".join(files[:NAMED_MAX]), _PROXIES)


def _slow(found: Occurrence, _: Overview) -> Iterator[Concern]:
    worst = max(found.parts, key=lambda proxy: proxy.prepare_p99_s)
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(age=age(worst.prepare_p99_s)),
        f"99 % of those of the last 5 minutes at {worst.url} took at most as long.",
        _PROXIES,
    )


def _numbered(partitions: Sequence[int]) -> str:
    noun = "half partition" if len(partitions) == 1 else "half partitions"
    more = " …" if len(partitions) > 20 else ""
    return f"{noun} {', '.join(map(str, partitions[:20]))}{more}"


def _partitions(found: Occurrence, _: Overview) -> Iterator[Concern]:
    numbers = [one.partition for one in found.parts]
    first = found.parts[0]
    title = found.diagnosis.title.text(
        len(numbers), partitions=sentence(_numbered(numbers)), state=first.state
    )
    yield Concern(found.diagnosis, title, first.why, (("Half partitions", "/#partitions"),))


def _stalled(found: Occurrence, _: Overview) -> Iterator[Concern]:
    worst = max(one.oldest_committed_age_s for one in found.parts)
    which = _numbered([one.partition for one in found.parts])
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(),
        f"The oldest commit waits for {age(worst)}, in {which}.",
        (("Committed transactions", link("/transactions", state=State.COMMITTED)),),
    )


def _refused(found: Occurrence, overview: Overview) -> Iterator[Concern]:
    total = sum(one.refused for one in found.parts)
    topics = [topic for topic in sorted(overview.refused_topics) if topic]
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(total, count=number(total)),
        _named("Topic", topics),
        (("Show them", link("/transactions", state=State.REFUSED)),),
        (("Revive all…", link("/actions/revive", state=State.REFUSED)),),
    )


def _lost(found: Occurrence, _: Overview) -> Iterator[Concern]:
    total = sum(proxy.lost_last_hour for proxy in found.parts)
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(total, count=number(total)),
        "In the last hour their half messages were found deleted from Kafka, and there is no copy "
        "of them. They cannot be promoted any more.",
        (("Refused ones", link("/transactions", state=State.REFUSED)),),
    )


def _retention(found: Occurrence, _: Overview) -> Iterator[Concern]:
    left_s, retention_s = min(
        (proxy.half_retention_headroom_s, proxy.half_retention_s) for proxy in found.parts
    )
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(),
        f"In {age(max(0.0, left_s))} the retention of half messages ({age(retention_s)}) reaches "
        "one that has no copy.",
        (("The oldest", link("/transactions")),),
    )


def _drift(found: Occurrence, _: Overview) -> Iterator[Concern]:
    for audit in found.parts:
        kinds = [f"{count} {kind}" for kind, count in sorted(audit.drift.items()) if count]
        detail = f"The {audit.mode} audit of {time_of(audit.ended_ms)} UTC: {', '.join(kinds)}."
        yield Concern(found.diagnosis, found.diagnosis.title.text(), detail)


def _failed_checks(found: Occurrence, _: Overview) -> Iterator[Concern]:
    for audit in found.parts:
        failed = [
            f"{name} ({grade})"
            for name, grade in sorted(audit.failed_checks.items())
            if (grade == "critical") == found.diagnosis.critical
        ]
        detail = f"The {audit.mode} audit of {time_of(audit.ended_ms)} UTC: {', '.join(failed)}."
        yield Concern(found.diagnosis, found.diagnosis.title.text(), detail)


def _stale(found: Occurrence, overview: Overview) -> Iterator[Concern]:
    for audit in found.parts:
        title = found.diagnosis.title.text(mode=audit.mode)
        detail = f"The newest one ended {age(age_s(overview, audit))} ago."
        yield Concern(found.diagnosis, title, detail)


def _lagging(found: Occurrence, overview: Overview) -> Iterator[Concern]:
    for audit in found.parts:
        detail = f"It has judged what happened until {age(age_s(overview, audit))} ago."
        yield Concern(found.diagnosis, found.diagnosis.title.text(), detail)


def _failing(found: Occurrence, _: Overview) -> Iterator[Concern]:
    for group in found.parts:
        counts, last = group.checks.counts, group.checks.undecided
        counted = counts.commit + counts.rollback + counts.undecided
        answer = "" if last is None else f" The last, of {last.endpoint}: {last.answer}"
        yield Concern(
            found.diagnosis,
            found.diagnosis.title.text(group=group.group),
            f"{number(counts.undecided)} of {count(counted, 'check')} in 15 minutes.{answer}",
            _of_group(group),
        )


def _growing(found: Occurrence, _: Overview) -> Iterator[Concern]:
    worst = max(found.parts, key=lambda group: group.pending_growth_per_s)
    several = " " + _named("Group", found.groups) if len(found.parts) > 1 else ""
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(group=worst.group),
        f"{number(worst.pending)} are pending, {rate(worst.pending_growth_per_s)} more a second in "
        f"the last 15 minutes.{several}",
        _of_group(worst)[:1],
    )


def _parked(found: Occurrence, overview: Overview) -> Iterator[Concern]:
    total = parked_of(overview)
    first = next((group for group in overview.groups if group.parked_answers), None)
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(total, count=number(total)),
        " ".join(filter(None, (_named("Group", found.groups), _why_parked(first)))),
        (("Show them", link("/transactions", state=State.PARKED)),),
        (("Revive all…", link("/actions/revive", state=State.PARKED)),),
    )


def _why_parked(group: GroupOverview | None) -> str:
    if group is None:
        return ""
    answer = group.parked_answers[0].answer
    if not answer:
        return f"The last answers of {group.group} were lost with the proxy that got them."
    return f"The last answer of {group.group}: {answer}"


def _unreachable(found: Occurrence, overview: Overview) -> Iterator[Concern]:
    first, number_of = found.parts[0], len(found.parts)
    waiting = sum(group.pending for group in found.parts)
    since_s = (overview.at_ms - first.unreachable_since_ms) / 1000
    named = _named("Group", found.groups) + " " if number_of > 1 else ""
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(number_of, group=first.group, count=number(number_of)),
        f"{named}For {age(since_s)}: {first.unreachable_why or 'no connection'}. "
        f"{_WAITING.text(waiting, count=number(waiting))} for an answer; no attempt is used up.",
        _of_group(first),
    )


def _old(found: Occurrence, _: Overview) -> Iterator[Concern]:
    worst = max(found.parts, key=lambda group: group.oldest_pending_age_s)
    older = f"{round(LIMITS.pending_age_s)}"
    query = {"state": State.PENDING, "group": worst.group, "older": older}
    yield Concern(
        found.diagnosis,
        found.diagnosis.title.text(age=age(worst.oldest_pending_age_s)),
        _named("Group", found.groups),
        (("The oldest", link("/transactions", **query)),),
    )


def _of_group(group: GroupOverview) -> tuple[tuple[str, str], ...]:
    return (
        ("The group", link("/group", name=group.group)),
        ("Its transactions", link("/transactions", state=State.PENDING, group=group.group)),
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


SHOWN: Mapping[Diagnosis, Callable[[Occurrence, Overview], Iterator[Concern]]] = {
    table.KAFKA_SILENT: _kafka,
    table.PROXY_SILENT: _silent,
    table.PROXY_NOT_READY: _troubled,
    table.PROXY_TROUBLED: _troubled,
    table.FILE_NOT_READ: _files,
    **dict.fromkeys(table.STATES, _partitions),
    table.PROMOTION_STALLED: _stalled,
    table.REFUSING: _refused,
    table.UNDECIDED_LOST: _lost,
    table.HALF_RETENTION_AT_RISK: _retention,
    table.AUDIT_DRIFT: _drift,
    table.CRITICAL_CHECK_FAILED: _failed_checks,
    table.CHECK_FAILED: _failed_checks,
    table.PARKING: _parked,
    table.CHECKS_FAILING: _failing,
    table.GROUP_UNREACHABLE: _unreachable,
    table.PENDING_TOO_OLD: _old,
    table.PENDING_GROWING: _growing,
    table.PREPARE_SLOW: _slow,
    table.AUDIT_STALE: _stale,
    table.STREAM_LAGGING: _lagging,
}
"""How the page shows each condition."""
