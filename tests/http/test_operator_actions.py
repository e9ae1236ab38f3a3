"""Operators' actions in memory, and those that are read back from the operation topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from txbroker.core.encoding import encode_marker
from txbroker.core.records import LOG_VERSION, Marker, MarkerKind, Record, Source
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.observe import counting as module
from txbroker.proxy.observe.counting import ACTIONS_MAX, OperatorActions

LATER_S = 1e12


def marker(number: int, kind: MarkerKind = MarkerKind.ROLLBACK, **fields: Any) -> Marker:
    given = {"source": Source.OPERATOR, "by": "Ada", "reason": "r", **fields}
    return Marker(LOG_VERSION, kind, f"id-{number}", **given)


def record(offset: int, made: Marker, at_ms: int) -> Record:
    return structs.replace(encode_marker(made), offset=offset, timestamp_ms=at_ms)


class Log:
    """An operation log that holds these records."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.reads: list[tuple[int, int]] = []
        self.down = False

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        if self.down:
            raise KafkaUnavailable("no answer")
        return self.records[0].offset, self.records[-1].offset + 1

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        self.reads.append((start, end))
        yield [record for record in self.records if start <= record.offset < end]


def applied(actions: OperatorActions, made: Marker, at_ms: int) -> None:
    transaction: Any = SimpleNamespace(half=SimpleNamespace(group="g"))
    actions.applied(record(0, made, at_ms), transaction)


def test_bulk_action_is_one_entry() -> None:
    actions = OperatorActions()
    for number in range(500):
        applied(actions, marker(number), 1000 + number)
        applied(actions, marker(number, MarkerKind.COMMIT, by="Grace"), 1000 + number)
    assert [(a.action, a.id, a.count) for a in actions.newest()] == [
        ("rollback", "id-0", 500),
        ("commit", "id-0", 500),
    ]
    applied(actions, marker(7), 62_000)
    assert actions.newest()[0].count == 1


def test_only_operators_count() -> None:
    actions = OperatorActions()
    applied(actions, marker(1, source=Source.PRODUCER), 1)
    applied(actions, marker(2, source=Source.CHECK), 2)
    applied(actions, marker(3, MarkerKind.CHECK, source=Source.SCHEDULE, by=""), 3)
    early = marker(4, MarkerKind.CHECK, source=Source.PRODUCER, by="web-1: ended", reason="asked")
    applied(actions, early, 4)
    assert actions.newest() == ()
    for offset, source in ((5, Source.SCHEDULE), (6, Source.OPERATOR)):  # of earlier versions; now
        asked = marker(offset, MarkerKind.CHECK, source=source, by="Ada", reason="asked")
        applied(actions, asked, offset * 100_000)
    shown = [(action.action, action.by, action.reason) for action in actions.newest()]
    assert shown == [("check", "Ada", "")] * 2


def test_memory_is_bounded() -> None:
    actions = OperatorActions()
    for number in range(ACTIONS_MAX + 10):
        applied(actions, marker(number, reason=f"{number} {'x' * 9999}"), number)
    assert len(actions.newest()) == ACTIONS_MAX
    assert max(len(action.reason) for action in actions.newest()) == module.TEXT_MAX


async def test_older_ones_are_read_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 10)
    made = [
        record(offset, marker(offset, reason=str(offset)), 1000 * offset)
        if offset % 3 == 0
        else record(offset, marker(offset, source=Source.PRODUCER), 1000 * offset)
        for offset in range(5, 40)
    ]
    log: Any = Log(made)
    actions = OperatorActions()
    actions.begin(2, 35, 35_000)
    applied(actions, marker(36, reason="36"), 36_000)
    await actions.read_back(log, 2, 0.0, lambda _: "g")
    assert log.reads == []  # no time
    log.down = True
    await actions.read_back(log, 2, LATER_S, lambda _: "g")
    assert actions.since_ms() == {2: 35_000}
    log.down = False
    await actions.read_back(log, 2, LATER_S, lambda id: "g" if id == "id-33" else "")
    assert log.reads == [(25, 35), (15, 25), (5, 15)]
    shown = actions.newest()
    assert [action.id for action in shown] == [f"id-{n}" for n in range(36, 5, -3)]
    assert [action.group for action in shown[:3]] == ["g", "g", ""]
    assert actions.since_ms() == {2: 0}
    actions.end(2)
    await actions.read_back(log, 2, LATER_S, lambda _: "g")
    assert actions.since_ms() == {}
    assert len(log.reads) == 3


async def test_read_back_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACTIONS_MAX", 5)
    log: Any = Log([record(n, marker(n, reason=str(n)), n) for n in range(20)])
    actions = OperatorActions()
    actions.begin(0, 20, 20)
    await actions.read_back(log, 0, LATER_S, lambda _: "g")
    assert [action.id for action in actions.newest()] == [f"id-{n}" for n in range(19, 14, -1)]
