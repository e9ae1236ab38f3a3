"""The owner of one half partition: it alone writes, diffs, checks and promotes it.

`PartitionOwner` makes the parts, starts and stops them. An arrow is a call or a read:

    Broker                                      CheckRunner
      │ prepare, decide, revive                   │ attempt,  ▲
      ▼                                           ▼ answered  │ due
    PartitionApi ◀────────── decide ─────────── CheckBack ────┘   ───▶ BodyCache
      │    └──────────────┐       ┌───────────────┘
      ▼                   ▼       ▼
    Appender (half)     Appender (op)           runs of rows in, outcomes out
      ▼                   ▼
    HalfReplica ▶ Ledger ◀ OpReplica            `apply_run`, or what others wrote
      └─────────┬─────────┘
                ▼ what has changed
              Applier ───▶ followers: BodyCache, LogClockFollower, CheckBack, Promoter

    PartitionApi ──▶ Promoter               is there room, try a refused one again
    Promoter ──▶ TxnLimiter, Ledger, BodyCache   what a turn waits for, holds, and has to read
             ──▶ Claims, Appender (half)    after a lost turn; behind a commit without its half
    Claims ──▶ both appenders, Ledger, SnapshotWriter
    RetentionGuard ──▶ BodyCache, Promoter, SnapshotWriter    called by `PartitionOwner._watch`
    BodyCache ──▶ SnapshotWriter               bodies are lost: the next owner must know
    SnapshotWriter ──▶ Ledger               a capture, chunk by chunk

Each part but replicas and Applier gets one `PartitionContext`: ledger, settings, events, clocks,
claim, gate. Whatever writes to Kafka (appenders, Promoter, Claims, SnapshotWriter) asks the gate
first, which is closed while the owner is suspended. Until the logs are replayed (`recover`),
`BodyCache` is the only follower.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from txbroker.contract.service import PartitionState
from txbroker.core.index import BEYOND_MAX
from txbroker.core.ledger import Ledger
from txbroker.core.records import Claim, State
from txbroker.core.segment import SEGMENT_BYTES
from txbroker.door.protocols import Claimed, Fenced, Hanging, PartitionDoor, Targets
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.principals import Directory, no_principals
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.rates import RateCounter
from txbroker.proxy.partition.appender import Appender
from txbroker.proxy.partition.applier import Applier, HalfReplica, OpReplica
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.checkback import CheckBack, Runner
from txbroker.proxy.partition.clock import LogClockFollower, LogTime, TxnLimiter, Yielder
from txbroker.proxy.partition.context import (
    CurrentClaim,
    OwnerSettings,
    PartitionContext,
    PartitionEvents,
    VisibilityWaiters,
)
from txbroker.proxy.partition.parked_copies import read_copies
from txbroker.proxy.partition.partition_api import PartitionApi
from txbroker.proxy.partition.promoter import Promoter
from txbroker.proxy.partition.recovery import Recovered, claim_first, recover
from txbroker.proxy.partition.retention import RetentionGuard
from txbroker.proxy.partition.snapshots import SnapshotWriter

IDLE_S = 1.0
"""An owner that has appended nothing for so long looks whether somebody else wrote to its logs."""
EDGES_S = 10.0
"""An owner looks this often whether its logs are still what they were."""
CLAIM_PAUSE_S = 0.2
CLAIM_PAUSE_MAX_S = 2.0
"""Pauses between claims are random and grow to this."""

log = get_logger(__name__)


class PartitionOwner:
    """One half partition, from its claim until it moves away.

    Args:
        door: the partition's logs and turns.
        targets: what is known of target topics.
        runner: carries out the checks that come due.
        events: told what happens.
        settings: limits and windows.
        identity: this proxy's name and URL, for the claim record.
        still_ours: says, after a fresh heartbeat, whether the partition is still this proxy's.
        stopped: told why, once, if the partition cannot go on.
        bodies_share: how many bytes of bodies this partition may keep in memory.
        settled_share: how many bytes of settled transactions.
        segment_version: the version of the segments of settled transactions to write.
        record_version: the version of the records to write.
        pace: lets turns begin; the same for all partitions of a proxy.
        principals: returns the principals as they are now, whose shares are counted.

    Attributes:
        gate: open unless this owner is suspended.
        now_ms: returns the time by the brokers' clock, ms.
        id_ms: returns the time by which ids are made and judged, ms: where the half topic's log
            clock will stand when a record is appended now. If that broker's clock is put back the
            log clock stands still, and ids by any other clock would soon be void.
    """

    def __init__(
        self,
        door: PartitionDoor,
        targets: Targets,
        runner: Runner,
        events: PartitionEvents,
        settings: OwnerSettings,
        *,
        identity: tuple[str, str],
        still_ours: Callable[[], Awaitable[bool]],
        stopped: Callable[[Exception], None],
        bodies_share: Callable[[], int],
        settled_share: Callable[[], int],
        segment_version: int,
        record_version: Callable[[], int],
        pace: TxnLimiter,
        principals: Callable[[], Directory] = no_principals,
    ) -> None:
        self.partition = door.partition
        beyond_max = min(BEYOND_MAX, settled_share() // SEGMENT_BYTES)
        self.ledger = Ledger(door.partition, settings.dedup_window_ms, beyond_max)
        self.ledger.index.settled.version = segment_version
        self._principals = principals
        self.ledger.index.share_by(self._principals().share_of)
        self.rates = RateCounter()
        self._phase = PartitionState.CLAIMING
        self._resumed_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._checking: asyncio.Task[None] | None = None
        self._closed = False
        self._context = context = PartitionContext(
            door.partition,
            self.ledger,
            settings,
            events,
            record_version,
            stopped,
            LogTime(0),
            LogTime(0),
            CurrentClaim(),
            asyncio.Event(),
            self.rates,
            VisibilityWaiters(),
            settled_share,
        )
        context.gate.set()
        self.gate = context.gate
        self.now_ms = context.clock.now_ms
        self.id_ms = context.id_clock.now_ms
        self._door = door
        self._applier = Applier(self.ledger, events)
        self._half = Appender(context, self._door.half, HalfReplica(self._applier))
        self._op = Appender(context, self._door.op, OpReplica(self._applier))
        self._snapshots = SnapshotWriter(context, self._door)
        self._claims = Claims(
            context, self._door, identity, still_ours, (self._half, self._op), self._snapshots
        )
        self.bodies = BodyCache(context, self._door, bodies_share, self._snapshots)
        self._promoter = Promoter(
            context, self._door, targets, self.bodies, self._half, self._claims, pace
        )
        self._edges = RetentionGuard(
            context, self._door, self.bodies, self._promoter, self._snapshots
        )
        logs = self._door.half, self._door.op
        self.api = PartitionApi(context, self._half, self._op, logs, self._promoter)
        self.checks = CheckBack(context, self._op, runner, self.bodies, targets, self.api)
        # While the logs are replayed only memory is looked after; all else once they are known.
        self._applier.followers.append(self.bodies)

    # --- life ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the partition, recover it, and begin to work.

        Raises:
            Fenced: the partition is another proxy's by now.
            LogTruncated: the topics are not what they were.
            NewerRecord: a newer version wrote what this one does not understand.
            KafkaUnavailable: Kafka does not answer.
        """
        claimed = await self._claims.first()
        self._phase = PartitionState.REPLAYING
        retention_ms = self._context.settings.half_retention_ms
        await self._begin(await recover(self._door, claimed, self._applier, retention_ms))
        self._applier.followers += (
            LogClockFollower(self._context.clock, self.ledger),
            self.checks,
            self._promoter,
        )
        failpoint("recover.done")
        loops = (
            self._half.run,
            self._op.run,
            self._promoter.run,
            self._watch,
            self._snapshots.run,
        )
        self._tasks = [self._begin_task(loop) for loop in loops]
        self._phase = PartitionState.OWNED
        self._resumed_s = time.monotonic()
        self._begin_checks()
        self._promoter.wake()

    async def _begin(self, found: Recovered) -> None:
        """Take over what was recovered."""
        clock, id_clock = self._context.clock, self._context.id_clock
        clock.at_least(found.timestamp_ms)
        id_clock.at_least(found.timestamp_ms)
        clock.at_least(max(self.ledger.half_clock_ms, self.ledger.op_clock_ms))
        id_clock.at_least(self.ledger.half_clock_ms)
        self._snapshots.found(found.greatest, found.snapshots, found.position)
        await self._edges.deleted_before(found.half_start)
        pace = Yielder()
        for transaction in list(self.ledger.index.transactions.values()):
            self.checks.touch(transaction)
            await pace.step()

    async def close(self, *, last_snapshot: bool = False) -> None:
        """Stop working; what is on its way may or may not be stored.

        Args:
            last_snapshot: write one where anything has come since the newest one, if nobody else
                can own the partition yet: it may take longer than retention until anybody does.
        """
        failpoint("handover.closing")
        self._closed = True
        self._snapshots.abandon()
        self.checks.close()
        tasks = [*self._tasks, *([] if self._checking is None else [self._checking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if last_snapshot and self.phase is PartitionState.OWNED:
            await self._snapshots.last()
        self._context.visible.close()
        await self._door.close()
        failpoint("handover.closed")

    def suspend(self) -> None:
        """Nobody knows whose the partition is: write nothing, and keep everything.

        Calls get `owner_unavailable`, also those that wait; only what is on its way already is
        waited for.
        """
        if self._context.gate.is_set():
            self._context.gate.clear()
            failpoint("handover.suspended")
            self._half.turn_away()
            self._op.turn_away()
            self._snapshots.abandon()
            if self._checking is not None:
                self._checking.cancel()
                self._checking = None

    def resume(self) -> None:
        """It is still ours: go on where we stopped. Had another owner claimed it meanwhile, the
        next turn would be fenced, and what it appended is read before ours is applied."""
        if not self._context.gate.is_set() and not self._closed:
            self._context.gate.set()
            self._resumed_s = time.monotonic()
            if self._tasks:
                self._begin_checks()
            self._promoter.wake()

    def _begin_checks(self) -> None:
        if self._context.gate.is_set():
            self._checking = self._begin_task(self.checks.run)

    @property
    def phase(self) -> PartitionState:
        """What this owner does now."""
        if not self._context.gate.is_set():
            return PartitionState.SUSPENDED
        return PartitionState.HANGING if self._claims.hanging else self._phase

    def stuck_since_s(self) -> float:
        """Return for how long a turn, or the claim that it needs, has not come through, seconds;
        0 where all is well. Time in which it was suspended does not count."""
        since_s = self._promoter.stuck_since
        if since_s is None or not self._context.gate.is_set():
            return 0.0
        return time.monotonic() - max(since_s, self._resumed_s)

    def clock_at_least(self, now_ms: int) -> None:
        """The brokers' clock says so by now; it is no earlier."""
        self._context.clock.at_least(now_ms)
        self._context.id_clock.at_least(now_ms)
        self.checks.look_again()

    def _begin_task(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(loop())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._context.stopped(error)

    async def _watch(self) -> None:
        """While idle, see what others wrote, and look after what the logs will not keep."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(IDLE_S)
            self.rates.sample()
            self.ledger.index.share_by(self._principals().share_of)
            try:
                await self._half.look(IDLE_S)
                await self._op.look(IDLE_S)
                await self._edges.keep_old()
                if time.monotonic() - looked_s >= EDGES_S:
                    looked_s = time.monotonic()
                    await self._edges.look()
            except KafkaUnavailable as error:
                log.warning("log not read", partition=self.partition, why=str(error))


class Claims:
    """Claims one half partition: a `txbroker.proxy.partition.promoter.Claimer`.

    Args:
        context: what all parts of the partition share.
        door: where claims are written.
        identity: this proxy's name and URL, for the claim record.
        still_ours: says, after a fresh heartbeat, whether the partition is still this proxy's.
        logs: the appenders of half and operation topic, to read what other owners wrote.
        snapshots: the one that is being written is given up before the ledger is reconciled.

    Attributes:
        hanging: whether a transaction that nobody ends has hidden the progress at the last try.
    """

    def __init__(
        self,
        context: PartitionContext,
        door: PartitionDoor,
        identity: tuple[str, str],
        still_ours: Callable[[], Awaitable[bool]],
        logs: tuple[Appender, Appender],
        snapshots: SnapshotWriter,
    ) -> None:
        self.hanging = False
        self._context = context
        self._door = door
        self._identity = identity
        self._still_ours = still_ours
        self._half, self._op = logs
        self._snapshots = snapshots

    async def first(self) -> Claimed:
        """Claim a partition that is to be recovered; return what the claim has found.

        Raises:
            Fenced: the partition is another proxy's by now.
            LogTruncated: the checkpoint topic is not what it was.
            KafkaUnavailable: Kafka does not answer.
        """
        pause_s = CLAIM_PAUSE_S
        while True:
            try:
                await self._context.gate.wait()
                return await claim_first(self._door, self._new())
            except Fenced:
                pause_s = await self._pause(pause_s)

    def _new(self) -> Claim:
        """Return the next claim, which is the present one from now on."""
        self._context.claim.id = uuid.uuid4().hex
        name, url = self._identity
        return Claim(self._context.record_version(), self._context.claim.id, name, url)

    async def _pause(self, pause_s: float) -> float:
        """Pause before another claim, unless the partition has moved; return the next pause.

        Raises:
            Fenced: it has.
        """
        await asyncio.sleep(pause_s * random.random())
        await self._check_ours()
        return min(pause_s * 2, CLAIM_PAUSE_MAX_S)

    async def _check_ours(self) -> None:
        """Ask the group, for as long as it does not answer, whether the partition is ours.

        Raises:
            Fenced: it is not.
        """
        partition = self._context.partition
        pause_s = CLAIM_PAUSE_S
        while True:
            await self._context.gate.wait()
            try:
                ours = await self._still_ours()
            except KafkaUnavailable as error:
                # Also while the group is being rebalanced.
                log.warning("not known whose", partition=partition, why=str(error))
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            else:
                if not ours:
                    raise Fenced(f"partition {partition} has another owner")
                return

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again after a lost turn, and take over what turned out to be committed.

        Args:
            unseen: what is known to be committed already, and will be visible.

        Raises:
            Fenced: the partition has another owner.
        """
        context, pause_s = self._context, CLAIM_PAUSE_S
        while True:
            try:
                await self._check_ours()
                failpoint("reclaim.asked")
                # Whoever is out of touch would fence the rightful owner.
                await self._context.gate.wait()
                claimed = await self._door.claim(self._new())
                failpoint("reclaim.claimed")
                # Another owner may have come and gone: what it appended and promoted is done by
                # this progress, and would be promoted again if it were read later.
                await self._op.catch_up()
                await self._half.catch_up()
                kept = await read_copies(self._door, claimed.skips)
                break
            except KafkaUnavailable as error:
                log.warning("claim failed", partition=context.partition, why=str(error))
                if isinstance(error, Hanging):
                    self.hanging = True
                context.events.kafka_failed("claim")
                await asyncio.sleep(pause_s * random.random())
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            except Fenced:
                pause_s = await self._pause(pause_s)
        self.hanging = False
        # One that is being captured would see only a part of what changes now.
        self._snapshots.abandon()
        done = context.ledger.reconcile(claimed.progress, kept.whole, unseen)
        kept.check(done)
        context.claim.reclaims += 1
        failpoint("reclaim.done")
        log.info("claimed again", partition=context.partition, committed_meanwhile=len(done))
        if done:
            context.promoted(done)
        # The lost turns may have refused some.
        waited_for = [context.ledger.index.transactions.get(id) for id in context.visible]
        context.visible.release([t for t in waited_for if t and t.state is not State.COMMITTED])
