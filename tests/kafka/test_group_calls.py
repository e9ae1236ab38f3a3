"""A claim and a round store offsets of one member at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from txbroker.core.consuming.position import StoredOffset
from txbroker.door.writing import Copy
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door import group_offsets
from txbroker.kafka.door.group_member import KafkaGroupMember, MemberTiming
from txbroker.kafka.door.group_offsets import CommittedOffsets

OFFSETS = {("orders", 0): StoredOffset(1, "")}
CLIENT: Any = SimpleNamespace(
    settings=KafkaSettings(bootstrap_servers=("kafka:9092",), instance_id="a")
)


class Listener:
    def assigned(self, partitions: Any) -> None: ...

    def lost(self, why: str) -> None: ...


async def test_loss_ends_every_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    going = asyncio.Event()

    async def commit(_self: CommittedOffsets, offsets: Any, copies: Any = ()) -> None:
        await (asyncio.Event() if copies else going).wait()

    monkeypatch.setattr(CommittedOffsets, "commit", commit)
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

    class Writer:
        claimed = unsettled = False

        async def claim(self) -> None:
            nonlocal started
            started += 1
            self.claimed = True

        async def write(self, _copies: Any) -> None: ...

        async def commit(self, **_fields: Any) -> None:
            self.unsettled = True
            await going.wait()
            self.unsettled = False

    async def answer(*_fields: Any) -> Any:
        return SimpleNamespace(topics=[])

    monkeypatch.setattr(group_offsets, "group_writer", lambda *_fields: Writer())
    monkeypatch.setattr(group_offsets, "ask_group", answer)
    offsets = CommittedOffsets(CLIENT, "stock", SimpleNamespace())
    copies: list[Copy] = [SimpleNamespace()]  # type: ignore[list-item]
    commit = asyncio.create_task(offsets.commit(OFFSETS, copies))
    await asyncio.sleep(0)
    load = asyncio.create_task(offsets.load(list(OFFSETS)))
    await asyncio.sleep(0)
    going.set()
    await asyncio.gather(commit, load)
    assert started == 1
