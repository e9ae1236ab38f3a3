"""The assignment of half partitions: the proxies are static members of a consumer group.

It uses no consumer: one that is not polled leaves the group and still believes that it owns its
partitions. Safety does not depend on this: a claim fences the previous owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiokafka.coordinator.protocol import ConsumerProtocol

from txbroker.core.records import RECORD_VERSION
from txbroker.core.routing import OwnedPartitions
from txbroker.door.protocols import Assignment, Membership, replaced_by
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.member import InstanceHolder, Member
from txbroker.kafka.client.member_loop import MemberLoop
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.generation import (
    MemberMetadata,
    PreviousAssignment,
    SelfMetadata,
    assignment,
    decode_assignment,
    decode_metadata,
    encode_assignment,
    encode_metadata,
    is_outdated,
    make_assignment,
    to_runs,
)

_PROTOCOL = "txbroker-sticky"
_HEARTBEATS_PER_SESSION = 10
_HEARTBEAT_MAX_S = 0.3  # delay until the others notice that a member has left
_PERMANENT = {
    Code.GROUP_AUTHORIZATION_FAILED: "may not be used by this proxy: grant it Read on the group",
    Code.INCONSISTENT_GROUP_PROTOCOL: "is used by other consumers: set another topic_prefix",
    Code.INVALID_GROUP_ID: "is no valid group id: set another topic_prefix",
    Code.INVALID_SESSION_TIMEOUT: "cannot use a session_timeout_s of {session_s:g}: set it between "
    "the brokers' group.min.session.timeout.ms and group.max.session.timeout.ms",
    Code.GROUP_MAX_SIZE_REACHED: "has no room for another proxy: raise the brokers' group.max.size",
}
"""Errors that a retry does not cure, so that the start fails."""


class ProxyMember(Member[Assignment]):
    """A member of the proxies' group, static, so that it keeps its partitions over a restart."""

    def __init__(self, client: Client, partitions: int, me: SelfMetadata) -> None:
        settings = client.settings
        super().__init__(
            client, settings.group_id, settings.instance_id, settings.session_timeout_s, _PROTOCOL
        )
        self._topic = settings.half_topic
        self._partitions = partitions
        self._me = me
        self._held = OwnedPartitions[int]()
        self._last = PreviousAssignment()

    def _metadata(self) -> bytes:
        metadata = MemberMetadata(
            self._me.url,
            self._me.record_version,
            to_runs(self._held.partitions),
            self._held.generation,
            self._rebalance_requests,
            peer_url=self._me.peer_url,
            admin_url=self._me.admin_url,
        )
        encoded: bytes = ConsumerProtocol.METADATA(
            0, [self._topic], encode_metadata(metadata)
        ).encode()
        return encoded

    async def _assign(
        self, generation: int, members: list[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes]]:
        metadata = {instance or member: _decode(encoded) for member, instance, encoded in members}
        group, shares = make_assignment(self._partitions, generation, metadata, self._last)
        data = encode_assignment(group)
        return [
            (
                member,
                ConsumerProtocol.ASSIGNMENT(
                    0, [(self._topic, sorted(shares[instance or member]))], data
                ).encode(),
            )
            for member, instance, _metadata in members
        ]

    def _joined(self, generation: int, encoded: bytes) -> tuple[Assignment, bool]:
        group, mine, left_out = None, frozenset[int](), False
        try:
            decoded = ConsumerProtocol.ASSIGNMENT.decode(encoded)
            group = decode_assignment(decoded.user_data)
            mine = frozenset(
                number
                for topic, numbers in decoded.assignment
                if topic == self._topic
                for number in numbers
            )
        except ValueError:  # empty or malformed
            left_out = True
        known = assignment(self._partitions, mine, group, self._me)
        self._held, self._last = (
            OwnedPartitions(known.mine, generation),
            PreviousAssignment(generation, group),
        )
        return known, left_out or is_outdated(group, self._me)

    def _address(self, metadata: bytes) -> str:
        return _decode(metadata).url

    async def leave(self) -> None:
        """Leave the group, and forget the partitions."""
        self._held, self._last = OwnedPartitions(), PreviousAssignment()
        await super().leave()


def _decode(metadata: bytes) -> MemberMetadata:
    try:
        return decode_metadata(ConsumerProtocol.METADATA.decode(metadata).user_data)
    except ValueError:
        return MemberMetadata()


class KafkaMembership(Membership):
    """A `Membership` on a real Kafka."""

    def __init__(self, client: Client) -> None:
        self.record_version = RECORD_VERSION
        """The newest supported record version, for the metadata."""
        self._client = client
        self._session_s = client.settings.session_timeout_s
        self._partitions = 0
        self._member: ProxyMember | None = None
        self._loop: MemberLoop[Assignment] | None = None

    def expect(self, partitions: int) -> None:
        """Set the number of partitions to assign."""
        self._partitions = partitions

    async def join(
        self,
        url: str,
        assigned: Callable[[Assignment], None],
        lost: Callable[[str], None],
        *,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        """Join as the proxy at `url`; return after the first assignment. See `Membership`.

        While another process uses the instance id this one retries, and joins once it has gone.
        """
        await self.close()
        settings = self._client.settings
        me = SelfMetadata(settings.instance_id, url, self.record_version, peer_url, admin_url)
        self._member = ProxyMember(self._client, self._partitions, me)
        self._loop = MemberLoop(
            self._member,
            min(self._session_s / _HEARTBEATS_PER_SESSION, _HEARTBEAT_MAX_S),
            {
                code: f"group {settings.group_id} {why.format(session_s=self._session_s)}"
                for code, why in _PERMANENT.items()
            },
            _Hearer(settings.instance_id, assigned, lost),
        )
        await self._loop.start()

    async def still_ours(self, partition: int) -> bool:
        """Send a heartbeat in the current generation; return whether `partition` is assigned.

        After False, `assigned` or `lost` reports the new assignment.
        """
        if self._loop is None:
            return False
        try:
            async with asyncio.timeout(self._session_s):
                joined = await self._loop.confirm()
        except TimeoutError:
            raise KafkaUnavailable(
                "the rebalance of the proxies' group does not end: retry"
            ) from None
        return joined is not None and partition in joined.assignment.mine

    def in_touch(self) -> bool:
        """Return whether the coordinator has answered within the session timeout."""
        return self._loop is not None and self._loop.in_touch()

    async def leave(self) -> None:
        """Leave the group, so that others take over now. `join` works again."""
        await self.close()
        member, self._member = self._member, None
        if member is not None:
            await member.leave()

    async def close(self) -> None:
        """Stop without leaving: a member that rejoins within the session keeps its partitions."""
        loop, self._loop = self._loop, None
        if loop is not None:
            await loop.close()


class _Hearer:
    """Passes on what happens to the member of a proxy."""

    def __init__(
        self, instance: str, assigned: Callable[[Assignment], None], lost: Callable[[str], None]
    ) -> None:
        self.assigned = assigned
        self.lost = lost
        self._instance = instance

    def replaced_by(self, holder: InstanceHolder) -> str:
        return replaced_by(self._instance, *holder)
