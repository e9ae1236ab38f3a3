"""A claim and a round store offsets of one member at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from txbroker.door.consuming import StoredOffset
from txbroker.door.writing import Copy
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door import group_offsets
from txbroker.kafka.door.group_member import KafkaGroupMember, MemberTiming
from txbroker.kafka.door.group_offsets import GroupOffsets
from txbroker.kafka.protocol.copies import Batches

OFFSETS = {("orders", 0): StoredOffset(1, "")}
CLIENT: Any = SimpleNamespace(
    settings=KafkaSettings(bootstrap_servers=("kafka:9092",), instance_id="a")
)


class Listener:
    def assigned(self, partitions: Any) -> None: ...

    def lost(self, why: str) -> None: ...


async def test_loss_ends_every_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    going = asyncio.Event()

    async def commit(_self: GroupOffsets, offsets: Any, copies: Any = ()) -> None:
        await (asyncio.Event() if copies else going).wait()

    monkeypatch.setattr(GroupOffsets, "commit", commit)
    member = KafkaGroupMember(CLIENT, "stock", None, Listener(), MemberTiming())
    member._loop.joined = SimpleNamespace(generation=1)  # type: ignore[assignment]
    copies: Any = ["a copy"]
    long = asyncio.create_task(member.commit(OFFSETS, copies))
    short = asyncio.create_task(member.commit(OFFSETS))
    await asyncio.sleep(0)
    going.set()
    await short
    member.lost("test")
    with pytest.raises(KafkaUnavailable, match="unknown"):
        await asyncio.wait_for(long, 5)


async def test_load_does_not_abort_the_transaction_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = 0
    going = asyncio.Event()

    async def start(_self: GroupOffsets, _backoff: Any) -> Any:
        nonlocal started
        started += 1
        return SimpleNamespace(end=end)

    async def end(**_fields: Any) -> None: ...

    async def write(*_fields: Any) -> None:
        await going.wait()

    async def answer(*_fields: Any) -> Any:
        return SimpleNamespace(topics=[])

    monkeypatch.setattr(GroupOffsets, "_start_producer", start)
    monkeypatch.setattr(GroupOffsets, "_write", write)
    monkeypatch.setattr(Batches, "rounds", lambda *_fields: [])
    monkeypatch.setattr(group_offsets, "ask_group", answer)
    offsets = GroupOffsets(CLIENT, "stock", SimpleNamespace())
    copies: list[Copy] = [SimpleNamespace()]  # type: ignore[list-item]
    commit = asyncio.create_task(offsets.commit(OFFSETS, copies))
    await asyncio.sleep(0)
    load = asyncio.create_task(offsets.load(list(OFFSETS)))
    await asyncio.sleep(0)
    going.set()
    await asyncio.gather(commit, load)
    assert started == 1
