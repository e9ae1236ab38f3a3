"""Questions about undecided rows: each attempt is stored before it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.databases.places import sqlite_place
from tests.kit.until import until
from txbroker.contract.checks import CheckRequest
from txbroker.core.records import Decision, Message
from txbroker.relay import Outbox, Relay
from txbroker.testing.memory import MemoryKafka


@pytest.mark.rule(52)
async def test_attempt_is_stored_before_its_question(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path, "wal")
    outbox, asked = Outbox(place.database), []
    outbox.create()
    kafka = MemoryKafka()
    kafka.create_topic("payments", 1)

    def check(request: CheckRequest) -> Decision:
        (stored,) = place.select("SELECT check_attempts FROM txbroker_outbox")
        asked.append((request.attempt, *stored))
        if request.attempt < 3:
            return Decision.UNKNOWN
        return Decision.COMMIT

    outbox.prepare(Message("payments", "k", "10 EUR"))
    options: dict[str, Any] = {"check": check, "check_after_s": 0, "check_interval_s": 0.01}
    async with Relay(outbox, kafka, **options):
        await until(lambda: kafka.visible("payments"), 10)
    assert asked == [(1, 1), (2, 2), (3, 3)]
