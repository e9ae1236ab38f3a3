"""What a clean stop writes down, and how far a log counts as read whose end holds no record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.rules.harness import (
    DAY_MS,
    Harness,
    commit,
    forget_bodies,
    known,
    partition,
    snapshot,
    until,
)
from txbroker.core.records import Record
from txbroker.proxy.partition import snapshots as snapshots_module
from txbroker.testing.door import MemoryPartitionDoor

LOGS = ["half", "op"]

# --- a clean stop ----------------------------------------------------------------------------


@pytest.mark.rule(28)
@pytest.mark.parametrize("last", ["rollback", "check"])
async def test_clean_stop_accounts_for_all_records(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """A rollback writes no checkpoint; undecided transactions are reported lost by id."""
    monkeypatch.setattr(snapshots_module, "LOOK_S", 0.001)
    owner = await harness.owner(snapshot_records_min=1000)
    first = await harness.committed(owner)
    await until(lambda: harness.visible() == [first] and not owner._snapshots.due)
    id = await harness.prepared(owner)
    harness.zombie_mark(
        last, id, **({"round": 1, "number": 1, "reason": "due"} if last == "check" else {})
    )
    await until(lambda: owner.ledger.op_position == 2)
    forget_bodies(owner)
    await owner.close(last_snapshot=True)
    harness.advance(20 * DAY_MS / 1000)
    for name in LOGS:
        harness.kafka.truncate(f"txbroker.{name}", before=2)
    again = await harness.owner()
    if last == "check":
        assert known(again, id).lost
    assert harness.events.losses == ([1] if last == "check" else [])
    late = await harness.committed(again)
    await until(lambda: harness.visible() == [first, late])


async def test_clean_stop_without_records_writes_no_snapshot(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    assert await snapshot(owner)
    await owner.close(last_snapshot=True)
    assert harness.events.snapshots == [1]


async def test_stop_bounds_wait_for_last_snapshot(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "LAST_S", 0.01)

    async def hangs(inner: MemoryPartitionDoor, records: Sequence[Record]) -> None:
        await asyncio.Event().wait()

    owner = await harness.owner()
    await harness.prepared(owner)
    harness.partition.stores.append(hangs)
    async with asyncio.timeout(5.0):
        await owner.close(last_snapshot=True)
    assert (harness.events.snapshots, harness.events.snapshot_failures) == ([], 1)


async def test_suspended_owner_writes_no_last_snapshot(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    owner.suspend()
    calls = harness.partition.calls
    await owner.close(last_snapshot=True)
    assert "store" not in calls


# --- offsets that hold no record, at the end of a log ----------------------------------------


@pytest.mark.rule(28)
@pytest.mark.parametrize("topic", LOGS)
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
async def test_empty_offsets_at_end_are_accounted_for(
    harness: Harness, topic: str, committed: bool, replayed: bool
) -> None:
    """Retention deletes them with earlier records; then nothing shows that they were empty."""
    owner, id = await harness.new_pending()
    harness.advance(8 * DAY_MS / 1000)
    await until(lambda: known(owner, id).kept_at)
    harness.zombie_mark("check", id, round=1, number=1, reason="due")
    await until(lambda: known(owner, id).checks.number == 1)
    if replayed:
        await owner.close()
    harness.kafka.transact(f"txbroker.{topic}", 0, [Record(b"x", b"foreign")], committed=committed)
    if replayed:
        owner = await harness.owner()
    half, op = partition(harness, "half").end, partition(harness, "op").end
    await until(lambda: (owner.ledger.half_position, owner.ledger.op_position) == (half, op))
    assert await snapshot(owner)
    await owner.close()
    harness.advance(40 * DAY_MS / 1000)
    harness.kafka.truncate("txbroker.half", before=half)
    harness.kafka.truncate("txbroker.op", before=op)
    again = await harness.owner()
    assert known(again, id).checks.number == 1
    await commit(again, id)
    await until(lambda: harness.visible() == [id])


# --- two first owners -----------------------------------------------------------------------


@pytest.mark.rule(10)
async def test_concurrent_first_owners_lose_no_checkpoint(harness: Harness) -> None:
    """The other one may claim and write after the first look at the checkpoint topic."""
    one, two = harness.make(), harness.make()
    found = harness.partition.claimed_before
    asked: list[bool] = []

    async def while_the_other_begins() -> bool:
        before = await found()
        if not asked:
            await one.open()
            await harness.prepared(one)
        asked.append(before)
        return before

    harness.partition.claimed_before = while_the_other_begins  # type: ignore[method-assign]
    await two.open()
    assert asked == [False, True]
