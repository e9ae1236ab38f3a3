"""The properties of target topics in a `MemoryKafka`."""

import asyncio
from collections.abc import Callable
from functools import partial

from txbroker.core.records import Cause, Record
from txbroker.door.own_topics import (
    belongs_to,
    half_partitions,
    installation_of,
    is_layout,
    is_owners,
)
from txbroker.door.protocols import TargetFacts
from txbroker.testing.memory import MemoryKafka, valid_name

_CAUSE_TTL_S = 1.0
"""A missing topic may be created at any time."""


class MemoryTargets:
    """A `txbroker.door.protocols.Targets` in memory."""

    def __init__(self, kafka: MemoryKafka, ttl_s: float) -> None:
        self._kafka = kafka
        self._ttl_s = ttl_s
        self._known: dict[str, tuple[float, TargetFacts | Cause]] = {}

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return cached facts, or the cached cause of a failure, or None if `examine` must ask."""
        until, facts = self._known.get(topic, (0.0, None))
        return facts if asyncio.get_running_loop().time() < until else None

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Return a topic's facts and cache them; with `create`, create a missing topic."""
        await self._kafka.reach()
        prefix = installation_of(topic)
        if prefix and self._exists(prefix):
            cause = belongs_to(topic, prefix)
            self._remember(topic, cause)
            return cause
        if create and topic not in self._kafka.topics and valid_name(topic):
            self._kafka.create_topic(topic)
        facts = self._kafka.facts(topic)
        self._remember(topic, facts)
        return facts

    def _exists(self, prefix: str) -> bool:
        count = half_partitions(
            prefix, {name: len(topic.partitions) for name, topic in self._kafka.topics.items()}
        )
        return count > 0 and (
            self._holds(prefix, "groups", partial(is_layout, partitions=count))
            or self._holds(prefix, "checkpoint", is_owners)
        )

    def _holds(self, prefix: str, name: str, test: Callable[[Record], bool]) -> bool:
        """Return True if a topic of that prefix holds such a record."""
        topic = self._kafka.topics.get(f"{prefix}.{name}")
        return topic is not None and any(
            test(record)
            for partition in topic.partitions
            for record in partition.read(partition.begin, partition.stable_end)
        )

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache."""
        self._known.pop(topic, None)

    def note(self, cause: Cause) -> None:
        """Drop the facts of a topic that refused a record: they are out of date."""
        self.forget(cause.topic)

    def _remember(self, topic: str, facts: TargetFacts | Cause) -> None:
        ttl_s = min(self._ttl_s, _CAUSE_TTL_S) if isinstance(facts, Cause) else self._ttl_s
        self._known[topic] = (asyncio.get_running_loop().time() + ttl_s, facts)
