"""What consumers of a group send one another: subscriptions of members, and assignments.

Both are in Kafka's consumer protocol, so that its tools show topics and partitions. JSON in the
field for user data adds what the protocol lacks. Any client with the right may join, so malformed
data must not break the assignment: such a member owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.protocol.struct import Struct as WireStruct
from aiokafka.protocol.types import Array, Bytes, Int16, Int32, Schema, String
from msgspec import Struct

from txbroker.core.consuming.assignment import Subscription
from txbroker.core.records import Partition
from txbroker.kafka.protocol.transactions import by_topic

_VERSION = 2
_FIRST_WITH_GENERATION = 2
_DECODE_ERRORS = (ValueError, msgspec.DecodeError, RecursionError)


class _First(WireStruct):
    """The fields of all versions."""

    version: int
    topics: list[str | None] | None
    data: bytes | None

    SCHEMA = Schema(("version", Int16), ("topics", Array(String("utf-8"))), ("data", Bytes))


class _Subscription(WireStruct):
    """Version 2, with owned partitions (KIP-429) and their generation (KIP-792)."""

    owned: list[tuple[str | None, list[int] | None]] | None
    generation: int

    SCHEMA = Schema(
        *zip(_First.SCHEMA.names, _First.SCHEMA.fields, strict=True),
        ("owned", Array(("topic", String("utf-8")), ("partitions", Array(Int32)))),
        ("generation", Int32),
    )


class MemberData(Struct, frozen=True):
    """The user data of a subscription.

    Attributes:
        process: the process, for people.
        asks: number of rebalances that the member requested: the coordinator rebalances if its
            metadata change.
    """

    process: str = ""
    asks: int = 0


class AssignmentData(Struct, frozen=True):
    """The user data of an assignment.

    Attributes:
        partitions: number of partitions of each topic that the member subscribes to, 0 if it does
            not exist.
        release: whether the leader waits for partitions that the member owns.
    """

    partitions: dict[str, int]
    release: bool = False


class ConsumerAssignment(NamedTuple):
    """The partitions of one member, and the leader's data, None if they are missing."""

    partitions: frozenset[Partition] = frozenset()
    data: AssignmentData | None = None


def encode_subscription(subscription: Subscription, data: MemberData) -> bytes:
    """Return a member's metadata."""
    encoded: bytes = _Subscription(
        _VERSION,
        sorted(subscription.topics),
        msgspec.json.encode(data),
        _entries(subscription.owned),
        subscription.generation,
    ).encode()
    return encoded


def decode_subscription(metadata: bytes, below: int) -> Subscription:
    """Decode a member's metadata; malformed ones have no topics and own nothing.

    Args:
        below: the generation that begins: nothing was assigned in it or a later one.
    """
    try:
        first = _First.decode(metadata)
        topics = frozenset(topic for topic in first.topics or () if topic)
        if first.version < _FIRST_WITH_GENERATION:
            return Subscription(topics)
        found = _Subscription.decode(metadata)
        owned = _partitions(found.owned)
    except _DECODE_ERRORS:
        return Subscription(frozenset())
    if not 0 <= found.generation < below:
        return Subscription(topics)
    return Subscription(topics, owned, found.generation)


def process_of(metadata: bytes) -> str:
    """Return the process in a member's metadata, "" if unknown."""
    try:
        return msgspec.json.decode(_First.decode(metadata).data or b"", type=MemberData).process
    except _DECODE_ERRORS:
        return ""


def encode_consumer_assignment(partitions: Iterable[Partition], data: AssignmentData) -> bytes:
    """Return the assignment of one member."""
    encoded: bytes = ConsumerProtocol.ASSIGNMENT(
        0, _entries(partitions), msgspec.json.encode(data)
    ).encode()
    return encoded


def decode_consumer_assignment(encoded: bytes) -> ConsumerAssignment:
    """Decode an assignment; malformed ones hold no partitions."""
    try:
        found = ConsumerProtocol.ASSIGNMENT.decode(encoded)
        partitions = _partitions(found.assignment)
    except _DECODE_ERRORS:
        return ConsumerAssignment()
    try:
        data = msgspec.json.decode(found.user_data or b"", type=AssignmentData)
    except _DECODE_ERRORS:
        data = None
    return ConsumerAssignment(partitions, data)


def _entries(partitions: Iterable[Partition]) -> list[tuple[str, list[int]]]:
    return list(by_topic(sorted(partitions)).items())


def _partitions(
    topics: Sequence[tuple[str | None, list[int] | None]] | None,
) -> frozenset[Partition]:
    return frozenset(
        (topic, number) for topic, numbers in topics or () if topic for number in numbers or ()
    )
