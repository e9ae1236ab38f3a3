"""Faults of ours in the runner: they cost one check its turn, never a group its places."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from tests.checkers.runner_harness import FakeChannel, RunnerHarness, until
from txbroker import tracing
from txbroker.checkers import runner as runner_module
from txbroker.checkers.base import CheckCall, CheckResult, Unreached


def cancelled() -> asyncio.Future[CheckResult]:
    """Return an answer that was cancelled elsewhere."""
    answer: asyncio.Future[CheckResult] = asyncio.get_running_loop().create_future()
    answer.cancel()
    return answer


@pytest.mark.parametrize("of", ["", "pod-1", "pod-2"])
async def test_cancelled_answer_is_unclear(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch, loop_faults: list[str], of: str
) -> None:
    if of:
        harness.instances["a"] = ["pod-1", "pod-2"]
    harness.results["pod-1"] = Unreached("going away")
    asked = FakeChannel.ask

    def ask(self: FakeChannel, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
        return cancelled() if self.instance == of else asked(self, call, timeout_s)

    monkeypatch.setattr(FakeChannel, "ask", ask)
    harness.due("a-1")
    await harness.settled()
    assert harness.outcomes == [("a", "commit" if of == "pod-1" else "unclear")]
    # It may have reached an instance, so it counts.
    assert harness.attempts["a-1"] == 1
    assert (harness.open_channels, harness.runner.running, loop_faults) == (0, 0, [])


async def test_failing_trace_affects_one_question(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [ValueError("trace")]

    def broken(_messages: object) -> None:
        if faults:
            raise faults.pop()

    monkeypatch.setattr(tracing, "sampled_context", broken)
    harness.due("a-1", "a-2")
    await harness.settled()
    assert sorted(harness.outcomes) == [("a", "commit"), ("a", "unclear")]
    assert [harness.attempts[id] for id in ("a-1", "a-2")] == [1, 1]
    assert harness.runner.running == 0


async def test_failing_release_frees_the_slot(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch, loop_faults: list[str]
) -> None:
    harness.instances["b"] = ["pod-1", "pod-2"]
    harness.results["pod-1"] = Unreached("going away")
    harness.refused.add("c-1")
    release = FakeChannel.release

    def broken(self: FakeChannel) -> None:
        release(self)
        if not self.endpoint.endswith(" d"):
            raise ValueError("release")

    monkeypatch.setattr(FakeChannel, "release", broken)
    harness.due("a-1", "a-2", "a-3", "b-1", "c-1", "d-1")
    await harness.settled()
    assert sorted(id for run in harness.owner.reported for id in run) == [
        "a-1", "a-2", "a-3", "b-1", "d-1",
    ]  # fmt: skip
    assert harness.outcomes.count(("b", "commit")) == 1
    assert (harness.open_channels, harness.runner.running, loop_faults) == (0, 0, [])


async def test_cancelled_finder_frees_the_slot(
    harness: RunnerHarness, loop_faults: list[str]
) -> None:
    harness.near = False
    acquire, given_up = harness.acquire, ["a-1"]

    async def once_cancelled(
        group: str, prefer: str, avoid: Collection[str] = ()
    ) -> FakeChannel | Unreached:
        if given_up:
            given_up.pop()
            raise asyncio.CancelledError
        return await acquire(group, prefer, avoid)

    harness.acquire = once_cancelled  # type: ignore[method-assign]
    harness.due("a-1")
    await until(lambda: bool(harness.timers))
    assert (harness.outcomes, harness.runner.running) == ([("a", "unreachable")], 0)
    harness.fire()
    await harness.settled()
    assert harness.outcomes[1:] == [("a", "commit")]
    assert loop_faults == []


async def test_failing_report_frees_the_slot(harness: RunnerHarness) -> None:
    def broken(group: str, outcome: str, durations_s: Sequence[float]) -> None:
        raise ValueError("metrics")

    harness.checks_ended = broken  # type: ignore[method-assign]
    harness.gone["b"] = "no session"
    harness.due("a-1", "a-2", "a-3", "b-1")
    await until(lambda: harness.runner.queued == 1)  # b-1 waits until its group has rested
    assert sorted(id for run in harness.owner.reported for id in run) == ["a-1", "a-2", "a-3"]
    assert harness.runner.unreachable() == {"b": "no session"}
    assert harness.runner.running == 0


async def test_fault_while_asking_others_is_unclear(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch, loop_faults: list[str]
) -> None:
    harness.instances["a"] = ["pod-1", "pod-2"]
    harness.results["pod-1"] = Unreached("going away")
    ask = runner_module.ask

    def broken(channel: FakeChannel, call: CheckCall) -> asyncio.Future[CheckResult]:
        if channel.instance == "pod-2":
            raise ValueError("asking")
        return ask(channel, call)

    monkeypatch.setattr(runner_module, "ask", broken)
    harness.due("a-1")
    await harness.settled()
    assert harness.outcomes == [("a", "unclear")]
    assert (harness.open_channels, harness.runner.running, loop_faults) == (0, 0, [])
