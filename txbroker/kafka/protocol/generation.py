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

from txbroker.core.assignor import NOBODY, Held, owners, settle, share_out
from txbroker.door.protocols import Assignment

_FORMAT = 1
_FIRST_RECORD_VERSION = 1
_URL_LENGTH_MAX = 2048
_NONSENSE = (ValueError, msgspec.DecodeError, RecursionError)
_T = TypeVar("_T")

Runs = list[tuple[int, int]]
"""Numbers as `(first, count)`: Kafka keeps what all members say and are told in one record."""


class Said(Struct, frozen=True):
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
    owned: Runs = field(default_factory=list)
    generation: int = -1
    asks: int = 0
    v: int = _FORMAT
    peer_url: str = NOBODY
    admin_url: str = NOBODY


class Seat(Struct, frozen=True):
    """A member as the leader tells of it."""

    name: str
    url: str
    record_version: int
    owned: Runs
    peer_url: str = NOBODY
    admin_url: str = NOBODY


class Told(Struct, frozen=True):
    """What the leader tells all members."""

    members: list[Seat]
    record_version: int
    v: int = _FORMAT


def encode_said(said: Said) -> bytes:
    """Return what a member says as its user data."""
    return msgspec.json.encode(said)


def decode_said(data: bytes | None) -> Said:
    """Read what a member says; of nonsense nothing is left, and it is taken for the first build.

    A member may be anything that has the right to join, so one must not spoil the others' shares.
    """
    try:
        found = msgspec.json.decode(data or b"")
    except _NONSENSE:
        return Said()
    if isinstance(found, list):
        return Said(owned=runs(_take(found, list[int], [])))
    if not isinstance(found, dict):
        return Said()
    return Said(
        _url(found.get("url")),
        max(_take(found.get("record_version"), int, 0), _FIRST_RECORD_VERSION),
        _take(found.get("owned"), Runs, []),
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


class Last(NamedTuple):
    """What the leader knew before: what all were told last, and in which generation."""

    generation: int = -1
    told: Told | None = None


def make_told(
    partitions: int, generation: int, said: Mapping[str, Said], last: Last
) -> tuple[Told, dict[str, frozenset[int]]]:
    """Share `partitions` out among members; return what to tell all, and each one's share."""
    before = {seat.name: seat for seat in last.told.members} if last.told is not None else {}
    held: dict[str, Held] = {}
    for name, one in said.items():
        owned, since = one.owned, one.generation
        if since >= generation:
            # Nobody was given anything in a generation to come.
            owned, since = [], -1
        if since < 0 and not owned and name in before:
            # It was restarted, and is in the middle of a rebalance before it heard what it has.
            owned, since = before[name].owned, last.generation
        held[name] = Held(numbers(owned, partitions), since)
    shares = share_out(partitions, settle(held))
    seats = [
        Seat(name, one.url, one.record_version, runs(shares[name]), one.peer_url, one.admin_url)
        for name, one in sorted(said.items())
    ]
    lowest = min((one.record_version for one in said.values()), default=_FIRST_RECORD_VERSION)
    return Told(seats, lowest), shares


def encode_told(told: Told) -> bytes:
    """Return what the leader tells as the assignments' user data."""
    return msgspec.json.encode(told)


def decode_told(data: bytes | None) -> Told | None:
    """Read what the leader tells; None where it tells nothing that we understand."""
    try:
        return msgspec.json.decode(data or b"", type=Told)
    except _NONSENSE:
        return None


class Me(Struct, frozen=True):
    """What a member knows about itself."""

    name: str
    url: str
    record_version: int
    peer_url: str = NOBODY
    admin_url: str = NOBODY


def is_outdated(told: Told | None, me: Me) -> bool:
    """Say whether the others were told something else about us than what is so: then only a new
    generation lets them know. A leader that tells nothing cannot be helped by one."""
    if told is None:
        return False
    return not any(
        (seat.name, seat.url, seat.record_version, seat.peer_url, seat.admin_url)
        == (me.name, me.url, me.record_version, me.peer_url, me.admin_url)
        for seat in told.members
    )


def assignment(partitions: int, mine: Iterable[int], told: Told | None, me: Me) -> Assignment:
    """Return who owns what, as far as the leader told; about ourselves we know better."""
    own = frozenset(number for number in mine if 0 <= number < partitions)
    seats = [seat for seat in (told.members if told is not None else []) if seat.name != me.name]
    shares = {seat.name: numbers(seat.owned, partitions) - own for seat in seats}
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


def runs(found: Iterable[int]) -> Runs:
    """Return numbers as runs, in order."""
    made: Runs = []
    for number in sorted(set(found)):
        if made and sum(made[-1]) == number:
            made[-1] = (made[-1][0], made[-1][1] + 1)
        else:
            made.append((number, 1))
    return made


def numbers(found: Sequence[tuple[int, int]], below: int) -> frozenset[int]:
    """Return what the runs name of the numbers from 0 up to, not including, `below`."""
    return frozenset(
        number
        for first, count in found
        for number in range(max(first, 0), min(first + count, below))
    )
