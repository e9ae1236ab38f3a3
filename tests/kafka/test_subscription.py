"""What consumers of a group send one another."""

from __future__ import annotations

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from hypothesis import given
from hypothesis import strategies as st

from txbroker.core.consuming.assignment import Subscription
from txbroker.kafka.protocol.subscription import (
    AssignmentData,
    ConsumerAssignment,
    MemberData,
    decode_consumer_assignment,
    decode_subscription,
    encode_consumer_assignment,
    encode_subscription,
    process_of,
)

names = st.text("abc.", min_size=1, max_size=5)
partitions = st.frozensets(st.tuples(names, st.integers(0, 99)), max_size=8)
OWNED = frozenset({("a", 0), ("b", 3)})
DATA = MemberData("process 7 on host", 2)


@given(st.frozensets(names), partitions, st.integers(0, 9))
def test_subscription_round_trip(
    topics: frozenset[str], owned: frozenset[tuple[str, int]], generation: int
) -> None:
    made = Subscription(topics, owned, generation)
    encoded = encode_subscription(made, DATA)
    assert decode_subscription(encoded, 10) == made
    assert process_of(encoded) == DATA.process
    assert ConsumerProtocol.METADATA.decode(encoded).subscription == sorted(topics)


@given(partitions, st.dictionaries(names, st.integers(0, 99)), st.booleans())
def test_assignment_round_trip(
    owned: frozenset[tuple[str, int]], counts: dict[str, int], release: bool
) -> None:
    data = AssignmentData(counts, release)
    encoded = encode_consumer_assignment(owned, data)
    assert decode_consumer_assignment(encoded) == ConsumerAssignment(owned, data)
    found = ConsumerProtocol.ASSIGNMENT.decode(encoded)
    assert {(one.topic, one.partition) for one in found.partitions()} == owned


def test_metadata_differ_with_each_request() -> None:
    """So the coordinator rebalances."""
    made = Subscription(frozenset("a"))
    assert len({encode_subscription(made, MemberData("", asks)) for asks in range(3)}) == 3


@pytest.mark.parametrize("generation", [-1, 5, 10**9])
def test_member_owns_nothing_of_generations_to_come(generation: int) -> None:
    encoded = encode_subscription(Subscription(frozenset("a"), OWNED, generation), DATA)
    assert decode_subscription(encoded, 5) == Subscription(frozenset("a"))


@given(st.binary())
def test_any_bytes_decode(data: bytes) -> None:
    for encoded in (data, encode_subscription(Subscription(frozenset("a")), DATA)[:-9] + data):
        decoded = decode_subscription(encoded, 5)
        assert sorted(decoded.topics) is not None
        assert sorted(decoded.owned) is not None
        assert process_of(encoded) in ("", DATA.process)
        assert sorted(decode_consumer_assignment(encoded).partitions) is not None


@pytest.mark.parametrize("data", [b"", b"{[", b"[" * 100_000, b'{"process": 7}', b'"text"', None])
def test_malformed_user_data_are_left_out(data: bytes | None) -> None:
    metadata = ConsumerProtocol.METADATA(0, ["a"], data).encode()
    assert decode_subscription(metadata, 5) == Subscription(frozenset("a"))
    assert process_of(metadata) == ""
    assignment = ConsumerProtocol.ASSIGNMENT(0, [("a", [1])], data).encode()
    assert decode_consumer_assignment(assignment) == ConsumerAssignment(frozenset({("a", 1)}))


def test_null_fields_are_left_out() -> None:
    metadata = ConsumerProtocol.METADATA(0, [None, "a"], None).encode()
    assert decode_subscription(metadata, 5).topics == {"a"}
    assert decode_subscription(ConsumerProtocol.METADATA(0, None, None).encode(), 5).topics == set()
    assignment = ConsumerProtocol.ASSIGNMENT(0, [(None, [1]), ("b", None)], b"").encode()
    assert decode_consumer_assignment(assignment).partitions == set()
