"""kill -9 in the middle of thousands of transactions breaks no guarantee."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.judged_load import judged_load
from tests.kit.proxies import ProxyProcess
from tests.kit.until import until
from tests.kit.workload import Recorder, Shop
from txbroker.embedded import EmbeddedKafka
from txbroker.sdk import Limits, TransactionalProducer

SEED_VARIABLE = "TXBROKER_TEST_SEED"
TRANSACTIONS = 3000
KILLS = 4


@pytest.fixture
async def world(kafka: EmbeddedKafka) -> AsyncIterator[ProxyProcess]:
    """A proxy that checks back soon."""
    async with ProxyProcess(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0) as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """The business database."""
    return Shop(tmp_path / "shop.db")


async def reached(recorder: Recorder, finished: int) -> None:
    await until(lambda: recorder.finished >= finished)


async def kill_now_and_then(world: ProxyProcess, recorder: Recorder, fate: random.Random) -> None:
    """Kill the proxy at random moments of the work, sometimes again while it recovers."""
    for moment in sorted(fate.sample(range(TRANSACTIONS // 10, TRANSACTIONS * 9 // 10), KILLS)):
        await reached(recorder, moment)
        await world.kill()
        await world.launch()
        if fate.random() < 0.5:
            await until(world.is_alive)
            await world.kill()
            await world.launch()
        await world.ready()
        print(f"killed at {moment}")


async def judged(
    world: ProxyProcess,
    urls: list[str],
    shop: Shop,
    disturb: Callable[[ProxyProcess, Recorder, random.Random], Coroutine[Any, Any, None]],
    transactions: int,
) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, random.randrange(1 << 32)))
    print(f"{SEED_VARIABLE}={seed}")
    recorder, read = await judged_load(
        world,
        shop,
        lambda recorder: disturb(world, recorder, random.Random(seed)),
        groups=("orders", "orders", "bills"),
        seed=seed,
        lanes=60,
        transactions=transactions,
        limits=Limits(answer_timeout_s=3, heartbeat_s=3),
        urls=urls,
    )
    assert len({record.header("txb-id") for record in read.targets}) > transactions / 2
    assert recorder.history.asked


@pytest.mark.quick
async def test_kill_9_of_the_proxy_loses_and_doubles_nothing(
    world: ProxyProcess, shop: Shop
) -> None:
    await judged(world, [world.url], shop, kill_now_and_then, TRANSACTIONS)


async def test_hung_proxy_waking_after_successor_corrupts_nothing(
    world: ProxyProcess, shop: Shop
) -> None:
    """It still believes that it owns everything, with requests half done."""
    hung = world.twin()
    await world.stop()
    await hung.start()

    async def hang(world: ProxyProcess, recorder: Recorder, fate: random.Random) -> None:
        await reached(recorder, fate.randint(100, 400))
        hung.pause()
        await world.start()
        await reached(recorder, recorder.finished + fate.randint(50, 300))
        hung.resume()

    try:
        await judged(world, [hung.url, world.url], shop, hang, 1200)
        assert await hung.is_alive()
    finally:
        await hung.close()


@pytest.mark.quick
@pytest.mark.parametrize("killed", ["before", "after"])
async def test_killed_producer_is_settled_by_its_twin(
    world: ProxyProcess, shop: Shop, tmp_path: Path, killed: str
) -> None:
    """Killed between local commit and decision: visible. Before the local commit: never."""
    topic = await world.topic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.kit.producer_main"),
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
