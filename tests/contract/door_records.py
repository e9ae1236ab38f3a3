"""Records, claims and turns for tests of the door."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tests.kit.kafka import now_ms
from txbroker.core.records import LOG_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import Door, PartitionDoor, PromotionTxn
from txbroker.door.writing import Copy

_CLAIMS = itertools.count()


def new_claim(owner: str = "one") -> Claim:
    """A claim that no other test makes."""
    return Claim(LOG_VERSION, f"claim-{next(_CLAIMS)}", owner, "http://127.0.0.1:1")


def progress(claim: str, op: int) -> Checkpoint:
    """A checkpoint that has come as far in half as in op."""
    return Checkpoint(LOG_VERSION, claim, op, op)


def turn(claim: Claim, op: int, *promoted: Copy, parked: tuple[Record, ...] = ()) -> PromotionTxn:
    """A turn up to `op`."""
    return PromotionTxn(promoted, parked, progress(claim.claim, op))


async def claimed(door: Door, number: int = 0) -> tuple[PartitionDoor, Claim]:
    """A half partition with a new claim, and the claim."""
    partition, mine = door.partition(number), new_claim()
    await partition.claim(mine)
    return partition, mine


def to(topic: str, key: bytes, value: bytes = b"") -> Copy:
    """A record of now for the first partition of a target."""
    return Copy(topic, 0, Record(key, value, (), now_ms()))


def bare(records: Sequence[Record]) -> list[tuple[bytes | None, bytes | None, tuple[Any, ...]]]:
    """What a producer gave of records."""
    return [(record.key, record.value, record.headers) for record in records]


async def commit(door: PartitionDoor, written: PromotionTxn) -> None:
    """Write a turn and wait for its commit."""
    await (await door.write(written)).committed()
