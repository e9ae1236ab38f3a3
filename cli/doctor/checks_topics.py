"""Checks of txbroker's own topics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from txbroker.cli.doctor.findings import CheckLevel, CheckRegistry, Finding, Section, fine, judged
from txbroker.cli.doctor.subject import Subject
from txbroker.kafka.door.topics import FoundTopic
from txbroker.kafka.tools.examination import PartitionCopies

SAFE_COPIES = 3
SCAN_S = 10.0
"""For reading all checkpoints and copies; less than a check may take."""

book = CheckRegistry(Section.TOPICS, needs=("kafka-reachable", "topics-there"))


@book.check(
    "txbroker's topics are there",
    hint="Make them with `txbroker topics apply`. If they were there before, what they held is "
    "gone: stop the proxies and find out who deleted them first.",
    doc="docs/how-to/run-a-proxy.md",
)
async def topics_there(subject: Subject) -> Finding:
    """Whether every topic of txbroker's own exists."""
    found = await subject.found()
    missing = [name for name in subject.own_topics if name not in found]
    audit = [name for name in subject.kafka.settings.audit_topics if name not in found]
    if missing:
        return judged(CheckLevel.FAILS, f"{len(missing)} are missing", missing + audit)
    if audit:
        return judged(CheckLevel.WARNING, "those that only audits need are missing", audit)
    return fine(f"{len(found)} topics")


@book.check(
    "their settings fit the check window, and nothing can be lost",
    hint="`txbroker topics plan` shows what `txbroker topics apply` would mend.",
    doc="docs/how-to/choose-times.md",
)
async def topics_settings(subject: Subject) -> Finding:
    """Whether txbroker can work with its topics' settings, and whether they are as planned."""
    found = await subject.found()
    lines = await subject.kafka.contradictions(found)
    unread = [name for name, topic in found.items() if not topic.configs]
    if lines:
        return judged(CheckLevel.FAILS, "txbroker cannot work safely with them", lines)
    plan = await subject.kafka.plan(found)
    differs = [
        f"{one.topic}: {one.name} is {one.found}, not {one.wanted}" for one in plan.change
    ] + list(plan.remarks)
    if unread:
        lines = [f"{name}: its settings may not be read" for name in unread]
        return judged(CheckLevel.WARNING, "not all may be read", lines + differs)
    if differs:
        return judged(CheckLevel.WARNING, "not as planned", differs)
    window_s = subject.kafka.settings.check_window_s
    return fine(f"as planned, for checks that take up to {window_s:g} s")


@book.check(
    "there are enough copies of everything",
    hint="Add copies with kafka-reassign-partitions, and set min.insync.replicas to one less.",
)
async def topics_copies(subject: Subject) -> Finding:
    """Whether the loss of a broker loses nothing and stops nothing."""
    found = await subject.found()
    brokers = len((await subject.cluster()).addresses)
    lines = [
        line
        for name in subject.own_topics
        if name in found
        for line in _too_few(found[name], min(SAFE_COPIES, brokers))
    ]
    if lines:
        return judged(CheckLevel.WARNING, "a broker that is lost can lose or stop txbroker", lines)
    if brokers < SAFE_COPIES:
        # Right for a machine of one's own; whoever runs this for others should know.
        return judged(
            CheckLevel.OK, f"as many as {brokers} broker{'s' * (brokers > 1)} can hold, not three"
        )
    return fine("three or more")


def _too_few(topic: FoundTopic, wanted: int) -> Iterator[str]:
    if topic.replication < wanted:
        yield f"{topic.name} has {topic.replication} of {wanted} copies"
    if not topic.configs:
        return  # they may not be read, which is told by another check
    in_sync = int(topic.configs.get("min.insync.replicas", "1"))
    if topic.replication > 1 and in_sync >= topic.replication:
        yield f"{topic.name} has min.insync.replicas={in_sync}: no broker may be away"
    elif topic.replication > 2 and in_sync < 2:
        yield f"{topic.name} has min.insync.replicas={in_sync}: an answer is one copy's word"


@book.check(
    "every copy is in sync",
    hint="See which brokers are away or slow, and why: partitions without a leader stand still, "
    "those with too few copies in sync take nothing.",
)
async def topics_in_sync(subject: Subject) -> Finding:
    """Whether each partition has a leader, and as many copies in sync as it should."""
    cluster, found = await subject.cluster(), await subject.found()
    fatal: list[str] = []
    behind: list[str] = []
    total = 0
    for name, seen in cluster.topics.items():
        topic = found.get(name)
        least = int(topic.configs.get("min.insync.replicas", "1")) if topic else 1
        for number, copies in sorted(seen.partitions.items()):
            total += 1
            if copies.leader < 0:
                fatal.append(f"{name}-{number} has no leader (copies on {_on(copies.replicas)})")
            elif len(copies.in_sync) < least:
                fatal.append(
                    f"{name}-{number} takes nothing: {len(copies.in_sync)} in sync, "
                    f"min.insync.replicas is {least}"
                )
            elif len(copies.in_sync) < len(copies.replicas):
                behind.append(f"{name}-{number} is behind on {_missing(copies)}")
    if fatal:
        return judged(
            CheckLevel.FAILS, f"{len(fatal)} of {total} partitions stand still", fatal + behind
        )
    if behind:
        return judged(
            CheckLevel.WARNING, f"{len(behind)} of {total} partitions miss copies", behind
        )
    return fine(f"{total} partitions")


@book.check(
    "no other client writes to them",
    hint="`txbroker repair show` shows each record and its writer. Take the right to write to "
    "these topics from all but the proxies' user. The records stop nothing.",
    doc="docs/operate/repair.md",
)
async def topics_foreign(subject: Subject) -> Finding:
    """Whether the checkpoint and parked topics hold records that proxies set aside."""
    try:
        async with asyncio.timeout(SCAN_S):
            found = await subject.kafka.set_aside()
    except TimeoutError:
        # Much is parked, which is no fault.
        return fine(f"not read within {SCAN_S:g} s: see `txbroker repair show`")
    lines = [f"{one.at}: {one.stop.why}" for one in found]
    if lines:
        return judged(CheckLevel.WARNING, f"{len(lines)} newest records of other clients", lines)
    return fine("none found")


def _missing(copies: PartitionCopies) -> str:
    return _on(tuple(sorted(set(copies.replicas) - set(copies.in_sync))))


def _on(nodes: tuple[int, ...]) -> str:
    return f"broker{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes))}"
