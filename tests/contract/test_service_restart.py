"""Every answered call survives a proxy: another one on the same Kafka returns the same."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import unique, until
from txbroker.core.records import Decision, Message, State
from txbroker.errors import BodyLost
from txbroker.proxy.partition import owner

UNKNOWN = {"decision": "unknown"}
NEVER_S = 3600


async def one_of_each_state(service: Service, topic: str, gone: str) -> dict[str, str]:
    """Return transactions by the state that they are in; `gone` is deleted."""
    group = await service.group(UNKNOWN, attempts_max=1, timeout_s=0.1)
    ids = {"parked": await service.prepare(Message(topic, b"k", b"parked"), group=group)}
    for state in ("pending", "rolled_back", "promoted"):
        ids[state] = await service.prepare(Message(topic, b"k", state.encode()))
    ids["refused"] = await service.prepare(Message(gone, b"k", b"refused"))
    await service.delete_topic(gone)
    await service.act(ids["rolled_back"], "rollback")
    await service.commit(ids["promoted"])
    await service.commit(ids["refused"])
    await service.reaches(ids["parked"], "parked")
    return ids


async def test_every_state_survives(service: Service, topic: str) -> None:
    gone = await service.topic()
    ids = await one_of_each_state(service, topic, gone)
    await service.restart()
    assert {state: await service.state(id) for state, id in ids.items()} == {s: s for s in ids}
    await service.commit(ids["pending"])
    await service.commit(ids["parked"])
    await service.create_again(gone)
    await service.reaches(ids["refused"], "promoted")
    assert await service.values(topic) == [b"promoted", b"pending", b"parked"]
    assert await service.values(gone) == [b"refused"]


async def test_committed_is_promoted_once_after_restart(service: Service, topic: str) -> None:
    group = unique("group")
    ids = await asyncio.gather(
        *[service.prepare(Message(topic, b"%d" % n, b"%d" % n), group=group) for n in range(60)]
    )
    await asyncio.gather(*[service.act(id, "commit") for id in ids])
    await service.restart()
    for id in ids:
        await service.reaches(id, "promoted")
    values = await service.values(topic)
    assert sorted(values, key=str) == sorted([b"%d" % n for n in range(60)], key=str)


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_ends_as_decided_after_restart(service: Service, seed: int) -> None:
    random, group = Random(seed), unique("group")
    topics = [await service.topic() for _ in range(3)]
    expected: list[tuple[str, bytes]] = []

    async def one(number: int) -> None:
        chosen = [random.choice(topics) for _ in range(random.randint(1, 4))]
        wanted = [(topic, b"%d.%d" % (number, n)) for n, topic in enumerate(chosen)]
        messages = [Message(topic, b"%d" % (number % 5), value) for topic, value in wanted]
        id = await service.prepare(*messages, group=group)
        decision = random.choice(["commit", "commit", "rollback", "check"])
        if decision == "commit":
            expected.extend(wanted)
        await service.act(id, decision)

    for start in (0, 20, 40):
        await asyncio.gather(*[one(number) for number in range(start, start + 20)])
        await service.restart()

    async def nothing_committed() -> bool:
        return await service.listed(group=group, state="committed") == []

    await until(nothing_committed)
    found = [(topic, value) for topic in topics for value in await service.values(topic)]
    assert sorted(found, key=str) == sorted(expected, key=str)


async def test_attempts_and_rounds_survive_restart(service: Service) -> None:
    group = await service.group(UNKNOWN, check_interval_s=NEVER_S, attempts_max=5, timeout_s=0.1)
    counted = await service.prepare(Message(await service.topic(), b"k", b""), group=group)
    parked = await service.group(UNKNOWN, attempts_max=1, timeout_s=0.1)
    revived = await service.prepare(Message(await service.topic(), b"k", b""), group=parked)
    await service.asked_times(group, 1)
    await service.reaches(revived, "parked")
    await service.act(revived, "revive")
    await service.reaches(revived, "parked")
    await service.restart()
    shown = await service.show(counted)
    assert (shown["attempts"], shown["round"]) == (1, 1)
    assert (await service.show(revived))["round"] == 2
    await service.act(counted, "check")
    assert [call["attempt"] for call in await service.asked_times(group, 2)] == [1, 2]


async def test_keys_decisions_and_groups_survive_restart(service: Service, topic: str) -> None:
    key, group = unique("key"), unique("group")
    message = Message(topic, b"k", b"v")
    id = await service.prepare(message, dedup_key=key, group=group, order_key="o")
    url = "http://127.0.0.1:9/"
    await service.call("PUT", f"/v1/groups/{group}", {"check_url": url})
    await service.commit(id, reason="paid")
    await service.restart()
    status, answer = await service.send(message, dedup_key=key, group=group, order_key="o")
    assert (status, answer["id"], answer["state"]) == (200, id, "promoted")
    assert (await service.show(id))["reason"] == "paid"
    assert (await service.call("GET", f"/v1/groups/{group}"))[1]["check_url"] == url
    assert await service.values(topic) == [b"v"]


async def test_final_content_survives(service: Service) -> None:
    one, gone = await service.topic(), await service.topic()
    id = await service.prepare(Message(one, b"k", b"draft"), Message(gone, b"k", b"draft"))
    await service.delete_topic(gone)
    final = [{"topic": one, "value": "final"}, {"topic": gone, "value": "final"}]
    await service.act(id, "commit", messages=final, wait="promoted")
    await service.restart()
    await service.create_again(gone)
    await service.reaches(id, "promoted")
    assert await service.values(one) == await service.values(gone) == [b"final"]


async def test_producer_continues_after_restart(service: Service, topic: str) -> None:
    group = unique("group")
    async with service.producer(group, check=lambda _: Decision.COMMIT) as producer:
        before = await producer.prepare(Message(topic, b"k", b"before"))
        checked = await producer.prepare(Message(topic, b"k", b"checked"), check_after_s=NEVER_S)
        await service.restart()
        await producer.commit(before, wait="promoted")
        async with producer.transaction(Message(topic, b"k", b"after")) as transaction:
            pass
        await service.reaches(transaction.id, "promoted")
        await service.act(checked, "check")
        await service.reaches(checked, "promoted")
    assert await service.values(topic) == [b"before", b"after", b"checked"]


LOST_HEADERS = (("h", b"1"), ("h", None))


async def lose(service: Service, id: str, before: int) -> None:
    """Delete the half messages below an offset, and wait until the proxy has noticed."""
    await service.world.truncate(service.world.name("half"), 0, before)

    async def noticed() -> bool:
        cause = (await service.show(id)).get("cause") or {}
        return bool(cause.get("code") == "body_lost")

    await until(noticed)


async def test_a_block_of_the_sdk_commits_with_its_messages(
    world: Any, desk: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit by the id alone has none."""
    monkeypatch.setattr(owner, "EDGES_S", 0.1)
    async with Service(world, desk, partitions=1, bodies_bytes_max=1) as service:
        topic = await service.topic()
        message = Message(topic, b"k", b"v", headers=LOST_HEADERS)
        async with service.producer(unique("group")) as producer:
            async with producer.transaction(message) as transaction:
                await lose(service, transaction.id, 1)
            assert transaction.outcome.decision is Decision.COMMIT
            assert (await transaction.commit("promoted")).state is State.PROMOTED
            id = await producer.prepare(Message(topic, b"k", b"w"))
            await lose(service, id, 2)
            with pytest.raises(BodyLost):
                await producer.commit(id)
            assert (await producer.rollback(id)).state is State.ROLLED_BACK
        (record,) = await service.visible(topic)
        assert (record.key, record.value) == (b"k", b"v")
        assert set(LOST_HEADERS) <= set(record.headers)
