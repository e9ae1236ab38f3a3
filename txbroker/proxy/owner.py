"""The owner of one half partition: it alone writes, diffs, checks and promotes it."""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct

from txbroker.contract import DecideRequest, PartitionState, Standing
from txbroker.core.ledger import BEYOND_MAX, Ledger
from txbroker.core.outcome import Outcome
from txbroker.core.promotion import TurnLimits
from txbroker.core.records import Claim, Half, Header, Message, State
from txbroker.core.segment import SEGMENT_BYTES, SEGMENT_VERSION
from txbroker.core.shares import part_of
from txbroker.core.sizes import headers_bytes
from txbroker.core.transaction import Transaction
from txbroker.door import Fenced, Hanging, PartitionDoor, Targets
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import hit
from txbroker.principals import Directory, no_principals
from txbroker.proxy.answers import Answers, Bounds, Parts, standing
from txbroker.proxy.appender import Appender
from txbroker.proxy.applier import Applier
from txbroker.proxy.bodies import Bodies
from txbroker.proxy.checkback import CheckBack, Runner
from txbroker.proxy.clock import LogTime
from txbroker.proxy.copies import read_copies
from txbroker.proxy.edges import Edges
from txbroker.proxy.gate import GatedDoor
from txbroker.proxy.logging import get_logger
from txbroker.proxy.pace import Pace
from txbroker.proxy.promoter import Promoter
from txbroker.proxy.recovery import Recovered, recover
from txbroker.proxy.snapshots import SnapshotWriter
from txbroker.proxy.tally import Tally
from txbroker.proxy.targets import examine_final
from txbroker.proxy.turn_pace import TurnPace

__all__ = ["Owner", "OwnerEvents", "OwnerSettings", "standing"]

IDLE_S = 1.0
"""An owner that has appended nothing for so long looks whether somebody else wrote to its logs."""
EDGES_S = 10.0
"""An owner looks this often whether its logs are still what they were."""
CLAIM_PAUSE_S = 0.2
CLAIM_PAUSE_MAX_S = 2.0
"""Pauses between claims are random and grow to this."""

log = get_logger(__name__)


class OwnerSettings(Struct, frozen=True):
    """What an owner needs of the configuration."""

    dedup_window_ms: int
    pending_max: int
    pending_group_max: int
    half_retention_ms: int
    turns: TurnLimits = TurnLimits()
    snapshot_records_min: int = 20_000
    installation: tuple[Header, ...] = ()
    """What the headers of promoted records begin with."""

    def bounds(self) -> Bounds:
        """Return how much a half partition holds."""
        return Bounds(
            self.dedup_window_ms,
            self.pending_max,
            self.pending_group_max,
            waiting_share_max=part_of(self.turns.deferred_max),
        )


class OwnerEvents(Protocol):
    """Who is told what happens on a partition; called from the event loop."""

    def outcome(self, outcome: Outcome) -> None:
        """A record changed nothing: repeated, contrary, illegal or void."""
        ...

    def prepared(self, transaction: Transaction) -> None:
        """A half message was stored by this owner."""
        ...

    def decided(self, transaction: Transaction) -> None:
        """A deciding marker took effect."""
        ...

    def promoted(self, transactions: list[Transaction]) -> None:
        """These are visible now."""
        ...

    def refused(self, transactions: list[Transaction]) -> None:
        """These were set aside: a target does not take them."""
        ...

    def lost(self, count: int) -> None:
        """So many half messages vanished before their transactions were settled."""
        ...

    def snapshot_written(self, seconds: float, entries: int) -> None:
        """A snapshot of so many transactions was written, in so many seconds."""
        ...

    def snapshot_failed(self) -> None:
        """A snapshot could not be written."""
        ...

    def recovered(self, seconds: float) -> None:
        """A partition was gained and caught up on, in so many seconds."""
        ...

    def foreign(self, topic: str, count: int) -> None:
        """So many records of one of our topics (`half`, say) are none of ours."""
        ...

    def fenced(self) -> None:
        """Another owner has taken a partition."""
        ...

    def kafka_failed(self, operation: str) -> None:
        """Kafka did not do what was asked: an `append`, a `turn` or a `claim`."""
        ...


class Owner:
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
        record_version: the version of the records to write.
        pace: lets turns begin; the same for all partitions of a proxy.
        principals: returns the principals as they are now, whose shares are counted.
    """

    def __init__(
        self,
        door: PartitionDoor,
        targets: Targets,
        runner: Runner,
        events: OwnerEvents,
        settings: OwnerSettings,
        *,
        identity: tuple[str, str],
        still_ours: Callable[[], Awaitable[bool]],
        stopped: Callable[[Exception], None],
        bodies_share: Callable[[], int],
        settled_share: Callable[[], int],
        record_version: Callable[[], int],
        pace: TurnPace,
        principals: Callable[[], Directory] = no_principals,
    ) -> None:
        self.partition = door.partition
        beyond_max = min(BEYOND_MAX, settled_share() // SEGMENT_BYTES)
        self.ledger = Ledger(door.partition, settings.dedup_window_ms, beyond_max)
        self.ledger.settled.version = min(SEGMENT_VERSION, record_version())
        self._settled_share = settled_share
        self._principals = principals
        self.ledger.share_by(self._principals().share_of)
        self._gate = asyncio.Event()
        self._gate.set()
        self._door = GatedDoor(door, self._gate)
        self._events = events
        self.tally = Tally(events)
        self._settings = settings
        self._identity = identity
        self._still_ours = still_ours
        self._stopped = stopped
        self._record_version = record_version
        self._phase = PartitionState.CLAIMING
        self._resumed_s = time.monotonic()
        self._claim = ""
        self._clock = LogTime(0)
        # The half topic's own: ids are void by its log clock alone, wherever the others stand.
        self._id_clock = LogTime(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._checking: asyncio.Task[None] | None = None
        self._closed = False
        self._make_parts(targets, runner, bodies_share, pace)

    def _make_parts(
        self, targets: Targets, runner: Runner, bodies_share: Callable[[], int], pace: TurnPace
    ) -> None:
        door, ledger, events = self._door, self.ledger, self._events
        self._applier = Applier(ledger, self._changed, events.outcome, events.foreign)
        self._half = Appender(
            door.half,
            self._applier.half,
            lambda: ledger.half_position,
            self._append_failed,
            lambda: ledger.half_anchor,
            self._gate,
            ledger.skip_half,
        )
        self._op = Appender(
            door.op,
            self._applier.op,
            lambda: ledger.op_position,
            self._append_failed,
            lambda: ledger.op_anchor,
            self._gate,
            ledger.skip_op,
        )
        self.bodies = Bodies(door, ledger, bodies_share, self._lost, self._stopped)
        self._promoter = Promoter(
            door,
            ledger,
            targets,
            self.now_ms,
            self._claim_name,
            self._reclaim,
            self,
            self._settings.turns,
            self.bodies,
            self._record_version,
            self._half.catch_up,
            pace,
            self._settings.installation,
        )
        self.checks = CheckBack(
            ledger,
            self._op,
            runner,
            self.now_ms,
            self._claim_name,
            self.decide,
            self.bodies,
            self._record_version,
            partial(self._examine_final, targets),
        )
        self._snapshots = SnapshotWriter(
            door,
            ledger,
            events,
            self._settings.snapshot_records_min,
            self._record_version,
            self.now_ms,
            self._settings.half_retention_ms,
        )
        self._edges = Edges(
            door,
            ledger,
            self.bodies,
            self._promoter.wake,
            self._snapshots.deleted_before,
            self.now_ms,
            self._settings.half_retention_ms,
        )
        self._answers = self._make_answers()
        self._visible = self._answers.visible

    def _make_answers(self) -> Answers:
        door = self._door
        return Answers(
            Parts(
                self.ledger,
                self._half,
                self._op,
                door.half,
                door.op,
                self._id_clock,
                self._promoter,
                self.checks,
            ),
            self._settings.bounds(),
            self._settled_share,
            self.tally,
            self._claim_name,
            self._record_version,
            self._stopped,
        )

    # --- life ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the partition, recover it, and begin to work.

        Raises:
            Fenced: the partition is another proxy's by now.
            LogTruncated: the topics are not what they were.
            NewerRecord: a newer version wrote what this one does not understand.
            KafkaUnavailable: Kafka does not answer.
        """
        pause_s = CLAIM_PAUSE_S
        while True:
            try:
                found = await recover(
                    self._door,
                    self._new_claim(),
                    self._applier,
                    self._settings.half_retention_ms,
                    self._replaying,
                )
                break
            except Fenced:
                pause_s = await self._claim_again(pause_s)
        await self._begin(found)
        hit("recover.done")
        loops = (
            self._half.run,
            self._op.run,
            self._promoter.run,
            self._watch,
            self._snapshots.run,
        )
        self._tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]
        self._phase = PartitionState.OWNED
        self._resumed_s = time.monotonic()
        self._begin_checks()
        self._promoter.wake()

    def _replaying(self) -> None:
        self._phase = PartitionState.REPLAYING

    async def _begin(self, found: Recovered) -> None:
        """Take over what was recovered."""
        self._clock.at_least(found.timestamp_ms)
        self._id_clock.at_least(found.timestamp_ms)
        self._clock.at_least(max(self.ledger.half_clock_ms, self.ledger.op_clock_ms))
        self._id_clock.at_least(self.ledger.half_clock_ms)
        self._snapshots.found(found.greatest, found.snapshots, found.position)
        await self._edges.deleted_before(found.half_start)
        pace = Pace()
        for transaction in list(self.ledger.transactions.values()):
            self.checks.touch(transaction)
            await pace.step()

    async def close(self, *, last_snapshot: bool = False) -> None:
        """Stop working; what is on its way may or may not be stored.

        Args:
            last_snapshot: write one where anything has come since the newest one, if nobody else
                can own the partition yet: it may take longer than retention until anybody does.
        """
        hit("handover.closing")
        self._closed = True
        self._snapshots.abandon()
        self.checks.close()
        tasks = [*self._tasks, *([] if self._checking is None else [self._checking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if last_snapshot and self.phase is PartitionState.OWNED:
            await self._snapshots.last()
        self._visible.close()
        await self._door.close()
        hit("handover.closed")

    def suspend(self) -> None:
        """Nobody knows whose the partition is: write nothing, and keep everything.

        Calls get `owner_unavailable`, also those that wait; only what is on its way already is
        waited for.
        """
        if self._gate.is_set():
            self._gate.clear()
            hit("handover.suspended")
            self._answers.suspended = True
            self._half.turn_away()
            self._op.turn_away()
            self._snapshots.abandon()
            if self._checking is not None:
                self._checking.cancel()
                self._checking = None

    def resume(self) -> None:
        """It is still ours: go on where we stopped. Had another owner claimed it meanwhile, the
        next turn would be fenced, and what it appended is read before ours is applied."""
        if not self._gate.is_set() and not self._closed:
            self._gate.set()
            self._answers.suspended = False
            self._resumed_s = time.monotonic()
            if self._tasks:
                self._begin_checks()
            self._promoter.wake()

    def _begin_checks(self) -> None:
        if self._gate.is_set():
            self._checking = asyncio.create_task(self._guard(self.checks.run))

    @property
    def phase(self) -> PartitionState:
        """What this owner does now."""
        if not self._gate.is_set():
            return PartitionState.SUSPENDED
        return self._phase

    def stuck_since_s(self) -> float:
        """Return for how long a turn, or the claim that it needs, has not come through, seconds;
        0 where all is well. Time in which it was suspended does not count."""
        since_s = self._promoter.stuck_since
        if since_s is None or not self._gate.is_set():
            return 0.0
        return time.monotonic() - max(since_s, self._resumed_s)

    def now_ms(self) -> int:
        """Return the time by the brokers' clock, ms."""
        return self._clock.now_ms()

    def id_ms(self) -> int:
        """Return the time by which ids are made and judged: where the half topic's log clock will
        stand when a record is appended now, ms.

        If that broker's clock is put back the log clock stands still, and ids by any other clock
        would soon be void.
        """
        return self._id_clock.now_ms()

    def clock_at_least(self, now_ms: int) -> None:
        """The brokers' clock says so by now; it is no earlier."""
        self._clock.at_least(now_ms)
        self._id_clock.at_least(now_ms)
        self.checks.look_again()

    async def _guard(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except Exception as error:
            self._stopped(error)

    async def _watch(self) -> None:
        """While idle, see what others wrote, and look after what the logs will not keep."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(IDLE_S)
            self.tally.sample()
            self.ledger.share_by(self._principals().share_of)
            try:
                await self._half.look(IDLE_S)
                await self._op.look(IDLE_S)
                await self._edges.keep_old()
                if time.monotonic() - looked_s >= EDGES_S:
                    looked_s = time.monotonic()
                    await self._edges.look()
            except KafkaUnavailable as error:
                log.warning("log not read", partition=self.partition, why=str(error))

    # --- claims ----------------------------------------------------------------------------

    def _claim_name(self) -> str:
        return self._claim

    def _new_claim(self) -> Claim:
        self._claim = uuid.uuid4().hex
        name, url = self._identity
        return Claim(self._record_version(), self._claim, name, url)

    async def _claim_again(self, pause_s: float) -> float:
        """Pause before another claim, unless the partition has moved.

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
        pause_s = CLAIM_PAUSE_S
        while True:
            await self._gate.wait()
            try:
                ours = await self._still_ours()
            except KafkaUnavailable as error:
                # Also while the group is being rebalanced.
                log.warning("not known whose", partition=self.partition, why=str(error))
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            else:
                if not ours:
                    raise Fenced(f"partition {self.partition} has another owner")
                return

    async def _reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again after a lost turn, and take over what turned out to be committed.

        `unseen`: what is known to be committed already, and will be visible.
        """
        pause_s = CLAIM_PAUSE_S
        while True:
            try:
                await self._check_ours()
                hit("reclaim.asked")
                claimed = await self._door.claim(self._new_claim())
                hit("reclaim.claimed")
                # Another owner may have come and gone: what it appended and promoted is done by
                # this progress, and would be promoted again if it were read later.
                await self._op.catch_up()
                await self._half.catch_up()
                kept = await read_copies(self._door, claimed.skips)
                break
            except KafkaUnavailable as error:
                log.warning("claim failed", partition=self.partition, why=str(error))
                if isinstance(error, Hanging):
                    self._phase = PartitionState.HANGING
                self._events.kafka_failed("claim")
                await asyncio.sleep(pause_s * random.random())
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            except Fenced:
                pause_s = await self._claim_again(pause_s)
        self._phase = PartitionState.OWNED
        # One that is being captured would see only a part of what changes now.
        self._snapshots.abandon()
        done = self.ledger.reconcile(claimed.progress, kept.whole, unseen)
        kept.check(done)
        self._edges.again()
        hit("reclaim.done")
        log.info("claimed again", partition=self.partition, committed_meanwhile=len(done))
        if done:
            self.promoted(done)
        # The lost turns may have refused some.
        waited_for = [self.ledger.transactions.get(id) for id in self._visible]
        self._visible.release([t for t in waited_for if t and t.state is not State.COMMITTED])

    # --- what changed ----------------------------------------------------------------------

    def _changed(self, transaction: Transaction) -> None:
        """A record changed this transaction."""
        self.bodies.trim()
        if self._phase is PartitionState.REPLAYING:
            # All are looked at once they are known.
            return
        self.checks.touch(transaction)
        self._clock.at_least(max(self.ledger.half_clock_ms, self.ledger.op_clock_ms))
        if transaction.state is State.COMMITTED or self.ledger.to_keep or self.ledger.to_release:
            self._promoter.wake()

    def promoted(self, transactions: list[Transaction]) -> None:
        """Tell whoever waits that these are visible."""
        self._events.promoted(transactions)
        self.tally.promoted(len(transactions))
        self._visible.release(transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        """Tell whoever waits that these will not become visible by themselves."""
        self._events.refused(transactions)
        self._visible.release(transactions)

    def turn_lost(self) -> None:
        """Count that a turn's outcome is unknown."""
        self._events.kafka_failed("turn")

    def _lost(self, count: int) -> None:
        """So many have just lost their messages: the next owner must not count them again."""
        self._events.lost(count)
        self._snapshots.want()

    def _append_failed(self) -> None:
        self._events.kafka_failed("append")

    # --- calls: see `txbroker.proxy.answers` -------------------------------------------------

    def standing_prepare(
        self, half_id: str | None, group: str, dedup_key: str | None, messages: Sequence[Message]
    ) -> Standing | None:
        """Return the standing of a prepare that was stored before, None for a new one."""
        return self._answers.standing_prepare(half_id, group, dedup_key, messages)

    async def prepare(self, half: Half, instance: str = "") -> Standing:
        """Store a half message whose target partitions are fixed."""
        return await self._answers.prepare(half, instance)

    async def get(self, id: str) -> Transaction:
        """Return a transaction, after reading half to an end asked for now if it is unknown."""
        return await self._answers.get(id)

    async def find(self, id: str) -> Transaction:
        """Return a transaction as `get` does, with who decided it and why, to be shown."""
        return await self._answers.find(id)

    async def decide(self, request: DecideRequest) -> Standing:
        """Write a deciding marker; answered when the ledger has applied it."""
        return await self._answers.decide(request)

    async def _examine_final(self, targets: Targets, messages: Sequence[Message]) -> None:
        beside = headers_bytes(self._settings.installation)
        await examine_final(targets, messages, self.now_ms(), beside)

    async def revive(self, id: str, by: str, reason: str) -> Standing:
        """Begin a new round for a parked transaction, or try a refused one again now."""
        return await self._answers.revive(id, by, reason)
