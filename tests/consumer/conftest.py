"""A Kafka in memory with consumers, and short pauses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.kit.consumer_world import World
from txbroker.consumer import claims, consumer, rounds


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "_REFRESH_S", 0.05)
    monkeypatch.setattr(claims, "_PAUSE_S", 0.05)
    monkeypatch.setattr(rounds, "REFUSED_PAUSE_S", 0.2)
    monkeypatch.setattr(rounds, "_PAUSE_MAX_S", 0.2)
    monkeypatch.setattr(rounds, "_REFUSED_PAUSES_S", (0.05, 0.2))


@pytest.fixture
async def world(short_pauses: None) -> AsyncIterator[World]:
    before = asyncio.all_tasks()
    world = World()
    yield world
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, "no task is left"
