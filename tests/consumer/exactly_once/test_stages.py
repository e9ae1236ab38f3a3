"""Later stages: after the result is stored, in order, at least once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit.consumer_world import World, text
from tests.kit.results import ORDERS, Booking, Shop
from tests.kit.until import until
from txbroker.consumer import ReceivedMessage

BUG = ValueError("bug")


class Stages:
    """Two later stages, the first plain; both record calls, and wait or fail as planned."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.calls: list[tuple[str, str]] = []
        self.failing: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.then = [self.plain, self.coroutine]

    def plain(self, message: ReceivedMessage) -> None:
        self._note("plain", message)

    async def coroutine(self, message: ReceivedMessage) -> None:
        await self.gate.wait()
        assert text(message) in self.shop.results
        self._note("coroutine", message)

    def _note(self, stage: str, message: ReceivedMessage) -> None:
        self.calls.append((stage, text(message)))
        if stage in self.failing:
            self.failing.remove(stage)
            raise BUG

    def of(self, value: str) -> list[str]:
        return [stage for stage, mine in self.calls if mine == value]


@pytest.mark.parametrize("order", ORDERS)
async def test_stages_follow_the_result(world: World, shop: Shop, order: str) -> None:
    booking, stages = Booking(shop), Stages(shop)
    stages.failing = ["plain", "coroutine"]
    world.produce("a=1", "b=2", "a=3")
    async with world.running(booking, order=order, run={"then": stages.then}, **shop.options):
        await until(lambda: all("coroutine" in stages.of(value) for value in "123"))
        await until(lambda: len(stages.calls) == 3 * 2 + 2)
    assert sorted(booking.begun) == ["1", "2", "3"], "the first stage is not repeated"
    for value in "123":
        assert list(dict.fromkeys(stages.of(value))) == ["plain", "coroutine"]
    if order != "none":
        mine = [value for stage, value in stages.calls if value in "13"]
        assert mine == sorted(mine)


@pytest.mark.parametrize("order", ORDERS)
async def test_crash_between_stages(world: World, shop: Shop, order: str) -> None:
    """The next owner calls the later stages only."""
    booking, stages = Booking(shop), Stages(shop)
    world.produce("a=1", "b=2")
    options = {"order": order, "drain_s": 0.05, **shop.options}
    stages.gate.clear()
    async with world.running(booking, run={"then": stages.then}, **options):
        await until(lambda: stages.of("1"))
    assert "1" in shop.results
    stages.gate.set()
    async with world.running(booking, run={"then": stages.then}, **options):
        await shop.has("1", "2")
        await until(lambda: "coroutine" in stages.of("1") and "coroutine" in stages.of("2"))
        await until(lambda: shop.do("SELECT later_next FROM txbroker_position")[0][0] in (None, 2))
    assert sorted(booking.begun) == ["1", "2"]
    calls = len(stages.calls)
    async with world.running(booking, run={"then": stages.then}, **options):
        world.produce("a=3")
        await until(lambda: "coroutine" in stages.of("3"))
    assert len(stages.calls) == calls + 2


@pytest.mark.parametrize("order", ["none", "key"])
async def test_stages_of_kept_messages(world: World, shop: Shop, order: str) -> None:
    """Their row stays until the last stage has ended."""
    booking, stages = Booking(shop, **{"1": [BUG, None]}), Stages(shop)
    world.produce("a=1")
    policy: dict[str, Any] = {"order": order, "local_attempts_max": 1, "drain_s": 0.05}
    if order == "key":
        policy["on_failure"] = "aside"
    options = {**policy, **shop.options}
    stages.gate.clear()
    async with world.running(booking, run={"then": stages.then}, **options):
        if order == "key":
            await until(lambda: shop.aside("aside"))
            shop.transact(shop.kept.release(("orders", 0), b"a", "checked"))
        await until(lambda: stages.of("1") == ["plain"])
        assert shop.results == ["1"]
    assert shop.aside() == ["1"]
    stages.gate.set()
    async with world.running(booking, run={"then": stages.then}, **options):
        await until(lambda: "coroutine" in stages.of("1") and not shop.aside())
    assert booking.begun == ["1", "1"]


async def test_stage_that_keeps_failing_is_kept(world: World, shop: Shop) -> None:
    """Its failures follow the policy, and are not those of the first stage."""
    booking, stages = Booking(shop), Stages(shop)
    stages.failing = ["coroutine"] * 3
    world.produce("a=1")
    options = {"order": "none", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, run={"then": stages.then}, **options):
        await until(lambda: stages.of("1").count("coroutine") == 4 and not shop.aside())
    assert booking.begun == ["1"]
    assert shop.results == ["1"]


async def test_stage_that_fails_for_one_message_of_a_batch(world: World, shop: Shop) -> None:
    """It is tried again for that message, though the call returned."""
    calls: list[list[str]] = []

    async def stage(messages: list[ReceivedMessage]) -> None:
        calls.append([text(message) for message in messages])
        for message in messages:
            if text(message) == "1" and len(calls) == 1:
                message.failed(BUG)

    world.produce("a=1", "b=2")
    batch = {"batch": 2, "max_wait_s": 0.2, "then": [stage]}
    async with world.running(Booking(shop), order="key", run=batch, **shop.options):
        await until(lambda: len(calls) == 2)
    assert calls == [["1", "2"], ["1"]]
    assert sorted(shop.results) == ["1", "2"]


@pytest.mark.parametrize("store", ["none", "database"])
async def test_stages_of_a_batch_keep_the_order_of_a_key(
    world: World, shop: Shop, store: str
) -> None:
    """After a message that failed, later ones of its key wait, also for their next stages."""
    calls: list[list[str]] = []

    async def first(messages: list[ReceivedMessage]) -> None:
        calls.append(["first", *map(text, messages)])

    async def second(messages: list[ReceivedMessage]) -> None:
        calls.append(["second", *map(text, messages)])
        for message in messages:
            if text(message) == "1" and len(calls) < 3:
                message.failed(BUG)

    async def third(messages: list[ReceivedMessage]) -> None:
        calls.append(["third", *map(text, messages)])

    world.produce("a=1", "a=2", "b=3")
    batch = {"batch": 3, "max_wait_s": 0.2, "then": [second, third]}
    handler, options = (Booking(shop), shop.options) if store == "database" else (first, {})
    async with world.running(handler, order="key", run=batch, **options):
        await until(lambda: sum(each[0] == "third" for each in calls) >= 2)
    later = [each for each in calls if each[0] != "first"]
    assert later[:2] == [["second", "1", "2", "3"], ["third", "3"]]
    assert [value for each in later[2:] for value in each[1:]] == ["1", "2", "1", "2"]
