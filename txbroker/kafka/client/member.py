"""The requests of one consumer group member to its coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import GROUP, Client, KafkaRefused, coordinator_moved
from txbroker.kafka.protocol.codes import COORDINATOR_MOVED, RETRIABLE, Code, describe
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import (
    DescribeGroupsV4,
    HeartbeatV3,
    JoinGroupV5,
    LeaveGroupV3,
    SyncGroupV3,
)
from txbroker.net.timers import Backoff

_PROTOCOL_TYPE = "consumer"
_NO_MEMBER = ""
_NO_GENERATION = -1
_JOIN_MARGIN_S = 5.0
_LEAVE_CHANNEL = "group/leave"
_DESCRIBE_CHANNEL = "group/describe"
_LEAVE_TIMEOUT_S = 2.0
_LEAVE_MAX_S = 5.0
"""Limits leaving even if brokers are unresponsive: looking up the coordinator asks one after
another, and the process that stops waits for it."""

_NUMBERS = itertools.count()

A = TypeVar("A")
"""What a member knows of its assignment."""


class InstanceHolder(NamedTuple):
    """The process that uses an instance id: its address, and the host it connects from or ""."""

    address: str
    host: str


class Joined(NamedTuple, Generic[A]):
    """A generation of the group, and this member's assignment.

    Attributes:
        outdated: the group does not know this member's newest metadata, or it got no assignment.
            Then call `Member.request_rebalance` and join again.
        sent_at: event loop time when the last request of the join was sent.
    """

    generation: int
    assignment: A
    outdated: bool
    sent_at: float


class MemberIdentity(Struct):
    """A member as the coordinator knows it; updated by each join.

    Attributes:
        generation: the newest, -1 before the first one; its assignment may be on its way. Until
            then the member keeps what it has reported as owned.
        member_id: assigned by the coordinator.
        instance: the instance id of a static member; None for a dynamic one.
    """

    generation: int = _NO_GENERATION
    member_id: str = _NO_MEMBER
    instance: str | None = None


class Member(Generic[A]):
    """A member of a consumer group: static, which keeps its partitions over a restart, or dynamic.

    Subclasses say what its metadata are, and how a leader assigns partitions.

    Args:
        instance: the instance id of a static member; None for a dynamic one.
        protocol: name of the assignment protocol, the same for all members of the group.
    """

    def __init__(
        self, client: Client, group: str, instance: str | None, session_s: float, protocol: str
    ) -> None:
        self.session_s = session_s
        self.identity = MemberIdentity(instance=instance)
        self.generation = _NO_GENERATION
        """The newest generation, for heartbeats; its assignment may be on its way."""
        self._client = client
        self._group = group
        self._instance = instance
        self._protocol = protocol
        self._session_ms = round(session_s * 1000)
        # The coordinator answers when all members have joined, or after the session timeout.
        self._join_timeout_s = session_s + _JOIN_MARGIN_S
        # Members that share a client may have to join at the same time, and wait for one another.
        self._join_channel = f"group/{next(_NUMBERS)}/join"
        self._member_id = _NO_MEMBER
        self._rebalance_requests = 0

    # --- what subclasses define --------------------------------------------------------------

    def _metadata(self) -> bytes:
        """Return this member's metadata, which the leader gets."""
        raise NotImplementedError

    async def _assign(
        self, generation: int, members: list[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes]]:
        """As the leader, return the assignment of each member.

        Args:
            members: member id, instance id or None, and metadata of each.
        """
        raise NotImplementedError

    def _began(self, generation: int) -> None:
        """Take note of a generation with this member, before its assignment.

        Raises:
            KafkaRefused: the member must join as a new one.
        """

    def _joined(self, generation: int, encoded: bytes) -> tuple[A, bool]:
        """Take an assignment, which may be malformed; return it, and whether it is outdated."""
        raise NotImplementedError

    def _address(self, metadata: bytes) -> str:
        """Return where the process with these metadata is, "" if unknown."""
        raise NotImplementedError

    # --- requests ----------------------------------------------------------------------------

    def forget(self) -> None:
        """Join as a new member next time: the coordinator does not know the member id."""
        self._member_id, self.generation = _NO_MEMBER, _NO_GENERATION

    def request_rebalance(self) -> None:
        """Make the next join start a new generation, which distributes this member's metadata.

        The coordinator gives a member that rejoins its old assignment, without a rebalance. It
        rebalances only if the metadata of a known member id change.
        """
        self._rebalance_requests += 1

    async def join(self) -> Joined[A]:
        """Join the group, or its next generation, with the owned partitions, so as to keep them.

        Raises:
            KafkaRefused: the coordinator's error; call `forget` if it does not know the member.
        """
        answer = await self._ask_to_join()
        if answer.error_code == Code.MEMBER_ID_REQUIRED:
            # A dynamic member joins with the id that it is given (KIP-394).
            self._member_id = answer.member_id
            answer = await self._ask_to_join()
        self._check(answer)
        self._began(answer.generation_id)
        self._member_id = self.identity.member_id = answer.member_id
        self.generation = self.identity.generation = answer.generation_id
        shares: list[tuple[str, bytes]] = []
        if answer.leader_id == answer.member_id:
            shares = await self._assign(answer.generation_id, answer.members)
        sent_at = asyncio.get_running_loop().time()
        sync = await self._ask(
            SyncGroupV3(self._group, answer.generation_id, self._member_id, self._instance, shares)
        )
        self._check(sync)
        assignment, outdated = self._joined(answer.generation_id, sync.member_assignment)
        return Joined(answer.generation_id, assignment, outdated, sent_at)

    async def _ask_to_join(self) -> Any:
        return await self._ask(
            JoinGroupV5(
                self._group,
                self._session_ms,
                self._session_ms,
                self._member_id,
                self._instance,
                _PROTOCOL_TYPE,
                [(self._protocol, self._metadata())],
            )
        )

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

    async def holder(self) -> InstanceHolder | None:
        """Return the process that uses our instance id now; None if unknown."""
        node = await self._client.coordinator(GROUP, self._group)
        answer = await self._client.ask(node, DescribeGroupsV4([self._group]), _DESCRIBE_CHANNEL)
        for member in (member for group in answer.groups for member in group[5]):
            _, instance, _, host, metadata, _ = member
            # During a rebalance the coordinator returns no metadata.
            if instance == self._instance and (address := self._address(metadata)):
                return InstanceHolder(address, host.removeprefix("/"))
        return None

    async def leave(self) -> None:
        """Leave the group now; without an answer the session timeout does the same."""
        member = self._member_id
        self.forget()
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
        self._client.close_channels(self._join_channel)

    async def _ask(self, request: Request) -> Any:
        try:
            node = await self._client.coordinator(GROUP, self._group)
            answer = await self._client.ask(node, request, self._join_channel, self._join_timeout_s)
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                self._client.forget_coordinator(GROUP, self._group)
            raise
        if answer.error_code in COORDINATOR_MOVED:
            self._client.forget_coordinator(GROUP, self._group)
        return answer

    def _check(self, answer: Any) -> None:
        if answer.error_code != Code.NONE:
            raise KafkaRefused(
                answer.error_code, f"group {self._group}: {describe(answer.error_code)}"
            )
