"""Checks of Kafka itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from txbroker.cli.doctor.findings import Book, Finding, Level, Section, fine, judged
from txbroker.cli.doctor.proxies import NotSeen
from txbroker.cli.doctor.subject import Subject
from txbroker.contract import Overview
from txbroker.kafka.codes import Code, describe
from txbroker.kafka.examination import BrokerFacts, Cluster

FETCH_VERSION_MIN = 17
"""Kafka 3.9 was the first to fetch in this way."""
RIGHTS = ("Describe", "DescribeConfigs", "Read", "Write")
"""What a proxy has to be allowed on each of its own topics."""

_DENIED = frozenset(
    {
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

book = Book(Section.KAFKA, needs=("kafka-reachable",))


@book.check(
    "Kafka answers",
    hint="Name its bootstrap servers with --kafka, and see that it runs and that nothing stands "
    "between: address, firewall, TLS, login.",
    doc="docs/how-to/run-a-proxy.md",
)
async def kafka_reachable(subject: Subject) -> Finding:
    """Whether any of the bootstrap servers answers."""
    cluster = await subject.cluster()
    return fine(f"{_brokers(len(cluster.addresses))} at {subject.settings.kafka}")


@book.check(
    "every broker is reached at the address that it advertises",
    hint="Start the broker, or correct its advertised.listeners: clients go to that address.",
)
async def kafka_brokers(subject: Subject) -> Finding:
    """Whether each broker answers from here."""
    brokers = await subject.brokers()
    silent = [one for one in brokers if one.why]
    if not silent:
        return fine(f"{_brokers(len(brokers))} answer")
    lines = [f"broker {one.node} at {one.address}: {one.why}" for one in silent]
    return judged(Level.FAILS, f"{len(silent)} of {_brokers(len(brokers))} are silent", lines)


@book.check(
    "Kafka is new enough",
    hint="Bring the brokers to Kafka 3.9 or newer.",
    doc="docs/how-to/run-a-proxy.md",
)
async def kafka_version(subject: Subject) -> Finding:
    """Whether each broker is of a version that txbroker supports."""
    brokers = [one for one in await subject.brokers() if not one.why]
    if not brokers:
        raise NotSeen("no broker says what it understands")
    old = [one for one in brokers if one.fetch_version < FETCH_VERSION_MIN]
    if old:
        return judged(Level.FAILS, "older than 3.9", [_old(one) for one in old])
    return fine("3.9 or newer")


def _old(broker: BrokerFacts) -> str:
    return f"broker {broker.node} at {broker.address}"


@book.check(
    "txbroker has the rights that it needs",
    hint="Grant them to the user with whom the proxies log in: `txbroker topics plan` names them.",
    doc="docs/how-to/run-a-proxy.md",
)
async def kafka_rights(subject: Subject) -> Finding:
    """Whether the topics may be described, read and written, and the group described."""
    cluster, group_error = await asyncio.gather(subject.cluster(), subject.kafka.group_error())
    missing = list(_missing_rights(cluster, subject.own_topics))
    if group_error in _DENIED:
        missing.append(f"group {subject.kafka.settings.group_id}: Describe, Read")
    if missing:
        return judged(Level.FAILS, "rights are missing", missing)
    return fine("on its topics and its group")


def _missing_rights(cluster: Cluster, names: tuple[str, ...]) -> Iterator[str]:
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
    hint="Synchronise the clocks (NTP) of the machines that are named.",
)
async def kafka_clocks(subject: Subject) -> Finding:
    """Whether brokers' times, as records carry and proxies know them, agree with ours.

    A record tells how far its broker's clock has gone at least; what proxies know goes on by
    itself, so it shows also a clock that is behind.
    """
    limit_s = subject.limits.clocks_s
    cluster = await subject.cluster()
    newest = await subject.kafka.newest_appends(_only(cluster, subject.own_topics))
    now_s = subject.now_s()
    lines = [
        f"broker {node} at {cluster.addresses.get(node, '?')} is {at_ms / 1000 - now_s:.1f} s "
        "ahead of this machine"
        for node, at_ms in sorted(newest.items())
        if at_ms / 1000 - now_s > limit_s
    ]
    try:
        overview, took_s, heard_s = await subject.timed_overview()
    except NotSeen:
        # What the proxies have to say is missed by checks of their own.
        told: Mapping[str, float] = {}
    else:
        told = _offsets(overview, heard_s - took_s / 2)
        lines += [
            f"the brokers' clock as {url} knows it is {abs(offset_s):.1f} s "
            f"{'ahead of' if offset_s > 0 else 'behind'} this machine"
            for url, offset_s in told.items()
            if abs(offset_s) > limit_s + took_s / 2
        ]
    if lines:
        return judged(Level.FAILS, f"more than {limit_s:g} s apart", lines)
    if not newest and not told:
        return judged(Level.WARNING, "nothing is there yet by which clocks could be compared")
    return fine(f"within {limit_s:g} s, as far as records and proxies show")


def _only(cluster: Cluster, names: tuple[str, ...]) -> Cluster:
    topics = {name: seen for name, seen in cluster.topics.items() if name in names}
    return Cluster(cluster.id, cluster.controller, cluster.addresses, topics)


def _offsets(overview: Overview, asked_s: float) -> dict[str, float]:
    """Return by how much each proxy's knowledge of the brokers' clock is ahead of ours."""
    return {
        proxy.url: proxy.now_ms / 1000 - asked_s
        for proxy in overview.proxies
        if proxy.reached and proxy.now_ms > 0
    }


def _brokers(count: int) -> str:
    return "1 broker" if count == 1 else f"{count} brokers"
