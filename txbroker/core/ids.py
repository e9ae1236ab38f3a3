"""Transaction ids: 26 characters that say where a transaction's half message lives.

An id is 16 bytes, written in Crockford's base32: the half partition (2 bytes), milliseconds
since 1970 (6 bytes) and randomness (8 bytes). Because the partition is in the id, any proxy knows
the owner of a transaction without looking anything up; because the time is in it, a prepare that
is repeated too late can be told from a new one by the records alone.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

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
