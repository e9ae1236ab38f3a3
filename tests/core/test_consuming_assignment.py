"""The assignment of partitions to consumers: even, sticky, in two phases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbroker.core.consuming.assignment import Subscription, assign
from txbroker.core.records import Partition

TOPICS = "abc"
names = st.text("uvwxyz", min_size=1, max_size=2)
topic_sets = st.frozensets(st.sampled_from(TOPICS), max_size=3)
owned = st.frozensets(st.tuples(st.sampled_from(TOPICS), st.integers(0, 9)), max_size=12)
counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 10))
groups = st.dictionaries(
    names, st.builds(Subscription, topic_sets, owned, st.integers(-1, 5)), max_size=6
)

Members = dict[str, Subscription]
Shares = dict[str, frozenset[Partition]]


def joined(members: Members, shares: Shares, generation: int) -> Members:
    """The members after they released what they were not assigned, and took what they were."""
    return {
        name: Subscription(member.topics, shares[name], generation)
        for name, member in members.items()
    }


def settled(members: Members, partitions: dict[str, int], generation: int = 6) -> Shares:
    """The assignment after both phases."""
    shares = assign(members, partitions)
    return assign(joined(members, shares, generation), partitions)


def everything(members: Members, partitions: dict[str, int]) -> list[Partition]:
    """All partitions with a subscriber."""
    topics = frozenset[str]().union(*(member.topics for member in members.values()))
    return sorted((topic, n) for topic in topics for n in range(partitions.get(topic, 0)))


def fresh(partitions: dict[str, int], *names: str) -> Members:
    """Members that subscribe to everything and own nothing."""
    return dict.fromkeys(names, Subscription(frozenset(partitions)))


@given(groups, counts)
def test_second_generation_is_complete_and_even(
    members: Members, partitions: dict[str, int]
) -> None:
    shares = settled(members, partitions)
    assert shares.keys() == members.keys()
    given_out = [one for share in shares.values() for one in share]
    assert sorted(given_out) == everything(members, partitions)
    for name, member in members.items():
        assert {topic for topic, _ in shares[name]} <= member.topics
        for other in members:
            if members[other].topics == member.topics:
                assert abs(len(shares[name]) - len(shares[other])) <= 1
    assert assign(joined(members, shares, 7), partitions) == shares, "it stays"


@pytest.mark.rule(32)
@given(groups, counts)
def test_partition_in_use_is_given_to_nobody_else(
    members: Members, partitions: dict[str, int]
) -> None:
    for name, share in assign(members, partitions).items():
        for other, member in members.items():
            if other == name:
                continue
            mine = members[name].generation if share & members[name].owned else -2
            # Its other owner had lost contact before this one got it.
            assert all(
                one in members[name].owned and mine >= member.generation
                for one in share & member.owned
            )


@given(groups, counts)
def test_nothing_is_withheld_without_cause(members: Members, partitions: dict[str, int]) -> None:
    shares = assign(members, partitions)
    given_out = frozenset[Partition]().union(*shares.values())
    in_use = frozenset[Partition]().union(*(member.owned for member in members.values()))
    assert set(everything(members, partitions)) - given_out <= in_use


@given(counts, st.integers(1, 5), st.integers(1, 3))
def test_new_members_take_only_their_shares(
    partitions: dict[str, int], count: int, more: int
) -> None:
    old = fresh(partitions, *(f"m{n}" for n in range(count)))
    before = joined(old, settled(old, partitions), 6)
    new = fresh(partitions, *(f"z{n}" for n in range(more)))
    after = settled({**before, **new}, partitions, 7)
    moved = sum(len(member.owned - after[name]) for name, member in before.items())
    assert moved == sum(len(after[name]) for name in new)


@given(counts, st.integers(2, 6))
def test_only_partitions_of_leaving_member_move(partitions: dict[str, int], count: int) -> None:
    members = fresh(partitions, *(f"m{n}" for n in range(count)))
    before = joined(members, settled(members, partitions), 6)
    gone = before.pop("m0")
    after = assign(before, partitions)
    assert all(member.owned <= after[name] for name, member in before.items())
    assert gone.owned <= frozenset[Partition]().union(*after.values()), "free at once"


def test_newest_owner_keeps_partition() -> None:
    topics, one = frozenset("a"), frozenset({("a", 0)})
    members = {"m": Subscription(topics, one, 3), "n": Subscription(topics, one, 4)}
    assert assign(members, {"a": 1}) == {"m": frozenset(), "n": one}


def test_moving_partition_waits_for_its_owner() -> None:
    """A member joins one that owns everything: two generations."""
    partitions = {"a": 4}
    members = fresh(partitions, "m", "n")
    members["m"] = Subscription(frozenset("a"), frozenset(everything(members, partitions)), 1)
    first = assign(members, partitions)
    assert first == {"m": {("a", 0), ("a", 1)}, "n": frozenset()}
    unreleased = {**members, "m": Subscription(frozenset("a"), members["m"].owned, 2)}
    assert assign(unreleased, partitions) == first, "it has not released any"
    assert assign(joined(members, first, 2), partitions) == {**first, "n": {("a", 2), ("a", 3)}}


def test_unsubscribed_partition_waits_for_its_owner() -> None:
    held = frozenset({("a", 0)})
    members = {
        "m": Subscription(frozenset("b"), held, 1),
        "n": Subscription(frozenset("ab")),
    }
    assert assign(members, {"a": 2, "b": 0}) == {"m": frozenset(), "n": {("a", 1)}}


def test_each_topic_is_divided() -> None:
    """One topic may have all the traffic."""
    shares = settled(fresh({"a": 4, "b": 8}, "m", "n"), {"a": 4, "b": 8})
    for share in shares.values():
        assert sorted(topic for topic, _ in share) == ["a"] * 2 + ["b"] * 4


def test_members_with_one_topic_leave_others_to_the_rest() -> None:
    members = {"m": Subscription(frozenset("ab")), "n": Subscription(frozenset("a"))}
    shares = settled(members, {"a": 4, "b": 4})
    assert {name: len(share) for name, share in shares.items()} == {"m": 4, "n": 4}
    assert {topic for topic, _ in shares["m"]} == {"b"}
