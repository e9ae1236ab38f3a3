"""What every `Membership` does: on a real Kafka, and in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.kit.heard import Heard
from tests.kit.kafka import KafkaHarness

SESSION_S = 1.5
ALL = frozenset(range(4))
URL = "http://127.0.0.1:{}".format


class Member:
    """A proxy as the group sees it."""

    def __init__(self, world: Any, name: str, url: str, **urls: str) -> None:
        self._world = world
        self._urls = urls
        self.name = name
        self.url = url
        self.heard = Heard()
        self.door: Any = None

    async def start(self, record_version: int | None = None) -> Member:
        changes = {"session_timeout_s": SESSION_S} if isinstance(self._world, KafkaHarness) else {}
        self.door = await self._world.door(self.name, **changes)
        if record_version is not None:
            self.door.membership.record_version = record_version
        await self.join()
        return self

    async def join(self) -> None:
        """Join, also once more after leaving."""
        await self.door.membership.join(
            self.url, self.heard.assigned, self.heard.lost, **self._urls
        )

    async def leave(self) -> None:
        """Leave the group."""
        await self.door.membership.leave()

    async def still_ours(self, partition: int) -> bool:
        """Ask with a fresh heartbeat."""
        ours: bool = await self.door.membership.still_ours(partition)
        return ours

    async def die(self) -> None:
        """Go without leaving; the session goes on for its time."""
        await self.door.close()
        if not isinstance(self._world, KafkaHarness):
            self._world.kafka.coordinator("test").forget(self.name)

    @property
    def mine(self) -> frozenset[int]:
        """The partitions that it was assigned."""
        return self.heard.now.mine


async def started(world: Any, name: str, port: int, **changes: Any) -> Member:
    return await Member(world, name, URL(port)).start(**changes)


async def settled(*members: Member) -> None:
    """Wait until all know of all, and of who owns what alike; then hold that to be true."""
    urls = {member.url for member in members}
    for member in members:
        await member.heard.until(
            lambda seen: set(seen.proxies) == urls and set(seen.owners) <= urls
        )
    while len({member.heard.now.owners for member in members}) > 1:
        seen = len(members[0].heard.events)
        await members[0].heard.until(lambda _, seen=seen: len(members[0].heard.events) > seen)
    for member in members:
        owned = {p for p in ALL if members[0].heard.now.owners[p] == member.url}
        assert member.mine == owned


async def pair(world: Any) -> tuple[Member, Member]:
    """Two members that share the partitions."""
    one, two = await started(world, "one", 1), await started(world, "two", 2)
    await settled(one, two)
    return one, two


async def test_one_member_owns_all(world: Any) -> None:
    one = await started(world, "one", 1)
    assert one.heard.now.mine == ALL
    assert one.heard.now.owners == (one.url,) * 4
    assert one.heard.now.proxies == (one.url,)
    assert [await one.still_ours(p) for p in range(4)] == [True] * 4


@pytest.mark.rule(26)
async def test_second_member_takes_half_and_urls_are_known(world: Any) -> None:
    one, two = await pair(world)
    assert len(one.mine) == len(two.mine) == 2
    assert one.mine | two.mine == ALL
    for member in (one, two):
        assert [await member.still_ours(p) for p in range(4)] == [p in member.mine for p in ALL]


async def test_members_know_peer_and_admin_addresses(world: Any) -> None:
    one = Member(world, "one", URL(1), peer_url=URL(11), admin_url=URL(21))
    two = Member(world, "two", URL(2), admin_url=URL(22))
    three = Member(world, "three", URL(3))
    for member in (one, two, three):
        await member.start()
    await settled(one, two, three)
    for member in (one, two, three):
        seen = member.heard.now
        for known, wanted in (
            (seen.peer_urls, {URL(1): URL(11)}),
            (seen.admin_urls, {URL(1): URL(21), URL(2): URL(22)}),
        ):
            # The entry of the member itself does not matter.
            assert {**known, member.url: ""} == {**wanted, member.url: ""}


async def test_members_without_partition_know_all_members(world: Any) -> None:
    members = [await started(world, f"m{number}", number) for number in range(6)]
    await settled(*members)
    assert sorted(len(member.mine) for member in members) == [0, 0, 1, 1, 1, 1]
    assert all(not member.heard.losses for member in members)


@pytest.mark.rule(26)
async def test_leaving_member_hands_over_and_rejoins(world: Any) -> None:
    one, two = await pair(world)
    begun = time.monotonic()
    await two.leave()
    await one.heard.until_owned(4)
    assert time.monotonic() - begun < SESSION_S, "that is as long as a silent one would take"
    assert set(one.heard.now.owners) == {one.url}
    assert not await two.still_ours(0)
    assert one.door.membership.in_touch()
    assert not two.door.membership.in_touch()
    await two.join()
    await settled(one, two)
    assert two.door.membership.in_touch()
    assert len(two.mine) == 2
    assert one.heard.losses == two.heard.losses == []


async def test_silent_member_is_replaced_within_session(world: Any) -> None:
    one, two = await pair(world)
    begun = time.monotonic()
    await two.die()
    await one.heard.until_owned(4)
    assert time.monotonic() - begun < SESSION_S + 2
    await settled(one)
    assert one.heard.losses == []


@pytest.mark.rule(26)
async def test_kept_partitions_are_neither_lost_nor_moved(world: Any) -> None:
    """While members join and leave, no assignment omits a kept partition."""
    one, two = await pair(world)
    first, second = one.mine, two.mine
    three = await started(world, "three", 3)
    await settled(one, two, three)
    assert len(three.mine) == 1
    kept = {"one": first - three.mine, "two": second - three.mine}
    assert {"one": one.mine, "two": two.mine} == kept
    await three.leave()
    await settled(one, two)
    for member, own in ((one, kept["one"]), (two, kept["two"])):
        since = [event for event in member.heard.events if not isinstance(event, str)]
        assert all(own <= seen.mine for seen in since)
        assert member.heard.losses == []


async def test_kept_partition_stays_ours_through_rebalance(world: Any) -> None:
    """Between the two steps of a join Kafka knows no member by its generation."""
    one = await started(world, "one", 1)
    answers: list[bool] = []
    asked = asyncio.Event()

    async def ask() -> None:
        while True:
            # What stays with the first one when a second and a third come: found out below.
            answers.append(await one.still_ours(0))
            asked.set()
            await asyncio.sleep(0)

    asking = asyncio.create_task(ask())
    try:
        two = await started(world, "two", 2)
        await settled(one, two)
        for _ in range(3):
            await two.leave()
            await one.heard.until_owned(4)
            await two.join()
            await settled(one, two)
        asked.clear()
        await asked.wait()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert 0 in one.mine
    assert all(answers)
    assert one.heard.losses == []


async def test_restarted_member_gets_its_partitions_at_once(world: Any) -> None:
    one, two = await pair(world)
    for member in (one, two):
        await member.door.close()
        back = Member(world, member.name, member.url)
        begun = time.monotonic()
        await back.start()
        assert time.monotonic() - begun < SESSION_S
        assert back.mine == member.mine


@pytest.mark.rule(26)
@pytest.mark.parametrize("restarted", ["one", "two"])
async def test_member_returning_at_new_url_is_known_there(world: Any, restarted: str) -> None:
    """Also where it is the one that shares out: the first."""
    members = dict(zip(("one", "two"), await pair(world), strict=True))
    before = members[restarted].mine
    await members[restarted].door.close()
    members[restarted] = await started(world, restarted, 9)
    assert members[restarted].mine == before
    await settled(*members.values())
    assert members[restarted].mine == before
    assert [member.heard.losses for member in members.values()] == [[], []]


async def test_duplicate_instance_id_suspends_the_first_process(world: Any) -> None:
    first, other = await started(world, "same", 1), await started(world, "other", 3)
    await settled(first, other)
    second = await started(world, "same", 2)
    assert "another process" in await first.heard.until_lost(second.url)
    await settled(second, other)
    assert not await first.still_ours(min(second.mine))
    assert await second.still_ours(min(second.mine))
    await second.leave()
    await settled(first, other)
    assert len(first.heard.losses) <= 2  # who it was may be known a little later
    assert second.heard.losses == other.heard.losses == []


@pytest.mark.rule(27)
async def test_lowest_record_version_is_used(world: Any) -> None:
    newer = await started(world, "newer", 1, record_version=7)
    assert newer.heard.now.record_version == 7
    older = await started(world, "older", 2, record_version=5)
    await settled(newer, older)
    assert newer.heard.now.record_version == older.heard.now.record_version == 5
    await older.door.close()
    upgraded = await started(world, "older", 2, record_version=8)
    for member in (newer, upgraded):
        await member.heard.until(lambda seen: seen.record_version == 7)
    await newer.leave()
    await upgraded.heard.until(lambda seen: seen.record_version == 8)


async def test_nothing_is_owned_outside_membership(world: Any) -> None:
    one = Member(world, "one", URL(1))
    one.door = await world.door("one")
    assert not await one.still_ours(0)
    await one.join()
    assert await one.still_ours(0)
    await one.leave()
    assert not await one.still_ours(0)
    await one.leave()
    assert one.heard.losses == []
