"""Which topics are txbroker's own: no message may be written to them.

A message there would be taken for a record: a decision, a position, a copy. A topic that an
installation, relay or group of consumers with our prefix would use is its own by its name. One with
another prefix may be a user's, so its name is no proof, and neither is one record, which any client
may write: what belongs to its owner must be there, too.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

from txbroker.core.consuming.copies import (
    DEAD_PARTITIONS,
    RETRY_PARTITIONS,
    GroupTopics,
)
from txbroker.core.encoding import OWN_TOPICS
from txbroker.core.records import Cause, Record
from txbroker.door.own_topics import half_partitions, is_layout, is_owners

KAFKA_TOPICS = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
)
"""Kafka's internal topics."""
_OF_ONE = (*OWN_TOPICS, "relay")
"""The topics of which there is one for each prefix."""
_NEWEST = 100
"""Offsets at the end of a partition that are searched."""
_ANY_PARTITION = -1
_POSITION_KEY = re.compile(rb"[^/]{1,200}/(\d{1,2}|capture)(/owner)?")


class Evidence(Protocol):
    """What Kafka holds, as far as this login may see it."""

    async def partitions(self, names: Collection[str]) -> Mapping[str, int]:
        """Return the numbers of partitions of the topics that exist."""

    async def compacted(self, names: Sequence[str]) -> bool:
        """Return whether all of these topics are compacted."""

    async def holds(
        self, topic: str, partitions: int, test: Callable[[Record], bool], newest: int = 0
    ) -> bool:
        """Return whether the first records of a topic's partitions, or those at their `newest`
        offsets, include one that passes `test`. Records have their transactional producers."""


class Owner(NamedTuple):
    """An owner that a topic could have, by its name.

    Attributes:
        kind: `installation`, `relays`, or `group`.
        group: of consumers.
    """

    kind: str
    prefix: str
    group: str = ""

    async def exists(self, evidence: Evidence) -> bool:
        """Return whether Kafka holds what only such an owner has."""
        if self.kind == "relays":
            return await _are_relays(f"{self.prefix}.relay", evidence)
        if self.kind == "group":
            names = GroupTopics.of(self.prefix, self.group)
            counts = await evidence.partitions(names)
            needed = {names.retry: RETRY_PARTITIONS, names.dead: DEAD_PARTITIONS}
            return needed.items() <= counts.items()
        return await _is_installation(self.prefix, evidence)

    def __str__(self) -> str:
        if self.kind == "relays":
            return f"to the relays of prefix {self.prefix!r}, which keep their positions in it"
        if self.kind == "group":
            return f"to the consumers of group {self.group!r}, which write it themselves"
        return f"to the txbroker installation {self.prefix!r}"


@lru_cache(maxsize=10_000)
def own_by_name(topic: str, prefix: str) -> Cause | None:
    """Return why a topic cannot be a target, if its name alone shows it.

    Args:
        prefix: of txbroker's own topics.
    """
    if topic in KAFKA_TOPICS:
        whose = "Kafka's"
    elif any(owner.prefix == prefix for owner in possible_owners(topic)):
        whose = "txbroker's"
    else:
        return None
    return _reserved(topic, f"is {whose} own: it is no target")


async def owner_of(topic: str, exists: Callable[[Owner], Awaitable[bool]]) -> Cause | None:
    """Return why a topic cannot be a target: an owner uses it. None if it has no owner.

    Kafka is asked only about names that an own topic could have.

    Args:
        exists: see `Owner.exists`; may keep what it found.
    """
    for owner in possible_owners(topic):
        if await exists(owner):
            return _reserved(topic, f"belongs {owner}: choose another target")
    return None


def unknown_target(topic: str) -> Cause:
    """Return the cause of a topic that Kafka does not show."""
    why = f"topic {topic} does not exist, or this login may not describe it"
    return Cause("unknown_topic", why, topic, _ANY_PARTITION)


def possible_owners(topic: str) -> list[Owner]:
    """Return the owners that a topic of this name could have."""
    found = []
    for name in _OF_ONE:
        prefix = topic.removesuffix(f".{name}")
        if prefix and prefix != topic:
            found.append(Owner("relays" if name == "relay" else "installation", prefix))
    for kind in GroupTopics._fields:
        for match in re.finditer(rf"\.{kind}\.", topic):
            prefix, group = topic[: match.start()], topic[match.end() :]
            if prefix and group:
                found.append(Owner("group", prefix, group))
    return found


def _reserved(topic: str, why: str) -> Cause:
    return Cause("reserved", f"topic {topic} {why}", topic, _ANY_PARTITION)


async def _is_installation(prefix: str, evidence: Evidence) -> bool:
    groups, checkpoint = f"{prefix}.groups", f"{prefix}.checkpoint"
    names = [f"{prefix}.half", f"{prefix}.op", checkpoint, groups]
    count = half_partitions(prefix, await evidence.partitions(names))
    if not count or not await evidence.compacted([checkpoint, groups]):
        return False
    # The first proxy to start writes the layout before any group.
    test = partial(is_layout, partitions=count)
    return await evidence.holds(groups, 1, test) or await evidence.holds(
        checkpoint, count, is_owners, newest=_NEWEST
    )


async def _are_relays(topic: str, evidence: Evidence) -> bool:
    if (await evidence.partitions([topic])).get(topic) != 1:
        return False
    if not await evidence.compacted([topic]):
        return False
    return await evidence.holds(topic, 1, is_position) or await evidence.holds(
        topic, 1, is_position, newest=_NEWEST
    )


def is_position(record: Record) -> bool:
    """Return whether only relays write such a record: their claims and positions."""
    key = record.key or b""
    return record.producer >= 0 and not record.headers and bool(_POSITION_KEY.fullmatch(key))
