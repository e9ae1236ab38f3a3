"""What target topics in a `MemoryKafka` take."""

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
"""Somebody may be creating the topic just now."""


class MemoryTargets:
    """A `txbroker.door.protocols.Targets` in memory."""

    def __init__(self, kafka: MemoryKafka, ttl_s: float) -> None:
        self._kafka = kafka
        self._ttl_s = ttl_s
        self._known: dict[str, tuple[float, TargetFacts | Cause]] = {}

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return facts from the cache, or why there are none, or None where it must be asked."""
        until, facts = self._known.get(topic, (0.0, None))
        return facts if asyncio.get_running_loop().time() < until else None

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask about a topic, and remember the answer; with `create`, create a missing one.

        Raises:
            KafkaUnavailable: Kafka is down.
        """
        await self._kafka.reach()
        prefix = installation_of(topic)
        if prefix and self._exists(prefix):
            refused = belongs_to(topic, prefix)
            self._remember(topic, refused)
            return refused
        if create and topic not in self._kafka.topics and valid_name(topic):
            self._kafka.create_topic(topic)
        facts = self._kafka.facts(topic)
        self._remember(topic, facts)
        return facts

    def _exists(self, prefix: str) -> bool:
        count = half_partitions(
            prefix, {name: len(one.partitions) for name, one in self._kafka.topics.items()}
        )
        return count > 0 and (
            self._holds(prefix, "groups", partial(is_layout, partitions=count))
            or self._holds(prefix, "checkpoint", is_owners)
        )

    def _holds(self, prefix: str, name: str, test: Callable[[Record], bool]) -> bool:
        """Say whether a topic of that prefix holds such a record."""
        found = self._kafka.topics.get(f"{prefix}.{name}")
        return found is not None and any(
            test(record)
            for one in found.partitions
            for record in one.read(one.begin, one.stable_end)
        )

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache."""
        self._known.pop(topic, None)

    def note(self, cause: Cause) -> None:
        """Learn from a refusal: the facts that did not foresee it are out of date."""
        self.forget(cause.topic)

    def _remember(self, topic: str, facts: TargetFacts | Cause) -> None:
        ttl_s = min(self._ttl_s, _CAUSE_TTL_S) if isinstance(facts, Cause) else self._ttl_s
        self._known[topic] = (asyncio.get_running_loop().time() + ttl_s, facts)
