"""The judge of consumers that store results exactly once: effects against positions.

It imports nothing of txbroker, and reads tables by their documented columns.

| rule | meaning |
| --- | --- |
| E1 | a message has one effect if its stored position says so and it is not kept as failed |
| E2 | the effects of a lane are in offset order, by the order of their commits |
| E3 | tokens never fall, neither those of effects nor the stored ones; nor does a position |
| E3 | no effect is committed in the table after a higher token |
| E4 | later stages follow an effect at least once and in order; none is lost |
| E5 | the copy of a position in Kafka is never ahead of the position |
| E6 | in the end all of each topic is done, under its name |
| E7 | no call meets a session that another changed; who changes it fails, not the database |
| E8 | a message that asks for no failure has none |
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults.consuming.judge import (
    ATTEMPTS_MAX,
    Fault,
    History,
    Place,
    Position,
    Rec,
    Source,
    Try,
    Violation,
    covers,
    instructions,
    late_begins,
    text,
)

FAILS = frozenset(("reject", "fails_until", "flaky", "later_s", "session", "stage"))
"""What a message's value names if a handler is to fail."""
EXCUSED_S = 15.0
CALLS_MAX = 12
"""Of a message by one owner, one after the other, before it has failed once."""


@dataclass(frozen=True)
class Effect:
    """What a handler stored for a message.

    Attributes:
        serial: rises from one transaction to a later one that begins after it, within `log`.
        lane: what has an order; "" for nothing.
        number: counts the effects of the lane, in the order of their commits.
        owned: the partition that the token is of; None: that of the source. A message from the
            retry topic has the token of its partition there.
    """

    serial: int
    source: Source
    key: str | None
    value: int
    lane: str
    number: int
    token: int
    instance: str = ""
    log: int = 0
    owned: Place | None = None


@dataclass(frozen=True)
class Kept:
    """A message that failed: its state, and how many of its stages are done."""

    state: str
    stage: int = 0
    key: str | None = None

    @property
    def waits(self) -> bool:
        return self.state not in ("dead", "unpublished")


@dataclass(frozen=True)
class TablePosition:
    """A row of `txbroker_position`, with the rows of `txbroker_done`. `next` is -1 without a
    position."""

    token: int
    next: int
    ranges: Sequence[tuple[int, int]] = ()
    later: Position | None = None
    done: frozenset[int] = frozenset()

    def covers(self, offset: int) -> bool:
        """Whether the first stage of an offset is done."""
        return offset in self.done or covers((self.next, list(self.ranges)), offset)


@dataclass(frozen=True)
class Sample:
    """The stored positions before a time: first the copy in Kafka was read, then the table.

    Attributes:
        mirror: offsets and done ranges in Kafka.
        serial: the highest serial number of effects, read after the positions; only in a database.
    """

    at: float
    mirror: Mapping[Place, Position]
    table: Mapping[Place, TablePosition]
    serial: float = math.inf


@dataclass(frozen=True)
class StageRun:
    """A later stage that has ended for a message. `seen`: the effects that it saw, if it looked."""

    stage: int
    source: Source
    seen: int | None = None


@dataclass
class Outcome:
    """All that a run left.

    Attributes:
        effects: by serial.
        stages: runs of later stages, in order.
        samples: in the order of time; the last one after everything else.
        later: number of later stages.
        mirrored: positions are copied to Kafka.
    """

    records: Sequence[Rec] = ()
    effects: Sequence[Effect] = ()
    stages: Sequence[StageRun] = ()
    kept: Mapping[Source, Kept] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    later: int = 0
    mirrored: bool = True
    tries: Sequence[Try] = ()
    faults: Sequence[Fault] = ()
    sessions: Sequence[tuple[Source, str]] = ()
    """What calls saw of their sessions, before they changed anything."""
    waits: bool = False
    """A message that fails is handled until it succeeds."""
    batches: bool = False
    """Messages of a batch that was divided are handled again alone."""


class ExactJudge:
    """Judges one run."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._tries = sorted(outcome.tries, key=lambda each: each.begin)
        self._records = {(r.topic, r.partition, r.offset): r for r in outcome.records}
        self._positions = outcome.samples[-1].table if outcome.samples else {}
        self._effects: dict[Source, list[Effect]] = defaultdict(list)
        for effect in outcome.effects:
            self._effects[effect.source].append(effect)

    def judge(self) -> list[Violation]:
        """Return the broken rules."""
        rules = (
            *(self._once, self._order, self._tokens, self._stages, self._mirror, self._ends),
            *(self._sessions, self._innocent, self._late, self._replaced),
        )
        return list(dict.fromkeys(violation for rule in rules for violation in rule()))

    # --- E1 ----------------------------------------------------------------------------------

    def _once(self) -> Iterator[Violation]:
        for source in self._effects.keys() | self._outcome.kept.keys() | self._records.keys():
            why = self._wrong_effects(source)
            if why:
                yield Violation("E1", text(source), f"{why}; {self._story(source)}")

    def _wrong_effects(self, source: Source) -> str:
        """Return the fault of the effects of a message, "" if nothing is."""
        record, effects = self._records.get(source), self._effects.get(source, ())
        if record is None:
            return "not in its topic"
        if len(effects) > 1:
            return f"{len(effects)} effects"
        for effect in effects:
            if (effect.key, f'"n": {effect.value}') != (record.key, _number(record.value)):
                return "the effect of another message"
        position = self._positions.get(source[:2])
        kept = self._outcome.kept.get(source)
        if position is None or not position.covers(source[2]):
            return "an effect without its position" if effects else "kept" if kept else ""
        wanted = kept is None or kept.stage > 0
        if wanted and not effects:
            return "done without its effect"
        return "kept as failed, with its effect" if effects and not wanted else ""

    def _story(self, source: Source) -> str:
        effects = [f"{e.instance}/{e.token} #{e.serial}" for e in self._effects.get(source, ())]
        position = self._positions.get(source[:2])
        at = "no position" if position is None else f"next {position.next}"
        return f"effects {effects}, {at}, kept {self._outcome.kept.get(source)}"

    # --- E2, E3 ------------------------------------------------------------------------------

    def _order(self) -> Iterator[Violation]:
        lanes: dict[str, list[Effect]] = defaultdict(list)
        for effect in self._outcome.effects:
            if effect.lane and effect.number:
                lanes[effect.lane].append(effect)
        for lane, effects in lanes.items():
            effects.sort(key=lambda each: each.number)
            numbers = [each.number for each in effects]
            if numbers != list(range(1, len(numbers) + 1)):
                yield Violation("E2", lane, "effects are missing, or their numbers are not those")
            for before, each in pairwise(effects):
                if each.source[2] <= before.source[2]:
                    yield Violation(
                        "E2", text(each.source), f"committed after {before.source[2]} of {lane}"
                    )

    def _tokens(self) -> Iterator[Violation]:
        last: dict[tuple[Place, int], Effect] = {}
        for effect in self._outcome.effects:
            at = (effect.owned or effect.source[:2], effect.log)
            before = last.setdefault(at, effect)
            if effect.token < before.token:
                yield Violation(
                    "E3", text(effect.source), f"token {effect.token} after {before.token} of "
                    f"{text(before.source)}: {effect.instance}"
                )  # fmt: skip
            last[at] = max(before, effect, key=lambda each: each.token)
        stored: dict[Place, TablePosition] = {}
        for sample in self._outcome.samples:
            for place, now in sample.table.items():
                before_ = stored.get(place, now)
                if now.token < before_.token or now.next < before_.next:
                    yield Violation(
                        "E3", f"{place[0]}-{place[1]}", f"stored {now.token}, {now.next} after "
                        f"{before_.token}, {before_.next}"
                    )  # fmt: skip
                stored[place] = now
            for place in stored.keys() - sample.table.keys():
                yield Violation("E3", f"{place[0]}-{place[1]}", "its stored position is gone")

    def _replaced(self) -> Iterator[Violation]:
        """No effect is committed after a higher token."""
        higher: dict[Place, dict[int, float]] = defaultdict(dict)
        for sample in self._outcome.samples:
            for place, now in sample.table.items():
                higher[place].setdefault(now.token, sample.serial)
        for effect in self._outcome.effects:
            seen = higher[effect.source[:2]].items()
            if late := [each for each, at in seen if each > effect.token and effect.serial > at]:
                why = f"stored with token {effect.token}, after {late[0]}"
                yield Violation("E3", text(effect.source), f"{why}: {effect.instance}")

    # --- E4 ----------------------------------------------------------------------------------

    def _stages(self) -> Iterator[Violation]:
        done: dict[Source, set[int]] = defaultdict(set)
        newest: dict[tuple[str, int], int] = {}
        lanes = {each.source: each.lane for each in self._outcome.effects if each.number}
        for run in self._outcome.stages:
            if run.seen == 0:
                yield Violation("E4", text(run.source), f"stage {run.stage} before its effect")
            missing = set(range(2, run.stage)) - done[run.source]
            if missing:
                yield Violation("E4", text(run.source), f"stage {run.stage} before {missing}")
            if run.stage in done[run.source]:
                continue
            done[run.source].add(run.stage)
            lane = lanes.get(run.source)
            if lane is not None:
                at = (lane, run.stage)
                if run.source[2] < newest.get(at, -1):
                    yield Violation(
                        "E4", text(run.source), f"stage {run.stage} after {newest[at]} of {lane}"
                    )
                newest[at] = max(newest.get(at, -1), run.source[2])
        for source in self._effects.keys() | done.keys():
            yield from self._lost_stages(source, done[source])

    def _lost_stages(self, source: Source, done: set[int]) -> Iterator[Violation]:
        kept, last = self._outcome.kept.get(source), 1 + self._outcome.later
        if source not in self._effects:
            yield Violation("E4", text(source), f"stages {done} without an effect")
            return
        ended = last if kept is None else min(last, kept.stage)
        lost = set(range(2, ended + 1)) - done
        if lost:
            yield Violation("E4", text(source), f"stages {lost} are lost; {self._story(source)}")

    # --- E5, E6 ------------------------------------------------------------------------------

    def _mirror(self) -> Iterator[Violation]:
        for sample in self._outcome.samples if self._outcome.mirrored else ():
            for place, (low, ranges) in sample.mirror.items():
                table = sample.table.get(place, TablePosition(0, 0))
                ahead = [
                    offset
                    for first, end in ((table.next, low), *ranges)
                    for offset in range(max(first, table.next), end)
                    if not table.covers(offset)
                ]
                if ahead:
                    yield Violation(
                        "E5", f"{place[0]}-{place[1]}", f"Kafka has {low}, ahead of {table.next}, "
                        f"by {ahead[:5]} at {sample.at:.3f}"
                    )  # fmt: skip

    def _ends(self) -> Iterator[Violation]:
        ends: dict[Place, int] = {}
        for topic, number, offset in self._records:
            ends[topic, number] = max(ends.get((topic, number), 0), offset + 1)
        for place in ends.keys() | self._positions.keys():
            name, end = f"{place[0]}-{place[1]}", ends.get(place, 0)
            found = self._positions.get(place)
            if place not in ends and found is not None and found.next > 0:
                yield Violation("E6", name, f"a position {found.next} without a record")
            elif place in ends and (found is None or found.next != end):
                yield Violation("E6", name, f"ends at {end}, but its position is {found}")
            elif found is not None and found.later is not None and found.later[0] < end:
                yield Violation("E6", name, f"later stages are done up to {found.later[0]} only")
        for source, kept in self._outcome.kept.items():
            if kept.waits:
                yield Violation("E6", text(source), f"still {kept}")

    # --- E7, E8, I19 -------------------------------------------------------------------------

    def _sessions(self) -> Iterator[Violation]:
        sessions = self._outcome.sessions
        for source, seen in sessions:
            if seen != sessions[0][1]:
                yield Violation("E7", text(source), f"met {seen}, not {sessions[0][1]}")
        calls: dict[tuple[Source, Place], tuple[tuple[int, int], int]] = {}
        for each in self._tries:
            at, what = (each.source, each.place), (each.token, each.attempt)
            before, count = calls.get(at, (what, 0))
            # A released key begins with the attempt that it began with before.
            calls[at] = what, count + 1 if what == before else 1
            if calls[at][1] != CALLS_MAX + 1 or self._outcome.waits:
                continue
            record = self._records.get(each.source)
            if record is not None and "session" in instructions(record):
                why = f"called {CALLS_MAX + 1} times with token {each.token}, and has not failed"
                yield Violation("E7", text(each.source), why)

    def _innocent(self) -> Iterator[Violation]:
        asks = {source: instructions(record).keys() for source, record in self._records.items()}
        innocent = {source for source, names in asks.items() if not FAILS & names}
        struck = set[Source]()
        for each in self._tries:
            # A call that a fault has ended is an attempt, not a failure; the next may come late.
            near = [f for f in self._outcome.faults if each.begin <= f.end + EXCUSED_S]
            excused = each.source in struck or any(f.begin <= each.begin for f in near)
            if not each.result or any(f.begin <= each.end for f in near):
                struck.add(each.source)
            if each.source not in innocent or each.attempt == 1 or self._outcome.batches:
                continue
            if not excused:
                why = f"{each.instance} begins attempt {each.attempt}"
                yield Violation("E8", text(each.source), why)
        ended = Counter(each.source for each in self._tries if not each.result)
        for source, kept in self._outcome.kept.items():
            # Once it is handled alone, a call that ends with its process is a failure.
            if source in innocent and kept.state == "dead" and ended[source] < ATTEMPTS_MAX:
                yield Violation("E8", text(source), f"an innocent message is {kept}")

    def _late(self) -> Iterator[Violation]:
        history = History(list(self._outcome.tries), list(self._outcome.faults))
        yield from late_begins(self._outcome.records, history)


def _number(value: str) -> str:
    """Return the number in the value of a message, as its text begins with it."""
    return value[1:].split(",")[0].rstrip("}")
