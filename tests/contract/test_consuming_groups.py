"""The contract of groups of consumers: members, offsets, commits with copies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from tests.kit.consuming import TIMING, Consuming, shared
from tests.kit.until import until
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.writing import Copy, Fenced, Refused
from txbroker.errors import InvariantBroken, KafkaUnavailable

METADATA_MAX = 4096


class Group:
    """A group of the test's own; its members are closed in the end."""

    def __init__(self, world: Any, door: ConsumingDoor) -> None:
        self.world = world
        self.door = door
        self.name = world.name("consumers")
        self.members: list[Consuming] = []

    async def join(
        self,
        *topics: str,
        instance: str | None = None,
        hold: bool = False,
        door: ConsumingDoor | None = None,
    ) -> Consuming:
        self.members.append(Consuming(hold=hold))
        return await self.members[-1].start(door or self.door, self.name, topics, instance)

    async def names(self) -> set[str]:
        described = await self.door.describe(self.name)
        return {name for name, _, _ in described.members}

    async def stored(self) -> dict[Partition, StoredOffset]:
        return await self.door.committed(self.name)


@pytest.fixture
async def door(world: Any) -> AsyncIterator[ConsumingDoor]:
    door = await world.consuming_door()
    yield door
    await door.close()


@pytest.fixture
async def group(world: Any, door: ConsumingDoor) -> AsyncIterator[Group]:
    made = Group(world, door)
    yield made
    for member in made.members:
        await member.member.close()


def all_of(topic: str, count: int) -> set[Partition]:
    return {(topic, number) for number in range(count)}


# --- assignment ------------------------------------------------------------------------------


async def test_first_member_gets_all_partitions(world: Any, group: Group) -> None:
    one, two = await world.create_topic("one", 2), await world.create_topic("two", 3)
    member = await group.join(one, two)
    assert member.assignments == [frozenset(all_of(one, 2) | all_of(two, 3))]
    assert member.losses == []


async def test_members_get_only_topics_subscribed_to(world: Any, group: Group) -> None:
    one, two = await world.create_topic("one", 2), await world.create_topic("two", 2)
    first = await group.join(one)
    second = await group.join(two)
    await first.owns(*all_of(one, 2))
    await second.owns(*all_of(two, 2))


async def test_revoked_partitions_are_assigned_after_release(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic", 4)
    first = await group.join(topic, hold=True)
    second = await group.join(topic)
    await until(lambda: first.revoked)
    revoked = set(first.revoked)
    assert len(revoked) == 2
    assert second.member.owned == set()
    third = await group.join(topic)
    # No member gets partitions that the first one still uses.
    assert second.member.owned | third.member.owned == set()
    assert first.revoked >= revoked
    first.hold = False
    first.release()
    await shared(all_of(topic, 4), first, second, third)
    # Retained partitions were in use all the time.
    retained = first.member.owned
    assert all(retained <= kept for kept in first.kept)
    assert [each.losses for each in (first, second, third)] == [[], [], []]


async def test_leaving_member_hands_over(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic", 4)
    first, second = await group.join(topic), await group.join(topic)
    await shared(all_of(topic, 4), first, second)
    retained = frozenset(first.member.owned)
    seen = len(first.kept)
    await second.member.close()
    await first.owns(*all_of(topic, 4))
    assert all(retained <= kept for kept in first.kept[seen:])


async def test_changed_subscription_is_assigned(world: Any, group: Group) -> None:
    one, two = await world.create_topic("one", 2), await world.create_topic("two", 2)
    member = await group.join(one)
    member.member.subscribe([one, two])
    await member.owns(*all_of(one, 2), *all_of(two, 2))
    member.member.subscribe([two])
    await member.owns(*all_of(two, 2))


async def test_new_partitions_are_assigned(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic", 1)
    member = await group.join(topic)
    await member.owns(*all_of(topic, 1))
    await world.add_partitions(topic, 3)

    def grown() -> bool:
        # As a consumer does from time to time.
        member.member.subscribe([topic])
        return member.member.owned == all_of(topic, 3)

    await until(grown)


async def test_static_member_keeps_its_share_over_a_restart(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic", 4)
    first = await group.join(topic, instance="first")
    second = await group.join(topic, instance="second")
    await shared(all_of(topic, 4), first, second)
    share, seen = frozenset(first.member.owned), len(second.assignments)
    await first.member.close()
    again = await group.join(topic, instance="first")
    assert again.assignments[-1] == share
    assert second.member.owned == all_of(topic, 4) - share
    assert all(partitions == second.member.owned for partitions in second.assignments[seen:])
    assert second.losses == []


async def test_second_process_with_same_instance_puts_first_one_out(
    world: Any, group: Group
) -> None:
    topic = await world.create_topic("topic", 2)
    first = await group.join(topic, instance="same")
    second = await group.join(topic, instance="same")
    await until(lambda: first.losses)
    assert "instance" in first.losses[-1]
    with pytest.raises(Fenced):
        await first.member.commit({(topic, 0): StoredOffset(1, "")})
    await second.owns(*all_of(topic, 2))
    await second.member.commit({(topic, 0): StoredOffset(1, "")})


async def test_group_is_described(world: Any, group: Group, door: ConsumingDoor) -> None:
    topic = await world.create_topic("topic", 2)
    assert (await door.describe(group.name)).state == "Dead"
    assert group.name not in await door.groups()
    await group.join(topic, instance="one")
    await until(lambda: _is_stable(door, group.name))
    found = await door.describe(group.name)
    ((name, host, partitions),) = found.members
    assert (name, partitions) == ("one", frozenset(all_of(topic, 2)))
    assert host
    assert group.name in await door.groups()


async def test_group_without_members_keeps_its_offsets(
    world: Any, group: Group, door: ConsumingDoor
) -> None:
    topic = await world.create_topic("topic")
    member = (await group.join(topic)).member
    await member.commit({(topic, 0): StoredOffset(1, "")})
    await member.close()
    found = await door.describe(group.name)
    assert (found.state, found.members) == ("Empty", ())
    assert group.name in await door.groups()
    assert await group.stored() == {(topic, 0): StoredOffset(1, "")}


async def _is_stable(door: ConsumingDoor, group: str) -> bool:
    return (await door.describe(group)).state == "Stable"


# --- offsets ---------------------------------------------------------------------------------


async def test_offsets_are_stored_with_metadata(world: Any, group: Group) -> None:
    one, two = await world.create_topic("one", 2), await world.create_topic("two")
    member = (await group.join(one, two)).member
    partitions = [(one, 0), (one, 1), (two, 0)]
    assert await member.load(partitions) == {}
    assert await group.stored() == {}
    first = {(one, 0): StoredOffset(7, "ü" * METADATA_MAX), (two, 0): StoredOffset(0, "")}
    await member.commit(first)
    assert await member.load(partitions) == first
    await member.commit({(one, 0): StoredOffset(3, "back"), (one, 1): StoredOffset(1, "x")})
    expected = {
        (one, 0): StoredOffset(3, "back"),
        (one, 1): StoredOffset(1, "x"),
        (two, 0): StoredOffset(0, ""),
    }
    assert await member.load(partitions) == expected
    assert await member.load([(one, 1)]) == {(one, 1): StoredOffset(1, "x")}
    assert await group.stored() == expected


async def test_too_long_metadata_is_refused(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic")
    member = (await group.join(topic)).member
    with pytest.raises(InvariantBroken, match="metadata"):
        await member.commit({(topic, 0): StoredOffset(1, "x" * (METADATA_MAX + 1))})
    assert await group.stored() == {}


async def test_offsets_outlive_members(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic")
    first = (await group.join(topic)).member
    await first.commit({(topic, 0): StoredOffset(5, "m")})
    await first.close()
    second = (await group.join(topic)).member
    assert await second.load([(topic, 0)]) == {(topic, 0): StoredOffset(5, "m")}


# --- copies ----------------------------------------------------------------------------------


def copy(topic: str, key: bytes, partition: int = 0, value: bytes = b"") -> Copy:
    return Copy(topic, partition, Record(key, value, (("cause", b"why"), ("none", None))))


async def test_copies_are_stored_with_offsets(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic")
    dead = await world.create_topic("dead", 2)
    member = (await group.join(topic)).member
    for offset in (1, 2):
        copies = [copy(dead, b"%d" % offset), copy(dead, b"other", partition=1, value=b"v")]
        await member.commit({(topic, 0): StoredOffset(offset, "")}, copies)
    assert await member.load([(topic, 0)]) == {(topic, 0): StoredOffset(2, "")}
    assert [record.key for record in await world.visible(dead)] == [b"1", b"2"]
    others = await world.visible(dead, 1)
    assert [(record.key, record.value) for record in others] == [(b"other", b"v")] * 2
    assert tuple(others[0].headers) == (("cause", b"why"), ("none", None))


async def test_refused_copy_stores_nothing(world: Any, group: Group) -> None:
    topic, dead = await world.create_topic("topic"), await world.create_topic("dead")
    small = await world.create_topic("small", max_message_bytes="2000")
    member = (await group.join(topic)).member
    large = copy(small, b"large", value=bytes(5000))
    with pytest.raises(Refused) as refused:
        await member.commit(
            {(topic, 0): StoredOffset(1, "")},
            [copy(dead, b"fine"), copy(small, b"small"), large],
        )
    assert list(refused.value.indexes) == [2]
    assert refused.value.lasting
    assert refused.value.too_large  # so that it is stored without its value
    assert await member.load([(topic, 0)]) == {}
    assert [*await world.visible(dead), *await world.visible(small)] == []
    await member.commit({(topic, 0): StoredOffset(1, "")}, [copy(dead, b"later")])
    assert [record.key for record in await world.visible(dead)] == [b"later"]
    assert await member.load([(topic, 0)]) == {(topic, 0): StoredOffset(1, "")}


@pytest.mark.parametrize("copies", [False, True], ids=["offsets", "copies"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_lost_answer_of_commit_leaves_all_or_nothing(
    world: Any, group: Group, stored: bool, copies: bool
) -> None:
    topic, dead = await world.create_topic("topic"), await world.create_topic("dead")
    losing = await world.losing_door(group.name, stored=stored, copies=copies)
    member = (await group.join(topic, door=losing)).member
    made = [copy(dead, b"first")] if copies else []
    # A member may send it again.
    with suppress(KafkaUnavailable):
        await member.commit({(topic, 0): StoredOffset(1, "")}, made)
    found = await member.load([(topic, 0)])
    assert found in ({}, {(topic, 0): StoredOffset(1, "")})
    if copies:
        first = [b"first"] if found else []
        assert found or not stored
        assert [record.key for record in await world.visible(dead)] == first
        await member.commit({(topic, 0): StoredOffset(2, "")}, [copy(dead, b"second")])
        assert [record.key for record in await world.visible(dead)] == [*first, b"second"]
    else:
        await member.commit({(topic, 0): StoredOffset(2, "")})
    assert await member.load([(topic, 0)]) == {(topic, 0): StoredOffset(2, "")}


# --- fencing and lease -----------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True], ids=["offsets", "copies"])
async def test_removed_member_commits_nothing(world: Any, group: Group, copies: bool) -> None:
    topic, dead = await world.create_topic("topic", 2), await world.create_topic("dead")
    first = await group.join(topic)
    await first.member.commit({(topic, 0): StoredOffset(3, "mine")})
    made = [copy(dead, b"zombie")] if copies else []
    if copies:
        # Its producer has begun before.
        await first.member.commit({(topic, 1): StoredOffset(1, "")}, [copy(dead, b"before")])
    (name,) = await group.names()
    await world.remove_member(group.name, name)
    with pytest.raises(Fenced):
        await first.member.commit({(topic, 0): StoredOffset(9, "zombie")}, made)
    assert (await group.stored())[topic, 0] == StoredOffset(3, "mine")
    keys = [record.key for record in await world.visible(dead)]
    assert keys == ([b"before"] if copies else [])
    await until(lambda: first.losses)
    # It joins again as a new member.
    await first.owns(*all_of(topic, 2))
    again = {(topic, 0): StoredOffset(4, "again")}
    await first.member.commit(again, made)
    assert await first.member.load([(topic, 0)]) == again


async def test_partitions_of_removed_member_move(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic", 4)
    first = await group.join(topic)
    (name,) = await group.names()
    second = await group.join(topic)
    await shared(all_of(topic, 4), first, second)
    await world.remove_member(group.name, name)
    await until(lambda: first.losses)
    await shared(all_of(topic, 4), first, second)
    assert len(first.losses) == 1
    assert second.losses == []


async def test_closed_member_commits_nothing(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic")
    first = await group.join(topic)
    await first.member.close()
    with pytest.raises(Fenced):
        await first.member.commit({(topic, 0): StoredOffset(1, "")})


async def test_heartbeats_extend_the_lease(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic")
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    member = (await group.join(topic)).member
    lease_s = TIMING["lease_s"]
    first = member.deadline_s
    assert before_s + lease_s <= first <= loop.time() + lease_s
    await until(lambda: member.deadline_s > first)
    assert member.deadline_s <= loop.time() + lease_s


async def test_lease_ends_with_membership(world: Any, group: Group) -> None:
    topic = await world.create_topic("topic")
    first = await group.join(topic, instance="same")
    await group.join(topic, instance="same")
    await until(lambda: first.losses)
    assert first.member.deadline_s <= asyncio.get_running_loop().time()
