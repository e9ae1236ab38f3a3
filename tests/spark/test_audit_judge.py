"""The judge: the ledger's own rules, and every finding."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from hypothesis import given

from tests.core.core_fuzz import fuzz
from tests.core.core_histories import histories
from tests.kit.logs import PARTITION, START_MS, WINDOW_MS, Logs, id_of, replayed
from tests.spark.audit_facts import (
    COMMIT,
    HALF,
    ID,
    NOW_MS,
    TERMS,
    check_row,
    copy_rows,
    facts_from,
    half_rows,
    judged,
    op_row,
    parked_row,
    visible_rows,
)
from txbroker.core.routing import parse_id
from txbroker.spark.judge import judge as judge_module
from txbroker.spark.judge.judge import judge
from txbroker.spark.judge.rows import (
    ALWAYS,
    Content,
    HalfFact,
    Horizon,
    JudgedTransaction,
    MarkerFact,
    ParkedFact,
    TransactionFacts,
    VisibleFact,
    read_id,
)

DECIDED_MS = COMMIT.at_ms
ROLLBACK = op_row("rollback")
VOID = half_rows(void="expired")
VISIBLE = visible_rows(HALF)
TRIES = [check_row(n, START_MS + 6000 + (n - 1) * 30_000, n) for n in (1, 2, 3)]
PARK = op_row("park", 4, TRIES[-1].at_ms + 5000)


# --- the ledger's rules ----------------------------------------------------------------------


@given(histories(steps_max=25))
@fuzz
def test_it_comes_to_what_the_ledger_comes_to(logs: Logs) -> None:
    ledger = replayed(logs)
    facts = facts_from(logs)
    known = {transaction.id for transaction in ledger.index.transactions.values()}
    for id, each in facts.items():
        verdict = judge(each, TERMS)
        # Rows come in any order, and some were read twice.
        twisted = TransactionFacts(id, [*each.half[::-1], *each.half], [*each.op[::-1], *each.op])
        assert judge(twisted, TERMS) == verdict
        transaction = ledger.index.get(id)
        if transaction is None:
            assert verdict.state in ("void", "gone")
            assert verdict.half_offset is None
            continue
        known.discard(id)
        assert verdict.state == str(transaction.state)
        decided = transaction.verdict
        assert verdict.decision == (decided.decision and str(decided.decision))
        assert verdict.source == (decided.source and str(decided.source))
        assert (verdict.decided_at_ms or 0) == decided.at_ms
        assert (verdict.op_offset if verdict.decision else -1) == decided.op_offset
        assert verdict.attempts == len(transaction.checks.counted_ms)
        assert verdict.prepared_at_ms == transaction.prepared_at_ms
        assert verdict.half_offset == transaction.offset
        assert verdict.messages == len(transaction.places)
    assert not known


def test_ids_read_as_the_ledger_reads_them() -> None:
    for id in (id_of(5), id_of(2**64 - 1, 2**48 - 1, 0xFFFF), "0" * 26):
        parts = parse_id(id)
        assert read_id(id) == (parts.partition, parts.time_ms)
    assert [read_id(id) for id in ("", "0" * 25, "Z" * 26, "I" + "0" * 25)] == [None] * 4


def test_it_runs_where_nothing_of_ours_is_installed() -> None:
    from pyspark import cloudpickle

    from txbroker.spark.judge import fold as life
    from txbroker.spark.judge import rows

    for module in (judge_module, life, rows):
        cloudpickle.register_pickle_by_value(module)
    try:
        facts = TransactionFacts(ID, HALF, [COMMIT], VISIBLE)
        shipped = cloudpickle.dumps((judge, facts, TERMS))
    finally:
        for module in (judge_module, life, rows):
            cloudpickle.unregister_pickle_by_value(module)
    script = (
        "import sys, pickle\n"
        "from pyspark import cloudpickle\n"
        "sys.modules['txbroker'] = None\n"
        "judge, facts, terms = pickle.loads(sys.stdin.buffer.read())\n"
        "print(judge(facts, terms).verdict)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=shipped, capture_output=True)
    assert done.stdout == b"settled\n", done.stderr.decode()
    assert pickle.loads(pickle.dumps(judge(facts, TERMS))).verdict == "settled"


# --- states ----------------------------------------------------------------------------------


def test_states_without_findings() -> None:
    young_ms = DECIDED_MS + 60_000
    cases = {
        "pending": judged(),
        "settled": judged(op=[COMMIT], visible=VISIBLE),
        "committed": judged(op=[COMMIT], now_ms=young_ms),
        "parked": judged(op=[*TRIES, PARK], parked=copy_rows(HALF, "parked")),
        "refused": judged(op=[COMMIT], parked=copy_rows(HALF, "refused")),
        "void": judged(VOID),
        "gone": judged([], parked=[parked_row(None)]),
    }
    assert {name: case.verdict for name, case in cases.items()} == {name: name for name in cases}
    assert not any(case.findings or case.why for case in cases.values())
    assert [name for name, case in cases.items() if case.carry] == [
        "pending",
        "committed",
        "parked",
        "refused",
    ]
    assert judged(op=[ROLLBACK]).state == "rolled_back"
    assert cases["parked"].attempts == 3


def test_one_that_was_refused_and_then_taken_is_promoted() -> None:
    parked = [parked_row("refused"), parked_row(None, 1)]
    verdict = judged(op=[COMMIT], visible=VISIBLE, parked=parked)
    assert (verdict.verdict, verdict.state, verdict.carry) == ("settled", "promoted", False)


def test_a_retry_seen_only_in_the_parked_topic_is_not_lost() -> None:
    parked = [parked_row("refused"), parked_row(None, 1, NOW_MS - 1000)]
    assert judged(op=[COMMIT], parked=parked).verdict == "committed"
    parked = [parked_row("refused"), parked_row(None, 1, NOW_MS - 600_001)]
    assert judged(op=[COMMIT], parked=parked).verdict == "lost"


def test_valid_half_may_follow_a_void_one() -> None:
    void = half_rows(void="dedup")
    assert judged(void, now_ms=START_MS + WINDOW_MS).carry
    assert not judged(void, now_ms=START_MS + WINDOW_MS + 1).carry
    later = half_rows(offset=9)
    verdict = judged(void + later, [COMMIT], visible_rows(later))
    assert (verdict.verdict, verdict.half_offset) == ("settled", 9)


def test_half_in_a_foreign_partition_does_not_count() -> None:
    foreign = half_rows(partition=PARTITION + 1)
    assert judged(foreign).verdict == "void"
    marker = COMMIT._replace(partition=PARTITION + 1)
    assert judged(op=[marker]).verdict == "pending"


# --- findings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_ms", "early", "verdict"),
    [
        (60_000, True, "committed"),
        (60_001, True, "late"),
        (600_000, True, "late"),
        (600_001, True, "lost"),
        (600_001, False, "committed"),
    ],
)
def test_not_visible_is_judged_by_the_age_of_an_early_commit(
    age_ms: int, early: bool, verdict: str
) -> None:
    found = judged(op=[COMMIT._replace(early=early)], now_ms=DECIDED_MS + age_ms)
    assert (found.verdict, found.state, found.carry) == (verdict, "committed", True)


def test_invisible_part_is_lost() -> None:
    half = half_rows(["t", "u"])
    found = judged(half, [COMMIT], visible_rows(half)[:1])
    assert found.findings == ("lost",)
    assert "1 of 2" in (found.why or "")
    assert "u-0" in (found.why or "")


def test_visible_messages_must_be_committed() -> None:
    assert judged(visible=VISIBLE).findings == ("visible_without_commit",)
    assert judged(op=[ROLLBACK], visible=VISIBLE).findings == ("rolled_back_visible",)
    assert judged(VOID, [COMMIT], VISIBLE).findings == ("visible_without_commit",)
    assert judged([], visible=VISIBLE).findings == ("visible_without_commit",)
    foreign = op_row("commit", grp="stranger")
    assert judged(op=[foreign], visible=VISIBLE).findings == ("visible_without_commit",)


def test_a_record_may_not_be_older_than_its_commit() -> None:
    for early_ms, verdict in ((2000, "settled"), (2001, "visible_without_commit")):
        row = VISIBLE[0]._replace(append_time=True, at_ms=DECIDED_MS - early_ms)
        found = judged(op=[COMMIT], visible=[row])
        assert (found.verdict, found.state, found.carry) == (verdict, "promoted", False)


def test_visible_twice_in_any_place() -> None:
    once = VISIBLE
    again = [once[0]._replace(offset=70)]
    assert judged(op=[COMMIT], visible=once + again).findings == ("visible_twice",)
    elsewhere = [once[0]._replace(topic="u")]
    found = judged(op=[COMMIT], visible=once + elsewhere).findings
    assert found == ("visible_twice", "wrong_target")
    assert judged(op=[COMMIT], visible=once + once).verdict == "settled"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"body": 1}, "body_changed"),
        ({"headers": 1}, "headers_changed"),
        ({"at_ms": DECIDED_MS + 1}, "timestamp_changed"),
        ({"topic": "u"}, "wrong_target"),
        ({"partition": 1}, "wrong_target"),
        ({"count": 2}, "wrong_target"),
    ],
)
def test_visible_messages_equal_the_prepared_ones(change: dict[str, object], finding: str) -> None:
    found = judged(op=[COMMIT], visible=[VISIBLE[0]._replace(**change)])
    assert (found.findings, found.state) == ((finding,), "promoted")


def test_a_message_that_was_never_prepared_is_in_the_wrong_place() -> None:
    visible = [*VISIBLE, visible_rows(HALF, offset=60)[0]._replace(seq=1, count=2)]
    assert judged(op=[COMMIT], visible=visible).findings == ("wrong_target",)


def test_user_timestamp_is_kept_and_broker_time_is_no_change() -> None:
    half = half_rows(timestamp_ms=1234)
    assert judged(half, [COMMIT], visible_rows(half)).verdict == "settled"
    decided = [visible_rows(half)[0]._replace(at_ms=DECIDED_MS)]
    assert judged(half, [COMMIT], decided).findings == ("timestamp_changed",)
    brokers = [decided[0]._replace(at_ms=DECIDED_MS + 99, append_time=True)]
    found = judged(half, [COMMIT], brokers)
    assert (found.verdict, found.visible_at_ms) == ("settled", DECIDED_MS + 99)


def test_messages_of_the_commit_must_be_visible() -> None:
    contents = [Content(0, "t", 0, 55, 66, 77)]
    commit = COMMIT._replace(contents=contents, contents_count=1)
    replaced = VISIBLE[0]._replace(body=55, headers=66, at_ms=77)
    assert judged(op=[commit], visible=[replaced]).verdict == "settled"
    found = judged(op=[commit], visible=VISIBLE).findings
    assert found == ("body_changed", "headers_changed", "timestamp_changed")
    elsewhere = commit._replace(contents=[contents[0]._replace(target_partition=1)])
    assert judged(op=[elsewhere]).state == "pending"
    incomplete = commit._replace(contents_count=2)
    assert judged(op=[incomplete]).state == "pending"


def test_harmless_contrary_marker_is_reported_without_drift() -> None:
    same = Content(0, "t", 5, HALF[0].body, HALF[0].headers, None)
    other = same._replace(body=1)

    def why(*more: MarkerFact) -> str | None:
        found = judged(op=[COMMIT, *more], visible=VISIBLE)
        assert (found.verdict, found.findings) == ("settled", ())
        return found.why

    assert "rollback at 1" in (why(op_row("rollback", 1)) or "")
    assert why(op_row("rollback", 1, grp="stranger")) is None
    assert why(op_row("commit", 1)) is None
    assert why(op_row("commit", 1, contents=[same], contents_count=1)) is None
    assert "other messages" in (why(op_row("commit", 1, contents=[other], contents_count=1)) or "")
    first = judged(op=[op_row("rollback", 1), op_row("commit", 2)])
    assert (first.decision, first.verdict) == ("rollback", "settled")
    assert "commit at 2" in (first.why or "")
    young = judged(op=[COMMIT, op_row("rollback", 1)], now_ms=DECIDED_MS + 60_000)
    assert (young.verdict, young.findings) == ("committed", ())
    void = judged(VOID, [COMMIT, op_row("rollback", 1)])
    assert (void.verdict, void.why) == ("void", None)


def test_following_another_than_first_decision_is_drift() -> None:
    back = [op_row("rollback"), op_row("commit", 1)]
    assert judged(op=back, visible=VISIBLE).findings == ("rolled_back_visible", "contrary_markers")
    unseen = judged(op=[COMMIT, op_row("rollback", 1)])
    assert unseen.findings == ("lost", "contrary_markers")
    other = Content(0, "t", 0, 1, HALF[0].headers, None)
    two = [COMMIT, op_row("commit", 1, contents=[other], contents_count=1)]
    second = [VISIBLE[0]._replace(body=1)]
    assert judged(op=two, visible=second).findings == ("body_changed", "contrary_markers")
    neither = [VISIBLE[0]._replace(body=2)]
    assert judged(op=two, visible=neither).findings == ("body_changed",)


# --- what is kept ----------------------------------------------------------------------------


def test_parked_transaction_has_a_whole_copy_in_time() -> None:
    half = half_rows(["t", "u"])
    copy = copy_rows(half, "parked")
    op = [*TRIES, PARK]
    missing = judged(half, op)
    assert (missing.state, missing.findings) == ("parked", ("not_kept",))
    # It is written in a turn, and turns may be lost for minutes.
    assert judged(half, op, now_ms=PARK.at_ms + 600_000).findings == ()
    assert judged(half, op, now_ms=PARK.at_ms + 600_001).findings == ("not_kept",)
    assert judged(half, [*TRIES, PARK._replace(early=False)]).findings == ()
    assert judged(half, op, parked=copy).findings == ()
    torn = judged(half, op, parked=copy[:1])
    assert torn.findings == ("not_kept",)
    assert "message 1 of 2" in (torn.why or "")
    others = {"body": 9, "headers": 9, "count": 9, "target_partition": 9, "timestamp_ms": 9}
    for field, other in {**others, "grp": "h", "topic": "v"}.items():
        changed = [copy[0], copy[1]._replace(**{field: other})]
        assert judged(half, op, parked=changed).findings == ("not_kept",), field
    dropped = [*copy, parked_row(None, 9)]
    assert judged(half, op, parked=dropped).findings == ("not_kept",)
    # An earlier version has read it: it is there, and nobody knows what it holds.
    assert judged(op=op, parked=[parked_row("parked")]).findings == ()


def test_copy_of_settled_transaction_is_reported_without_drift() -> None:
    half = half_rows(["t", "u"])
    copy, dropped = copy_rows(half, "refused", 7), parked_row(None, 9)
    ends = {"promoted": ([COMMIT], visible_rows(half)), "rolled_back": ([ROLLBACK], [])}
    for state, (op, shown) in ends.items():
        for parked, offset in ((copy, 7), ([*copy, dropped], 8)):
            left = judged(half, op, shown, parked)
            assert (left.state, left.verdict, left.carry) == (state, "settled", False)
            assert left.why == f"its copy is still in the parked topic, at {offset}"
        over = [*copy, dropped, dropped._replace(seq=1, offset=10)]
        assert judged(half, op, shown, over).why is None


def test_refused_transaction_is_kept_whole_and_invisible() -> None:
    half = half_rows(["t", "u"])
    copy, shown = copy_rows(half, "refused"), visible_rows(half)
    assert judged(half, [COMMIT], parked=copy).findings == ()
    torn = judged(half, [COMMIT], parked=copy[:1])
    assert (torn.state, torn.findings, torn.carry) == ("refused", ("not_kept",), True)
    partly = judged(half, [COMMIT], shown[:1], copy)
    assert (partly.state, partly.findings) == ("refused", ("refused_visible",))
    assert judged(half, [COMMIT], shown, copy).verdict == "settled"
    fresh = [shown[0]._replace(append_time=True, at_ms=NOW_MS - 60_000)]
    assert judged(half, [COMMIT], fresh, copy).verdict == "refused"
    old = [fresh[0]._replace(at_ms=NOW_MS - 60_001)]
    assert judged(half, [COMMIT], old, copy).verdict == "refused_visible"
    # A turn that promotes it may be ending: its other partition is not read to the end of it.
    ending = Horizon(open=frozenset({("u", 0)}))
    assert judged(half, [COMMIT], old, copy, horizon=ending).verdict == "refused"
    elsewhere = Horizon(open=frozenset({("t", 0), ("v", 0)}))
    assert judged(half, [COMMIT], old, copy, horizon=elsewhere).verdict == "refused_visible"


def test_copy_may_hold_the_messages_of_the_commit() -> None:
    contents = [Content(0, "t", 0, 55, 66, 77)]
    commit = COMMIT._replace(contents=contents, contents_count=1)
    copy = copy_rows(HALF, "refused")
    assert judged(op=[commit], parked=copy).verdict == "refused"
    replaced = [copy[0]._replace(body=55, headers=66, timestamp_ms=77)]
    assert judged(op=[commit], parked=replaced).verdict == "refused"
    assert judged(op=[COMMIT], parked=replaced).verdict == "not_kept"


def test_more_attempts_than_allowed() -> None:
    tries = [check_row(n, START_MS + 6000 + (n - 1) * 30_000, n) for n in (1, 2, 3, 4)]
    assert judged(op=tries[:3]).findings == ()
    found = judged(op=tries)
    assert (found.findings, found.attempts, found.state) == (("too_many_attempts",), 3, "pending")
    again = check_row(3, tries[3].at_ms, 9)
    assert judged(op=[*tries[:3], again]).findings == ()
    behind = judged(
        op=[*tries[:3], op_row("commit", 3, tries[2].at_ms), tries[3]], now_ms=tries[3].at_ms
    )
    assert behind.findings == ()
    returned = op_row("returned", 3, tries[2].at_ms + 1, round=1, number=3)
    after = tries[3]._replace(offset=5)
    assert judged(op=[*tries[:3], returned, after]).findings == ()


@pytest.mark.parametrize(
    ("early_ms", "reason", "findings"),
    [(0, "due", ()), (1000, "due", ()), (1001, "due", ("check_too_early",)), (5000, "asked", ())],
)
def test_checks_before_their_time(early_ms: int, reason: str, findings: tuple[str, ...]) -> None:
    found = judged(op=[check_row(1, START_MS + 6000 - early_ms, 0, reason)])
    assert found.findings == findings


def test_not_yet_postpones_and_revival_restarts_the_policy() -> None:
    first = check_row(1, START_MS + 6000, 0)
    later = op_row("later", 1, START_MS + 7000, round=1, number=1, later_ms=50_000)
    assert judged(op=[first, later, check_row(2, START_MS + 57_000, 2)]).findings == ()
    assert judged(op=[first, later, check_row(2, START_MS + 55_999, 2)]).findings == (
        "check_too_early",
    )
    parked_ms = TRIES[-1].at_ms + 5000
    revival = [op_row("park", 4, parked_ms), op_row("revive", 5, parked_ms)]
    due = check_row(1, parked_ms + 6000, 6, turn=2)
    found = judged(op=[*TRIES, *revival, due])
    assert (found.state, found.attempts, found.findings) == ("pending", 1, ())
    assert judged(op=[*TRIES, revival[1], due]).attempts == 3


def test_markers_and_parts_without_a_half_message() -> None:
    assert judged([], [COMMIT]).findings == ("marker_without_half",)
    assert judged([], [COMMIT], VISIBLE).findings == ("visible_without_half", "marker_without_half")
    assert judged([], [ROLLBACK], VISIBLE).findings == (
        "rolled_back_visible",
        "marker_without_half",
    )
    torn = half_rows(["t", "u", "v"])[1:]
    found = judged(torn, [COMMIT])
    assert found.findings == ("half_incomplete",)
    shown = judged(torn, [COMMIT], visible_rows(torn))
    assert shown.findings == ("visible_without_half", "half_incomplete")
    assert "2 of 3" in (found.why or "")
    assert judged([HALF[0]._replace(seq=1, offset=5)]).findings == ("half_incomplete",)
    assert judged(VOID, [COMMIT]).verdict == "void"


# --- what retention took ---------------------------------------------------------------------


def test_retention_is_no_drift() -> None:
    taken = Horizon({PARTITION: 5}, {PARTITION: START_MS - WINDOW_MS})
    for op, seen in (([COMMIT], VISIBLE), ([COMMIT], []), ([], VISIBLE)):
        found = judged([], op, seen, horizon=taken)
        assert (found.verdict, found.findings, found.carry) == ("gone", (), False)
    before = Horizon({PARTITION: 5}, {PARTITION: START_MS - WINDOW_MS - 1})
    assert judged([], [COMMIT], horizon=before).findings == ("marker_without_half",)
    cut = half_rows(["t", "u"], offset=4)[1:]
    assert judged(cut, [COMMIT], horizon=before).verdict == "gone"


def test_parked_copy_replaces_half_removed_by_retention() -> None:
    taken = Horizon({PARTITION: 5}, {PARTITION: START_MS})
    for state in ("pending", "parked", "refused"):
        found = judged([], parked=[parked_row(state)], horizon=taken)
        assert (found.verdict, found.carry) == (state, True)
    found = judged([], [ROLLBACK], parked=[parked_row("parked")], horizon=taken)
    assert (found.state, found.carry) == ("rolled_back", False)
    found = judged([], [COMMIT], parked=[parked_row("parked")], horizon=taken)
    assert (found.verdict, found.carry) == ("committed", True)


TAKEN = Horizon({PARTITION: 5}, {PARTITION: START_MS})


def test_copy_is_judged_where_retention_removed_the_half() -> None:
    half = half_rows(["t", "u"])
    copy, shown = copy_rows(half, "pending"), visible_rows(half)

    def found(
        op: list[MarkerFact], visible: list[VisibleFact], parked: list[ParkedFact]
    ) -> JudgedTransaction:
        return judged([], op, visible, parked, horizon=TAKEN)

    lost = found([COMMIT], [], copy)
    assert (lost.state, lost.findings, lost.carry) == ("committed", ("lost",), True)
    assert (lost.grp, lost.messages, lost.topics) == ("g", 2, ("t", "u"))
    assert found([COMMIT], shown[:1], copy).findings == ("lost",)
    assert found([COMMIT], shown, copy).verdict == "settled"
    changed = [shown[0]._replace(body=9), shown[1]]
    assert found([COMMIT], changed, copy).findings == ("body_changed",)
    assert found([op_row("commit", grp="stranger")], [], copy).verdict == "pending"
    assert found([], shown, copy).findings == ("visible_without_commit",)
    refused = copy_rows(half, "refused")
    assert found([], shown, refused).verdict == "settled"
    assert found([], shown[:1], refused).findings == ("refused_visible",)
    assert found([COMMIT], [], refused).verdict == "refused"
    # The tombstones were written, and the messages were not.
    dropped = [parked_row(None, 8), parked_row(None, 9)._replace(seq=1)]
    assert found([COMMIT], [], [*copy, *dropped]).findings == ("lost",)
    assert found([COMMIT], shown, [*copy, *dropped]).verdict == "settled"
    assert found([COMMIT], [], dropped).verdict == "gone"


def test_copy_without_its_markers_proves_nothing() -> None:
    copy = copy_rows(HALF, "pending")
    horizon = TAKEN._replace(op_begin_ms={PARTITION: START_MS - WINDOW_MS})
    found = judged([], [], VISIBLE, copy, horizon=horizon)
    assert (found.verdict, found.carry) == ("gone", False)


def test_message_after_open_transaction_is_late_at_most() -> None:
    hours_later_ms = DECIDED_MS + 10_000_000
    both = Horizon(hidden=frozenset({("t", 0), ("u", 0)}))
    one = Horizon(hidden=frozenset({("t", 0)}))
    two = half_rows(("t", "u"))

    def found(horizon: Horizon, visible: list[VisibleFact] | None = None) -> JudgedTransaction:
        return judged(two, [COMMIT], visible, now_ms=hours_later_ms, horizon=horizon)

    late = found(both)
    assert (late.state, late.findings, late.carry) == ("committed", ("late",), True)
    assert "which ends in an open transaction" in (late.why or "")
    # One of them could have been read, had it been there.
    assert found(one).findings == ("lost",)
    shown = visible_rows(two)
    assert found(one, shown[1:]).findings == ("late",)
    assert found(both, shown).findings == ()


def test_a_target_that_may_have_lost_it_proves_nothing() -> None:
    for until_ms, verdict in ((DECIDED_MS, "gone"), (DECIDED_MS - 1, "lost"), (ALWAYS, "gone")):
        horizon = Horizon(taken_ms={("t", 0): until_ms})
        assert judged(op=[COMMIT], horizon=horizon).verdict == verdict
    half = half_rows(["t", "u"])
    horizon = Horizon(taken_ms={("t", 0): ALWAYS})
    assert judged(half, [COMMIT], horizon=horizon).verdict == "lost"
    # Of a partition something is known, and then the whole topic is deleted.
    both = Horizon(taken_ms={("t", 0): 0, ("t", -1): ALWAYS})
    assert judged(op=[COMMIT], horizon=both).verdict == "gone"


def test_a_message_that_an_earlier_run_has_seen_is_lost_at_once() -> None:
    young = partial(judged, op=[COMMIT], now_ms=DECIDED_MS + 1)
    former = [VISIBLE[0]._replace(former=True)]
    assert young().verdict == "committed"
    found = young(visible=former)
    assert (found.findings, found.places, found.carry) == (("lost",), (), True)
    # It is there again, at the same position or at another one.
    for row in (VISIBLE[0], VISIBLE[0]._replace(offset=9)):
        there = young(visible=[row, *former])
        assert (there.verdict, there.places[0].offset) == ("settled", row.offset)
    deleted = Horizon(taken_ms={("t", -1): ALWAYS})
    assert young(visible=former, horizon=deleted).verdict == "gone"
    assert judged(op=[ROLLBACK], visible=former).findings == ()


def test_message_too_young_for_retention_is_lost() -> None:
    def verdict(kept_from_ms: int, half: list[HalfFact] = HALF, *op: MarkerFact) -> str:
        horizon = Horizon(taken_ms={("t", 0): ALWAYS}, kept_from_ms={"t": kept_from_ms})
        return judged(half, list(op) or [COMMIT], horizon=horizon).verdict

    assert verdict(DECIDED_MS) == "lost"
    assert verdict(DECIDED_MS + 1) == "gone"
    # Retention goes by a timestamp that may be the user's, or the broker's.
    assert verdict(DECIDED_MS, half_rows(timestamp_ms=5)) == "gone"
    assert verdict(5, half_rows(timestamp_ms=5)) == "lost"
    assert verdict(DECIDED_MS + 1, half_rows(timestamp_ms=ALWAYS)) == "gone"
    new = COMMIT._replace(contents=[Content(0, "t", 0, 55, 66, 5)], contents_count=1)
    assert verdict(DECIDED_MS, HALF, new) == "gone"
    # Of a topic that is compacted, or was not there, it says nothing.
    whole = Horizon(taken_ms={("t", -1): DECIDED_MS}, kept_from_ms={"t": DECIDED_MS})
    assert judged(op=[COMMIT], horizon=whole).verdict == "gone"


def test_markers_that_retention_took_may_have_decided() -> None:
    horizon = Horizon(op_begin_ms={PARTITION: START_MS - WINDOW_MS})
    assert judged(visible=VISIBLE, horizon=horizon).verdict == "gone"
    assert judged(visible=VISIBLE).verdict == "visible_without_commit"


# --- the half message, any check, or what a record claims is missing -----------------------------


def test_findings_without_half_are_found_after_retention() -> None:
    rollback, visible = op_row("rollback", grp="g"), VISIBLE
    twice = [*visible, visible[0]._replace(offset=70)]
    taken = Horizon({PARTITION: 5}, {PARTITION: START_MS})

    def found(
        *op: MarkerFact, shown: list[VisibleFact], horizon: Horizon = taken
    ) -> JudgedTransaction:
        return judged([], list(op), shown, horizon=horizon)

    back = found(rollback, shown=visible)
    assert (back.verdict, back.state, back.carry) == ("rolled_back_visible", "rolled_back", False)
    assert found(rollback, shown=twice).findings == ("rolled_back_visible", "visible_twice")
    assert found(COMMIT, shown=twice).findings == ("visible_twice",)
    assert found(shown=twice).findings == ("visible_twice",)
    cut = judged(half_rows(["t", "u"], offset=4)[1:], [rollback], visible, horizon=taken)
    assert cut.findings == ("rolled_back_visible",)
    # An earlier marker may have been removed too, or been in deleted files.
    no_markers = taken._replace(op_begin_ms={PARTITION: START_MS - WINDOW_MS})
    removed = taken._replace(removed_ms=START_MS)
    for horizon in (no_markers, removed):
        assert found(rollback, shown=visible, horizon=horizon).findings == ()
        assert found(rollback, shown=twice, horizon=horizon).findings == ("visible_twice",)
    # One of the two groups had no right to decide; only the half message named the owner.
    other = op_row("commit", 1, grp="another")
    assert (found(rollback, other, shown=visible).findings) == ()
    same = op_row("commit", 1, grp="g")
    assert found(rollback, same, shown=visible).findings == (
        "rolled_back_visible",
        "contrary_markers",
    )


def test_visible_twice_is_found_beside_other_faults() -> None:
    twice = [*VISIBLE, visible_rows(HALF, offset=70)[0]]
    assert judged(visible=twice).findings == ("visible_without_commit", "visible_twice")
    assert judged(op=[ROLLBACK], visible=twice).findings == ("rolled_back_visible", "visible_twice")
    assert "visible_twice" in judged(VOID, visible=twice).findings


def test_record_claiming_any_message_count_costs_nothing() -> None:
    many = (1 << 31) - 1
    claimed = [HALF[0]._replace(count=many)]
    assert judged(claimed).findings == ("half_incomplete",)
    copy = [copy_rows(HALF, "parked")[0]._replace(count=many)]
    assert judged([], parked=copy, horizon=TAKEN).state == "parked"
    contents = [Content(0, "t", 0, 55, 66, 77)]
    marker = COMMIT._replace(contents=contents, contents_count=many)
    assert judged(op=[marker]).state == "pending"


OVERDUE_MS = START_MS + 6000 + TERMS.overdue_after_ms


def test_overdue_needs_an_old_due_check_never_made() -> None:
    late = judged(now_ms=OVERDUE_MS + 1)
    assert (late.verdict, late.state, late.carry) == ("overdue", "pending", True)
    assert late.why == "overdue: the first check was due 86400 s ago"
    assert judged(now_ms=OVERDUE_MS).findings == ()
    asked = check_row(1, START_MS + 6000, 1)
    given_back = op_row("returned", 2, asked.at_ms, round=1, number=1)
    for op in ([asked], [asked, given_back], [asked._replace(number=7)], [COMMIT]):
        visible = VISIBLE if op == [COMMIT] else []
        assert judged(op=op, visible=visible, now_ms=OVERDUE_MS + 1).findings == ()
    # A proxy copies pending transactions before retention removes the half message.
    assert judged(parked=copy_rows(HALF, "pending"), now_ms=OVERDUE_MS + 1).findings == ("overdue",)
    assert judged(parked=copy_rows(HALF, "parked"), now_ms=OVERDUE_MS + 1).findings == ()
    # A first check may have been made, and its marker be gone.
    horizon = Horizon(op_begin_ms={PARTITION: START_MS - WINDOW_MS})
    assert judged(now_ms=OVERDUE_MS + 1, horizon=horizon).findings == ()
    assert judged(VOID, now_ms=OVERDUE_MS + 1).findings == ()


def test_copy_proves_overdue_after_half_was_removed() -> None:
    def found(state: str, *op: MarkerFact, now_ms: int = OVERDUE_MS + 1, **horizon: Any) -> object:
        taken = TAKEN._replace(**horizon)
        copy = copy_rows(HALF, state)
        return judged([], op, parked=copy, now_ms=now_ms, horizon=taken).findings

    assert found("pending") == ("overdue",)
    assert found("pending", now_ms=OVERDUE_MS) == ()
    asked = check_row(1, START_MS + 6000, 1)
    for op in (asked, op_row("park", source="schedule")):
        assert found("pending", op) == ()
    assert found("pending", op_begin_ms={PARTITION: START_MS - WINDOW_MS}) == ()
    assert found("parked") == ()


@pytest.mark.parametrize("name", ["secret", "a/b", "..", "x" * 300])
def test_commit_to_unreadable_target_is_never_lost(name: str) -> None:
    horizon = Horizon(unread=frozenset({"secret"}))
    late_ms = START_MS + 100 + TERMS.lost_after_ms + 1
    for now_ms in (START_MS + 100, late_ms):
        found = judged(half_rows([name]), [COMMIT], now_ms=now_ms, horizon=horizon)
        assert (found.findings, found.state, found.carry) == (
            ("target_unreadable",), "committed", True
        )  # fmt: skip
    both = judged(half_rows([name, "t"]), [COMMIT], now_ms=late_ms, horizon=horizon)
    assert both.findings == ("lost", "target_unreadable")
    void = judged(half_rows([name], void="expired"), [COMMIT], now_ms=late_ms, horizon=horizon)
    assert void.findings == ()
    assert judged(half_rows([name]), now_ms=START_MS + 200, horizon=horizon).findings == ()
