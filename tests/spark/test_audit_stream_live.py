"""The audit that follows a proxy at work, with a break in between: nothing is found. Minutes."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import read_topics
from tests.kit.workload import Shop
from tests.spark.audit_load import Load
from tests.spark.planting import Planting
from tests.spark.stream_world import StreamWorld, confirmed, judged, reached
from txbroker.contract.audit import STREAM_KEY, decode_news
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.schema import Terms
from txbroker.spark.stream.stream import StreamSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIVE, LIVE_RATE, LIVES_S = 300, 30.0, (1.0, 6.0)
PROMISED_MS = 60_000


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_drift_is_reported_within_a_minute_of_its_deadline(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        terms = Terms(0, late_after_ms=5_000)
        world = StreamWorld(spark, kafka.bootstrap, planting.prefix, tmp_path, terms)
        usual = StreamSettings(world.settings.checkpoint, world.names)
        stream = await world.start(
            every_s=usual.every_s,
            tick_s=usual.tick_s,
            summary_s=usual.summary_s,
            keep_s=usual.keep_s,
        )
        try:
            await judged(stream, 0)
            # All is well meanwhile, and one is not.
            await planting.fill_clean(2000)
            lost = await planting.prepare()
            deadline_ms = await planting.commit(lost) + terms.late_after_ms
            await planting.fill_clean(2000)
            await reached(stream, lambda: bool(stream.summary().drift))
            reported_after_ms = time.time() * 1000 - deadline_ms
            assert await world.kinds() == {(lost.id, "late")}
            while not await metric(world):
                assert time.time() * 1000 - deadline_ms < PROMISED_MS
            shown_after_ms = time.time() * 1000 - deadline_ms
        finally:
            await asyncio.to_thread(stream.stop)
    print(f"reported after {reported_after_ms:.0f} ms, shown after {shown_after_ms:.0f} ms")
    assert reported_after_ms < PROMISED_MS
    assert shown_after_ms < PROMISED_MS


async def metric(world: StreamWorld) -> int:
    """Return the number of late ones published to the proxies."""
    records = await asyncio.to_thread(read_topics, world.bootstrap, [world.names.audit])
    news = [decode_news(each.value or b"") for each in records if each.key == STREAM_KEY.encode()]
    return news[-1].drift["late"] if news else 0


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_proxy_at_work_is_followed_without_an_alarm(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    installation = ProxyProcess(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0)
    try:
        await installation.start()
        topics = [await installation.topic(3), await installation.topic(1)]
        terms = Terms(0, late_after_ms=30_000)
        world = StreamWorld(spark, kafka.bootstrap, installation.prefix, tmp_path, terms)
        stream = await world.start(keep_s=200.0)
        try:
            shop = Shop(tmp_path / "shop.db")
            async with Load(installation, shop, topics, LIVE_RATE, LIVES_S).running(seed) as load:
                await judged(stream, 0)
                # While it is down the topics go on; then it catches up, in several batches.
                await asyncio.to_thread(stream.stop)
                await load.reached(load.finished + LIVE)
                stream = await world.start(keep_s=200.0, records_max=500)
                await confirmed(stream)
            await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        assert await world.reported() == []
        summary = stream.summary()
        assert summary.drift == {}
        assert summary.quarantined == 0
        assert summary.transactions >= LIVE
        assert summary.states["promoted"] > LIVE // 2
    finally:
        await installation.close()
