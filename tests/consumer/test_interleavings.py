"""Rare interleavings: commits that take long, partitions that go meanwhile, other threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.consumer.consumer_world import World
from txbroker.consumer import statistics

BUG = ValueError("bug")


async def test_scrape_in_a_thread_reads_in_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    real = statistics.statistics

    def spy(engine: Any) -> Any:
        threads.append(threading.get_ident())
        return real(engine)

    monkeypatch.setattr(statistics, "statistics", spy)
    async with world.consumer() as consumer:
        collector = consumer.collector()
        assert await asyncio.to_thread(lambda: list(collector.collect()))
    assert await asyncio.to_thread(lambda: list(collector.collect())), "after its end, too"
    assert threads == [threading.get_ident()] * 2
