"""Placement: the Java client's hash, and which transactions share a half partition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from txbroker.core.routing import dedup_hash, murmur2, order_hash

# From Apache Kafka's own UtilsTest.testMurmur2 (signed, as Java shows them).
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
    b"": 275646681,
}


@pytest.mark.parametrize("data", VECTORS)
def test_murmur2_is_the_java_clients(data: bytes) -> None:
    assert murmur2(data) == VECTORS[data] & 0x7FFFFFFF


@fuzz
@given(st.binary(max_size=200))
def test_murmur2_is_what_another_client_computes(data: bytes) -> None:
    from aiokafka.partitioner import murmur2 as theirs

    assert murmur2(data) == theirs(data) & 0x7FFFFFFF


@fuzz
@given(st.text(), st.text(), st.binary(), st.text(), st.binary())
def test_an_order_key_outweighs_topic_and_key(
    order_key: str, topic: str, key: bytes, other_topic: str, other_key: bytes
) -> None:
    assert order_hash(order_key, topic, key) == order_hash(order_key, other_topic, other_key)


@fuzz
@given(st.text())
def test_without_any_key_there_is_no_order(topic: str) -> None:
    assert order_hash(None, topic, None) is None


def test_an_empty_key_is_a_key() -> None:
    assert order_hash(None, "t", b"") is not None
    assert order_hash("", "t", None) is not None


@fuzz
@given(st.text(), st.text())
def test_a_dedup_key_always_goes_to_the_same_partition(group: str, key: str) -> None:
    assert dedup_hash(group, key) == dedup_hash(group, key) <= 0x7FFFFFFF
