"""Transaction ids, the Java client's hash, and which transactions share a half partition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from txbroker.core.routing import (
    ALPHABET,
    LENGTH,
    PARTITION_MAX,
    TIME_MAX_MS,
    IdParts,
    dedup_hash,
    dedup_randomness,
    make_id,
    murmur2,
    order_hash,
    parse_id,
)

PARTS = st.tuples(
    st.integers(0, PARTITION_MAX), st.integers(0, TIME_MAX_MS), st.integers(0, 2**64 - 1)
)


@fuzz
@given(PARTS)
def test_an_id_says_what_it_was_made_of(parts: tuple[int, int, int]) -> None:
    text = make_id(*parts)
    assert len(text) == LENGTH
    assert parse_id(text) == IdParts(*parts)


@fuzz
@given(PARTS, PARTS)
def test_ids_sort_as_their_parts(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    assert (make_id(*a) < make_id(*b)) == (a < b)


@fuzz
@given(st.text(max_size=30) | st.text(alphabet=ALPHABET, min_size=LENGTH, max_size=LENGTH))
def test_any_text_is_an_id_or_a_value_error(text: str) -> None:
    try:
        parts = parse_id(text)
    except ValueError:
        return
    assert make_id(*parts) == text


@fuzz
@given(PARTS, st.integers(0, LENGTH - 1), st.characters(exclude_characters=ALPHABET))
def test_a_foreign_character_is_refused(
    parts: tuple[int, int, int], place: int, character: str
) -> None:
    text = make_id(*parts)
    with pytest.raises(ValueError, match="Crockford"):
        parse_id(text[:place] + character + text[place + 1 :])


@pytest.mark.parametrize("text", ["", "0" * 25, "0" * 27, "Z" * 26, "8" + "0" * 25, "o" * 26])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ValueError):
        parse_id(text)


@pytest.mark.parametrize(
    "parts", [(-1, 0, 0), (PARTITION_MAX + 1, 0, 0), (0, -1, 0), (0, 1 << 48, 0), (0, 0, 1 << 64)]
)
def test_parts_that_do_not_fit(parts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        make_id(*parts)


@fuzz
@given(st.text(), st.text())
def test_a_dedup_key_gives_the_same_bits_each_time(group: str, key: str) -> None:
    assert 0 <= dedup_randomness(group, key) == dedup_randomness(group, key) < 1 << 64
    assert dedup_hash(group, key) == dedup_hash(group, key) <= 0x7FFFFFFF


def test_group_and_dedup_key_do_not_run_into_one_another() -> None:
    assert dedup_randomness("a", "b\0c") != dedup_randomness("a\0b", "c")
    assert dedup_randomness("ab", "c") != dedup_randomness("a", "bc")


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


def test_only_without_any_key_there_is_no_order() -> None:
    assert order_hash(None, "t", None) is None
    assert order_hash(None, "t", b"") is not None
    assert order_hash("", "t", None) is not None
