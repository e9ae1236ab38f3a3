"""Checks of Kafka itself and of txbroker's own topics."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from txbroker.cli.doctor.findings import (
    CheckLevel,
    CheckRegistry,
    Finding,
    Section,
    fine,
    judged,
    unknown,
)
from txbroker.cli.doctor.subject import Subject, Unavailable
from txbroker.contract.service import Overview
from txbroker.diagnosis.limits import LIMITS
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.protocol.codes import RETRIABLE, Code, describe
from txbroker.kafka.tools.examination import BrokerFacts, ClusterFacts, PartitionCopies

FETCH_VERSION_MIN = 17
"""The Fetch version that Kafka 3.9 introduced."""
RIGHTS = ("Describe", "DescribeConfigs", "Read", "Write")
"""The rights that a proxy needs on each of its own topics."""

_WATCH_S = 0.5
"""Observation time of appends: under load, every broker appends within it."""
_DENIED = frozenset(
    {
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

book = CheckRegistry(Section.KAFKA, needs=("kafka-reachable",))


@book.check(
    "Kafka answers",
    hint="Name its bootstrap servers with --kafka, and check that it runs and is "
    "reachable: address, firewall, TLS, login.",
    doc="docs/how-to/run-a-proxy.md",
    reaches=True,
)
async def kafka_reachable(subject: Subject) -> Finding:
    cluster = await subject.cluster()
    return fine(f"{_brokers(len(cluster.addresses))} at {subject.settings.kafka}")


@book.check(
    "every broker is reachable at its advertised address",
    hint="Start the broker, or correct its advertised.listeners: clients go to that address.",
)
async def kafka_brokers(subject: Subject) -> Finding:
    brokers = await subject.brokers()
    silent = [broker for broker in brokers if broker.why]
    if not silent:
        return fine(f"{_brokers(len(brokers))} answer")
    lines = [f"broker {broker.node} at {broker.address}: {broker.why}" for broker in silent]
    return judged(CheckLevel.FAILS, f"no answer from {len(silent)} of {len(brokers)}", lines)


@book.check(
    "Kafka is new enough",
    hint="Upgrade the brokers to Kafka 3.9 or newer.",
    doc="docs/how-to/run-a-proxy.md",
)
async def kafka_version(subject: Subject) -> Finding:
    brokers = [one for one in await subject.brokers() if not one.why]
    if not brokers:
        raise Unavailable("no broker answers with its version")
    old = [one for one in brokers if one.fetch_version < FETCH_VERSION_MIN]
    if old:
        return judged(CheckLevel.FAILS, "older than 3.9", [_old(one) for one in old])
    return fine("3.9 or newer")


def _old(broker: BrokerFacts) -> str:
    return f"broker {broker.node} at {broker.address}"


@book.check(
    "txbroker has the necessary rights",
    hint="Grant them to the proxies' Kafka user: `txbroker topics plan` lists them.",
    doc="docs/how-to/run-a-proxy.md",
)
async def kafka_rights(subject: Subject) -> Finding:
    """Whether the topics may be described, read and written, and the group and the transactional
    ids described."""
    cluster, group_error, id_error = await asyncio.gather(
        subject.cluster(), subject.kafka.group_error(), subject.kafka.transactional_id_error()
    )
    missing = list(_missing_rights(cluster, subject.own_topics))
    if group_error in _DENIED:
        missing.append(f"group {subject.kafka.settings.group_id}: Describe, Read")
    if id_error in _DENIED:
        half = subject.kafka.settings.half_topic
        missing.append(f"transactional ids that begin with {half}-: Describe, Write")
    if missing:
        return judged(CheckLevel.FAILS, "rights are missing", missing)
    silent = [name for name in subject.own_topics if _is_unseen(cluster, name)]
    silent += [describe(code) for code in (group_error, id_error) if code in RETRIABLE]
    if silent:
        return unknown("the brokers do not show the rights on some", silent)
    return fine("on its topics, its group and its transactional ids")


def _is_unseen(cluster: ClusterFacts, name: str) -> bool:
    """Return whether a topic exists, as far as known, whose rights are not shown."""
    seen = cluster.topics.get(name)
    if seen is None or seen.error == Code.UNKNOWN_TOPIC_OR_PARTITION:
        return False
    return seen.error != Code.NONE or seen.rights is None


def _missing_rights(cluster: ClusterFacts, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        seen = cluster.topics.get(name)
        if seen is None:
            continue
        if seen.error in _DENIED:
            yield f"topic {name}: {', '.join(RIGHTS)} ({describe(seen.error)})"
        elif seen.error == Code.NONE and seen.rights is not None:
            lacking = [right for right in RIGHTS if right not in seen.rights]
            if lacking:
                yield f"topic {name}: {', '.join(lacking)}"


@book.check(
    "the clocks of brokers and of this machine agree",
    hint="Synchronise the clocks (NTP) of the named machines.",
)
async def kafka_clocks(subject: Subject) -> Finding:
    """Whether brokers' timestamps, in records and from proxies, agree with our clock."""
    limit_s = LIMITS.clocks_s
    cluster = await subject.cluster()
    brokers = await _clock_offsets(subject, cluster)
    lines = list(_apart(brokers, cluster, limit_s))
    reported: Mapping[str, float] = {}
    # Other checks report proxies that do not answer.
    with contextlib.suppress(Unavailable):
        overview, took_s, ended_s = await subject.timed_overview()
        reported = _reported_offsets(overview, ended_s - took_s / 2)
        lines += [
            f"the brokers' clock as reported by {url} is {_signed(offset_s)} this machine"
            for url, offset_s in reported.items()
            if abs(offset_s) > limit_s + took_s / 2
        ]
    if lines:
        return judged(CheckLevel.FAILS, f"more than {limit_s:g} s apart", lines)
    if not brokers and not reported:
        return judged(CheckLevel.WARNING, "there are no records yet to compare clocks by")
    return fine(f"within {limit_s:g} s, by records and proxies")


class Offset(NamedTuple):
    """How far a broker's clock is ahead of ours: lower and upper bound, in seconds."""

    least_s: float
    most_s: float


async def _clock_offsets(subject: Subject, cluster: ClusterFacts) -> dict[int, Offset]:
    """Return the offsets of the brokers' clocks, from records appended meanwhile.

    Any record's timestamp bounds its broker's clock from below. A record appended between two
    reads bounds it from above, too.
    """
    names = subject.own_topics
    topics = {name: seen for name, seen in cluster.topics.items() if name in names}
    ours = ClusterFacts(cluster.id, cluster.controller, cluster.addresses, topics)
    began_s = subject.now_s()
    before = await subject.kafka.newest_appends(ours)
    await subject.pause(_WATCH_S)
    after = await subject.kafka.newest_appends(ours)
    ended_s = subject.now_s()
    offsets: dict[int, Offset] = {}
    for place, at_ms in after.items():
        leader = topics[place[0]].partitions[place[1]].leader
        known = offsets.get(leader, Offset(-math.inf, math.inf))
        most_s = math.inf if at_ms == before.get(place) else at_ms / 1000 - began_s
        offsets[leader] = Offset(
            max(known.least_s, at_ms / 1000 - ended_s), min(known.most_s, most_s)
        )
    return offsets


def _apart(offsets: Mapping[int, Offset], cluster: ClusterFacts, limit_s: float) -> Iterator[str]:
    """Yield the brokers whose clocks certainly differ too much from ours or another broker's."""
    wrong = False
    for node, offset in sorted(offsets.items()):
        off_s = _certain(offset, limit_s)
        if off_s:
            wrong = True
            where = cluster.addresses.get(node, "an unknown address")
            yield f"broker {node} at {where} is {_signed(off_s)} this machine"
    if offsets and not wrong:
        ahead = max(offsets, key=lambda node: offsets[node].least_s)
        slowest = min(offsets, key=lambda node: offsets[node].most_s)
        apart_s = offsets[ahead].least_s - offsets[slowest].most_s
        if apart_s > limit_s:
            yield f"broker {ahead} is {_signed(apart_s)} broker {slowest}"


def _certain(offset: Offset, limit_s: float) -> float:
    """Return the least offset of a clock, 0 if it may be within the limit."""
    if offset.least_s > limit_s:
        return offset.least_s
    return offset.most_s if offset.most_s < -limit_s else 0.0


def _signed(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"


def _reported_offsets(overview: Overview, asked_s: float) -> dict[str, float]:
    """Return how far the brokers' clock, as each proxy reports it, is ahead of ours."""
    return {
        proxy.url: proxy.now_ms / 1000 - asked_s
        for proxy in overview.proxies
        if proxy.reached and proxy.now_ms > 0
    }


def _brokers(count: int) -> str:
    return "1 broker" if count == 1 else f"{count} brokers"


# --- txbroker's own topics ----------------------------------------------------------------------


SAFE_COPIES = 3
SCAN_S = 10.0
"""Time to read all checkpoints and copies; less than a check's timeout."""

topics_book = CheckRegistry(Section.TOPICS, needs=("kafka-reachable", "topics-there"))


@topics_book.check(
    "txbroker's topics exist",
    hint="Create them with `txbroker topics apply`. If they existed before, their data is lost: "
    "first stop the proxies and find out who deleted them.",
    doc="docs/how-to/run-a-proxy.md",
)
async def topics_there(subject: Subject) -> Finding:
    topics = await subject.found()
    missing = [name for name in subject.own_topics if name not in topics]
    audit = [name for name in subject.kafka.settings.audit_topics if name not in topics]
    if missing:
        return judged(CheckLevel.FAILS, f"{len(missing)} are missing", missing + audit)
    if audit:
        return judged(CheckLevel.WARNING, "topics for audits are missing", audit)
    return fine(f"{len(topics)} topics")


@topics_book.check(
    "their settings fit the check window, and nothing can be lost",
    hint="`txbroker topics plan` shows what `txbroker topics apply` would change.",
    doc="docs/how-to/choose-times.md",
)
async def topics_settings(subject: Subject) -> Finding:
    topics = await subject.found()
    lines = await subject.kafka.contradictions(topics)
    unread = _unread(topics)
    if lines:
        return judged(CheckLevel.FAILS, "txbroker cannot work safely with them", lines)
    plan = await subject.kafka.plan(topics)
    differs = [
        f"{one.topic}: {one.name} is {one.found}, not {one.wanted}" for one in plan.change
    ] + list(plan.remarks)
    if unread:
        lines = [f"{name}: no right to read its settings" for name in unread]
        return unknown("the right to read some is missing", lines + differs)
    if differs:
        return judged(CheckLevel.WARNING, "not as planned", differs)
    window_s = subject.kafka.settings.check_window_s
    return fine(f"as planned, for checks that take up to {window_s:g} s")


@topics_book.check(
    "there are enough replicas",
    hint="Add replicas with kafka-reassign-partitions, and set min.insync.replicas to one less.",
)
async def topics_copies(subject: Subject) -> Finding:
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
    if unread := _unread(topics):
        return unknown("no right to read the settings of some", unread)
    if brokers < SAFE_COPIES:
        # Fine for development; operators should notice it.
        return judged(
            CheckLevel.OK, f"all that {brokers} broker{'s' * (brokers > 1)} can hold, not three"
        )
    return fine("three or more")


def _unread(topics: Mapping[str, TopicSpec]) -> list[str]:
    """Return the topics whose settings this user may not read."""
    return [name for name, topic in topics.items() if not topic.configs]


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


@topics_book.check(
    "every replica is in sync",
    hint="Find brokers that are down or slow: partitions without a leader stop, and those with too "
    "few replicas in sync accept no writes.",
)
async def topics_in_sync(subject: Subject) -> Finding:
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
    if unseen := [name for name in topics if name not in cluster.topics] + _unread(topics):
        return unknown("no right to describe some, or to read their settings", unseen)
    return fine(f"{total} partitions")


@topics_book.check(
    "no other client writes to them",
    hint="`txbroker repair show` shows each record and its writer. Revoke the right to write to "
    "these topics from all users but the proxies'. The records stop nothing.",
    doc="docs/operate/repair.md",
)
async def topics_foreign(subject: Subject) -> Finding:
    try:
        async with asyncio.timeout(SCAN_S):
            records = await subject.kafka.set_aside()
    except TimeoutError:
        # Many parked transactions are no fault.
        return unknown(f"not read within {SCAN_S:g} s: see `txbroker repair show`")
    lines = [f"{one.at}: {one.stop.why}" for one in records]
    if lines:
        return judged(CheckLevel.WARNING, f"{len(lines)} newest records of other clients", lines)
    return fine("none found")


def _missing(copies: PartitionCopies) -> str:
    return _on(tuple(sorted(set(copies.replicas) - set(copies.in_sync))))


def _on(nodes: tuple[int, ...]) -> str:
    return f"broker{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes))}"
