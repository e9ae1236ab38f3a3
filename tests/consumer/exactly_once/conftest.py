"""Databases for results, and short pauses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.consumer_world import World
from tests.kit.results import Shop, open_database
from txbroker.consumer.asides import table
from txbroker.core.consuming import failure


@pytest.fixture
def shop(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> Iterator[Shop]:
    """A database: SQLite, or the one that the test's parameter names. At its end no thread of a
    consumer is left."""
    monkeypatch.setattr(table, "_POLL_S", 0.02)
    monkeypatch.setattr(failure, "DELAYS_S", tuple(0.02 + 0.002 * step for step in range(16)))
    shop = Shop(open_database(getattr(request, "param", "sqlite"), tmp_path, request))
    yield shop
    shop.close()
    for thread in threading.enumerate():
        if thread.name.startswith(("txbroker-handler", "txbroker-positions")):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} is left"
