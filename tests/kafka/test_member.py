"""Who gets which partition, what members say, and what one does when another takes its place."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from confluent_kafka import Consumer
from heard import Heard
from hypothesis import given
from hypothesis import strategies as st
from kafka_world import KafkaWorld

from txbroker.core.sharing import Held, settle, share_out
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka import KafkaDoor, membership
from txbroker.kafka.client import KafkaRefused
from txbroker.kafka.codes import Code
from txbroker.kafka.generation import (
    Me,
    Said,
    Seat,
    Told,
    assignment,
    decode_said,
    decode_told,
    encode_said,
    encode_told,
    is_outdated,
    make_told,
    numbers,
    runs,
)
from txbroker.kafka.member import Joined, Member

SESSION_S = 1.5
ALL = frozenset(range(4))
FIRST_URL, OTHER_URL = "http://127.0.0.1:1", "http://127.0.0.1:2"

names = st.text("abcdef", min_size=1, max_size=3)
own = st.frozensets(st.integers(0, 20))
owned = st.dictionaries(names, own, max_size=6)


# --- shares --------------------------------------------------------------------------------------


@given(st.integers(1, 20), owned)
def test_shares_are_whole_even_and_sticky(
    partitions: int, owned: dict[str, frozenset[int]]
) -> None:
    shares = share_out(partitions, owned)
    assert shares.keys() == owned.keys()
    if not owned:
        return
    given_out = [number for share in shares.values() for number in share]
    assert sorted(given_out) == list(range(partitions))
    sizes = {len(share) for share in shares.values()}
    assert max(sizes) - min(sizes) <= 1
    assert share_out(partitions, shares) == shares


@given(st.integers(1, 20), owned.filter(bool), st.integers(1, 3))
def test_members_that_come_take_no_more_than_their_shares(
    partitions: int, owned: dict[str, frozenset[int]], count: int
) -> None:
    before = share_out(partitions, owned)
    new = [f"z{number}" for number in range(count)]
    after = share_out(partitions, {**before, **dict.fromkeys(new, frozenset())})
    moved = sum(len(before[name] - after[name]) for name in before)
    assert moved == sum(len(after[name]) for name in new)


@given(st.integers(1, 20), owned.filter(lambda owned: len(owned) > 1))
def test_of_a_member_that_goes_only_its_own_move(
    partitions: int, owned: dict[str, frozenset[int]]
) -> None:
    before = share_out(partitions, owned)
    gone = min(before)
    after = share_out(partitions, {name: own for name, own in before.items() if name != gone})
    assert all(before[name] <= after[name] for name in after)


@given(st.dictionaries(names, st.builds(Held, own, st.integers(-1, 5)), max_size=5))
def test_what_several_say_they_own_is_the_one_s_who_got_it_last(held: dict[str, Held]) -> None:
    settled = settle(held)
    assert settled.keys() == held.keys()
    for number in frozenset[int]().union(*(one.partitions for one in held.values())):
        (holder,) = (name for name, own in settled.items() if number in own)
        claims = [one.generation for one in held.values() if number in one.partitions]
        assert held[holder].generation == max(claims)


# --- what is said and told -----------------------------------------------------------------------


@given(own, st.integers(0, 25))
def test_numbers_travel_as_runs(own: frozenset[int], below: int) -> None:
    assert numbers(runs(own), below) == {number for number in own if number < below}


def test_a_run_without_end_is_cut() -> None:
    assert numbers([(-(10**9), 10**18)], 3) == {0, 1, 2}


def test_what_is_said_is_read_back() -> None:
    said = Said(FIRST_URL, 3, [(0, 2), (5, 1)], 7)
    assert decode_said(encode_said(said)) == said


def test_another_build_may_say_more() -> None:
    said = {**msgspec.to_builtins(Said(FIRST_URL, 3, [(0, 2)], 7)), "v": 9, "more": {"a": [1]}}
    assert decode_said(msgspec.json.encode(said)) == Said(FIRST_URL, 3, [(0, 2)], 7)


def test_the_build_before_said_a_list() -> None:
    assert decode_said(b"[3, 0, 1]") == Said("", 1, [(0, 2), (3, 1)])


NONSENSE = [
    b"", b"\xff", b"7", b"null", b"{", b'["a"]', b"[" * 100_000, b'"text"',
    b'{"url": 7, "record_version": "x", "owned": "all", "generation": null}',
    b'{"url": "' + b"x" * 5000 + b'", "record_version": -4, "owned": [[1]], "generation": 1.5}',
]  # fmt: skip


@pytest.mark.parametrize("data", NONSENSE, ids=lambda data: repr(data[:12]))
def test_who_says_nonsense_owns_nothing(data: bytes) -> None:
    assert decode_said(data) == Said()
    assert decode_told(data) is None


@given(st.binary())
def test_no_bytes_break_the_reader(data: bytes) -> None:
    assert decode_said(data).record_version >= 1
    assert numbers(decode_said(data).owned, 4) <= ALL
    assert decode_told(data) is None


def test_one_who_claims_all_in_a_generation_to_come_takes_nothing_from_the_others() -> None:
    honest = {"a": Said("ua", 2, [(0, 2)], 4), "b": Said("ub", 2, [(2, 2)], 4)}
    greedy = Said("uc", 2, [(0, 4)], 10**9)
    _told, shares = make_told(4, 5, {**honest, "c": greedy})
    assert shares["c"] < ALL
    assert len(shares["c"]) == 1
    assert shares["a"] <= {0, 1}
    assert shares["b"] <= {2, 3}


def test_all_are_told_who_owns_what() -> None:
    said = {"a": Said("ua", 3, [(0, 4)], 1), "b": Said("ub", 2), "c": Said()}
    told, shares = make_told(4, 2, said)
    assert decode_told(encode_told(told)) == told
    assert told.record_version == 1
    known = assignment(4, shares["b"], told, Me("b", "ub", 2))
    assert known.mine == shares["b"]
    assert [known.owners[p] for p in sorted(shares["a"])] == ["ua"] * len(shares["a"])
    assert [known.owners[p] for p in shares["b"]] == ["ub"] * len(shares["b"])
    assert [known.owners[p] for p in shares["c"]] == [""] * len(shares["c"])
    assert known.proxies == ("ua", "ub")
    assert known.record_version == 1


def test_about_ourselves_we_know_better_than_the_leader() -> None:
    told = Told([Seat("a", "old", 3, [(0, 4)]), Seat("b", "ub", 3, [(1, 1)])], 3)
    known = assignment(4, {0, 1, 99}, told, Me("a", "new", 2))
    assert known.mine == {0, 1}
    assert known.owners == ("new", "new", "", "")
    assert known.proxies == ("new", "ub")
    assert known.record_version == 2


def test_it_is_outdated_what_others_know_otherwise_of_us() -> None:
    told = Told([Seat("a", "ua", 3, [])], 3)
    assert not is_outdated(told, Me("a", "ua", 3))
    assert is_outdated(told, Me("a", "ub", 3))
    assert is_outdated(told, Me("a", "ua", 2))
    assert is_outdated(told, Me("b", "ua", 3))
    assert not is_outdated(None, Me("a", "ua", 3)), "an old leader tells nobody in any generation"


# --- other builds in the group -------------------------------------------------------------------


class OldBuild(Member):
    """A member of the build before: it says a list, and as the leader tells nothing."""

    def _metadata(self) -> bytes:
        data = msgspec.json.encode(sorted(self._held.partitions))
        encoded: bytes = ConsumerProtocol.METADATA(0, [self._topic], data).encode()
        return encoded

    def _assign(
        self, generation: int, members: list[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes]]:
        shares = super()._assign(generation, members)
        decoded = [(name, ConsumerProtocol.ASSIGNMENT.decode(data)) for name, data in shares]
        return [
            (name, ConsumerProtocol.ASSIGNMENT(0, found.assignment, b"").encode())
            for name, found in decoded
        ]


class Rubbish(Member):
    """A member that says what nobody can read."""

    def _metadata(self) -> bytes:
        encoded: bytes = ConsumerProtocol.METADATA(0, [self._topic], b"\xff{[").encode()
        return encoded


async def joined(
    world: KafkaWorld,
    name: str,
    url: str,
    heard: Heard,
    kind: type[Member] = Member,
) -> KafkaDoor:
    """A door whose proxy has joined as a member of a kind."""
    door = await world.door(name, session_timeout_s=SESSION_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "Member", kind)
        await door.membership.join(url, heard.assigned, heard.lost)
    return door


@pytest.mark.parametrize("kind", [OldBuild, Rubbish])
async def test_a_member_of_another_build_shares_with_us(
    world: KafkaWorld, kind: type[Member]
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


async def test_the_partitions_of_an_old_member_stay_with_it(world: KafkaWorld) -> None:
    ours, old = Heard(), Heard()
    await joined(world, "a", FIRST_URL, ours)
    door = await joined(world, "b", OTHER_URL, old, OldBuild)
    await ours.until_owned(2)
    third = Heard()
    await joined(world, "c", "http://127.0.0.1:3", third)
    await third.until_owned(1)
    before = [told.mine for told in old.events if not isinstance(told, str)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(before))
    await door.membership.leave()


async def test_under_an_old_leader_we_join_once_and_know_ourselves(world: KafkaWorld) -> None:
    joins: list[str] = []

    class Counted(Member):
        async def join(self) -> Joined:
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
    assert joins == ["b", "b"], "a new generation would tell nobody anything"


async def test_a_leader_that_never_tells_of_us_is_asked_once(world: KafkaWorld) -> None:
    joins: list[int] = []

    class Misheard(Member):
        async def join(self) -> Joined:
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


async def test_between_the_two_steps_of_a_join_a_question_waits(world: KafkaWorld) -> None:
    """Kafka knows the new generation then, and calls ours an illegal one."""
    may_sync, halfway = asyncio.Event(), asyncio.Event()

    class Halted(Member):
        async def _ask(self, request: Any) -> Any:
            if type(request).__name__ == "SyncGroupRequest" and self._held.generation >= 0:
                halfway.set()
                await may_sync.wait()
            return await super()._ask(request)

    heard, other = Heard(), Heard()
    door = await joined(world, "a", FIRST_URL, heard, Halted)
    joining = asyncio.create_task(joined(world, "b", OTHER_URL, other))
    async with asyncio.timeout(10):
        await halfway.wait()
    questions = [asyncio.create_task(door.membership.still_ours(p)) for p in range(4)]
    _done, waiting = await asyncio.wait(questions, timeout=0.3)
    assert waiting == set(questions)
    may_sync.set()
    await joining
    await heard.until_owned(2)
    assert [await question for question in questions] == [p in heard.now.mine for p in range(4)]
    assert heard.losses == []


async def test_a_question_does_not_wait_for_ever(world: KafkaWorld) -> None:
    halfway = asyncio.Event()

    class Stuck(Member):
        async def _ask(self, request: Any) -> Any:
            if type(request).__name__ == "SyncGroupRequest" and self._held.generation >= 0:
                halfway.set()
                await asyncio.Event().wait()
            return await super()._ask(request)

    heard = Heard()
    door = await joined(world, "a", FIRST_URL, heard, Stuck)
    other = await world.door("b", session_timeout_s=SESSION_S)
    joining = asyncio.create_task(
        other.membership.join(OTHER_URL, lambda _told: None, lambda _why: None)
    )
    async with asyncio.timeout(10):
        await halfway.wait()
        with pytest.raises(KafkaUnavailable, match="settle"):
            await door.membership.still_ours(0)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_a_member_that_kafka_has_forgotten_says_so_and_joins_anew(world: KafkaWorld) -> None:
    heard, other = Heard(), Heard()
    door = await joined(world, "a", FIRST_URL, heard)
    await joined(world, "b", OTHER_URL, other)
    await heard.until_owned(2)
    member: Any = door.membership._member  # type: ignore[attr-defined]
    id = member._member_id
    await member.leave()  # as if its session had timed out: it does not know
    member._member_id = id
    assert "does not know us" in await heard.until_lost()
    assert not await door.membership.still_ours(0)
    await heard.until_owned(2)
    await other.until_owned(2)
    assert heard.now.mine | other.now.mine == ALL
    assert len(heard.losses) == 1


async def test_the_instance_id_of_another_is_not_taken_back(world: KafkaWorld) -> None:
    first, second = Heard(), Heard()
    door = await joined(world, "same", FIRST_URL, first)
    tries: list[int] = []
    member: Any = door.membership._member  # type: ignore[attr-defined]
    join = member.join

    async def counted() -> Joined:
        try:
            found: Joined = await join()
        except KafkaRefused as error:
            tries.append(error.code)
            raise
        return found

    member.join = counted
    newer = await joined(world, "same", OTHER_URL, second)
    assert "another process" in await first.until_lost()
    async with asyncio.timeout(20):
        while len(tries) < 3:
            assert await newer.membership.still_ours(0)
    assert set(tries) == {Code.FENCED_INSTANCE_ID}
    assert second.losses == []
    await newer.close()  # silent: its session ends
    await first.until_owned(4)
    assert len(first.losses) == 1


async def test_a_group_of_other_consumers_is_refused(world: KafkaWorld) -> None:
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
        with pytest.raises(ConfigurationError, match="no proxies"):
            await door.membership.join(FIRST_URL, heard.assigned, heard.lost)
    finally:
        await asyncio.to_thread(other.close)
    assert heard.events == []


async def test_a_session_that_kafka_does_not_allow_is_refused(world: KafkaWorld) -> None:
    heard = Heard()
    door = await world.door(session_timeout_s=0.01)
    with pytest.raises(ConfigurationError, match=r"group\.min\.session\.timeout\.ms"):
        await door.membership.join(FIRST_URL, heard.assigned, heard.lost)
    assert heard.events == []
