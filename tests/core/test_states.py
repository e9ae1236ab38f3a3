"""The table of the lifecycle, and the page of the docs that is generated from it."""

import runpy
from pathlib import Path

import pytest

from tests.kit.logs import half_of, id_of, marker_of
from txbroker.core.lifecycle import (
    RULES,
    SETTLED,
    STEPS,
    UNDECIDED,
    IllegalStep,
    MarkerEntry,
    Step,
    advance,
)
from txbroker.core.records import MarkerKind, State
from txbroker.core.transaction import Transaction

DOCS = Path(__file__).parents[2] / "docs"
AFTER = {
    state: {step: RULES[state, step].after for step in STEPS if (state, step) in RULES}
    for state in State
}


def test_states_page_is_current() -> None:
    page = runpy.run_path(str(DOCS / "states.py"))["states_page"]()
    assert (DOCS / "reference" / "states.md").read_text() == page, "run python docs/states.py"


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("step", STEPS)
def test_illegal_step_changes_nothing(state: State, step: Step) -> None:
    """A step outside the table, or that its guard refuses, leaves the transaction as it was."""
    transaction = Transaction(half_of(id_of(1)), 0, 0, b"", (), None, state)
    kind = step if isinstance(step, MarkerKind) else MarkerKind.CHECK
    entry = MarkerEntry(marker_of(kind, id_of(1), group="other", round=9), 0, 0, 0)
    rule = RULES.get((state, step))
    if rule is not None and rule.guard is None:
        advance(transaction, step)
        assert transaction.state is rule.after
        return
    with pytest.raises(IllegalStep) as error:
        advance(transaction, step, entry)
    assert transaction == Transaction(half_of(id_of(1)), 0, 0, b"", (), None, state)
    assert f"{step} in state {state}" in str(error.value)


def test_only_settled_states_are_final() -> None:
    assert {state for state, steps in AFTER.items() if not steps} == SETTLED


@pytest.mark.rule(4)
def test_only_undecided_states_can_be_decided() -> None:
    decidable = {s for s, steps in AFTER.items() if {"commit", "rollback"} & set(steps)}
    assert decidable == UNDECIDED


def test_no_step_undoes_a_decision() -> None:
    for state in set(State) - UNDECIDED:
        assert not UNDECIDED & set(AFTER[state].values())
