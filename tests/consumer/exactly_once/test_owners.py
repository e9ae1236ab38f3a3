"""What an owner stores, what the next one finds, and what a replaced one cannot do."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.kit.consumer_world import World, counted
from tests.kit.results import ORDERS, PLACE, Booking, Lost, Shop
from tests.kit.until import until
from txbroker import failpoints
from txbroker.consumer import CommitPolicy, ReceivedMessage
from txbroker.core.consuming.position import Metadata, Starts
from txbroker.databases.steps import Query, Result, run

NEVER = CommitPolicy(max_interval_s=60.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.rule(38, 40)
async def test_replaced_owner_stores_nothing(
    world: World, shop: Shop, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition is claimed before the handler's transaction stores its position."""
    booking = Booking(shop)
    shop.claims_before(monkeypatch, lambda: not booking.begun)
    world.produce("a=1", "a=2")
    async with world.running(booking, order=order, in_flight_max=1, **shop.options) as consumer:
        await shop.has("1", "2")
        assert counted(consumer, "fenced") == 1
    assert booking.begun == ["1", "1", "2"]
    assert shop.tokens[0] == booking.messages[0].token + 2


async def test_tokens_rise(world: World, shop: Shop) -> None:
    booking = Booking(shop)
    for number in range(3):
        world.produce(f"a={number}")
        async with world.running(booking, **shop.options):
            await shop.reaches(number + 1)
        assert shop.claim() == booking.messages[-1].token
    first, second, third = (message.token for message in booking.messages)
    assert first < second < third
    assert shop.position()[2] == third + 1


@pytest.mark.rule(39)
def test_claim_raises_the_token_before_it_reads(shop: Shop) -> None:
    """A commit between the two would be handled again."""
    sent: list[str] = []

    def execute(query: Query) -> Result:
        sent.append(query.sql.split()[0])
        return shop.execute(query)

    run(shop.positions.claim([PLACE], 7), execute)
    assert sent == ["INSERT", "SELECT", "SELECT"]


def test_starts_are_stored_with_the_position(shop: Shop) -> None:
    for starts in (Starts(2, 17, 1), Starts(3), Starts()):
        token = shop.claim() + 1
        position = (5, Metadata(token, "ab", starts=starts))
        assert shop.transact(shop.positions.save(PLACE, position, [], lower=True))
        found = shop.transact(shop.positions.claim([PLACE], 1))[PLACE]
        assert found.metadata == position[1]


@pytest.mark.parametrize("order", ["key", "none"])
@pytest.mark.rule(41)
async def test_done_rows_become_ranges(world: World, shop: Shop, order: str) -> None:
    """After a crash at any time nothing is repeated; the rows of a crash are replaced."""
    booking = Booking(shop, **{"1": [ValueError("bug")] * 1000})
    world.produce("a=1", "b=2", "c=3")
    options = {"order": order, "on_failure": "skip", "local_attempts_max": 1000, **shop.options}
    async with world.running(booking, commit=NEVER, **options):
        await shop.has("2", "3")
        assert shop.position()[0] == 0
        assert shop.done_rows == [1, 2]
        found = shop.transact(shop.positions.claim([PLACE], 1))[PLACE]
    assert (found.next, found.metadata.ranges, found.rows) == (0, ((1, 3),), [1, 2])
    async with world.running(booking, **options):
        await until(lambda: (json.loads(shop.position()[1]), shop.done_rows) == ([[1, 3]], []))
        booking.failing.clear()
        await shop.has("1", "2", "3")
        await shop.reaches(3)
    assert sorted(set(booking.begun[1:])) == ["1", "2", "3"]
    assert booking.begun.count("2") == 1


@pytest.mark.rule(41)
async def test_round_keeps_rows_that_its_position_does_not_include(
    world: World, shop: Shop
) -> None:
    """A result is stored, and its message is not done yet: its `after` hook waits."""
    go_on, inside = asyncio.Event(), asyncio.Event()

    async def after(message: ReceivedMessage, _error: BaseException | None) -> None:
        if message.key == b"b":
            inside.set()
            await go_on.wait()

    booking = Booking(shop)
    world.produce("a=1", "b=2", "c=3", "d=4")
    async with world.running(booking, order="key", after=after, **shop.options):
        await inside.wait()
        await until(lambda: json.loads(shop.position()[1]) == [[2, 4]])
        assert shop.position()[0] == 1
        assert shop.done_rows == [1]
        go_on.set()
        await shop.reaches(4)


@pytest.mark.rule(41)
def test_round_moves_no_position_back(shop: Shop) -> None:
    """A handler may store a higher position than that of a round in flight."""
    shop.claim()
    token = shop.position()[2]
    save = shop.positions.save
    assert shop.transact(save(PLACE, (5, Metadata(token)), (), lower=True))
    assert shop.transact(save(PLACE, (4, Metadata(token)), (), lower=False))
    assert shop.position()[0] == 5
    assert shop.transact(save(PLACE, (5, Metadata(token)), (), lower=False))
    assert not shop.transact(save(PLACE, (6, Metadata(token - 1)), (), lower=False))
    assert shop.transact(save(PLACE, (3, Metadata(token)), (), lower=True)), "an owner may seek"
    assert shop.position()[0] == 3


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.rule(42)
async def test_unanswered_commit(
    world: World,
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
    executed: bool,
    order: str,
    batch: int,
) -> None:
    lost = Lost(monkeypatch, shop.database)
    lost.executed, lost.count = executed, 1 if batch else 3
    booking = Booking(shop)
    world.produce("a=1", "a=2", "b=3", "4")
    run = {"batch": batch}
    async with world.running(booking, order=order, run=run, **shop.options) as consumer:
        await shop.has("1", "2", "3", "4")
        await shop.reaches(4)
        assert counted(consumer, "failed") == 0
    assert lost.count == 0
    if executed:
        assert sorted(booking.begun) == ["1", "2", "3", "4"], "none is handled again"


async def test_kept_message_with_unanswered_commit(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(monkeypatch, shop.database)
    booking = Booking(shop, **{"1": [ValueError("bug"), None]})
    world.produce("a=1")
    options = {"order": "none", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options):
        await until(lambda: shop.aside("retry"))
        lost.count = 1
        await shop.has("1")
        await until(lambda: not shop.aside())
    assert booking.begun == ["1", "1"]


async def test_crash_between_result_and_reply(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner sees the result."""
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hook(name: str) -> None:
        if name == "consumer.result_committed":
            loop.call_soon_threadsafe(reached.set)
            raise SystemExit

    booking = Booking(shop)
    world.produce("a=1", "b=2")
    async with world.consumer(order="key", in_flight_max=1, **shop.options) as consumer:
        monkeypatch.setattr(failpoints, "hook", hook)
        with pytest.raises(SystemExit):
            await consumer.run(booking)
        monkeypatch.setattr(failpoints, "hook", None)
    assert shop.results == ["1"]
    async with world.running(booking, order="key", **shop.options):
        await shop.has("1", "2")
    assert booking.begun == ["1", "2"]


async def test_done_rows_are_bounded(world: World, shop: Shop) -> None:
    """By those between two rounds: `max_batch`, and the handlers in flight."""
    stuck = {str(number): ValueError("bug") for number in range(10)}
    booking = Booking(shop, **stuck)
    world.produce(*(f"stuck{number}={number}" for number in range(10)))
    for number in range(10, 200):
        world.produce(f"{number % 7}={number}")
    policy = CommitPolicy(max_batch=20, max_interval_s=60.0)
    most = 0
    async with world.running(booking, order="key", commit=policy, **shop.options):
        while len(shop.results) < 190:
            most = max(most, len(shop.done_rows))
            await asyncio.sleep(0.01)
        await until(lambda: len(shop.done_rows) < 20)
        assert len(json.loads(shop.position()[1])) == 1
    assert 0 < most <= 2 * 20


async def test_seek_handles_done_messages_again(world: World, shop: Shop) -> None:
    """`on_assign` moves the position back, past done rows of a crash."""
    booking = Booking(shop, **{"1": [ValueError("bug")] * 1000})
    world.produce("a=1", "b=2")
    options = {"order": "key", **shop.options}
    async with world.running(booking, commit=NEVER, **options):
        await shop.has("2")
        shop.claim()
    booking.failing.clear()
    async with world.running(booking, on_assign=lambda _places: {PLACE: 0}, **options):
        await shop.has("1", "2", "2")
        await shop.reaches(2)
