"""Who gets which partition, and what a member does when another takes its place."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from kafka_world import KafkaWorld

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
