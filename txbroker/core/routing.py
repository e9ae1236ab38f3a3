"""Where a transaction and its messages go: ids, and the hashes that choose partitions.

An id is 26 characters that say where a transaction's half message lives: 16 bytes in Crockford's
base32, the half partition (2 bytes), milliseconds since 1970 (6 bytes) and randomness (8 bytes).
Because the partition is in the id, any proxy knows the owner of a transaction without a look-up;
because the time is in it, a prepare that is repeated too late can be told from a new one by the
records alone.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import unpack_from
from typing import NamedTuple, Protocol
from zlib import crc32

from txbroker.core.records import Message
from txbroker.errors import BadId

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 26
PARTITION_MAX = 0xFFFF
TIME_MAX_MS = (1 << 48) - 1
# Two characters at a time: 13 table look-ups instead of 26 divisions.
_PAIRS = tuple(a + b for a in ALPHABET for b in ALPHABET)
_20_BITS = (1 << 20) - 1
# The other way Python's own base 32 is fastest, once its digits stand for Crockford's.
_TO_PYTHON = str.maketrans(ALPHABET, "0123456789abcdefghijklmnopqrstuv")
_is_base32 = re.compile(f"[{ALPHABET}]*").fullmatch


class IdParts(NamedTuple):
    """What a transaction id says: its half partition, its time and its randomness."""

    partition: int
    time_ms: int
    randomness: int


def make_id(partition: int, time_ms: int, randomness: int) -> str:
    """Return the id of `partition` at `time_ms` with 64 bits of `randomness`.

    Raises:
        ValueError: a part is negative or does not fit its bytes.
    """
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


@lru_cache(maxsize=2_000)  # a call and its records name the same id half a dozen times
def parse_id(text: str) -> IdParts:
    """Return the parts of a transaction id.

    Raises:
        ValueError: `text` is no id: wrong length, a foreign character or more than 128 bits.
    """
    if len(text) != LENGTH:
        raise ValueError(f"a transaction id has {LENGTH} characters, not {len(text)}")
    if not _is_base32(text):
        raise ValueError(f"{text!r} is not Crockford base32 in upper case")
    number = int(text.translate(_TO_PYTHON), 32)
    if number >> 128:
        raise ValueError("a transaction id has 128 bits, this one has more")
    return IdParts(number >> 112, number >> 64 & TIME_MAX_MS, number & (1 << 64) - 1)


def numbers_of(ids: Iterable[str]) -> list[int]:
    """Return many transaction ids, each known to be one, as numbers of 128 bits."""
    return [int(text, 32) for text in " ".join(ids).translate(_TO_PYTHON).split()]


def dedup_randomness(group: str, dedup_key: str) -> int:
    """Return the 64 bits that stand for a client's own key in place of randomness."""
    name = group.encode()
    # The length keeps group and key apart whatever characters are in them.
    told_apart = len(name).to_bytes(4, "big") + name + dedup_key.encode()
    digest = hashlib.blake2b(told_apart, digest_size=8, person=b"txb-dedup")
    return int.from_bytes(digest.digest(), "big")


# --- hashes ----------------------------------------------------------------------------------


def murmur2(data: bytes) -> int:
    """Return the 31-bit hash by which Java's Kafka client spreads keys.

    Source: MurmurHash2 by Austin Appleby (public domain) with Kafka's seed; the sign bit is
    masked as the client's `toPositive` does.
    """
    m = 0x5BD1E995
    length = len(data)
    h = 0x9747B28C ^ length
    # Every prepare with a key comes through here: words that are all read at once cost least.
    for k in unpack_from(f"<{length >> 2}I", data):
        k = k * m & 0xFFFFFFFF
        h = (h * m ^ (k ^ k >> 24) * m) & 0xFFFFFFFF
    if length & 3:
        h = (h ^ int.from_bytes(data[length & ~3 :], "little")) * m & 0xFFFFFFFF
    h = (h ^ h >> 13) * m & 0xFFFFFFFF
    return (h ^ h >> 15) & 0x7FFFFFFF


def order_hash(order_key: str | None, topic: str, key: bytes | None) -> int | None:
    """Return the hash that puts a transaction's half message into a partition.

    Transactions with one `order_key` share a half partition and so keep their order. Without an
    order key the topic and key of the first message stand for it; without a key, None: there is
    no order to keep and any partition will do.
    """
    if order_key is not None:
        return murmur2(b"o\0" + order_key.encode())
    if key is not None:
        return murmur2(b"k\0" + topic.encode() + b"\0" + key)
    return None


def order_mark(order_key: str | None, topic: str, key: bytes | None) -> int | None:
    """Return what transactions whose order is kept have in common, None without an order to keep.

    It stands for the same key as `order_hash`, and costs a tenth. Keys that share one by chance
    wait for one another without need. It is stored in snapshots.
    """
    if order_key is not None:
        return crc32(b"o\0" + order_key.encode())
    if key is not None:
        return crc32(b"k\0" + topic.encode() + b"\0" + key)
    return None


def dedup_hash(group: str, dedup_key: str) -> int:
    """Return the hash that puts a transaction with a client's own key into a half partition."""
    return murmur2(b"d\0" + group.encode() + b"\0" + dedup_key.encode())


# --- half partitions -------------------------------------------------------------------------


class Routed(Protocol):
    """What routing reads of a request to prepare a transaction."""

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
    """Return the half partition that a transaction id names.

    Raises:
        BadId: it is no id, or names a partition that does not exist.
    """
    try:
        partition = parse_id(id).partition
    except ValueError as error:
        raise BadId(f"{id!r} is no transaction id: {error}") from None
    if partition >= partitions:
        raise BadId(f"the id names partition {partition}; there are {partitions}")
    return partition


def home(request: Routed, partitions: int) -> int | None:
    """Return the half partition that a transaction belongs into, None for any.

    Raises:
        BadId: the id names another partition than the order key.
    """
    first = request.messages[0]
    order = order_hash(request.order_key, first.topic, first.key)
    if request.order_key is None and request.dedup_key is not None:
        # Before the message's key: the same dedup_key must meet its earlier use.
        order = dedup_hash(request.group, request.dedup_key)
    wanted = None if order is None else order % partitions
    if request.id is None:
        return wanted
    named = partition_of(request.id, partitions)
    if wanted is not None and wanted != named:
        raise BadId(f"the id names half partition {named}, its order key {wanted}", id=request.id)
    return named
