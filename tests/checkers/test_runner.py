"""The runner: whom it asks, in which order, and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from tests.checkers.runner_harness import COMMIT, DUE, FakeChannel, FakeOwner, RunnerHarness, until
from txbroker.checkers import attempts
from txbroker.checkers.attempts import combined
from txbroker.checkers.base import (
    Answered,
    AttemptRequest,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
)
from txbroker.checkers.runner import outcome_of
from txbroker.core.records import CheckReason, Decision, Message
from txbroker.errors import TxbrokerError


def asked(harness: RunnerHarness) -> list[str]:
    """Return the questions in order."""
    return [line for line in harness.log if line.startswith("ask")]


async def test_check_steps_run_in_order(harness: RunnerHarness) -> None:
    assert harness.due("a-1") == [True]
    await harness.settled()
    assert harness.log == ["channel to a", "marker a-1", "ask a-1.1", "answered a-1 commit"]
    assert harness.outcomes == [("a", "commit")]
    assert harness.open_channels == 0


async def test_preferred_instance_reaches_finder(harness: RunnerHarness) -> None:
    endpoints: list[str] = []
    attempt = harness.owner.attempt

    async def recorded(checks: Sequence[AttemptRequest]) -> list[CheckCall | TxbrokerError | None]:
        endpoints.extend(f"{check.endpoint} {check.reason}" for check in checks)
        return await attempt(checks)

    harness.owner.attempt = recorded  # type: ignore[method-assign]
    harness.pending.add("a-1")
    harness.runner.due(harness.owner, "a-1", "a", "pod-7", CheckReason.ASKED)
    await harness.settled()
    assert endpoints == ["session pod-7 asked"]


@pytest.mark.rule(21)
async def test_rejected_marker_prevents_the_call(harness: RunnerHarness) -> None:
    harness.refused.add("a-1")
    harness.broken.add("a-2")
    harness.due("a-1", "a-2", "a-3")
    await harness.settled()
    assert harness.count("marker a-1") == harness.count("marker a-2") == 1
    assert [line for line in harness.log if line.startswith("ask")] == ["ask a-3.1"]
    assert harness.open_channels == 0


@pytest.mark.rule(21)
async def test_decision_prevents_the_call(harness: RunnerHarness) -> None:
    harness.markers_held = asyncio.Event()
    harness.due("a-1")
    await until(lambda: harness.owner.markers_waiting == 1)
    harness.pending.discard("a-1")  # decided while the marker was on its way
    harness.markers_held.set()
    await harness.settled()
    assert not any(line.startswith("ask") for line in harness.log)


async def test_decided_queued_check_writes_no_marker(harness: RunnerHarness) -> None:
    harness.held = {"a-1": asyncio.Event(), "a-2": asyncio.Event()}
    harness.due("a-1", "a-2", "a-3")
    await until(lambda: harness.asking == {"a-1", "a-2"})
    harness.pending.discard("a-3")
    for event in harness.held.values():
        event.set()
    await harness.settled()
    assert "marker a-3" not in harness.log


@pytest.mark.rule(21)
async def test_pending_test_and_question_are_atomic(harness: RunnerHarness) -> None:
    """Other ready callbacks of the loop run before the test or after the question."""
    tested: list[int] = []
    still_pending = harness.owner.still_pending

    def recorded(id: str) -> bool:
        tested.append(len(harness.log))
        asyncio.get_running_loop().call_soon(harness.log.append, "the loop went on")
        return still_pending(id)

    harness.owner.still_pending = recorded  # type: ignore[method-assign]
    harness.due("a-1")
    await harness.settled()
    assert harness.log[tested[-1]] == "ask a-1.1"


async def test_hanging_group_delays_no_other(harness: RunnerHarness) -> None:
    slow = [f"slow-{n}" for n in range(20)]
    harness.held = {id: asyncio.Event() for id in slow}
    harness.due(*slow)
    await until(lambda: len(harness.asking) == 2)
    harness.due(*(f"quick-{n}" for n in range(20)))
    await until(lambda: sum("answered quick" in line for line in harness.log) == 20)
    assert len(harness.asking) == 2
    assert not any("answered slow" in line for line in harness.log)
    for event in harness.held.values():
        event.set()
    await harness.settled()
    assert sum("answered slow" in line for line in harness.log) == 20


async def test_total_limit_leaves_each_group_a_first_call(harness: RunnerHarness) -> None:
    harness.use(parallel=4, parallel_total_max=5, first_calls_max=6)
    held = [f"slow-{n}" for n in range(8)] + [f"{group}-{n}" for group in "bcd" for n in (1, 2)]
    harness.held = {id: asyncio.Event() for id in held}
    harness.due(*held)
    await until(lambda: len(harness.asking) == 6)
    assert harness.asking == {"slow-0", "slow-1", "slow-2", "slow-3", "b-1", "c-1"}
    harness.held["slow-0"].set()
    await until(lambda: "d-1" in harness.asking)  # a first call comes before a further one
    assert len(harness.asking) == 6
    for event in harness.held.values():
        event.set()
    await harness.settled()
    assert sum(line.startswith("answered") for line in harness.log) == len(held)


@pytest.mark.parametrize(
    ("bounds", "at_once"),
    [
        ({"first_calls_max": 5}, 3),
        # First calls alone exceed the bound on further ones: a fifth of it is still left.
        ({"first_calls_max": 20, "parallel_total_max": 10}, 2),
    ],
)
async def test_large_share_leaves_room_for_others(
    harness: RunnerHarness, bounds: dict[str, int], at_once: int
) -> None:
    """Slow groups of one principal take four fifths of the calls, others' checks go on."""
    harness.use(share_of=lambda group: group[:1], parallel=3, **bounds)
    slow = [f"s{n}-{check}" for n in range(20) for check in range(2)]
    quick = [f"q-{n}" for n in range(20)]
    harness.held = {id: asyncio.Event() for id in slow + quick}
    harness.due(*slow)
    most = bounds["first_calls_max"] * 4 // 5
    await until(lambda: len(harness.asking) == most)
    harness.due(*quick)
    await until(lambda: sum(id.startswith("q") for id in harness.asking) == at_once)
    for id in quick:
        harness.held[id].set()
    await until(lambda: sum(line.startswith("answered q") for line in harness.log) == 20)
    assert len(harness.asking) == most
    for event in harness.held.values():
        event.set()
    await harness.settled()
    assert sum(line.startswith("answered s") for line in harness.log) == len(slow)


async def test_attempts_are_written_in_runs(harness: RunnerHarness) -> None:
    harness.use(parallel=16)
    harness.due(*(f"a-{n}" for n in range(16)))
    await harness.settled()
    # Answers of one iteration of the event loop are reported together, too.
    assert [len(run) for run in harness.owner.runs] == [16]
    assert [len(run) for run in harness.owner.reported] == [16]


async def test_slots_are_freed_while_answers_are_written(harness: RunnerHarness) -> None:
    """An answered call frees its slot, up to the limit of calls in flight."""
    harness.use(parallel=2, parallel_total_max=3)
    harness.reports_held = asyncio.Event()
    ids = [f"a-{n}" for n in range(12)]
    harness.due(*ids)
    await until(lambda: len(harness.owner.reported) > 0)
    for _ in range(50):
        await asyncio.sleep(0)
    answered = sum(map(len, harness.owner.reported))
    assert 2 < answered <= 3 + 2  # three gave theirs back, two keep it
    assert sum(harness.attempts.values()) == answered
    assert harness.runner.running == answered  # one being written still counts
    assert harness.due("a-0") == [True]
    harness.reports_held.set()
    await harness.settled()
    assert [harness.count(f"marker {id}") for id in ids] == [1] * 12
    assert harness.runner.running == 0


async def test_check_without_messages_in_memory_goes_alone(harness: RunnerHarness) -> None:
    """Messages that are to be read first, an answer with messages, another owner's checks."""
    harness.use(parallel=16)
    other = FakeOwner(harness)
    harness.unread = {"a-2", "a-3"}
    harness.results["a-1"] = Answered(Decision.COMMIT, messages=(Message("t"),), detail="commit")
    harness.due(*(f"a-{n}" for n in range(5)))
    harness.due("b-1", owner=other)
    await harness.settled()
    assert sorted(harness.owner.runs) == [["a-0", "a-1", "a-4"], ["a-2", "a-3"]]
    assert ["a-1"] in harness.owner.reported
    assert (other.runs, other.reported) == ([["b-1"]], [["b-1"]])


async def test_group_is_asked_in_order_of_due_times(harness: RunnerHarness) -> None:
    harness.use(parallel=1)
    harness.held = {"a-0": asyncio.Event()}
    harness.due("a-0")
    await until(lambda: "a-0" in harness.asking)
    harness.pending.update({"a-3", "a-1", "a-2"})
    for number in (3, 1, 2):
        harness.runner.due(harness.owner, f"a-{number}", "a", "", DUE, due_s=float(number))
    harness.held["a-0"].set()
    await harness.settled()
    asked = [line for line in harness.log if line.startswith("ask")]
    assert asked == ["ask a-0.1", "ask a-1.1", "ask a-2.1", "ask a-3.1"]


async def test_queued_or_running_check_is_not_queued_again(harness: RunnerHarness) -> None:
    harness.held = {"a-1": asyncio.Event()}
    assert harness.due("a-1", "a-1") == [True, True]
    await until(lambda: "a-1" in harness.asking)
    assert harness.due("a-1") == [True]
    harness.held["a-1"].set()
    await harness.settled()
    assert harness.count("marker a-1") == 1


async def test_full_queue_refuses_checks(harness: RunnerHarness) -> None:
    harness.use(parallel=1, queue_max=2)
    harness.held = {"a-0": asyncio.Event()}
    assert harness.due("a-0") == [True]
    await until(lambda: "a-0" in harness.asking)
    assert harness.due("a-1", "a-2", "a-3") == [True, True, False]
    assert harness.due("b-0") == [True]  # another group has its own
    harness.held["a-0"].set()
    await harness.settled()
    assert "marker a-3" not in harness.log
    assert harness.due("a-3") == [True]
    await harness.settled()
    assert "answered a-3 commit" in harness.log


@pytest.mark.rule(22)
async def test_unreachable_group_backs_off_without_attempts(harness: RunnerHarness) -> None:
    harness.gone["a"] = "connection refused"
    harness.due("a-1", "a-2", "a-3")
    rests = []
    for tries in range(1, 8):
        await until(lambda tries=tries: len(harness.timers) == tries)  # type: ignore[misc]
        assert harness.runner.unreachable() == {"a": "connection refused"}
        rests.append(harness.fire())
    assert rests == [1, 2, 4, 8, 16, 30, 30]
    await until(lambda: len(harness.timers) == 8)
    # Two went at once before it was known, then one at a time.
    assert harness.count("no channel to a") == 2 + 7
    assert not any("marker" in line for line in harness.log)
    assert set(harness.outcomes) == {("a", "unreachable")}
    assert harness.runner.queued == 3


async def test_call_within_back_off_does_not_extend_it(harness: RunnerHarness) -> None:
    harness.gone["g"] = "no instance"
    harness.pending |= {"a", "b"}
    assert harness.runner.due(harness.owner, "a", "g", "", DUE)
    await asyncio.sleep(0)
    # Started while the first is in flight, it continues when that has failed.
    assert harness.runner.due(harness.owner, "b", "g", "", DUE)
    await until(lambda: harness.count("no channel to g") == 2)
    assert [timer.cancelled for timer in harness.timers] == [False]
    harness.gone.clear()
    harness.fire()
    await harness.settled()


async def test_jitter_up_to_doubles_back_off(harness: RunnerHarness) -> None:
    harness.use(jitter=0.75)
    harness.gone["a"] = "gone"
    harness.due("a-1")
    await until(lambda: len(harness.timers) == 1)
    assert harness.timers[0].delay_s == 1.75


@pytest.mark.rule(22)
async def test_woken_group_is_retried_at_once(harness: RunnerHarness) -> None:
    harness.gone["a"] = "gone"
    harness.due("a-1", "a-2", "a-3")
    await until(lambda: len(harness.timers) == 1)
    del harness.gone["a"]
    harness.runner.wake("a")
    harness.runner.wake("unknown")
    assert harness.timers[0].cancelled
    await harness.settled()
    assert harness.runner.unreachable() == {}
    assert [harness.attempts[f"a-{n}"] for n in (1, 2, 3)] == [1, 1, 1]


async def test_returning_group_gets_its_full_limit(harness: RunnerHarness) -> None:
    harness.use(parallel=3)
    ids = [f"a-{n}" for n in range(6)]
    harness.held = {id: asyncio.Event() for id in ids}
    harness.gone["a"] = "gone"
    harness.due(*ids)
    await until(lambda: len(harness.timers) == 1)
    del harness.gone["a"]
    harness.fire()
    await until(lambda: len(harness.asking) == 1)
    assert harness.runner.unreachable() == {"a": "gone"}  # one asks; the others wait for its result
    harness.held["a-0"].set()
    await until(lambda: len(harness.asking) == 3)
    assert harness.runner.unreachable() == {}
    for event in harness.held.values():
        event.set()
    await harness.settled()


async def test_unhandled_question_gives_attempt_back(harness: RunnerHarness) -> None:
    harness.results["a-1"] = Unreached("answered 503: not handled")
    harness.due("a-1")
    await until(lambda: "returned a-1" in harness.log and len(harness.timers) == 1)
    assert harness.attempts["a-1"] == 0
    assert harness.runner.unreachable() == {"a": "answered 503: not handled"}
    del harness.results["a-1"]
    harness.fire()
    await harness.settled()
    assert harness.attempts["a-1"] == 1
    assert harness.outcomes == [("a", "returned"), ("a", "commit")]


@pytest.mark.rule(24)
async def test_refused_question_goes_to_another_instance(harness: RunnerHarness) -> None:
    """In the same attempt, which has reached no instance yet."""
    harness.instances["a"] = ["pod-1", "pod-2", "pod-3"]
    harness.results |= {"pod-1": Unreached("no check function"), "pod-3": Unreached("busy")}
    harness.pending.add("a-1")
    harness.runner.due(harness.owner, "a-1", "a", "pod-3", DUE)
    await harness.settled()
    assert harness.log == [
        "channel to a",
        "marker a-1",
        "ask a-1.1 of pod-3",
        "channel to a",
        "ask a-1.1 of pod-1",
        "channel to a",
        "ask a-1.1 of pod-2",
        "answered a-1 session pod-2: commit",
    ]
    assert harness.outcomes == [("a", "commit")]
    assert harness.timers == []
    # All within the time of one attempt: it may be parked after that.
    assert 5.0 >= harness.timeouts[0] > harness.timeouts[1] > harness.timeouts[2] > 0


async def test_check_url_is_asked_after_all_instances(harness: RunnerHarness) -> None:
    harness.instances["a"], harness.url = ["pod-1"], True
    harness.results["pod-1"] = Unreached("no check function")
    harness.due("a-1")
    await harness.settled()
    asked = [line for line in harness.log if line.startswith("ask")]
    assert asked == ["ask a-1.1 of pod-1", "ask a-1.1"]
    assert harness.attempts["a-1"] == 1


async def test_group_without_instances_backs_off(harness: RunnerHarness) -> None:
    harness.instances["a"] = ["pod-1", "pod-2"]
    harness.results |= {"pod-1": Unreached("busy"), "pod-2": Unreached("draining")}
    harness.due("a-1")
    await until(lambda: "returned a-1" in harness.log and len(harness.timers) == 1)
    assert harness.count("marker a-1") == harness.count("returned a-1") == 1
    assert harness.attempts["a-1"] == 0
    why = "session pod-1: busy; session pod-2: draining; no other instance"
    assert harness.runner.unreachable() == {"a": why}
    assert harness.outcomes == [("a", "returned")]
    # What did not take it then is asked again the next time.
    del harness.results["pod-1"]
    harness.fire()
    await harness.settled()
    assert "ask a-1.1 of pod-1" in harness.log[-2]


@pytest.mark.rule(24)
@pytest.mark.parametrize("broken", [1, 2, 20])
@pytest.mark.parametrize(
    "result",
    [
        Answered(Decision.UNKNOWN, detail="RuntimeError"),
        Unclear("the session ended before an answer"),
        Unreached("the database does not answer", ask_again_s=5.0),
    ],
    ids=["unknown", "closed", "unavailable"],
)
async def test_attempt_goes_on_until_an_instance_decides(
    harness: RunnerHarness, result: CheckResult, broken: int
) -> None:
    pods = [f"pod-{n}" for n in range(broken + 1)]
    harness.instances["a"], harness.url = pods, True
    harness.results |= dict.fromkeys(pods[:-1], result)
    harness.due("a-1")
    await harness.settled()
    assert asked(harness) == [f"ask a-1.1 of {pod}" for pod in pods]
    assert harness.log[-1] == f"answered a-1 session {pods[-1]}: commit"
    assert harness.outcomes == [("a", "commit")]
    assert (harness.attempts["a-1"], harness.timers) == (1, [])


@pytest.mark.rule(24)
async def test_next_attempt_asks_those_that_were_not_asked(harness: RunnerHarness) -> None:
    """Each instance that does not answer in time has one attempt before any has a second."""
    harness.timeout_s, harness.url = 0.02, True
    harness.instances["a"] = ["pod-1", "pod-2", "pod-3"]
    harness.frozen = {"pod-1", "pod-2", "pod-3"}
    harness.results["a-1"] = Unclear("answered 500")  # the check URL's
    whom = ["of pod-1", "of pod-2", "of pod-3", "", "of pod-1", "of pod-2"]
    for attempt in range(1, 6):
        harness.due("a-1")
        await harness.settled()
        assert harness.attempts["a-1"] == attempt
    harness.frozen.clear()
    harness.results["pod-2"] = COMMIT
    harness.due("a-1")
    await harness.settled()
    assert asked(harness) == [f"ask a-1.{n} {who}".rstrip() for n, who in enumerate(whom, start=1)]
    assert "a-1" not in harness.pending
    # Other transactions have their own order, which begins with the preferred instance.
    harness.pending.add("a-2")
    harness.runner.due(harness.owner, "a-2", "a", "pod-3", DUE)
    await harness.settled()
    assert asked(harness)[-1] == "ask a-2.1 of pod-3"


@pytest.mark.rule(24)
async def test_unknown_uses_no_attempt_while_another_was_not_asked(harness: RunnerHarness) -> None:
    harness.instances["a"], harness.busy = ["pod-1", "pod-2"], {"pod-2"}
    harness.results["pod-1"] = Answered(Decision.UNKNOWN, detail="unknown")
    harness.due("a-1")
    await harness.settled()
    assert (harness.attempts["a-1"], harness.outcomes) == (0, [("a", "later")])
    harness.busy.clear()
    harness.due("a-1")
    await harness.settled()
    assert asked(harness) == ["ask a-1.1 of pod-1", "ask a-1.1 of pod-2"]
    assert "a-1" not in harness.pending


@pytest.mark.rule(24)
async def test_decision_ends_the_attempt(harness: RunnerHarness) -> None:
    harness.instances = {"a": ["pod-1", "pod-2"], "b": ["pod-3", "pod-4"]}
    harness.results |= {"pod-1": Unreached("busy"), "pod-3": Answered(Decision.UNKNOWN, 5.0)}
    harness.held["a-1"] = asyncio.Event()
    harness.due("a-1", "b-1")
    await until(lambda: harness.asking == {"a-1"} and harness.runner.queued == 1)
    harness.pending.discard("a-1")  # decided before pod-1 answered that it is busy
    harness.held["a-1"].set()
    await harness.settled()
    assert asked(harness) == ["ask a-1.1 of pod-1", "ask b-1.1 of pod-3"]


UNKNOWN, NOT_YET = Answered(Decision.UNKNOWN, detail="?"), Answered(Decision.UNKNOWN, 9.0)
CANNOT, BUSY = Unreached("no check function", lasting=True), Unreached("busy")
UNAVAILABLE, UNCLEAR = Unreached("no database", ask_again_s=1.0), Unclear("no answer")
NO_OTHER = Unreached("no other instance", lasting=True)


@pytest.mark.rule(22, 24)
@pytest.mark.parametrize(
    ("results", "outcome", "again_s"),
    [
        ([UNKNOWN, COMMIT], "commit", None),
        ([UNCLEAR, NOT_YET], "later", 9.0),
        ([UNKNOWN, NO_OTHER], "unknown", None),
        ([CANNOT, UNKNOWN, NO_OTHER], "unknown", None),
        ([UNKNOWN, UNKNOWN, BUSY], "later", 5.0),
        ([BUSY, UNKNOWN, NO_OTHER], "later", 5.0),
        ([UNAVAILABLE, NO_OTHER], "later", 5.0),
        ([UNKNOWN, UNAVAILABLE, CANNOT, NO_OTHER], "later", 5.0),
        ([UNAVAILABLE, UNCLEAR, BUSY], "unclear", None),
        ([BUSY, CANNOT, NO_OTHER], "returned", None),
    ],
)
def test_attempt_counts_by_all_its_answers(
    results: list[CheckResult], outcome: str, again_s: float | None
) -> None:
    call = CheckCall("id", "a", 1, 15, DUE, 0, (), number=1)
    at = [("" if each is NO_OTHER else f"pod-{n}", each) for n, each in enumerate(results)]
    result = combined(call, at)
    assert outcome_of(result) == outcome
    assert getattr(result, "ask_again_s", None) == again_s


def test_pause_grows_while_no_instance_can_find_out() -> None:
    calls = [CheckCall("id", "a", 1, 15, DUE, 0, (), number=n) for n in (1, 2, 3, 9, 1000)]
    results = [combined(call, [("pod-1", UNAVAILABLE)]) for call in calls]
    assert [getattr(each, "ask_again_s", None) for each in results] == [5.0, 10.0, 20.0, 60.0, 60.0]


def test_instances_asked_in_vain_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "TRANSACTIONS_MAX", 2)
    memory = attempts.AskedInVain()
    owner, other = FakeOwner(RunnerHarness()), FakeOwner(RunnerHarness())
    for id in ("1", "2", "3"):
        memory.note(owner, id, ("pod-1",))
    memory.note(other, "4", ("pod-1", ""))
    memory.note(other, "4", ("pod-2", "pod-1"))
    assert [memory.of(owner, id) for id in ("1", "2", "3")] == [(), (), ("pod-1",)]
    assert memory.of(other, "4") == ("", "pod-2", "pod-1")
    memory.forget(owner)
    memory.note(other, "4", ())
    assert (memory.of(owner, "3"), memory.of(other, "4")) == ((), ())


async def test_unclear_result_counts_without_back_off(harness: RunnerHarness) -> None:
    harness.results["a-1"] = Unclear("answered 500")
    harness.due("a-1", "a-2")
    await harness.settled()
    assert harness.attempts["a-1"] == 1
    assert "answered a-1 answered 500" in harness.log
    assert harness.timers == []
    assert sorted(harness.outcomes) == [("a", "commit"), ("a", "unclear")]


async def test_not_yet_is_counted_as_later(harness: RunnerHarness) -> None:
    harness.results["a-1"] = Answered(Decision.UNKNOWN, 5.0)
    harness.results["b-1"] = Answered(Decision.UNKNOWN)
    harness.due("a-1", "b-1")
    await harness.settled()
    assert sorted(harness.outcomes) == [("a", "later"), ("b", "unknown")]


async def test_back_off_without_checks_ends_silently(harness: RunnerHarness) -> None:
    harness.gone["a"] = "gone"
    harness.due("a-1")
    await until(lambda: len(harness.timers) == 1)
    harness.pending.clear()  # decided elsewhere
    harness.fire()
    assert harness.runner.queued == 0
    assert harness.runner.unreachable() == {}


async def test_forgotten_owner_asks_no_more(harness: RunnerHarness) -> None:
    other = FakeOwner(harness)
    harness.held = {"a-1": asyncio.Event()}
    harness.markers_held = asyncio.Event()
    harness.due("a-1", "a-2", "a-3")
    harness.due("a-9", owner=other)
    await until(lambda: harness.owner.markers_waiting == 2)
    harness.runner.forget(harness.owner)
    harness.runner.forget(harness.owner)
    harness.markers_held.set()
    await harness.settled()
    assert [line for line in harness.log if line.startswith(("ask", "answered"))] == [
        "ask a-9.1",
        "answered a-9 commit",
    ]


async def test_answer_for_forgotten_owner_is_dropped(harness: RunnerHarness) -> None:
    harness.held = {"a-1": asyncio.Event()}
    harness.due("a-1")
    await until(lambda: "a-1" in harness.asking)
    harness.runner.forget(harness.owner)
    harness.held["a-1"].set()
    await until(lambda: harness.open_channels == 0)
    await asyncio.sleep(0)
    assert not any(line.startswith("answered") for line in harness.log)


async def test_back_off_of_forgotten_owner_ends(harness: RunnerHarness) -> None:
    harness.gone["a"] = "gone"
    harness.due("a-1")
    await until(lambda: len(harness.timers) == 1)
    harness.runner.forget(harness.owner)
    harness.fire()
    assert harness.runner.unreachable() == {}


async def test_broken_channel_counts_and_runner_continues(harness: RunnerHarness) -> None:
    class Breaks(FakeChannel):
        def ask(self, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
            raise RuntimeError("a bug")

    acquire = harness.acquire

    async def breaking(
        group: str, prefer: str, avoid: Collection[str] = ()
    ) -> FakeChannel | Unreached:
        if group == "b":
            raise RuntimeError("another bug")
        channel = await acquire(group, prefer)
        assert isinstance(channel, FakeChannel)
        channel.__class__ = Breaks
        return channel

    harness.acquire = breaking  # type: ignore[method-assign]
    harness.near = False
    harness.due("a-1", "b-1")
    await until(lambda: harness.runner.queued == 1)
    assert "answered a-1 the proxy failed while it asked: RuntimeError" in harness.log
    assert harness.runner.unreachable() == {"b": "the proxy failed to connect: RuntimeError"}


async def test_close_ends_all_calls(harness: RunnerHarness) -> None:
    harness.gone["c"] = "gone"
    harness.held = {"a-1": asyncio.Event()}
    before = asyncio.all_tasks()
    harness.due("a-1", "a-2", "a-3", "c-1")
    await until(lambda: "a-1" in harness.asking and len(harness.timers) == 1)
    harness.due("d-1")  # its task has not even begun
    await harness.runner.close()
    assert harness.open_channels == 0
    assert harness.asking == set()
    assert harness.runner.queued == 0
    assert harness.timers[0].cancelled
    assert asyncio.all_tasks() == before
    assert harness.due("e-1") == [False]
