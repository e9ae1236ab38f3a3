"""The judge itself: silent on a sound run, and each planted crime is seen by the invariant that is
there for it, and by no other."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import judge
from tests.faults.handmade import T0_MS, Run, at, judged, make_id, sound
from tests.faults.judge import Asked, Body, Call, End, Note, Seen, id_time_ms, load, save

PACKAGE = Path(judge.__file__).parent


def test_sound_run_has_no_violation() -> None:
    assert id_time_ms(make_id(1)) == T0_MS
    assert sound().judge() == []


def test_installation_header_comes_first() -> None:
    run = sound()
    run.topics.targets = [
        replace(record, headers=(("txb-installation", b"shop"), *record.headers))
        for record in run.topics.targets
    ]
    assert run.judge() == []
    first = run.topics.targets[0]
    more = (*first.headers[:2], ("txb-installation", b"shop"), *first.headers[2:])
    run.topics.targets[0] = replace(first, headers=more)
    assert {name for name, _ in run.judge()} == {"I4"}


def test_judge_imports_only_the_standard_library() -> None:
    found = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    assert found <= sys.stdlib_module_names
    assert found >= {"json", "dataclasses"}


# --- crimes ----------------------------------------------------------------------------------


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


def place_of(run: Run, number: int) -> int:
    id = make_id(number)
    return next(p for p, r in enumerate(run.topics.targets) if r.header("txb-id") == id)


def unkeep(run: Run, number: int) -> None:
    id = make_id(number)
    run.topics.parked = [r for r in run.topics.parked if id not in (r.key or b"").decode()]


def lose_the_cause(run: Run) -> None:
    unkeep(run, 7)
    run.keep(7, "refused")


def show_a_stranger(run: Run) -> None:
    headers = (("txb-id", make_id(99).encode()),)
    run.append(run.topics.targets, "a", 0, None, b"stranger", headers)


def prepare_under_two_ids(run: Run) -> None:
    run.store(15, "t6", 15_600)
    run.decide(15, "commit", 15_700)
    run.show(15, 15_700, run.history.sent["t6"])
    run.history.calls[-1].token = "t6"


def remember(run: Run, number: int, what: str, **fields: Any) -> None:
    run.call(what, number, 17_000, **fields)


def guess_at_the_end(run: Run) -> None:
    del run.states[make_id(3)]
    run.mark(3, "rollback", 18_000, source="schedule")


def commit_without_a_client(run: Run) -> None:
    del run.states[make_id(3)]
    run.mark(3, "commit", 18_000, source="check")
    run.show(3, 18_000)


def decide_before_the_answer(run: Run) -> None:
    id = make_id(6)
    run.history.asked = [
        replace(each, at=at(1300)) if each.id == id else each for each in run.history.asked
    ]


def check_late(run: Run, *at_ms: int, decided_ms: int = 0) -> None:
    """Prepare 9 after the rest, check it at these times, and roll it back."""
    run.prepare(9, at_ms=16_000)
    for attempt, when_ms in enumerate(at_ms, 1):
        run.check(9, when_ms, attempt)
    if decided_ms:
        run.decide(9, "rollback", decided_ms)


def ask_too_often(run: Run) -> None:
    check_late(run, 17_000, 19_000, 21_000, 23_000)
    run.mark(9, "park", 25_000, round=1)
    run.keep(9, "parked")


def give_back_an_asked_attempt(run: Run) -> None:
    """An unanswered check counts as one that reached no instance."""
    run.prepare(9, at_ms=16_000)
    for number in range(1, 5):
        run.check(9, 15_000 + number * 2000, number)
        run.mark(9, "returned", 15_100 + number * 2000, round=1, number=number)
    run.decide(9, "rollback", 30_000)


def park_too_early(run: Run) -> None:
    check_late(run, 17_000, 19_000)
    run.mark(9, "park", 20_500, round=1)
    run.states[make_id(9)] = "parked"
    run.decide(9, "rollback", 30_000)


def turns_of_two(run: Run, *checkpoints: dict[str, Any]) -> None:
    claims = [("claim", {"v": 1, "claim": name}) for name in ("b", "c")]
    run.turns = [*claims, *(run.progress(**fields) for fields in checkpoints)]


def miss_a_visible_record(run: Run) -> None:
    run.topics.along = [
        Seen(record, at(20_000))
        for place, record in enumerate(run.topics.targets)
        if place != place_of(run, 4)
    ]


def see_a_record_that_is_gone(run: Run) -> None:
    ghost = replace(run.topics.targets[0], offset=77, headers=(("txb-id", b"ghost"),))
    run.topics.along = [Seen(r, at(20_000)) for r in [*run.topics.targets, ghost]]


def lose_the_half(run: Run, number: int) -> None:
    run.topics.half = [r for r in run.topics.half if r.header("txb-id") != make_id(number)]


def swap_order(run: Run) -> None:
    four, five = (run.topics.targets[place_of(run, number)] for number in (4, 5))
    change_visible(run, 4, offset=five.offset)
    change_visible(run, 5, offset=four.offset)


def decide_in_other_order(run: Run) -> None:
    """The commit of 5 was acknowledged before the one of 4 was sent, whose marker is first."""
    four, five = (
        next(c for c in run.history.calls if (c.what, c.token) == ("commit", token))
        for token in ("t4", "t5")
    )
    four.began, four.ended = at(62), at(90)
    five.began, five.ended = at(60), at(61)


Crime = Callable[[Run], object]
WRONG = {"result": "fail", "code": "already_decided", "decision": "rollback"}
CRIMES: dict[str, tuple[Crime, str, int | None]] = {
    "a committed one is not visible": (lambda r: without_visible(r, 6), "I1", 6),
    "refused without a cause": (lose_the_cause, "I1", 7),
    "a rolled back one is visible": (lambda r: r.show(2, 20), "I2", 2),
    "a parked one is visible": (lambda r: r.show(3, 20), "I2", 3),
    "a stranger is visible": (show_a_stranger, "I2", 99),
    "visible before it was decided": (lambda r: r.seen_at.update({place_of(r, 4): 1}), "I2", 4),
    "a message is there twice": (lambda r: r.show(6, 1100), "I3", 6),
    "two prepares have one id": (
        lambda r: r.history.calls.append(Call("prepare", "t9", 0, make_id(1), 0, "ok")),
        "I3",
        1,
    ),
    "one prepare was committed under two ids": (prepare_under_two_ids, "I3", 15),
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
    "commit was acked, the log has rollback": (lambda r: remember(r, 2, "commit"), "I5", 2),
    "the standing decision was answered wrongly": (
        lambda r: remember(r, 1, "rollback", **WRONG),
        "I5",
        1,
    ),
    "the proxy reports another final state": (
        lambda r: r.states.update({make_id(1): "rolled_back"}),
        "I5",
        1,
    ),
    "an answered state that never was": (lambda r: remember(r, 2, "show", state="parked"), "I5", 2),
    "an acked prepare is denied": (
        lambda r: remember(r, 1, "show", result="fail", code="not_found"),
        "I5",
        1,
    ),
    "visible without a row": (lambda r: r.rows.clear(), "I6", 1),
    "a row and rolled back": (lambda r: r.rows.append(make_id(2)), "I6", 2),
    "a row without a half": (lambda r: r.rows.append(make_id(8)), "I6", 8),
    "unknown is guessed": (guess_at_the_end, "I7", 3),
    "a decision of no client": (commit_without_a_client, "I7", 3),
    "decided before a client sent it": (decide_before_the_answer, "I7", 6),
    "parked and not kept": (lambda r: unkeep(r, 3), "I7", 3),
    "one attempt too many": (ask_too_often, "I8", 9),
    "an asked attempt is given back": (give_back_an_asked_attempt, "I8", 9),
    "asked twice for one attempt": (
        lambda r: r.history.asked.append(Asked(make_id(6), at(1090), "unknown", 1)),
        "I8",
        6,
    ),
    "parked with an attempt left": (park_too_early, "I8", 9),
    "asked before its time": (lambda r: check_late(r, 16_001, decided_ms=16_300), "I9", 9),
    "asked again too soon": (
        lambda r: check_late(r, 17_000, 17_500, decided_ms=18_300),
        "I9",
        9,
    ),
    "asked after a decision": (lambda r: r.check(2, 16_000), "I9", 2),
    "half of a transaction is visible": (lambda r: without_visible(r, 1, "a"), "I10", 1),
    "refused and visible": (lambda r: r.show(7, 100), "I10", 7),
    "visible, and no turn passed it": (lambda r: turns_of_two(r, {"op": 2}), "I11", 4),
    "visible, and deferred": (lambda r: r.deferred.append(make_id(6)), "I11", 6),
    "progress goes back": (lambda r: turns_of_two(r, {"op": 99}, {}), "I11", None),
    "a fenced owner's turn": (lambda r: turns_of_two(r, {"claim": "b"}, {}), "I11", None),
    "a visible record is gone": (see_a_record_that_is_gone, "I11", None),
    "visible below a reader's offset": (miss_a_visible_record, "I11", 4),
    "still undecided in the end": (lambda r: r.prepare(9, at_ms=16_000), "I12", 9),
    "a Kafka transaction hangs": (lambda r: r.topics.ends.append(End("c", 0, 9, 5)), "I12", None),
    "no rest in time": (
        lambda r: r.history.notes.append(Note(at(9_000_000), "quiet")),
        "I12",
        None,
    ),
    "an acked prepare is not in the log": (lambda r: lose_the_half(r, 2), "I15", 2),
    "an acked decision is not in the log": (lambda r: r.call("commit", 3, 18_000), "I15", 3),
    "visible in another order": (swap_order, "I17", 5),
    "decided in another order than acked": (decide_in_other_order, "I17", 5),
}


@pytest.mark.parametrize("crime", CRIMES)
def test_each_crime_breaks_exactly_its_invariant(crime: str) -> None:
    commit, invariant, number = CRIMES[crime]
    run = sound()
    commit(run)
    found = run.judge()
    assert {name for name, _ in found} == {invariant}
    if number is not None:
        assert (invariant, make_id(number)) in found


def test_every_invariant_has_a_crime() -> None:
    judged_here = {f"I{number}" for number in (*range(1, 13), 15, 17)}
    assert {invariant for _, invariant, _ in CRIMES.values()} == judged_here


def test_legal_runs_have_no_violation() -> None:
    """Not answered, given up, waiting for a leader, not at rest yet, or another instance asked."""
    run = sound()
    run.call("commit", 3, 17_000, result="unknown", code="owner_unavailable")
    run.call("prepare", 98, 17_000, result="invoke", ended=0.0)
    run.prepare(8, "c", at_ms=17_000)
    run.decide(8, "commit", 17_010)
    run.deferred.append(make_id(8))
    run.topics.ends.append(End("c", 0, 9, 5))
    run.options = {"without_leader": ["c-0"]}
    assert run.judge() == []
    run.prepare(9, at_ms=17_000)
    run.options["settled"] = False
    asked = run.history.asked
    (first,) = (each for each in asked if each.id == make_id(6))
    asked.remove(first)
    asked += [Asked(make_id(6), at(1080), "unknown", 1), replace(first, attempt=1)]
    assert run.judge() == []


# --- output ----------------------------------------------------------------------------------


def test_timeline_has_all_events_by_time() -> None:
    run = sound()
    run.show(6, 1100)
    (violation,) = judged(run.case()).judge()
    text = str(violation)
    words = [
        "I3",
        make_id(6),
        "2 copies",
        "-- claim 0:0",
        "-- kill one",
        "prepare t6: sent",
        "half 0:",
        "prepare t6: ok",
        '"kind": "check"',
        "check-back: answered commit",
        '"kind": "commit"',
        "visible in a-0",
        "business rows: 0",
    ]
    places = [text.index(word) for word in words]
    assert places == sorted(places), text


def test_unsettled_transactions_come_from_topics() -> None:
    run = sound()
    run.prepare(8, at_ms=16_000)
    run.prepare(9, at_ms=16_000)
    run.decide(9, "commit", 16_010)
    assert judged(run.case()).unsettled() == {
        make_id(3): "parked",
        make_id(7): "refused",
        make_id(8): "pending",
        make_id(9): "committed",
    }


# --- offline ---------------------------------------------------------------------------------


def command(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", _RUN, str(PACKAGE.parents[2]), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


_RUN = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
try:
    runpy.run_module("tests.faults.judge", run_name="__main__", alter_sys=True)
finally:
    assert not [name for name in sys.modules if name.startswith("txbroker")]
"""


def test_saved_run_is_judged_like_the_original(tmp_path: Path) -> None:
    run = sound()
    run.history.sent["t1"] = tuple(
        replace(body, headers=(*body.headers, ("same", b"\x00\xff"), ("same", b""), ("null", None)))
        for body in run.history.sent["t1"]
    )
    save(run.case(), tmp_path)
    read = load(tmp_path)
    expected = run.case()
    for history in (read.history, expected.history):
        history.calls.sort(key=lambda call: (call.began, str(call)))
        history.asked.sort(key=lambda each: each.at)
    assert (read.topics, read.history) == (expected.topics, expected.history)
    assert [str(each) for each in judged(read).judge()] == [
        str(each) for each in judged(expected).judge()
    ]


def test_command_reports_by_exit_code(tmp_path: Path) -> None:
    run = sound()
    save(run.case(), tmp_path / "good")
    run.show(6, 1100)
    save(run.case(), tmp_path / "bad")
    good, bad = command(tmp_path / "good"), command(tmp_path / "bad")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith(" 0 violations\n")
    assert (bad.returncode, bad.stderr) == (1, "")
    assert bad.stdout.startswith(f"I3 {make_id(6)}: 2 copies of ")
    (tmp_path / "bad" / "history.jsonl").write_text('{"event": "nonsense"}\n')
    unreadable = command(tmp_path / "bad")
    assert unreadable.returncode == 2
    assert "line 1 of the history cannot be read" in unreadable.stderr
    assert command(tmp_path / "nowhere").returncode == 2
