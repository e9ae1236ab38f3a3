"""I14: what a ledger knows is a function of the logs, not of how they were read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.core.core_fuzz import fuzz
from tests.core.core_histories import histories
from tests.kit.logs import (
    START_MS,
    WINDOW_MS,
    Logs,
    half_of,
    id_of,
    marker_of,
    message,
    new_ledger,
    picture,
    replayed,
)
from txbroker.core.ledger import WAITING_SWEEP_MIN, Effect, Ledger, LogGap
from txbroker.core.records import Record, State


def read_in_order(logs: Logs, ledger: Ledger, half_next: list[bool]) -> None:
    """Apply both logs; `half_next` says from which one each record comes, while both have some."""
    for from_half in half_next:
        half_left = ledger.half_position < len(logs.half.records)
        op_left = ledger.op_position < len(logs.op.records)
        if half_left and (from_half or not op_left):
            ledger.apply_half(logs.half.records[ledger.half_position])
        elif op_left:
            ledger.apply_op(logs.op.records[ledger.op_position])


@st.composite
def orders(draw: st.DrawFn, logs: Logs) -> list[bool]:
    """Return any interleaving of both logs, op first and half first among them."""
    length = len(logs.half.records) + len(logs.op.records)
    return draw(
        st.just([True] * length)
        | st.just([False] * length)
        | st.lists(st.booleans(), min_size=length, max_size=length)
    )


@pytest.mark.rule(5)
@fuzz
@given(histories(), st.data())
def test_every_interleaving_comes_to_the_same(logs: Logs, data: st.DataObject) -> None:
    expected, ledger = replayed(logs), new_ledger()
    read_in_order(logs, ledger, data.draw(orders(logs)))
    assert picture(ledger) == picture(expected)
    for name in ("ready", "to_keep", "to_release"):
        assert getattr(ledger.index, name).keys() == getattr(expected.index, name).keys()
    assert ledger.index.undecided_count == expected.index.undecided_count
    assert ledger.index.undecided_count == sum(
        transaction.state in (State.PENDING, State.PARKED) for transaction in ledger.index
    )


@fuzz
@given(histories(), st.data())
def test_forgetting_changes_nothing_that_is_not_settled(logs: Logs, data: st.DataObject) -> None:
    expected, ledger = replayed(logs), new_ledger(beyond_max=0)
    read_in_order(logs, ledger, data.draw(orders(logs)))
    unsettled = {id for id, facts in picture(expected).items() if facts["state"] != "rolled_back"}
    assert {id: picture(ledger)[id] for id in unsettled} == {
        id: picture(expected)[id] for id in unsettled
    }


@pytest.mark.rule(11)
@fuzz
@given(histories(), st.data())
def test_a_prefix_stays_as_it_was_read(logs: Logs, data: st.DataObject) -> None:
    """Each decision that an answer was built on stands for ever."""
    ledger = new_ledger()
    order = data.draw(orders(logs))
    cut = data.draw(st.integers(0, len(order)))
    read_in_order(logs, ledger, order[:cut])
    before = {
        t.id: (t.verdict.decision, t.verdict.op_offset)
        for t in ledger.index
        if t.verdict.decision is not None
    }
    read_in_order(logs, ledger, order[cut:])
    assert (
        before.items()
        <= {t.id: (t.verdict.decision, t.verdict.op_offset) for t in ledger.index}.items()
    )


def test_a_marker_waits_for_its_half_message() -> None:
    logs = Logs()
    logs.prepare(half_of(id_of(1)), START_MS)
    logs.mark(marker_of("commit", id_of(1)), START_MS + 5)
    ledger = new_ledger()
    assert ledger.apply_op(logs.op.records[0]).effect is Effect.WAITING
    assert ledger.apply_half(logs.half.records[0]).effect is Effect.APPLIED
    transaction = ledger.index.get(id_of(1))
    assert transaction is not None
    assert (transaction.state, transaction.verdict.op_offset) == (State.COMMITTED, 0)
    assert transaction.verdict.at_ms == START_MS + 5


@pytest.mark.rule(2)
def test_a_record_out_of_line_is_a_gap() -> None:
    logs = Logs()
    for number in range(2):
        logs.prepare(half_of(id_of(number)), START_MS)
        logs.mark(marker_of("commit", id_of(number)), START_MS)
    ledger = new_ledger()
    with pytest.raises(LogGap):
        ledger.apply_half(logs.half.records[1])
    with pytest.raises(LogGap):
        ledger.apply_op(logs.op.records[1])
    ledger.apply_half(logs.half.records[0])
    with pytest.raises(LogGap):
        ledger.apply_half(logs.half.records[0])
    assert (ledger.half_position, ledger.op_position) == (1, 0)


@pytest.mark.rule(2)
@pytest.mark.parametrize(("position", "fits"), [(0, False), (1, True), (3, True), (4, False)])
def test_offsets_that_hold_no_record_are_no_gap(position: int, fits: bool) -> None:
    ledger = new_ledger()
    ledger.start_at(position, position)
    for apply in (ledger.apply_half, ledger.apply_op):
        record = Record(b"k", b"v", (), START_MS, 3, skipped=2)
        if fits:
            assert apply(record).effect is Effect.VOID
        else:
            with pytest.raises(LogGap):
                apply(record)
    assert (ledger.half_position, ledger.op_position) == ((4, 4) if fits else (position,) * 2)


@pytest.mark.parametrize(("position", "to"), [(0, None), (1, 3), (2, 3), (4, 4)])
def test_offsets_after_the_last_record_are_skipped(position: int, to: int | None) -> None:
    ledger = new_ledger()
    ledger.start_at(position, position)
    for skip in (ledger.skip_half, ledger.skip_op):
        if to is None:
            with pytest.raises(LogGap):
                skip(range(1, 3))
        else:
            skip(range(1, 3))
    assert (ledger.half_position, ledger.op_position) == ((position if to is None else to),) * 2


@pytest.mark.rule(2)
def test_a_half_message_with_foreign_offsets_in_between_is_none() -> None:
    logs = Logs()
    logs.prepare(half_of(id_of(1), message("a"), message("b")), START_MS)
    ledger = new_ledger()
    assert ledger.apply_half(logs.half.records[0]).effect is Effect.PARTIAL
    second = structs.replace(logs.half.records[1], offset=2, skipped=1)
    assert ledger.apply_half(second).effect is Effect.VOID
    assert ledger.half_whole == 3


def test_progress_never_points_into_a_batch() -> None:
    half = half_of(id_of(1), message("a"), message("b"))
    logs = Logs()
    logs.prepare(half, START_MS)
    logs.commit_with(half, [message("x"), message("y")], START_MS)
    ledger = new_ledger()
    ledger.apply_half(logs.half.records[0])
    assert (ledger.half_position, ledger.half_whole) == (1, 0)
    ledger.apply_half(logs.half.records[1])
    assert ledger.half_whole == 2
    for applied, whole in ((1, 0), (2, 0), (3, 3)):
        ledger.apply_op(logs.op.records[applied - 1])
        assert (ledger.op_position, ledger.op_whole) == (applied, whole)


@pytest.mark.rule(5)
def test_waiting_markers_are_forgotten_by_halfs_log_clock_only() -> None:
    logs, ledger = Logs(), new_ledger()
    count = WAITING_SWEEP_MIN + 1
    for number in range(count):
        logs.mark(marker_of("commit", id_of(number)), START_MS)
    logs.mark(marker_of("park", id_of(count)), START_MS + 10 * WINDOW_MS)
    for record in logs.op.records:
        assert ledger.apply_op(record).effect is Effect.WAITING
    logs.prepare(half_of(id_of(0)), START_MS)
    assert ledger.apply_half(logs.half.records[0]).effect is Effect.APPLIED
    assert id_of(0) in ledger.index.ready
    late_ms = START_MS + WINDOW_MS + 1
    logs.prepare(half_of(id_of(9999, late_ms)), late_ms)
    ledger.apply_half(logs.half.records[1])
    assert id_of(1) not in ledger.index.ready
    logs.prepare(half_of(id_of(1)), late_ms)
    assert ledger.apply_half(logs.half.records[2]).effect is Effect.EXPIRED
