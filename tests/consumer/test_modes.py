"""When positions are stored, and what a restart repeats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, Handler, World, counted, text
from tests.kit.until import until
from txbroker.consumer import CommitPolicy, ReceivedMessage, rounds
from txbroker.consumer.settings import ConsumerSettings

NUMBERS = [str(number) for number in range(30)]


async def test_at_most_once_stores_before_handler(world: World) -> None:
    world.produce(*NUMBERS)
    stored: list[tuple[int, int]] = []

    async def handle(message: ReceivedMessage) -> None:
        stored.append((message.offset, world.committed()[0]))

    async with world.running(
        handle, mode="at-most-once", order="none", commit=CommitPolicy(max_batch=4)
    ):
        await until(lambda: len(stored) == 30)
    assert all(offset < committed <= offset + 12 for offset, committed in stored)


async def test_at_most_once_drops_failures(world: World) -> None:
    world.produce("a", "b", "c")
    handler = Handler(b=ValueError("bug"))
    async with world.running(handler, mode="at-most-once") as consumer:
        await handler.does("a", "c")
        await until(lambda: counted(consumer, "dropped") == 1)
    assert handler.seen == ["a", "b", "c"]
    assert f"txbroker.dead.{GROUP}" not in world.kafka.topics, "no topic is needed"


@pytest.mark.parametrize("order", ["none", "partition", "key"])
async def test_at_most_once_loses_nothing_at_a_clean_stop(world: World, order: str) -> None:
    world.produce(*(f"{number % 3}={number}" for number in range(30)))
    seen: list[str] = []

    for upto in (7, 30):
        async with world.consumer(
            mode="at-most-once", order=order, in_flight_max=2, commit=CommitPolicy(max_batch=5)
        ) as consumer:

            async def handle(
                message: ReceivedMessage, consumer: Any = consumer, upto: int = upto
            ) -> None:
                await asyncio.sleep(0)
                seen.append(text(message))
                if len(seen) >= upto:
                    consumer.stop()

            await consumer.run(handle)
    assert sorted(seen, key=int) == NUMBERS, "each once"


@pytest.mark.parametrize(("commit", "lost"), [(CommitPolicy(max_batch=3), 7), (None, 21)])
async def test_at_most_once_loses_at_most_what_was_admitted_in_a_crash(
    world: World, commit: CommitPolicy | None, lost: int
) -> None:
    numbers = [str(number) for number in range(40)]
    world.produce(*numbers)
    release = asyncio.Event()
    seen: list[str] = []

    async def stuck(message: ReceivedMessage) -> None:
        seen.append(text(message))
        await release.wait()

    options: dict[str, Any] = {"mode": "at-most-once", "commit": commit}
    async with world.running(stuck, **options):
        await until(lambda: seen)
        await until(lambda: world.committed()[0] == lost)
        for _ in range(5):
            await asyncio.sleep(0)
        crashed = dict(world.group.offsets)
        release.set()
    world.group.offsets = crashed
    handler = Handler()
    async with world.running(handler, **options):
        await handler.does(*numbers[lost:])
    assert seen[0] == "0"


@pytest.mark.parametrize("clean", [True, False])
async def test_restart_repeats_nothing_done_out_of_order(world: World, clean: bool) -> None:
    world.produce("a=a0", *(f"b=b{number}" for number in range(10)), "c=c0", "a=a1")
    release = asyncio.Event()
    done: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        if message.key == b"a":
            await release.wait()
        done.append(text(message))

    stored = None
    async with world.running(handle, order="key", drain_s=0.1):
        await until(lambda: len(done) == 11)
        await until(lambda: world.committed()[1].ranges == ((1, 12),))
        stored = dict(world.group.offsets)
    if not clean:
        world.group.offsets = stored
    offset, metadata = world.committed()
    assert (offset, metadata.ranges) == (0, ((1, 12),))
    handler = Handler()
    async with world.running(handler, order="key"):
        await handler.does("a0", "a1")
        await world.commits(13)
    assert handler.seen == ["a0", "a1"]
    assert world.committed()[1].token == metadata.token + 1


async def test_commit_follows_policy(world: World) -> None:
    """After `max_batch` messages, long before `max_interval_s`."""
    handler = Handler()
    policy = CommitPolicy(max_batch=10, max_interval_s=60)
    async with world.running(handler, commit=policy):
        world.produce(*NUMBERS[:9])
        await until(lambda: len(handler.done) == 9)
        assert world.committed()[0] == 0
        world.produce(NUMBERS[9])
        await world.commits(10)
    world.produce("last")
    async with world.running(handler, commit=policy):
        await until(lambda: "last" in handler.done)
    assert world.committed()[0] == 11, "a clean close stores the position"


async def test_ranges_that_do_not_fit_are_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = rounds.StoreTraits(metadata_max=80)
    monkeypatch.setattr(ConsumerSettings, "traits", short)
    world.produce("a=0", *(f"{number % 2}={number}" for number in range(12_000)))
    release = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        if message.key != b"1" and message.offset < 11_900:
            await release.wait()

    options: dict[str, Any] = {"order": "none", "in_flight_max": 7000, "drain_s": 0.0}
    async with world.running(handle, **options) as consumer:
        await until(lambda: consumer.statistics().overflow > 0)
        offset, metadata = world.committed()
        assert offset == 0
        assert metadata.ranges[0] == (2, 3)
        release.set()
        await world.commits(12_001)
        assert consumer.statistics().overflow == 0


async def test_group_that_has_only_aborted_records_moves_on(world: World) -> None:
    from txbroker.core.records import Record

    world.kafka.transact("orders", 0, [Record(None, b"x")], committed=False)
    async with world.running(Handler()):
        await world.commits(2)
