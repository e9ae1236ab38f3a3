"""What a proxy does when Kafka is in trouble that a real one can hardly be brought into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.config.settings import Settings
from txbroker.contract.service import (
    DecideRequest,
    execute,
)
from txbroker.core.records import Decision, Message, State
from txbroker.errors import KafkaUnavailable, OwnerUnavailable
from txbroker.proxy.http import transactions
from txbroker.proxy.process import Proxy, run_proxy
from txbroker.testing.topics import LostReply


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    world = MemoryHarness()
    async with FakeEndpoint().serve() as desk:
        running = Service(world, desk)
        await running.start()
        yield running
        await running.stop()
        await world.close()


def memory(service: Service) -> MemoryHarness:
    assert isinstance(service.world, MemoryHarness)
    return service.world


# --- targets ---------------------------------------------------------------------------------


async def test_leaderless_target_defers_only_its_key(service: Service) -> None:
    topic, other, kafka = await service.topic(2), await service.topic(), memory(service).kafka
    kafka.set_leaderless(topic, 0)
    service.door.targets.forget(topic)
    waiting = [
        await service.prepare(Message(topic, b"k", b"%d" % n, partition=0), order_key="o")
        for n in range(3)
    ]
    along = await service.prepare(
        Message(other, b"x", b"1"), Message(topic, b"y", b"", partition=1)
    )
    for id in waiting:
        await service.act(id, "commit")
    await service.commit(along)
    assert {await service.state(id) for id in waiting} == {"committed"}
    assert (await service.show(waiting[0]))["cause"]["code"] == "no_leader"
    kafka.set_leaderless(topic)
    for id in waiting:
        await service.reaches(id, "promoted")
    assert await service.values(topic, 0) == [b"0", b"1", b"2"]


async def test_wait_for_leaderless_target_times_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "WAIT_MAX_S", 0.2)
    topic, kafka = await service.topic(), memory(service).kafka
    kafka.set_leaderless(topic, 0)
    id = await service.prepare(Message(topic, b"k", b"v"))
    for _ in range(2):
        assert (await service.act(id, "commit", wait="promoted"))["state"] == "committed"
    kafka.set_leaderless(topic)
    monkeypatch.setattr(transactions, "WAIT_MAX_S", 30.0)
    assert (await service.act(id, "commit", wait="promoted"))["state"] == "promoted"


async def test_deferred_transactions_survive_restart(service: Service) -> None:
    topic, other, kafka = await service.topic(), await service.topic(), memory(service).kafka
    kafka.set_leaderless(topic, 0)
    id = await service.prepare(Message(topic, b"k", b"v"), order_key="o")
    await service.act(id, "commit")
    # Promotion of the same half partition goes past it.
    await service.commit(await service.prepare(Message(other, b"k", b"v"), order_key="o"))
    await service.restart()
    assert await service.state(id) == "committed"
    kafka.set_leaderless(topic)
    await service.reaches(id, "promoted")
    assert await service.values(topic) == [b"v"]


async def test_restored_authorization_promotes(service: Service) -> None:
    topic, other, kafka = await service.topic(), await service.topic(), memory(service).kafka
    id = await service.prepare(Message(topic, b"k", b"v"), Message(other, b"k", b"v"))
    kafka.set_authorized(topic, authorized=False)
    service.door.targets.forget(topic)
    await service.act(id, "commit")
    await until(lambda: has_cause(service, id, "not_authorized"))
    assert await service.values(other) == []
    kafka.set_authorized(topic, authorized=True)
    await service.reaches(id, "promoted")
    assert await service.values(topic) == await service.values(other) == [b"v"]


async def has_cause(service: Service, id: str, code: str) -> bool:
    cause = (await service.show(id)).get("cause")
    return cause is not None and cause["code"] == code


# --- answers that never come -----------------------------------------------------------------


@pytest.mark.parametrize("outcome", LostReply)
async def test_unanswered_commit_is_promoted_once(service: Service, outcome: LostReply) -> None:
    topic, kafka = await service.topic(), memory(service).kafka
    ids = [await service.prepare(Message(topic, b"%d" % n, b"%d" % n)) for n in range(12)]
    kafka.lose_answer_of_next_commit(outcome)
    await asyncio.gather(*[service.commit(id) for id in ids])
    assert sorted(await service.values(topic), key=str) == sorted(
        [b"%d" % n for n in range(12)], key=str
    )


@pytest.mark.parametrize("outcome", LostReply)
async def test_unanswered_prepare_is_retried(service: Service, outcome: LostReply) -> None:
    topic = await service.topic()
    message = Message(topic, b"k", b"v")
    memory(service).kafka.lose_answer_of_next_append(outcome)
    with pytest.raises(OwnerUnavailable) as error:
        await service.send(message)
    id = error.value.details["id"]
    status, answer = await service.send(message, id=id)
    assert (status, answer["id"]) == (201 if outcome is LostReply.NOT_DONE else 200, id)
    await service.commit(id)
    assert await service.values(topic) == [b"v"]


@pytest.mark.parametrize("outcome", LostReply)
async def test_unanswered_decision_is_never_an_ack(service: Service, outcome: LostReply) -> None:
    topic = await service.topic()
    id = await service.prepare(Message(topic, b"k", b"v"))
    memory(service).kafka.lose_answer_of_next_append(outcome)
    with pytest.raises(OwnerUnavailable):
        await service.act(id, "commit")
    assert (await service.commit(id))["state"] == "promoted"
    assert await service.values(topic) == [b"v"]


@pytest.mark.parametrize("outcome", LostReply)
async def test_kafka_outage_loses_nothing(service: Service, outcome: LostReply) -> None:
    topic, kafka = await service.topic(), memory(service).kafka
    ids = [await service.prepare(Message(topic, b"%d" % n, b"%d" % n)) for n in range(20)]
    await service.commit(ids[0])
    kafka.go_down(outcome)
    results = await asyncio.gather(
        *[service.act(id, "commit") for id in ids[1:]], return_exceptions=True
    )
    assert all(isinstance(result, OwnerUnavailable) for result in results)
    kafka.come_up()
    await asyncio.gather(*[service.commit(id) for id in ids])
    assert sorted(await service.values(topic), key=str) == sorted(
        [b"%d" % n for n in range(20)], key=str
    )


# --- several proxies, and lost records -------------------------------------------------------


def proxy(service: Service, instance: str) -> AbstractAsyncContextManager[Proxy]:
    door = memory(service).closed_door(instance, half_partitions=2)
    return run_proxy(door, Settings(listen="127.0.0.1:0", instance=instance))


async def test_start_waits_for_silent_kafka(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = memory(service).closed_door("two", half_partitions=2)
    load, answers = door.groups.load, ["too few replicas answer", ""]

    async def load_later(changed: Callable[[str, bytes | None], None]) -> None:
        if why := answers.pop(0):
            raise KafkaUnavailable(why)
        await load(changed)

    monkeypatch.setattr(door.groups, "load", load_later)
    async with run_proxy(door, Settings(listen="127.0.0.1:0", instance="two"), wait_s=30) as other:
        await until(lambda: owns(other, 1))
    assert not answers


async def test_another_proxy_takes_over(service: Service) -> None:
    topic = await service.topic()
    ids = [await service.prepare(Message(topic, b"%d" % n, b"%d" % n)) for n in range(10)]
    async with proxy(service, "two") as other:
        await until(lambda: owns(other, 1))
        assert len(service.proxy.broker.mine()) == 1
        await service.stop()
        await until(lambda: owns(other, 2))
        for id in ids:
            request = DecideRequest(id, Decision.COMMIT, wait=True)
            assert (await execute(other.broker, request)).state is State.PROMOTED
    assert sorted(await service.values(topic), key=str) == sorted(
        [b"%d" % n for n in range(10)], key=str
    )


async def owns(proxy: Proxy, count: int) -> bool:
    return len(proxy.broker.mine()) == count


@pytest.mark.parametrize("lost", ["half", "op"])
async def test_truncated_topic_stops_the_partition(service: Service, lost: str) -> None:
    topic, world = await service.topic(), memory(service)
    await service.commit(await service.prepare(Message(topic, None, b"v"), order_key="o"))
    await service.stop()
    for number in range(2):
        world.kafka.truncate(world.name(lost), number, end=0)
    async with proxy(service, "one") as again:
        await until(lambda: stopped(again))
        (problem,) = again.broker.readiness().problems
        assert "truncated or recreated" in problem


async def stopped(proxy: Proxy) -> bool:
    """One partition is recovered and the other one has stopped."""
    return len(proxy.broker.mine()) == 1 and len(proxy.broker.readiness().problems) == 1
