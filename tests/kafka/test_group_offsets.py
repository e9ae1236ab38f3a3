"""A group's offsets on a real Kafka: generations, copies in the same transaction, lost answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.kafka.relay import (
    ADD_PARTITIONS,
    END_TXN,
    OFFSET_COMMIT,
    PRODUCE,
    Fate,
    Relay,
    cancelling,
    fates,
)
from tests.kit.kafka import KafkaHarness
from tests.kit.until import until
from txbroker import failpoints
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition, Record
from txbroker.door.writing import Copy, Fenced, Refused
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client import transaction
from txbroker.kafka.client.client import GROUP, Client, KafkaRefused, Unanswered
from txbroker.kafka.client.producer import Producer
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.door.group_offsets import CommittedOffsets
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.schemas import JoinGroupV5, LeaveGroupV3, SyncGroupV3
from txbroker.net.timers import Backoff

TXN_OFFSET_COMMIT = 28
SESSION_MS = 30_000
PROTOCOLS = [1, pytest.param(2, marks=pytest.mark.second_protocol)]
"""Kafka's transaction protocols."""


class Member:
    """A dynamic member of a group of one; None of it runs between calls."""

    def __init__(self, client: Client, group: str) -> None:
        self.generation = -1
        self.member_id = ""
        self.instance: str | None = None
        self._client = client
        self._group = group

    async def join(self) -> None:
        """Join, or begin the next generation."""
        await self.begin()
        await self.finish()

    async def begin(self, *, note: bool = True) -> None:
        """Join, but get no assignment yet."""
        # A new member learns its id first, and a new Kafka makes the groups' topic first.
        self.latest = await until(self._try_join)
        if note:
            self.generation = self.latest

    async def _try_join(self) -> int:
        """Return the generation, or 0."""
        stranger: Any = None
        answer = await self._ask(
            JoinGroupV5(
                self._group,
                SESSION_MS,
                SESSION_MS,
                self.member_id,
                stranger,
                "consumer",
                [("p", b"")],
            )
        )
        self.member_id = answer.member_id or self.member_id
        return 0 if answer.error_code else int(answer.generation_id)

    async def finish(self) -> None:
        """Get the assignment."""
        stranger: Any = None
        answer = await self._ask(
            SyncGroupV3(
                self._group,
                self.latest,
                self.member_id,
                stranger,
                [(self.member_id, b"")],
            )
        )
        assert answer.error_code == 0

    async def leave(self) -> None:
        answer = await self._ask(LeaveGroupV3(self._group, [(self.member_id, None)]))
        assert answer.error_code == 0

    async def _ask(self, request: Any) -> Any:
        node = await until(self._coordinator)
        return await self._client.ask(node - 1, request, "test/member")

    async def _coordinator(self) -> int:
        """Return one more than the coordinator, or 0: a new Kafka makes its topic first."""
        try:
            return 1 + await self._client.coordinator(GROUP, self._group)
        except KafkaUnavailable:
            return 0


class World:
    """A group, the topics of a test, and members."""

    def __init__(self, door: KafkaConsumingDoor, harness: KafkaHarness) -> None:
        self.door = door
        self.client = door._client
        self.group = harness.name("g")
        self.at: Partition = (harness.name("orders"), 0)
        self.dead = harness.name("dead")

    def offsets(self, member: Any = None, *, exact: bool = False) -> CommittedOffsets:
        member = member or Member(self.client, self.group)
        return CommittedOffsets(self.client, self.group, member, exact=exact)

    async def member(self, *, exact: bool = False) -> tuple[Member, CommittedOffsets]:
        member = Member(self.client, self.group)
        await member.join()
        return member, self.offsets(member, exact=exact)

    def copy(self, value: bytes = b"copy", partition: int = 0) -> Copy:
        return Copy(self.dead, partition, Record(b"k", value))

    async def stored(self) -> StoredOffset | None:
        return (await self.offsets().load([self.at])).get(self.at)

    async def copies(self) -> list[bytes | None]:
        """Return the visible copies, once no transaction is open."""
        await until(self._settled)
        found = [await self.door.read((self.dead, number), 0, 1 << 40) for number in range(2)]
        return [record.value for records in found for record in records]

    async def _settled(self) -> bool:
        partitions = [(self.dead, number) for number in range(2)]
        return await self.door.offsets(partitions, -1) == {
            (topic, number): await self._high_watermark(topic, number)
            for topic, number in partitions
        }

    async def _high_watermark(self, topic: str, number: int) -> int:
        return await Reader(self.client, topic, number, "test/ends").end()


@pytest.fixture(params=PROTOCOLS)
async def both(world: KafkaHarness, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A group under both transaction protocols."""
    async for made in _world(world, transactions=request.param):
        yield made


@pytest.fixture
async def plain(world: KafkaHarness) -> AsyncIterator[World]:
    """A group whose test needs no transactions, or one protocol only."""
    async for made in _world(world):
        yield made


async def _world(harness: KafkaHarness, **settings: Any) -> AsyncIterator[World]:
    opener = settings.pop("opener", None)
    given = harness.settings(**settings)
    door = KafkaConsumingDoor(given, opener) if opener else KafkaConsumingDoor(given)
    await door.start()
    await harness.create_topic("orders")
    await harness.create_topic("dead", 2)
    yield World(door, harness)
    await door.close()


# --- plain commits -------------------------------------------------------------------------------


async def test_offsets_and_metadata_are_stored(plain: World) -> None:
    _member, offsets = await plain.member()
    other = (plain.dead, 1)
    assert await offsets.load([plain.at, other]) == {}
    await offsets.commit({plain.at: StoredOffset(7, "ä" * 100), other: StoredOffset(0, "")})
    assert await offsets.load([plain.at, other, (plain.dead, 0)]) == {
        plain.at: StoredOffset(7, "ä" * 100),
        other: StoredOffset(0, ""),
    }
    assert await offsets.load([]) == {}


async def test_too_large_metadata_is_a_fault_of_ours(plain: World) -> None:
    _member, offsets = await plain.member()
    with pytest.raises(InvariantBroken, match="metadata"):
        await offsets.commit({plain.at: StoredOffset(1, "x" * 5000)})


@pytest.mark.parametrize("copies", [False, True])
async def test_commit_waits_for_its_assignment(plain: World, copies: bool) -> None:
    member, offsets = await plain.member()
    await member.begin()
    committing = asyncio.create_task(
        offsets.commit({plain.at: StoredOffset(3, "")}, [plain.copy()] if copies else [])
    )
    await asyncio.wait([committing], timeout=0.3)
    assert copies or not committing.done()
    await member.finish()
    await committing
    assert await plain.stored() == StoredOffset(3, "")


# --- members that were replaced ------------------------------------------------------------------


async def _replaced(world: World) -> tuple[Member, CommittedOffsets]:
    """Return a member that was replaced by another one, which has committed 20."""
    zombie, offsets = await world.member()
    await offsets.commit({world.at: StoredOffset(10, "old")}, [world.copy(b"before")])
    await zombie.leave()
    _owner, successor = await world.member()
    await successor.commit({world.at: StoredOffset(20, "new")})
    return zombie, offsets


@pytest.mark.parametrize("copies", [False, True])
async def test_replaced_member_commits_nothing(both: World, copies: bool) -> None:
    _zombie, offsets = await _replaced(both)
    with pytest.raises(Fenced, match="unknown member"):
        await offsets.commit({both.at: StoredOffset(15, "")}, [both.copy()] if copies else [])
    assert await both.stored() == StoredOffset(20, "new")
    assert await both.copies() == [b"before"]


@pytest.mark.rule(31, 45)
@pytest.mark.parametrize("copies", [False, True])
async def test_old_generation_commits_nothing(both: World, copies: bool) -> None:
    member, offsets = await both.member()
    await offsets.commit({both.at: StoredOffset(20, "new")})
    await member.begin(note=False)
    await member.finish()
    with pytest.raises(Fenced, match="illegal generation"):
        await offsets.commit({both.at: StoredOffset(15, "")}, [both.copy()] if copies else [])
    assert await both.stored() == StoredOffset(20, "new")
    assert await both.copies() == []
    member.generation = member.latest
    await offsets.commit({both.at: StoredOffset(21, "")}, [both.copy(b"later")])
    assert await both.stored() == StoredOffset(21, "")
    assert await both.copies() == [b"later"]


@pytest.mark.rule(46)
@pytest.mark.parametrize("exact", [False, True])
async def test_late_commit_of_an_exact_member_moves_no_offset_back(
    both: World, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has given it up, or sent it again, and its generation goes on."""
    sent: list[tuple[Any, ...]] = []
    ask = both.client.ask

    async def unanswered_once(node: int, request: Any, *how: Any) -> Any:
        answer = await ask(node, request, *how)
        if "OffsetCommit" in type(request).__name__:
            sent.append((node, request, *how))
            if len(sent) == 1:
                raise Unanswered("the connection was lost")
            await ask(*sent[0])  # also while a later transaction is open
        return answer

    monkeypatch.setattr(both.client, "ask", unanswered_once)
    _member, offsets = await both.member(exact=exact)
    with contextlib.suppress(KafkaUnavailable):
        await offsets.commit({both.at: StoredOffset(10, "")})
    await offsets.load([both.at])
    await offsets.commit({both.at: StoredOffset(30, "")})
    assert await both.stored() == StoredOffset(30 if exact else 10, "")


async def test_without_generation_a_zombie_moves_the_offset_back(both: World) -> None:
    zombie, offsets = await _replaced(both)
    # As common clients commit: this is why the generation is sent.
    zombie.generation, zombie.member_id = -1, ""
    await offsets.commit({both.at: StoredOffset(15, "")}, [both.copy(b"zombie")])
    assert await both.stored() == StoredOffset(15, "")


# --- copies --------------------------------------------------------------------------------------


async def test_copies_and_offset_are_stored_together(both: World) -> None:
    _member, offsets = await both.member()
    for turn in range(3):
        copies = [both.copy(b"%d-%d" % (turn, number), number % 2) for number in range(4)]
        await offsets.commit({both.at: StoredOffset(turn, "m")}, copies)
        assert await offsets.load([both.at]) == {both.at: StoredOffset(turn, "m")}
    assert await both.copies() == [
        b"%d-%d" % (turn, number) for at in (0, 1) for turn in range(3) for number in (at, at + 2)
    ]


async def test_copies_exceed_one_batch(plain: World) -> None:
    _member, offsets = await plain.member()
    values = [b"%d" % number + bytes(300_000) for number in range(10)]
    await offsets.commit({plain.at: StoredOffset(1, "")}, [plain.copy(value) for value in values])
    assert await plain.copies() == values


async def test_refused_copy_is_named(both: World) -> None:
    _member, offsets = await both.member()
    await offsets.commit({both.at: StoredOffset(1, "")}, [both.copy(b"kept")])
    large, unknown = both.copy(bytes(2 << 20)), Copy(both.dead + "x", 0, Record(None, b""))
    for refused in (large, unknown):
        with pytest.raises(Refused) as caught:
            await offsets.commit(
                {both.at: StoredOffset(2, "")}, [both.copy(b"a"), refused, both.copy(b"b")]
            )
        assert list(caught.value.indexes) == [1]
        assert caught.value.lasting
        assert caught.value.too_large == (refused is large)
    assert await both.stored() == StoredOffset(1, "")
    await offsets.commit({both.at: StoredOffset(3, "")}, [both.copy(b"later")])
    assert await both.copies() == [b"kept", b"later"]
    assert await both.stored() == StoredOffset(3, "")


async def test_refused_copy_is_found_in_its_batch(world: KafkaHarness, plain: World) -> None:
    _member, offsets = await plain.member()
    await world.set_max_message_bytes(plain.dead, 1000)
    copies = [plain.copy(b"a"), plain.copy(bytes(2000)), plain.copy(b"b")]
    with pytest.raises(Refused) as caught:
        await offsets.commit({plain.at: StoredOffset(1, "")}, copies)
    assert list(caught.value.indexes) == [1]
    copies[1:2] = [plain.copy(bytes(600)), plain.copy(bytes(600))]
    await offsets.commit({plain.at: StoredOffset(2, "")}, copies)
    assert len(await plain.copies()) == 4


async def test_rights_can_be_granted_by_prefix(plain: World) -> None:
    names = {plain.offsets()._writer._transactional_id for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith(f"txbroker.{plain.group}.") for name in names)


# --- results that are unknown --------------------------------------------------------------------


@pytest.mark.rule(46)
async def test_load_waits_for_open_transactions(both: World) -> None:
    member, offsets = await both.member()
    await offsets.commit({both.at: StoredOffset(1, "")})
    backoff = Backoff(10, 0.01)
    producer = Producer(both.client, "test/open", f"{both.group}.open")
    await producer.start(backoff)
    await producer.add([(both.dead, 0)], backoff)
    await producer.add_group(both.group, backoff)
    topics = [(both.at[0], [(both.at[1], 2, -1, "")])]
    member_fields = member.generation, member.member_id, None, topics
    node = await both.client.coordinator(GROUP, both.group)
    answer = await both.client.ask(
        node, producer.offset_commit(both.group, *member_fields), "test/open"
    )
    assert answer.topics[0][1][0][1] == 0
    loading = asyncio.create_task(offsets.load([both.at]))
    await asyncio.wait([loading], timeout=0.3)
    assert not loading.done()
    await producer.end(commit=True, backoff=backoff)
    assert await loading == {both.at: StoredOffset(2, "")}


@pytest.mark.rule(46)
async def test_commit_that_is_given_up_leaves_no_open_transaction(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner need not wait until Kafka ends it."""
    _member, offsets = await both.member(exact=True)
    await offsets.commit({both.at: StoredOffset(1, "")})

    def give_up(name: str) -> None:
        if name == "consumer.ending":
            raise asyncio.CancelledError

    monkeypatch.setattr(failpoints, "hook", give_up)
    with pytest.raises(asyncio.CancelledError):
        await offsets.commit({both.at: StoredOffset(2, "")})
    monkeypatch.setattr(failpoints, "hook", None)
    loaded = asyncio.wait_for(both.offsets().load([both.at]), 5)
    assert await loaded == {both.at: StoredOffset(1, "")}


@pytest.mark.rule(34)
@pytest.mark.parametrize("moment", ["consumer.copied", "consumer.ending"])
@pytest.mark.parametrize("earlier", [[], [b"1"]])
async def test_crash_before_the_end_stores_nothing(
    plain: World, monkeypatch: pytest.MonkeyPatch, earlier: list[bytes], moment: str
) -> None:
    """Nor does the next commit: it takes another producer, which aborts the open transaction."""
    _member, offsets = await plain.member()
    await offsets.commit({plain.at: StoredOffset(1, "")}, [plain.copy(each) for each in earlier])

    def crash(name: str) -> None:
        if name == moment:
            raise KafkaUnavailable("crash")

    monkeypatch.setattr(failpoints, "hook", crash)
    with pytest.raises(KafkaUnavailable, match="crash"):
        await offsets.commit({plain.at: StoredOffset(2, "")}, [plain.copy(b"2")])
    monkeypatch.setattr(failpoints, "hook", None)
    assert await offsets.load([plain.at]) == {plain.at: StoredOffset(1, "")}
    await offsets.commit({plain.at: StoredOffset(3, "")}, [plain.copy(b"3")])
    assert await plain.stored() == StoredOffset(3, "")
    assert await plain.copies() == [*earlier, b"3"]


BREAKS = [
    (OFFSET_COMMIT, Fate.LOSE_ANSWER),
    (OFFSET_COMMIT, Fate.HOLD_AND_RESET),
    (ADD_PARTITIONS, Fate.LOSE_ANSWER),
    (TXN_OFFSET_COMMIT, Fate.LOSE_ANSWER),
    (TXN_OFFSET_COMMIT, Fate.HOLD_AND_RESET),
    (END_TXN, Fate.LOSE_ANSWER),
    (END_TXN, Fate.HOLD_AND_RESET),
]


@pytest.mark.rule(34)
@pytest.mark.parametrize("transactions", PROTOCOLS)
@pytest.mark.parametrize(("key", "fate"), BREAKS)
async def test_load_knows_the_result_of_a_broken_commit(
    world: KafkaHarness, make_relay: Callable[..., Relay], transactions: int, key: int, fate: Fate
) -> None:
    relay = make_relay()
    async for group in _world(world, transactions=transactions, opener=relay.open):
        _member, offsets = await group.member()
        await offsets.commit({group.at: StoredOffset(1, "")}, [group.copy(b"1")])
        relay.decide = fates(key, fate)
        copies = [] if key == OFFSET_COMMIT else [group.copy(b"2")]
        try:
            await offsets.commit({group.at: StoredOffset(2, "")}, copies)
            stored = True
        except KafkaUnavailable:
            stored = (await offsets.load([group.at]))[group.at].offset == 2
        assert await offsets.load([group.at]) == {group.at: StoredOffset(1 + stored, "")}
        assert await group.copies() == [b"1", b"2"][: 1 + (stored and bool(copies))]
        await offsets.commit({group.at: StoredOffset(3, "")}, [group.copy(b"3")])
        assert await group.stored() == StoredOffset(3, "")
        assert (await group.copies())[-1] == b"3"


@pytest.mark.rule(46)
@pytest.mark.parametrize("transactions", PROTOCOLS)
@pytest.mark.parametrize("key", [PRODUCE, TXN_OFFSET_COMMIT, END_TXN])
async def test_next_owner_does_not_wait_for_a_cancelled_commit(
    world: KafkaHarness, make_relay: Callable[..., Relay], transactions: int, key: int
) -> None:
    """The member may stay out of the group: it need not load, nor be closed."""
    relay = make_relay()
    async for group in _world(world, transactions=transactions, opener=relay.open):
        _member, offsets = await group.member(exact=True)
        await offsets.commit({group.at: StoredOffset(1, "")}, [group.copy(b"1")])
        commit = offsets.commit({group.at: StoredOffset(2, "")}, [group.copy(b"2")])
        cancelled = asyncio.create_task(commit)
        relay.decide = cancelling(key, cancelled)
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        async with asyncio.timeout(2):
            stored = await group.stored()
            copies = await group.copies()
        assert stored is not None
        assert copies == [b"1", b"2"][: stored.offset]


@pytest.mark.rule(46)
async def test_refused_offsets_leave_nothing_open(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of the copies would wait until the transaction times out."""
    member, offsets = await both.member(exact=True)

    async def refuse(*_: object, **__: object) -> None:
        raise KafkaRefused(Code.GROUP_AUTHORIZATION_FAILED)

    monkeypatch.setattr(transaction, "store_offsets", refuse)
    with pytest.raises(KafkaUnavailable):
        await offsets.commit({both.at: StoredOffset(1, "")}, [both.copy()])
    began_s = time.monotonic()
    await until(both._settled)
    assert time.monotonic() - began_s < 2
    await member.leave()
