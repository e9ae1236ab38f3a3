"""What others write into the checkpoint topic, what stops a partition there, and what passes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.contract.door_records import commit, new_claim, progress, turn
from txbroker.core.encoding import (
    CLAIM_KEY,
    PROGRESS_KEY,
    encode_claim,
    encode_progress,
    encode_skip,
)
from txbroker.core.ledger import Ledger
from txbroker.core.records import RECORD_VERSION, Claim, Record
from txbroker.core.snapshot import SLOTS, SnapshotCapture, chunk_key, closing_key
from txbroker.door.own_topics import OTHER_PRODUCER, OUTSIDE, SHOWN_MAX, CheckpointScan
from txbroker.door.protocols import Claimed, Door, PromotionTxn
from txbroker.errors import InvariantBroken, NewerRecord

NEWER = RECORD_VERSION + 1
FORGED = encode_progress(progress("theirs", 99))
JUNK = (
    Record(PROGRESS_KEY, b"junk"),
    Record(PROGRESS_KEY, None),
    Record(PROGRESS_KEY, b'{"v": 1}'),
    Record(PROGRESS_KEY, b"[" * 100_000),
    Record(CLAIM_KEY, b"\x00\xff"),
    Record(CLAIM_KEY, msgspec.json.encode({"v": NEWER, "claim": "theirs"})),
    encode_progress(structs.replace(progress("theirs", 99), v=NEWER)),
)


def newer_turn(claim: Claim) -> PromotionTxn:
    """A turn by a newer version."""
    written = turn(claim, 99)
    return structs.replace(written, progress=structs.replace(written.progress, v=NEWER))


class Checkpoint:
    """Partition 0 of the checkpoint topic, written by its owner and by others."""

    def __init__(self, world: Any, door: Door) -> None:
        self.partition = door.partition(0)
        self._world = world
        self._topic = world.name("checkpoint")

    async def claim(self) -> Claimed:
        """Claim as a new owner."""
        return await self.partition.claim(new_claim())

    async def owned(self) -> Claim:
        """Claim; return the claim."""
        mine = new_claim()
        await self.partition.claim(mine)
        return mine

    async def promoted(self, op: int) -> None:
        """Claim, and write progress."""
        await commit(self.partition, turn(await self.owned(), op))

    async def foreign(self, *records: Record, committed: bool | None = None) -> list[Record]:
        """Write as another client; return the newest records as they are stored."""
        await self._world.foreign(self._topic, 0, *records, committed=committed)
        return list((await self._world.visible(self._topic))[-len(records) :])

    async def newer(self, times: int = 1) -> list[Record]:
        """Write progress as an owner of a newer version; return the records as they are stored."""
        mine = await self.owned()
        for _ in range(times):
            await commit(self.partition, newer_turn(mine))
        return list((await self._world.visible(self._topic))[-times:])

    async def skip(self, record: Record) -> None:
        """Decide that a record is passed over."""
        await self.foreign(encode_skip("checkpoint", record, "me", "a test"))

    async def compacted(self, before: int) -> None:
        """Lose what lies below an offset, as by compaction."""
        await self._world.compact(self._topic, 0, before)


@pytest.fixture
def checkpoint(world: Any, door: Door) -> Checkpoint:
    return Checkpoint(world, door)


@pytest.mark.rule(10)
@pytest.mark.parametrize("committed", [None, True])
async def test_foreign_records_under_our_keys_are_set_aside(
    checkpoint: Checkpoint, committed: bool | None
) -> None:
    """Also those that look like an owner's, of this version or of a newer one."""
    await checkpoint.promoted(7)
    noise = (*JUNK, FORGED, encode_claim(new_claim()))
    await checkpoint.foreign(*noise, committed=committed)
    found = await checkpoint.claim()
    assert (found.progress and found.progress.op) == 7
    assert found.foreign == len(noise)
    assert {each.why for each in found.set_aside} == {OTHER_PRODUCER if committed else OUTSIDE}
    await checkpoint.promoted(8)
    again = await checkpoint.claim()
    assert (again.progress and again.progress.op) == 8


@pytest.mark.rule(10)
async def test_checkpoint_copy_outside_transaction_is_set_aside(checkpoint: Checkpoint) -> None:
    await checkpoint.promoted(7)
    stale = encode_progress(progress("mine", 3))
    forged = encode_claim(new_claim())
    _, first = await checkpoint.foreign(forged, stale)
    await checkpoint.foreign(*[stale] * (SHOWN_MAX + 2))
    found = await checkpoint.claim()
    assert (found.progress and found.progress.op) == 7
    assert found.foreign == SHOWN_MAX + 4
    # Those of each key that are newest are shown, with where they are.
    shown = [each.record.offset for each in found.set_aside]
    assert shown == [first.offset - 1, *range(first.offset + 3, first.offset + 3 + SHOWN_MAX)]
    assert {each.why for each in found.set_aside} == {OUTSIDE}


@pytest.mark.rule(10)
async def test_checkpoint_topic_filled_from_copy_stops(checkpoint: Checkpoint) -> None:
    claim, copy = encode_claim(new_claim()), encode_progress(progress("mine", 3))
    _, stored = await checkpoint.foreign(claim, copy)
    with pytest.raises(InvariantBroken, match="restored"):
        await checkpoint.claim()
    await checkpoint.skip(stored)
    assert (await checkpoint.claim()).progress is None


@pytest.mark.rule(10)
@pytest.mark.parametrize("turn_op", [0, 5])
def test_snapshot_records_existing_checkpoint(turn_op: int) -> None:
    """A tombstone of another client and compaction have left nothing under the key."""
    ledger = Ledger(0, 1000)
    ledger.op_committed = turn_op
    mine = new_claim()
    written = [*SnapshotCapture(ledger, "s", 0, RECORD_VERSION).records()]
    records = [
        *[structs.replace(record, offset=40 + n) for n, record in enumerate(written)],
        structs.replace(encode_claim(mine), offset=50, producer=1),
    ]
    scan = CheckpointScan("c-0")
    scan.note(records)
    assert [(stop.code, stop.record.key) for stop in scan.stops()] == (
        [("progress_lost", b"snapshot/0")] if turn_op else []
    )
    if turn_op:
        with pytest.raises(
            InvariantBroken, match="c-0 at offset 40 is a snapshot with a checkpoint"
        ):
            scan.claimed(mine)
        (stop,) = scan.stops()
        skip = encode_skip("checkpoint", stop.record, "me", "a test")
        scan.note([structs.replace(skip, offset=51)])
    assert scan.claimed(mine).progress is None


@pytest.mark.rule(27)
async def test_tombstone_revokes_skip_decision(checkpoint: Checkpoint) -> None:
    await checkpoint.promoted(7)
    (stored,) = await checkpoint.newer()
    await checkpoint.skip(stored)
    assert len((await checkpoint.claim()).skips) == 1
    key = encode_skip("checkpoint", stored, "me", "a test").key
    await checkpoint.foreign(Record(key, None))
    with pytest.raises(NewerRecord, match=f"checkpoint-0 at offset {stored.offset}"):
        await checkpoint.claim()


@pytest.mark.rule(28)
@pytest.mark.parametrize("committed", [None, True])
async def test_tombstone_removes_no_snapshot(
    checkpoint: Checkpoint, committed: bool | None
) -> None:
    """We replace a closing record and never remove it; the other records of a snapshot we do."""
    await checkpoint.promoted(7)
    stored = [Record(closing_key(slot), b"closing") for slot in range(SLOTS)]
    stored.append(Record(chunk_key(0, 0), b"chunk"))
    await checkpoint.partition.store(stored)
    await checkpoint.foreign(*[Record(one.key, None) for one in stored], committed=committed)
    found = await checkpoint.claim()
    assert [one.key for one in found.snapshots] == [one.key for one in stored[:SLOTS]]
    assert found.foreign == SLOTS


@pytest.mark.rule(10)
async def test_noise_before_first_own_record_hides_no_checkpoint(checkpoint: Checkpoint) -> None:
    await checkpoint.foreign(*JUNK)
    assert (await checkpoint.claim()).progress is None


@pytest.mark.rule(10, 27)
@pytest.mark.parametrize("committed", [None, True])
async def test_possibly_compacted_checkpoint_stops_partition(
    checkpoint: Checkpoint, committed: bool | None
) -> None:
    await checkpoint.promoted(7)
    (stored,) = await checkpoint.foreign(JUNK[0], committed=committed)
    await checkpoint.compacted(stored.offset)
    with pytest.raises(InvariantBroken, match=f"checkpoint-0 at offset {stored.offset} is another"):
        await checkpoint.claim()
    await checkpoint.skip(structs.replace(stored, value=b"another"))
    with pytest.raises(InvariantBroken, match=r"docs/operate/repair\.md"):
        await checkpoint.claim()
    await checkpoint.skip(stored)
    found = await checkpoint.claim()
    assert found.progress is None
    assert [(skip.by, skip.reason, skip.offset) for skip in found.skips] == [
        ("me", "a test", stored.offset)
    ]


@pytest.mark.rule(27)
async def test_newer_record_stops_partition_until_skipped(checkpoint: Checkpoint) -> None:
    await checkpoint.promoted(7)
    first, second = await checkpoint.newer(2)
    with pytest.raises(NewerRecord, match=f"checkpoint-0 at offset {second.offset}"):
        await checkpoint.claim()
    await checkpoint.skip(second)
    with pytest.raises(NewerRecord, match=f"checkpoint-0 at offset {first.offset}"):
        await checkpoint.claim()
    await checkpoint.skip(first)
    found = await checkpoint.claim()
    assert (found.progress and found.progress.op) == 7


@pytest.mark.rule(10)
@pytest.mark.parametrize(
    ("claimed", "expected"),
    [
        pytest.param([], 99, id="neither of ours has written"),
        pytest.param([(7, (7,))], 99, id="it may have written before producer 8"),
        pytest.param([(7, (7,)), (8, ())], 5, id="both have written"),
        pytest.param([(7, (7, 8))], 5, id="a claim names both"),
        pytest.param([(6, (7, 8))], 99, id="another client's claim names both"),
    ],
)
def test_former_producers_of_an_owner_count(
    claimed: list[tuple[int, tuple[int, ...]]], expected: int
) -> None:
    """Kafka gives a producer a new id when its epochs are used up, or after a week without use."""
    claims = [
        structs.replace(encode_claim(structs.replace(new_claim(), producers=names)), producer=id)
        for id, names in claimed
    ]
    written = [
        structs.replace(encode_progress(progress("mine", 5)), producer=5),
        *claims,
        structs.replace(FORGED, producer=6),
        structs.replace(encode_claim(mine := new_claim()), producer=7),
    ]
    scan = CheckpointScan("c-0", {7, 8})
    scan.note([structs.replace(record, offset=n) for n, record in enumerate(written)])
    found = scan.claimed(mine).progress
    assert (found and found.op) == expected


async def test_checkpoint_after_newer_one_counts(checkpoint: Checkpoint) -> None:
    mine = await checkpoint.owned()
    await commit(checkpoint.partition, newer_turn(mine))
    await commit(checkpoint.partition, turn(mine, 8))
    found = await checkpoint.claim()
    assert (found.progress and found.progress.op) == 8
