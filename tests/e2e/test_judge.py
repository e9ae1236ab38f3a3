"""The judge itself: silent on a sound run, and each planted crime is seen and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from judge import Asked, Body, Call, History, Judge, Rec, Topics, id_time_ms

T0_MS = 1_700_000_000_000
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
POLICY = "1/2/3/1"
"""First check after 1 s, then every 2 s, 3 attempts, 1 s for the last answer."""


def make_id(number: int, at_ms: int = T0_MS) -> str:
    bits = at_ms << 64 | number
    return "".join(_LETTERS[bits >> shift & 31] for shift in range(125, -1, -5))


@dataclass
class Run:
    """A made-up run: one half partition, one target partition a topic."""

    history: History = field(default_factory=History)
    topics: Topics = field(default_factory=Topics)
    rows: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)

    def prepare(self, number: int, topics: str = "a", at_ms: int = 0, order: str = "") -> str:
        id, token = make_id(number), f"t{number}"
        bodies = tuple(
            Body(topic, b"k" if order else None, b"v%d" % number, (("token", token.encode()),))
            for topic in topics
        )
        self.history.sent[token] = bodies
        self.call("prepare", number, at_ms)
        for sequence, body in enumerate(bodies):
            optional = [("check", POLICY)] if sequence == 0 else []
            optional += [("order", order)] if order and sequence == 0 else []
            ours = {
                "txb-v": " ".join(["1", *(name for name, _ in optional)]),
                "txb-id": id,
                "txb-group": "g",
                "txb-topic": body.topic,
                "txb-part": "0",
                "txb-seq": f"{sequence}/{len(bodies)}",
                **{f"txb-{name}": value for name, value in optional},
            }
            headers = tuple((name, value.encode()) for name, value in ours.items()) + body.headers
            self.append(self.topics.half, "half", at_ms, body.key, body.value, headers)
        return id

    def call(self, what: str, number: int, at_ms: int, **fields: Any) -> None:
        at = (T0_MS + at_ms) / 1000
        given: dict[str, Any] = {"ended": at + 0.001, "result": "ok", **fields}
        self.history.calls.append(Call(what, f"t{number}", at, make_id(number), **given))

    def mark(self, tx: int, kind: str, at_ms: int, **fields: Any) -> None:
        id = make_id(tx)
        value = json.dumps({"v": 1, "kind": kind, "id": id, **fields}).encode()
        self.append(self.topics.op, "op", at_ms, id.encode(), value, ())

    def decide(self, number: int, kind: str, at_ms: int) -> None:
        self.call(kind, number, at_ms)
        self.mark(number, kind, at_ms, group="g")

    def show(self, number: int, decided_ms: int) -> None:
        id, bodies = make_id(number), self.history.sent[f"t{number}"]
        for sequence, body in enumerate(bodies):
            ours = [("txb-id", id.encode())]
            if len(bodies) > 1:
                ours.append(("txb-seq", b"%d/%d" % (sequence, len(bodies))))
            headers = (*ours, *body.headers)
            self.append(self.topics.targets, body.topic, decided_ms, body.key, body.value, headers)

    def check(self, number: int, at_ms: int, attempt: int = 1, reason: str = "due") -> None:
        self.mark(number, "check", at_ms, round=1, number=attempt, reason=reason)
        self.history.asked.append(Asked(make_id(number), (T0_MS + at_ms) / 1000, "unknown"))

    def keep(self, number: int, state: str) -> None:
        for sequence, body in enumerate(self.history.sent[f"t{number}"]):
            facts = json.dumps({"state": state}).encode()
            headers = (("txb-kept", facts),) if sequence == 0 else ()
            key = f"{make_id(number)}/{sequence}".encode()
            self.append(self.topics.parked, "parked", 0, key, body.value or b"", headers)

    def append(
        self,
        log: list[Rec],
        topic: str,
        at_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[tuple[str, bytes | None], ...],
    ) -> None:
        offset = sum(record.topic == topic for record in log)
        log.append(Rec(topic, 0, offset, T0_MS + at_ms, key, value, headers))

    def judge(self) -> list[tuple[str, str]]:
        found = Judge(self.history, self.topics, self.rows, self.states).judge()
        return [(each.invariant, each.id) for each in found]


def sound() -> Run:
    """1 committed in two topics, with a row; 2 rolled back; 3 unknown to the end, parked; 4 and 5
    of one order; 6 committed by a check; 7 refused whole."""
    run = Run()
    run.history.business = {"t1", "t2"}
    run.prepare(1, "ab")
    run.prepare(2)
    run.decide(1, "commit", 10)
    run.show(1, 10)
    run.rows.append(make_id(1))
    run.decide(2, "rollback", 20)
    run.prepare(3, at_ms=30)
    run.prepare(4, at_ms=40, order="o")
    run.prepare(5, at_ms=50, order="o")
    run.decide(4, "commit", 60)
    run.decide(5, "commit", 70)
    run.show(4, 60)
    run.show(5, 70)
    run.prepare(6, at_ms=80)
    run.prepare(7, "ab", at_ms=90)
    run.decide(7, "commit", 100)
    run.keep(7, "refused")
    run.check(6, 1080)
    run.history.asked[-1] = replace(run.history.asked[-1], answer="commit")
    run.mark(6, "commit", 1100, source="check")
    run.show(6, 1100)
    for attempt, at_ms in enumerate((1130, 3130, 5130), 1):
        run.check(3, at_ms, attempt)
    run.mark(3, "park", 6130, round=1)
    run.keep(3, "parked")
    run.states = {make_id(1): "promoted", make_id(3): "parked"}
    return run


def test_the_judge_is_silent_on_a_sound_run() -> None:
    assert id_time_ms(make_id(1)) == T0_MS
    assert sound().judge() == []


def without_visible(run: Run, number: int, topic: str = "") -> None:
    id = make_id(number).encode()
    run.topics.targets = [
        record
        for record in run.topics.targets
        if record.headers[0][1] != id or (topic and record.topic != topic)
    ]


def change_visible(run: Run, number: int, **changes: Any) -> None:
    id = make_id(number).encode()
    run.topics.targets = [
        replace(record, **changes) if record.headers[0][1] == id else record
        for record in run.topics.targets
    ]


def remember(run: Run, number: int, what: str, **fields: Any) -> None:
    run.call(what, number, 7000, **fields)


def lose_the_half(run: Run, number: int) -> None:
    run.topics.half = [r for r in run.topics.half if r.header("txb-id") != make_id(number)]


def swap_order(run: Run) -> None:
    four = next(r for r in run.topics.targets if r.header("txb-id") == make_id(4))
    five = next(r for r in run.topics.targets if r.header("txb-id") == make_id(5))
    change_visible(run, 4, offset=five.offset)
    change_visible(run, 5, offset=four.offset)


def decide_in_other_order(run: Run) -> None:
    for call in run.history.calls:
        if (call.what, call.token) == ("commit", "t4"):
            call.began = call.ended = call.ended + 1


def ask_too_often(run: Run) -> None:
    run.check(3, 5500, 4)


def ask_too_early(run: Run) -> None:
    run.prepare(9, at_ms=6200)
    run.check(9, 6201)
    run.decide(9, "rollback", 6300)


def ask_behind_a_decision(run: Run) -> None:
    run.check(2, 1500)


def park_too_early(run: Run) -> None:
    run.prepare(9, at_ms=6200)
    for attempt, at_ms in enumerate((7200, 9200), 1):
        run.check(9, at_ms, attempt)
    run.mark(9, "park", 10500, round=1)
    run.states[make_id(9)] = "parked"


def guess_at_the_end(run: Run) -> None:
    run.mark(3, "rollback", 8000, source="schedule")


def commit_what_nobody_said(run: Run) -> None:
    run.mark(3, "commit", 8000, source="check")
    run.show(3, 8000)


def commit_after_rollback(run: Run) -> None:
    run.decide(2, "commit", 8000)
    run.show(2, 8000)


CRIMES: dict[str, tuple[Callable[[Run], Any], str, int]] = {
    "a committed one is not visible": (lambda r: without_visible(r, 1), "I1", 1),
    "an acked prepare is not in the log": (lambda r: lose_the_half(r, 2), "I1", 2),
    "a rolled back one is visible": (lambda r: r.show(2, 20), "I2", 2),
    "a stranger is visible": (lambda r: lose_the_half(r, 4), "I2", 4),
    "a second commit wins": (commit_after_rollback, "I2", 2),
    "a message is there twice": (lambda r: r.show(4, 60), "I3", 4),
    "two prepares have one id": (
        lambda r: r.history.calls.append(Call("prepare", "t9", 0, make_id(1), 0, "ok")),
        "I3",
        1,
    ),
    "a key is lost": (lambda r: change_visible(r, 4, key=None), "I4", 4),
    "a tombstone comes out of a value": (lambda r: change_visible(r, 6, value=None), "I4", 6),
    "headers are lost": (
        lambda r: change_visible(r, 6, headers=(("txb-id", make_id(6).encode()),)),
        "I4",
        6,
    ),
    "the timestamp is the proxy's": (lambda r: change_visible(r, 6, timestamp_ms=1), "I4", 6),
    "another body than was sent": (
        lambda r: r.history.sent.update(t6=(Body("a", None, b"other", ()),)),
        "I4",
        6,
    ),
    "commit was acked, the log says rollback": (lambda r: remember(r, 2, "commit"), "I5", 2),
    "the standing decision was told wrongly": (
        lambda r: remember(
            r, 1, "rollback", result="fail", code="already_decided", decision="rollback"
        ),
        "I5",
        1,
    ),
    "the proxy tells another state": (
        lambda r: r.states.update({make_id(1): "rolled_back"}),
        "I5",
        1,
    ),
    "visible without a row": (lambda r: r.rows.clear(), "I6", 1),
    "a row and rolled back": (lambda r: r.rows.append(make_id(2)), "I6", 2),
    "a row without a half": (lambda r: r.rows.append(make_id(8)), "I6", 8),
    "unknown is guessed": (guess_at_the_end, "I7", 3),
    "a decision that nobody made": (commit_what_nobody_said, "I7", 3),
    "parked and not kept": (lambda r: r.topics.parked.clear(), "I7", 3),
    "one attempt too many": (ask_too_often, "I8", 3),
    "parked with an attempt left": (park_too_early, "I5", 9),
    "asked before its time": (ask_too_early, "I9", 9),
    "asked behind a decision": (ask_behind_a_decision, "I8", 2),
    "half of a transaction is visible": (lambda r: without_visible(r, 1, "a"), "I10", 1),
    "refused and visible": (lambda r: r.show(7, 100), "I10", 7),
    "still undecided in the end": (lambda r: r.prepare(9, at_ms=9000), "I12", 9),
    "visible in another order": (swap_order, "I17", 5),
    "decided in another order than acked": (decide_in_other_order, "I17", 5),
}


@pytest.mark.parametrize("crime", CRIMES)
def test_the_judge_sees(crime: str) -> None:
    commit, invariant, number = CRIMES[crime]
    run = sound()
    commit(run)
    assert (invariant, make_id(number)) in run.judge()


def test_the_story_of_a_violation_tells_what_happened() -> None:
    run = sound()
    run.show(4, 60)
    (violation,) = [
        each
        for each in Judge(run.history, run.topics, run.rows).judge()
        if (each.invariant, each.id) == ("I3", make_id(4))
    ]
    for word in ("prepare", "commit", "half 0:", "op ", "visible in a-0", "business rows: 0"):
        assert word in str(violation)


def test_what_is_not_settled_is_told_from_the_topics() -> None:
    run = sound()
    run.prepare(8, at_ms=9000)
    run.prepare(9, at_ms=9000)
    run.decide(9, "commit", 9010)
    assert Judge(run.history, run.topics).unsettled() == {
        make_id(3): "parked",
        make_id(7): "refused",
        make_id(8): "pending",
        make_id(9): "committed",
    }
