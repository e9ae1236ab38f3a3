"""The judge of exactly-once consumers: silent on a sound run; each rule finds its crime."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.consuming import exact_judge
from tests.faults.consuming.exact_judge import (
    CALLS_MAX,
    Effect,
    ExactJudge,
    Kept,
    Outcome,
    Sample,
    StageRun,
    TablePosition,
)
from tests.faults.consuming.judge import Fault, Place, Position, Rec, Try

PLACE = ("orders", 0)


class Run:
    """A run by hand: messages of the keys a and b in turn, in one partition of two topics."""

    def __init__(self) -> None:
        topics = ("orders", "returns")
        self.records = [record(topic, n) for topic in topics for n in range(6)]
        self.effects = [effect(topic, n) for topic in topics for n in range(6)]
        self.stages = [
            StageRun(stage, (topic, 0, n), 1)
            for topic in topics
            for n in range(6)
            for stage in (2, 3)
        ]
        self.kept: dict[tuple[str, int, int], Kept] = {}
        self.tries = [
            Try(("orders", 0, n), PLACE, 1, "ab"[n % 2], "c1", n, n, "ok") for n in range(6)
        ]
        self.sessions = [(("orders", 0, n), "public") for n in range(6)]
        self.faults: list[Fault] = []
        self.waits = self.batches = False
        self.samples: list[Sample] = []
        self.sample(1, 3, mirror=2)
        self.sample(1, 6, mirror=6)

    def sample(
        self,
        token: int,
        low: int,
        *,
        mirror: int = 0,
        ranges: tuple[tuple[int, int], ...] = (),
        done: frozenset[int] = frozenset(),
        mirror_ranges: tuple[tuple[int, int], ...] = (),
        later: Position | None = None,
    ) -> None:
        """Take a sample of `orders`; `returns` is as it should be."""
        table: dict[Place, TablePosition] = {
            PLACE: TablePosition(token, low, ranges, later, done),
            ("returns", 0): TablePosition(1, 6),
        }
        at = 10.0 + len(self.samples)  # after the calls
        self.samples.append(Sample(at, {PLACE: (mirror, list(mirror_ranges))}, table))

    def last(self, low: int, **others: frozenset[int] | tuple[tuple[int, int], ...]) -> None:
        """Replace the last position of `orders`."""
        sample = self.samples[-1]
        changed = replace(sample.table[PLACE], next=low, **others)  # type: ignore[arg-type]
        self.samples[-1] = replace(sample, mirror={}, table={**sample.table, PLACE: changed})

    def without(self, offset: int) -> Effect:
        """Take the effect of a message of `orders` out, with its later stages."""
        (found,) = [each for each in self.effects if each.source == ("orders", 0, offset)]
        self.effects.remove(found)
        self.stages = [each for each in self.stages if each.source != found.source]
        lane = [each for each in self.effects if each.lane == found.lane]
        for number, each in enumerate(lane, 1):
            self.change(each, number=number)
        return found

    def change(self, old: Effect, **fields: Any) -> None:
        self.effects[self.effects.index(old)] = replace(old, **fields)  # type: ignore[arg-type]

    def judged(self) -> list[str]:
        self.effects.sort(key=lambda each: each.serial)
        outcome = Outcome(
            *(self.records, self.effects, self.stages, self.kept, self.samples),
            later=2,
            tries=self.tries,
            faults=self.faults,
            sessions=self.sessions,
            waits=self.waits,
            batches=self.batches,
        )
        return [violation.rule for violation in ExactJudge(outcome).judge()]


def record(topic: str, offset: int, **more: Any) -> Rec:
    """Return a message; the one at 4 asks for its failure."""
    more |= {"reject": True} if offset == 4 else {}
    value = json.dumps({"n": offset, "early": True, **more})
    return Rec(topic, 0, offset, "ab"[offset % 2], value=value)


def effect(topic: str, offset: int, token: int = 1) -> Effect:
    """Return the effect of a message as it should be."""
    key, number = "ab"[offset % 2], offset // 2 + 1
    serial = offset + (100 if topic == "returns" else 0)
    return Effect(serial, (topic, 0, offset), key, offset, f"{topic}/0/{key}", number, token, "c1")


def test_judge_imports_only_the_standard_library_and_the_other_judge() -> None:
    found = set()
    for node in ast.walk(ast.parse(Path(exact_judge.__file__).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    ours = {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}
    assert ours == {"tests.faults.consuming.judge"}


# --- sound runs ------------------------------------------------------------------------------


def nothing(_run: Run) -> None: ...


def done_rows(run: Run) -> None:
    """A message that is done above the position is a row, or a range."""
    run.last(6)
    run.samples.insert(1, replace(run.samples[0], mirror={PLACE: (3, [(4, 5)])}))
    table = {PLACE: TablePosition(1, 3, ((5, 6),), None, frozenset((4,)))}
    run.samples[1] = replace(run.samples[1], table={**run.samples[0].table, **table})


def retried(run: Run) -> None:
    """The token is that of the retry topic's partition."""
    run.change(effect("orders", 3), token=9, owned=("retry", 1))


def dead(run: Run) -> None:
    run.without(4)
    run.kept["orders", 0, 4] = Kept("dead", 0, "a")


def dead_in_a_stage(run: Run) -> None:
    """Its effect is stored; only the last stage failed."""
    run.kept["orders", 0, 4] = Kept("dead", 2, "a")
    run.stages.remove(StageRun(3, ("orders", 0, 4), 1))


def repeated_stage(run: Run) -> None:
    """After a crash a stage may run again, also after those of later messages."""
    run.stages.append(StageRun(2, ("orders", 0, 0), 1))


def handed_over(run: Run) -> None:
    """A new owner has a higher token, and its effects follow."""
    for each in [each for each in run.effects if each.source[:2] == PLACE and each.serial > 3]:
        run.change(each, token=2)
    sample = run.samples[-1]
    table = {**sample.table, PLACE: TablePosition(2, 6)}
    run.samples[-1] = replace(sample, table=table)


def called_often(run: Run) -> None:
    """It changes its session, and is handled until it does not any more."""
    over_and_over(run)
    run.waits = True


def released_often(run: Run) -> None:
    """Each release of its key begins with the attempt of the one before, and fails."""
    run.records[5] = record("orders", 5, session="SET ROLE pg_monitor")
    run.tries += [replace(run.tries[5], attempt=attempt) for attempt in (3, 3, 3, 4) * CALLS_MAX]


def divided(run: Run) -> None:
    """The batch of an innocent message failed."""
    failed_innocent(run)
    run.batches = True


def cut_off(run: Run) -> None:
    """A fault ended the first call of an innocent message."""
    failed_innocent(run)
    run.faults.append(Fault("cut off", "c1", 1.0, 2.0))


def killed_long_before(run: Run) -> None:
    """Its process ended in the first call, and the next one is late."""
    run.tries[3:3] = [replace(run.tries[3], begin=run.tries[3].begin - 0.5, result="")]
    run.tries[4] = replace(run.tries[4], attempt=2)


def dead_with_its_processes(run: Run) -> None:
    """All its calls ended with their processes."""
    dead_innocent(run)
    call = replace(run.tries[5], result="")
    run.tries[5:] = [replace(call, attempt=attempt) for attempt in (1, 2)]


def stopped_long_before(run: Run) -> None:
    """Its process was stopped in the first call, and the next one is late."""
    call = run.tries[3]
    run.tries[3:3] = [replace(call, begin=call.begin - 50, end=call.begin - 40)]
    run.tries[4] = replace(call, attempt=2)
    run.faults.append(Fault("stopped 9 s", "c1", call.begin - 49, call.begin - 40))


def good_in_time(run: Run) -> None:
    run.records[5] = record("orders", 5, at=4.5)


@pytest.mark.parametrize(
    "happens",
    [
        *(nothing, done_rows, retried, dead, dead_in_a_stage, repeated_stage, handed_over),
        *(called_often, released_often, divided, cut_off, dead_with_its_processes),
        *(killed_long_before, stopped_long_before, good_in_time),
    ],
)
def test_sound_run(happens: Callable[[Run], None]) -> None:
    run = Run()
    happens(run)
    assert run.judged() == []


# --- crimes ----------------------------------------------------------------------------------


def twice(run: Run) -> None:
    run.effects.append(replace(effect("orders", 5), serial=50, number=4))


def lost(run: Run) -> None:
    run.without(5)


def without_position(run: Run) -> None:
    """Rolled back, but its effect stands."""
    run.last(5)


def kept_and_done(run: Run) -> None:
    run.kept["orders", 0, 5] = Kept("dead", 0, "b")


def kept_without_position(run: Run) -> None:
    run.without(5)
    run.kept["orders", 0, 5] = Kept("dead", 0, "b")
    run.last(5)


def stage_kept_without_effect(run: Run) -> None:
    run.without(5)
    run.kept["orders", 0, 5] = Kept("dead", 1, "b")


def of_another_message(run: Run) -> None:
    run.change(effect("orders", 5), value=3)


def unknown_message(run: Run) -> None:
    run.effects.append(replace(effect("orders", 6), serial=60))


def out_of_order(run: Run) -> None:
    """The serial numbers are in order, the commits are not."""
    run.change(effect("orders", 2), number=3)
    run.change(effect("orders", 4), number=2)


def uncounted(run: Run) -> None:
    """An effect of the lane was stored and is gone."""
    run.change(effect("orders", 4), number=4)


def token_falls(run: Run) -> None:
    """An owner that was replaced stores a result."""
    run.change(effect("orders", 3), token=2)


def stored_token_falls(run: Run) -> None:
    run.samples[0] = replace(
        run.samples[0], table={**run.samples[0].table, PLACE: TablePosition(2, 3)}
    )


def position_falls(run: Run) -> None:
    run.samples.insert(1, run.samples[-1])
    run.samples.insert(2, replace(run.samples[0], mirror={}))


def replaced_owner(run: Run) -> None:
    """Another owner has claimed, and then the old one stores a result."""
    last = max(each.serial for each in run.effects if each.source[:2] == PLACE)
    run.sample(2, 6, mirror=6)
    run.samples[-1] = replace(run.samples[-1], serial=last - 1)


def position_gone(run: Run) -> None:
    run.samples.insert(1, replace(run.samples[0], mirror={}, table={}))


def stage_swallowed(run: Run) -> None:
    """A later stage failed, and the message counts as done."""
    run.stages.remove(StageRun(3, ("orders", 0, 4), 1))


def stage_before_effect(run: Run) -> None:
    run.stages[0] = replace(run.stages[0], seen=0)


def stages_reversed(run: Run) -> None:
    run.stages[0], run.stages[1] = run.stages[1], run.stages[0]


def stages_of_a_key_reversed(run: Run) -> None:
    run.stages = [*run.stages[4:6], *run.stages[:4], *run.stages[6:]]


def stage_without_effect(run: Run) -> None:
    stages = list(run.stages)
    run.without(4)
    run.kept["orders", 0, 4] = Kept("dead", 0, "a")
    run.stages = stages


def mirror_ahead(run: Run) -> None:
    run.samples[0] = replace(run.samples[0], mirror={PLACE: (4, [])})


def mirror_range_ahead(run: Run) -> None:
    run.samples[0] = replace(run.samples[0], mirror={PLACE: (3, [(4, 5)])})


def not_all_done(run: Run) -> None:
    run.without(5)
    run.last(5)


def still_waiting(run: Run) -> None:
    run.without(5)
    run.kept["orders", 0, 5] = Kept("aside", 0, "b")


def stages_not_done(run: Run) -> None:
    run.samples[-1] = replace(
        run.samples[-1],
        table={**run.samples[-1].table, PLACE: TablePosition(1, 6, (), (5, []))},
    )


def under_the_other_topic(run: Run) -> None:
    """The positions of two topics are exchanged: one has six messages, one has five."""
    run.without(5)
    run.records = [each for each in run.records if (each.topic, each.offset) != ("orders", 5)]
    sample = run.samples[-1]
    table = {PLACE: TablePosition(1, 6), ("returns", 0): TablePosition(1, 5)}
    run.samples[:] = [replace(sample, mirror={}, table=table)]


def of_no_topic(run: Run) -> None:
    sample = run.samples[-1]
    table = {**sample.table, ("refunds", 0): TablePosition(1, 3)}
    run.samples[-1] = replace(sample, table=table)


def changed_session(run: Run) -> None:
    run.sessions[3] = (run.sessions[3][0], "elsewhere")


def over_and_over(run: Run) -> None:
    """A change of its session counts as an outage of the database."""
    run.records[5] = record("orders", 5, session="SET ROLE nobody")
    run.tries += run.tries[5:] * CALLS_MAX


def failed_innocent(run: Run) -> None:
    run.tries[3] = replace(run.tries[3], attempt=2)


def dead_innocent(run: Run) -> None:
    """An outage of the database counts against it."""
    run.without(5)
    run.kept["orders", 0, 5] = Kept("dead", 0, "b")


def good_too_late(run: Run) -> None:
    """Another message is called again and again."""
    run.records[5] = record("orders", 5, at=-5.0)
    run.tries[4:4] = run.tries[4:5] * 200


CRIMES: dict[str, list[Callable[[Run], None]]] = {
    "E1": [
        *(twice, lost, without_position, kept_and_done, kept_without_position),
        *(stage_kept_without_effect, of_another_message, unknown_message),
    ],
    "E2": [out_of_order, uncounted],
    "E3": [token_falls, stored_token_falls, position_falls, position_gone, replaced_owner],
    "E4": [
        *(stage_swallowed, stage_before_effect, stages_reversed),
        *(stages_of_a_key_reversed, stage_without_effect),
    ],
    "E5": [mirror_ahead, mirror_range_ahead],
    "E6": [not_all_done, still_waiting, stages_not_done, under_the_other_topic, of_no_topic],
    "E7": [changed_session, over_and_over],
    "E8": [failed_innocent, dead_innocent],
    "I19": [good_too_late],
}


@pytest.mark.parametrize(
    ("rule", "crime"),
    [
        pytest.param(rule, crime, id=crime.__name__)
        for rule, crimes in CRIMES.items()
        for crime in crimes
    ],
)
def test_crime_is_found(rule: str, crime: Callable[[Run], None]) -> None:
    run = Run()
    crime(run)
    assert rule in run.judged()
