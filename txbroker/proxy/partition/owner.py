"""The owner of one half partition: it alone writes, checks and promotes its transactions.

`PartitionOwner` makes the parts, starts and stops them. An arrow is a call or a read:

    Broker                                      CheckRunner
      │ prepare, decide, revive                   │ attempt,  ▲
      ▼                                           ▼ answered  │ due
    PartitionApi ◀──── decide (`Decider`) ────── CheckBack ────┘   ───▶ BodyCache
      │    └──────────────┐       ┌───────────────┘
      ▼                   ▼       ▼
    Appender (half)     Appender (op)           runs of rows in, outcomes out
      ▼                   ▼
    LogReplica ─▶ Ledger ◀─ LogReplica          `apply_run`, or records of other owners
      └─────────┬─────────┘
                ▼ changed transactions
    PartitionContext ─▶ followers: BodyCache, LogClockFollower, CheckBack, Promoter

    PartitionApi ──▶ Promoter               is there room; retry a refused transaction
    Promoter ──▶ TxnLimiter, Ledger, BodyCache, RetryQueue, TargetQuarantine
             ──▶ Appender (half)            a commit arrived before its half message
             ──▶ Claims (`Claimer`)         after a lost promotion transaction
    Claims ──▶ both appenders, Ledger, SnapshotWriter
    Scanner ──▶ BodyCache, Ledger           a page of a search
    RetentionGuard ──▶ BodyCache, Promoter, SnapshotWriter    called by `PartitionOwner._watch`
    BodyCache ──▶ SnapshotWriter            bodies are lost: the next owner must know
    SnapshotWriter ──▶ Ledger               a capture, chunk by chunk

Callbacks that leave the partition: `stopped(error)` (any part ─▶ PartitionManager: the partition
cannot go on), `ProxyContext.group.still_ours` (Claims ─▶ PartitionManager), `PartitionEvents`.
Callback within: `on_results` of `Appender.append` (─▶ PartitionApi, which counts prepares in
flight).

All parts get one `PartitionContext`. Each part that writes to Kafka (appenders, Promoter, Claims,
SnapshotWriter) waits at one place for its gate, which is closed while the owner is suspended.
Until the logs are replayed (`recover`), `BodyCache` is the only follower.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from txbroker.contract.service import HalfPartitionState
from txbroker.core.ledger import Ledger
from txbroker.core.records import Claim, State
from txbroker.door.protocols import Claimed, Hanging, PartitionDoor, Targets
from txbroker.door.writing import Fenced
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.appender import Appender, LogReplica
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.checkback import CheckBack, Runner
from txbroker.proxy.partition.clock import (
    KafkaAnswers,
    LogClockFollower,
    Yielder,
    claim_backoff,
)
from txbroker.proxy.partition.context import (
    OwnerSettings,
    PartitionContext,
    PartitionEvents,
    ProxyContext,
)
from txbroker.proxy.partition.partition_api import PartitionApi
from txbroker.proxy.partition.promoter import Promoter
from txbroker.proxy.partition.recovery import Recovered, check_checkpoint, read_copies, recover
from txbroker.proxy.partition.retention import RetentionGuard
from txbroker.proxy.partition.scan import Scanner
from txbroker.proxy.partition.snapshots import SnapshotWriter

IDLE_S = 1.0
"""After this time without an append an owner reads its logs for records of other owners."""
EDGES_S = 10.0
"""Interval at which an owner verifies its logs and what retention deleted."""
"""Pauses between claims are random and grow to the maximum."""

log = get_logger(__name__)


class PartitionOwner:
    """One half partition, from its claim until it moves away.

    Attributes:
        gate: set unless this owner is suspended.
        kafka: whether Kafka answers the regular reads of the logs.
        suspended_since_ms: by the brokers' clock, None unless it is suspended.
        clock: the brokers' clock.
        id_clock: by it ids are made and judged: where the half topic's log clock will stand when a
            record is appended now. If that broker's clock is put back the log clock stands still,
            and ids by any other clock would soon be void.
    """

    def __init__(
        self,
        door: PartitionDoor,
        targets: Targets,
        runner: Runner,
        events: PartitionEvents,
        settings: OwnerSettings,
        proxy: ProxyContext,
        stopped: Callable[[Exception], None],
    ) -> None:
        self.partition = door.partition
        window_ms, beyond_max = settings.dedup_window_ms, proxy.beyond_max()
        self.ledger = ledger = Ledger(door.partition, window_ms, beyond_max)
        ledger.index.settled.version = proxy.segment_version
        ledger.index.share_by(proxy.principals().share_of)
        self._context = context = PartitionContext(
            door, targets, events, settings, proxy, stopped, ledger
        )
        self.rates = context.rates
        self.kafka = KafkaAnswers()
        self.suspended_since_ms: int | None = None
        self.gate = context.gate
        self.clock = context.clock
        self.id_clock = context.id_clock
        self._phase = HalfPartitionState.CLAIMING
        self._resumed_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._checking: asyncio.Task[None] | None = None
        self._closed = False
        self._half = Appender(context, door.half, LogReplica(context, "half"))
        self._op = Appender(context, door.op, LogReplica(context, "op"))
        self._snapshots = SnapshotWriter(context)
        self._claims = Claims(context, self._half, self._op, self._snapshots)
        self.bodies = BodyCache(context, self._snapshots)
        self._promoter = Promoter(context, self.bodies, self._half, self._claims)
        self._retention = RetentionGuard(context, self.bodies, self._promoter, self._snapshots)
        self.api = PartitionApi(context, self._half, self._op, self._promoter)
        self.scanner = Scanner(context, self.bodies)
        self.checks = CheckBack(context, self._op, runner, self.bodies, self.api)
        # While the logs are replayed only memory is bounded; the others follow afterwards.
        context.followers.append(self.bodies)

    # --- life ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the partition, recover it, and start to work.

        Raises:
            Fenced: another proxy owns the partition.
            LogTruncated: a topic was truncated or recreated.
            NewerRecord: a newer version wrote a record that this one does not understand.
            KafkaUnavailable: Kafka does not answer.
        """
        claimed = await self._claims.first()
        self._phase = HalfPartitionState.REPLAYING
        await self._begin(await recover(self._context, claimed))
        clock = LogClockFollower(self.clock, self.ledger)
        self._context.followers.extend((clock, self.checks, self._promoter))
        failpoint("recover.done")
        loops = (
            self._half.run,
            self._op.run,
            self._promoter.run,
            self._watch,
            self._snapshots.run,
        )
        self._tasks = [self._begin_task(loop) for loop in loops]
        self._phase = HalfPartitionState.OWNED
        self._resumed_s = time.monotonic()
        self._begin_checks()
        self._promoter.wake()

    async def _begin(self, recovered: Recovered) -> None:
        half_ms = max(recovered.timestamp_ms, self.ledger.half_clock_ms)
        self.clock.at_least(max(half_ms, self.ledger.op_clock_ms))
        self.id_clock.at_least(half_ms)
        self._snapshots.start_from(recovered.greatest, recovered.snapshots, recovered.position)
        await self._retention.deleted_before(recovered.half_start)
        yielder = Yielder()
        for transaction in list(self.ledger.index.transactions.values()):
            self.checks.touch(transaction)
            await yielder.step()

    async def close(self, *, last_snapshot: bool = False) -> None:
        """Stop working; records in flight may or may not be stored.

        Args:
            last_snapshot: write one if records have come since the newest one and the partition
                cannot have another owner yet: retention may pass it before the next claim.
        """
        failpoint("handover.closing")
        self._closed = True
        self._context.proxy.actions.end(self.partition)
        self._snapshots.abandon()
        self.checks.close()
        tasks = [*self._tasks, *([] if self._checking is None else [self._checking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if last_snapshot and self.phase is HalfPartitionState.OWNED:
            await self._snapshots.last()
        self._context.visible.close()
        await self._context.door.close()
        failpoint("handover.closed")

    def suspend(self) -> None:
        """Stop writing, but keep the state: the owner of the partition is unknown.

        Calls, also waiting ones, get `owner_unavailable`; appends in flight are awaited.
        """
        if self.gate.is_set():
            self.gate.clear()
            self.suspended_since_ms = self.clock.now_ms()
            failpoint("handover.suspended")
            self._half.turn_away()
            self._op.turn_away()
            self._snapshots.abandon()
            if self._checking is not None:
                self._checking.cancel()
                self._checking = None

    def resume(self) -> None:
        """Continue: the partition is still ours.

        If another owner claimed it in between, the next promotion transaction is fenced, and that
        owner's records are read before ours are applied.
        """
        if not self.gate.is_set() and not self._closed:
            self.gate.set()
            self.suspended_since_ms = None
            self._resumed_s = time.monotonic()
            if self._tasks:
                self._begin_checks()
            self._promoter.wake()

    def _begin_checks(self) -> None:
        if self.gate.is_set():
            self._checking = self._begin_task(self.checks.run)

    @property
    def phase(self) -> HalfPartitionState:
        if not self.gate.is_set():
            return HalfPartitionState.SUSPENDED
        return HalfPartitionState.HANGING if self._claims.hanging else self._phase

    def stuck_since_s(self) -> float:
        """Return for how long no promotion transaction, or reclaim, has succeeded, seconds.

        0 if all is well. Suspended time does not count.
        """
        since_s = self._promoter.stuck_since
        if since_s is None or not self.gate.is_set():
            return 0.0
        return time.monotonic() - max(since_s, self._resumed_s)

    async def read_actions(self, until_s: float) -> None:
        """Read operators' older actions from the operation topic until a time of the loop."""
        index = self.ledger.index

        def group_of(id: str) -> str:
            transaction = index.get(id)
            return "" if transaction is None else transaction.half.group

        context = self._context
        log, actions = context.door.op, context.proxy.actions
        await actions.read_back(log, self.partition, until_s, group_of)

    def _begin_task(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(loop())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._context.stopped(error)

    async def _watch(self) -> None:
        """Read other owners' records while idle, and copy bodies before retention deletes them."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(IDLE_S)
            self.rates.sample()
            self.ledger.index.share_by(self._context.proxy.principals().share_of)
            try:
                self.kafka.asked(self.clock.now_ms())
                await self._half.look(IDLE_S)
                await self._op.look(IDLE_S)
                self.kafka.answered()
                await self._retention.keep_old()
                if time.monotonic() - looked_s >= EDGES_S:
                    looked_s = time.monotonic()
                    await self._retention.look()
            except KafkaUnavailable as error:
                self.kafka.why = str(error)
                log.warning("log not read", partition=self.partition, why=str(error))


class Claims:
    """Claims one half partition: a `txbroker.proxy.partition.promoter.Claimer`.

    Attributes:
        hanging: whether an open transaction hid the checkpoint at the last attempt.
    """

    def __init__(
        self, context: PartitionContext, half: Appender, op: Appender, snapshots: SnapshotWriter
    ) -> None:
        self.hanging = False
        self._context = context
        self._half = half
        self._op = op
        self._snapshots = snapshots

    async def first(self) -> Claimed:
        """Claim a partition before its recovery; return what the claim found."""
        backoff = claim_backoff()
        while True:
            try:
                return await self._claim(first=True)
            except Fenced:
                await self._pause(backoff.pause)

    async def _claim(self, *, first: bool = False) -> Claimed:
        """Claim under a new id, once the owner is not suspended."""
        context, proxy = self._context, self._context.proxy
        # A suspended owner would fence the rightful one.
        await context.gate.wait()
        if first:
            await check_checkpoint(context.door)
        context.claim.id = uuid.uuid4().hex
        claim = Claim(proxy.record_version, context.claim.id, proxy.name, proxy.url)
        return await context.door.claim(claim)

    async def _pause(self, pause: Callable[[], Awaitable[bool]]) -> None:
        """Pause before the next claim; raise `Fenced` if the partition has moved."""
        await pause()
        await self._check_ours()

    async def _check_ours(self) -> None:
        """Ask the group whether the partition is ours, until it answers."""
        partition, backoff = self._context.partition, claim_backoff()
        while True:
            await self._context.gate.wait()
            try:
                ours = await self._context.proxy.group.still_ours(partition)
            except KafkaUnavailable as error:
                # Also during a rebalance.
                log.warning("not known whose", partition=partition, why=str(error))
                await backoff.pause()
            else:
                if not ours:
                    raise Fenced(f"partition {partition} has another owner")
                return

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Reclaim after a lost promotion transaction, and take over its result if committed."""
        context, backoff = self._context, claim_backoff()
        while True:
            try:
                await self._check_ours()
                failpoint("reclaim.asked")
                claimed = await self._claim()
                failpoint("reclaim.claimed")
                # Another owner may have come and gone. This checkpoint covers what it appended and
                # promoted: records of it that are read later would be promoted again.
                await self._op.catch_up()
                await self._half.catch_up()
                copies = await read_copies(context.door, claimed.skips)
                break
            except Fenced:
                await self._pause(backoff.pause)
            except KafkaUnavailable as error:
                log.warning("claim failed", partition=context.partition, why=str(error))
                if isinstance(error, Hanging):
                    self.hanging = True
                context.events.kafka_failed("claim")
                await backoff.pause()
        self.hanging = False
        # A snapshot in progress would contain a part of the changes that follow.
        self._snapshots.abandon()
        committed = context.ledger.reconcile(claimed.progress, copies.whole, unseen)
        copies.check(committed)
        context.claim.reclaims += 1
        failpoint("reclaim.done")
        log.info("claimed again", partition=context.partition, committed_meanwhile=len(committed))
        if committed:
            context.promoted(committed)
        # The lost promotion transactions may have refused some.
        waiting = [context.ledger.index.transactions.get(id) for id in context.visible]
        context.visible.release([t for t in waiting if t and t.state is not State.COMMITTED])
