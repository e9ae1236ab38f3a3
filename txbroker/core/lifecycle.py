"""The state machine of a transaction: one literal table.

Every change of a transaction's state is a line here. A step that is not in the table changes
nothing.
"""

from enum import StrEnum

from txbroker.core.records import State


class Step(StrEnum):
    """What can happen to a transaction: a marker was read, or a turn was committed."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    CHECK = "check"
    RETURNED = "returned"
    LATER = "later"
    PARK = "park"
    REVIVE = "revive"
    PROMOTE = "promote"
    REFUSE = "refuse"


TRANSITIONS: dict[State, dict[Step, State]] = {
    State.PENDING: {
        Step.COMMIT: State.COMMITTED,
        Step.ROLLBACK: State.ROLLED_BACK,
        Step.CHECK: State.PENDING,
        Step.RETURNED: State.PENDING,
        Step.LATER: State.PENDING,
        Step.PARK: State.PARKED,
    },
    State.PARKED: {
        Step.COMMIT: State.COMMITTED,
        Step.ROLLBACK: State.ROLLED_BACK,
        Step.REVIVE: State.PENDING,
    },
    State.COMMITTED: {
        Step.PROMOTE: State.PROMOTED,
        Step.REFUSE: State.REFUSED,
    },
    State.REFUSED: {
        # Reviving only wakes the retry: the transaction stays refused until a turn promotes it.
        Step.REVIVE: State.REFUSED,
        Step.PROMOTE: State.PROMOTED,
        # Tried again, and the cause is another one now.
        Step.REFUSE: State.REFUSED,
    },
    State.PROMOTED: {},
    State.ROLLED_BACK: {},
}

UNDECIDED = frozenset({State.PENDING, State.PARKED})
SETTLED = frozenset({State.PROMOTED, State.ROLLED_BACK})


class IllegalStep(ValueError):
    """A step that the state does not allow; nothing was changed."""

    def __init__(self, state: State, step: Step, why: str = "") -> None:
        super().__init__(f"{step} in state {state}{': ' + why if why else ''}")
        self.state = state
        self.step = step
