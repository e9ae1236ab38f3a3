"""Random schedules of relays that crash, pause and replace each other."""

from __future__ import annotations

import os

import pytest
import structlog

from tests.relay.schedules import run_schedules
from txbroker.relay import outbox_source, pump, sink

SCHEDULES = int(os.environ.get("TXBROKER_SCHEDULES", "1500"))
PARTS = 6


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let units be larger than a delivery, and pauses take no time; and log nothing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    monkeypatch.setattr(outbox_source, "_ROWS", 4)
    monkeypatch.setattr(outbox_source, "_PIECE_ROWS", 2)
    monkeypatch.setattr(outbox_source, "_DELIVERY_BYTES", 1500)
    monkeypatch.setattr(pump, "grown_pause_s", lambda *_: 0.0)
    monkeypatch.setattr(sink, "_KNOWN_S", 0.0)
    monkeypatch.setattr(sink, "_MISSING_S", 0.0)


@pytest.mark.rule(47, 48, 49, 50, 51)
@pytest.mark.parametrize("part", range(PARTS))
async def test_each_row_is_visible_once_whole_and_in_order(part: int) -> None:
    size = SCHEDULES // PARTS
    wrong = await run_schedules(range(part * size, (part + 1) * size))
    assert not wrong, wrong
