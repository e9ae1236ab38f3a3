"""The user data of the proxies' consumer group: metadata of members, and the assignment.

Both are JSON objects in Kafka's consumer protocol. They are decoded leniently, because the other
side may be another version: unknown fields are ignored, and the first version sent a bare list of
its partitions as metadata, and no user data in assignments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from txbroker.core.routing import UNKNOWN_OWNER, OwnedPartitions, assign, owners, resolve_conflicts
from txbroker.door.protocols import Assignment

_FORMAT = 1
_FIRST_RECORD_VERSION = 1
_URL_LENGTH_MAX = 2048
_DECODE_ERRORS = (ValueError, msgspec.DecodeError, RecursionError)
_T = TypeVar("_T")

NumberRuns = list[tuple[int, int]]
"""Numbers as `(first, count)`: Kafka stores the user data of all members in one record."""


class MemberMetadata(Struct, frozen=True):
    """The metadata with which a member joins.

    Attributes:
        url: its URL for clients, `UNKNOWN_OWNER` if unknown.
        record_version: the newest record version that it supports.
        owned: the half partitions that it owns.
        generation: the generation of that assignment.
        asks: number of rebalances that it requested. The coordinator rebalances if a member's
            metadata change; otherwise a restarted member gets the old assignment.
        v: version of this format.
        peer_url: its URL for other proxies, `UNKNOWN_OWNER` if it is `url`.
        admin_url: its URL for operators, `UNKNOWN_OWNER` if it is `url`.
    """

    url: str = UNKNOWN_OWNER
    record_version: int = _FIRST_RECORD_VERSION
    owned: NumberRuns = field(default_factory=list)
    generation: int = -1
    asks: int = 0
    v: int = _FORMAT
    peer_url: str = UNKNOWN_OWNER
    admin_url: str = UNKNOWN_OWNER


class ListedProxy(Struct, frozen=True):
    """A member in the group's assignment."""

    name: str
    url: str
    record_version: int
    owned: NumberRuns
    peer_url: str = UNKNOWN_OWNER
    admin_url: str = UNKNOWN_OWNER


class GroupAssignment(Struct, frozen=True):
    """The assignment, which the group's leader sends to all members."""

    members: list[ListedProxy]
    record_version: int
    v: int = _FORMAT


def encode_metadata(metadata: MemberMetadata) -> bytes:
    """Return a member's metadata as user data."""
    return msgspec.json.encode(metadata)


def decode_metadata(data: bytes | None) -> MemberMetadata:
    """Decode a member's metadata. Malformed fields get the values of the first version.

    Any client with the right may join, so a malformed member must not break the assignment.
    """
    try:
        fields = msgspec.json.decode(data or b"")
    except _DECODE_ERRORS:
        return MemberMetadata()
    if isinstance(fields, list):
        return MemberMetadata(owned=to_runs(_take(fields, list[int], [])))
    if not isinstance(fields, dict):
        return MemberMetadata()
    return MemberMetadata(
        _url(fields.get("url")),
        max(_take(fields.get("record_version"), int, 0), _FIRST_RECORD_VERSION),
        _take(fields.get("owned"), NumberRuns, []),
        _take(fields.get("generation"), int, -1),
        peer_url=_url(fields.get("peer_url")),
        admin_url=_url(fields.get("admin_url")),
    )


def _url(value: object) -> str:
    url = _take(value, str, UNKNOWN_OWNER)
    return url if len(url) <= _URL_LENGTH_MAX else UNKNOWN_OWNER


def _take(value: object, kind: type[_T], default: _T) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return default


class PreviousAssignment(NamedTuple):
    """The last assignment that the leader received, and its generation."""

    generation: int = -1
    group: GroupAssignment | None = None


def make_assignment(
    partitions: int,
    generation: int,
    metadata: Mapping[str, MemberMetadata],
    last: PreviousAssignment,
) -> tuple[GroupAssignment, dict[str, frozenset[int]]]:
    """Assign `partitions` to members; return the assignment to send, and each member's share."""
    before = (
        {member.name: member for member in last.group.members} if last.group is not None else {}
    )
    held: dict[str, OwnedPartitions[int]] = {}
    for name, member in metadata.items():
        owned, since = member.owned, member.generation
        if since >= generation:
            # A future generation has assigned nothing yet.
            owned, since = [], -1
        if since < 0 and not owned and name in before:
            # It was restarted, and a rebalance began before it received its assignment.
            owned, since = before[name].owned, last.generation
        held[name] = OwnedPartitions(from_runs(owned, partitions), since)
    shares = assign(partitions, resolve_conflicts(held))
    members = [
        ListedProxy(
            name,
            member.url,
            member.record_version,
            to_runs(shares[name]),
            member.peer_url,
            member.admin_url,
        )
        for name, member in sorted(metadata.items())
    ]
    lowest = min(
        (member.record_version for member in metadata.values()), default=_FIRST_RECORD_VERSION
    )
    return GroupAssignment(members, lowest), shares


def encode_assignment(group: GroupAssignment) -> bytes:
    """Return an assignment as user data."""
    return msgspec.json.encode(group)


def decode_assignment(data: bytes | None) -> GroupAssignment | None:
    """Decode an assignment; None if it is missing or malformed."""
    try:
        return msgspec.json.decode(data or b"", type=GroupAssignment)
    except _DECODE_ERRORS:
        return None


class SelfMetadata(Struct, frozen=True):
    """This member's own metadata."""

    name: str
    url: str
    record_version: int
    peer_url: str = UNKNOWN_OWNER
    admin_url: str = UNKNOWN_OWNER


def is_outdated(group: GroupAssignment | None, me: SelfMetadata) -> bool:
    """Return whether the assignment has old metadata of this member, which a rebalance updates.

    False for a leader that sends none.
    """
    if group is None:
        return False
    return not any(
        (member.name, member.url, member.record_version, member.peer_url, member.admin_url)
        == (me.name, me.url, me.record_version, me.peer_url, me.admin_url)
        for member in group.members
    )


def assignment(
    partitions: int, mine: Iterable[int], group: GroupAssignment | None, me: SelfMetadata
) -> Assignment:
    """Return the owners of all partitions; for this member, its own data take precedence."""
    own = frozenset(number for number in mine if 0 <= number < partitions)
    members = [
        member for member in (group.members if group is not None else []) if member.name != me.name
    ]
    shares = {member.name: from_runs(member.owned, partitions) - own for member in members}
    urls = {member.name: member.url for member in members} | {me.name: me.url}
    lowest = _FIRST_RECORD_VERSION if group is None else group.record_version
    return Assignment(
        own,
        owners(partitions, {**shares, me.name: own}, urls),
        tuple(urls[name] for name in sorted(urls) if urls[name] != UNKNOWN_OWNER),
        min(lowest, me.record_version),
        {member.url: member.peer_url for member in members if member.peer_url != UNKNOWN_OWNER},
        {member.url: member.admin_url for member in members if member.admin_url != UNKNOWN_OWNER},
    )


def to_runs(numbers: Iterable[int]) -> NumberRuns:
    """Return numbers as runs, in order."""
    made: NumberRuns = []
    for number in sorted(set(numbers)):
        if made and sum(made[-1]) == number:
            made[-1] = (made[-1][0], made[-1][1] + 1)
        else:
            made.append((number, 1))
    return made


def from_runs(runs: Sequence[tuple[int, int]], below: int) -> frozenset[int]:
    """Return the numbers in runs, from 0 up to, not including, `below`."""
    return frozenset(
        number
        for first, count in runs
        for number in range(max(first, 0), min(first + count, below))
    )
