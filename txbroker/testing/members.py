"""A group of proxies in memory: who owns which half partition."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

Assigned: TypeAlias = Callable[[frozenset[int]], None]


class _Member:
    def __init__(self, assigned: Assigned) -> None:
        self.assigned = assigned
        self.owned: frozenset[int] = frozenset()
        self.silent = False


class Coordinator:
    """Shares partitions among members, each keeping what it has as far as that is fair."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._partitions = 0

    def join(self, name: str, partitions: int, assigned: Assigned) -> object:
        """Let a member in and return its place. Another one with its name loses its own."""
        self._partitions = partitions
        member = _Member(assigned)
        before = self._members.get(name)
        self._members[name] = member
        if before is not None:
            member.owned = before.owned
            if not before.silent:
                before.assigned(frozenset())
            self._share()
            assigned(member.owned)
        else:
            self._share()
        return member

    def owned(self, place: object) -> frozenset[int]:
        """Return what the member at this place owns, nothing if it has lost the place."""
        for member in self._members.values():
            if member is place:
                return member.owned
        return frozenset()

    def fall_silent(self, place: object) -> None:
        """The member at this place hears nothing any more, but keeps what it owns."""
        for member in self._members.values():
            if member is place:
                member.silent = True

    def leave(self, place: object) -> None:
        """Give what the member at this place owns to the others."""
        names = [name for name, member in self._members.items() if member is place]
        for name in names:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Take a member out, as Kafka does with one whose session has timed out."""
        self._members.pop(name, None)
        self._share()

    def _share(self) -> None:
        """Give every partition to one member: first take away, then give."""
        wanted = self._fair()
        shrunk = {name: self._members[name].owned & own for name, own in wanted.items()}
        for shares in (shrunk, wanted):
            for name, own in shares.items():
                member = self._members[name]
                if own != member.owned:
                    member.owned = own
                    if not member.silent:
                        member.assigned(own)

    def _fair(self) -> dict[str, frozenset[int]]:
        free = set(range(self._partitions))
        shares: dict[str, set[int]] = {}
        most_first = sorted(self._members.items(), key=lambda item: -len(item[1].owned))
        for number, (name, member) in enumerate(most_first):
            share = (self._partitions - number - 1) // len(most_first) + 1
            shares[name] = set(sorted(member.owned & free)[:share])
            free -= shares[name]
        for number, (name, _) in enumerate(most_first):
            share = (self._partitions - number - 1) // len(most_first) + 1
            while len(shares[name]) < share:
                shares[name].add(free.pop())
        return {name: frozenset(own) for name, own in shares.items()}


class MemoryMembership:
    """A `txbroker.door.Membership` of one door.

    Args:
        coordinator: the group.
        name: of this member, the same after a restart.
        reach: raises `KafkaUnavailable` while Kafka is down.
    """

    def __init__(
        self, coordinator: Coordinator, name: str, reach: Callable[[], Awaitable[None]]
    ) -> None:
        self._coordinator = coordinator
        self._name = name
        self._reach = reach
        self._partitions = 0
        self._place: object = None

    def expect(self, partitions: int) -> None:
        """Say how many partitions there are to share."""
        self._partitions = partitions

    async def join(self, assigned: Assigned) -> None:
        """Join; `assigned` gets the owned partitions after every change.

        Raises:
            KafkaUnavailable: Kafka is down.
        """
        await self._reach()
        self._place = self._coordinator.join(self._name, self._partitions, assigned)

    async def still_ours(self, partition: int) -> bool:
        """Say whether `partition` is ours.

        Raises:
            KafkaUnavailable: Kafka is down.
        """
        await self._reach()
        return partition in self._coordinator.owned(self._place)

    async def leave(self) -> None:
        """Leave the group, so that others take over at once."""
        self._coordinator.leave(self._place)
        self._place = None

    def close(self) -> None:
        """Fall silent without leaving."""
        self._coordinator.fall_silent(self._place)
        self._place = None
