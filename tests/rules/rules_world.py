"""One half partition on a Kafka in memory, where a test decides every answer.

The brokers' clock here runs with the monotonic clock from a start of its own, years away from this
machine's wall clock, and can be put forward together with the owner's.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path

from msgspec import structs

from tests.rules.told import Told
from txbroker.checkers import base
from txbroker.checkers.base import AttemptRequest, CheckCall, CheckResult
from txbroker.checkers.groups import Groups
from txbroker.config.settings import Settings
from txbroker.contract.service import DecideRequest, PrepareRequest, TransactionStatus
from txbroker.core.decoding import decode_checkpoint, decode_marker
from txbroker.core.encoding import encode_half, encode_marker
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import (
    RECORD_VERSION,
    Cause,
    Checkpoint,
    CheckPolicy,
    CheckReason,
    Claim,
    Decision,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
)
from txbroker.core.routing import make_id
from txbroker.core.segment import SEGMENT_VERSION
from txbroker.core.snapshot import is_snapshot
from txbroker.core.transaction import Transaction, places
from txbroker.door.protocols import (
    Appended,
    AppendUnknown,
    Claimed,
    Log,
    PromotionTxn,
    PromotionTxnHandle,
)
from txbroker.errors import RequestError, TxbrokerError
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.partition.checkback import CheckBack
from txbroker.proxy.partition.context import OwnerSettings, ProxyContext
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.testing.door import MemoryDoor, MemoryPartitionDoor
from txbroker.testing.memory import AdjustableClock, MemoryKafka

START_MS = 1_700_000_000_000
WINDOW_MS = 120_000
DAY_MS = 86_400_000
QUICK = CheckPolicy(after_s=0.0, interval_s=0.02, attempts_max=3, timeout_s=0.02)
"""Checks that come as fast as a test can look."""
GROUP = "g"

_NUMBERS = itertools.count(1)

Append = Callable[[Log, Sequence[Record]], Awaitable[Appended]]
Write = Callable[[MemoryPartitionDoor, PromotionTxn], Awaitable[PromotionTxnHandle]]
Claims = Callable[[MemoryPartitionDoor, Claim], Awaitable[Claimed]]
Store = Callable[[MemoryPartitionDoor, Sequence[Record]], Awaitable[None]]


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


async def settled() -> None:
    """Let everything that can go on without an answer from outside go on."""
    for _ in range(50):
        await asyncio.sleep(0)


class ScriptedLog:
    """A `Log` on one in memory; `script` holds what the next appends do instead."""

    def __init__(self, inner: Log, name: str, calls: list[str]) -> None:
        self.inner = inner
        self.batch_bytes_max = inner.batch_bytes_max
        self.script: deque[Append] = deque()
        self.bounds_gate = asyncio.Event()
        self.bounds_gate.set()
        self._name = name
        self._calls = calls

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append as the script says, else as it is."""
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
        """Read as it is."""
        self._calls.append(f"{self._name}.read")
        async for records in self.inner.read(start, end, skipped):
            yield records

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Pick as it is."""
        self._calls.append(f"{self._name}.pick")
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

    async def checkpoint_end(self) -> int:
        """Ask."""
        return await self.inner.checkpoint_end()

    async def claimed_before(self) -> bool:
        """Answer as it is."""
        return await self.inner.claimed_before()

    async def parked_before(self) -> bool:
        """Answer as it is."""
        return await self.inner.parked_before()

    async def claim(self, claim: Claim) -> Claimed:
        """Claim as the script says, else as it is."""
        self.calls.append("claim")
        if self.claims:
            return await self.claims.popleft()(self.inner, claim)
        return await self.inner.claim(claim)

    async def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Read as it is."""
        self.calls.append("parked")
        async for records in self.inner.parked():
            yield records

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Pick as it is."""
        self.calls.append("pick_parked")
        return await self.inner.pick_parked(offsets)

    async def store(self, records: Sequence[Record]) -> None:
        """Store as the script says, else as it is."""
        self.calls.append("store")
        if self.stores:
            return await self.stores.popleft()(self.inner, records)
        return await self.inner.store(records)

    def unverified(self, places: Collection[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """Answer as it is."""
        return self.inner.unverified(places)

    async def verify_no_open_txn(self, places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        """Answer as it is."""
        return await self.inner.verify_no_open_txn(places)

    async def write(self, turn: PromotionTxn) -> PromotionTxnHandle:
        """Write as the script says, else as it is."""
        self.turns.append(turn)
        if self.writes:
            return await self.writes.popleft()(self.inner, turn)
        return await self.inner.write(turn)

    async def close(self) -> None:
        """Close."""
        await self.inner.close()


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


class Handed:
    """A `Runner` that only remembers what was handed out."""

    def __init__(self) -> None:
        self.due_now: list[tuple[str, CheckReason]] = []
        self.prefers: list[str] = []

    def due(self, owner: CheckBack, id: str, group: str, prefer: str, reason: CheckReason) -> bool:
        """Remember a check."""
        self.due_now.append((id, reason))
        self.prefers.append(prefer)
        return True

    def forget(self, owner: CheckBack) -> None:
        """Nothing is kept here for an owner."""


class OwnersTime:
    """What `txbroker.proxy.partition.clock` takes its time from in these tests."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        """The monotonic clock, put forward."""
        return time.monotonic() + self.ahead_s

    def time(self) -> float:
        """Nobody may ask for this."""
        raise AssertionError("an owner asked the wall clock")


async def attempt(
    checks: CheckBack, id: str, reason: CheckReason, endpoint: str = "http://group"
) -> CheckCall | None:
    """Make one attempt, as the runner does."""
    [call] = await checks.attempt([AttemptRequest(id, reason, endpoint)])
    if isinstance(call, TxbrokerError):
        raise call
    return call


async def answered(checks: CheckBack, call: CheckCall, result: CheckResult) -> None:
    """Have what came of one attempt taken, as the runner does."""
    await checks.answered([base.AttemptResult(call, "http://group", result)])


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
        """Return the answer of the test."""
        return self.ours

    def bodies_share(self) -> int:
        """Return the bytes of bodies that the test allows."""
        return self.share

    def settled_share(self) -> int:
        """Return the bytes of settled transactions that the test allows."""
        return self.settled


class World:
    """A Kafka, a door, and any number of owners of partition 0 one after another."""

    def __init__(self, owners_time: OwnersTime) -> None:
        began = time.monotonic()
        self.owners_time = owners_time
        self.clock = AdjustableClock(lambda: START_MS + int((time.monotonic() - began) * 1000))
        self.kafka = MemoryKafka(self.clock)
        self.door = ScriptedDoor(self.kafka, half_partitions=1, facts_ttl_s=0.01)
        self.runner = Handed()
        self.told = Told()
        self.proxy = FakeProxy()
        self.stops: list[Exception] = []
        self._owners: list[PartitionOwner] = []
        self._brokers: list[tuple[Broker, ScriptedDoor]] = []

    async def start(self) -> None:
        """Make the topics: ours, and the targets `t` (two partitions) and `u`."""
        await self.door.start()
        self.kafka.create_topic("t", 2)
        self.kafka.create_topic("u", 1)

    async def close(self) -> None:
        """Close every owner."""
        for broker, door in self._brokers:
            await broker.close()
            await door.close()
        for owner in self._owners:
            await owner.close()

    def make(self, **settings: object) -> PartitionOwner:
        """Return an owner that is not open yet, on a door of its own."""
        given = OwnerSettings(
            dedup_window_ms=WINDOW_MS,
            pending_max=1000,
            pending_group_max=1000,
            half_retention_ms=14 * DAY_MS,
            turns=PromotionLimits(),
        )

        owner = PartitionOwner(
            self.door.partition(0),
            self.door.targets,
            self.runner,
            self.told,
            structs.replace(given, **settings),
            self.proxy,
            self.stops.append,
        )
        self._owners.append(owner)
        return owner

    async def owner(self, **settings: object) -> PartitionOwner:
        """Return an owner at work."""
        owner = self.make(**settings)
        await owner.open()
        return owner

    @property
    def partition(self) -> ScriptedPartition:
        """The door of the owner made last."""
        return self.door.opened[0]

    def advance(self, seconds: float) -> None:
        """Put the brokers' clock and the owner's forward together."""
        self.clock.advance(seconds)
        self.owners_time.ahead_s += seconds

    # --- a whole broker ----------------------------------------------------------------------

    async def broker(self, door: ScriptedDoor) -> Broker:
        """Return a broker at work on all partitions of a door of its own."""
        settings = Settings(instance="one", advertise="http://127.0.0.1:1", data_dir=Path("unused"))
        groups = Groups(door.groups)
        await door.start()
        broker = Broker(door, settings, groups, self.runner, self.told)
        self._brokers.append((broker, door))
        await broker.start()
        return broker

    # --- as a client -------------------------------------------------------------------------

    def half(self, *messages: Message, id: str = "", **fields: object) -> Half:
        """Return a half message of now, of one plain message if none is given."""
        id = id or make_id(0, self.clock.now_ms(), next(_NUMBERS))
        plain = Half(id, GROUP, messages or (message(id),))
        return structs.replace(plain, **fields)

    async def prepared(self, owner: PartitionOwner, *messages: Message, **fields: object) -> str:
        """Prepare a transaction and return its id."""
        half = self.half(*messages, **fields)
        await prepare(owner, half)
        return half.id

    async def committed(self, owner: PartitionOwner, *messages: Message, **fields: object) -> str:
        """Prepare and commit a transaction and return its id."""
        id = await self.prepared(owner, *messages, **fields)
        await commit(owner, id)
        return id

    # --- as somebody else who writes ---------------------------------------------------------

    def zombie_half(self, half: Half) -> None:
        """Write a half message as an owner that does not know that it was fenced."""
        self.kafka.topics["txbroker.half"].partitions[0].append(
            encode_half(half), self.clock.now_ms()
        )

    def zombie_mark(self, kind: MarkerKind | str, id: str, **fields: object) -> None:
        """Write a marker as an owner that does not know that it was fenced."""
        self.zombie_op(encode_marker(marker(kind, id, **fields)))

    def zombie_op(self, record: Record) -> None:
        """Write any record to the operation topic."""
        self.kafka.topics["txbroker.op"].partitions[0].append([record], self.clock.now_ms())

    # --- what is there -----------------------------------------------------------------------

    def visible(self, topic: str = "t", partition: int = 0) -> list[str]:
        """The values that `read_committed` consumers see."""
        records = self.kafka.visible(topic, partition)
        return [(record.value or b"").decode() for record in records]

    def markers(self) -> list[Marker]:
        """All markers of the operation topic."""
        return [decode_marker(record) for record in self.kafka.visible("txbroker.op")]

    def kinds(self) -> list[str]:
        """The kinds of all markers."""
        return [str(each.kind) for each in self.markers()]

    def progress(self) -> Checkpoint:
        """The newest progress that was committed."""
        records = self.kafka.visible("txbroker.checkpoint")
        found = [decode_checkpoint(r) for r in records if not is_snapshot(r.key)]
        return [each for each in found if isinstance(each, Checkpoint)][-1]

    def parked(self) -> list[tuple[bytes | None, bool]]:
        """Keys of the parked topic, and whether the record is a copy (else a tombstone)."""
        records = self.kafka.visible("txbroker.parked")
        return [(record.key, record.value is not None) for record in records]


def message(value: str, topic: str = "t", key: bytes | None = b"k", at: int = 0) -> Message:
    """Return a message for partition `at` of a topic."""
    return Message(topic, key, value.encode(), partition=at)


def marker(kind: MarkerKind | str, id: str, **fields: object) -> Marker:
    """Return a marker of this version."""
    return structs.replace(Marker(RECORD_VERSION, MarkerKind(kind), id), **fields)


async def prepare(owner: PartitionOwner, half: Half, instance: str = "") -> TransactionStatus:
    """Store one half message."""
    [answer] = await owner.api.prepare(((half, places(half.messages)),), instance)
    if isinstance(answer, RequestError):
        raise answer
    return answer


def standing_of(owner: PartitionOwner, request: PrepareRequest) -> TransactionStatus | None:
    """Return the standing of a prepare that was stored before, None for a new one."""
    answer = owner.api.standing_prepares((request,)).get(0)
    if isinstance(answer, RequestError):
        raise answer
    return answer


async def commit(owner: PartitionOwner, id: str, **fields: object) -> TransactionStatus:
    """Commit."""
    return await decide(owner, structs.replace(DecideRequest(id, Decision.COMMIT), **fields))


async def decide(owner: PartitionOwner, request: DecideRequest) -> TransactionStatus:
    """Write one deciding marker."""
    [answer] = await owner.api.decide((request,))
    if request.wait:
        answer = await owner.api.visible_by(request, answer)
    if isinstance(answer, RequestError):
        raise answer
    return answer


async def roll_back(owner: PartitionOwner, id: str, **fields: object) -> TransactionStatus:
    """Roll back."""
    return await decide(owner, structs.replace(DecideRequest(id, Decision.ROLLBACK), **fields))


def known(owner: PartitionOwner, id: str) -> Transaction:
    """Return what an owner's ledger knows of a transaction that must be there."""
    transaction = owner.ledger.index.get(id)
    assert transaction is not None
    return transaction


# --- what a log can do instead of appending ------------------------------------------------------


async def without_offset(log: Log, records: Sequence[Record]) -> Appended:
    """Stored, and the broker does not say where."""
    stored = await log.append(records)
    return Appended(-1, stored.timestamp_ms)


async def without_time(log: Log, records: Sequence[Record]) -> Appended:
    """Stored, and the broker does not say when."""
    stored = await log.append(records)
    return Appended(stored.base_offset, -1)


async def stored_unanswered(log: Log, records: Sequence[Record]) -> Appended:
    """Stored, and the answer is lost."""
    await log.append(records)
    raise AppendUnknown("the answer was lost")


async def lost_unanswered(log: Log, records: Sequence[Record]) -> Appended:
    """Lost on its way."""
    raise AppendUnknown("the request was lost")


def behind(before: Callable[[], None]) -> Append:
    """Return an append before which somebody else does something."""

    async def append(log: Log, records: Sequence[Record]) -> Appended:
        before()
        return await log.append(records)

    return append


class Gate:
    """Holds one call back until it is opened: `reached` says that it is there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    def open(self) -> None:
        """Let the call go on."""
        self._open.set()

    async def wait(self) -> None:
        """Wait at the gate."""
        self.reached.set()
        await self._open.wait()

    async def append(self, log: Log, records: Sequence[Record]) -> Appended:
        """An append that waits at the gate before it reaches the broker."""
        await self.wait()
        return await log.append(records)

    async def append_unheard(self, log: Log, records: Sequence[Record]) -> Appended:
        """An append whose answer waits at the gate."""
        stored = await log.append(records)
        await self.wait()
        return stored


class Held:
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
        """Wait for the gate."""
        await self.at_commit.wait()
        assert self._inner is not None
        await self._inner.committed()

    async def visible(self) -> None:
        """Wait for the gate."""
        await self.at_visible.wait()
        assert self._inner is not None
        await self._inner.visible()


def raising(error: Exception) -> Write:
    """Return a write that fails without having written anything."""

    async def write(door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        raise error

    return write
