"""`--watch` and `top`: a screen for people, lines for programs, and trouble in between."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.cli_stub import Stub, error
from tests.cli.terminals import Run
from tests.kit.cli import Call
from txbroker.cli import watching
from txbroker.testing.broker import InMemoryBroker

Step = Callable[[], object]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a step between two queries, and press Ctrl-C after the last one."""

    def between(*happening: Step) -> None:
        left = list(happening)

        def pause(seconds: float) -> None:
            assert seconds >= watching.EVERY_MIN_S
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(watching, "pause", pause)

    return between


def nothing() -> None:
    """Let time pass."""


# --- lines ---------------------------------------------------------------------------------------


def test_new_and_changed_rows_are_lines(call: Call, stub: Stub, steps: Any) -> None:
    ids = stub.add(2, state="pending")
    steps(
        nothing,
        lambda: stub.add(1, state="pending"),
        lambda: stub.rows[ids[0]].update(state="parked"),
        lambda: stub.rows.pop(ids[1]),
        lambda: stub.rows[ids[0]].update(half_offset=7),
    )
    shown = call("tx", "list", "--watch", "--url", stub.url)
    assert (shown.code, shown.err.strip()) == (130, "Stopped.")
    header, *rows = [line.split() for line in shown.out.splitlines()]
    assert header[:3] == ["ID", "GROUP", "STATE"]
    assert [(row[0], row[2]) for row in rows] == [
        (ids[0], "pending"),
        (ids[1], "pending"),
        (list(stub.rows)[-1], "pending"),
        (ids[0], "parked"),
    ]


def test_each_line_is_json(call: Call, stub: Stub, steps: Any) -> None:
    stub.add(2)
    steps(nothing, lambda: stub.add(1))
    shown = call("tx", "list", "-w", "0.5", "-o", "json", "--url", stub.url)
    assert [json.loads(line)["id"] for line in shown.out.splitlines()] == list(stub.rows)


def test_each_row_is_a_yaml_document(call: Call, stub: Stub, steps: Any) -> None:
    stub.answer = lambda asked: (200, {"groups": [{"group": "a", "sessions": 1}]})
    steps(nothing, nothing)
    shown = call("groups", "list", "--watch", "-o", "yaml", "--url", stub.url)
    assert shown.out == "---\ngroup: a\nsessions: 1\n"


def test_watch_begins_with_no_rows(call: Call, stub: Stub, steps: Any) -> None:
    steps(nothing, lambda: stub.add(1))
    shown = call("tx", "list", "--watch", "--url", stub.url)
    assert [line.split()[0] for line in shown.out.splitlines()] == ["ID", next(iter(stub.rows))]


def test_error_is_shown_once_and_watch_continues(call: Call, stub: Stub, steps: Any) -> None:
    stub.add(1)

    def away() -> None:
        stub.answer = lambda asked: error(503, "owner_unavailable")

    def back() -> None:
        stub.answer = lambda asked: None
        stub.add(1)

    steps(away, nothing, nothing, back, away)
    shown = call("tx", "list", "--watch", "-o", "json", "--url", stub.url)
    assert len(shown.out.splitlines()) == 2
    assert shown.err.count("it is owner_unavailable (owner_unavailable)\n") == 2


def test_failure_of_first_query_ends_watch(call: Call, steps: Any) -> None:
    steps()
    for command in (["tx", "list", "--watch"], ["groups", "list", "--watch"], ["top"]):
        failed = call(*command, "--url", "http://127.0.0.1:9")
        assert (failed.code, failed.out) == (1, "")
        assert "nothing listens" in failed.err


def test_too_short_interval_is_refused(call: Call) -> None:
    for option in (["tx", "list", "--watch", "0"], ["top", "--every-s", "0.01"]):
        refused = call(*option)
        assert (refused.code, "is not in the range x>=0.2" in refused.err) == (2, True)


# --- top -----------------------------------------------------------------------------------------


def overview(**changes: Any) -> dict[str, Any]:
    """Return the overview of two proxies, one of which does not answer."""
    rates = {"prepared_per_s": 1200.4, "decided_per_s": 3.14, "promoted_per_s": 0.0}
    known = {
        "partition": 0, "owner": "http://a:1", "state": "owned", "why": "", "pending": 10_000,
        "parked": 3, "refused": 1, "committed": 0, "oldest_pending_age_s": 125.0,
        "oldest_committed_age_s": None, "rates": rates,
    }  # fmt: skip
    unknown = {
        **dict.fromkeys(known), "partition": 1, "owner": "http://b:1", "state": "unreachable",
        "why": "no answer", "rates": dict.fromkeys(rates, 0.0),
    }  # fmt: skip
    proxy = {
        "url": "http://a:1", "reached": True, "ready": True, "problems": [], "version": "1",
        "partitions": [0], "now_ms": 1, "why": "",
    }  # fmt: skip
    gone = {**proxy, "url": "http://b:1", "reached": False, "ready": False, "why": "refused"}
    group = {
        "group": "orders", "pending": 10_000, "parked": 3, "oldest_pending_age_s": 125.0,
        "sessions": 2, "instances": [], "unreachable_since_ms": None, "unreachable_why": "",
    }  # fmt: skip
    away = {**group, "group": "x\x1b[2J", "unreachable_since_ms": 1, "unreachable_why": "no\nroute"}
    return {
        "at_ms": 1, "complete": False, "proxies": [proxy, gone], "partitions": [known, unknown],
        "groups": [group, away], "groups_left_off": 4, "refused_topics": {"t": 1}, **changes,
    }  # fmt: skip


def whole_overview(**changes: Any) -> dict[str, Any]:
    """Return the overview of one proxy whose counts are all known."""
    known = overview()
    parts = {name: known[name][:1] for name in ("proxies", "partitions")}
    return {**known, "complete": True, **parts, **changes}


def test_top_marks_what_is_not_current(call: Call, stub: Stub) -> None:
    at_ms = 1_700_000_000_000  # 22:13:20
    whole = whole_overview()
    counts = {"commit": 1, "rollback": 0, "unknown": 0, "unclear": 4, "later": 0, "unreached": 0}
    last = {"id": "1", "at_ms": 1, "endpoint": "http://e", "outcome": "unclear", "answer": "500: x"}
    failing = {**whole["groups"][0], "sessions": 0, "check_url": True, "as_of_ms": at_ms,
               "checks": {"counts": counts, "undecided": last}}  # fmt: skip
    silent = {**whole["proxies"][0], "kafka_silent_since_ms": at_ms, "kafka_why": "no connection"}
    stale = {**whole["partitions"][0], "as_of_ms": at_ms}
    shown = whole_overview(proxies=[silent], partitions=[stale], groups=[failing], complete=False)
    stub.answer = lambda asked: (200, shown)
    text = call("top", "--once", "--url", stub.url).out
    assert "Kafka has not answered this proxy since 22:13:20 UTC: no connection\n" in text
    assert re.search(r"pending 10,000 .* as of 22:13:20 UTC\n", text)
    assert "prepared -  decided -  promoted -\n" in text
    why = "4 checks bring no decision: 500: x"
    assert re.search(rf"^orders +22:13:20 +10,000 +3 +2m05s +URL +{why}$", text, re.M)
    assert re.search(r"^0 +a:1 +owned +22:13:20 +10,000 .* - +-$", text, re.M)


def history(span_s: int) -> dict[str, Any]:
    """Return a history with a gap, a busy end and failing checks."""
    checks = {"unknown": 0, "unclear": 5}
    point = {"promoted": 0, "pending": 4, "oldest_pending_age_s": None, "checks": checks}
    step_s = 30 if span_s == 900 else 1
    times = range(0, span_s, step_s)
    points = [{**point, "at_ms": 1_700_000_000_000 + second * 1000} for second in times]
    points[-2] = {**points[-2], "pending": None}
    points[-1] = {**points[-1], "pending": 8, "promoted": 60 * step_s, "oldest_pending_age_s": 9.0}
    return {"step_s": step_s, "points": points}


@pytest.mark.parametrize(("span_s", "words"), [(900, "15 minutes"), (300, "5 minutes")])
def test_top_shows_the_past_in_60_columns(
    call: Call, stub: Stub, monkeypatch: pytest.MonkeyPatch, span_s: int, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    answers = {"/v1/overview": whole_overview(groups_left_off=0)}

    def answer(asked: Any) -> tuple[int, Any]:
        return 200, answers.get(asked.path.partition("?")[0]) or history(span_s)

    stub.answer = answer
    *lines, note = call("top", "--once", "--url", stub.url).out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "COMMITTED" in note
    start = lines.index(f"the last {words}")
    promoted, pending, oldest, failing = lines[start + 1 : start + 5]
    assert promoted.endswith("▁█  at most 60/s")
    assert re.fullmatch(r"pending   [▄▅]{19}█  at most 8", pending)
    assert oldest.endswith("█  at most 9s")
    assert "  at most " in failing
    assert "COMMITTED" not in "".join(lines)
    monkeypatch.setattr("txbroker.cli.ops.top.is_utf8", lambda _: False)
    plain = call("top", "--once", "--url", stub.url).out
    assert re.search(r"^pending   [=+-]{19}#  at most 8$", plain, re.M)
    assert "60/s" not in call("top", "--once", "-o", "json", "--url", stub.url).out


def test_top_once(call: Call, stub: Stub) -> None:
    stub.answer = lambda asked: (200, overview())
    shown = call("top", "--once", "--url", stub.url)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0] == f"txbroker at {stub.url}, 1 of 2 proxies ready"
    assert lines[1] == (
        "now     pending at least 10,000  parked at least 3  refused at least 1  "
        "committed -  oldest pending 2m05s"
    )
    assert "prepared at least 1,200.4/s  decided at least 3.1/s  promoted -" in lines[2]
    assert "t 1" in lines[3]
    assert lines[4] == "trouble Not ready  Refusing  Parking  Group unreachable"
    text = shown.out
    assert re.search(r"^orders +10,000\+ +3\+ +2m05s +2 +-$", text, re.M)
    assert re.search(r"^x\ufffd\[2J .* unreachable for \d+d.*: no\ufffdroute$", text, re.M)
    assert "… and 4 more groups" in text
    assert re.search(r"^0 +a:1 +owned +10,000 +3 +1 +0 +2m05s +1,200 +0 +-$", text, re.M)
    assert re.search(r"^1 +b:1 +unreachable +- +- +- +- +- .* no answer$", text, re.M)
    assert re.search(r"^http://b:1 +no answer .* refused$", text, re.M)
    assert "\x1b" not in text
    assert call("top", "--once", "-o", "json", "--url", stub.url).json == overview()


def test_top_is_readable_at_60_columns(
    call: Call, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.answer = lambda asked: (200, overview())
    monkeypatch.setenv("COLUMNS", "60")
    *lines, note = call("top", "--once", "--url", stub.url).out.splitlines()
    assert max(map(len, lines)) <= 60
    text = "\n".join(lines)
    assert re.search(r"^HALF +STATE +PENDING +PARKED +REFUSED +OLDEST\b", text, re.M)
    assert re.search(r"^1 +unreachable +- +- +-", text, re.M)
    assert note.startswith("Left out on this narrow terminal: ")
    assert "COMMITTED" in note


def test_top_of_complete_overview_has_exact_counts(call: Call, stub: Stub) -> None:
    whole = whole_overview(groups_left_off=0, groups=[], refused_topics={})
    stub.answer = lambda asked: (200, whole)
    shown = call("top", "--once", "--url", stub.url).out
    assert "at least" not in shown
    assert "GROUP" not in shown


def test_top_shows_the_first_groups_and_wide_all(call: Call, stub: Stub) -> None:
    groups = [{**overview()["groups"][0], "group": f"group-{number}"} for number in range(40)]
    stub.answer = lambda asked: (200, overview(groups=groups))
    shown = call("top", "--once", "--url", stub.url).out
    assert shown.count("group-") == 15
    assert "… and 29 more groups" in shown
    assert call("top", "--once", "-o", "wide", "--url", stub.url).out.count("group-") == 40


def test_top_shows_a_running_proxy(there: Call, memory: InMemoryBroker) -> None:
    for group in ("orders", "orders", "billing"):
        assert there("send", "t", "v", "--group", group, "--decision", "none").code == 0
    found = there("top", "--once", "-o", "json").json
    assert sum(row["pending"] for row in found["partitions"]) == 3
    assert {row["group"]: row["pending"] for row in found["groups"]} == {"orders": 2, "billing": 1}
    text = there("top", "--once").out
    assert "pending 3  parked 0  refused 0  committed 0" in text
    assert f"txbroker at {memory.url}, 1 of 1 proxy ready" in text


def test_top_appends_lines_without_a_terminal(call: Call, stub: Stub, steps: Any) -> None:
    stub.answer = lambda asked: (200, overview())
    steps(nothing, nothing)
    lines = call("top", "-o", "json", "--url", stub.url).out.splitlines()
    assert [json.loads(line) for line in lines] == [overview()] * 3
    steps(nothing)
    text = call("top", "--url", stub.url).out
    assert text.count(f"txbroker at {stub.url}") == 2


# --- on a terminal ----------------------------------------------------------------------------


def test_screen_is_redrawn_and_restored(stub: Stub, on_terminal: Run) -> None:
    (first,) = stub.add(1, state="pending")
    shown = on_terminal("tx", "list", "--watch", "0.2", "--url", stub.url)
    shown.until(first)
    assert "\x1b[?1049h" in shown.text  # the alternate screen
    more = stub.add(30, state="pending")
    shown.until(more[0])
    shown.until("more lines")
    assert more[-1] not in shown.text
    assert "ATTEMPTS" in shown.text  # colours take no room
    stub.answer = lambda asked: error(503, "owner_unavailable")
    shown.until("it is owner_unavailable")
    shown.type("\x03")
    assert shown.end() == 130
    assert "\x1b[?1049l" in shown.text  # given back
    assert "Traceback" not in shown.text


def test_top_on_a_terminal(stub: Stub, on_terminal: Run) -> None:
    stub.answer = lambda asked: (200, overview())
    shown = on_terminal("top", "--every-s", "0.2", "--url", stub.url)
    shown.until("1 of 2 proxies ready")
    shown.until("unreachable")
    assert re.search(r"0 +a:1 +owned +10,000 +3 +1 +0 +2m05s +1,200 +0", shown.text)
    stub.answer = lambda asked: (200, whole_overview())
    shown.until("pending 10,000  parked 3")
    shown.type("\x03")
    assert shown.end() == 130


def test_many_are_resolved_on_a_terminal(stub: Stub, on_terminal: Run) -> None:
    ids = stub.add(60)
    shown = on_terminal("tx", "commit", "--group", "orders", "--url", stub.url)
    shown.until("Type 60 to go on")
    assert stub.posts() == []
    shown.type("60\r")
    assert shown.end() == 0
    assert "60/60" in shown.text  # the progress bar
    assert "60 committed, now promoted 60." in shown.text
    assert {row["state"] for row in stub.rows.values()} == {"promoted"}
    assert len(stub.posts()) == len(ids)
