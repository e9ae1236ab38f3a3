"""A run has the result of its records applied one by one, in any state."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec import structs

from txbroker.core.encoding import HalfRow, MarkerRow, half_row, marker_row
from txbroker.core.ledger import ApplyResult, Effect, Ledger
from txbroker.core.records import (
    RECORD_VERSION,
    Attributes,
    Cause,
    CheckPolicy,
    CheckReason,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    State,
)
from txbroker.core.routing import make_id
from txbroker.core.snapshot import SnapshotCapture
from txbroker.core.transaction import Transaction, fingerprint, places

START_MS = 1_700_000_000_000
WINDOW_MS = 10_000
GROUPS = ("g", "h")
MESSAGES = (
    Message("t", b"k", b"value", (), 0),
    Message("t", None, b"\0", (), 1),
    Message("u", None, None, (("h", None), ("", b"x")), 0, 1 << 40),
    Message("u", b"", b"", (("é", b"\xff"), ("é", b"")), 2, 0),
)
POLICIES = (CheckPolicy(0.0, 0.1, 2, 0.05), CheckPolicy(1 / 3))


def row_of(half: Half) -> HalfRow:
    """Return what preparing a transaction writes."""
    mark = fingerprint(half.messages, half.group)
    return half_row(half, RECORD_VERSION, mark, places(half.messages))


def _seen(outcome: ApplyResult) -> tuple[object, ...]:
    transaction = outcome.transaction
    return (outcome.effect, outcome.why, transaction and structs.asdict(transaction))


def _state(ledger: Ledger) -> dict[str, object]:
    """Return everything that can be observed of a ledger."""
    return {
        "positions": (ledger.half_position, ledger.op_position),
        "whole": (ledger.half_whole, ledger.op_whole),
        "clocks": (ledger.half_clock_ms, ledger.op_clock_ms),
        "anchors": (ledger.half_anchor, ledger.op_anchor),
        "whole anchors": (ledger.half_whole_anchor, ledger.op_whole_anchor),
        "transactions": list(map(structs.asdict, ledger.index)),
        "ready": list(ledger.index.ready),
        "waiting": {id: list(each) for id, each in ledger.waiting.items()},
        "waited": ledger.commits_waited,
        "keep": list(ledger.index.to_keep),
        "release": list(ledger.index.to_release),
        "parked": list(ledger.index.parked),
        "groups": (dict(ledger.index.pending_by_group), dict(ledger.index.parked_by_group)),
        "counts": (
            ledger.index.undecided_count,
            ledger.index.unsettled.total,
            len(ledger.index.settled),
        ),
        "bytes": ledger.index.body_bytes,
        "order": [each.id for each in ledger.index.by_offset.after(-1, 1000)],
        "keys": {key: ledger.index.by_dedup_key(*key) is not None for key in ledger.index._dedup},
    }


def _snapshot(ledger: Ledger) -> list[Record]:
    return list(SnapshotCapture(ledger, "one", 0, RECORD_VERSION).records())


PROGRAMS = 150
REACHED = {
    *(("half", effect) for effect in ("APPLIED", "REPEATED", "CONFLICT", "EXPIRED", "VOID")),
    *(("marker", effect) for effect in ("REPEATED", "CONFLICT", "WAITING", "ILLEGAL", "VOID")),
    *((kind.name, effect) for kind in MarkerKind for effect in ("APPLIED", "ILLEGAL")),
    *((kind.name, "WAITING") for kind in MarkerKind),
    *(("replaced", effect) for effect in ("APPLIED", "REPEATED", "CONFLICT", "ILLEGAL", "WAITING")),
    *(("held key", effect) for effect in ("REPEATED", "CONFLICT")),
    *(("after a wait", state.name) for state in (State.COMMITTED, State.ROLLED_BACK)),
    *(("revived", state.name) for state in (State.PENDING, State.REFUSED)),
    ("captured", "CHANGED"),
}
"""What the programs must come to, each many times."""


class Program:
    """Draws rows that mostly fit what a ledger holds, and counts what becomes of them.

    Args:
        single: applies the records of each row as soon as it is drawn, so the next one can fit.
    """

    def __init__(self, seed: int, single: Ledger, reached: Counter[tuple[str, str]]) -> None:
        self.random = Random(seed)
        self.single = single
        self.at_ms = START_MS
        self._reached = reached
        self._made: list[Half] = []
        self._ahead: list[str] = []
        self._numbers = 0

    def run(self) -> tuple[list[HalfRow] | list[MarkerRow], list[ApplyResult]]:
        """Draw a run; return it with what its records came to, one by one."""
        count = self.random.choice([1, 2, 7, 30])
        if self.random.random() < 0.4:
            halves = [self._one(self._half(), self.single.half_position) for _ in range(count)]
            return [row for row, _ in halves if isinstance(row, HalfRow)], [o for _, o in halves]
        marks = [self._one(self._mark(), self.single.op_position) for _ in range(count)]
        return [row for row, _ in marks if isinstance(row, MarkerRow)], [o for _, o in marks]

    def _one(
        self, row: HalfRow | MarkerRow, offset: int
    ) -> tuple[HalfRow | MarkerRow, ApplyResult]:
        half = isinstance(row, HalfRow)
        apply = self.single.apply_half if half else self.single.apply_op
        outcomes = []
        for each in row.records:
            outcomes.append(apply(Record(each.key, each.value, each.headers, self.at_ms, offset)))
            offset += 1
        self._count(row, outcomes[-1])
        return row, outcomes[-1]

    def _count(self, row: HalfRow | MarkerRow, outcome: ApplyResult) -> None:
        effect, transaction = outcome.effect.name, outcome.transaction
        if isinstance(row, HalfRow):
            self._reached["half", effect] += 1
            if transaction is not None and transaction.id != row.half.id:
                self._reached["held key", effect] += 1
            if effect == "APPLIED" and transaction is not None and transaction.verdict.decision:
                self._reached["after a wait", transaction.state.name] += 1
            return
        self._reached["marker", effect] += 1
        self._reached[row.marker.kind.name, effect] += 1
        if row.contents is not None:
            self._reached["replaced", effect] += 1
        if row.marker.kind is MarkerKind.REVIVE and effect == "APPLIED" and transaction is not None:
            self._reached["revived", transaction.state.name] += 1

    def _id(self, away_ms: int = 0, partition: int = 0) -> str:
        self._numbers += 1
        return make_id(partition, self.at_ms + away_ms, self._numbers)

    def _messages(self) -> tuple[Message, ...]:
        random = self.random
        return tuple(
            structs.replace(
                random.choice(MESSAGES), value=random.choice([None, b"", random.randbytes(3)])
            )
            for _ in range(random.choice([1, 1, 3]))
        )

    def _half(self) -> HalfRow:
        random, draw = self.random, self.random.random()
        away_ms, partition = 0, 0
        if self._made and draw < 0.2:
            half = random.choice(self._made)
            if draw < 0.1:
                half = Half(half.id, half.group, self._messages(), policy=half.policy)
            return row_of(half)
        if draw < 0.25:
            away_ms = random.choice([-WINDOW_MS - 5, WINDOW_MS + 5])
        elif draw < 0.28:
            partition = 1
        known = self._ahead and random.random() < 0.5
        half = Half(
            self._ahead.pop() if known else self._id(away_ms, partition),
            random.choice(GROUPS),
            (Message("t", b"k", b"same", (), 0),) if random.random() < 0.3 else self._messages(),
            Attributes(
                random.choice([None, None, "order"]), random.choice([None, None, "key", "é"])
            ),
            random.choice([*POLICIES[:1] * 9, *POLICIES]),
        )
        self._made.append(half)
        return row_of(half)

    def _mark(self) -> MarkerRow:
        random, draw = self.random, self.random.random()
        kind = random.choice(list(MarkerKind))
        known = list(self.single.index)
        if not known or draw < 0.15:
            # Its half message comes later, or never.
            id = random.choice(self._ahead) if self._ahead and draw < 0.05 else self._id()
            if draw > 0.13:
                id = self._id(random.choice([0, -2 * WINDOW_MS]), random.choice([0, 1]))
            else:
                self._ahead.append(id)
            half = Half(id, "g", (Message("t", b"k", b"same", (), 0),))
            return self._row(kind, half, 1, 0)
        transaction = random.choice(known)
        if transaction.state in (State.PENDING, State.PARKED) or random.random() < 0.5:
            kind = self._fitting(transaction)
        number = transaction.checks.number + (kind is MarkerKind.CHECK)
        wrong = random.random() < 0.1
        return self._row(kind, transaction.half, transaction.checks.round + wrong, number)

    def _fitting(self, transaction: Transaction) -> MarkerKind:
        """Return a kind that its state allows, decisions less often."""
        random = self.random
        if transaction.state is State.PENDING:
            last = transaction.checks.attempts and transaction.checks.attempts[-1].counts
            park_ms = transaction.park_ms()
            if park_ms is not None and park_ms <= self.at_ms and random.random() < 0.6:
                return MarkerKind.PARK
            if last and random.random() < 0.3:
                return random.choice([MarkerKind.RETURNED, MarkerKind.LATER])
            if random.random() < 0.6:
                return MarkerKind.CHECK
        elif random.random() < 0.5:
            return MarkerKind.REVIVE
        return random.choice([MarkerKind.COMMIT, MarkerKind.ROLLBACK])

    def _row(self, kind: MarkerKind, half: Half, round_number: int, number: int) -> MarkerRow:
        random = self.random
        contents = None
        if kind is MarkerKind.COMMIT and half.messages and random.random() < 0.5:
            topics = [random.choice([m.topic] * 7 + ["v"]) for m in half.messages]
            value = random.choice([b"final"] * 6 + [b"other"])
            contents = [
                Message(topic, m.key, value, (), m.partition)
                for topic, m in zip(topics, half.messages, strict=True)
            ]
        marker = Marker(
            RECORD_VERSION,
            kind,
            half.id,
            group=random.choice(["", half.group, half.group, *GROUPS]),
            by="é",
            reason=CheckReason.DUE if kind is MarkerKind.CHECK else "",
            round=round_number,
            number=number,
            previous=random.choice(["", "no answer"]),
            later_s=2.5,
            contents=0 if contents is None else len(contents),
        )
        return marker_row(marker, half, contents)


def _turn(random: Random, *ledgers: Ledger) -> None:
    """Promote or refuse some of what is ready, in all ledgers alike."""
    ready = [id for id in ledgers[0].index.ready if random.random() < 0.4]
    for id in ready[:1]:
        for ledger in ledgers:
            ledger.refuse(id, Cause("too_large", "", "t", 0))
    for ledger in ledgers:
        ledger.promote_run([ledger.index.transactions[id] for id in ready[1:]])


@pytest.mark.rule(29)
def test_run_equals_its_records_one_by_one() -> None:
    reached: Counter[tuple[str, str]] = Counter()
    for seed in range(PROGRAMS):
        runs, single = Ledger(0, WINDOW_MS, 3), Ledger(0, WINDOW_MS, 3)
        program = Program(seed, single, reached)
        for _ in range(30):
            program.at_ms += program.random.choice([-2000, 0, 1, 60, 200, 5000])
            captures = None
            if program.random.random() < 0.1:
                captures = [
                    SnapshotCapture(each, "one", 0, RECORD_VERSION) for each in (runs, single)
                ]
            rows, last = program.run()
            if isinstance(rows[0], HalfRow):
                outcomes = runs.apply_halves(rows, runs.half_position, program.at_ms)  # type: ignore[arg-type]
            else:
                outcomes = runs.apply_markers(rows, runs.op_position, program.at_ms)  # type: ignore[arg-type]
            assert list(map(_seen, outcomes)) == list(map(_seen, last)), seed
            assert _state(runs) == _state(single), seed
            if captures is not None:
                one, other = [list(each.records()) for each in captures]
                assert one == other, seed
                reached["captured", "CHANGED"] += Effect.APPLIED in [o.effect for o in outcomes]
            if program.random.random() < 0.3:
                _turn(program.random, runs, single)
        assert _snapshot(runs) == _snapshot(single), seed
    rare = {each: reached[each] for each in REACHED if reached[each] < 20}
    assert not rare
