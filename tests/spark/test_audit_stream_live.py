"""The audit that follows a proxy at work, with a break in between: nothing is found. Minutes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from audit_load import Load
from stream_world import StreamWorld, confirmed, judged
from workload import Shop
from world import World

from txbroker.embedded import EmbeddedKafka
from txbroker.spark.schema import Terms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIVE, LIVE_RATE = 300, 30.0


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_proxy_at_work_is_followed_without_an_alarm(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    installation = World(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0)
    try:
        await installation.start()
        topics = [await installation.topic(3), await installation.topic(1)]
        terms = Terms(0, late_after_ms=30_000)
        world = StreamWorld(spark, kafka.bootstrap, installation.prefix, tmp_path, terms)
        stream = await world.start(keep_s=200.0)
        try:
            shop = Shop(tmp_path / "shop.db")
            async with Load(installation, shop, topics, LIVE_RATE).running(seed) as load:
                await judged(stream, 0)
                # While it is down the topics go on; then it catches up, in several batches.
                await asyncio.to_thread(stream.stop)
                await load.reached(load.finished + LIVE)
                stream = await world.start(keep_s=200.0, records_max=500)
                await confirmed(stream)
            await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        assert await world.told() == []
        summary = stream.summary()
        assert summary.drift == {}
        assert summary.quarantined == 0
        assert summary.transactions >= LIVE
        assert summary.states["promoted"] > LIVE // 2
    finally:
        await installation.close()
