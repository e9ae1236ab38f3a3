"""Several whole proxies in one process, on one Kafka in memory or on a real one."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.kit.kafka import KafkaHarness
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Json, Service
from tests.kit.until import unique, until
from txbroker.core.encoding import CLAIM_KEY
from txbroker.core.records import Message
from txbroker.core.routing import order_hash, parse_id
from txbroker.testing.members import MemberSlot, MemoryCoordinator

CLOSED_URL = "http://127.0.0.1:9"
"""A URL without a listener."""
TAKEOVER_S = 40.0
"""How long a change of the group may take on a busy machine with a real Kafka."""


class Proxies:
    """Proxies by name. `one` is there from the start, others come and go."""

    def __init__(
        self, world: KafkaHarness | MemoryHarness, desk: FakeEndpoint, partitions: int = 4
    ) -> None:
        self.world = world
        self.partitions = partitions
        self.running: dict[str, Service] = {}
        self._desk = desk

    async def add(self, *names: str, **settings: Any) -> list[Service]:
        """Start proxies at the same time, and wait until everything has an owner again."""
        added = await self.start(*names, **settings)
        await self.settled()
        return added

    async def start(self, *names: str, **settings: Any) -> list[Service]:
        """Start proxies at the same time, and wait until each has its partitions."""
        added = [
            Service(self.world, self._desk, name, self.partitions, **settings) for name in names
        ]
        # The first one makes the topics.
        if not self.running:
            await added[0].start()
            self.running[added[0].instance] = added[0]
        await asyncio.gather(*[s.start() for s in added if s.instance not in self.running])
        self.running.update({service.instance: service for service in added})
        return added

    async def stop(self, name: str) -> None:
        """Let a proxy leave; does not wait for the others to take over."""
        await self.running.pop(name).stop()

    async def close(self) -> None:
        while self.running:
            await self.stop(next(iter(self.running)))

    async def shares(self) -> dict[str, frozenset[int]]:
        return {name: await service.owned() for name, service in self.running.items()}

    async def settled(self) -> dict[str, frozenset[int]]:
        """Wait until every partition has one owner, shared evenly, and all know of all."""

        async def so() -> dict[str, frozenset[int]] | None:
            shares = await self.shares()
            sizes = [len(share) for share in shares.values()]
            if sum(sizes) != self.partitions or max(sizes) - min(sizes) > 1:
                return None
            urls = {
                number: self.running[name].proxy.url
                for name, share in shares.items()
                for number in share
            }
            right = tuple(urls[number] for number in range(self.partitions))
            known = {service.proxy.broker.owners() for service in self.running.values()}
            return shares if known == {right} else None

        return dict(await until(so, TAKEOVER_S))

    @property
    def coordinator(self) -> MemoryCoordinator:
        """The coordinator of the group on a Kafka in memory, which the test controls."""
        assert isinstance(self.world, MemoryHarness)
        return self.world.kafka.coordinator("test")

    def absent(self, url: str = CLOSED_URL) -> tuple[MemberSlot, frozenset[int]]:
        """Let a member join that runs no proxy; return it and its half partitions."""
        gone = MemberSlot("gone", url, 1, lambda _: None, lambda _: None)
        self.coordinator.join(gone, self.partitions)
        return gone, self.coordinator.owned(gone)

    async def wrong_for(self, partition: int) -> Service:
        for name, share in (await self.shares()).items():
            if partition not in share:
                return self.running[name]
        raise AssertionError(f"every proxy owns partition {partition}")

    async def right_for(self, partition: int) -> Service:
        for name, share in (await self.shares()).items():
            if partition in share:
                return self.running[name]
        raise AssertionError(f"no proxy owns partition {partition}")

    def key(self, topic: str, partition: int) -> bytes:
        """Return a message key whose transactions live in a half partition."""
        number = 0
        while True:
            key = b"%d" % number
            if (order_hash(None, topic, key) or 0) % self.partitions == partition:
                return key
            number += 1

    async def prepare_in(self, partition: int, topic: str, via: Service, **fields: Any) -> str:
        """Prepare a transaction that lives in a half partition; return its id."""
        key = self.key(topic, partition)
        id = await via.prepare(Message(topic, key, unique("value").encode()), **fields)
        assert parse_id(id).partition == partition
        return id

    async def claims(self, partition: int) -> int:
        """Return how often a half partition has been claimed."""
        records = await self.world.visible(self.world.name("checkpoint"), partition)
        return sum(record.key == CLAIM_KEY for record in records)

    async def all_listed(self, service: Service, limit: int, **query: Any) -> list[Json]:
        found: list[Json] = []
        page = await service.page(limit=limit, **query)
        while True:
            found.extend(page["transactions"])
            if page["next_cursor"] is None:
                return found
            page = await service.page(limit=limit, cursor=page["next_cursor"], **query)
