"""Transaction ids: what goes in comes out, nothing else is taken for an id."""

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
    dedup_randomness,
    make_id,
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
@given(PARTS, st.integers(0, LENGTH - 1), st.characters())
def test_a_foreign_character_is_refused(
    parts: tuple[int, int, int], place: int, character: str
) -> None:
    text = make_id(*parts)
    changed = text[:place] + character + text[place + 1 :]
    if character in ALPHABET:
        return
    with pytest.raises(ValueError, match="Crockford"):
        parse_id(changed)


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
def test_a_dedup_key_gives_the_same_64_bits_each_time(group: str, key: str) -> None:
    first = dedup_randomness(group, key)
    assert first == dedup_randomness(group, key)
    assert 0 <= first < 1 << 64


def test_group_and_dedup_key_do_not_run_into_one_another() -> None:
    assert dedup_randomness("a", "b\0c") != dedup_randomness("a\0b", "c")
    assert dedup_randomness("ab", "c") != dedup_randomness("a", "bc")
