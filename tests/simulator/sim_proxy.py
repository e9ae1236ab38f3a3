"""Simulated proxies and their group: heartbeats, sessions that run out, shares that change hands.

No proxy waits until the one that loses a partition knows it: two proxies that both think that they
own one are the reason for claims and fencing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.simulator.sim_loop import PROCESS
from tests.simulator.sim_network import Actor, Network
from txbroker.checkers.base import Finder
from txbroker.checkers.groups import Groups
from txbroker.checkers.runner import CheckRunner
from txbroker.config.settings import Settings
from txbroker.core.records import RECORD_VERSION, Cause, Record
from txbroker.core.routing import assign, owners
from txbroker.door.protocols import (
    Assignment,
    Door,
    Membership,
    PartitionDoor,
    TargetFacts,
    Targets,
)
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.door.partition import KafkaPartitionDoor
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.proxy.cluster.broker import Broker

SESSION_S = 4.0
HEARTBEAT_S = 0.7
COORDINATOR = 0
"""The broker that coordinates the group."""


class _Place(Struct):
    url: str
    member: int
    heard_s: float
    owned: frozenset[int] = frozenset()


class FakeGroup:
    """The group's coordinator."""

    def __init__(self, network: Network, partitions: int) -> None:
        self.network = network
        self.generation = 0
        self._partitions = partitions
        self._places: dict[str, _Place] = {}
        self._members = 0

    def join(self, name: str, url: str) -> int:
        """Let a member in, in the place of one with its name; return its number."""
        self._members += 1
        before = self._places.get(name)
        owned = frozenset() if before is None else before.owned
        now_s = self.network.loop.time()
        self._places[name] = _Place(url, self._members, now_s, owned)
        self._share()
        return self._members

    def beat(self, name: str, member: int) -> Assignment | None:
        """Take a heartbeat; return how things stand, None for who is no member any more."""
        self._expire()
        place = self._places.get(name)
        if place is None or place.member != member:
            return None
        place.heard_s = self.network.loop.time()
        urls = {name: place.url for name, place in self._places.items()}
        shares = {name: place.owned for name, place in self._places.items()}
        found = owners(self._partitions, shares, urls)
        return Assignment(place.owned, found, tuple(sorted(urls.values())), RECORD_VERSION)

    def leave(self, name: str, member: int) -> None:
        """Give what a member owns to the others."""
        place = self._places.get(name)
        if place is not None and place.member == member:
            del self._places[name]
            self._share()

    def _expire(self) -> None:
        latest_s = self.network.loop.time() - SESSION_S
        gone = [name for name, place in self._places.items() if place.heard_s < latest_s]
        for name in gone:
            self.network.note(f"group: {name} is out")
            del self._places[name]
        if gone:
            self._share()

    def _share(self) -> None:
        self.generation += 1
        before = {name: place.owned for name, place in self._places.items()}
        for name, share in assign(self._partitions, before).items():
            self._places[name].owned = share
        shown = {name: sorted(place.owned) for name, place in self._places.items()}
        self.network.note(f"group: generation {self.generation} {shown}")


class SimMembership(Membership):
    """A `txbroker.door.protocols.Membership` of one simulated proxy."""

    def __init__(self, group: FakeGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._url = ""
        self._member = -1
        self._generation = -1
        self._heard_s = -SESSION_S
        self._beating: asyncio.Task[None] | None = None

    async def join(
        self,
        url: str,
        assigned: Callable[[Assignment], None],
        lost: Callable[[str], None],
        *,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        """Join; see `txbroker.door.protocols.Membership`."""
        self._url = url
        await self._rejoin(assigned)
        self._beating = asyncio.create_task(self._beat(assigned, lost))

    async def _rejoin(self, assigned: Callable[[Assignment], None]) -> None:
        await self._travel()
        self._member = self._group.join(self._name, self._url)
        await self._hear(assigned)

    async def _hear(self, assigned: Callable[[Assignment], None]) -> bool:
        """Send a heartbeat; return whether we are a member."""
        sent_s = self._group.network.loop.time()
        await self._travel()
        assignment = self._group.beat(self._name, self._member)
        generation = self._group.generation
        await self._travel()
        if assignment is None:
            return False
        self._heard_s = sent_s
        if generation != self._generation:
            self._generation = generation
            assigned(assignment)
        return True

    async def _beat(
        self, assigned: Callable[[Assignment], None], lost: Callable[[str], None]
    ) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                if not await self._hear(assigned):
                    lost("the coordinator does not know us any more")
                    self._generation = -1
                    await self._rejoin(assigned)
            except KafkaUnavailable as error:
                if not self.in_touch() and self._generation >= 0:
                    self._generation = -1
                    lost(str(error))

    async def _travel(self) -> None:
        """Go to the coordinator, or back from it.

        Raises:
            KafkaUnavailable: it is not to be reached.
        """
        network, process = self._group.network, PROCESS.get()
        await network.pass_message()
        if not network.reaches(process, COORDINATOR):
            await asyncio.sleep(1.0)
            raise KafkaUnavailable("no answer of the group's coordinator")

    async def still_ours(self, partition: int) -> bool:
        """Return whether a partition is ours; see `txbroker.door.protocols.Membership`."""
        await self._travel()
        assignment = self._group.beat(self._name, self._member)
        await self._travel()
        return assignment is not None and partition in assignment.mine

    def in_touch(self) -> bool:
        """Return whether the last heartbeat is younger than a session."""
        return self._group.network.loop.time() - self._heard_s < SESSION_S

    async def leave(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
        self._generation = -1
        try:
            await self._travel()
        except KafkaUnavailable:
            return
        self._group.leave(self._name, self._member)


# --- a proxy -------------------------------------------------------------------------------------

FACTS_TTL_S = 5.0


class SimTargets(Targets):
    """A `txbroker.door.protocols.Targets` that asks the cluster as it is."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._known: dict[str, tuple[float, TargetFacts | Cause]] = {}

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return facts from the cache, if they are not too old."""
        until_s, facts = self._known.get(topic, (0.0, None))
        return facts if self._network.loop.time() < until_s else None

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask about a topic.

        Raises:
            KafkaUnavailable: no broker is reachable.
        """
        network, process = self._network, PROCESS.get()
        await network.pass_message()
        if not any(network.reaches(process, node) for node in network.cluster.nodes):
            raise KafkaUnavailable("no broker answers")
        facts = self._facts(topic)
        await network.pass_message()
        self._known[topic] = (network.loop.time() + FACTS_TTL_S, facts)
        return facts

    def _facts(self, topic: str) -> TargetFacts | Cause:
        cluster = self._network.cluster
        logs = {number: log for (name, number), log in cluster.logs.items() if name == topic}
        if not logs:
            return Cause("unknown_topic", f"topic {topic} does not exist", topic, -1)
        leaderless = frozenset(number for number, log in logs.items() if log.leader < 0)
        size = min(log.bytes_max for log in logs.values())
        return TargetFacts(len(logs), size, logs[0].append_time, leaderless)

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    def note(self, cause: Cause) -> None:
        self.forget(cause.topic)

    async def records(
        self, topic: str, partition: int, *, start: int | None = None, since_ms: int = 0
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the committed records from an offset, or from a time on."""
        await self._network.pass_message()
        log = self._network.cluster.logs.get((topic, partition))
        if log is None:
            raise KafkaUnavailable(f"{topic}-{partition} does not exist")
        yield [
            Record(record.key, record.value, tuple(record.headers), record.timestamp, record.offset)
            for record in log.records(committed=True)
            if record.offset >= (start or 0) and record.timestamp >= since_ms
        ]


class NoGroups:
    """A `txbroker.door.protocols.GroupStore` in which no group is registered."""

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        """There is nothing."""

    async def put(self, group: str, value: bytes | None) -> None:
        """No groups are registered here."""
        raise KafkaUnavailable("groups are not simulated")


class NoAudit:
    """A `txbroker.door.protocols.AuditFeed` without events."""

    def follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        """There is nothing."""


class SimDoor(Door):
    """A `Door` on simulated connections: client, producers, twin writer, claims and
    readers are those of the door to a real Kafka."""

    def __init__(self, network: Network, group: FakeGroup, name: str, partitions: int) -> None:
        self.partitions = partitions
        settings = KafkaSettings(
            bootstrap_servers=("broker:9000",),
            instance_id=name,
            transactions=2 if network.cluster.second else 1,
        )
        self._cluster = network.cluster
        self._client = Client(settings, network.open)
        self._shared = SharedWrites(self._client)
        self._stable = StableEnds(self._client)
        self.targets = self._targets = SimTargets(network)
        self.groups = NoGroups()
        self.audit = NoAudit()
        self.membership = SimMembership(group, name)

    async def start(self) -> None:
        """The topics are there."""

    async def check_topics(self) -> list[str]:
        """The topics never change here."""
        return []

    def brokers(self) -> Sequence[tuple[str, int]]:
        """Return host and port of each broker: there is no network here."""
        return ()

    def partition(self, partition: int) -> PartitionDoor:
        return KafkaPartitionDoor(
            self._client, partition, self._bytes_max, self._targets.note, self._shared, self._stable
        )

    def _bytes_max(self, topic: str) -> int:
        return self._cluster.logs[topic, 0].bytes_max

    async def close(self) -> None:
        await self._shared.close()
        await self._client.close()


@cache
def _settings(name: str, given: tuple[tuple[str, Any], ...]) -> Settings:
    """Return a proxy's settings; making them takes longer than some runs."""
    url = f"http://{name}"
    return Settings(instance=name, advertise=url, data_dir=Path("unused"), **dict(given))


class _Unheard:
    """Discarded events and metrics."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    return None


class SimProxy(Actor):
    """A proxy.

    Args:
        finder: makes the finder of check endpoints, for the proxy's process.
    """

    def __init__(
        self,
        name: str,
        seed: str,
        network: Network,
        group: FakeGroup,
        partitions: int,
        settings: dict[str, Any],
        finder: Callable[[SimProxy], Finder],
    ) -> None:
        super().__init__(name, seed, network)
        self.broker: Broker | None = None
        self._group = group
        self._partitions = partitions
        self._finder = finder
        self._settings = _settings(name, tuple(settings.items()))

    def start(self, wall_ahead_s: float = 0.0) -> None:
        self.broker = None
        super().start(wall_ahead_s)

    def ending(self) -> Coroutine[Any, Any, None] | None:
        return None if self.broker is None else self.broker.close()

    async def _run(self) -> None:
        events: Any = _Unheard()
        door = SimDoor(self._network, self._group, self.name, self._partitions)
        groups = Groups(door.groups)
        await groups.load()
        self.runner = runner = CheckRunner(
            self._finder(self), events, jitter=self.process.random.random
        )
        broker = Broker(door, self._settings, groups, runner, events)
        while True:
            try:
                await broker.start()
                break
            except KafkaUnavailable:
                # As its supervisor restarts it.
                await asyncio.sleep(1.0)
        self.broker = broker
