"""Hashes in facts that only the secret of a series of audits repeats.

A reader of facts could try what a 64-bit hash of a message, an order key or a `dedup_key` stands
for. So each is hashed once more, with the secret (SHA-256). The first hash makes the cost of the
second one independent of the message's size. Measured on a busy machine: 0.9 µs for each hash;
SHA-256 of messages of 1 KiB took 2.5.
"""

from pyspark.sql import Column, DataFrame

from txbroker.spark import expressions as F

_HASHES = ("body", "headers", "headers_if_alone", "order_mark")
_DEDUP_DIGITS = 32
HASH_OF_NOTHING = 42
"""The hash of no headers, which nearly all messages have: what Spark's `xxhash64` begins with."""


def with_secret(facts: DataFrame, secret: str) -> DataFrame:
    """Return facts of `messages` whose hashes, and `dedup`, depend on a secret. Equal ones stay
    equal, and null stays null."""
    there = facts.columns
    columns = {name: _hash(F.col(name), secret) for name in _HASHES if name in there}
    if "dedup" in there:
        digest = F.sha2(F.concat(F.lit(f"{secret} dedup "), F.col("dedup")).cast("binary"), 256)
        columns["dedup"] = F.substring(digest, 1, _DEDUP_DIGITS)
    if "content" in there:
        content = F.col("content")
        for name in ("body", "headers"):
            content = content.withField(name, _hash(F.col("content")[name], secret))
        columns["content"] = content
    return facts.withColumns(columns)


def _hash(plain: Column, secret: str) -> Column:
    digest = F.sha2(F.concat(F.lit(f"{secret} "), plain.cast("string")).cast("binary"), 256)
    stays = plain.isNull() | (plain == HASH_OF_NOTHING)
    return F.when(stays, plain).otherwise(F.xxhash64(digest))
