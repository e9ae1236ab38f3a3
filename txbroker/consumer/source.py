"""All partitions of topics, without a group: each instance of the consumer reads everything."""

from __future__ import annotations

import math
from collections.abc import Mapping

from txbroker.door.consuming import MemberListener, Partition, TopicIdentity


class AllPartitions:
    """Assigns all partitions of the topics, with the interface of a group member.

    Args:
        listener: receives the assignment.
    """

    deadline_s = math.inf

    def __init__(self, listener: MemberListener) -> None:
        self.owned: set[Partition] = set()
        self._listener = listener
        self._assigned: frozenset[Partition] = frozenset()

    def subscribe(self, topics: Mapping[str, TopicIdentity]) -> None:
        """Assign all partitions of these topics."""
        partitions = frozenset(
            (name, number) for name, topic in topics.items() for number in range(topic.partitions)
        )
        if partitions != self._assigned:
            self._assigned = partitions
            self._listener.assigned(partitions)

    def rejoin(self) -> None:
        """Nobody else takes the partitions."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...
