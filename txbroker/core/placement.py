"""Which partition: of the half topic for a transaction, of the target for a message."""

from struct import unpack_from
from zlib import crc32


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
