"""Several messages in one transaction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.consumer_world import World, counted, text
from tests.kit.results import ORDERS, Booking, Shop
from txbroker.consumer import ReceivedMessage, Reject

BUG = ValueError("bug")
BATCH = {"batch": 10, "max_wait_s": 0.3}


@pytest.mark.parametrize("order", ORDERS)
async def test_batch_over_several_partitions(world: World, shop: Shop, order: str) -> None:
    for number in range(20):
        world.produce(f"{number % 3}={number}", partition=number % 2)
    booking = Booking(shop)
    async with world.running(booking, order=order, run=BATCH, **shop.options):
        await shop.has(*map(str, range(20)))
        await shop.reaches(10, 0)
        await shop.reaches(10, 1)
    assert max(map(len, booking.batches)) > 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.rule(38)
async def test_batch_with_a_failed_message_is_rolled_back(
    world: World, shop: Shop, order: str, reported: bool
) -> None:
    """Its order holds: those before the failed one are stored before it."""
    planned = [BUG, BUG]
    booking = Booking(shop)

    def handle(messages: list[ReceivedMessage], connection: Any) -> None:
        booking(messages, connection)
        for message in messages:
            if text(message) == "2" and planned:
                error = planned.pop()
                if not reported:
                    raise error
                message.failed(error)

    world.produce("a=0", "a=1", "a=2", "a=3", "b=4")
    async with world.running(handle, order=order, run=BATCH, **shop.options) as consumer:
        await shop.has("0", "1", "2", "3", "4")
        await shop.reaches(5)
        assert counted(consumer, "failed") == 1, "the batch is no failure of a message"
    if order != "none":
        assert [value for value in shop.results if value != "4"] == ["0", "1", "2", "3"]
    assert booking.batches.count(["2"]) == 2, "it is handled alone then"
    assert not planned


async def test_only_the_failed_message_becomes_a_dead_letter(world: World, shop: Shop) -> None:
    booking = Booking(shop, **{"1": Reject("bad"), "3": BUG})
    world.produce(*(f"{number}={number}" for number in range(6)))
    options = {"order": "none", "on_failure": "skip", **shop.options}
    async with world.running(booking, run=BATCH, **options):
        await shop.has("0", "2", "4", "5")
        await shop.reaches(6)
    assert shop.aside("dead") == ["1", "3"]


async def test_later_stages_of_a_batch(world: World, shop: Shop) -> None:
    seen: list[str] = []
    failing = [BUG]

    async def later(messages: list[ReceivedMessage]) -> None:
        if failing:
            raise failing.pop()
        seen.extend(map(text, messages))

    booking = Booking(shop)
    world.produce("a=1", "a=2", "b=3")
    async with world.running(booking, order="key", run=BATCH | {"then": [later]}, **shop.options):
        await shop.reaches(3)
    assert sorted(seen) == sorted(booking.begun) == ["1", "2", "3"]
