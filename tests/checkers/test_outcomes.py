"""The outcomes of checks that a proxy remembers for each group."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from txbroker.checkers.base import Answered, CheckResult, Unclear
from txbroker.checkers.outcomes import GROUPS_MAX, REPORTS_MAX, WINDOW_S, CheckOutcomes
from txbroker.contract.service import CheckCounts
from txbroker.core.records import Decision

NO = Unclear("answered 500", "database is locked")


def checks(*results: CheckResult) -> Any:
    return [
        SimpleNamespace(id=f"id-{number}", endpoint="http://e", result=result)
        for number, result in enumerate(results)
    ]


def ended(outcomes: CheckOutcomes, group: str, outcome: str, result: CheckResult, s: float) -> None:
    outcomes.count(group, outcome, 1, s)
    outcomes.remember(group, outcome, checks(result), s)


def test_counts_leave_the_window() -> None:
    outcomes = CheckOutcomes()
    for minute in range(60):
        ended(outcomes, "g", "unclear", NO, minute * 60.0)
        outcomes.count("g", "commit", 2, minute * 60.0)
    last_s = 59 * 60.0
    counts = outcomes.read(last_s, 0)["g"].counts
    assert (counts.unclear, counts.commit) == (WINDOW_S // 60, 2 * (WINDOW_S // 60))
    assert outcomes.read(last_s + WINDOW_S + 60, 0)["g"].counts == CheckCounts()


def test_last_undecided_answer_is_kept_with_its_time() -> None:
    outcomes = CheckOutcomes()
    ended(outcomes, "g", "unclear", NO, 100.0)
    ended(outcomes, "g", "commit", Answered(Decision.COMMIT, detail="commit"), 101.0)
    read = outcomes.read(104.0, 50_000)["g"]
    assert read.undecided is not None
    assert (read.undecided.at_ms, read.undecided.endpoint) == (46_000, "http://e")
    assert read.undecided.answer == "answered 500: database is locked"
    newest, before = outcomes.reports("g", 104.0, 50_000)
    assert (newest.outcome, newest.answer, newest.at_ms) == ("commit", "commit", 47_000)
    assert before == read.undecided


def test_memory_is_bounded() -> None:
    outcomes = CheckOutcomes()
    for number in range(GROUPS_MAX + 5):
        ended(outcomes, f"g{number}", "unclear", NO, float(number))
    assert len(outcomes.read(0.0, 0)) == GROUPS_MAX
    assert "g4" not in outcomes.read(0.0, 0)
    outcomes.count("g9", "unclear", 100, 0.0)
    outcomes.remember("g9", "unclear", checks(*[Unclear("x" * 200, "y" * 200)] * 100), 0.0)
    reports = outcomes.reports("g9", 0.0, 0)
    assert len(reports) == REPORTS_MAX
    assert sum(map(sys.getsizeof, (report.answer for report in reports))) < 5000


def test_fresh_counts_are_taken_once() -> None:
    outcomes = CheckOutcomes()
    outcomes.count("g", "commit", 3, 0.0)
    outcomes.count("g", "returned", 1, 0.0)
    outcomes.count("g", "unreachable", 1, 0.0)
    assert outcomes.take() == {"g": [3, 0, 0, 0, 0, 2]}
    assert outcomes.take() == {}


def test_checks_fail_by_the_bounds_of_the_alert() -> None:
    assert CheckCounts(unclear=3).failing
    assert not CheckCounts(unclear=2).failing
    assert CheckCounts(commit=2, unknown=1, unclear=2).failing
    assert not CheckCounts(commit=2, rollback=1, unknown=3).failing
    assert not CheckCounts(later=9, unreached=9).failing
