"""Several proxies on a real Kafka under load: no death loses or duplicates a message."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.fleet import PARTITIONS, SESSION_S, Fleet, judged, owned_by, reached
from tests.kit.topic_reader import read_topics
from tests.kit.until import until
from tests.kit.workload import Recorder, Shop
from txbroker.embedded import EmbeddedKafka

TRANSACTIONS = 1000
HANDOVER_S = SESSION_S * 2 / 3
"""Half a second was measured while other tests kept both cores busy."""


@pytest.fixture
async def fleet(kafka: EmbeddedKafka, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """Two proxies, or as many as the test asks for."""
    async with Fleet(kafka.bootstrap, getattr(request, "param", 2)) as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """The business database."""
    return Shop(tmp_path / "shop.db")


async def claims(fleet: Fleet) -> int:
    """How often partitions were claimed so far, as far as compaction has left it."""
    first = fleet.proxies[0]
    names = [f"{first.prefix}.checkpoint"]
    found = await asyncio.to_thread(read_topics, first.bootstrap, names, committed=True)
    return sum(record.key == b"claim" for record in found)


@pytest.mark.parametrize("fleet", [3], indirect=True)
async def test_kill_9_of_one_and_two_proxies_loses_nothing(fleet: Fleet, shop: Shop) -> None:
    async def kill(fleet: Fleet, recorder: Recorder, fate: random.Random) -> None:
        await reached(recorder, TRANSACTIONS // 8)
        one, two, three = fate.sample(fleet.proxies, 3)
        began = time.monotonic()
        await one.kill()
        await fleet.whole([two, three])
        print(f"taken over {time.monotonic() - began:.1f} s after the kill")
        assert time.monotonic() - began < SESSION_S + 10
        await one.launch()
        await fleet.whole(fleet.proxies)
        await reached(recorder, TRANSACTIONS // 2)
        await asyncio.gather(two.kill(), three.kill())
        await two.launch()
        await three.launch()
        await fleet.whole(fleet.proxies)

    await judged(fleet, shop, kill, TRANSACTIONS)


async def test_leaving_proxy_hands_over_at_once(fleet: Fleet, shop: Shop) -> None:
    async def leave(fleet: Fleet, recorder: Recorder, fate: random.Random) -> None:
        await reached(recorder, TRANSACTIONS // 4)
        goes, stays = fate.sample(fleet.proxies, 2)
        stopping = asyncio.create_task(goes.stop())
        left_s: list[float] = []

        async def taken() -> bool:
            owned = len(await owned_by(goes))
            if owned == 0 and not left_s:
                left_s.append(time.monotonic())
            return len(await owned_by(stays)) == PARTITIONS

        await until(taken)
        took_s = time.monotonic() - left_s[0]
        print(f"handed over within {took_s:.2f} s")
        assert await stopping == 0
        assert took_s < HANDOVER_S
        await goes.start()

    await judged(fleet, shop, leave, TRANSACTIONS)


async def test_proxy_hung_past_its_session_corrupts_nothing(fleet: Fleet, shop: Shop) -> None:
    async def hang(fleet: Fleet, recorder: Recorder, fate: random.Random) -> None:
        await reached(recorder, TRANSACTIONS // 8)
        hung, other = fate.sample(fleet.proxies, 2)
        hung.pause()
        try:
            await fleet.taken_over(other)
            before = await claims(fleet)
            assert before >= PARTITIONS
            await reached(recorder, recorder.finished + 50)
        finally:
            hung.resume()
        # It finds out that it was replaced, and takes its share again in an orderly way.
        await fleet.whole(fleet.proxies)

    await judged(fleet, shop, hang, TRANSACTIONS)


@pytest.mark.parametrize("fleet", [3], indirect=True)
async def test_rolling_restart_under_load_loses_nothing(fleet: Fleet, shop: Shop) -> None:
    async def roll(fleet: Fleet, recorder: Recorder, fate: random.Random) -> None:
        await reached(recorder, TRANSACTIONS // 10)
        for proxy in fleet.proxies:
            assert await proxy.stop() == 0
            await proxy.start()
            await fleet.whole(fleet.proxies)

    await judged(fleet, shop, roll, TRANSACTIONS)
