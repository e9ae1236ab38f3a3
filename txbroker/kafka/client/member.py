"""What a member of a consumer group says to its coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar, NamedTuple

from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.group import JoinGroupRequest, SyncGroupRequest
from aiokafka.protocol.types import Array, Boolean, Bytes, Int16, Int32, Schema, String

from txbroker.core.assignor import NOBODY, OwnedPartitions
from txbroker.door.protocols import Assignment
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, coordinator_moved
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
from txbroker.net.backoff import Backoff

_PROTOCOL_TYPE = "consumer"
_PROTOCOL = "txbroker-sticky"
_NO_MEMBER = ""
_ANSWER_ROOM_S = 5.0
_JOIN_LANE = "group/join"
_LEAVE_LANE = "group/leave"
_DESCRIBE_LANE = "group/describe"
_LEAVE_TIMEOUT_S = 2.0
_LEAVE_MAX_S = 5.0
"""Leaving takes no longer, whoever is silent: looking for the coordinator asks one broker after
another, and whoever stops a proxy waits for it."""


class _HeartbeatResponse(Response):
    API_KEY = 12
    API_VERSION = 3
    SCHEMA = Schema(("throttle_time_ms", Int32), ("error_code", Int16))


class _HeartbeatStruct(RequestStruct):
    API_KEY = 12
    API_VERSION = 3
    RESPONSE_TYPE = _HeartbeatResponse
    SCHEMA = Schema(
        ("group", String("utf-8")),
        ("generation_id", Int32),
        ("member_id", String("utf-8")),
        ("group_instance_id", String("utf-8")),
    )


class _Heartbeat(Request[_HeartbeatStruct]):
    """With the instance id, which the library's own heartbeat lacks: so a second process with
    the same instance id is noticed."""

    API_KEY: ClassVar[int] = 12

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[_HeartbeatStruct]) -> _HeartbeatStruct:
        return request_struct_class(*self._fields)


class _LeaveResponse(Response):
    API_KEY = 13
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        (
            "members",
            Array(
                ("member_id", String("utf-8")),
                ("group_instance_id", String("utf-8")),
                ("error_code", Int16),
            ),
        ),
    )


class _LeaveStruct(RequestStruct):
    API_KEY = 13
    API_VERSION = 3
    RESPONSE_TYPE = _LeaveResponse
    SCHEMA = Schema(
        ("group", String("utf-8")),
        (
            "members",
            Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8"))),
        ),
    )


class _Leave(Request[_LeaveStruct]):
    """Of a static member, which the library never lets go."""

    API_KEY: ClassVar[int] = 13

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[_LeaveStruct]) -> _LeaveStruct:
        return request_struct_class(*self._fields)


class _DescribeResponse(Response):
    API_KEY = 15
    API_VERSION = 4
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "groups",
            Array(
                ("error_code", Int16),
                ("group", String("utf-8")),
                ("state", String("utf-8")),
                ("protocol_type", String("utf-8")),
                ("protocol", String("utf-8")),
                (
                    "members",
                    Array(
                        ("member_id", String("utf-8")),
                        ("group_instance_id", String("utf-8")),
                        ("client_id", String("utf-8")),
                        ("client_host", String("utf-8")),
                        ("member_metadata", Bytes),
                        ("member_assignment", Bytes),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
    )


class _DescribeStruct(RequestStruct):
    API_KEY = 15
    API_VERSION = 4
    RESPONSE_TYPE = _DescribeResponse
    SCHEMA = Schema(
        ("groups", Array(String("utf-8"))),
        ("include_authorized_operations", Boolean),
    )


class _Describe(Request[_DescribeStruct]):
    """With the members' instance ids, which the library's own versions lack."""

    API_KEY: ClassVar[int] = 15

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[_DescribeStruct]) -> _DescribeStruct:
        return request_struct_class(*self._fields)


class Holder(NamedTuple):
    """Who has an instance id: its URL and the host it connects from, "" where unknown."""

    url: str
    host: str


class Joined(NamedTuple):
    """A generation of the group, and what it gives us.

    `outdated` says that the others know something else of us than what is so, or that nobody
    has thought of us: `Member.ask_anew`, and join again.
    """

    generation: int
    assignment: Assignment
    outdated: bool


class Member:
    """One member of the proxies' group. It keeps its partitions over a restart, because the
    coordinator knows it by its instance id.

    Args:
        client: the connections.
        partitions: how many there are to share.
        me: what it tells the others of itself.
    """

    def __init__(self, client: Client, partitions: int, me: SelfMetadata) -> None:
        settings = client.settings
        self._client = client
        self._group = settings.group_id
        self._instance = settings.instance_id
        self._topic = settings.half_topic
        self._partitions = partitions
        self._me = me
        self._session_ms = round(settings.session_timeout_s * 1000)
        # A join is answered when all members have joined, or their time is up.
        self._join_timeout_s = settings.session_timeout_s + _ANSWER_ROOM_S
        self._member_id = _NO_MEMBER
        self._held = OwnedPartitions()
        self._last = PreviousAssignment()
        self._asks = 0

    def forget(self) -> None:
        """Join as new next time: the coordinator does not know our member id any more."""
        self._member_id = _NO_MEMBER

    def ask_anew(self) -> None:
        """Have the next join make a new generation, in which the others learn what we say.

        The coordinator gives a static member that comes back its old place, and tells nobody; it
        makes a new generation only when a member whose id it knows says something else.
        """
        self._asks += 1

    async def join(self) -> Joined:
        """Join the group, or its next generation, naming what we own so that we may keep it.

        Raises:
            KafkaRefused: the coordinator's error; `forget` where it does not know us.
            KafkaUnavailable: it does not answer.
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
        said = MemberMetadata(
            self._me.url,
            self._me.record_version,
            to_runs(self._held.partitions),
            self._held.generation,
            self._asks,
            peer_url=self._me.peer_url,
            admin_url=self._me.admin_url,
        )
        encoded: bytes = ConsumerProtocol.METADATA(0, [self._topic], encode_metadata(said)).encode()
        return encoded

    def _assign(
        self, generation: int, members: list[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes]]:
        said = {instance or member: _said(metadata) for member, instance, metadata in members}
        told, shares = make_assignment(self._partitions, generation, said, self._last)
        data = encode_assignment(told)
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
        told, mine, left_out = None, frozenset[int](), False
        try:
            found = ConsumerProtocol.ASSIGNMENT.decode(encoded)
            told = decode_assignment(found.user_data)
            mine = frozenset(
                number
                for topic, numbers in found.assignment
                if topic == self._topic
                for number in numbers
            )
        except ValueError:  # nothing, or rubbish
            left_out = True
        known = assignment(self._partitions, mine, told, self._me)
        self._held, self._last = (
            OwnedPartitions(known.mine, generation),
            PreviousAssignment(generation, told),
        )
        return Joined(generation, known, left_out or is_outdated(told, self._me))

    async def heartbeat(self, generation: int, lane: str) -> int:
        """Say that we live; return the coordinator's error code.

        Raises:
            KafkaUnavailable: it does not answer.
        """
        request = _Heartbeat(self._group, generation, self._member_id, self._instance)
        node = await self._client.group_coordinator(self._group)
        try:
            answer = await self._client.ask(node, request, lane)
        except KafkaUnavailable:
            self._client.forget_group_coordinator(self._group)
            raise
        if answer.error_code in RETRIABLE:
            if answer.error_code in COORDINATOR_MOVED:
                self._client.forget_group_coordinator(self._group)
            raise KafkaRefused(answer.error_code)
        return int(answer.error_code)

    async def holder(self) -> Holder | None:
        """Return who has our instance id now, None where the group does not say.

        Raises:
            KafkaUnavailable: no answer.
        """
        node = await self._client.group_coordinator(self._group)
        answer = await self._client.ask(node, _Describe([self._group], False), _DESCRIBE_LANE)
        for member in (member for group in answer.groups for member in group[5]):
            _, instance, _, host, metadata, _ = member
            # While the group settles, the coordinator tells no metadata.
            if instance == self._instance and (url := _said(metadata).url) != NOBODY:
                return Holder(url, host.removeprefix("/"))
        return None

    async def leave(self) -> None:
        """Leave the group at once; without an answer the session's end does the same."""
        member, self._member_id = self._member_id, _NO_MEMBER
        self._held, self._last = OwnedPartitions(), PreviousAssignment()
        if member == _NO_MEMBER:
            # By the instance id alone Kafka would put out whoever has it now.
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_MAX_S):
                await self._leave(member)

    async def _leave(self, member: str) -> None:
        request = _Leave(self._group, [(member, self._instance)])
        backoff = Backoff(_LEAVE_TIMEOUT_S, self._client.settings.retry_backoff_s)
        while True:
            with contextlib.suppress(KafkaUnavailable):
                node = await self._client.group_coordinator(self._group)
                answer = await self._client.ask(node, request, _LEAVE_LANE)
                if answer.error_code not in RETRIABLE:
                    return
            self._client.forget_group_coordinator(self._group)
            if not await backoff.pause():
                return

    def let_go(self) -> None:
        """Stop waiting for a join: the broker answers nothing else on its connection meanwhile."""
        self._client.close_channels(_JOIN_LANE)

    async def _ask(self, request: Request[Any]) -> Any:
        try:
            node = await self._client.group_coordinator(self._group)
            answer = await self._client.ask(node, request, _JOIN_LANE, self._join_timeout_s)
            if answer.error_code != Code.NONE:
                raise KafkaRefused(
                    answer.error_code, f"group {self._group}: {describe(answer.error_code)}"
                )
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                self._client.forget_group_coordinator(self._group)
            raise
        return answer


def _said(metadata: bytes) -> MemberMetadata:
    try:
        return decode_metadata(ConsumerProtocol.METADATA.decode(metadata).user_data)
    except ValueError:
        return MemberMetadata()
