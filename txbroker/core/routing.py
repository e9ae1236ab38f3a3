"""Routing: transaction ids, the hashes that choose partitions, and the proxies that own these.

An id is 26 characters: 16 bytes in Crockford's base32, the half partition (2 bytes), milliseconds
since 1970 (6 bytes) and randomness (8 bytes). With the partition in the id, any proxy knows the
owner of a transaction without a look-up; with the time in it, a prepare that is repeated too late
is recognized by the records alone.
"""

import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from struct import unpack_from
from typing import Generic, NamedTuple, Protocol, TypeVar
from zlib import crc32

from txbroker.core.records import Message
from txbroker.errors import BadId, BadRequest

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 26
PARTITION_MAX = 0xFFFF
TIME_MAX_MS = (1 << 48) - 1
# Two characters at a time: 13 table look-ups instead of 26 divisions.
_PAIRS = tuple(a + b for a in ALPHABET for b in ALPHABET)
_20_BITS = (1 << 20) - 1
# For parsing, int(text, 32) is fastest, after translating Crockford's digits to Python's.
_TO_PYTHON = str.maketrans(ALPHABET, "0123456789abcdefghijklmnopqrstuv")
_is_base32 = re.compile(f"[{ALPHABET}]*").fullmatch


class IdParts(NamedTuple):
    """The half partition, time and randomness of a transaction id."""

    partition: int
    time_ms: int
    randomness: int


def make_id(partition: int, time_ms: int, randomness: int) -> str:
    """Return the id of `partition` at `time_ms` with 64 bits of `randomness`; raise ValueError if
    one does not fit its bytes."""
    if not 0 <= partition <= PARTITION_MAX:
        raise ValueError(f"partition {partition} does not fit an id")
    if not 0 <= time_ms <= TIME_MAX_MS:
        raise ValueError(f"time {time_ms} ms does not fit an id")
    if not 0 <= randomness < 1 << 64:
        raise ValueError("randomness is more than 64 bits")
    # 70 bits and 60, in pieces of 20: shifts of small numbers cost a half of those of large ones.
    upper = partition << 52 | time_ms << 4 | randomness >> 60
    a, b, c = upper >> 40, upper >> 20 & _20_BITS, upper & _20_BITS
    d, e, f = randomness >> 40 & _20_BITS, randomness >> 20 & _20_BITS, randomness & _20_BITS
    two = _PAIRS
    return (
        f"{two[a >> 20]}{two[a >> 10 & 1023]}{two[a & 1023]}{two[b >> 10]}{two[b & 1023]}"
        f"{two[c >> 10]}{two[c & 1023]}{two[d >> 10]}{two[d & 1023]}{two[e >> 10]}{two[e & 1023]}"
        f"{two[f >> 10]}{two[f & 1023]}"
    )


@lru_cache(maxsize=2_000)  # a call and its records parse the same id half a dozen times
def parse_id(text: str) -> IdParts:
    """Return the parts of a transaction id; raise ValueError if it is none."""
    if len(text) != LENGTH:
        raise ValueError(f"a transaction id has {LENGTH} characters, not {len(text)}")
    if not _is_base32(text):
        raise ValueError(f"{text!r} is not Crockford base32 in upper case")
    number = int(text.translate(_TO_PYTHON), 32)
    if number >> 128:
        raise ValueError("a transaction id has 128 bits, this one has more")
    return IdParts(number >> 112, number >> 64 & TIME_MAX_MS, number & (1 << 64) - 1)


def numbers_of(ids: Iterable[str]) -> list[int]:
    """Return valid transaction ids as numbers of 128 bits."""
    return [int(text, 32) for text in " ".join(ids).translate(_TO_PYTHON).split()]


def dedup_randomness(group: str, dedup_key: str) -> int:
    """Return the 64 bits that a client's `dedup_key` gives in place of randomness."""
    name = group.encode()
    # The length separates group and key, with any characters in them.
    parts = len(name).to_bytes(4, "big") + name + dedup_key.encode()
    digest = hashlib.blake2b(parts, digest_size=8, person=b"txb-dedup")
    return int.from_bytes(digest.digest(), "big")


# --- hashes ----------------------------------------------------------------------------------


def murmur2(data: bytes) -> int:
    """Return the 31-bit hash by which Kafka's Java client partitions keys.

    Source: MurmurHash2 by Austin Appleby (public domain) with Kafka's seed; the sign bit is
    masked as the client's `toPositive` does.
    """
    m = 0x5BD1E995
    length = len(data)
    h = 0x9747B28C ^ length
    # Runs in every prepare with a key: reading all words at once is fastest.
    for k in unpack_from(f"<{length >> 2}I", data):
        k = k * m & 0xFFFFFFFF
        h = (h * m ^ (k ^ k >> 24) * m) & 0xFFFFFFFF
    if length & 3:
        h = (h ^ int.from_bytes(data[length & ~3 :], "little")) * m & 0xFFFFFFFF
    h = (h ^ h >> 13) * m & 0xFFFFFFFF
    return (h ^ h >> 15) & 0x7FFFFFFF


def order_hash(order_key: str | None, topic: str, key: bytes | None) -> int | None:
    """Return the hash that chooses a transaction's half partition.

    Transactions with one `order_key` share a half partition and so keep their order. Without it the
    topic and key of the first message are used; without a key, None: there is no order to keep, and
    any partition will do.
    """
    if order_key is not None:
        return murmur2(b"o\0" + order_key.encode())
    if key is not None:
        return murmur2(b"k\0" + topic.encode() + b"\0" + key)
    return None


def order_mark(order_key: str | None, topic: str, key: bytes | None) -> int | None:
    """Return a hash equal for transactions whose order is kept; None without an order.

    It is of the same key as `order_hash`, at a tenth of the cost. Keys that collide wait for one
    another needlessly. It is stored in snapshots.
    """
    if order_key is not None:
        return crc32(b"o\0" + order_key.encode())
    if key is not None:
        return crc32(b"k\0" + topic.encode() + b"\0" + key)
    return None


def dedup_hash(group: str, dedup_key: str) -> int:
    """Return the hash that chooses the half partition of a transaction with a `dedup_key`."""
    return murmur2(b"d\0" + group.encode() + b"\0" + dedup_key.encode())


# --- half partitions -------------------------------------------------------------------------


class Routed(Protocol):
    """The fields of a prepare request that routing uses."""

    @property
    def group(self) -> str: ...
    @property
    def messages(self) -> Sequence[Message]: ...
    @property
    def id(self) -> str | None: ...
    @property
    def dedup_key(self) -> str | None: ...
    @property
    def order_key(self) -> str | None: ...


def partition_of(id: str, partitions: int) -> int:
    """Return the half partition that an id names; raise BadId if it is no id or there is no such
    partition."""
    try:
        partition = parse_id(id).partition
    except ValueError as error:
        raise BadId(f"{id!r} is not a transaction id: {error}") from None
    if partition >= partitions:
        raise BadId(
            f"the id names half partition {partition}, but there are {partitions}: use the id that "
            "the prepare returned"
        )
    return partition


def home(request: Routed, partitions: int) -> int | None:
    """Return the half partition of a transaction, None for any; raise BadRequest without a message,
    BadId if the id names another partition than the order key."""
    if not request.messages:
        raise BadRequest("messages is empty: a transaction needs at least one message")
    first = request.messages[0]
    order = order_hash(request.order_key, first.topic, first.key)
    if request.order_key is None and request.dedup_key is not None:
        # Before the message's key: a dedup_key must reach its earlier use.
        order = dedup_hash(request.group, request.dedup_key)
    hashed = None if order is None else order % partitions
    if request.id is None:
        return hashed
    named = partition_of(request.id, partitions)
    if hashed is not None and hashed != named:
        raise BadId(
            f"the id names half partition {named}, its order key half partition {hashed}: leave "
            "one of them out",
            id=request.id,
        )
    return named


# --- the assignment of half partitions to proxies ----------------------------------------------

UNKNOWN_OWNER = ""
"""The URL of an unknown owner or proxy."""

_P = TypeVar("_P", bound=Hashable)
"""A partition: a number, or a topic and a number."""


class OwnedPartitions(NamedTuple, Generic[_P]):
    """The partitions that a member owns, and the generation in which they were assigned."""

    partitions: frozenset[_P] = frozenset()
    generation: int = -1


def resolve_conflicts(held: Mapping[str, OwnedPartitions[_P]]) -> dict[str, frozenset[_P]]:
    """Return the owned partitions of each member, every partition with its newest owner only: the
    other members had lost contact when it was reassigned."""
    taken: set[_P] = set()
    resolved: dict[str, frozenset[_P]] = {}
    for name in sorted(held, key=lambda name: (-held[name].generation, name)):
        resolved[name] = held[name].partitions - taken
        taken |= resolved[name]
    return resolved


def assign(partitions: int, owned: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Assign partitions evenly to members, moving as few as possible. Assignments differ by at most
    one; the members that own most get the extra ones. With more members than partitions some get
    none."""
    return distribute(range(partitions), owned, {})


def distribute(
    partitions: Sequence[_P], owned: Mapping[str, frozenset[_P]], loads: Mapping[str, int]
) -> dict[str, frozenset[_P]]:
    """Assign partitions to members that have other ones already, so that totals are even.

    Args:
        partitions: in order: a member keeps its first ones, and gets free ones in blocks.
        owned: of each member; it keeps as many of them as possible.
        loads: number of other partitions of each member, 0 if missing.
    """
    if not owned:
        return {}
    place = {one: number for number, one in enumerate(partitions)}
    had = {name: own & place.keys() for name, own in owned.items()}
    had_before = {name: loads.get(name, 0) for name in had}
    level = _level(sorted(had_before.values()), len(partitions))
    quotas = {name: max(0, level - load) for name, load in had_before.items()}
    names = sorted(had, key=lambda name: (quotas[name] - len(had[name]), name))
    more = len(partitions) - sum(quotas.values())
    for name in [name for name in names if had_before[name] <= level][:more]:
        quotas[name] += 1
    free = set(partitions)
    shares: dict[str, set[_P]] = {}
    for name in names:
        kept = sorted(had[name] & free, key=place.__getitem__)[: quotas[name]]
        shares[name] = set(kept)
        free.difference_update(kept)
    rest = sorted(free, key=place.__getitem__)
    for name in names:
        count = quotas[name] - len(shares[name])
        shares[name].update(rest[:count])
        rest = rest[count:]
    return {name: frozenset(share) for name, share in shares.items()}


def _level(loads: Sequence[int], count: int) -> int:
    """Return the highest even level that `count` more can raise the lowest of sorted loads to."""
    level = total = 0
    for number, load in enumerate(loads, 1):
        if number > 1 and level < load:
            break
        total += load
        level = (count + total) // number
    return level


def owners(
    partitions: int, shares: Mapping[str, frozenset[int]], urls: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the URL of each partition's owner, `UNKNOWN_OWNER` if unknown."""
    result = [UNKNOWN_OWNER] * partitions
    for name, share in shares.items():
        for number in share:
            if number < partitions:
                result[number] = urls.get(name, UNKNOWN_OWNER)
    return tuple(result)
