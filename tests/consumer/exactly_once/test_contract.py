"""Every database, isolation level, order and kind of handler: results are stored exactly once."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.consumer_world import World, counted
from tests.kit.results import DATABASES, ORDERS, SERVERS, AsyncBooking, Booking, Shop
from tests.kit.until import until

BUG = ValueError("bug")
EACH = [
    (kind, order, handler)
    for kind in DATABASES
    for order in ORDERS
    for handler in (Booking, AsyncBooking)
    if handler is Booking or kind.startswith("postgres")
]


@pytest.mark.parametrize(("shop", "order", "handler"), EACH, indirect=["shop"])
async def test_results_are_stored_once_and_in_order(
    world: World, shop: Shop, order: str, handler: type[Booking]
) -> None:
    booking = handler(shop, **{"3": [BUG, None], "8": [BUG, BUG, None]})
    for number in range(12):
        world.produce(f"{number % 3}={number}", partition=number % 2)
    async with world.running(booking, order=order, **shop.options) as consumer:
        await shop.has(*map(str, range(12)))
        await shop.reaches(6, 0)
        await shop.reaches(6, 1)
        assert counted(consumer, "failed") == 3
    for key in range(3) if order != "none" else ():
        for partition in (0, 1):
            mine = [int(v) for v in shop.results if (int(v) % 3, int(v) % 2) == (key, partition)]
            assert mine == sorted(mine)
    world.produce("a=12")
    async with world.running(booking, order=order, **shop.options):
        await shop.has(*map(str, range(13)))
        await shop.reaches(7)
    assert world.committed()[0] == 7, "tools see the position"
    assert world.committed(1)[0] == 6


@pytest.mark.parametrize(
    ("shop", "order"), [(k, o) for k in SERVERS for o in ORDERS], indirect=["shop"]
)
async def test_zombie_stores_nothing(world: World, shop: Shop, order: str) -> None:
    """Its transaction began before another consumer's claim, and is to be committed after it."""
    booking = Booking(shop)
    world.produce("a=1", "a=2")
    async with world.running(booking, order=order, in_flight_max=1, **shop.options) as consumer:
        with booking.held("1"):
            await booking.begins("1")
            await asyncio.to_thread(shop.claim)
            assert shop.results == []
        await shop.has("1", "2")
        assert counted(consumer, "fenced") == 1
    assert booking.begun in (["1", "1", "2"], ["1", "1", "1", "2"]), (
        "the latter if the database refuses"
    )
    assert shop.tokens[0] == booking.messages[-1].token == booking.messages[0].token + 2


@pytest.mark.parametrize("shop", SERVERS, indirect=True)
@pytest.mark.rule(39)
async def test_claim_waits_for_a_result_that_is_being_stored(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reads its done row, also where the claim began before the commit."""
    from txbroker import failpoints

    booking = Booking(shop)
    world.produce("a=1", "b=2")
    committing, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hook(name: str) -> None:
        if name == "consumer.result_committing" and not committing.is_set():
            loop.call_soon_threadsafe(committing.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)

    monkeypatch.setattr(failpoints, "hook", hook)
    async with world.running(booking, order="key", in_flight_max=1, **shop.options):
        await committing.wait()
        claimed = asyncio.create_task(
            asyncio.to_thread(shop.transact, shop.positions.claim([("orders", 0)], 1))
        )
        await waits_for_a_lock(shop)
        assert not claimed.done()
        go_on.set()
        found = (await claimed)["orders", 0]
        assert found.next > found.rows[0] == 0
        await shop.has("1", "2")
    assert booking.begun.count("1") == 1


async def waits_for_a_lock(shop: Shop) -> None:
    """Wait until a transaction waits for another one."""
    session = shop.database.open()
    from txbroker.databases.steps import Query

    sql = {
        "postgresql": "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND datname = current_database()",
        "mariadb": "SELECT 1 FROM information_schema.processlist WHERE db = database() "
        "AND left(info, 29) = 'INSERT INTO txbroker_position'",
    }[shop.database.dialect.name]
    try:
        await until(lambda: session.execute(Query(sql)).rows)
    finally:
        session.close()


@pytest.mark.parametrize("shop", SERVERS, indirect=True)
@pytest.mark.parametrize("order", ORDERS)
async def test_two_consumers_share_partitions(world: World, shop: Shop, order: str) -> None:
    """Rebalances while messages are handled."""
    first, second = Booking(shop), Booking(shop)
    total = 60
    async with world.running(first, order=order, **shop.options):
        for number in range(total // 2):
            world.produce(f"{number % 5}={number}", partition=number % 2)
        await first.begins("3")
        async with world.running(second, order=order, **shop.options):
            for number in range(total // 2, total):
                world.produce(f"{number % 5}={number}", partition=number % 2)
            await until(lambda: second.begun)
        await shop.has(*map(str, range(total)))
        await shop.reaches(total // 2, 0)
        await shop.reaches(total // 2, 1)
    if order != "none":
        for partition in (0, 1):
            for key in range(5):
                values = map(int, shop.results)
                mine = [v for v in values if (v % 5, v % 2) == (key, partition)]
                assert mine == sorted(mine)
