"""Who gets which partition, and what a member does when another takes its place."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import Consumer
from hypothesis import given
from hypothesis import strategies as st
from kafka_world import KafkaWorld

from txbroker.errors import ConfigurationError
from txbroker.kafka.member import share_out

owned = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.frozensets(st.integers(0, 20)), max_size=6
)


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


@given(st.integers(1, 20), owned.filter(bool))
def test_a_member_that_comes_takes_no_more_than_its_share(
    partitions: int, owned: dict[str, frozenset[int]]
) -> None:
    before = share_out(partitions, owned)
    after = share_out(partitions, {**before, "zz": frozenset()})
    moved = sum(len(before[name] - after[name]) for name in before)
    assert moved == len(after["zz"])


async def test_a_second_process_with_our_instance_id_silences_us(world: KafkaWorld) -> None:
    first, second = await world.door("same"), await world.door("same")
    lost = asyncio.Event()
    owned: list[frozenset[int]] = []

    def assigned(partitions: frozenset[int]) -> None:
        owned.append(partitions)
        if not partitions:
            lost.set()

    await first.membership.join(assigned)
    await second.membership.join(lambda _partitions: None)
    async with asyncio.timeout(10):
        await lost.wait()
    assert owned == [frozenset(range(4)), frozenset()]
    assert not await first.membership.still_ours(0)
    assert await second.membership.still_ours(0)


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
    try:
        async with asyncio.timeout(20):
            while not assigned:
                await asyncio.to_thread(other.poll, 0.1)
        with pytest.raises(ConfigurationError, match="no proxies"):
            await door.membership.join(lambda _partitions: None)
    finally:
        await asyncio.to_thread(other.close)


async def test_a_session_that_kafka_does_not_allow_is_refused(world: KafkaWorld) -> None:
    door = await world.door(session_timeout_s=0.01)
    with pytest.raises(ConfigurationError, match="session"):
        await door.membership.join(lambda _partitions: None)
