"""One half partition in memory whose messages are evicted as soon as nobody holds them.

Everything that writes turns and asks groups is real; only what an owner adds (claims that go wrong,
takeovers) is left out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from msgspec import structs

from tests.rules.rules_world import DAY_MS, FakeProxy
from tests.rules.told import Told
from txbroker.contract.service import Answer, DecideRequest
from txbroker.core.encoding import half_row, marker_row
from txbroker.core.ledger import ApplyResult, Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import (
    RECORD_VERSION,
    Cause,
    CheckPolicy,
    CheckReason,
    Claim,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
)
from txbroker.core.routing import make_id
from txbroker.core.transaction import Transaction, fingerprint, places
from txbroker.door.protocols import Appended, Claimed, Log, PromotionTxn, PromotionTxnHandle
from txbroker.errors import KafkaUnavailable, RequestError
from txbroker.proxy.partition.appender import Appender, LogReplica
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.checkback import CheckBack
from txbroker.proxy.partition.context import (
    CurrentClaim,
    OwnerSettings,
    PartitionContext,
)
from txbroker.proxy.partition.promoter import Promoter
from txbroker.proxy.partition.snapshots import SnapshotWriter
from txbroker.testing.door import MemoryDoor, MemoryPartitionDoor
from txbroker.testing.memory import AdjustableClock, MemoryKafka

START_MS = 1_700_000_000_000
WINDOW_MS = 120_000
NOW = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=15, timeout_s=5.0)

_NUMBERS = itertools.count(1)


class WatchedLog:
    """A `txbroker.door.protocols.Log` that tells what was asked of it."""

    def __init__(self, inner: Log, name: str, calls: list[str]) -> None:
        self.inner = inner
        self.batch_bytes_max = inner.batch_bytes_max
        self.picked: list[list[int]] = []
        self.gate: asyncio.Event | None = None
        self.silent = False
        self._name = name
        self._calls = calls

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append."""
        self._calls.append(f"{self._name}.append")
        return await self.inner.append(records)

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        """Return the bounds."""
        return await self.inner.bounds(confirmed=confirmed)

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Read."""
        async for records in self.inner.read(start, end, skipped):
            yield records

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Pick, once the gate is open; offsets must be as the door asks for them."""
        assert list(offsets) == sorted(set(offsets))
        self._calls.append(f"{self._name}.pick")
        self.picked.append(list(offsets))
        if self.gate is not None:
            await self.gate.wait()
        if self.silent:
            raise KafkaUnavailable(f"{self._name} is silent")
        return await self.inner.pick(offsets)


class WatchedPartition:
    """A `txbroker.door.protocols.PartitionDoor` that tells what was asked of it."""

    def __init__(self, inner: MemoryPartitionDoor) -> None:
        self.inner = inner
        self.partition = inner.partition
        self.calls: list[str] = []
        self.half = WatchedLog(inner.half, "half", self.calls)
        self.op = WatchedLog(inner.op, "op", self.calls)
        self.turns: list[PromotionTxn] = []
        self.picked_parked: list[list[int]] = []
        self.hide_parked_offsets = False

    async def claimed_before(self) -> bool:
        """Answer."""
        return await self.inner.claimed_before()

    async def parked_before(self) -> bool:
        """Answer as it is."""
        return await self.inner.parked_before()

    async def claim(self, claim: Claim) -> Claimed:
        """Claim."""
        return await self.inner.claim(claim)

    async def store(self, records: Sequence[Record]) -> None:
        """Store."""
        await self.inner.store(records)

    async def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Read."""
        self.calls.append("parked")
        async for records in self.inner.parked():
            yield records

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Pick."""
        self.calls.append("pick_parked")
        self.picked_parked.append(list(offsets))
        return await self.inner.pick_parked(offsets)

    def unverified(self, places: Collection[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """Answer."""
        return self.inner.unverified(places)

    async def verify_no_open_txn(self, places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        """Answer."""
        return await self.inner.verify_no_open_txn(places)

    async def write(self, turn: PromotionTxn) -> PromotionTxnHandle:
        """Write."""
        self.calls.append("write")
        self.turns.append(turn)
        handle = await self.inner.write(turn)
        if self.hide_parked_offsets:
            handle.parked_offsets = [-1] * len(handle.parked_offsets)
        return handle

    async def close(self) -> None:
        """Close."""
        await self.inner.close()


class Full:
    """A `Runner` that has room for so many."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.offers: list[str] = []
        self.taken: dict[str, CheckReason] = {}

    def due(self, owner: CheckBack, id: str, group: str, prefer: str, reason: CheckReason) -> bool:
        """Take a check while there is room."""
        self.offers.append(id)
        if id not in self.taken and len(self.taken) >= self.room:
            return False
        self.taken[id] = reason
        return True

    def forget(self, owner: CheckBack) -> None:
        """Nothing is kept here for an owner."""


class _Events(Told):
    """Notes what becomes of turns and bodies."""

    def __init__(self, told: list[str], lost: list[int]) -> None:
        super().__init__()
        self.told = told
        self.losses = lost

    def promoted(self, transactions: list[Transaction]) -> None:
        """These are visible."""
        self.told.extend(f"promoted {each.id}" for each in transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        """These were set aside."""
        self.told.extend(f"refused {each.id}" for each in transactions)

    def kafka_failed(self, operation: str) -> None:
        """Kafka did not do what was asked."""
        self.told.append(f"{operation} lost")


class Small:
    """A partition whose bodies get as much memory as `share` says, none to begin with."""

    def __init__(self, limits: PromotionLimits | None = None) -> None:
        self.clock = AdjustableClock(lambda: START_MS)
        self.kafka = MemoryKafka(self.clock)
        self.whole = MemoryDoor(self.kafka, half_partitions=1, facts_ttl_s=0.0001)
        self.limits = limits or PromotionLimits()
        self.proxy = FakeProxy()
        self.proxy.share = 0
        self.lost: list[int] = []
        self.stops: list[Exception] = []
        self.told: list[str] = []
        self.runner = Full()
        self.ledger = Ledger(0, WINDOW_MS)

    async def start(self) -> None:
        """Make the topics, claim, and begin to work."""
        await self.whole.start()
        for topic, partitions in (("t", 2), ("u", 1)):
            self.kafka.create_topic(topic, partitions)
        inner = self.whole.partition(0)
        assert isinstance(inner, MemoryPartitionDoor)
        self.door = WatchedPartition(inner)
        await self.door.claim(Claim(RECORD_VERSION, "c", "one", "http://one"))
        context = self._context()
        self.half = Appender(context, self.door.half, LogReplica(context, "half"))
        self.op = Appender(context, self.door.op, LogReplica(context, "op"))
        context.followers.append(self)
        self.bodies = BodyCache(context, SnapshotWriter(context))
        self.promoter = Promoter(context, self.bodies, self.half, self)
        self.checks = CheckBack(context, self.op, self.runner, self.bodies, self)
        loops = (self.half.run, self.op.run, self.promoter.run)
        self.tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]

    def _context(self) -> PartitionContext:
        return PartitionContext(
            self.door,
            self.whole.targets,
            _Events(self.told, self.lost),
            OwnerSettings(WINDOW_MS, 100, 100, 14 * DAY_MS, self.limits),
            self.proxy,
            self.stops.append,
            self.ledger,
            self.clock,  # type: ignore[arg-type]
            self.clock,  # type: ignore[arg-type]
            CurrentClaim("c"),
        )

    async def close(self) -> None:
        """Stop."""
        self.checks.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.door.close()
        await self.whole.close()

    async def _guard(self, loop: Callable[[], object]) -> None:
        try:
            await loop()  # type: ignore[misc]
        except Exception as error:
            self.stops.append(error)

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Have the parts follow the ledger."""
        self.bodies.changed(transactions)
        self.checks.changed(transactions)
        self.promoter.wake()

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again, as `Claims` does."""
        self.told.append("reclaimed")
        claimed = await self.door.claim(Claim(RECORD_VERSION, "c", "one", "http://one"))
        self.ledger.reconcile(claimed.progress, [], unseen)

    async def decide(self, requests: Sequence[DecideRequest]) -> list[Answer]:
        """Take no decision."""
        raise AssertionError("nobody answers here")

    # --- as a client ---------------------------------------------------------------------------

    async def prepare(self, *messages: Message, **fields: object) -> Transaction:
        """Prepare a transaction of one plain message, or of these."""
        id = make_id(0, self.clock.now_ms(), next(_NUMBERS))
        half = Half(id, "g", messages or (Message("t", b"k", id.encode(), partition=0),))
        half = structs.replace(half, **fields)
        mark = fingerprint(half.messages, half.group)
        row = half_row(half, RECORD_VERSION, mark, places(half.messages))
        [outcome] = await self.half.append((row,))
        assert isinstance(outcome, ApplyResult)
        assert outcome.transaction is not None
        self.bodies.trim()
        return outcome.transaction

    async def mark(
        self, kind: str, transaction: Transaction, *contents: Message, **fields: object
    ) -> None:
        """Append a marker."""
        marker = Marker(
            RECORD_VERSION,
            MarkerKind(kind),
            transaction.id,
            half=transaction.offset,
            contents=len(contents),
            **fields,  # type: ignore[arg-type]
        )
        [outcome] = await self.op.append((marker_row(marker, transaction.half, contents or None),))
        if isinstance(outcome, RequestError):
            raise outcome

    async def commit(self, transaction: Transaction, *contents: Message) -> None:
        """Commit."""
        await self.mark("commit", transaction, *contents)

    # --- what is there -------------------------------------------------------------------------

    def visible(self, topic: str = "t", partition: int = 0) -> list[str]:
        """The values that `read_committed` consumers see."""
        return [(r.value or b"-").decode() for r in self.kafka.visible(topic, partition)]

    def delete_half(self, before: int) -> None:
        """Delete records of the half topic, as DeleteRecords does."""
        self.kafka.partition("txbroker.half", 0).delete_before(before)
