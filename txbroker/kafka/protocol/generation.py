"""What proxies tell one another in a generation of their group.

Two JSON objects travel as user data of Kafka's consumer protocol: what a member says when it
joins, and what the leader tells all. Both are read leniently, because the other side may be
another build: unknown fields are passed over, and the build before this one said a bare list of
the partitions that it owned, and told nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from txbroker.core.assignor import NOBODY, OwnedPartitions, assign, owners, resolve_conflicts
from txbroker.door.protocols import Assignment

_FORMAT = 1
_FIRST_RECORD_VERSION = 1
_URL_LENGTH_MAX = 2048
_NONSENSE = (ValueError, msgspec.DecodeError, RecursionError)
_T = TypeVar("_T")

NumberRuns = list[tuple[int, int]]
"""Numbers as `(first, count)`: Kafka keeps what all members say and are told in one record."""


class MemberMetadata(Struct, frozen=True):
    """What a member says when it joins.

    Attributes:
        url: where it is reached, `NOBODY` if it does not say.
        record_version: the newest that it understands.
        owned: the half partitions that it has.
        generation: in which it was given those.
        peer_url: where it takes other proxies' calls, `NOBODY` where that is `url`.
        asks: counts its wishes for a new generation. The coordinator makes one when a member's
            words change, and otherwise answers a restarted member with the old one.
        v: of this format.
        admin_url: where it takes operators' calls, `NOBODY` where that is `url`.
    """

    url: str = NOBODY
    record_version: int = _FIRST_RECORD_VERSION
    owned: NumberRuns = field(default_factory=list)
    generation: int = -1
    asks: int = 0
    v: int = _FORMAT
    peer_url: str = NOBODY
    admin_url: str = NOBODY


class GroupMember(Struct, frozen=True):
    """A member as the leader tells of it."""

    name: str
    url: str
    record_version: int
    owned: NumberRuns
    peer_url: str = NOBODY
    admin_url: str = NOBODY


class GroupAssignment(Struct, frozen=True):
    """What the leader tells all members."""

    members: list[GroupMember]
    record_version: int
    v: int = _FORMAT


def encode_metadata(said: MemberMetadata) -> bytes:
    """Return what a member says as its user data."""
    return msgspec.json.encode(said)


def decode_metadata(data: bytes | None) -> MemberMetadata:
    """Read what a member says; of nonsense nothing is left, and it is taken for the first build.

    A member may be anything that has the right to join, so one must not spoil the others' shares.
    """
    try:
        found = msgspec.json.decode(data or b"")
    except _NONSENSE:
        return MemberMetadata()
    if isinstance(found, list):
        return MemberMetadata(owned=to_runs(_take(found, list[int], [])))
    if not isinstance(found, dict):
        return MemberMetadata()
    return MemberMetadata(
        _url(found.get("url")),
        max(_take(found.get("record_version"), int, 0), _FIRST_RECORD_VERSION),
        _take(found.get("owned"), NumberRuns, []),
        _take(found.get("generation"), int, -1),
        peer_url=_url(found.get("peer_url")),
        admin_url=_url(found.get("admin_url")),
    )


def _url(value: object) -> str:
    url = _take(value, str, NOBODY)
    return url if len(url) <= _URL_LENGTH_MAX else NOBODY


def _take(value: object, kind: type[_T], otherwise: _T) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return otherwise


class PreviousAssignment(NamedTuple):
    """What the leader knew before: what all were told last, and in which generation."""

    generation: int = -1
    told: GroupAssignment | None = None


def make_assignment(
    partitions: int, generation: int, said: Mapping[str, MemberMetadata], last: PreviousAssignment
) -> tuple[GroupAssignment, dict[str, frozenset[int]]]:
    """Share `partitions` out among members; return what to tell all, and each one's share."""
    before = {seat.name: seat for seat in last.told.members} if last.told is not None else {}
    held: dict[str, OwnedPartitions] = {}
    for name, one in said.items():
        owned, since = one.owned, one.generation
        if since >= generation:
            # Nobody was given anything in a generation to come.
            owned, since = [], -1
        if since < 0 and not owned and name in before:
            # It was restarted, and is in the middle of a rebalance before it heard what it has.
            owned, since = before[name].owned, last.generation
        held[name] = OwnedPartitions(from_runs(owned, partitions), since)
    shares = assign(partitions, resolve_conflicts(held))
    seats = [
        GroupMember(
            name, one.url, one.record_version, to_runs(shares[name]), one.peer_url, one.admin_url
        )
        for name, one in sorted(said.items())
    ]
    lowest = min((one.record_version for one in said.values()), default=_FIRST_RECORD_VERSION)
    return GroupAssignment(seats, lowest), shares


def encode_assignment(told: GroupAssignment) -> bytes:
    """Return what the leader tells as the assignments' user data."""
    return msgspec.json.encode(told)


def decode_assignment(data: bytes | None) -> GroupAssignment | None:
    """Read what the leader tells; None where it tells nothing that we understand."""
    try:
        return msgspec.json.decode(data or b"", type=GroupAssignment)
    except _NONSENSE:
        return None


class SelfMetadata(Struct, frozen=True):
    """What a member knows about itself."""

    name: str
    url: str
    record_version: int
    peer_url: str = NOBODY
    admin_url: str = NOBODY


def is_outdated(told: GroupAssignment | None, me: SelfMetadata) -> bool:
    """Say whether the others were told something else about us than what is so: then only a new
    generation lets them know. A leader that tells nothing cannot be helped by one."""
    if told is None:
        return False
    return not any(
        (seat.name, seat.url, seat.record_version, seat.peer_url, seat.admin_url)
        == (me.name, me.url, me.record_version, me.peer_url, me.admin_url)
        for seat in told.members
    )


def assignment(
    partitions: int, mine: Iterable[int], told: GroupAssignment | None, me: SelfMetadata
) -> Assignment:
    """Return who owns what, as far as the leader told; about ourselves we know better."""
    own = frozenset(number for number in mine if 0 <= number < partitions)
    seats = [seat for seat in (told.members if told is not None else []) if seat.name != me.name]
    shares = {seat.name: from_runs(seat.owned, partitions) - own for seat in seats}
    urls = {seat.name: seat.url for seat in seats} | {me.name: me.url}
    lowest = _FIRST_RECORD_VERSION if told is None else told.record_version
    return Assignment(
        own,
        owners(partitions, {**shares, me.name: own}, urls),
        tuple(urls[name] for name in sorted(urls) if urls[name] != NOBODY),
        min(lowest, me.record_version),
        {seat.url: seat.peer_url for seat in seats if seat.peer_url != NOBODY},
        {seat.url: seat.admin_url for seat in seats if seat.admin_url != NOBODY},
    )


def to_runs(found: Iterable[int]) -> NumberRuns:
    """Return from_runs as to_runs, in order."""
    made: NumberRuns = []
    for number in sorted(set(found)):
        if made and sum(made[-1]) == number:
            made[-1] = (made[-1][0], made[-1][1] + 1)
        else:
            made.append((number, 1))
    return made


def from_runs(found: Sequence[tuple[int, int]], below: int) -> frozenset[int]:
    """Return what the to_runs name of the from_runs from 0 up to, not including, `below`."""
    return frozenset(
        number
        for first, count in found
        for number in range(max(first, 0), min(first + count, below))
    )
