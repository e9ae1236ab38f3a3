"""The transition table, and the page of the docs that is drawn from it."""

from pathlib import Path

import pytest

from txbroker.core.diagram import states_page
from txbroker.core.lifecycle import SETTLED, TRANSITIONS, UNDECIDED, IllegalStep, Step
from txbroker.core.records import Half, Message, State
from txbroker.core.routing import make_id
from txbroker.core.transaction import Transaction

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "states.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == states_page(), "run python -m txbroker.core.diagram"


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("step", Step)
def test_every_step_is_a_line_of_the_table_or_illegal(state: State, step: Step) -> None:
    half = Half(make_id(0, 0, 0), "g", (Message("orders"),))
    transaction = Transaction(half, 0, 0, b"", (), None, state)
    after = TRANSITIONS[state].get(step)
    if after is not None:
        transaction.take(step)
        assert transaction.state is after
        return
    with pytest.raises(IllegalStep) as error:
        transaction.take(step)
    assert transaction.state is state
    assert step in str(error.value)
    assert state in str(error.value)


def test_nothing_leaves_a_settled_state_and_nothing_else_is_final() -> None:
    assert {state for state, steps in TRANSITIONS.items() if not steps} == SETTLED


@pytest.mark.rule(4)
def test_only_undecided_ones_can_be_decided() -> None:
    decidable = {s for s, steps in TRANSITIONS.items() if {Step.COMMIT, Step.ROLLBACK} & set(steps)}
    assert decidable == UNDECIDED


def test_no_step_leads_back_from_a_decision() -> None:
    for state in set(State) - UNDECIDED:
        assert not UNDECIDED & set(TRANSITIONS[state].values())
