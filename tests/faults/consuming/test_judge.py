"""The judge of consumers: silent on a sound run, and each planted crime is found by its rule."""

from __future__ import annotations

import ast
import base64
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.consuming import judge
from tests.faults.consuming.judge import (
    ATTEMPTS_MAX,
    Judge,
    Rec,
    Rules,
    Stored,
    Topics,
    read_history,
)

PLACE = ("orders", 0)
Line = dict[str, Any]


class Run:
    """A run by hand: one partition, keys a and b in turn, one second for each call."""

    def __init__(self, count: int = 8) -> None:
        self.lines: list[Line] = []
        self.source = [Rec("orders", 0, n, "ab"[n % 2], value=str(n)) for n in range(count)]
        self.retry: list[Rec] = []
        self.dead: list[Rec] = []
        self.aside: list[Rec] = []
        self.stored: list[Stored] = []
        self.order = "key"
        self.aside_mode = False
        self.most_once = False
        self.lost_max = 0
        self._calls = 0

    def call(
        self,
        offset: int,
        at: float,
        *,
        token: int = 1,
        by: str = "c1",
        result: str = "ok",
        takes_s: float = 0.5,
        place: tuple[str, int] = PLACE,
    ) -> None:
        self._calls += 1
        who = {"instance": by, "call": self._calls}
        key = self.source[offset].key if offset < len(self.source) else None
        self.lines.append(
            {
                **{"event": "begin", "at": at, "topic": "orders", "partition": 0},
                **{"offset": offset, "key": key, "place": list(place), "token": token, **who},
            }
        )
        if result:
            self.lines.append({"event": "end", "at": at + takes_s, "result": result, **who})

    def fault(self, what: str, begin: float, end: float, by: str = "c1") -> None:
        self.lines.append(
            {"event": "fault", "what": what, "instance": by, "at": begin, "until": end}
        )

    def copy(self, topics: list[Rec], name: str, offset: int, attempt: int = 1) -> None:
        origin = self.source[offset]
        headers = (("txb-source", f"orders/0@{offset}"), ("txb-attempt", str(attempt)))
        at = sum(record.topic == name for record in topics)
        topics.append(Rec(name, 0, at, origin.key, headers, origin.value))

    def store(self, at: float, low: int, *, token: int = 1, ranges: bytes = b"") -> None:
        text = f"txb1:{token}::0:{base64.urlsafe_b64encode(ranges).decode()}"
        retry = {("retry", 0): (0, "txb1:1::0:")}
        self.stored.append(Stored(at, {**retry, PLACE: (low, text)}))
        self.stored.sort(key=lambda each: each.at)

    def judged(self) -> list[str]:
        topics = Topics(self.source, self.retry, self.dead, self.aside, self.stored)
        rules = Rules(self.order, self.aside_mode, self.most_once, self.lost_max)
        found = Judge(read_history(self.lines), topics, rules).judge()
        return [violation.rule for violation in found]


def sound() -> Run:
    """All eight messages are done; the last position is stored."""
    run = Run()
    for offset in range(8):
        run.call(offset, 10.0 + offset)
    run.store(14.2, 4)
    run.store(30.0, 8)
    return run


def test_judge_imports_only_the_standard_library() -> None:
    found = set()
    for node in ast.walk(ast.parse(Path(judge.__file__).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add((node.module or "").partition(".")[0])
    assert "base64" in found <= sys.stdlib_module_names


# --- sound runs ------------------------------------------------------------------------------


def good_behind_others(run: Run, calls: int) -> None:
    """A good message waits while another one fails again and again."""
    run.source.append(Rec("orders", 0, 8, "good", value='{"n": 8, "at": 30.0}'))
    run.source.append(Rec("orders", 0, 9, "bad", value='{"n": 9}'))
    for number in range(calls):
        run.call(9, 33 + number / 100, result="error", takes_s=0.001)
    run.call(8, 36)
    run.call(9, 37)
    run.store(42.0, 10)


def good_after_one_round(run: Run) -> None:
    good_behind_others(run, 70)


def late_by_a_fault(run: Run) -> None:
    """A message that has a time begins later, while an owner is replaced."""
    good_too_late(run)
    run.fault("stopped", 31.0, 32.0, by="c2")


def crashed(run: Run) -> None:
    """What a killed owner had done and not committed is done again by the next one."""
    run.call(7, 17.8, result="")
    run.fault("killed", 18, 18)
    run.call(7, 25, token=2, by="c2")


def stopped(run: Run) -> None:
    """An owner that was stopped within a handler ends it after its replacement."""
    run.lines = [line for line in run.lines if line["at"] < 17]
    run.call(7, 17, takes_s=10.2)
    run.fault("stopped", 17.1, 27)
    run.call(7, 25, token=2, by="c2")


def resumed(run: Run) -> None:
    """It was stopped between its look at the lease and the call: one such call."""
    run.call(7, 27.1, result="cancelled", takes_s=0.1)
    run.fault("stopped", 17.6, 27)
    run.call(7, 25, token=2, by="c2")


def set_aside(run: Run) -> None:
    """All messages of key b are set aside."""
    run.lines = [line for line in run.lines if int(line.get("call", 1)) % 2]
    run.call(1, 11, result="error")
    for offset in (1, 3, 5, 7):
        run.copy(run.aside, "aside", offset)


def released(run: Run) -> None:
    """The partition is in order but for its set-aside key, which is handled later, in order."""
    set_aside(run)
    run.order = "partition"
    for offset in (1, 3, 5, 7):
        run.call(offset, 40 + offset)
    run.aside.append(Rec("aside", 0, 4, "b", (("txb-cleared", "orders/0@7"),), "4"))


def copy_lost(run: Run, calls: int = ATTEMPTS_MAX) -> None:
    """The owner ends before a copy of what it set aside is stored: the next one handles it."""
    run.order, run.aside_mode = "partition", True
    run.lines = [line for line in run.lines if int(line.get("call", 1)) % 2]
    run.stored = []
    for number in range(calls):
        run.call(1, 11 + number / 10, result="error", takes_s=0.1)
    run.fault("killed", 18, 18)
    for offset in (1, 3, 5, 7):
        run.call(offset, 20 + offset, token=2, by="c2")
    run.store(30.0, 8, token=2)


def waiting(run: Run) -> None:
    """The last message waits in the retry topic."""
    run.lines = [line for line in run.lines if line["at"] < 17]
    run.call(7, 17, result="error")
    run.copy(run.retry, "retry", 7)


def buried(run: Run) -> None:
    run.lines = [line for line in run.lines if line["at"] < 17]
    run.call(7, 17, result="reject")
    run.copy(run.dead, "dead", 7)


def lost_at_most_once(run: Run) -> None:
    run.most_once, run.lost_max = True, 2
    run.lines = [line for line in run.lines if line["at"] < 16]


def overflowed(run: Run) -> None:
    """A done range did not fit into the metadata."""
    run.call(3, 40, token=2, by="c2")
    run.lines.append({"event": "overflow", "count": 1, "at": 14, "instance": "c1"})


def leaderless(run: Run) -> None:
    """No member could commit, as the leader of the group was stopped."""
    repeated_without_fault(run)
    run.fault("stopped", 16, 24, by="c3")
    run.stored[-1:] = []
    for at in (18.6, 19.6, 30.0):
        run.store(at, 8 if at > 20 else 4)


def nothing(run: Run) -> None: ...


@pytest.mark.parametrize(
    "change",
    [
        *(
            nothing,
            crashed,
            late_by_a_fault,
            stopped,
            resumed,
            set_aside,
            released,
            copy_lost,
            waiting,
            buried,
        ),
        *(good_after_one_round, lost_at_most_once, overflowed, leaderless),
    ],
)
def test_sound_run_has_no_violation(change: Callable[[Run], None]) -> None:
    run = sound()
    change(run)
    assert run.judged() == []


# --- crimes ----------------------------------------------------------------------------------


def lost(run: Run) -> None:
    run.lines = [line for line in run.lines if line.get("call") != 8]
    run.stored[-1:] = []


def retried_copy_lost(run: Run) -> None:
    """The position of the retry topic has passed the copy, and nothing was done."""
    waiting(run)
    run.stored = [Stored(30.0, {PLACE: (8, "txb1:1::0:"), ("retry", 0): (1, "txb1:1::0:")})]


def cleared_unhandled(run: Run) -> None:
    """A released key counts as done, and its last message was not handled."""
    set_aside(run)
    for offset, at in ((1, 40), (3, 41), (5, 42)):
        run.call(offset, at)
    run.aside.append(Rec("aside", 0, 4, "b", (("txb-cleared", "orders/0@7"),), "4"))


def too_many_lost(run: Run) -> None:
    lost_at_most_once(run)
    run.lost_max = 1


def unknown_message(run: Run) -> None:
    run.call(99, 40)


def position_too_high(run: Run) -> None:
    """The next message was stored as done before it was handled."""
    run.store(16.2, 8)


def range_too_long(run: Run) -> None:
    run.store(12.2, 1, ranges=bytes([3, 2]))


def out_of_order(run: Run) -> None:
    run.lines = [line for line in run.lines if line.get("call") not in (3, 5)]
    run.stored = []
    run.call(4, 40)
    run.call(2, 41)


def partition_out_of_order(run: Run) -> None:
    run.order = "partition"
    run.lines = [line for line in run.lines if line.get("call") not in (7, 8)]
    run.stored = []
    run.call(7, 40)
    run.call(6, 41)


def passed_over(run: Run) -> None:
    """The next message goes first, although its owner may try the failed one again."""
    copy_lost(run, calls=ATTEMPTS_MAX - 1)


def passed_over_and_kept(run: Run) -> None:
    """The same where failed messages are not set aside."""
    copy_lost(run)
    run.aside_mode = False


def passed_over_by_the_next_owner(run: Run) -> None:
    """What the first owner had not come to is in order."""
    copy_lost(run)
    run.lines = [line for line in run.lines if line.get("call") != 7]
    run.call(6, 28, token=2, by="c2")


def released_out_of_order(run: Run) -> None:
    released(run)
    swapped = {43.0: 5, 45.0: 3}
    for line in run.lines:
        if line["event"] == "begin" and line["at"] in swapped:
            line["offset"] = swapped[line["at"]]


def back_by_one_owner(run: Run) -> None:
    run.fault("answers lost", 9, 60)
    run.call(2, 40)


def two_of_a_key(run: Run) -> None:
    run.lines = [line for line in run.lines if line.get("call") not in (7, 8)]
    run.stored = []
    run.call(6, 40, takes_s=2)
    run.call(7, 40, takes_s=2)
    run.source[7] = Rec("orders", 0, 7, "a", value="7")


def starved(run: Run) -> None:
    run.source = [Rec("orders", 0, n, str(n), value=str(n)) for n in range(1300)]
    run.lines, run.stored = [], []
    for offset in (0, *range(2, 1200), 1, *range(1200, 1300)):
        run.call(offset, 100 + offset / 100 if offset != 1 else 111.995, takes_s=0.001)


def good_too_late(run: Run) -> None:
    """Messages of keys that fail went first."""
    good_behind_others(run, 140)


def old_token(run: Run) -> None:
    run.call(7, 19, token=2, by="c2")
    run.fault("killed", 18, 18)
    run.call(7, 20)


def effect_after_takeover(run: Run) -> None:
    """No lease: a handler goes on although the partition has another owner."""
    run.lines = [line for line in run.lines if line.get("call") != 8]
    run.call(7, 17, takes_s=9)
    run.fault("answers lost", 17, 30)
    run.call(7, 24, token=2, by="c2", takes_s=0.1)


def overlap(run: Run) -> None:
    """A revoked partition was released before its handlers had ended."""
    run.lines = [line for line in run.lines if line.get("call") != 8]
    run.call(7, 17, takes_s=9, result="cancelled")
    run.call(7, 24, token=2, by="c2")


def two_after_a_stop(run: Run) -> None:
    resumed(run)
    run.call(7, 27.3, result="cancelled", takes_s=0.1)


def stored_token_back(run: Run) -> None:
    run.store(31.0, 8, token=0)


def stored_offset_back(run: Run) -> None:
    run.store(31.0, 7)


def repeated(run: Run) -> None:
    """Done long before the crash, and not committed."""
    run.fault("killed", 20, 20)
    run.call(3, 30, token=2, by="c2")


def repeated_without_fault(run: Run) -> None:
    run.call(7, 19, token=2, by="c2")


def repeated_while_others_commit(run: Run) -> None:
    """A member that is stopped explains nothing while positions are stored."""
    leaderless(run)
    del run.stored[-2]
    run.store(19.6, 7)


def twice_at_most_once(run: Run) -> None:
    run.most_once = True
    run.fault("killed", 17.6, 17.6)
    run.call(7, 20, token=2, by="c2")


def copied_twice(run: Run) -> None:
    buried(run)
    run.copy(run.dead, "dead", 7, 2)


def retried_twice(run: Run) -> None:
    waiting(run)
    run.copy(run.retry, "retry", 7)


def changed_copy(run: Run) -> None:
    buried(run)
    copy = run.dead[0]
    run.dead[0] = Rec(copy.topic, copy.partition, copy.offset, copy.key, copy.headers, "other")


def aside_out_of_order(run: Run) -> None:
    set_aside(run)
    swapped: Sequence[tuple[int, int]] = ((1, 2), (2, 1))
    copies = {number: run.aside[number] for number in (1, 2)}
    for number, other in swapped:
        copy = copies[other]
        run.aside[number] = Rec("aside", 0, number, copy.key, copy.headers, copy.value)


@pytest.mark.parametrize(
    ("crime", "rule"),
    [
        (lost, "I20"),
        (retried_copy_lost, "I20"),
        (cleared_unhandled, "I20"),
        (too_many_lost, "I20"),
        (unknown_message, "I20"),
        (position_too_high, "I20"),
        (range_too_long, "I20"),
        (out_of_order, "I19"),
        (partition_out_of_order, "I19"),
        (passed_over, "I19"),
        (passed_over_and_kept, "I19"),
        (passed_over_by_the_next_owner, "I19"),
        (released_out_of_order, "I19"),
        (back_by_one_owner, "I19"),
        (two_of_a_key, "I19"),
        (starved, "I19"),
        (good_too_late, "I19"),
        (old_token, "I21"),
        (effect_after_takeover, "I21"),
        (overlap, "I21"),
        (two_after_a_stop, "I21"),
        (stored_token_back, "I21"),
        (stored_offset_back, "I21"),
        (repeated, "I22"),
        (repeated_without_fault, "I22"),
        (repeated_while_others_commit, "I22"),
        (twice_at_most_once, "I22"),
        (copied_twice, "I23"),
        (retried_twice, "I23"),
        (changed_copy, "I23"),
        (aside_out_of_order, "I23"),
    ],
)
def test_planted_crime_is_found_by_its_rule(crime: Callable[[Run], None], rule: str) -> None:
    run = sound()
    crime(run)
    assert set(run.judged()) == {rule}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("txb1:1:topic:0:", None),
        ("txb1:1:topic:0:::2.9.0", None),  # starts without progress
        ("txb1:1:topic:0::AgED", (7, [(8, 11)])),
    ],
)
def test_position_of_later_stages(text: str, expected: judge.Position | None) -> None:
    assert judge.later_position(9, text) == expected
