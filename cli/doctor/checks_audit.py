"""Checks of the audits' results."""

from __future__ import annotations

from txbroker.cli.doctor.findings import CheckLevel, CheckRegistry, Finding, Section, fine, judged
from txbroker.cli.doctor.proxies import Unavailable
from txbroker.cli.doctor.subject import Subject
from txbroker.cli.output import duration
from txbroker.contract.audit import AuditNews, decode_news
from txbroker.core.decoding import Malformed, NewerVersion

book = CheckRegistry(Section.AUDIT, needs=("kafka-reachable",))


@book.check(
    "an audit has run recently",
    hint="Run `txbroker audit run` every night, or keep `txbroker audit stream` running. The "
    "runbook has how to remove one that is no longer needed.",
    doc="docs/runbooks/TxBrokerAuditStale.md",
)
async def audit_fresh(subject: Subject) -> Finding:
    """Whether the newest audit of each mode is recent."""
    news = await _news(subject)
    if not news:
        return judged(CheckLevel.WARNING, "no audit has run yet")
    oldest = min(news.values(), key=lambda one: one.ended_ms)
    age_s = subject.now_s() - oldest.ended_ms / 1000
    text = f"the newest ({oldest.mode}, {oldest.run}) ended {duration(age_s)} ago"
    if age_s <= subject.limits.audit_s:
        return fine(text)
    others = [f"{one.mode} {one.run} is newer" for one in news.values() if one is not oldest]
    return judged(CheckLevel.WARNING, text, others)


@book.check(
    "the audits found no drift",
    hint="`txbroker audit show` names the transactions; only `late` may disappear without action.",
    doc="docs/runbooks/TxBrokerAuditDrift.md",
)
async def audit_drift(subject: Subject) -> Finding:
    """Whether every transaction ended as decided, by the newest audits."""
    news = await _news(subject)
    lines = [
        f"{kind}: {count}, by {one.mode} {one.run}"
        for one in news.values()
        for kind, count in one.drift.items()
        if count
    ]
    if lines:
        return judged(CheckLevel.FAILS, "there is drift", lines)
    judged_ones = sum(one.transactions for one in news.values())
    return fine(f"none in {judged_ones} transactions" if news else "no audit has run yet")


async def _news(subject: Subject) -> dict[str, AuditNews]:
    if subject.kafka.settings.audit_topic not in await subject.found():
        return {}
    try:
        return {key: decode_news(value) for key, value in (await subject.audit_news()).items()}
    except (Malformed, NewerVersion) as error:
        raise Unavailable(f"this doctor cannot read the audit topic: {error}") from None
