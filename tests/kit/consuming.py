"""A group member and a fetcher of tests: they record what they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tests.kit.until import until
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import ConsumingDoor, Fetcher, GroupMember
from txbroker.errors import KafkaUnavailable

TIMING = {"session_s": 6.0, "heartbeat_s": 0.2, "lease_s": 3.0}
"""The shortest session that Kafka takes by default."""


class Consuming:
    """A member that takes assigned partitions, and releases revoked ones.

    Args:
        hold: revoked partitions stay in use until `release`.
    """

    def __init__(self, *, hold: bool = False) -> None:
        self.assignments: list[frozenset[Partition]] = []
        self.losses: list[str] = []
        self.kept: list[frozenset[Partition]] = []
        """The partitions in use after each assignment."""
        self.hold = hold
        self.member: GroupMember

    async def start(
        self,
        door: ConsumingDoor,
        group: str,
        topics: Collection[str],
        instance: str | None = None,
        **timing: float,
    ) -> Consuming:
        self.member = door.member(group, instance, self, **{**TIMING, **timing})
        self.member.subscribe(topics)
        await self.member.start()
        return self

    def assigned(self, partitions: frozenset[Partition]) -> None:
        self.assignments.append(partitions)
        self.member.owned |= partitions
        self.kept.append(frozenset(self.member.owned))
        if self.revoked and not self.hold:
            asyncio.get_running_loop().call_soon(self.release)

    def lost(self, why: str) -> None:
        assert self.member.owned == set()
        self.losses.append(why)

    @property
    def revoked(self) -> set[Partition]:
        return self.member.owned - self.assignments[-1]

    def release(self) -> None:
        """Release the revoked partitions."""
        revoked = self.revoked
        self.member.owned -= revoked
        if revoked:
            self.member.rejoin()

    async def owns(self, *partitions: Partition) -> None:
        """Wait until it owns exactly these partitions."""
        await until(lambda: self.member.owned == set(partitions))


async def shared(partitions: Collection[Partition], *members: Consuming) -> None:
    """Wait until the members own all these partitions, evenly."""

    def done() -> bool:
        counts = [len(each.member.owned) for each in members]
        owned = [one for each in members for one in each.member.owned]
        return sorted(owned) == sorted(partitions) and max(counts) - min(counts) <= 1

    await until(done)


class Fetching:
    """A fetcher that records deliveries by partition."""

    def __init__(self, door: ConsumingDoor) -> None:
        self.records: dict[Partition, list[Record]] = {}
        self.next: dict[Partition, int] = {}
        self.end: dict[Partition, int] = {}
        self.failures: list[tuple[Partition, KafkaUnavailable]] = []
        self.inside = False
        self.fetcher: Fetcher = door.fetcher(self._deliver, self._failed)

    def _deliver(
        self, partition: Partition, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        assert not self.inside, "delivered within a call of the user"
        found = self.records.setdefault(partition, [])
        last = found[-1].offset if found else -1
        assert all(last < record.offset < next_offset <= end for record in records[:1])
        assert next_offset >= self.next.get(partition, 0)
        found += records
        self.next[partition] = next_offset
        self.end[partition] = end

    def _failed(self, partition: Partition, error: KafkaUnavailable) -> None:
        self.failures.append((partition, error))

    def add(self, partition: Partition, offset: int = 0) -> None:
        self.inside = True
        self.records.pop(partition, None)
        self.next.pop(partition, None)
        self.fetcher.add(partition, offset)
        self.inside = False

    def keys(self, partition: Partition) -> list[bytes | None]:
        return [record.key for record in self.records.get(partition, ())]

    async def reaches(self, partition: Partition, offset: int) -> None:
        """Wait until every offset below `offset` was delivered or holds no record."""
        await until(lambda: self.next.get(partition, -1) >= offset)

    async def until(self, condition: Callable[[], Any]) -> None:
        await until(condition)
