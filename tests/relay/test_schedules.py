"""Thousands of random schedules of relays that crash, pause and replace each other."""

from __future__ import annotations

import os

import pytest

from tests.relay.schedules import run_schedules
from txbroker.relay import outbox_source, pump, sink

SCHEDULES = int(os.environ.get("TXBROKER_SCHEDULES", "3000"))
SHOWN = 5


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_source, "_ROWS", 4)
    monkeypatch.setattr(outbox_source, "_PIECE_ROWS", 2)
    monkeypatch.setattr(outbox_source, "_DELIVERY_BYTES", 1500)
    monkeypatch.setattr(pump, "grown_pause_s", lambda *_: 0.0)
    monkeypatch.setattr(sink, "_KNOWN_S", 0.0)
    monkeypatch.setattr(sink, "_MISSING_S", 0.0)


async def test_schedules_deliver_each_row_once_whole_and_in_order() -> None:
    wrong = await run_schedules(range(SCHEDULES))
    shown = {seed: lines[:SHOWN] for seed, lines in list(wrong.items())[:SHOWN]}
    assert not wrong, f"{len(wrong)} schedules of {SCHEDULES}: {shown}"
