"""The proxies' group: heartbeats, sessions that run out, and shares that change hands.

Nobody waits until who loses a partition has heard of it: two proxies that both think that they own
one is what claims and fencing are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from tests.simulator.sim_loop import PROCESS
from tests.simulator.sim_network import Network
from txbroker.core.records import RECORD_VERSION
from txbroker.core.routing import assign, owners
from txbroker.door.protocols import Assignment, Membership
from txbroker.errors import KafkaUnavailable

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
