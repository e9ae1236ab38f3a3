"""Ledgers of recovered owners, told as values that can be compared."""

from __future__ import annotations

from msgspec import structs

from tests.rules.rules_world import WINDOW_MS, World
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Checkpoint, Record
from txbroker.core.transaction import Transaction
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.testing.memory import MemoryPartition

OWN = ("half", "op", "checkpoint", "parked")


def told(transaction: Transaction) -> tuple[object, ...]:
    """Return what of a transaction is a function of the log and of acknowledged turns."""
    cause = None if transaction.cause is None else transaction.cause.code
    return (
        transaction.state,
        transaction.half.group,
        transaction.offset,
        transaction.prepared_at_ms,
        transaction.fingerprint,
        transaction.verdict.contents_fingerprint,
        transaction.places,
        transaction.order,
        transaction.verdict.decision,
        transaction.verdict.op_offset,
        transaction.verdict.at_ms,
        transaction.checks.round,
        transaction.checks.number,
        transaction.checks.counted_ms,
        transaction.checks.not_before_ms,
        cause if transaction.state not in SETTLED else None,
        transaction.kept,
    )


def unsettled(ledger: Ledger) -> dict[str, tuple[object, ...]]:
    """Return all that is not settled."""
    return {id: told(transaction) for id, transaction in ledger.index.transactions.items()}


def remembered(ledger: Ledger) -> dict[str, object]:
    """Return what became of those that were settled within the dedup window."""
    since_ms = ledger.half_clock_ms - WINDOW_MS
    return {
        transaction.id: (
            transaction.state,
            transaction.fingerprint[:8],
            transaction.verdict.decision,
        )
        for transaction in ledger.index.settled
        if transaction.prepared_at_ms >= since_ms
    }


def positions(ledger: Ledger) -> tuple[object, ...]:
    """Return where a ledger stands."""
    return (
        ledger.half_position,
        ledger.op_position,
        ledger.half_clock_ms,
        ledger.op_clock_ms,
        ledger.half_anchor,
        ledger.op_anchor,
        ledger.index.undecided_count,
        list(ledger.index.ready),
        sorted(ledger.index.refused),
        sorted(ledger.index.parked),
        sorted(ledger.index.to_release),
    )


def partition(world: World, name: str) -> MemoryPartition:
    """Return partition 0 of one of txbroker's own topics."""
    return world.kafka.topics[f"txbroker.{name}"].partitions[0]


def records(world: World, name: str) -> list[Record]:
    """Return what `read_committed` readers see of one of txbroker's own topics."""
    return world.kafka.visible(f"txbroker.{name}")


async def snapshot(owner: PartitionOwner) -> bool:
    """Write a snapshot now."""
    return await owner._snapshots.write()


def forget_bodies(owner: PartitionOwner) -> None:
    """Evict all messages."""
    for transaction in list(owner.ledger.index.transactions.values()):
        owner.ledger.index.evict(transaction)


def moved(progress: Checkpoint, **fields: object) -> Checkpoint:
    """Return a progress that differs."""
    return structs.replace(progress, **fields)
