"""Assignment of partitions, and user data of the group."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbroker.core.routing import OwnedPartitions, assign, resolve_conflicts
from txbroker.kafka.protocol.generation import (
    GroupAssignment,
    ListedProxy,
    MemberMetadata,
    PreviousAssignment,
    SelfMetadata,
    assignment,
    decode_assignment,
    decode_metadata,
    encode_assignment,
    encode_metadata,
    from_runs,
    is_outdated,
    make_assignment,
    to_runs,
)

ALL = frozenset(range(4))
FIRST_URL = "http://127.0.0.1:1"

names = st.text("abcdef", min_size=1, max_size=3)
own = st.frozensets(st.integers(0, 20))
owned = st.dictionaries(names, own, max_size=6)


# --- shares --------------------------------------------------------------------------------------


@pytest.mark.rule(26)
@given(st.integers(1, 20), owned)
def test_shares_are_complete_even_and_sticky(
    partitions: int, owned: dict[str, frozenset[int]]
) -> None:
    shares = assign(partitions, owned)
    assert shares.keys() == owned.keys()
    if not owned:
        return
    given_out = [number for share in shares.values() for number in share]
    assert sorted(given_out) == list(range(partitions))
    sizes = {len(share) for share in shares.values()}
    assert max(sizes) - min(sizes) <= 1
    assert assign(partitions, shares) == shares


@given(st.integers(1, 20), owned.filter(bool), st.integers(1, 3))
def test_new_members_take_only_their_shares(
    partitions: int, owned: dict[str, frozenset[int]], count: int
) -> None:
    before = assign(partitions, owned)
    new = [f"z{number}" for number in range(count)]
    after = assign(partitions, {**before, **dict.fromkeys(new, frozenset())})
    moved = sum(len(before[name] - after[name]) for name in before)
    assert moved == sum(len(after[name]) for name in new)


@given(st.integers(1, 20), owned.filter(lambda owned: len(owned) > 1))
def test_only_partitions_of_leaving_member_move(
    partitions: int, owned: dict[str, frozenset[int]]
) -> None:
    before = assign(partitions, owned)
    gone = min(before)
    after = assign(partitions, {name: own for name, own in before.items() if name != gone})
    assert all(before[name] <= after[name] for name in after)


@pytest.mark.rule(26)
@given(st.dictionaries(names, st.builds(OwnedPartitions, own, st.integers(-1, 5)), max_size=5))
def test_newest_owner_wins_conflict(
    held: dict[str, OwnedPartitions],
) -> None:
    settled = resolve_conflicts(held)
    assert settled.keys() == held.keys()
    for number in frozenset[int]().union(*(one.partitions for one in held.values())):
        (holder,) = (name for name, own in settled.items() if number in own)
        claims = [one.generation for one in held.values() if number in one.partitions]
        assert held[holder].generation == max(claims)


# --- user data -----------------------------------------------------------------------


@given(own, st.integers(0, 25))
def test_runs_round_trip(own: frozenset[int], below: int) -> None:
    assert from_runs(to_runs(own), below) == {number for number in own if number < below}


def test_endless_run_is_limited() -> None:
    assert from_runs([(-(10**9), 10**18)], 3) == {0, 1, 2}


def test_metadata_round_trips() -> None:
    metadata = MemberMetadata(
        FIRST_URL, 3, [(0, 2), (5, 1)], 7, peer_url="http://peer", admin_url="http://admin"
    )
    assert decode_metadata(encode_metadata(metadata)) == metadata


def test_unknown_metadata_fields_are_ignored() -> None:
    metadata = {
        **msgspec.to_builtins(MemberMetadata(FIRST_URL, 3, [(0, 2)], 7)),
        "v": 9,
        "more": {"a": [1]},
    }
    assert decode_metadata(msgspec.json.encode(metadata)) == MemberMetadata(
        FIRST_URL, 3, [(0, 2)], 7
    )


def test_list_metadata_of_first_version_is_read() -> None:
    assert decode_metadata(b"[3, 0, 1]") == MemberMetadata("", 1, [(0, 2), (3, 1)])


NONSENSE = [
    b"", b"\xff", b"7", b"null", b"{", b'["a"]', b"[" * 100_000, b'"text"',
    b'{"url": 7, "record_version": "x", "owned": "all", "generation": null}',
    b'{"url": "' + b"x" * 5000 + b'", "record_version": -4, "owned": [[1]], "generation": 1.5}',
]  # fmt: skip


@pytest.mark.parametrize("data", NONSENSE, ids=lambda data: repr(data[:12]))
def test_malformed_metadata_own_nothing(data: bytes) -> None:
    assert decode_metadata(data) == MemberMetadata()
    assert decode_assignment(data) is None


@given(st.binary())
def test_any_bytes_decode(data: bytes) -> None:
    assert decode_metadata(data).record_version >= 1
    assert from_runs(decode_metadata(data).owned, 4) <= ALL
    assert decode_assignment(data) is None


@pytest.mark.rule(26)
def test_future_generation_takes_no_partitions() -> None:
    honest = {"a": MemberMetadata("ua", 2, [(0, 2)], 4), "b": MemberMetadata("ub", 2, [(2, 2)], 4)}
    greedy = MemberMetadata("uc", 2, [(0, 4)], 10**9)
    _group, shares = make_assignment(4, 5, {**honest, "c": greedy}, PreviousAssignment())
    assert shares["c"] < ALL
    assert len(shares["c"]) == 1
    assert shares["a"] <= {0, 1}
    assert shares["b"] <= {2, 3}


@pytest.mark.rule(27)
def test_assignment_names_all_owners() -> None:
    metadata = {
        "a": MemberMetadata("ua", 3, [(0, 4)], 1),
        "b": MemberMetadata("ub", 2),
        "c": MemberMetadata(),
    }
    group, shares = make_assignment(4, 2, metadata, PreviousAssignment())
    assert decode_assignment(encode_assignment(group)) == group
    assert group.record_version == 1
    known = assignment(4, shares["b"], group, SelfMetadata("b", "ub", 2))
    assert known.mine == shares["b"]
    assert [known.owners[p] for p in sorted(shares["a"])] == ["ua"] * len(shares["a"])
    assert [known.owners[p] for p in shares["b"]] == ["ub"] * len(shares["b"])
    assert [known.owners[p] for p in shares["c"]] == [""] * len(shares["c"])
    assert known.proxies == ("ua", "ub")
    assert known.record_version == 1


def test_own_data_override_assignment() -> None:
    group = GroupAssignment(
        [ListedProxy("a", "old", 3, [(0, 4)]), ListedProxy("b", "ub", 3, [(1, 1)])], 3
    )
    known = assignment(4, {0, 1, 99}, group, SelfMetadata("a", "new", 2))
    assert known.mine == {0, 1}
    assert known.owners == ("new", "new", "", "")
    assert known.proxies == ("new", "ub")
    assert known.record_version == 2


def test_assignment_with_old_metadata_is_outdated() -> None:
    group = GroupAssignment([ListedProxy("a", "ua", 3, [])], 3)
    assert not is_outdated(group, SelfMetadata("a", "ua", 3))
    assert is_outdated(group, SelfMetadata("a", "ub", 3))
    assert is_outdated(group, SelfMetadata("a", "ua", 2))
    assert is_outdated(group, SelfMetadata("a", "ua", 3, peer_url="pa"))
    assert is_outdated(group, SelfMetadata("a", "ua", 3, admin_url="oa"))
    assert is_outdated(group, SelfMetadata("b", "ua", 3))
    assert not is_outdated(None, SelfMetadata("a", "ua", 3)), (
        "an old leader never distributes metadata"
    )


@pytest.mark.rule(26)
def test_restarted_member_keeps_assigned_partitions() -> None:
    metadata = {name: MemberMetadata(f"u{name}", 2) for name in "abcd"}
    # Not the assignment without owners.
    had = {name: to_runs({6 - 2 * n, 7 - 2 * n}) for n, name in enumerate("abcd")}
    begun = {name: MemberMetadata(f"u{name}", 2, had[name], 2) for name in metadata}
    group, shares = make_assignment(8, 3, begun, PreviousAssignment())
    assert {name: to_runs(share) for name, share in shares.items()} == had
    for gone in "abcd":
        rest = {
            name: MemberMetadata(f"u{name}", 2, to_runs(shares[name]), 3)
            if name != gone
            else MemberMetadata("new", 2)
            for name in metadata
        }
        again, after = make_assignment(8, 4, rest, PreviousAssignment(3, group))
        assert after == shares
        assert {member.name: member.url for member in again.members}[gone] == "new"
    joined, after = make_assignment(8, 4, metadata, PreviousAssignment(3, group))
    assert after == shares
    assert joined == group


def test_newer_generation_of_member_counts() -> None:
    group, _shares = make_assignment(
        2, 1, {"a": MemberMetadata("ua", 2), "b": MemberMetadata("ub", 2)}, PreviousAssignment()
    )
    assert [member.owned for member in group.members] == [[(0, 1)], [(1, 1)]]
    metadata = {"a": MemberMetadata("ua", 2), "b": MemberMetadata("ub", 2, [(0, 1)], 6)}
    assert make_assignment(2, 7, metadata, PreviousAssignment(1, group))[1] == {"a": {1}, "b": {0}}
