"""Indexes: transactions by offset, ids by due time, and use by share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from tests.kit.logs import (
    PARTITION,
    START_MS,
    Logs,
    apply_all,
    half_of,
    id_of,
    marker_of,
    message,
    new_ledger,
)
from txbroker.core import index, settled
from txbroker.core.index import OffsetIndex, Schedule
from txbroker.core.ledger import Ledger
from txbroker.core.records import Cause
from txbroker.core.routing import make_id
from txbroker.core.segment import SEGMENT_BYTES
from txbroker.core.settled import ShareUse, share_max
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
    st.booleans(),
)
def test_pages_by_time_and_id_are_whole(
    prepared: list[tuple[int, int]], count: int, newest: bool
) -> None:
    line = OffsetIndex()
    # The log clock grows with the offsets; ids of one time are in any order.
    for offset, (step, number) in enumerate(sorted(prepared, key=lambda each: each[0])):
        line.add(at(offset, START_MS + step, number))
    every = line.after(-1, 1000)
    every.sort(key=lambda each: (each.prepared_at_ms, each.id), reverse=newest)
    found: list[Transaction] = []
    at_ms, id = (2 * START_MS, "") if newest else (0, "")
    while page := line.since(at_ms, count, id, newest=newest):
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


TIMES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 20))
    | st.tuples(st.just("pop"), st.integers(0, 20)),
    max_size=300,
)


@fuzz
@given(TIMES, st.data())
def test_schedule_is_a_sorted_dictionary_and_wakes_its_waiter(
    steps: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    schedule, model, waits_for = Schedule(), dict[str, int](), None
    for id, at_ms in steps:
        if id == "pop" and at_ms is not None:
            due = sorted((at, each) for each, at in model.items() if at <= at_ms)
            assert list(schedule.pop_due(at_ms)) == [each for _, each in due]
            for _, each in due:
                del model[each]
            waits_for = schedule.next_ms()
        else:
            earlier = schedule.set(id, at_ms)
            model.pop(id, None)
            if at_ms is not None:
                model[id] = at_ms
            # The waiter asks again if notified, and sometimes without a reason.
            if earlier or data.draw(st.booleans()):
                waits_for = schedule.next_ms()
                assert waits_for == min(model.values(), default=None)
        assert len(schedule) == len(model)
        assert not model or (waits_for is not None and waits_for <= min(model.values()))


def test_an_id_may_be_set_again_while_the_due_ones_are_taken() -> None:
    schedule = Schedule()
    for id in "ab":
        schedule.set(id, 1)
    taken = []
    for id in schedule.pop_due(5):
        taken.append(id)
        schedule.set(id, 6)
    assert taken == ["a", "b"]
    assert list(schedule.pop_due(6)) == ["a", "b"]


def test_moving_one_id_for_ever_takes_no_memory() -> None:
    schedule = Schedule()
    for at_ms in range(10_000):
        schedule.set("a", at_ms)
    assert len(schedule._heap) < 100


GROUPS = ("shop-1", "shop-2", "bank")


def by_team(group: str) -> str:
    return group.partition("-")[0]


def used(ledger: Ledger, *shares: str) -> list[int]:
    return [ledger.index.unsettled.of(share) for share in shares]


def prepared(count: int) -> Logs:
    """Return logs with so many transactions of each group."""
    logs = Logs()
    for number in range(count * len(GROUPS)):
        group = GROUPS[number % len(GROUPS)]
        logs.prepare(half_of(id_of(number), group=group), START_MS + number)
    return logs


@pytest.mark.parametrize(("pool", "part"), [(1, 1), (2, 1), (10, 8), (250_000, 200_000)])
def test_one_share_may_use_four_fifths(pool: int, part: int) -> None:
    assert share_max(pool) == part


def test_what_is_given_back_leaves_nothing() -> None:
    use = ShareUse([("a", 2), ("b", 1), ("a", 1)])
    assert (use.total, use.of("a"), use.of("b"), use.of("c")) == (4, 3, 1, 0)
    use.add("a", -3)
    use.add("b", -1)
    assert (use.total, use._of) == (0, {})


def test_what_is_undecided_committed_or_refused_is_counted_until_it_is_settled() -> None:
    logs, ledger = prepared(3), new_ledger()
    ledger.index.share_by(by_team)
    apply_all(ledger, logs, 9, 0)
    assert used(ledger, "shop", "bank", "shop-1") == [6, 3, 0]
    for number, kind in ((0, "rollback"), (1, "commit"), (2, "commit"), (3, "park")):
        logs.mark(marker_of(kind, id_of(number), round=1), START_MS + 100)
    apply_all(ledger, logs, 9, 4)
    assert used(ledger, "shop", "bank") == [5, 3]
    ledger.refuse(id_of(1), Cause("too_large", "", "t", 0))
    assert used(ledger, "shop", "bank") == [5, 3]
    ledger.promote_run([ledger.index.transactions[id_of(number)] for number in (1, 2)])
    assert used(ledger, "shop", "bank") == [4, 2]
    assert ledger.index.unsettled.total == len(ledger.index.transactions)
    # The same counts where they are made at once, as after another principals file.
    ledger.index.share_by(str)
    assert used(ledger, *GROUPS, "shop") == [2, 2, 2, 0]
    ledger.index.share_by(by_team)
    assert used(ledger, "shop", "bank") == [4, 2]


def test_settled_ones_are_counted_for_the_dedup_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "SEGMENT_ENTRIES", 3)
    logs, ledger = prepared(4), new_ledger()
    ledger.index.share_by(by_team)
    for number in range(12):
        logs.mark(marker_of("rollback", id_of(number)), START_MS + number)
    apply_all(ledger, logs, 12, 12)
    window = ledger.index.settled
    # Each has a third of its segment, a row and its group's shape.
    shop, bank = SEGMENT_BYTES // 3 + 35 + 13, SEGMENT_BYTES // 3 + 35 + 11
    counted = [window.recent_of(share, START_MS) for share in ("shop", "bank", "else")]
    assert counted == [8 * shop, 4 * bank, 0]
    assert window.size == sum(counted)
    ledger.index.share_by(str)
    counted = [window.recent_of(group, START_MS) for group in GROUPS]
    assert counted == [4 * shop, 4 * shop, 4 * bank]
    ledger.index.share_by(by_team)
    # Segments end with the half messages 2, 5, 8 and 11.
    assert window.recent_of("shop", START_MS + 6) == 4 * shop
    assert window.recent_of("shop", START_MS + 9) == 2 * shop
    again = new_ledger()
    again.index.share_by(by_team)
    for segment in window.segments:
        again.index.add_segment(segment)
    assert [again.index.settled.recent_of(share, START_MS) for share in ("shop", "bank")] == [
        8 * shop,
        4 * bank,
    ]
    assert again.index.settled.recent_of("shop", START_MS + 12) == 0


def test_an_id_of_the_future_prolongs_only_its_own_groups_count() -> None:
    logs, ledger = Logs(), new_ledger()
    for number, group in enumerate(("bank", "shop", "bank")):
        time_ms = START_MS + (100_000 if group == "shop" else 0)
        logs.prepare(half_of(id_of(number, time_ms), group=group), START_MS)
        logs.mark(marker_of("rollback", id_of(number, time_ms)), START_MS)
    apply_all(ledger, logs, 3, 3)
    ledger.index.settled.seal()
    for since_ms, counts in ((0, [681, 1046]), (1, [0, 1046]), (100_001, [0, 0])):
        asked = [
            ledger.index.settled.recent_of(group, START_MS + since_ms) for group in ("bank", "shop")
        ]
        assert asked == counts
