"""Every moment × what happens there × how the transactions end."""

from __future__ import annotations

from typing import NamedTuple

from txbroker.failpoints import POINTS

ACTIONS = ("kill", "pause", "timeout")
OUTCOMES = ("commit", "rollback", "unknown")
RESTARTED = ("claim", "recover")
"""Steps that an owner takes when it comes back."""
ELSEWHERE = ("consumer.", "relay.")
"""Moments of consumers and relays: `tests.faults.consuming` and `tests.faults.relays` try them."""


class Case(NamedTuple):
    """One crash: the moment, how often it is passed before, what happens, how it ends."""

    point: str
    skip: int
    action: str
    outcome: str

    @property
    def name(self) -> str:
        again = f"#{self.skip + 1}" if self.skip else ""
        return f"{self.point}{again}:{self.action}:{self.outcome}"

    @property
    def step(self) -> str:
        """The operation in progress: the first word of the moment."""
        return self.point.partition(".")[0]


def all_cases() -> list[Case]:
    return [
        Case(name, skip, action, outcome)
        for name, point in POINTS.items()
        if not name.startswith(ELSEWHERE)
        for skip in range(point.times)
        for action in ACTIONS
        for outcome in OUTCOMES
    ]


CHOSEN = (
    "prepare.received:timeout:unknown",
    "prepare.applied:timeout:rollback",
    "half.sending:timeout:commit",
    "half.stored:kill:commit",
    "decide.received:pause:rollback",
    "decide.applied:kill:rollback",
    "op.sending:timeout:rollback",
    "op.stored:timeout:commit",
    "turn.planned:pause:commit",
    "turn.begun:kill:rollback",
    "turn.produced:kill:commit",
    "turn.ending:pause:commit",
    "turn.ending:timeout:commit",
    "turn.ended:timeout:rollback",
    "turn.committed:kill:unknown",
    "turn.visible:kill:commit",
    "check.acquired:pause:unknown",
    "check.stored:kill:unknown",
    "check.answered:pause:commit",
    "check.taken:kill:rollback",
    "park.stored:kill:rollback",
    "claim.fenced#2:pause:commit",
    "claim.produced:kill:rollback",
    "claim.committed:timeout:unknown",
    "recover.copies:pause:unknown",
    "recover.replayed:kill:rollback",
    "reclaim.claimed:kill:commit",
    "snapshots.stored:kill:rollback",
    "handover.closing:kill:commit",
    "handover.dropped:timeout:unknown",
    "handover.suspended:timeout:commit",
)
"""Those that every test run tries: one at least of each step and action."""


def chosen_cases() -> list[Case]:
    by_name = {case.name: case for case in all_cases()}
    return [by_name[name] for name in CHOSEN]


# --- the page --------------------------------------------------------------------------------

_HEAD = """# The moments of a crash
Between every two steps of txbroker a process can die, hang, or lose an answer. These are the
moments that the tests try, each with every action and every end of a transaction, on a real Kafka
(`python -m tests.faults.crash_run`, {cases} cases), judged from [histories](history.md). At the
moments of consumers and relays, these are killed under load
(`python -m tests.faults.consuming.soak`, `python -m tests.faults.relays.soak`). Nothing in txbroker
can set them off: only a process that a test starts by a dedicated entry point has the hook, and
without it a moment costs one comparison.

- **kill**: the process ends as by `kill -9`, and is started again;
- **pause**: it stops, another proxy takes over, then it wakes up;
- **timeout**: the answer that has just come is lost, or the request that is about to go; where
  there is none, all is late.

| moment | what has just happened | what can be lost |
| --- | --- | --- |
"""


def page() -> str:
    rows = [
        f"| `{name}`{' (twice)' if point.times > 1 else ''} | {point.behind} | {point.answer} |"
        for name, point in POINTS.items()
    ]
    return _HEAD.format(cases=len(all_cases())) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
