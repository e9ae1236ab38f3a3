"""What a proxy does with its partitions when the group, or its way to it, is in trouble."""

from __future__ import annotations

import asyncio

import pytest

from tests.rules.fakes import Gate, ScriptedDoor
from tests.rules.harness import Harness, known, until
from txbroker.contract.service import ListRequest, PrepareRequest
from txbroker.core.records import Claim, Message
from txbroker.core.routing import parse_id
from txbroker.door.protocols import Assignment, Claimed
from txbroker.errors import ConfigurationError, OwnerUnavailable
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.testing.door import MemoryPartitionDoor

MINE = Assignment(frozenset({0}), ("http://127.0.0.1:1",), ("http://127.0.0.1:1",), 1)
THEIRS = Assignment(frozenset(), ("http://other",), ("http://other",), 1)


async def at_work(harness: Harness) -> tuple[Broker, ScriptedDoor, PartitionOwner]:
    door = ScriptedDoor(harness.kafka, half_partitions=1, facts_ttl_s=0.01)
    broker = await harness.broker(door)
    await until(lambda: broker.mine())
    return broker, door, broker.partitions.open()[0]


@pytest.mark.rule(16)
@pytest.mark.parametrize("error", [ConfigurationError("the group is full"), RuntimeError("odd")])
async def test_proxy_that_left_rejoins_after_any_error(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broker, door, _ = await at_work(harness)
    join, errors = door.membership.join, [error]

    async def full(*args: object, **urls: str) -> None:
        if errors:
            raise errors.pop()
        await join(*args, **urls)  # type: ignore[arg-type]

    monkeypatch.setattr(door.membership, "join", full)
    monkeypatch.setattr(broker.partitions, "_rejoin_s", 0.001)
    await broker.partitions._leave_and_join(60.0)
    await until(lambda: broker.readiness().ready)


@pytest.mark.rule(16)
async def test_lost_contact_does_not_count_as_stuck_claim(harness: Harness) -> None:
    async def claim(inner: MemoryPartitionDoor, claim: Claim) -> Claimed:
        await gate.wait()
        return await inner.claim(claim)

    gate = Gate()
    door = ScriptedDoor(harness.kafka, half_partitions=1, facts_ttl_s=0.01)
    door.prepare_partition = lambda partition: partition.claims.append(claim)
    broker = await harness.broker(door)
    await gate.reached.wait()
    manager = broker.partitions
    manager._lost("no answer")
    manager._slots[0].since -= 60.0
    manager._assigned(MINE)
    assert manager._slots[0].stuck_s() == 0.0
    # In touch all the while, another generation changes nothing.
    manager._slots[0].since -= 60.0
    manager._assigned(MINE)
    assert manager._slots[0].stuck_s() > 50.0
    gate.open()
    await until(lambda: broker.readiness().ready)


async def test_cancelled_leave_closes_owners(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, door, _ = await at_work(harness)
    gate, closed = Gate(), asyncio.Event()
    close = door.opened[0].close

    async def slowly() -> None:
        await gate.wait()
        await close()
        closed.set()

    monkeypatch.setattr(door.opened[0], "close", slowly)
    leaving = asyncio.create_task(broker.partitions._leave("requested by a test"))
    await gate.reached.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    gate.open()
    async with asyncio.timeout(2.0):
        await closed.wait()


@pytest.mark.rule(26)
async def test_takeover_during_lost_contact_is_counted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced: list[str] = []
    monkeypatch.setattr(harness.events, "fenced", lambda: fenced.append("fenced"))
    broker, _, _ = await at_work(harness)
    # Handed over by the group, as when a proxy joins: no owner was fenced.
    broker.partitions._assigned(THEIRS)
    assert fenced == []
    broker.partitions._assigned(MINE)
    await until(lambda: broker.mine())
    broker.partitions._lost("no answer")
    broker.partitions._assigned(THEIRS)
    assert fenced == ["fenced"]


@pytest.mark.rule(26)
async def test_paused_proxy_answers_nothing_from_memory(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, door, owner = await at_work(harness)
    id = await harness.prepared(owner)
    assert (await broker.find(id)).state == "pending"
    with monkeypatch.context() as asleep:
        asleep.setattr(door.membership, "in_touch", lambda: False)
        with pytest.raises(OwnerUnavailable) as caught:
            await broker.find(id)
        assert caught.value.details["id"] == id
        with pytest.raises(OwnerUnavailable):
            await broker.list(ListRequest())
    assert (await broker.find(id)).state == "pending"
    assert len((await broker.list(ListRequest())).transactions) == 1
    assert known(owner, id).state == "pending"


@pytest.mark.rule(26)
async def test_keyless_prepare_avoids_suspended_partition(harness: Harness) -> None:
    door = ScriptedDoor(harness.kafka, topic_prefix="x", half_partitions=2)
    broker = await harness.broker(door)
    await until(lambda: len(broker.mine()) == 2)
    owners = broker.partitions.open()
    request = PrepareRequest("g", (Message("t", None, b"v"),))
    for away, left in ((0, 1), (1, 0)):
        owners[away].suspend()
        ids = [(await broker.prepare(request)).id for _ in range(20)]
        assert {parse_id(id).partition for id in ids} == {left}
        owners[away].resume()
    for owner in owners.values():
        owner.suspend()
    with pytest.raises(OwnerUnavailable):
        await broker.prepare(request)
