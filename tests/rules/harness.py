"""One half partition on a Kafka in memory, where a test decides every answer.

The brokers' clock runs with the monotonic clock from a separate start, years before this machine's
wall clock, and can be put forward together with the owner's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import pytest
from msgspec import structs

from tests.kit.logs import with_fields
from tests.rules.fakes import (
    FakeProxy,
    FakeRunner,
    FakeTime,
    RecordedEvents,
    ScriptedDoor,
    ScriptedPartition,
)
from txbroker.checkers import base
from txbroker.checkers.base import AttemptRequest, CheckCall, CheckResult
from txbroker.checkers.groups import Groups
from txbroker.config.settings import Settings
from txbroker.contract.service import Answer, DecideRequest, PrepareRequest, TransactionStatus
from txbroker.core.decoding import decode_checkpoint, decode_marker
from txbroker.core.encoding import encode_half, encode_marker, half_row, marker_row
from txbroker.core.ledger import ApplyResult, Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import (
    RECORD_VERSION,
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
    State,
)
from txbroker.core.routing import make_id
from txbroker.core.snapshot import is_snapshot
from txbroker.core.transaction import Transaction, fingerprint, places
from txbroker.door.protocols import LogTruncated
from txbroker.errors import RequestError, TxbrokerError
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.partition.appender import Appender, LogReplica
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.checkback import CheckBack
from txbroker.proxy.partition.context import CurrentClaim, OwnerSettings, PartitionContext
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.proxy.partition.promoter import Promoter
from txbroker.proxy.partition.snapshots import SnapshotWriter
from txbroker.testing.door import MemoryDoor, MemoryPartitionDoor
from txbroker.testing.memory import AdjustableClock, MemoryKafka
from txbroker.testing.topics import MemoryPartition

START_MS = 1_700_000_000_000
WINDOW_MS = 120_000
DAY_MS = 86_400_000
QUICK = CheckPolicy(after_s=0.0, interval_s=0.02, attempts_max=3, timeout_s=0.02)
"""Checks that come as fast as a test can look."""
GROUP = "g"

_NUMBERS = itertools.count(1)
NOW = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=15, timeout_s=5.0)
OWN = ("half", "op", "checkpoint", "parked")


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


async def settled() -> None:
    """Run everything that needs no answer from outside."""
    for _ in range(50):
        await asyncio.sleep(0)


class Harness:
    """A Kafka, a door, and any number of owners of partition 0 one after another."""

    def __init__(self, time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
        began = monotonic()
        self.monkeypatch = monkeypatch
        self.time = time
        self.clock = AdjustableClock(lambda: START_MS + int((monotonic() - began) * 1000))
        self.kafka = MemoryKafka(self.clock)
        self.door = ScriptedDoor(self.kafka, half_partitions=1, facts_ttl_s=0.01)
        self.runner = FakeRunner()
        self.events = RecordedEvents()
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
        for broker, door in self._brokers:
            await broker.close()
            await door.close()
        for owner in self._owners:
            await owner.close()

    def make(self, **settings: object) -> PartitionOwner:
        """Return an owner that is not open yet, on a separate door."""
        given = OwnerSettings(
            dedup_window_ms=WINDOW_MS,
            pending_max=1000,
            pending_group_max=1000,
            half_retention_ms=14 * DAY_MS,
            promotion_limits=PromotionLimits(),
        )

        owner = PartitionOwner(
            self.door.partition(0),
            self.door.targets,
            self.runner,
            self.events,
            structs.replace(given, **settings),
            self.proxy,
            self.stops.append,
        )
        self._owners.append(owner)
        return owner

    async def owner(self, **settings: object) -> PartitionOwner:
        owner = self.make(**settings)
        await owner.open()
        return owner

    async def restarted(self, owner: PartitionOwner, **settings: object) -> PartitionOwner:
        """Close an owner and return the next one at work."""
        await owner.close()
        return await self.owner(**settings)

    async def truncated(self, match: str) -> None:
        """See that the next owner does not start, because records are missing."""
        with pytest.raises(LogTruncated, match=match):
            await self.owner()

    async def stopped(self, error: type[Exception]) -> None:
        """Wait until an owner has stopped because of an error."""
        await until(lambda: self.stops)
        assert isinstance(self.stops[0], error)

    async def delete(self, owner: PartitionOwner, *, days: float = 0, **before: int) -> None:
        """Close an owner; then days pass, and records of the named logs below offsets go."""
        await owner.close()
        self.advance(days * DAY_MS / 1000)
        for name, offset in before.items():
            self.kafka.truncate(f"txbroker.{name}", before=offset)

    @property
    def partition(self) -> ScriptedPartition:
        return self.door.opened[0]

    def advance(self, seconds: float) -> None:
        """Put the brokers' clock and the owner's forward together."""
        self.clock.advance(seconds)
        self.time.ahead_s += seconds

    # --- a whole broker ----------------------------------------------------------------------

    async def broker(self, door: ScriptedDoor) -> Broker:
        """Return a working broker on all partitions of a door."""
        settings = Settings(instance="one", advertise="http://127.0.0.1:1", data_dir=Path("unused"))
        groups = Groups(door.groups)
        await door.start()
        broker = Broker(door, settings, groups, self.runner, self.events)
        self._brokers.append((broker, door))
        await broker.start()
        return broker

    async def new_broker(self) -> Broker:
        """Return a broker that owns the only partition."""
        broker = await self.broker(ScriptedDoor(self.kafka, half_partitions=1, facts_ttl_s=0.01))
        await until(broker.mine)
        return broker

    # --- as a client -------------------------------------------------------------------------

    def half(self, *messages: Message, id: str = "", **fields: object) -> Half:
        """Return a half message of now, of one plain message if none is given."""
        id = id or make_id(0, self.clock.now_ms(), next(_NUMBERS))
        plain = Half(id, GROUP, messages or (message(id),))
        return with_fields(plain, **fields)

    async def prepared(self, owner: PartitionOwner, *messages: Message, **fields: object) -> str:
        half = self.half(*messages, **fields)
        await prepare(owner, half)
        return half.id

    async def committed(self, owner: PartitionOwner, *messages: Message, **fields: object) -> str:
        """Prepare and commit a transaction and return its id."""
        id = await self.prepared(owner, *messages, **fields)
        await commit(owner, id)
        return id

    async def new_pending(self, *messages: Message, **fields: object) -> tuple[PartitionOwner, str]:
        """Return an owner at work and the id of a transaction that it has prepared."""
        owner = await self.owner()
        return owner, await self.prepared(owner, *messages, **fields)

    async def new_committed(
        self, *messages: Message, **fields: object
    ) -> tuple[PartitionOwner, str]:
        """Return an owner at work and the id of a transaction that it has committed."""
        owner = await self.owner()
        return owner, await self.committed(owner, *messages, **fields)

    async def promoted(self, owner: PartitionOwner, count: int) -> None:
        """Commit the first `count` transactions, and wait until they are visible."""
        for _ in range(count):
            await self.committed(owner)
        await until(lambda: len(self.visible()) == count)

    async def refused(self, owner: PartitionOwner) -> str:
        """Commit a transaction that its target does not take; return its id."""
        id = await self.prepared(owner, message("big" * 100))
        self.kafka.set_message_bytes_max("t", 100)
        await commit(owner, id)
        await until(lambda: self.events.refusals == [id])
        return id

    # --- as a fenced owner -------------------------------------------------------------------

    def zombie_half(self, half: Half) -> None:
        """Write a half message as an owner that does not know that it was fenced."""
        self.kafka.topics["txbroker.half"].partitions[0].append(
            encode_half(half), self.clock.now_ms()
        )

    def zombie_mark(self, kind: MarkerKind | str, id: str, **fields: object) -> None:
        """Write a marker as an owner that does not know that it was fenced."""
        self.zombie_op(encode_marker(marker(kind, id, **fields)))

    def zombie_op(self, record: Record) -> None:
        self.kafka.topics["txbroker.op"].partitions[0].append([record], self.clock.now_ms())

    # --- content of topics -------------------------------------------------------------------

    def visible(self, topic: str = "t", partition: int = 0) -> list[str]:
        """The values that `read_committed` consumers see."""
        records = self.kafka.visible(topic, partition)
        return [(record.value or b"").decode() for record in records]

    def markers(self) -> list[Marker]:
        return [decode_marker(record) for record in self.kafka.visible("txbroker.op")]

    def kinds(self) -> list[str]:
        return [str(each.kind) for each in self.markers()]

    def progress(self) -> Checkpoint:
        records = self.kafka.visible("txbroker.checkpoint")
        found = [decode_checkpoint(r) for r in records if not is_snapshot(r.key)]
        return [each for each in found if isinstance(each, Checkpoint)][-1]

    def parked(self) -> list[tuple[bytes | None, bool]]:
        """Keys of the parked topic, and whether the record is a copy (else a tombstone)."""
        records = self.kafka.visible("txbroker.parked")
        return [(record.key, record.value is not None) for record in records]


class BodiesHarness:
    """A partition whose bodies get `proxy.share` bytes of memory, none at first."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, limits: PromotionLimits | None = None
    ) -> None:
        self.monkeypatch = monkeypatch
        self.clock = AdjustableClock(lambda: START_MS)
        self.kafka = MemoryKafka(self.clock)
        self.whole = MemoryDoor(self.kafka, half_partitions=1, facts_ttl_s=0.0001)
        self.events = RecordedEvents()
        self.limits = limits or PromotionLimits()
        self.proxy = FakeProxy()
        self.proxy.share = 0
        self.lost = self.events.losses
        self.stops: list[Exception] = []
        self.runner = FakeRunner()
        self.ledger = Ledger(0, WINDOW_MS)

    async def start(self) -> None:
        """Make the topics, claim, and begin to work."""
        await self.whole.start()
        for topic, partitions in (("t", 2), ("u", 1)):
            self.kafka.create_topic(topic, partitions)
        inner = self.whole.partition(0)
        assert isinstance(inner, MemoryPartitionDoor)
        self.door = ScriptedPartition(inner)
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
            self.events,
            OwnerSettings(WINDOW_MS, 100, 100, 14 * DAY_MS, self.limits),
            self.proxy,
            self.stops.append,
            self.ledger,
            self.clock,  # type: ignore[arg-type]
            self.clock,  # type: ignore[arg-type]
            CurrentClaim("c"),
        )

    async def close(self) -> None:
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
        self.bodies.changed(transactions)
        self.checks.changed(transactions)
        self.promoter.wake()

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again, as `Claims` does."""
        self.events.log.append("reclaimed")
        claimed = await self.door.claim(Claim(RECORD_VERSION, "c", "one", "http://one"))
        self.ledger.reconcile(claimed.progress, [], unseen)

    async def decide(self, requests: Sequence[DecideRequest]) -> list[Answer]:
        """Take no decision."""
        raise AssertionError("no decision is expected here")

    async def new_broker(self) -> Broker:
        """Return a broker that owns the only partition."""
        broker = await self.broker(ScriptedDoor(self.kafka, half_partitions=1, facts_ttl_s=0.01))
        await until(broker.mine)
        return broker

    # --- as a client ---------------------------------------------------------------------------

    async def prepare(self, *messages: Message, **fields: object) -> Transaction:
        """Prepare a transaction of one plain message, or of these."""
        id = make_id(0, self.clock.now_ms(), next(_NUMBERS))
        half = Half(id, "g", messages or (Message("t", b"k", id.encode(), partition=0),))
        half = with_fields(half, **fields)
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
        await self.mark("commit", transaction, *contents)

    async def promoted(self, transaction: Transaction) -> None:
        """Commit, and wait until it is promoted."""
        await self.commit(transaction)
        await until(lambda: transaction.state is State.PROMOTED)

    def keep(self, *transactions: Transaction) -> None:
        """Have the next promotion write copies."""
        self.ledger.index.to_keep |= {each.id: each for each in transactions}
        self.promoter.wake()

    # --- content of topics ---------------------------------------------------------------------

    def visible(self, topic: str = "t", partition: int = 0) -> list[str]:
        """The values that `read_committed` consumers see."""
        return [(r.value or b"-").decode() for r in self.kafka.visible(topic, partition)]

    def delete_half(self, before: int) -> None:
        """Delete records of the half topic, as DeleteRecords does."""
        self.kafka.partition("txbroker.half", 0).delete_before(before)


def message(value: str, topic: str = "t", key: bytes | None = b"k", at: int = 0) -> Message:
    """Return a message for partition `at` of a topic."""
    return Message(topic, key, value.encode(), partition=at)


def marker(kind: MarkerKind | str, id: str, **fields: object) -> Marker:
    return structs.replace(Marker(RECORD_VERSION, MarkerKind(kind), id), **fields)


async def prepare(owner: PartitionOwner, half: Half, instance: str = "") -> TransactionStatus:
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
    return await decide(owner, structs.replace(DecideRequest(id, Decision.COMMIT), **fields))


async def decide(owner: PartitionOwner, request: DecideRequest) -> TransactionStatus:
    [answer] = await owner.api.decide((request,))
    if request.wait:
        answer = await owner.api.visible_by(request, answer)
    if isinstance(answer, RequestError):
        raise answer
    return answer


async def roll_back(owner: PartitionOwner, id: str, **fields: object) -> TransactionStatus:
    return await decide(owner, structs.replace(DecideRequest(id, Decision.ROLLBACK), **fields))


def known(owner: PartitionOwner, id: str) -> Transaction:
    """Return what an owner's ledger knows of a transaction that must be there."""
    transaction = owner.ledger.index.get(id)
    assert transaction is not None
    return transaction


async def attempt(
    checks: CheckBack, id: str, reason: CheckReason, endpoint: str = "http://group"
) -> CheckCall | None:
    """Make one attempt, as the runner does."""
    [call] = await checks.attempt([AttemptRequest(id, reason, endpoint)])
    if isinstance(call, TxbrokerError):
        raise call
    return call


async def asked(checks: CheckBack, id: str, reason: CheckReason) -> CheckCall:
    """Make one attempt that goes out."""
    call = await attempt(checks, id, reason)
    assert call is not None
    return call


async def answered(checks: CheckBack, call: CheckCall, result: CheckResult) -> None:
    """Deliver the result of one attempt, as the runner does."""
    await checks.answered([base.AttemptResult(call, "http://group", result)])


def facts_of(transaction: Transaction) -> tuple[object, ...]:
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
    return {id: facts_of(transaction) for id, transaction in ledger.index.transactions.items()}


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


def partition(harness: Harness, name: str) -> MemoryPartition:
    """Return partition 0 of one of txbroker's own topics."""
    return harness.kafka.topics[f"txbroker.{name}"].partitions[0]


def records(harness: Harness, name: str) -> list[Record]:
    """Return what `read_committed` readers see of one of txbroker's own topics."""
    return harness.kafka.visible(f"txbroker.{name}")


async def snapshot(owner: PartitionOwner) -> bool:
    return await owner._snapshots.write()


def forget_bodies(owner: PartitionOwner) -> None:
    for transaction in list(owner.ledger.index.transactions.values()):
        owner.ledger.index.evict(transaction)
