"""Made-up runs for the judge: one half partition, one partition for each target topic."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tests.faults.judge import (
    Asked,
    Body,
    Call,
    Case,
    End,
    Header,
    History,
    Judge,
    Note,
    Rec,
    Seen,
    Topics,
)

T0_MS = 1_700_000_000_000
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
POLICY = "1/2/3/1"
"""First check after 1 s, then every 2 s, 3 attempts, 1 s for the last answer."""
CAUSE = {"code": "unknown_topic", "message": "gone", "topic": "a", "partition": 0}


def make_id(number: int, at_ms: int = T0_MS) -> str:
    bits = at_ms << 64 | number
    return "".join(_LETTERS[bits >> shift & 31] for shift in range(125, -1, -5))


def at(ms: int) -> float:
    return (T0_MS + ms) / 1000


@dataclass
class Run:
    """One run, written down step by step; all times are milliseconds since it began.

    By default the concurrent reader saw all final records, and one promotion transaction wrote
    them.
    """

    history: History = field(default_factory=History)
    topics: Topics = field(default_factory=Topics)
    rows: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    deferred: list[str] = field(default_factory=list)
    turns: list[tuple[str, dict[str, Any]]] | None = None
    seen_at: dict[int, int] = field(default_factory=dict)

    def prepare(
        self,
        number: int,
        topics: str = "a",
        at_ms: int = 0,
        order: str = "",
        token: str = "",
        dedup: str = "",
    ) -> str:
        """A prepare that is answered, and its half message."""
        token = token or f"t{number}"
        headers = (("token", token.encode()),)
        value = b"v" + token.encode()
        self.history.sent[token] = tuple(
            Body(topic, b"k" if order else None, value, headers) for topic in topics
        )
        self.call("prepare", number, at_ms, token=token)
        self.store(number, token, at_ms, order, dedup)
        return make_id(number)

    def store(self, number: int, token: str, at_ms: int, order: str = "", dedup: str = "") -> None:
        bodies = self.history.sent[token]
        for sequence, body in enumerate(bodies):
            optional = [("check", POLICY)]
            optional += [("order", order)] if order else []
            optional += [("dedup", dedup)] if dedup else []
            headers = half_headers(number, body, sequence, len(bodies), optional)
            self.append(self.topics.half, "half", at_ms, body.key, body.value, headers)

    def call(self, what: str, number: int, at_ms: int, **fields: Any) -> None:
        """A client's call, answered with ok by default."""
        given = {"token": f"t{number}", "ended": at(at_ms) + 0.001, "result": "ok", **fields}
        self.history.calls.append(Call(what, began=at(at_ms), id=make_id(number), **given))

    def mark(self, tx: int, kind: str, at_ms: int, **fields: Any) -> None:
        id = make_id(tx)
        value = json.dumps({"v": 1, "kind": kind, "id": id, **fields}).encode()
        self.append(self.topics.op, "op", at_ms, id.encode(), value, ())

    def decide(self, number: int, kind: str, at_ms: int) -> None:
        """A decision that is answered, and its marker."""
        self.call(kind, number, at_ms)
        self.mark(number, kind, at_ms, group="g")

    def show(self, number: int, decided_ms: int, bodies: tuple[Body, ...] = ()) -> None:
        id, bodies = make_id(number), bodies or self.history.sent[f"t{number}"]
        for sequence, body in enumerate(bodies):
            ours: list[Header] = [("txb-id", id.encode())]
            if len(bodies) > 1:
                ours.append(("txb-seq", b"%d/%d" % (sequence, len(bodies))))
            headers = (*ours, *body.headers)
            self.append(self.topics.targets, body.topic, decided_ms, body.key, body.value, headers)

    def check(
        self, number: int, at_ms: int, attempt: int = 1, answer: str = "unknown", **fields: Any
    ) -> None:
        """An attempt's marker, and the check that a client answers."""
        marker = {"round": 1, "number": attempt, "reason": "due", **fields}
        self.mark(number, "check", at_ms, **marker)
        self.history.asked.append(Asked(make_id(number), at(at_ms + 1), answer))

    def keep(self, number: int, state: str, cause: dict[str, Any] | None = None) -> None:
        for sequence, body in enumerate(self.history.sent[f"t{number}"]):
            facts = {"state": state} | ({"cause": cause} if cause else {})
            headers = (("txb-kept", json.dumps(facts).encode()),) if sequence == 0 else ()
            key = f"{make_id(number)}/{sequence}".encode()
            self.append(self.topics.parked, "parked", 0, key, body.value or b"", headers)

    def append(
        self,
        log: list[Rec],
        topic: str,
        at_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[Header, ...],
    ) -> None:
        offset = sum(record.topic == topic for record in log)
        log.append(Rec(topic, 0, offset, T0_MS + at_ms, key, value, headers))

    # --- the whole -----------------------------------------------------------------------

    def progress(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        """A checkpoint that covers everything except `fields`."""
        ends = {"op": len(self.topics.op), "half": len(self.topics.half)}
        return "progress", {"v": 1, "claim": "c", **ends, "deferred": self.deferred, **fields}

    def case(self) -> Case:
        claim = ("claim", {"v": 1, "claim": "c", "owner": "one", "url": ""})
        records = [claim, self.progress()] if self.turns is None else self.turns
        topics = replace(self.topics, checkpoint=[])
        for key, value in records:
            record = (key.encode(), json.dumps(value).encode(), ())
            self.append(topics.checkpoint, "checkpoint", 0, *record)
        if topics.along is None:
            topics.along = [
                Seen(record, at(self.seen_at.get(place, 20_000)))
                for place, record in enumerate(topics.targets)
            ]
            topics.along.sort(key=lambda seen: seen.record.offset)
        return Case(self.history, topics, self.rows, self.states, self.options)

    def judge(self) -> list[tuple[str, str]]:
        return [(each.invariant, each.id) for each in judged(self.case()).judge()]


def judged(case: Case) -> Judge:
    return Judge(case.history, case.topics, case.rows, case.states, **case.options)


def half_headers(
    number: int, body: Body, sequence: int, count: int, optional: list[tuple[str, str]]
) -> tuple[Header, ...]:
    optional = optional if sequence == 0 else []
    ours = {
        "txb-v": " ".join(["1", *(name for name, _ in optional)]),
        "txb-id": make_id(number),
        "txb-group": "g",
        "txb-topic": body.topic,
        "txb-part": "0",
        "txb-seq": f"{sequence}/{count}",
        **{f"txb-{name}": value for name, value in optional},
    }
    return tuple((name, value.encode()) for name, value in ours.items()) + body.headers


def sound() -> Run:
    """1 committed in two topics, with a row; 2 rolled back; 3 unknown to the end, parked; 4 and 5
    of one order; 6 committed by a check; 7 refused whole; 10 and 11 one prepare sent twice; 12
    with other messages at its commit; 13 asked twice, one attempt given back; 14 parked, revived,
    rolled back."""
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
    run.keep(7, "refused", CAUSE)
    _sent_twice(run)
    _replaced(run)
    run.check(6, 1080, answer="commit")
    run.mark(6, "commit", 1100, source="check")
    run.show(6, 1100)
    for attempt, at_ms in enumerate((1130, 3130, 5130), 1):
        run.check(3, at_ms, attempt)
    run.mark(3, "park", 6130, round=1)
    run.keep(3, "parked")
    _given_back(run)
    _revived(run)
    run.states = {make_id(1): "promoted", make_id(3): "parked"}
    run.history.notes = [
        Note(at(5), "kill", "one"),
        Note(at(15), "healed"),
        Note(at(9000), "quiet"),
    ]
    run.topics.ends = [End("a", 0, 9, 9), End("b", 0, 1, 1)]
    return run


def _sent_twice(run: Run) -> None:
    run.prepare(10, at_ms=110, dedup="d")
    run.store(11, "t10", 120, dedup="d")
    run.decide(10, "commit", 130)
    run.show(10, 130)


def _replaced(run: Run) -> None:
    run.prepare(12, at_ms=140)
    final = (Body("a", b"new", b"new", ()),)
    run.call("commit", 12, 150, messages=final)
    run.mark(12, "commit", 150, group="g", contents=1)
    headers = half_headers(12, final[0], 0, 1, [])
    run.append(run.topics.op, "op", 150, b"new", b"new", headers)
    run.show(12, 150, final)


def _given_back(run: Run) -> None:
    run.prepare(13, at_ms=6200)
    run.mark(13, "check", 7200, round=1, number=1, reason="due")
    run.mark(13, "returned", 7210, round=1, number=1)
    run.check(13, 7300, 2, answer="not yet")
    run.mark(13, "later", 7310, round=1, number=2, later_s=1.0)
    run.check(13, 8310, 3, answer="rollback")
    run.mark(13, "rollback", 8320, source="check")


def _revived(run: Run) -> None:
    run.prepare(14, at_ms=8400)
    for attempt, at_ms in enumerate((9400, 11_400, 13_400), 1):
        run.check(14, at_ms, attempt)
    run.mark(14, "park", 14_400, round=1)
    run.mark(14, "revive", 14_500, round=1)
    run.check(14, 15_500, answer="rollback", round=2)
    run.mark(14, "rollback", 15_510, source="check")
