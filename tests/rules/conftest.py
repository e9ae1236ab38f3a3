"""A separate harness for each test of a rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.rules.fakes import FakeTime
from tests.rules.harness import BodiesHarness, Harness
from txbroker.proxy.cluster import partition_manager as ownership
from txbroker.proxy.partition import clock, owner, quarantine


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """One partition in memory. What an owner does every second it does every few ms here."""
    time_ = FakeTime()
    monkeypatch.setattr(clock, "time", time_)
    monkeypatch.setattr(owner, "IDLE_S", 0.005)
    monkeypatch.setattr(owner, "EDGES_S", 0.01)
    monkeypatch.setattr(clock, "CLAIM_PAUSE_S", 0.002)
    monkeypatch.setattr(ownership, "REOPEN_S", 0.002)
    monkeypatch.setattr(quarantine, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(quarantine, "RETRY_MAX_S", 0.01)
    before = asyncio.all_tasks()
    made = Harness(time_, monkeypatch)
    await made.start()
    yield made
    await made.close()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"still running: {left}"


@pytest.fixture
async def small(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BodiesHarness]:
    """The parts of an owner whose bodies get no memory."""
    monkeypatch.setattr(quarantine, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(quarantine, "RETRY_MAX_S", 0.01)
    made = BodiesHarness(monkeypatch)
    await made.start()
    yield made
    await made.close()
    assert made.stops == []
