"""The runner under random faults: every check is queued, running or done."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

import pytest

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
from txbroker.errors import OwnerUnavailable, TxbrokerError

GROUPS = 4
STEPS = 300


class Dice:
    """Chance, and pauses of a few turns of the loop: no clock is involved."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def pause(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)


class Timer:
    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Storm:
    """Finder, channel and metrics in one."""

    endpoint = "somewhere"

    @property
    def instance(self) -> str:
        return self.dice.random.choice(["", "pod-1"])

    def __init__(self, seed: int) -> None:
        self.dice = Dice(seed)
        self.timers: list[Timer] = []

    def later(self, delay_s: float, then: Callable[[], None]) -> Timer:
        self.timers.append(Timer(then))
        return self.timers[-1]

    def fire(self) -> None:
        self.dice.random.shuffle(self.timers)
        for timer in [self.timers.pop() for _ in range(len(self.timers) // 2 + 1) if self.timers]:
            if not timer.cancelled:
                timer.then()

    def at_hand(self, group: str, prefer: str) -> Storm | None:
        return self if self.dice.random.random() < 0.5 else None

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Storm | Unreached:
        await self.dice.pause()
        return Unreached("no instance") if self.dice.random.random() < 0.3 else self

    def ask(self, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
        return asyncio.ensure_future(self._result())

    async def _result(self) -> CheckResult:
        await self.dice.pause()
        return self.dice.random.choice(
            [Answered(Decision.COMMIT), Unreached("busy"), Unclear("no answer")]
        )

    def release(self) -> None:
        pass

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        pass


class Owner:
    """An owner, until it is forgotten and another takes its place."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice
        self.pending: set[str] = set()

    def in_memory(self, id: str) -> bool:
        return self.dice.random.random() < 0.5

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> list[CheckCall | TxbrokerError | None]:
        await self.dice.pause()
        if self.dice.random.random() < 0.05:
            raise RuntimeError("a bug")
        return [self._made(check) for check in checks]

    def _made(self, check: AttemptRequest) -> CheckCall | TxbrokerError | None:
        chance = self.dice.random.random()
        if chance < 0.05:
            return OwnerUnavailable()
        return None if chance < 0.15 else CheckCall(check.id, "g", 1, 15, check.reason, 0, ())

    def still_pending(self, id: str) -> bool:
        return id in self.pending

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        await self.dice.pause()
        for attempt in run:
            if isinstance(attempt.result, Answered):
                self.pending.discard(attempt.call.id)


@pytest.mark.parametrize("seed", range(30))
async def test_no_check_is_lost_in_random_runs(seed: int) -> None:
    storm = Storm(seed)
    chance = storm.dice.random
    runner = CheckRunner(
        storm,
        storm,
        limits=RunnerLimits(
            parallel_total_max=chance.choice([2, 4, 256]),
            first_calls_max=chance.choice([2, 8, 1024]),
        ),
        share_of=chance.choice([str, lambda group: f"of {int(group[1:]) % 2}"]),
        later=storm.later,
    )
    owners = [Owner(storm.dice) for _ in range(3)]
    for number in range(STEPS):
        owner = chance.choice(owners)
        if chance.random() < 0.6:
            owner.pending.add(str(number))
            runner.due(owner, str(number), f"g{chance.randrange(GROUPS)}", "", CheckReason.DUE)
        if chance.random() < 0.2 and owner.pending:
            owner.pending.discard(chance.choice(sorted(owner.pending)))
        if chance.random() < 0.2:
            runner.wake(f"g{chance.randrange(GROUPS)}")
        if chance.random() < 0.3:
            storm.fire()
        if chance.random() < 0.03:
            runner.forget(owner)
            owners[owners.index(owner)] = Owner(storm.dice)
        await storm.dice.pause()
    # From now on there are no faults, and every check must end.
    for _ in range(10_000):
        if not runner.queued:
            break
        storm.fire()
        await asyncio.sleep(0)
    assert runner.queued == 0
    await runner.close()
