"""What a member of a consumer group says to its coordinator, and who gets which partition."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.group import JoinGroupRequest, SyncGroupRequest
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client import Client, KafkaRefused, coordinator_moved
from txbroker.kafka.codes import COORDINATOR_MOVED, Code, describe

_PROTOCOL_TYPE = "consumer"
_PROTOCOL = "txbroker-sticky"
_NO_MEMBER = ""
_ANSWER_ROOM_S = 5.0
_LEAVE_LANE = "group/leave"


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


class Joined(NamedTuple):
    """A generation of the group, and what it gives us."""

    generation: int
    partitions: frozenset[int]


class Member:
    """One member of the proxies' group. It keeps its partitions over a restart, because the
    coordinator knows it by its instance id."""

    def __init__(self, client: Client, partitions: int) -> None:
        settings = client.settings
        self._client = client
        self._group = settings.group_id
        self._instance = settings.instance_id
        self._topic = settings.half_topic
        self._partitions = partitions
        self._session_ms = round(settings.session_timeout_s * 1000)
        # A join is answered when all members have joined, or their time is up.
        self._join_timeout_s = settings.session_timeout_s + _ANSWER_ROOM_S
        self._member_id = _NO_MEMBER

    def forget(self) -> None:
        """Join as new next time: the coordinator does not know our member id any more."""
        self._member_id = _NO_MEMBER

    async def join(self, owned: frozenset[int]) -> Joined:
        """Join the group, or its next generation, naming what we own so that we may keep it.

        Raises:
            KafkaRefused: the coordinator's error; `forget` where it does not know us.
            KafkaUnavailable: it does not answer.
        """
        metadata = ConsumerProtocol.METADATA(0, [self._topic], msgspec.json.encode(sorted(owned)))
        answer = await self._ask(
            JoinGroupRequest(
                self._group,
                self._session_ms,
                self._session_ms,
                self._member_id,
                self._instance,
                _PROTOCOL_TYPE,
                [(_PROTOCOL, metadata.encode())],
            )
        )
        self._member_id = answer.member_id
        assignment: list[tuple[str, bytes]] = []
        if answer.leader_id == answer.member_id:
            assignment = self._assign(answer.members)
        sync = await self._ask(
            SyncGroupRequest(
                self._group, answer.generation_id, self._member_id, self._instance, assignment
            )
        )
        return Joined(answer.generation_id, self._decode(sync.member_assignment))

    def _assign(self, members: list[tuple[str, str, bytes]]) -> list[tuple[str, bytes]]:
        owned = {instance or member: _owned(metadata) for member, instance, metadata in members}
        shares = share_out(self._partitions, owned)
        return [
            (
                member,
                ConsumerProtocol.ASSIGNMENT(
                    0, [(self._topic, sorted(shares[instance or member]))], b""
                ).encode(),
            )
            for member, instance, _metadata in members
        ]

    def _decode(self, assignment: bytes) -> frozenset[int]:
        if not assignment:
            return frozenset()
        found = ConsumerProtocol.ASSIGNMENT.decode(assignment)
        return frozenset(
            number
            for topic, numbers in found.assignment
            if topic == self._topic
            for number in numbers
        )

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
        if answer.error_code in COORDINATOR_MOVED:
            self._client.forget_group_coordinator(self._group)
            raise KafkaRefused(answer.error_code)
        return int(answer.error_code)

    async def leave(self) -> None:
        """Leave the group at once; without an answer the session's end does the same."""
        with contextlib.suppress(KafkaUnavailable):
            node = await self._client.group_coordinator(self._group)
            members = [(self._member_id, self._instance)]
            await self._client.ask(node, _Leave(self._group, members), _LEAVE_LANE)

    async def _ask(self, request: Request[Any]) -> Any:
        try:
            node = await self._client.group_coordinator(self._group)
            answer = await self._client.ask(node, request, "group/join", self._join_timeout_s)
            if answer.error_code != Code.NONE:
                raise KafkaRefused(
                    answer.error_code, f"group {self._group}: {describe(answer.error_code)}"
                )
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                self._client.forget_group_coordinator(self._group)
            raise
        return answer


def _owned(metadata: bytes) -> frozenset[int]:
    """Return what a member says that it owned; a member that says nonsense owned nothing."""
    try:
        data = ConsumerProtocol.METADATA.decode(metadata).user_data
        return frozenset(msgspec.json.decode(data or b"[]", type=list[int]))
    except (ValueError, msgspec.DecodeError):
        return frozenset()


def share_out(partitions: int, owned: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Share partitions out evenly among members, leaving with each what it has. Pure.

    `owned` says what each member had. Shares differ by one at most; where some get one more, it
    is those that had most.
    """
    names = sorted(owned, key=lambda name: (-len(owned[name]), name))
    if not names:
        return {}
    base, more = divmod(partitions, len(names))
    free = set(range(partitions))
    shares: dict[str, set[int]] = {}
    quotas = {name: base + (number < more) for number, name in enumerate(names)}
    for name in names:
        kept = sorted(owned[name] & free)[: quotas[name]]
        shares[name] = set(kept)
        free.difference_update(kept)
    rest = sorted(free)
    for name in names:
        count = quotas[name] - len(shares[name])
        shares[name].update(rest[:count])
        rest = rest[count:]
    return {name: frozenset(share) for name, share in shares.items()}
