"""A group of proxies in memory: who owns which half partition, and at which URL.

No session times out by itself: a test says so with `MemoryCoordinator.silence` and `forget`, and
`let_back` lets the member in again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from txbroker.core.assignor import assign, owners
from txbroker.core.records import RECORD_VERSION
from txbroker.door.protocols import Assignment, Membership, replaced_by
from txbroker.errors import KafkaUnavailable

Assigned: TypeAlias = Callable[[Assignment], None]
Lost: TypeAlias = Callable[[str], None]

OUT_OF_TOUCH = "no answer of the group's coordinator within the session timeout"
FORGOTTEN = "the group's coordinator does not know us any more"


class MemberSlot:
    """A member's place in the group.

    Args:
        name: of the member, the same after a restart.
        url: where it is reached.
        record_version: the newest that it understands.
        peer_url: where it takes other proxies' calls, "" where that is `url`.
        admin_url: where it takes operators' calls, "" where that is `url`.
        assigned: is told of each generation.
        lost: is told when touch is lost.
    """

    def __init__(
        self,
        name: str,
        url: str,
        record_version: int,
        assigned: Assigned,
        lost: Lost,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        self.peer_url = peer_url
        self.admin_url = admin_url
        self.name = name
        self.url = url
        self.record_version = record_version
        self.owned: frozenset[int] = frozenset()
        self.silent = False
        self.closed = False
        self._assigned = assigned
        self._lost = lost

    def assign(self, assignment: Assignment) -> None:
        """Tell the member of a generation, unless it hears nothing."""
        if not self.silent:
            self._assigned(assignment)

    def lose(self, why: str) -> None:
        """Tell the member that touch is lost, unless it hears nothing."""
        if not self.silent:
            self._lost(why)


class MemoryCoordinator:
    """Shares partitions among members, each keeping what it has as far as that is fair."""

    def __init__(self) -> None:
        self._members: dict[str, MemberSlot] = {}
        self._out: dict[str, list[MemberSlot]] = {}
        self._partitions = 0

    def join(self, place: MemberSlot, partitions: int) -> None:
        """Let a member in. Another one with its name loses its place to it, and gets it back when
        this one has gone."""
        self._partitions = partitions
        before = self._members.get(place.name)
        self._members[place.name] = place
        if before is not None:
            place.owned = before.owned
            self._put_out(before, replaced_by(place.name, place.url))
        self._share()

    def owned(self, place: MemberSlot | None) -> frozenset[int]:
        """Return what the member at this place owns, nothing if it is not in touch."""
        if place is None or place.silent or self._members.get(place.name) is not place:
            return frozenset()
        return place.owned

    def silence(self, name: str) -> None:
        """Cut a member off before its session is over: it knows, and the others do not."""
        place = self._members[name]
        place.lose(OUT_OF_TOUCH)
        place.silent = True

    def forget(self, name: str) -> None:
        """Take a member out, as Kafka does with one whose session has timed out: the others get
        what it had, and it stays out until `let_back`."""
        self._put_out(self._members.pop(name), FORGOTTEN)
        self._share()

    def let_back(self, name: str) -> None:
        """End what `silence` or `forget` began: the member is in the group again."""
        place = self._members.get(name) or self._out[name].pop()
        place.silent = False
        self._members[name] = place
        self._share()

    def fall_silent(self, place: MemberSlot) -> None:
        """The member at this place ends without leaving: it keeps what it owns until somebody
        with its name joins, or `forget`."""
        place.silent = place.closed = True
        self._drop(place)

    def leave(self, place: MemberSlot) -> None:
        """Give what the member at this place owns to the others."""
        place.silent = place.closed = True
        self._drop(place)
        if self._members.get(place.name) is place:
            del self._members[place.name]
            waiting = self._out.get(place.name)
            if waiting:
                self._members[place.name] = waiting.pop()
            self._share()

    def _put_out(self, place: MemberSlot, why: str) -> None:
        place.owned = frozenset()
        if not place.closed:
            self._out.setdefault(place.name, []).append(place)
        place.lose(why)

    def _drop(self, place: MemberSlot) -> None:
        waiting = self._out.get(place.name, [])
        if place in waiting:
            waiting.remove(place)

    def _share(self) -> None:
        """Begin a generation; who loses something hears of it before who gets it."""
        members = self._members
        before = {name: place.owned for name, place in members.items()}
        shares = assign(self._partitions, before)
        urls = {name: place.url for name, place in members.items()}
        found = owners(self._partitions, shares, urls)
        proxies = tuple(urls[name] for name in sorted(urls))
        version = min((place.record_version for place in members.values()), default=RECORD_VERSION)
        peers = {place.url: place.peer_url for place in members.values() if place.peer_url}
        admins = {place.url: place.admin_url for place in members.values() if place.admin_url}
        for name, share in shares.items():
            members[name].owned = share
        for name in sorted(shares, key=lambda name: (bool(shares[name] - before[name]), name)):
            members[name].assign(Assignment(shares[name], found, proxies, version, peers, admins))


class MemoryMembership(Membership):
    """A `txbroker.door.protocols.Membership` of one door.

    Args:
        coordinator: the group.
        name: of this member, the same after a restart.
        reach: raises `KafkaUnavailable` while Kafka is down.
    """

    def __init__(
        self, coordinator: MemoryCoordinator, name: str, reach: Callable[[], Awaitable[None]]
    ) -> None:
        self.record_version = RECORD_VERSION
        """The newest record version that we understand, as the others are told."""
        self._coordinator = coordinator
        self._name = name
        self._reach = reach
        self._partitions = 0
        self._place: MemberSlot | None = None

    def expect(self, partitions: int) -> None:
        """Say how many partitions there are to share."""
        self._partitions = partitions

    async def join(
        self,
        url: str,
        assigned: Assigned,
        lost: Lost,
        *,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        """Join as the proxy at `url`; see `txbroker.door.protocols.Membership`.

        Raises:
            KafkaUnavailable: Kafka is down.
        """
        await self._reach()
        self.close()
        self._place = MemberSlot(
            self._name, url, self.record_version, assigned, lost, peer_url, admin_url
        )
        self._coordinator.join(self._place, self._partitions)

    async def still_ours(self, partition: int) -> bool:
        """Say whether `partition` is ours.

        Raises:
            KafkaUnavailable: Kafka is down, or we were cut off.
        """
        await self._reach()
        if self._place is not None and self._place.silent:
            raise KafkaUnavailable(OUT_OF_TOUCH)
        return partition in self._coordinator.owned(self._place)

    def in_touch(self) -> bool:
        """Say whether the group's last word is still good: nobody sleeps here."""
        return self._place is not None and not self._place.silent

    async def leave(self) -> None:
        """Leave the group, so that others take over at once. `join` works again."""
        place, self._place = self._place, None
        if place is not None:
            self._coordinator.leave(place)

    def close(self) -> None:
        """Fall silent without leaving."""
        place, self._place = self._place, None
        if place is not None:
            self._coordinator.fall_silent(place)
