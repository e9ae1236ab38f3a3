"""A group of proxies in memory: their half partitions and URLs.

Sessions do not time out: a test calls `MemoryCoordinator.silence` and `forget` instead, and
`let_back` to readmit the member.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from txbroker.core.records import RECORD_VERSION
from txbroker.core.routing import assign, owners
from txbroker.door.protocols import Assignment, Membership, replaced_by
from txbroker.errors import KafkaUnavailable

Assigned: TypeAlias = Callable[[Assignment], None]
Lost: TypeAlias = Callable[[str], None]

CUT_OFF = "no answer of the group's coordinator within the session timeout"
FORGOTTEN = "the group's coordinator has removed this member"


@dataclass(eq=False)
class MemberSlot:
    """A member of the group.

    Attributes:
        name: the same after a restart.
        record_version: the newest that it understands.
        assigned: called with each generation's assignment.
        lost: called when contact is lost.
        peer_url: for calls of other proxies, "" for `url`.
        admin_url: for calls of operators, "" for `url`.
    """

    name: str
    url: str
    record_version: int
    assigned: Assigned
    lost: Lost
    peer_url: str = ""
    admin_url: str = ""
    owned: frozenset[int] = field(default=frozenset(), init=False)
    silent: bool = field(default=False, init=False)
    closed: bool = field(default=False, init=False)

    def assign(self, assignment: Assignment) -> None:
        """Send the member its assignment, unless it is cut off."""
        if not self.silent:
            self.assigned(assignment)

    def lose(self, why: str) -> None:
        if not self.silent:
            self.lost(why)


class MemoryCoordinator:
    """Shares partitions among members; each keeps its own as far as that is balanced."""

    def __init__(self) -> None:
        self._members: dict[str, MemberSlot] = {}
        self._out: dict[str, list[MemberSlot]] = {}
        self._partitions = 0

    def join(self, member: MemberSlot, partitions: int) -> None:
        """Admit a member. It replaces one of the same name, which returns when this one leaves."""
        self._partitions = partitions
        before = self._members.get(member.name)
        self._members[member.name] = member
        if before is not None:
            member.owned = before.owned
            self._put_out(before, replaced_by(member.name, member.url))
        self._share()

    def owned(self, member: MemberSlot | None) -> frozenset[int]:
        """Return the partitions of a member, none if it is cut off."""
        if member is None or member.silent or self._members.get(member.name) is not member:
            return frozenset()
        return member.owned

    def silence(self, name: str) -> None:
        """Cut a member off before its session times out: it is notified, the others are not."""
        member = self._members[name]
        member.lose(CUT_OFF)
        member.silent = True

    def forget(self, name: str) -> None:
        """Remove a member, as Kafka does after a session timeout: the others get its partitions.
        It stays out until `let_back`."""
        self._put_out(self._members.pop(name), FORGOTTEN)
        self._share()

    def let_back(self, name: str) -> None:
        """Readmit a member after `silence` or `forget`."""
        member = self._members.get(name) or self._out[name].pop()
        member.silent = False
        self._members[name] = member
        self._share()

    def fall_silent(self, member: MemberSlot) -> None:
        """End a member without leaving: it keeps its partitions until a member of its name joins,
        or until `forget`."""
        member.silent = member.closed = True
        self._drop(member)

    def leave(self, member: MemberSlot) -> None:
        """Remove a member and give its partitions to the others."""
        member.silent = member.closed = True
        self._drop(member)
        if self._members.get(member.name) is member:
            del self._members[member.name]
            waiting = self._out.get(member.name)
            if waiting:
                self._members[member.name] = waiting.pop()
            self._share()

    def _put_out(self, member: MemberSlot, why: str) -> None:
        member.owned = frozenset()
        if not member.closed:
            self._out.setdefault(member.name, []).append(member)
        member.lose(why)

    def _drop(self, member: MemberSlot) -> None:
        waiting = self._out.get(member.name, [])
        if member in waiting:
            waiting.remove(member)

    def _share(self) -> None:
        """Start a generation; members that lose partitions are notified before those that get
        them."""
        members = self._members
        before = {name: member.owned for name, member in members.items()}
        shares = assign(self._partitions, before)
        urls = {name: member.url for name, member in members.items()}
        owner_urls = owners(self._partitions, shares, urls)
        proxies = tuple(urls[name] for name in sorted(urls))
        version = min(
            (member.record_version for member in members.values()), default=RECORD_VERSION
        )
        peers = {member.url: member.peer_url for member in members.values() if member.peer_url}
        admins = {member.url: member.admin_url for member in members.values() if member.admin_url}
        for name, share in shares.items():
            members[name].owned = share
        for name in sorted(shares, key=lambda name: (bool(shares[name] - before[name]), name)):
            members[name].assign(
                Assignment(shares[name], owner_urls, proxies, version, peers, admins)
            )


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
        """The newest record version that this member announces."""
        self._coordinator = coordinator
        self._name = name
        self._reach = reach
        self._partitions = 0
        self._member: MemberSlot | None = None

    def expect(self, partitions: int) -> None:
        """Set the number of partitions to share."""
        self._partitions = partitions

    async def join(
        self, url: str, assigned: Assigned, lost: Lost, *, peer_url: str = "", admin_url: str = ""
    ) -> None:
        """Join as the proxy at `url`; see `txbroker.door.protocols.Membership`."""
        await self._reach()
        self.close()
        self._member = MemberSlot(
            self._name, url, self.record_version, assigned, lost, peer_url, admin_url
        )
        self._coordinator.join(self._member, self._partitions)

    async def still_ours(self, partition: int) -> bool:
        """Return True if this member owns `partition`."""
        await self._reach()
        if self._member is not None and self._member.silent:
            raise KafkaUnavailable(CUT_OFF)
        return partition in self._coordinator.owned(self._member)

    def in_touch(self) -> bool:
        """Return True if the last assignment is valid: sessions do not time out here."""
        return self._member is not None and not self._member.silent

    async def leave(self) -> None:
        """Leave the group, so that others take over at once; `join` works again."""
        member, self._member = self._member, None
        if member is not None:
            self._coordinator.leave(member)

    def close(self) -> None:
        """End without leaving."""
        member, self._member = self._member, None
        if member is not None:
            self._coordinator.fall_silent(member)
