"""kill -9 in the middle of thousands of transactions: what was promised holds all the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from judge import Judge
from topic_reader import read_all
from workload import Recorder, Shop, answering, work
from world import HERE, World, until

from txbroker.embedded import EmbeddedKafka
from txbroker.sdk import TransactionalProducer

SEED_VARIABLE = "TXBROKER_TEST_SEED"
TRANSACTIONS = 3000
KILLS = 4


@pytest.fixture
async def world(kafka: EmbeddedKafka) -> AsyncIterator[World]:
    """A proxy that checks back soon."""
    made = World(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """The business database."""
    return Shop(tmp_path / "shop.db")


async def kill_now_and_then(world: World, recorder: Recorder, fate: random.Random) -> None:
    """Kill the proxy at random moments of the work, sometimes again while it recovers."""
    for moment in sorted(fate.sample(range(TRANSACTIONS // 10, TRANSACTIONS * 9 // 10), KILLS)):

        async def reached(moment: int = moment) -> bool:
            return recorder.finished >= moment

        await until(reached)
        await world.kill()
        await world.launch()
        if fate.random() < 0.5:
            await until(world.is_alive)
            await world.kill()
            await world.launch()
        await world.ready()
        print(f"killed at {moment}")


async def test_kill_9_of_the_proxy_loses_and_doubles_nothing(world: World, shop: Shop) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, random.randrange(1 << 32)))
    print(f"{SEED_VARIABLE}={seed}")
    fate = random.Random(seed)
    topics = [await world.topic(3), await world.topic(1)]
    recorder = Recorder()
    check = answering(shop, recorder)
    async with contextlib.AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                TransactionalProducer(world.url, group=group, check=check)
            )
            for group in ("orders", "orders", "bills")
        ]
        killing = asyncio.create_task(kill_now_and_then(world, recorder, fate))
        try:
            await work(
                producers, shop, recorder, topics, seed=seed, lanes=60, transactions=TRANSACTIONS
            )
            await killing
        finally:
            killing.cancel()
        await world.all_settled()
    read = await asyncio.to_thread(read_all, world.bootstrap, world.prefix, topics)
    found = Judge(recorder.history, read, shop.rows()).judge()
    assert not found, "\n".join(map(str, found[:5]))
    assert recorder.finished == TRANSACTIONS
    assert len({record.header("txb-id") for record in read.targets}) > TRANSACTIONS / 2
    assert recorder.history.asked


@pytest.mark.parametrize("killed", ["before", "after"])
async def test_a_producer_killed_round_its_local_commit_is_settled_by_its_twin(
    world: World, shop: Shop, tmp_path: Path, killed: str
) -> None:
    """Killed between local commit and decision: visible. Before the local commit: never."""
    topic = await world.topic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "producer_main.py"),
        *(world.url, topic, str(tmp_path / "shop.db"), killed),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        id = line.decode().strip()
    finally:
        process.kill()
        await process.wait()
    async with TransactionalProducer(world.url, group="orders", check=shop.barrier.check):
        end = {"before": "rolled_back", "after": "promoted"}[killed]
        shown = await world.reaches(id, end)
    assert shown["source"] == "check"
    visible = [record.value for record in await world.visible(topic)]
    assert visible == ([b"an order"] if killed == "after" else [])
    assert shop.rows() == ([id] if killed == "after" else [])
