"""Rules 8 and 11: two owners claim at once, in every order in which their steps can come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from txbroker.core.records import RECORD_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import (
    Fenced,
    PartitionDoor,
    PromotionTxn,
    PromotionTxnLost,
    TargetRecord,
)
from txbroker.testing.door import MemoryDoor
from txbroker.testing.memory import MemoryKafka

NAMES = ("one", "two")


class Stepped:
    """A coroutine that goes on by one step at a time.

    While it waits for internal events, a step is one round of the event loop.
    """

    def __init__(self, work: Coroutine[Any, Any, str]) -> None:
        self._work = work
        self._waits_for: asyncio.Future[Any] | None = None
        self.result: str | None = None

    async def step(self) -> None:
        if self._waits_for is not None and not self._waits_for.done():
            await asyncio.sleep(0)
            return
        try:
            self._waits_for = self._work.send(None)
        except StopIteration as done:
            self.result = done.value
        if self._waits_for is not None:
            # Awaiting a future sets this flag; this loop sets it instead.
            self._waits_for._asyncio_future_blocking = False


def turn(claim: str) -> PromotionTxn:
    """Return the turn that promotes the only transaction there is."""
    target = TargetRecord("t", 0, Record(b"k", b"v"))
    return PromotionTxn((target,), (), Checkpoint(RECORD_VERSION, claim, 1, 1))


async def own(door: PartitionDoor, name: str) -> str:
    try:
        claimed = await door.claim(Claim(RECORD_VERSION, name, name, ""))
        if claimed.progress is None:
            await (await door.write(turn(name))).committed()
    except (Fenced, PromotionTxnLost):
        return "lost"
    return "owner"


async def can_write(door: PartitionDoor, name: str) -> bool:
    """Return whether an owner can still make a record visible."""
    empty = PromotionTxn((), (), Checkpoint(RECORD_VERSION, name, 1, 1))
    try:
        await (await door.write(empty)).committed()
    except (Fenced, PromotionTxnLost):
        return False
    return True


class Schedules:
    """Every order of the steps of two, one after another."""

    def __init__(self) -> None:
        self.count = 0
        self._choices: list[int] = []
        self._taken = 0

    def __iter__(self) -> Iterator[None]:
        while True:
            self._taken = 0
            self.count += 1
            yield
            del self._choices[self._taken :]
            while self._choices and self._choices[-1] == 1:
                self._choices.pop()
            if not self._choices:
                return
            self._choices[-1] = 1

    def choose(self) -> int:
        """Return whose step is next, where either could go on."""
        if self._taken == len(self._choices):
            self._choices.append(0)
        self._taken += 1
        return self._choices[self._taken - 1]


async def run(schedules: Schedules) -> tuple[list[str | None], list[bool], int]:
    """Run one order; return both results, the writers, and the count of each visible value."""
    kafka = MemoryKafka()
    main = MemoryDoor(kafka, half_partitions=1)
    await main.start()
    kafka.create_topic("t", 1)
    doors = [main.partition(0), main.partition(0)]
    both = [Stepped(own(door, name)) for door, name in zip(doors, NAMES, strict=True)]
    while any(each.result is None for each in both):
        going = [each for each in both if each.result is None]
        await (going[0] if len(going) == 1 else going[schedules.choose()]).step()
    writers = [await can_write(door, name) for door, name in zip(doors, NAMES, strict=True)]
    seen = len(kafka.visible("t"))
    for door in doors:
        await door.close()
    await main.close()
    return [each.result for each in both], writers, seen


@pytest.mark.rule(8)
async def test_every_order_of_two_claims_leaves_one_owner() -> None:
    schedules = Schedules()
    outcomes = set()
    for _ in schedules:
        results, writers, seen = await run(schedules)
        assert writers.count(True) == 1, (schedules._choices, results, writers)
        assert results[writers.index(True)] == "owner"
        assert seen == 1, (schedules._choices, results, seen)
        outcomes.add((tuple(results), tuple(writers)))
    # All that can come out did: the first or the second wins, against one that had promoted or
    # was fenced before.
    assert len(outcomes) >= 4
    assert schedules.count > 100
