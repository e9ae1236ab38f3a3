"""Who gets a place in the next batch."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import pytest
from msgspec import structs

from tests.rules.fakes import Gate
from tests.rules.harness import (
    START_MS,
    WINDOW_MS,
    Harness,
    commit,
    marker,
    message,
    prepare,
    roll_back,
    settled,
    until,
)
from txbroker.core import settled as core_settled
from txbroker.core.encoding import MarkerRow, Row, marker_row
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import MarkerKind, Record
from txbroker.core.routing import make_id
from txbroker.core.segment import SEGMENT_BYTES
from txbroker.door.protocols import Appended, Log
from txbroker.errors import KafkaUnavailable, Overloaded, OwnerUnavailable
from txbroker.principals import Directory, Patterns, Principal, Role
from txbroker.proxy.partition import appender
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.owner import PartitionOwner

STORM = 100_000
ID = make_id(0, START_MS, 1)


def check(id: str) -> MarkerRow:
    return marker_row(marker(MarkerKind.CHECK, id, round=1, number=1, reason="due"))


async def held_up(harness: Harness, owner: PartitionOwner) -> tuple[Gate, list[Sequence[Record]]]:
    """Hold one batch in flight, and return the content of the following ones."""
    gate, batches = Gate(), []

    async def seen(log: Log, records: Sequence[Record]) -> Appended:
        batches.append(records)
        return await log.append(records)

    harness.partition.op.script.append(gate.append)
    harness.partition.op.script.extend([seen] * 1000)
    return gate, batches


def _entries() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, appender._QueuedRun)]


async def test_failed_append_leaves_no_garbage(harness: Harness) -> None:
    owner, id = await harness.new_pending()

    async def fails(_: Log, __: Sequence[Record]) -> Appended:
        raise KafkaUnavailable("no leader")

    harness.partition.op.script.extend([fails] * 5)
    gc.collect()
    gc.disable()
    try:
        before = len(_entries())  # other tests of the session may have left some
        for _ in range(5):
            [outcome] = await owner._op.append([check(id)])
            assert isinstance(outcome, OwnerUnavailable)
            del outcome
        await settled()
        left = len(_entries()) - before
    finally:
        gc.enable()
    assert left <= 2  # each of the two logs has its last batch at hand


@pytest.mark.rule(1)
async def test_check_storm_does_not_delay_decisions(harness: Harness) -> None:
    owner = await harness.owner()
    first, id = await harness.prepared(owner), await harness.prepared(owner)
    gate, batches = await held_up(harness, owner)
    going = asyncio.create_task(commit(owner, first))
    await gate.reached.wait()
    record = check(first)
    storm = [asyncio.create_task(owner._op.append([record])) for _ in range(STORM)]
    await settled()
    deciding = asyncio.create_task(commit(owner, id))
    await settled()
    gate.open()
    await deciding
    # It was in the next batch, which is a small one.
    assert [r.key for r in batches[0]].count(id.encode()) == 1
    assert len(batches[0]) == appender.BATCH_RECORDS_MAX
    assert len(batches) <= 3
    for task in storm:
        task.cancel()
    await asyncio.gather(going, *storm, return_exceptions=True)


@pytest.mark.rule(1)
async def test_decision_flood_does_not_delay_checks(harness: Harness) -> None:
    owner = await harness.owner(pending_max=10_000, pending_group_max=10_000)
    ids = list(await asyncio.gather(*[harness.prepared(owner) for _ in range(3000)]))
    gate, batches = await held_up(harness, owner)
    flood = [asyncio.create_task(commit(owner, ids[0]))]
    await gate.reached.wait()
    flood += [asyncio.create_task(commit(owner, id)) for id in ids[1:]]
    await settled()
    attempt = asyncio.create_task(owner._op.append([check(ids[-1])]))
    await settled()
    gate.open()
    await attempt
    assert check(ids[-1]).records[0].value in [record.value for record in batches[0]]
    await asyncio.gather(*flood)


@pytest.mark.rule(1)
async def test_cancelled_append_leaves_no_rows(harness: Harness) -> None:
    owner = await harness.owner()
    ids = [await harness.prepared(owner) for _ in range(4)]
    gate, batches = await held_up(harness, owner)
    going = asyncio.create_task(commit(owner, ids[0]))
    await gate.reached.wait()
    given_up = [asyncio.create_task(commit(owner, id)) for id in ids[1:3]]
    stays = asyncio.create_task(commit(owner, ids[3]))
    await settled()
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    assert sum(queue.size for queue in owner._op._queues.values()) > 0
    gate.open()
    await asyncio.gather(going, stays)
    assert [r.key for batch in batches for r in batch] == [ids[3].encode()]
    assert [queue.size for queue in owner._op._queues.values()] == [0, 0]
    await until(lambda: len(harness.visible()) == 2)


async def test_suspended_owner_answers_waiting_callers(harness: Harness) -> None:
    owner = await harness.owner()
    ids = [await harness.prepared(owner) for _ in range(3)]
    gate, batches = await held_up(harness, owner)
    going = asyncio.create_task(commit(owner, ids[0]))
    await gate.reached.wait()
    waiting = [asyncio.create_task(commit(owner, id)) for id in ids[1:]]
    await settled()
    owner.suspend()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [OwnerUnavailable] * 2
    # A batch in flight is written in any case, so its answer is awaited.
    assert not going.done()
    gate.open()
    await going
    owner.resume()
    await asyncio.gather(*[commit(owner, id) for id in ids[1:]])
    assert len(batches) >= 1


class CountingLog:
    """A log that counts requests for its end; `strangers` holds records of another client."""

    batch_bytes_max = 1 << 20

    def __init__(self) -> None:
        self.asked = 0
        self.end = 0
        self.strangers: list[Record] = []

    async def append(self, records: Sequence[Record]) -> Appended:
        base = self.end + len(self.strangers)
        self.end += len(records)
        return Appended(base, 1)

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        self.asked += 1
        return 0, self.end + len(self.strangers)

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        theirs = self.strangers[start : start + 1]
        yield [structs.replace(record, offset=start, timestamp_ms=1) for record in theirs]
        if start + len(theirs) < end:
            yield [Record(b"mine", b"", offset=start + len(theirs), timestamp_ms=1)]


def context() -> PartitionContext:
    """Return what an appender needs of its partition."""
    gate = asyncio.Event()
    gate.set()
    return SimpleNamespace(events=None, gate=gate)  # type: ignore[return-value]


class Reader:
    """A `Replica` that counts."""

    anchor = None

    def __init__(self) -> None:
        self.position = 0

    def apply(self, record: Record) -> ApplyResult:
        assert record.offset == self.position
        self.position += 1
        return ApplyResult(Effect.APPLIED)

    def apply_run(self, rows: Sequence[Row], offset: int, timestamp_ms: int) -> list[ApplyResult]:
        assert offset == self.position
        self.position += len(rows)
        return [ApplyResult(Effect.APPLIED)] * len(rows)

    def skip(self, offsets: range) -> None:
        self.position = offsets.stop


@pytest.mark.rule(2)
async def test_end_known_from_append_is_not_requested() -> None:
    log = CountingLog()
    own = appender.Appender(context(), log, Reader())  # type: ignore[arg-type]
    running = asyncio.create_task(own.run())
    await own.look(60.0)
    assert log.asked == 1
    await own.append([check(ID)])
    await own.look(60.0)
    assert log.asked == 1
    # Not of the last moments any more.
    await own.look(0.0)
    assert log.asked == 2
    running.cancel()


@pytest.mark.rule(2)
async def test_append_after_gap_does_not_show_end() -> None:
    log, reader = CountingLog(), Reader()
    own = appender.Appender(context(), log, reader)  # type: ignore[arg-type]
    running = asyncio.create_task(own.run())
    log.strangers.append(Record(b"theirs", b""))
    await own.append([check(ID)])
    assert reader.position == 2
    asked = log.asked
    await own.look(60.0)
    assert log.asked == asked + 1
    running.cancel()


# --- shares of principals ------------------------------------------------------------------------


def directory(*names: str) -> Directory:
    """Return producers that may act for the groups that begin with their names."""
    return Directory(Principal(name, Role.PRODUCER, Patterns((f"{name}*",))) for name in names)


async def refused(harness: Harness, owner: PartitionOwner, group: str) -> str:
    with pytest.raises(Overloaded) as caught:
        await prepare(owner, harness.half(group=group))
    assert caught.value.details["group"] == group
    return str(caught.value)


async def test_groups_of_one_principal_share_one_limit(harness: Harness) -> None:
    harness.proxy.principals = lambda: directory("shop", "bank")
    owner = await harness.owner(pending_group_max=3)
    ids = [await harness.prepared(owner, group=f"shop-{number}") for number in range(3)]
    assert "the principal of group 'shop-9'" in await refused(harness, owner, "shop-9")
    await harness.prepared(owner, group="bank")
    await roll_back(owner, ids[0])
    await harness.prepared(owner, group="shop-9")
    # The next owner counts the same, from the logs.
    again = await harness.restarted(owner, pending_group_max=3)
    await refused(harness, again, "shop-10")
    await harness.prepared(again, group="bank")
    # By another file each group is its own share; and it is back.
    harness.proxy.principals = lambda: Directory()
    await until(lambda: again.ledger.index.unsettled.of("shop-9") == 1)
    await harness.prepared(again, group="shop-10")
    harness.proxy.principals = lambda: directory("shop")
    await until(lambda: again.ledger.index.unsettled.of("shop-9") == 0)
    await refused(harness, again, "shop-11")


@pytest.mark.parametrize("trouble", ["no leader", "refused"])
async def test_refused_transactions_count_in_share(harness: Harness, trouble: str) -> None:
    harness.proxy.principals = lambda: directory("shop", "bank")
    owner = await harness.owner(pending_group_max=3)
    ids = [await harness.prepared(owner, group=f"shop-{number}") for number in range(3)]
    if trouble == "refused":
        harness.kafka.delete_topic("t")
    else:
        harness.kafka.set_leaderless("t", 0)
    for id in ids:
        await commit(owner, id)
    if trouble == "refused":
        await until(lambda: len(owner.ledger.index.refused) == 3)
    assert owner.ledger.index.undecided_count == 0
    await refused(harness, owner, "shop-9")
    await harness.prepared(owner, message("other", topic="u"), group="bank")


async def test_one_share_cannot_fill_deferred_list(harness: Harness) -> None:
    harness.proxy.principals = lambda: directory("shop", "bank")
    owner = await harness.owner(promotion_limits=PromotionLimits(deferred_max=5))
    harness.kafka.set_leaderless("t", 0)
    for number in range(4):
        await harness.committed(owner, group=f"shop-{number}")
    await until(lambda: owner._promoter.waiting.total == 4)
    assert "wait for target partitions" in await refused(harness, owner, "shop-9")
    visible = await harness.committed(owner, message("goes", topic="u"), group="bank")
    await until(lambda: visible in harness.events.promotions)
    harness.kafka.set_leaderless("t")
    await until(lambda: len(harness.events.promotions) == 5)
    await until(lambda: not owner._promoter.waiting.total)
    await harness.prepared(owner, group="shop-9")


async def test_one_share_cannot_fill_settled_memory(harness: Harness) -> None:
    harness.monkeypatch.setattr(core_settled, "SEGMENT_ENTRIES", 2)
    harness.proxy.principals = lambda: directory("shop", "bank")
    harness.proxy.settled = 2 * SEGMENT_BYTES + 600
    owner = await harness.owner()
    for number in range(4):
        await roll_back(owner, await harness.prepared(owner, group=f"shop-{number}"))
    assert "bytes of settled transactions" in await refused(harness, owner, "shop-9")
    await harness.prepared(owner, group="bank")
    # Half's log clock may stand still: by our time they are past.
    harness.advance(WINDOW_MS / 1000 + 1)
    await harness.prepared(owner, group="shop-9")
