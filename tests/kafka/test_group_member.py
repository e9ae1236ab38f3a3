"""Consumers in a group on a real Kafka: what they get, release, keep and lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from confluent_kafka import Consumer

from tests.kafka.relay import JOIN_GROUP, SYNC_GROUP, Fate, Relay, fates
from tests.kit.kafka import KafkaHarness
from tests.kit.topic_reader import admin_of
from tests.kit.until import until
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.writing import Fenced
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.client import Client, Opener
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.member_loop import UNKNOWN_TO_COORDINATOR
from txbroker.kafka.door.group_member import KafkaGroupMember, MemberTiming
from txbroker.kafka.protocol.codes import Code

TIMING = MemberTiming(session_s=3.0, heartbeat_s=0.2, lease_s=1.5)
ACCESS_S = 20.0


class One:
    """A consumer that releases revoked partitions, if it may.

    Attributes:
        assignments: all that it was assigned.
        revoked: what it owned and was not assigned any more.
        losses: why it lost touch, each time.
    """

    def __init__(
        self, world: World, instance: str | None, timing: MemberTiming, opener: Opener
    ) -> None:
        self.client = Client(world.harness.settings(retry_backoff_s=0.01), opener)
        self.member = KafkaGroupMember(self.client, world.group, instance, self, timing)
        self.member.subscribe(world.topics)
        self.assignments: list[frozenset[Partition]] = []
        self.revoked: list[Partition] = []
        self.losses: list[str] = []
        self.may_release = True
        self.instance = instance
        self._world = world
        self._open = True

    async def start(self) -> One:
        await self.member.start()
        return self

    def assigned(self, partitions: frozenset[Partition]) -> None:
        self.assignments.append(partitions)
        self.revoked += sorted(self.member.owned - partitions)
        self._world.take(self, partitions - self.member.owned)
        self.member.owned |= partitions
        if self.may_release:
            self.release()

    def release(self) -> None:
        """Finish with revoked partitions."""
        revoked = self.member.owned - self.assignments[-1]
        if revoked:
            self.member.owned -= revoked
            self.member.rejoin()

    def lost(self, why: str) -> None:
        assert not self.member.owned
        self.losses.append(why)

    @property
    def owned(self) -> set[Partition]:
        return set(self.member.owned)

    async def close(self) -> None:
        """End it in order."""
        if self._open:
            await self.member.close()
            await self.die()

    async def die(self) -> None:
        """Go without leaving."""
        if self._open:
            self._open = False
            await self.member._loop.close()
            await self.client.close()


class World:
    """One group and its consumers."""

    def __init__(self, harness: KafkaHarness) -> None:
        self.harness = harness
        self.group = harness.name("consumers")
        self.topics: list[str] = []
        self.all: list[One] = []

    def make(
        self,
        instance: str | None = None,
        timing: MemberTiming = TIMING,
        opener: Opener = open_connection,
    ) -> One:
        self.all.append(One(self, instance, timing, opener))
        return self.all[-1]

    async def start(self, instance: str | None = None, timing: MemberTiming = TIMING) -> One:
        return await self.make(instance, timing).start()

    def take(self, taker: One, partitions: frozenset[Partition]) -> None:
        """Hold that no other member who is alive owns them."""
        for one in self.all:
            same = taker.instance is not None and one.instance == taker.instance
            if one._open and not same and one is not taker:
                assert not one.owned & partitions, "two owners"

    async def settled(self, *members: One) -> None:
        """Wait until these members own everything, evenly."""

        def even() -> bool:
            sizes = [len(one.owned) for one in members]
            return sum(sizes) == self.count and max(sizes) - min(sizes) <= 1

        await until(even)

    count = 0


@pytest.fixture
async def group(world: KafkaHarness) -> AsyncIterator[World]:
    """A group on two topics, with 6 partitions."""
    made = World(world)
    made.topics = [await world.create_topic("a", 4), await world.create_topic("b", 2)]
    made.count = 6
    yield made
    await asyncio.gather(*(one.close() for one in made.all))


# --- moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("instances", [(None, None, None), ("m0", "m1", "m2")])
async def test_partitions_move_to_new_members_and_back(
    group: World, instances: tuple[str | None, ...]
) -> None:
    first = await group.start(instances[0])
    assert len(first.owned) == group.count
    second = await group.start(instances[1])
    await group.settled(first, second)
    assert sorted(first.revoked) == sorted(second.owned)
    kept = first.owned, second.owned
    third = await group.start(instances[2])
    await group.settled(first, second, third)
    assert first.owned < kept[0]
    assert second.owned < kept[1]
    kept = first.owned, second.owned
    await third.close()
    if instances[2] is None:
        await until(lambda: len(first.owned) + len(second.owned) == group.count, TIMING.session_s)
    await group.settled(first, second)
    assert first.owned > kept[0]
    assert second.owned > kept[1]
    assert not third.revoked
    assert len(first.revoked) == 4
    assert len(second.revoked) == 1
    assert not first.losses + second.losses + third.losses


async def test_moving_partition_is_given_after_release(group: World) -> None:
    first = await group.start()
    first.may_release = False
    second = await group.start()
    assert second.assignments == [frozenset()]
    generations = len(first.assignments)
    second.member.rejoin()
    await until(lambda: len(second.assignments) == 2 and len(first.assignments) > generations)
    assert second.assignments[-1] == frozenset(), "its owner still works on it"
    assert len(first.assignments[-1]) == 3
    assert len(first.owned) == group.count
    first.release()
    await group.settled(first, second)


async def test_member_closed_before_release_gives_partitions_up(group: World) -> None:
    first = await group.start()
    first.may_release = False
    second = await group.start()
    await first.close()
    await group.settled(second)


async def test_rejoin_during_join_begins_another_generation(group: World) -> None:
    first = await group.start()
    member: Any = first.member._member
    ask = member._ask
    asked: list[str] = []

    async def rejoined(request: Any) -> Any:
        answer = await ask(request)
        if not asked:
            # Not in the metadata of the join in progress.
            first.member.owned.discard(min(first.owned))
            first.member.rejoin()
        asked.append(type(request).__name__)
        return answer

    member._ask = rejoined
    first.member.rejoin()
    await until(lambda: asked.count("SyncGroupV3") == 2)
    await group.settled(first)


async def test_heartbeats_go_on_while_others_join(group: World) -> None:
    """A rebalance waits for a dead member; the lease of others is shorter."""
    first, second = await group.start(), await group.start()
    await group.settled(first, second)
    await second.die()
    joins = len(first.assignments)
    first.member.rejoin()
    lasting = asyncio.get_running_loop().time() + TIMING.lease_s + 1.0

    def lasted() -> bool:
        assert len(first.assignments) == joins, "the dead member's session has not ended"
        now = asyncio.get_running_loop().time()
        assert first.member.deadline_s > now
        return now > lasting

    await until(lasted)
    await group.settled(first)
    assert first.losses == []
    assert not second.revoked


# --- the same member, once more ------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [0, 1])
async def test_restarted_static_member_keeps_partitions(group: World, restarted: int) -> None:
    """Also if it is the leader: the first."""
    members = [await group.start("m0"), await group.start("m1")]
    await group.settled(*members)
    before = members[restarted].owned
    other = members[1 - restarted]
    generations = len(other.assignments)
    await members[restarted].close()
    members[restarted] = await group.start(f"m{restarted}")
    assert members[restarted].owned == before
    assert len(other.assignments) == generations, "no rebalance"
    third = await group.start("m2")
    await group.settled(*members, third)
    assert not members[0].losses + members[1].losses


async def test_static_member_restarted_before_release_gives_partitions_up(group: World) -> None:
    first = await group.start("m0")
    first.may_release = False
    second = await group.start("m1")
    await until(lambda: len(first.assignments[-1]) == 3)
    await first.close()
    first = await group.start("m0")
    await group.settled(first, second)


async def test_static_member_restarted_with_other_topics_gets_them(group: World) -> None:
    first, second = await group.start("m0"), await group.start("m1")
    await group.settled(first, second)
    await second.close()
    topic = await group.harness.create_topic("c", 3)
    second = group.make("m1")
    second.member.subscribe([topic])
    await second.start()
    await until(lambda: second.owned == {(topic, n) for n in range(3)} and len(first.owned) == 6)


async def test_second_process_with_instance_id_replaces_the_first(group: World) -> None:
    first, other = await group.start("m0"), await group.start("m1")
    await group.settled(first, other)
    before = first.owned
    second = await group.start("m0")
    assert second.owned == before
    await until(lambda: len(first.losses) == 2)
    assert first.losses[0] == "another process has joined with our instance id"
    assert "m0 is now process" in first.losses[1]
    assert first.owned == set()
    assert first.member.deadline_s < asyncio.get_running_loop().time()
    with pytest.raises(Fenced):
        await first.member.commit({min(before): StoredOffset(1, "")})
    await second.close()  # silent: its session ends
    await group.settled(first, other)
    assert second.losses == other.losses == []


async def test_dead_member_is_replaced_after_session(group: World) -> None:
    first, second = await group.start(), await group.start()
    await group.settled(first, second)
    await second.die()
    began = asyncio.get_running_loop().time()
    await group.settled(first)
    assert asyncio.get_running_loop().time() - began < TIMING.session_s + 3
    assert first.losses == []


async def test_removed_member_joins_as_a_new_one(group: World) -> None:
    first, second = await group.start(), await group.start()
    await group.settled(first, second)
    member = first.member._member
    id = member._member_id
    await member.leave()  # as if its session had ended
    member._member_id = id
    await until(lambda: first.losses)
    assert "does not know this member" in first.losses[0]
    await group.settled(first, second)
    assert len(first.losses) == 1


async def test_unreachable_coordinator_ends_lease_then_membership(
    group: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await group.start()

    async def unreachable(*_: Any) -> Any:
        raise KafkaUnavailable("cut off")

    loop = asyncio.get_running_loop()
    with monkeypatch.context() as cut:
        cut.setattr(first.client, "coordinator", unreachable)
        await until(lambda: first.member.deadline_s < loop.time())
        assert first.losses == []
        assert len(first.owned) == group.count
        await until(lambda: first.losses)
        assert first.losses == ["cut off"]
    await group.settled(first)
    assert first.member.deadline_s > loop.time()


# --- topics --------------------------------------------------------------------------------------


async def test_new_partitions_and_topics_are_assigned(group: World) -> None:
    first, second = await group.start(), await group.start()
    await group.settled(first, second)
    kept = [one.owned for one in (first, second)]
    await group.harness.add_partitions(group.topics[0], 8)
    group.count = 10

    async def found() -> bool:
        first.member.subscribe(group.topics)
        return len(first.owned) == len(second.owned) == 5

    await until(found)
    assert kept[0] < first.owned
    assert kept[1] < second.owned
    topic = await group.harness.create_topic("c", 4)
    group.count = 14
    for one in (first, second):
        one.member.subscribe([*group.topics, topic])
    await group.settled(first, second)
    generations = len(first.assignments)
    first.member.subscribe([*group.topics, topic])
    await asyncio.wait_for(first.member._looking or asyncio.sleep(0), ACCESS_S)
    await first.member._loop.confirm()
    assert len(first.assignments) == generations, "nothing changed"


async def test_missing_topic_is_assigned_once_it_exists(group: World) -> None:
    first = group.make()
    missing = group.harness.name("later")
    first.member.subscribe([missing])
    await first.start()
    assert first.owned == set()
    await group.harness.create_topic("later", 2)

    async def found() -> bool:
        first.member.subscribe([missing])
        return first.owned == {(missing, 0), (missing, 1)}

    await until(found)


async def test_members_get_only_their_topics(group: World) -> None:
    first, second = await group.start(), group.make()
    second.member.subscribe(group.topics[:1])
    await second.start()
    await until(lambda: len(first.owned) == len(second.owned) == 3)
    assert {topic for topic, _ in second.owned} == {group.topics[0]}


# --- commits -------------------------------------------------------------------------------------


async def test_commit_lasts_through_rebalance(group: World) -> None:
    """A kept partition's commit is not fenced while others join and leave."""
    first = await group.start()
    kept = (group.topics[0], 0)
    offset, ends = 0, asyncio.Event()

    async def commit() -> None:
        nonlocal offset
        while not ends.is_set():
            offset += 1
            await first.member.commit({kept: StoredOffset(offset, "")})

    committing = asyncio.create_task(commit())
    for _ in range(3):
        second = await group.start()
        await group.settled(first, second)
        await second.close()
        await group.settled(first)
    ends.set()
    await committing
    assert kept not in first.revoked
    assert await first.member.load([kept]) == {kept: StoredOffset(offset, "")}


async def test_commit_does_not_wait_for_an_assignment(
    group: World, make_relay: Callable[..., Relay]
) -> None:
    """It may take a session, if another generation begins and waits for a member that has died."""
    first = await group.start()
    relay = make_relay()
    second = await group.make(opener=relay.open).start()
    await group.settled(first, second)
    relay.decide = fates(SYNC_GROUP, Fate.HOLD)
    first.member.rejoin()
    held = await relay.caught()
    count = len(first.assignments)
    await until(lambda: len(first.assignments) == count + 1)
    kept = min(second.owned)
    await second.member.commit({kept: StoredOffset(7, "")})
    assert await first.member.load([kept]) == {kept: StoredOffset(7, "")}
    await held.deliver()
    await group.settled(first, second)


@pytest.mark.rule(31)
async def test_static_member_that_missed_a_generation_commits_nothing(
    group: World, make_relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group goes on without it, and gives away what it was assigned last."""
    monkeypatch.setattr(group, "take", lambda *_: None)  # two owners: what this is about
    first = await group.start("one")
    relay = make_relay()
    second = await group.make("two", opener=relay.open).start()
    await group.settled(first, second)
    mine = second.owned
    relay.decide = fates(JOIN_GROUP, Fate.HOLD)
    third = await group.start("three")
    held = await relay.caught()
    taken = min(await until(lambda: third.owned & mine))
    await third.member.commit({taken: StoredOffset(9, "")})
    held.send()
    await until(lambda: second.losses)
    assert second.losses == [UNKNOWN_TO_COORDINATOR]
    await group.settled(first, second, third)
    assert await first.member.load([taken]) == {taken: StoredOffset(9, "")}


async def test_commit_outlasts_a_leader_that_does_not_answer(
    group: World, make_relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no refusal: no member can commit before the leader has assigned."""
    relay = make_relay()
    leader = await group.make(opener=relay.open).start()
    other = await group.start()
    await group.settled(leader, other)
    short = msgspec.structs.replace(other.client.settings, write_timeout_s=0.2)
    monkeypatch.setattr(other.member._offsets, "_settings", short)
    relay.decide = fates(SYNC_GROUP, Fate.HOLD)
    known = other.member._member.identity.generation
    other.member.rejoin()
    held = await relay.caught()
    await until(lambda: other.member._member.identity.generation > known)
    with pytest.raises(KafkaUnavailable, match="rebalance in progress") as caught:
        await other.member.commit({min(other.owned): StoredOffset(7, "")})
    assert not caught.value.lasting
    await held.deliver()
    await group.settled(leader, other)


async def test_commit_ends_with_membership(group: World) -> None:
    """In the generation after it, the commit would not be fenced."""
    first = await group.start()
    offsets: Any = first.member._offsets

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    offsets.commit = never
    committing = asyncio.create_task(first.member.commit({min(first.owned): StoredOffset(1, "")}))
    await asyncio.sleep(0)
    first.member._loop._lose("gone")
    with pytest.raises(KafkaUnavailable, match="out of its group"):
        await committing


# --- what others see -----------------------------------------------------------------------------


async def test_other_tools_see_topics_and_partitions(group: World) -> None:
    first, second = await group.start("m0"), await group.start()
    await group.settled(first, second)
    admin = admin_of(group.harness.bootstrap)

    def described() -> Any:
        return admin.describe_consumer_groups([group.group])[group.group].result(ACCESS_S)

    found = await until(
        lambda: asyncio.to_thread(lambda: (one := described()).state.name == "STABLE" and one)
    )
    assert found.partition_assignor == "txbroker-cooperative"
    seen = {
        member.group_instance_id: {
            (one.topic, one.partition) for one in member.assignment.topic_partitions
        }
        for member in found.members
    }
    assert seen == {"m0": first.owned, None: second.owned}
    metadata = ConsumerProtocol.METADATA.decode(first.member._member._metadata())
    assert metadata.subscription == sorted(group.topics)


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        ConsumerProtocol.METADATA(0, [], b"{[").encode(),
        ConsumerProtocol.METADATA(2, ["a"], b"").encode() + b"\0\0\0\1",
    ],
    ids=["empty", "first version", "cut off"],
)
async def test_foreign_metadata_do_not_break_the_assignment(group: World, metadata: bytes) -> None:
    first, other = await group.start(), group.make()
    other.member._member._metadata = lambda: metadata  # type: ignore[method-assign]
    await other.start()
    await until(lambda: other.assignments)
    assert other.owned == set()
    assert len(first.owned) == group.count
    assert first.revoked == []


# --- groups that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol", ["classic", pytest.param("consumer", marks=pytest.mark.second_protocol)]
)
async def test_group_of_other_consumers_is_refused(group: World, protocol: str) -> None:
    """With the newer protocol the coordinator assigns partitions."""
    other = Consumer(
        {
            "bootstrap.servers": group.harness.bootstrap,
            "group.id": group.group,
            "group.protocol": protocol,
        }
    )
    assigned: list[object] = []
    other.subscribe(group.topics, on_assign=lambda _, given: assigned.extend(given))
    try:

        def joined() -> bool:
            other.poll(0.1)
            return bool(assigned)

        await until(lambda: asyncio.to_thread(joined))
        with pytest.raises(ConfigurationError, match="is used by other consumers: stop them"):
            await group.start()
    finally:
        await asyncio.to_thread(other.close)


async def test_session_outside_limits_is_refused(group: World) -> None:
    with pytest.raises(ConfigurationError, match=r"group\.min\.session\.timeout\.ms"):
        await group.start(timing=TIMING._replace(session_s=0.01))


@pytest.mark.parametrize(
    ("code", "next_step"),
    [
        (Code.GROUP_AUTHORIZATION_FAILED, "grant it Read on the group"),
        (Code.INVALID_GROUP_ID, "use another group"),
        (Code.GROUP_MAX_SIZE_REACHED, "group.max.size"),
    ],
)
async def test_refused_start_names_the_next_step(group: World, code: Code, next_step: str) -> None:
    one = group.make()
    member: Any = one.member._member

    async def refuse(_request: Any) -> Any:
        return SimpleNamespace(error_code=code)

    member._ask = refuse
    with pytest.raises(ConfigurationError, match=next_step):
        await one.start()
    assert not one.assignments
