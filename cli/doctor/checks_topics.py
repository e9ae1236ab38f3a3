"""Checks of txbroker's own topics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from txbroker.cli.doctor.findings import CheckLevel, CheckRegistry, Finding, Section, fine, judged
from txbroker.cli.doctor.subject import Subject
from txbroker.kafka.client.admin import TopicSpec
from txbroker.kafka.tools.examination import PartitionCopies

SAFE_COPIES = 3
SCAN_S = 10.0
"""Time to read all checkpoints and copies; less than a check's timeout."""

book = CheckRegistry(Section.TOPICS, needs=("kafka-reachable", "topics-there"))


@book.check(
    "txbroker's topics exist",
    hint="Create them with `txbroker topics apply`. If they existed before, their data is lost: "
    "first stop the proxies and find out who deleted them.",
    doc="docs/how-to/run-a-proxy.md",
)
async def topics_there(subject: Subject) -> Finding:
    """Whether all of txbroker's own topics exist."""
    topics = await subject.found()
    missing = [name for name in subject.own_topics if name not in topics]
    audit = [name for name in subject.kafka.settings.audit_topics if name not in topics]
    if missing:
        return judged(CheckLevel.FAILS, f"{len(missing)} are missing", missing + audit)
    if audit:
        return judged(CheckLevel.WARNING, "topics for audits are missing", audit)
    return fine(f"{len(topics)} topics")


@book.check(
    "their settings fit the check window, and nothing can be lost",
    hint="`txbroker topics plan` shows what `txbroker topics apply` would change.",
    doc="docs/how-to/choose-times.md",
)
async def topics_settings(subject: Subject) -> Finding:
    """Whether the topics' settings are safe, and as planned."""
    topics = await subject.found()
    lines = await subject.kafka.contradictions(topics)
    unread = [name for name, topic in topics.items() if not topic.configs]
    if lines:
        return judged(CheckLevel.FAILS, "txbroker cannot work safely with them", lines)
    plan = await subject.kafka.plan(topics)
    differs = [
        f"{one.topic}: {one.name} is {one.found}, not {one.wanted}" for one in plan.change
    ] + list(plan.remarks)
    if unread:
        lines = [f"{name}: no right to read its settings" for name in unread]
        return judged(CheckLevel.WARNING, "the right to read some is missing", lines + differs)
    if differs:
        return judged(CheckLevel.WARNING, "not as planned", differs)
    window_s = subject.kafka.settings.check_window_s
    return fine(f"as planned, for checks that take up to {window_s:g} s")


@book.check(
    "there are enough replicas",
    hint="Add replicas with kafka-reassign-partitions, and set min.insync.replicas to one less.",
)
async def topics_copies(subject: Subject) -> Finding:
    """Whether the loss of one broker loses no data and stops nothing."""
    topics = await subject.found()
    brokers = len((await subject.cluster()).addresses)
    lines = [
        line
        for name in subject.own_topics
        if name in topics
        for line in _too_few(topics[name], min(SAFE_COPIES, brokers))
    ]
    if lines:
        return judged(CheckLevel.WARNING, "the loss of a broker can lose data or stop it", lines)
    if brokers < SAFE_COPIES:
        # Fine for development; operators should notice it.
        return judged(
            CheckLevel.OK, f"all that {brokers} broker{'s' * (brokers > 1)} can hold, not three"
        )
    return fine("three or more")


def _too_few(topic: TopicSpec, wanted: int) -> Iterator[str]:
    if topic.replication < wanted:
        yield f"{topic.name} has {topic.replication} of {wanted} replicas"
    if not topic.configs:
        return  # no right to read them, which another check reports
    in_sync = int(topic.configs.get("min.insync.replicas", "1"))
    if topic.replication > 1 and in_sync >= topic.replication:
        yield f"{topic.name} has min.insync.replicas={in_sync}: no broker may fail"
    elif topic.replication > 2 and in_sync < 2:
        yield f"{topic.name} has min.insync.replicas={in_sync}: one replica acknowledges alone"


@book.check(
    "every replica is in sync",
    hint="Find brokers that are down or slow: partitions without a leader stop, and those with too "
    "few replicas in sync accept no writes.",
)
async def topics_in_sync(subject: Subject) -> Finding:
    """Whether each partition has a leader and enough replicas in sync."""
    cluster, topics = await subject.cluster(), await subject.found()
    fatal: list[str] = []
    lagging: list[str] = []
    total = 0
    for name, seen in cluster.topics.items():
        topic = topics.get(name)
        least = int(topic.configs.get("min.insync.replicas", "1")) if topic else 1
        for number, copies in sorted(seen.partitions.items()):
            total += 1
            if copies.leader < 0:
                fatal.append(f"{name}-{number} has no leader (replicas on {_on(copies.replicas)})")
            elif len(copies.in_sync) < least:
                fatal.append(
                    f"{name}-{number} accepts no writes: {len(copies.in_sync)} in sync, "
                    f"min.insync.replicas is {least}"
                )
            elif len(copies.in_sync) < len(copies.replicas):
                lagging.append(f"{name}-{number} is not in sync on {_missing(copies)}")
    if fatal:
        return judged(
            CheckLevel.FAILS, f"{len(fatal)} of {total} partitions are unavailable", fatal + lagging
        )
    if lagging:
        return judged(
            CheckLevel.WARNING,
            f"{len(lagging)} of {total} partitions lack replicas in sync",
            lagging,
        )
    return fine(f"{total} partitions")


@book.check(
    "no other client writes to them",
    hint="`txbroker repair show` shows each record and its writer. Revoke the right to write to "
    "these topics from all users but the proxies'. The records stop nothing.",
    doc="docs/operate/repair.md",
)
async def topics_foreign(subject: Subject) -> Finding:
    """Whether the checkpoint and parked topics contain records that proxies set aside."""
    try:
        async with asyncio.timeout(SCAN_S):
            records = await subject.kafka.set_aside()
    except TimeoutError:
        # Many parked transactions are no fault.
        return fine(f"not read within {SCAN_S:g} s: see `txbroker repair show`")
    lines = [f"{one.at}: {one.stop.why}" for one in records]
    if lines:
        return judged(CheckLevel.WARNING, f"{len(lines)} newest records of other clients", lines)
    return fine("none found")


def _missing(copies: PartitionCopies) -> str:
    return _on(tuple(sorted(set(copies.replicas) - set(copies.in_sync))))


def _on(nodes: tuple[int, ...]) -> str:
    return f"broker{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes))}"
