"""Members on a real Kafka: other builds beside them, touch lost, an instance id taken."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from confluent_kafka import Consumer

from tests.kit.heard import Heard
from tests.kit.kafka import KafkaHarness
from txbroker.door.protocols import Assignment
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka import KafkaDoor
from txbroker.kafka.client import member
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.member import Joined
from txbroker.kafka.door import membership
from txbroker.kafka.door.membership import ProxyMember
from txbroker.kafka.protocol.codes import Code

SESSION_S = 1.5
ALL = frozenset(range(4))
FIRST_URL, OTHER_URL = "http://127.0.0.1:1", "http://127.0.0.1:2"


# --- other builds in the group -------------------------------------------------------------------


class OldBuild(ProxyMember):
    """A member of the first version: list as metadata, no user data in assignments."""

    def _metadata(self) -> bytes:
        data = msgspec.json.encode(sorted(self._held.partitions))
        encoded: bytes = ConsumerProtocol.METADATA(0, [self._topic], data).encode()
        return encoded

    async def _assign(
        self, generation: int, members: list[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes]]:
        shares = await super()._assign(generation, members)
        decoded = [(name, ConsumerProtocol.ASSIGNMENT.decode(data)) for name, data in shares]
        return [
            (name, ConsumerProtocol.ASSIGNMENT(0, found.assignment, b"").encode())
            for name, found in decoded
        ]


class Rubbish(ProxyMember):
    """A member with malformed metadata."""

    def _metadata(self) -> bytes:
        encoded: bytes = ConsumerProtocol.METADATA(0, [self._topic], b"\xff{[").encode()
        return encoded


async def joined(
    world: KafkaHarness,
    name: str,
    url: str,
    heard: Heard,
    kind: type[ProxyMember] = ProxyMember,
) -> KafkaDoor:
    """A door whose proxy has joined as a member of a kind."""
    door = await world.door(name, session_timeout_s=SESSION_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "ProxyMember", kind)
        await door.membership.join(url, heard.assigned, heard.lost)
    return door


@pytest.mark.parametrize("kind", [OldBuild, Rubbish])
async def test_members_of_other_versions_get_shares(
    world: KafkaHarness, kind: type[ProxyMember]
) -> None:
    ours, other = Heard(), Heard()
    await joined(world, "a", FIRST_URL, ours)
    assert ours.now.record_version == membership.RECORD_VERSION
    await joined(world, "b", OTHER_URL, other, kind)
    await ours.until_owned(2)
    assert ours.now.mine | other.now.mine == ALL
    assert [ours.now.owners[p] for p in sorted(other.now.mine)] == ["", ""]
    assert ours.now.proxies == (FIRST_URL,)
    assert ours.now.record_version == 1
    assert ours.losses == other.losses == []


async def test_member_of_first_version_keeps_its_partitions(world: KafkaHarness) -> None:
    ours, old = Heard(), Heard()
    await joined(world, "a", FIRST_URL, ours)
    door = await joined(world, "b", OTHER_URL, old, OldBuild)
    await ours.until_owned(2)
    third = Heard()
    await joined(world, "c", "http://127.0.0.1:3", third)
    await third.until_owned(1)
    before = [event.mine for event in old.events if not isinstance(event, str)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(before))
    await door.membership.leave()


async def test_member_joins_once_under_old_leader(world: KafkaHarness) -> None:
    joins: list[str] = []

    class Counted(ProxyMember):
        async def join(self) -> Joined[Assignment]:
            joins.append(self._instance)
            return await super().join()

    old, ours = Heard(), Heard()
    await joined(world, "a", FIRST_URL, old, OldBuild)
    door = await joined(world, "b", OTHER_URL, ours, Counted)
    await old.until_owned(2)
    assert ours.now.proxies == (OTHER_URL,)
    assert {ours.now.owners[p] for p in ours.now.mine} == {OTHER_URL}
    assert {ours.now.owners[p] for p in old.now.mine} == {""}
    await door.close()
    back = Heard()
    again = await joined(world, "b", "http://127.0.0.1:9", back, Counted)
    assert back.now.mine == ours.now.mine
    for _ in range(20):
        assert await again.membership.still_ours(min(back.now.mine))
    assert joins == ["b", "b"], "a new generation would not distribute metadata"


@pytest.mark.rule(26)
async def test_rebalance_is_requested_once(world: KafkaHarness) -> None:
    joins: list[int] = []

    class Misheard(ProxyMember):
        async def join(self) -> Joined[Assignment]:
            found = await super().join()
            joins.append(found.generation)
            return found._replace(outdated=True)

    heard = Heard()
    door = await joined(world, "a", FIRST_URL, heard, Misheard)
    await heard.until(lambda _: len(heard.events) == 2)
    for _ in range(20):
        assert await door.membership.still_ours(0)
    assert len(joins) == 2
    assert joins[1] > joins[0]


# --- touch lost, and found again -----------------------------------------------------------------


class Halted(ProxyMember):
    """A member whose second join waits half way; set `halfway` and `may_sync` first."""

    halfway: asyncio.Event
    may_sync: asyncio.Event

    async def _ask(self, request: Any) -> Any:
        if type(request).__name__ == "SyncGroupV3" and self._held.generation >= 0:
            self.halfway.set()
            await self.may_sync.wait()
        return await super()._ask(request)


@pytest.mark.rule(16)
@pytest.mark.parametrize("ends", [True, False])
async def test_still_ours_waits_during_a_join_or_times_out(world: KafkaHarness, ends: bool) -> None:
    """Kafka knows the new generation then, and calls ours an illegal one."""
    Halted.halfway, Halted.may_sync = asyncio.Event(), asyncio.Event()
    heard, other = Heard(), Heard()
    door = await joined(world, "a", FIRST_URL, heard, Halted)
    joining = asyncio.create_task(joined(world, "b", OTHER_URL, other))
    async with asyncio.timeout(10):
        await Halted.halfway.wait()
        if not ends:
            with pytest.raises(KafkaUnavailable, match="rebalance"):
                await door.membership.still_ours(0)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            return
    questions = [asyncio.create_task(door.membership.still_ours(p)) for p in range(4)]
    _done, waiting = await asyncio.wait(questions, timeout=0.3)
    assert waiting == set(questions)
    Halted.may_sync.set()
    await joining
    await heard.until_owned(2)
    assert [await question for question in questions] == [p in heard.now.mine for p in range(4)]
    assert heard.losses == []


@pytest.mark.rule(26)
async def test_unknown_member_reports_loss_and_rejoins(
    world: KafkaHarness,
) -> None:
    heard, other = Heard(), Heard()
    door = await joined(world, "a", FIRST_URL, heard)
    await joined(world, "b", OTHER_URL, other)
    await heard.until_owned(2)
    member: Any = door.membership._member  # type: ignore[attr-defined]
    id = member._member_id
    await member.leave()  # as if its session had timed out: it does not know
    member._member_id = id
    assert "does not know this member" in await heard.until_lost()
    assert not await door.membership.still_ours(0)
    await heard.until_owned(2)
    await other.until_owned(2)
    assert heard.now.mine | other.now.mine == ALL
    assert len(heard.losses) == 1


@pytest.mark.rule(26)
async def test_lost_coordinator_is_reported_once(world: KafkaHarness) -> None:
    reachable = asyncio.Event()
    reachable.set()

    class Cut(ProxyMember):
        async def join(self) -> Joined[Assignment]:
            await self._reach()
            return await super().join()

        async def heartbeat(self, generation: int, lane: str) -> int:
            await self._reach()
            return await super().heartbeat(generation, lane)

        async def _reach(self) -> None:
            if not reachable.is_set():
                raise KafkaUnavailable("cut off")

    heard, other = Heard(), Heard()
    door = await joined(world, "a", FIRST_URL, heard, Cut)
    await joined(world, "b", OTHER_URL, other)
    await heard.until_owned(2)
    reachable.clear()
    with pytest.raises(KafkaUnavailable):
        await door.membership.still_ours(0)
    assert heard.losses == [], "a moment without an answer is no loss"
    assert door.membership.in_touch()
    await other.until_owned(4)
    assert not door.membership.in_touch(), "the partitions were reassigned"
    assert await heard.until_lost() == "cut off"
    reachable.set()
    await heard.until_owned(2)
    await other.until_owned(2)
    assert heard.losses == ["cut off"]
    assert other.losses == []


@pytest.mark.rule(26)
async def test_used_instance_id_is_not_taken_back(world: KafkaHarness) -> None:
    first, second = Heard(), Heard()
    door = await joined(world, "same", FIRST_URL, first)
    tries: list[int] = []
    member: Any = door.membership._member  # type: ignore[attr-defined]
    join = member.join

    async def counted() -> Joined[Assignment]:
        try:
            found: Joined[Assignment] = await join()
        except KafkaRefused as error:
            tries.append(error.code)
            raise
        return found

    member.join = counted
    newer = await joined(world, "same", OTHER_URL, second)
    assert "another process" in await first.until_lost()
    reason = await first.until_lost(f"same is now the proxy at {OTHER_URL}")
    assert "from host 127.0.0.1" in reason
    async with asyncio.timeout(20):
        while len(tries) < 3:
            assert await newer.membership.still_ours(0)
    assert set(tries) == {Code.FENCED_INSTANCE_ID}
    assert second.losses == []
    await newer.close()  # silent: its session ends
    await first.until_owned(4)
    assert len(first.losses) == 2  # at once, and when it was known who it is


async def test_leave_is_bounded_with_unresponsive_broker(
    world: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    door = await joined(world, "a", FIRST_URL, heard)
    await heard.until_owned(4)

    async def silent(_client: Client, _kind: int, _group: str) -> int:
        return await asyncio.Event().wait()

    monkeypatch.setattr(Client, "coordinator", silent)
    monkeypatch.setattr(member, "_LEAVE_MAX_S", 0.2)
    async with asyncio.timeout(5.0):
        await door.membership.leave()


async def test_group_of_other_consumers_is_refused(world: KafkaHarness) -> None:
    door = await world.door()
    other = Consumer(
        {
            "bootstrap.servers": world.bootstrap,
            "group.id": door.settings.group_id,
            "auto.offset.reset": "earliest",
        }
    )
    assigned: list[object] = []
    other.subscribe([door.settings.half_topic], on_assign=lambda _, given: assigned.extend(given))
    heard = Heard()
    try:
        async with asyncio.timeout(20):
            while not assigned:
                await asyncio.to_thread(other.poll, 0.1)
        with pytest.raises(ConfigurationError, match="other consumers"):
            await door.membership.join(FIRST_URL, heard.assigned, heard.lost)
    finally:
        await asyncio.to_thread(other.close)
    assert heard.events == []


async def test_session_timeout_outside_limits_is_refused(world: KafkaHarness) -> None:
    heard = Heard()
    door = await world.door(session_timeout_s=0.01)
    with pytest.raises(ConfigurationError, match=r"group\.min\.session\.timeout\.ms"):
        await door.membership.join(FIRST_URL, heard.assigned, heard.lost)
    assert heard.events == []
