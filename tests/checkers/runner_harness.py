"""A check runner with fakes, without a clock. A test fires timers and releases answers,
so only the order of events counts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import pytest

from tests.checkers.check_server import until
from txbroker.checkers.base import (
    Answered,
    AttemptRequest,
    AttemptResult,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
)
from txbroker.checkers.runner import CheckRunner, RunnerLimits
from txbroker.core.records import CheckReason, Decision
from txbroker.core.settled import ShareOf, own_share
from txbroker.errors import OwnerUnavailable, TxbrokerError

DUE = CheckReason.DUE
COMMIT = Answered(Decision.COMMIT, detail="commit")


class RunnerHarness:
    """Finder, owner and metrics in one, with a log of everything in the order it happened."""

    def __init__(self, *, near: bool = True) -> None:
        self.near = near  # whether a channel is at hand
        self.log: list[str] = []
        self.pending: set[str] = set()
        self.gone: dict[str, str] = {}  # groups that cannot be reached, with why
        self.instances: dict[str, list[str]] = {}  # of a group; without any its channel is no one's
        self.url = False  # whether groups have one besides
        self.busy: set[str] = set()  # instances without room for a question
        self.frozen: set[str] = set()  # instances that do not answer in time
        self.timeout_s = 5.0  # of an attempt
        self.results: dict[str, CheckResult] = {}  # by instance, else by id, else COMMIT
        self.held: dict[str, asyncio.Event] = {}  # an ask of this id waits for it
        self.markers_held: asyncio.Event | None = None
        self.reports_held: asyncio.Event | None = None
        self.refused: set[str] = set()  # ids whose marker the ledger does not accept
        self.broken: set[str] = set()  # ids whose marker cannot be written
        self.unread: set[str] = set()  # ids whose messages are not in memory
        self.attempts: defaultdict[str, int] = defaultdict(int)
        self.open_channels = 0
        self.asking: set[str] = set()
        self.outcomes: list[tuple[str, str]] = []
        self.timers: list[FakeTimer] = []
        self.timeouts: list[float] = []
        self.owner = FakeOwner(self)
        self.runner: CheckRunner
        self.use()

    def use(
        self,
        *,
        parallel: int = 2,
        share_of: ShareOf = own_share,
        jitter: float = 0.0,
        **limits: int,
    ) -> None:
        """Replace the runner by one with these limits."""
        self.runner = CheckRunner(
            self,
            self,
            parallel=lambda group: parallel,
            share_of=share_of,
            limits=RunnerLimits(**limits),
            jitter=lambda: jitter,
            later=self.later,
        )

    def due(self, *ids: str, owner: FakeOwner | None = None) -> list[bool]:
        """Offer checks of transactions named `group-number`."""
        self.pending.update(ids)
        by = owner or self.owner
        return [self.runner.due(by, id, id.split("-")[0], "", DUE) for id in ids]

    async def settled(self) -> None:
        """Wait until no check is left."""
        await until(lambda: self.runner.queued == 0)

    # Finder
    def at_hand(self, group: str, prefer: str) -> FakeChannel | None:
        return None if not self.near or group in self.gone else self._channel(group, prefer, ())

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> FakeChannel | Unreached:
        await asyncio.sleep(0)
        if group in self.gone:
            self.log.append(f"no channel to {group}")
            return Unreached(self.gone[group])
        known = [name for name in self.instances.get(group, ()) if name not in avoid]
        if not self.busy.issuperset(known):
            return self._channel(group, prefer, avoid)
        if "" in avoid or (avoid and not self.url):
            self.log.append(f"no other instance of {group}")
            return Unreached("no other instance", lasting=not known)
        return self._channel(group, prefer, avoid)

    def _channel(self, group: str, prefer: str, avoid: Collection[str]) -> FakeChannel:
        taken = {*avoid, *self.busy}
        free = [name for name in self.instances.get(group, ()) if name not in taken]
        self.open_channels += 1
        self.log.append(f"channel to {group}")
        instance = prefer if prefer in free else "".join(free[:1])
        return FakeChannel(self, f"session {instance or prefer or group}", instance)

    # Metrics
    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        assert min(durations_s) >= 0
        self.outcomes += [(group, outcome)] * len(durations_s)

    # Timers
    def later(self, delay_s: float, then: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(delay_s, then)
        self.timers.append(timer)
        return timer

    def fire(self) -> float:
        """Let the last back-off end; return how long it was, seconds."""
        timer = self.timers[-1]
        assert not timer.cancelled
        timer.then()
        return timer.delay_s

    def count(self, line: str) -> int:
        return self.log.count(line)


class FakeTimer:
    def __init__(self, delay_s: float, then: Callable[[], None]) -> None:
        self.delay_s = delay_s
        self.then = then
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeChannel:
    def __init__(self, harness: RunnerHarness, endpoint: str, instance: str = "") -> None:
        self._harness = harness
        self._released = False
        self.endpoint = endpoint
        self.instance = instance

    def ask(self, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
        harness = self._harness
        whom = f" of {self.instance}" if self.instance else ""
        harness.log.append(f"ask {call.id}.{call.attempt}{whom}")
        harness.timeouts.append(timeout_s)
        harness.asking.add(call.id)
        asked = asyncio.ensure_future(self._result(call, timeout_s))
        asked.add_done_callback(lambda _: harness.asking.discard(call.id))
        return asked

    async def _result(self, call: CheckCall, timeout_s: float) -> CheckResult:
        harness = self._harness
        if call.id in harness.held:
            await harness.held[call.id].wait()
        if self.instance in harness.frozen:
            await asyncio.sleep(timeout_s)
            return Unclear("no answer")
        return harness.results.get(self.instance) or harness.results.get(call.id, COMMIT)

    def release(self) -> None:
        assert not self._released
        self._released = True
        self._harness.open_channels -= 1


class FakeOwner:
    def __init__(self, harness: RunnerHarness) -> None:
        self._harness = harness
        self.markers_waiting = 0
        self.runs: list[list[str]] = []  # the ids of each run of markers
        self.reported: list[list[str]] = []  # and of each run of answers

    def in_memory(self, id: str) -> bool:
        return id not in self._harness.unread

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> list[CheckCall | TxbrokerError | None]:
        harness = self._harness
        ids = [check.id for check in checks]
        self.runs.append(ids)
        harness.log += [f"marker {id}" for id in ids]
        self.markers_waiting += len(ids)
        try:
            await asyncio.sleep(0)
            if harness.markers_held is not None:
                await harness.markers_held.wait()
        finally:
            self.markers_waiting -= len(ids)
        return [self._made(check) for check in checks]

    def _made(self, check: AttemptRequest) -> CheckCall | TxbrokerError | None:
        harness, id = self._harness, check.id
        if id in harness.broken:
            return OwnerUnavailable()
        if id in harness.refused:
            return None
        harness.attempts[id] += 1
        return CheckCall(
            id,
            id.split("-")[0],
            harness.attempts[id],
            15,
            check.reason,
            0,
            (),
            timeout_s=harness.timeout_s,
        )

    def still_pending(self, id: str) -> bool:
        return id in self._harness.pending

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        self.reported.append([attempt.call.id for attempt in run])
        await asyncio.sleep(0)
        if self._harness.reports_held is not None:
            await self._harness.reports_held.wait()
        for attempt in run:
            self._take(attempt.call, attempt.result)

    def _take(self, call: CheckCall, result: CheckResult) -> None:
        harness = self._harness
        if isinstance(result, Unreached):
            harness.attempts[call.id] -= 1
            harness.log.append(f"returned {call.id}")
            return
        harness.log.append(f"answered {call.id} {result.detail}")
        if isinstance(result, Answered) and result.ask_again_s is not None:
            harness.attempts[call.id] -= 1
        elif isinstance(result, Answered) and result.decision is not Decision.UNKNOWN:
            harness.pending.discard(call.id)


@pytest.fixture(params=["near", "far"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[RunnerHarness]:
    """Near: channels are at hand, so checks go in runs; far: each check waits for its channel."""
    made = RunnerHarness(near=request.param == "near")
    yield made
    await made.runner.close()
    assert made.open_channels == 0
