"""The requests of one consumer group member to its coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.protocol.api import Request
from aiokafka.protocol.group import JoinGroupRequest, SyncGroupRequest

from txbroker.core.routing import UNKNOWN_OWNER, OwnedPartitions
from txbroker.door.protocols import Assignment
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import GROUP, Client, KafkaRefused, coordinator_moved
from txbroker.kafka.protocol.codes import COORDINATOR_MOVED, RETRIABLE, Code, describe
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
from txbroker.kafka.protocol.schemas import DescribeGroupsV4, HeartbeatV3, LeaveGroupV3
from txbroker.net.timers import Backoff

_PROTOCOL_TYPE = "consumer"
_PROTOCOL = "txbroker-sticky"
_NO_MEMBER = ""
_JOIN_MARGIN_S = 5.0
_JOIN_CHANNEL = "group/join"
_LEAVE_CHANNEL = "group/leave"
_DESCRIBE_CHANNEL = "group/describe"
_LEAVE_TIMEOUT_S = 2.0
_LEAVE_MAX_S = 5.0
"""Limits leaving even if brokers are unresponsive: looking up the coordinator asks one after
another, and the process that stops waits for it."""


class Holder(NamedTuple):
    """The process that uses an instance id: its URL, and the host it connects from or ""."""

    url: str
    host: str


class Joined(NamedTuple):
    """A generation of the group, and this member's assignment.

    `outdated`: the other members have old metadata of this one, or it got no assignment. Then call
    `Member.request_rebalance` and join again.
    """

    generation: int
    assignment: Assignment
    outdated: bool


class Member:
    """A static member of the proxies' group, which keeps its partitions over a restart."""

    def __init__(self, client: Client, partitions: int, me: SelfMetadata) -> None:
        settings = client.settings
        self._client = client
        self._group = settings.group_id
        self._instance = settings.instance_id
        self._topic = settings.half_topic
        self._partitions = partitions
        self._me = me
        self._session_ms = round(settings.session_timeout_s * 1000)
        # The coordinator answers when all members have joined, or after the session timeout.
        self._join_timeout_s = settings.session_timeout_s + _JOIN_MARGIN_S
        self._member_id = _NO_MEMBER
        self._held = OwnedPartitions()
        self._last = PreviousAssignment()
        self._rebalance_requests = 0

    def forget(self) -> None:
        """Join as a new member next time: the coordinator does not know the member id."""
        self._member_id = _NO_MEMBER

    def request_rebalance(self) -> None:
        """Make the next join start a new generation, which distributes this member's metadata.

        The coordinator gives a static member that rejoins its old assignment, without a rebalance.
        It rebalances only if the metadata of a known member id change.
        """
        self._rebalance_requests += 1

    async def join(self) -> Joined:
        """Join the group, or its next generation, with the owned partitions, so as to keep them.

        Raises:
            KafkaRefused: the coordinator's error; call `forget` if it does not know the member.
        """
        answer = await self._ask(
            JoinGroupRequest(
                self._group,
                self._session_ms,
                self._session_ms,
                self._member_id,
                self._instance,
                _PROTOCOL_TYPE,
                [(_PROTOCOL, self._metadata())],
            )
        )
        self._member_id = answer.member_id
        shares: list[tuple[str, bytes]] = []
        if answer.leader_id == answer.member_id:
            shares = self._assign(answer.generation_id, answer.members)
        sync = await self._ask(
            SyncGroupRequest(
                self._group, answer.generation_id, self._member_id, self._instance, shares
            )
        )
        return self._joined(answer.generation_id, sync.member_assignment)

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

    def _assign(
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

    def _joined(self, generation: int, encoded: bytes) -> Joined:
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
        return Joined(generation, known, left_out or is_outdated(group, self._me))

    async def heartbeat(self, generation: int, channel: str) -> int:
        """Send a heartbeat; return the coordinator's error code."""
        request = HeartbeatV3(self._group, generation, self._member_id, self._instance)
        node = await self._client.coordinator(GROUP, self._group)
        try:
            answer = await self._client.ask(node, request, channel)
        except KafkaUnavailable:
            self._client.forget_coordinator(GROUP, self._group)
            raise
        if answer.error_code in RETRIABLE:
            if answer.error_code in COORDINATOR_MOVED:
                self._client.forget_coordinator(GROUP, self._group)
            raise KafkaRefused(answer.error_code)
        return int(answer.error_code)

    async def holder(self) -> Holder | None:
        """Return the process that uses our instance id now; None if unknown."""
        node = await self._client.coordinator(GROUP, self._group)
        answer = await self._client.ask(
            node, DescribeGroupsV4([self._group], False), _DESCRIBE_CHANNEL
        )
        for member in (member for group in answer.groups for member in group[5]):
            _, instance, _, host, metadata, _ = member
            # During a rebalance the coordinator returns no metadata.
            if instance == self._instance and (url := _decode(metadata).url) != UNKNOWN_OWNER:
                return Holder(url, host.removeprefix("/"))
        return None

    async def leave(self) -> None:
        """Leave the group now; without an answer the session timeout does the same."""
        member, self._member_id = self._member_id, _NO_MEMBER
        self._held, self._last = OwnedPartitions(), PreviousAssignment()
        if member == _NO_MEMBER:
            # By the instance id alone Kafka would remove the process that uses it now.
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leave(member), _LEAVE_MAX_S)

    async def _leave(self, member: str) -> None:
        request = LeaveGroupV3(self._group, [(member, self._instance)])
        backoff = Backoff(_LEAVE_TIMEOUT_S, self._client.settings.retry_backoff_s)
        while True:
            with contextlib.suppress(KafkaUnavailable):
                node = await self._client.coordinator(GROUP, self._group)
                answer = await self._client.ask(node, request, _LEAVE_CHANNEL)
                if answer.error_code not in RETRIABLE:
                    return
            self._client.forget_coordinator(GROUP, self._group)
            if not await backoff.pause():
                return

    def cancel_join(self) -> None:
        """Close the channel of a join in flight: the broker answers nothing else on it
        meanwhile."""
        self._client.close_channels(_JOIN_CHANNEL)

    async def _ask(self, request: Request[Any]) -> Any:
        try:
            node = await self._client.coordinator(GROUP, self._group)
            answer = await self._client.ask(node, request, _JOIN_CHANNEL, self._join_timeout_s)
            if answer.error_code != Code.NONE:
                raise KafkaRefused(
                    answer.error_code, f"group {self._group}: {describe(answer.error_code)}"
                )
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                self._client.forget_coordinator(GROUP, self._group)
            raise
        return answer


def _decode(metadata: bytes) -> MemberMetadata:
    try:
        return decode_metadata(ConsumerProtocol.METADATA.decode(metadata).user_data)
    except ValueError:
        return MemberMetadata()
