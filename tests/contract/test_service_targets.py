"""Targets that reject committed messages, and targets that come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import unique
from txbroker.core.encoding import encode_claim
from txbroker.core.records import RECORD_VERSION, Claim, Message, Record
from txbroker.door.own_topics import encode_layout
from txbroker.errors import AlreadyDecided, BadTarget, NotPending

ROOM = 3000


async def without_topic(service: Service) -> tuple[str, str]:
    """Return a prepared transaction, and its topic, which is gone."""
    topic = await service.topic()
    id = await service.prepare(Message(topic, b"k", b"v"))
    await service.delete_topic(topic)
    return id, topic


@pytest.mark.rule(17)
async def test_deleted_topic_refuses_and_others_continue(service: Service, topic: str) -> None:
    id = await service.prepare(Message(topic, b"k", b"v"))
    await service.world.delete_topic(topic)  # and the proxy does not know it yet
    healthy = await service.topic()
    ids = [await service.prepare(Message(healthy, b"%d" % n, b"")) for n in range(20)]
    answers = await asyncio.gather(*[service.commit(each) for each in [id, *ids]])
    assert [answer["state"] for answer in answers] == ["refused"] + ["promoted"] * 20
    shown = await service.show(id)
    assert (shown["cause"]["code"], shown["cause"]["topic"]) == ("unknown_topic", topic)
    assert shown["decision"] == "commit"
    assert [each["id"] for each in await service.listed(state="refused", topic=topic)] == [id]
    assert await service.metric("refused", topic=topic) == 1


async def test_refused_transaction_stays_decided(service: Service) -> None:
    id, _ = await without_topic(service)
    assert (await service.commit(id))["state"] == "refused"
    assert (await service.act(id, "commit"))["state"] == "refused"
    with pytest.raises(AlreadyDecided):
        await service.act(id, "rollback")
    with pytest.raises(NotPending):
        await service.act(id, "check")


async def test_recreated_topic_receives_revived_messages(service: Service) -> None:
    id, topic = await without_topic(service)
    await service.commit(id)
    await service.create_again(topic)
    await service.reaches(id, "promoted")
    assert await service.values(topic) == [b"v"]


async def test_refused_transaction_is_revived_by_operator(service: Service, topic: str) -> None:
    id = await service.prepare(Message(topic, b"k", bytes(ROOM)))
    await service.set_max_message_bytes(topic, ROOM // 2)
    assert (await service.commit(id))["state"] == "refused"
    assert (await service.show(id))["cause"]["code"] == "too_large"
    small = await service.prepare(Message(topic, b"k", b"fits"))
    await service.commit(small)
    await service.set_max_message_bytes(topic, ROOM * 2)
    await service.act(id, "revive", reason="raised the limit")
    await service.reaches(id, "promoted")
    assert await service.values(topic) == [b"fits", bytes(ROOM)]


async def test_one_bad_target_refuses_the_whole_transaction(service: Service) -> None:
    good, bad = await service.topic(), await service.topic()
    id = await service.prepare(
        Message(good, b"k", b"1"), Message(bad, b"k", b"2"), Message(good, b"k", b"3")
    )
    await service.delete_topic(bad)
    assert (await service.commit(id))["state"] == "refused"
    after = await service.prepare(Message(good, b"k", b"after"))
    await service.commit(after)
    assert await service.values(good) == [b"after"]
    await service.create_again(bad)
    await service.reaches(id, "promoted")
    assert await service.values(good) == [b"after", b"1", b"3"]
    assert await service.values(bad) == [b"2"]


@pytest.mark.parametrize(
    "own",
    [f"txbroker.{name}" for name in ("half", "op", "checkpoint", "parked", "groups")]
    + ["__consumer_offsets", "__transaction_state"],
)
async def test_own_and_internal_topics_are_no_targets(
    service: Service, topic: str, own: str
) -> None:
    with pytest.raises(BadTarget, match="own: it is no target"):
        await service.prepare(Message(topic, b"k", b"v"), Message(own, b"k", b"v"))
    id = await service.prepare(Message(topic, b"k", b"next"))
    await service.commit(id)
    assert await service.values(topic) == [b"next"]


@pytest.mark.rule(17)
@pytest.mark.parametrize("name", ["half", "op", "checkpoint", "parked", "groups", "audit.drift"])
async def test_topics_of_another_installation_are_no_targets(service: Service, name: str) -> None:
    world, topic = service.world, await service.topic()
    # By its own name, and so by its records, as if it were another's: the proxy is called txbroker.
    theirs = world.name(name)
    with pytest.raises(BadTarget, match="belongs to the txbroker installation"):
        await service.prepare(Message(topic, b"k", b"v"), Message(theirs, b"k", b"v"))
    id = await service.prepare(Message(topic, b"k", b"next"))
    await service.commit(id)
    assert await service.values(topic) == [b"next"]


@pytest.mark.rule(17)
async def test_topic_with_similar_name_is_a_target(service: Service) -> None:
    world = service.world
    lookalike = unique("like")
    for name in ("groups", "checkpoint", "half"):
        await world.create_topic(f"{lookalike}.{name}")
    await world.foreign(
        world.name(f"{lookalike}.groups"), 0, Record(b"orders", b"{}"), Record(b"\tlayout", b"{")
    )
    await world.foreign(world.name(f"{lookalike}.checkpoint"), 0, Record(b"progress", b"7"))
    id = await service.prepare(Message(world.name(f"{lookalike}.half"), b"k", b"v"))
    assert (await service.commit(id))["state"] == "promoted"


CLAIM = encode_claim(Claim(RECORD_VERSION, "c", "o", ""))


@pytest.mark.parametrize(
    ("evidence", "partitions"),
    [
        ({"groups": encode_layout(2), "checkpoint": CLAIM}, {"half": 2, "checkpoint": 2}),
        ({"groups": encode_layout(2), "checkpoint": CLAIM}, {"half": 2, "op": 2, "checkpoint": 1}),
        ({"groups": encode_layout(3)}, {"half": 2, "op": 2, "checkpoint": 2}),
        ({"checkpoint": CLAIM}, {"half": 2, "op": 2, "checkpoint": 2, "groups": 0}),
    ],
)
async def test_single_record_is_no_installation(
    service: Service, evidence: dict[str, Record], partitions: dict[str, int]
) -> None:
    world, prefix = service.world, unique("business")
    for name, count in ({"groups": 1} | partitions).items():
        if count:
            await world.create_topic(f"{prefix}.{name}", count, cleanup_policy="compact")
    for name, record in evidence.items():
        await world.foreign(world.name(f"{prefix}.{name}"), 0, record)
    id = await service.prepare(Message(world.name(f"{prefix}.half"), b"k", b"v"))
    assert (await service.commit(id))["state"] == "promoted"


@pytest.mark.rule(17)
@pytest.mark.parametrize("evidence", ["groups", "checkpoint"])
async def test_promotion_refuses_new_installation_topic(service: Service, evidence: str) -> None:
    world, theirs = service.world, unique("theirs")
    half = await world.create_topic(f"{theirs}.half", 2)
    id = await service.prepare(Message(half, b"k", b"v"))
    await world.create_topic(f"{theirs}.op", 2)
    for name, count in (("checkpoint", 2), ("groups", 1)):
        await world.create_topic(f"{theirs}.{name}", count, cleanup_policy="compact")
    record = encode_layout(2) if evidence == "groups" else CLAIM
    await world.foreign(world.name(f"{theirs}.{evidence}"), 0, record)
    await service.restart()
    assert (await service.commit(id))["state"] == "refused"
    shown = await service.show(id)
    assert (shown["cause"]["code"], shown["cause"]["topic"]) == ("reserved", half)
    assert await service.values(half) == []


@pytest.mark.rule(17)
async def test_a_reserved_topic_is_refused_by_name_and_by_pattern(
    world: Any, desk: FakeEndpoint
) -> None:
    reserved = (world.name("a"), "*.internal-?")
    async with Service(world, desk, reserved_topics=reserved) as service:
        for name in ("a", "internal-1"):
            topic = await world.create_topic(name)
            with pytest.raises(BadTarget, match=r"is reserved \(reserved_topics\)"):
                await service.prepare(Message(topic, b"k", b"v"))
        free = await world.create_topic("internal-10")
        id = await service.prepare(Message(free, b"k", b"v"))
    async with Service(world, desk, reserved_topics=("*-10",)) as service:
        assert (await service.commit(id))["state"] == "refused"
        assert await service.values(free) == []
