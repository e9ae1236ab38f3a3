"""What group coordinators know: members and committed offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from aiokafka.coordinator.protocol import ConsumerProtocol

from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.consuming import GroupDescription
from txbroker.door.writing import Fenced, GroupOffsets, Unknown
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.client import (
    GROUP,
    Client,
    KafkaRefused,
    Unanswered,
    coordinator_moved,
    is_retriable,
)
from txbroker.kafka.protocol.codes import (
    COORDINATOR_MOVED,
    MEMBER_FENCED,
    RETRIABLE,
    TRANSACTION_BROKEN,
    Code,
    describe,
)
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import DescribeGroupsV4, ListGroupsV4, OffsetFetchV7
from txbroker.kafka.protocol.transactions import by_topic
from txbroker.net.timers import Backoff

_CHANNEL = "group/offsets"
_ELSEWHERE = COORDINATOR_MOVED | {Code.COORDINATOR_LOADING}
_NO_EPOCH = -1
_AGAIN = RETRIABLE | {Code.REBALANCE_IN_PROGRESS}
"""A member between joining and its assignment may not commit yet."""
Committed: TypeAlias = dict[Partition, StoredOffset]
"""Committed offsets of a group, without partitions that have none."""
_CONSUMERS = ("consumer", "")
"""Protocol types of consumers' groups; groups that have only offsets have none."""


async def ask_group(
    client: Client, group: str, request: Request, backoff: Backoff, *, again: bool = True
) -> Any:
    """Ask a group's coordinator until it answers as the coordinator.

    Args:
        again: send a request again that was not answered.

    Raises:
        Unanswered: only without `again`.
        KafkaUnavailable: no coordinator before the deadline.
    """
    while True:
        try:
            node = await client.coordinator(GROUP, group)
            answer = await client.ask(node, request, _CHANNEL)
            moved = error_codes(answer) & _ELSEWHERE
            if not moved:
                return answer
            raise KafkaRefused(min(moved))
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                client.forget_coordinator(GROUP, group)
            if isinstance(error, Unanswered) and not again:
                raise
            if not is_retriable(error) or not await backoff.pause():
                raise


def error_codes(answer: Any) -> frozenset[int]:
    """Return the error codes of an answer about a group, and about its partitions."""
    codes = {getattr(answer, "error_code", Code.NONE)}
    codes.update(fields[0] for fields in getattr(answer, "groups", ()))
    for _topic, partitions in getattr(answer, "topics", ()):
        codes.update(fields[-1] for fields in partitions)
    return frozenset(codes) - {Code.NONE}


async def store_offsets(
    client: Client,
    stored: GroupOffsets,
    make: Callable[..., Request],
    backoff: Backoff,
    *,
    again: bool = True,
) -> None:
    """Send offsets until they are stored.

    Args:
        make: makes the request of group, generation, member id, instance id and topics.
        again: see `ask_group`.

    Raises:
        Fenced: the member's generation has ended, or another process uses its instance id.
        KafkaUnavailable: whether they are stored is unknown.
    """
    entries = (
        (topic, (number, offset, _NO_EPOCH, metadata))
        for (topic, number), (offset, metadata) in stored.offsets.items()
    )
    group, topics = stored.group, list(by_topic(entries).items())
    while True:
        me = stored.member
        generation, member_id = (-1, "") if me is None else (me.generation, me.member_id)
        instance = None if me is None else me.instance
        request = make(group, generation, member_id, instance, topics)
        codes = error_codes(await ask_group(client, group, request, backoff, again=again))
        if not codes:
            return
        code = min(codes)
        if fenced := codes & MEMBER_FENCED:
            raise Fenced(
                f"group {group} refused the commit of member {member_id!r}, generation "
                f"{generation}: {describe(min(fenced))}"
            )
        if code == Code.OFFSET_METADATA_TOO_LARGE:
            raise InvariantBroken(f"group {group}: the metadata of an offset is too large")
        why = f"cannot commit offsets of group {group}: {describe(code)}"
        if codes & TRANSACTION_BROKEN:
            raise Unknown(why)
        if not codes <= _AGAIN:
            raise KafkaRefused(code, why)
        if not await backoff.pause():
            raise Unknown(why)


def stored_offsets(answer: Any) -> Committed:
    """Return the offsets in an answer to `OffsetFetchV7`."""
    return {
        (topic, number): StoredOffset(offset, metadata or "")
        for topic, partitions in answer.topics
        for number, offset, _epoch, metadata, _code in partitions
        if offset >= 0
    }


def _refuse(answer: Any, what: str) -> None:
    if codes := error_codes(answer):
        code = min(codes)
        raise KafkaRefused(code, f"cannot {what}: {describe(code)}")


async def committed_offsets(client: Client, group: str) -> Committed:
    """Return all committed offsets of a group."""
    answer = await ask_group(client, group, OffsetFetchV7(group, None, False), _backoff(client))
    _refuse(answer, f"load the offsets of group {group}")
    return stored_offsets(answer)


async def describe_group(client: Client, group: str) -> GroupDescription:
    """Return a group as its coordinator describes it."""
    answer = await ask_group(client, group, DescribeGroupsV4([group]), _backoff(client))
    _refuse(answer, f"describe group {group}")
    ((_code, _group, state, _type, _protocol, members, _rights),) = answer.groups
    return GroupDescription(
        state,
        tuple(
            (instance or member, host.removeprefix("/"), _assigned(assignment))
            for member, instance, _client, host, _metadata, assignment in members
        ),
    )


def _assigned(encoded: bytes) -> frozenset[Partition]:
    try:
        assignment = ConsumerProtocol.ASSIGNMENT.decode(encoded).assignment
    except ValueError:  # empty during a rebalance, or of another kind of client
        return frozenset()
    return frozenset((topic, number) for topic, numbers in assignment for number in numbers)


async def list_groups(client: Client) -> list[str]:
    """Return the names of all consumer groups, from every broker."""
    backoff = _backoff(client)
    while True:
        try:
            await client.refresh(())
            answers = await asyncio.gather(
                *(client.ask(node, ListGroupsV4([]), _CHANNEL) for node in client.brokers)
            )
            for answer in answers:
                if answer.error_code:
                    raise KafkaRefused(
                        answer.error_code, f"cannot list groups: {describe(answer.error_code)}"
                    )
            break
        except KafkaUnavailable as error:
            if not is_retriable(error) or not await backoff.pause():
                raise
    return sorted(
        {name for answer in answers for name, kind, _state in answer.groups if kind in _CONSUMERS}
    )


def _backoff(client: Client) -> Backoff:
    return Backoff(client.settings.write_timeout_s, client.settings.retry_backoff_s)
