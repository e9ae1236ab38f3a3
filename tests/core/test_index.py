"""Transactions by offset, in blocks, against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from tests.kit.logs import PARTITION, START_MS, half_of, id_of, message
from txbroker.core import index
from txbroker.core.index import OffsetIndex
from txbroker.core.routing import make_id
from txbroker.core.transaction import Transaction, places

STEPS = st.lists(st.tuples(st.sampled_from("aaaarr<"), st.integers(0, 200)), max_size=200)


def at(offset: int, prepared_at_ms: int = 0, number: int | None = None) -> Transaction:
    half = half_of(id_of(offset if number is None else number), message())
    return Transaction(half, offset, prepared_at_ms, b"", places(half.messages), None)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four, so that they are split and joined all the time."""
    monkeypatch.setattr(index, "_BLOCK_MAX", 4)
    monkeypatch.setattr(index, "_SMALL", 2)


@fuzz
@given(STEPS)
def test_it_is_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    line, model = OffsetIndex(), dict[int, Transaction]()
    for what, number in steps:
        # Mostly at the end, as half messages come; sometimes anywhere.
        offset = number if what == "<" else max(model, default=0) + 1
        if what == "r" and model:
            line.remove(model.pop(sorted(model)[number % len(model)]))
        elif offset not in model:
            model[offset] = at(offset)
            line.add(model[offset])
        expected = [model[offset] for offset in sorted(model)]
        assert line.after(-1, 1000) == expected
        assert len(line) == len(expected)
        assert line.first() is (expected[0] if expected else None)
        behind = [each for each in expected if each.offset > number]
        assert line.after(number, 5) == behind[:5]
        assert all(line._blocks)


@fuzz
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40, unique=True),
    st.integers(1, 7),
)
def test_pages_by_time_and_id_are_whole(prepared: list[tuple[int, int]], count: int) -> None:
    line = OffsetIndex()
    # The log clock grows with the offsets; ids of one time are in any order.
    for offset, (step, number) in enumerate(sorted(prepared, key=lambda each: each[0])):
        line.add(at(offset, START_MS + step, number))
    every = sorted(line.after(-1, 1000), key=lambda each: (each.prepared_at_ms, each.id))
    found: list[Transaction] = []
    at_ms, id = 0, ""
    while page := line.since(at_ms, count, id):
        assert len(page) <= count
        found += page
        at_ms, id = page[-1].prepared_at_ms, page[-1].id
    assert found == every


def test_a_few_that_stay_for_ever_leave_few_blocks() -> None:
    line = OffsetIndex()
    everyone = [at(offset) for offset in range(400)]
    for transaction in everyone:
        line.add(transaction)
    for transaction in everyone:
        if transaction.offset % 10:
            line.remove(transaction)
    assert len(line) == 40
    assert len(line._blocks) <= 40 // 2
    assert make_id(PARTITION, START_MS, 0) == line.after(-1, 1)[0].id
