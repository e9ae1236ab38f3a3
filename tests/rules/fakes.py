"""Fakes of the door, the runner and the clock, which a test scripts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.records import RECORD_VERSION, CheckReason, Claim, Record
from txbroker.core.segment import SEGMENT_VERSION
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import (
    Appended,
    AppendUnknown,
    Claimed,
    Log,
    PromotionTxn,
    PromotionTxnHandle,
)
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.partition.checkback import CheckBack
from txbroker.proxy.partition.context import ProxyContext
from txbroker.testing.door import MemoryDoor, MemoryPartitionDoor
from txbroker.testing.memory import MemoryKafka

Append = Callable[[Log, Sequence[Record]], Awaitable[Appended]]
Write = Callable[[MemoryPartitionDoor, PromotionTxn], Awaitable[PromotionTxnHandle]]
Claims = Callable[[MemoryPartitionDoor, Claim], Awaitable[Claimed]]
Store = Callable[[MemoryPartitionDoor, Sequence[Record]], Awaitable[None]]


class ScriptedLog:
    """A `Log` on one in memory; `script` holds what the next appends do instead."""

    def __init__(self, inner: Log, name: str, calls: list[str]) -> None:
        self.inner = inner
        self.batch_bytes_max = inner.batch_bytes_max
        self.script: deque[Append] = deque()
        self.bounds_gate = asyncio.Event()
        self.bounds_gate.set()
        self.picked: list[list[int]] = []
        self.gate: asyncio.Event | None = None
        """Holds picks back until it is set."""
        self.silent = False
        self._name = name
        self._calls = calls

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append as scripted, or pass through."""
        self._calls.append(f"{self._name}.append")
        if self.script:
            return await self.script.popleft()(self.inner, records)
        return await self.inner.append(records)

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        """Return the bounds once the gate is open."""
        self._calls.append(f"{self._name}.bounds")
        await self.bounds_gate.wait()
        return await self.inner.bounds(confirmed=confirmed)

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        self._calls.append(f"{self._name}.read")
        async for records in self.inner.read(start, end, skipped):
            yield records

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Pick, once the gate is open; offsets must be sorted, as the door requires."""
        assert list(offsets) == sorted(set(offsets))
        self._calls.append(f"{self._name}.pick")
        self.picked.append(list(offsets))
        if self.gate is not None:
            await self.gate.wait()
        if self.silent:
            raise KafkaUnavailable(f"{self._name} is silent")
        return await self.inner.pick(offsets)


class ScriptedPartition:
    """A `PartitionDoor` on one in memory, with scripts for claims and turns."""

    def __init__(self, inner: MemoryPartitionDoor) -> None:
        self.inner = inner
        self.partition = inner.partition
        self.calls: list[str] = []
        self.half = ScriptedLog(inner.half, "half", self.calls)
        self.op = ScriptedLog(inner.op, "op", self.calls)
        self.turns: list[PromotionTxn] = []
        self.writes: deque[Write] = deque()
        self.claims: deque[Claims] = deque()
        self.stores: deque[Store] = deque()
        self.picked_parked: list[list[int]] = []
        self.hide_parked_offsets = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def claim(self, claim: Claim) -> Claimed:
        """Claim as scripted, or pass through."""
        self.calls.append("claim")
        if self.claims:
            return await self.claims.popleft()(self.inner, claim)
        return await self.inner.claim(claim)

    async def parked(self) -> AsyncIterator[Sequence[Record]]:
        self.calls.append("parked")
        async for records in self.inner.parked():
            yield records

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        self.calls.append("pick_parked")
        self.picked_parked.append(list(offsets))
        return await self.inner.pick_parked(offsets)

    async def store(self, records: Sequence[Record]) -> None:
        """Store as scripted, or pass through."""
        self.calls.append("store")
        if self.stores:
            return await self.stores.popleft()(self.inner, records)
        return await self.inner.store(records)

    async def write(self, turn: PromotionTxn) -> PromotionTxnHandle:
        """Write as scripted, or pass through."""
        self.calls.append("write")
        self.turns.append(turn)
        if self.writes:
            return await self.writes.popleft()(self.inner, turn)
        handle = await self.inner.write(turn)
        if self.hide_parked_offsets:
            handle.parked_offsets = [-1] * len(handle.parked_offsets)
        return handle


class ScriptedDoor(MemoryDoor):
    """A door whose partitions a test scripts: always the newest object of each."""

    def __init__(self, kafka: MemoryKafka, **settings: object) -> None:
        super().__init__(kafka, **settings)  # type: ignore[arg-type]
        self.opened: dict[int, ScriptedPartition] = {}
        self.prepare_partition: Callable[[ScriptedPartition], None] = lambda _: None

    def partition(self, partition: int) -> ScriptedPartition:  # type: ignore[override]
        """Return a scripted door of one half partition."""
        self.opened[partition] = ScriptedPartition(super().partition(partition))
        self.prepare_partition(self.opened[partition])
        return self.opened[partition]


class FakeRunner:
    """A `Runner` that takes checks while it has room, and remembers them."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.offers: list[str] = []
        self.taken: dict[str, CheckReason] = {}
        self.due_now: list[tuple[str, CheckReason]] = []
        self.prefers: list[str] = []

    def due(self, owner: CheckBack, id: str, group: str, prefer: str, reason: CheckReason) -> bool:
        self.offers.append(id)
        if id not in self.taken and len(self.taken) >= self.room:
            return False
        self.taken[id] = reason
        self.due_now.append((id, reason))
        self.prefers.append(prefer)
        return True

    def forget(self, owner: CheckBack) -> None:
        """Keep the record."""


class FakeTime:
    """The `time` module of `txbroker.proxy.partition.clock` in these tests."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def time(self) -> float:
        """Fail: the wall clock must not be used."""
        raise AssertionError("an owner asked the wall clock")


class FakeProxy(ProxyContext):
    """A proxy with the shares of a test, which answers whether a partition is still its own."""

    def __init__(self, version: int = RECORD_VERSION) -> None:
        super().__init__("one", self, (), 1 << 30, 1 << 30)
        self.url = "http://127.0.0.1:1"
        self.record_version = version
        self.segment_version = min(SEGMENT_VERSION, version)
        self.ours = True
        self.share = 1 << 30
        self.settled = 1 << 30

    async def still_ours(self, partition: int) -> bool:
        return self.ours

    def bodies_share(self) -> int:
        """Return the bytes of bodies that the test allows."""
        return self.share

    def settled_share(self) -> int:
        """Return the bytes of settled transactions that the test allows."""
        return self.settled


class RecordedEvents:
    """`PartitionEvents` that remembers all events."""

    def __init__(self) -> None:
        self.outcomes: list[ApplyResult] = []
        self.promotions: list[str] = []
        self.refusals: list[str] = []
        self.decisions: list[str] = []
        self.prepares: list[str] = []
        self.failures: list[str] = []
        self.foreigners: list[str] = []
        self.losses: list[int] = []
        self.snapshots: list[int] = []
        self.snapshot_failures = 0
        self.log: list[str] = []
        """Promotions, refusals and failures, in order."""

    def outcome(self, outcome: ApplyResult) -> None:
        self.outcomes.append(outcome)

    def prepared(self, transactions: Sequence[Transaction]) -> None:
        self.prepares.extend(transaction.id for transaction in transactions)

    def decided(self, transactions: Sequence[Transaction]) -> None:
        self.decisions.extend(transaction.id for transaction in transactions)

    def promoted(self, transactions: list[Transaction]) -> None:
        self.promotions.extend(transaction.id for transaction in transactions)
        self.log.extend(f"promoted {transaction.id}" for transaction in transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        self.refusals.extend(transaction.id for transaction in transactions)
        self.log.extend(f"refused {transaction.id}" for transaction in transactions)

    def lost(self, count: int) -> None:
        self.losses.append(count)

    def snapshot_written(self, seconds: float, entries: int) -> None:
        self.snapshots.append(entries)

    def snapshot_failed(self) -> None:
        """A snapshot could not be written."""
        self.snapshot_failures += 1

    def recovered(self, seconds: float) -> None:
        """A partition was recovered."""

    def foreign(self, topic: str, count: int) -> None:
        self.foreigners.extend([topic] * count)

    def fenced(self) -> None:
        """Another owner took over."""

    def kafka_failed(self, operation: str) -> None:
        self.failures.append(operation)
        self.log.append(f"{operation} lost")

    def effects(self) -> list[Effect]:
        """Return the effects of records that changed nothing."""
        return [outcome.effect for outcome in self.outcomes]


async def as_it_is(log: Log, records: Sequence[Record]) -> Appended:
    return await log.append(records)


async def without_offset(log: Log, records: Sequence[Record]) -> Appended:
    """Store without returning the offset."""
    stored = await log.append(records)
    return Appended(-1, stored.timestamp_ms)


async def without_time(log: Log, records: Sequence[Record]) -> Appended:
    """Store without returning the append time."""
    stored = await log.append(records)
    return Appended(stored.base_offset, -1)


async def stored_unanswered(log: Log, records: Sequence[Record]) -> Appended:
    await log.append(records)
    raise AppendUnknown("the answer was lost")


async def lost_unanswered(log: Log, records: Sequence[Record]) -> Appended:
    raise AppendUnknown("the request was lost")


def after(before: Callable[[], None]) -> Append:
    """Return an append after an action of another client."""

    async def append(log: Log, records: Sequence[Record]) -> Appended:
        before()
        return await log.append(records)

    return append


class Gate:
    """Holds one call back until opened; `reached` is set when the call arrives."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        self.reached.set()
        await self._open.wait()

    async def append(self, log: Log, records: Sequence[Record]) -> Appended:
        """An append that waits at the gate before it reaches the broker."""
        await self.wait()
        return await log.append(records)

    async def write(self, door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        """A turn that waits at the gate before it is written."""
        await self.wait()
        return await door.write(turn)

    async def store(self, door: MemoryPartitionDoor, records: Sequence[Record]) -> None:
        """A part of a snapshot that waits at the gate before it is stored."""
        await self.wait()
        await door.store(records)

    async def append_unheard(self, log: Log, records: Sequence[Record]) -> Appended:
        """An append whose answer waits at the gate."""
        stored = await log.append(records)
        await self.wait()
        return stored


class Held(PromotionTxnHandle):
    """A turn whose commit is acknowledged, and seen, when its gates are opened."""

    def __init__(self, *, committed: bool = True, visible: bool = True) -> None:
        self.at_commit, self.at_visible = Gate(), Gate()
        if committed:
            self.at_commit.open()
        if visible:
            self.at_visible.open()
        self.offsets: Sequence[int] = ()
        self.parked_offsets: Sequence[int] = ()
        self._inner: PromotionTxnHandle | None = None

    async def write(self, door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        """Write, and hand out this as the turn."""
        self._inner = await door.write(turn)
        self.offsets = self._inner.offsets
        self.parked_offsets = self._inner.parked_offsets
        return self

    async def committed(self) -> None:
        await self.at_commit.wait()
        assert self._inner is not None
        await self._inner.committed()

    async def visible(self) -> None:
        await self.at_visible.wait()
        assert self._inner is not None
        await self._inner.visible()


def raising(error: Exception) -> Write:
    """Return a write that fails without having written anything."""

    async def write(door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        raise error

    return write
