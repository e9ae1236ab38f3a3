"""The state diagram of the docs, drawn from the table that the code follows.

`python -m txbroker.core.diagram > docs/reference/states.md` renews it; a test asserts that it is
current.
"""

from txbroker.core.lifecycle import TRANSITIONS, Step
from txbroker.core.records import State

_HEAD = """\
# States of a transaction

This page is made from the table that the code follows (`txbroker/core/lifecycle.py`) by
`python -m txbroker.core.diagram > docs/reference/states.md`. A step that is not drawn is illegal:
it changes nothing.
"""

_MEANING = {
    State.PENDING: "undecided; checked back when its time comes",
    State.COMMITTED: "decided, not yet visible",
    State.PROMOTED: "visible in all its target topics",
    State.ROLLED_BACK: "decided, never visible",
    State.PARKED: "undecided after the last attempt; kept whole, decidable for ever",
    State.REFUSED: "committed, but a target does not take it; kept whole and tried again",
}

_LOST = """\
Where the messages of an undecided transaction were deleted before they were copied, it stays
`pending` or `parked`, and `cause.code` is `body_lost`. `GET /v1/transactions/{id}` answers 200 with
it. It can be rolled back, or committed with its messages; any other commit, and the same prepare
again, is answered `410 body_lost`."""


def states_page() -> str:
    """Return the page as Markdown: a diagram in Mermaid, then the same as tables."""
    lines = [_HEAD, "```mermaid", "stateDiagram-v2", f"    [*] --> {State.PENDING}: prepare"]
    for state, steps in TRANSITIONS.items():
        for after in dict.fromkeys(steps.values()):
            labels = ", ".join(step for step, to in steps.items() if to is after)
            lines.append(f"    {state} --> {after}: {labels}")
        if not steps:
            lines.append(f"    {state} --> [*]")
    lines += ["```", "", "| state | means |", "| --- | --- |"]
    lines += [f"| `{state}` | {_MEANING[state]} |" for state in TRANSITIONS]
    lines += ["", _LOST, "", f"| state | {' | '.join(Step)} |", f"|{' --- |' * (len(Step) + 1)}"]
    for state, steps in TRANSITIONS.items():
        cells = [f"`{steps[step]}`" if step in steps else "·" for step in Step]
        lines.append(f"| `{state}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(states_page(), end="")  # noqa: T201 - the page goes where the shell sends it
