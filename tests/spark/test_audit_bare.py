"""The judge where something is not there: the half message, any check, or what a record claims."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.logs import PARTITION, START_MS, WINDOW_MS
from tests.spark.audit_facts import (
    COMMIT,
    HALF,
    TERMS,
    check_row,
    copy_rows,
    half_rows,
    judged,
    op_row,
    visible_rows,
)
from txbroker.spark.judge.rows import Content, Horizon, JudgedTransaction, MarkerFact, VisibleFact

TAKEN = Horizon({PARTITION: 5}, {PARTITION: START_MS})


def test_findings_without_half_are_found_after_retention() -> None:
    rollback, visible = op_row("rollback", grp="g"), visible_rows(HALF)
    twice = [*visible, visible[0]._replace(offset=70)]
    taken = Horizon({PARTITION: 5}, {PARTITION: START_MS})

    def found(
        *op: MarkerFact, shown: list[VisibleFact], horizon: Horizon = taken
    ) -> JudgedTransaction:
        return judged([], list(op), shown, horizon=horizon)

    back = found(rollback, shown=visible)
    assert (back.verdict, back.state, back.carry) == ("rolled_back_visible", "rolled_back", False)
    assert found(rollback, shown=twice).findings == ("rolled_back_visible", "visible_twice")
    assert found(COMMIT, shown=twice).findings == ("visible_twice",)
    assert found(shown=twice).findings == ("visible_twice",)
    cut = judged(half_rows(["t", "u"], offset=4)[1:], [rollback], visible, horizon=taken)
    assert cut.findings == ("rolled_back_visible",)
    # An earlier marker may have been removed too, or been in deleted files.
    no_markers = taken._replace(op_begin_ms={PARTITION: START_MS - WINDOW_MS})
    removed = taken._replace(removed_ms=START_MS)
    for horizon in (no_markers, removed):
        assert found(rollback, shown=visible, horizon=horizon).findings == ()
        assert found(rollback, shown=twice, horizon=horizon).findings == ("visible_twice",)
    # One of the two groups had no right to decide; only the half message named the owner.
    other = op_row("commit", 1, grp="another")
    assert (found(rollback, other, shown=visible).findings) == ()
    same = op_row("commit", 1, grp="g")
    assert found(rollback, same, shown=visible).findings == (
        "rolled_back_visible",
        "contrary_markers",
    )


def test_visible_twice_is_found_beside_other_faults() -> None:
    twice = [*visible_rows(HALF), visible_rows(HALF, offset=70)[0]]
    assert judged(visible=twice).findings == ("visible_without_commit", "visible_twice")
    assert judged(op=[op_row("rollback")], visible=twice).findings == (
        "rolled_back_visible",
        "visible_twice",
    )
    assert "visible_twice" in judged(half_rows(void="expired"), visible=twice).findings


def test_record_claiming_any_message_count_costs_nothing() -> None:
    many = (1 << 31) - 1
    claimed = [HALF[0]._replace(count=many)]
    assert judged(claimed).findings == ("half_incomplete",)
    copy = [copy_rows(HALF, "parked")[0]._replace(count=many)]
    assert judged([], parked=copy, horizon=TAKEN).state == "parked"
    contents = [Content(0, "t", 0, 55, 66, 77)]
    marker = COMMIT._replace(contents=contents, contents_count=many)
    assert judged(op=[marker]).state == "pending"


OVERDUE_MS = START_MS + 6000 + TERMS.overdue_after_ms


def test_overdue_needs_an_old_due_check_never_made() -> None:
    late = judged(now_ms=OVERDUE_MS + 1)
    assert (late.verdict, late.state, late.carry) == ("overdue", "pending", True)
    assert late.why == "overdue: the first check was due 86400 s ago"
    assert judged(now_ms=OVERDUE_MS).findings == ()
    asked = check_row(1, START_MS + 6000, 1)
    given_back = op_row("returned", 2, asked.at_ms, round=1, number=1)
    for op in ([asked], [asked, given_back], [asked._replace(number=7)], [COMMIT]):
        visible = visible_rows(HALF) if op == [COMMIT] else []
        assert judged(op=op, visible=visible, now_ms=OVERDUE_MS + 1).findings == ()
    # A proxy copies pending transactions before retention removes the half message.
    assert judged(parked=copy_rows(HALF, "pending"), now_ms=OVERDUE_MS + 1).findings == ("overdue",)
    assert judged(parked=copy_rows(HALF, "parked"), now_ms=OVERDUE_MS + 1).findings == ()
    # A first check may have been made, and its marker be gone.
    horizon = Horizon(op_begin_ms={PARTITION: START_MS - WINDOW_MS})
    assert judged(now_ms=OVERDUE_MS + 1, horizon=horizon).findings == ()
    assert judged(half_rows(void="expired"), now_ms=OVERDUE_MS + 1).findings == ()


def test_copy_proves_overdue_after_half_was_removed() -> None:
    def found(state: str, *op: MarkerFact, now_ms: int = OVERDUE_MS + 1, **horizon: Any) -> object:
        taken = TAKEN._replace(**horizon)
        copy = copy_rows(HALF, state)
        return judged([], op, parked=copy, now_ms=now_ms, horizon=taken).findings

    assert found("pending") == ("overdue",)
    assert found("pending", now_ms=OVERDUE_MS) == ()
    asked = check_row(1, START_MS + 6000, 1)
    for op in (asked, op_row("park", source="schedule")):
        assert found("pending", op) == ()
    assert found("pending", op_begin_ms={PARTITION: START_MS - WINDOW_MS}) == ()
    assert found("parked") == ()


@pytest.mark.parametrize("name", ["secret", "a/b", "..", "x" * 300])
def test_commit_to_unreadable_target_is_never_lost(name: str) -> None:
    horizon = Horizon(unread=frozenset({"secret"}))
    late_ms = START_MS + 100 + TERMS.lost_after_ms + 1
    for now_ms in (START_MS + 100, late_ms):
        found = judged(half_rows([name]), [COMMIT], now_ms=now_ms, horizon=horizon)
        assert (found.findings, found.state, found.carry) == (
            ("target_unreadable",), "committed", True
        )  # fmt: skip
    both = judged(half_rows([name, "t"]), [COMMIT], now_ms=late_ms, horizon=horizon)
    assert both.findings == ("lost", "target_unreadable")
    void = judged(half_rows([name], void="expired"), [COMMIT], now_ms=late_ms, horizon=horizon)
    assert void.findings == ()
    assert judged(half_rows([name]), now_ms=START_MS + 200, horizon=horizon).findings == ()
