"""The owner of one half partition: it alone writes, diffs, checks and promotes it."""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog
from msgspec import Struct

from txbroker.contract import DecideRequest, Standing
from txbroker.core.codec import encode_contents, encode_half, encode_marker
from txbroker.core.ids import parse_id
from txbroker.core.ledger import Ledger
from txbroker.core.outcome import Effect, Outcome
from txbroker.core.promotion import TurnLimits
from txbroker.core.records import (
    RECORD_VERSION,
    Claim,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    Source,
    State,
)
from txbroker.core.states import SETTLED
from txbroker.core.transaction import Transaction, fingerprint
from txbroker.door import Fenced, LogTruncated, PartitionDoor, Targets
from txbroker.errors import (
    AlreadyDecided,
    BadRequest,
    IdConflict,
    IdExpired,
    InvariantBroken,
    KafkaUnavailable,
    NotFound,
    NotPending,
    Overloaded,
    OwnerUnavailable,
    WrongGroup,
)
from txbroker.proxy.appender import Appender
from txbroker.proxy.applier import Applier
from txbroker.proxy.checkback import CheckBack, Runner
from txbroker.proxy.clock import LogTime
from txbroker.proxy.history import search
from txbroker.proxy.promoter import Promoter
from txbroker.proxy.recovery import claim_and_replay, read_kept

IDLE_S = 1.0
"""An idle owner looks this often whether somebody else wrote to its logs."""
CLAIM_PAUSE_S = 0.2
CLAIM_PAUSE_MAX_S = 2.0
"""Pauses between claims are random and grow to this."""

log = structlog.get_logger()


class OwnerSettings(Struct, frozen=True):
    """What an owner needs of the configuration."""

    dedup_window_ms: int
    pending_max: int
    settled_max: int
    half_retention_ms: int
    turns: TurnLimits = TurnLimits()


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

    def recovered(self, seconds: float) -> None:
        """A partition was gained and caught up on, in so many seconds."""
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
    """

    def __init__(
        self,
        door: PartitionDoor,
        targets: Targets,
        runner: Runner,
        events: OwnerEvents,
        settings: OwnerSettings,
        identity: tuple[str, str],
        still_ours: Callable[[], Awaitable[bool]],
        stopped: Callable[[Exception], None],
    ) -> None:
        self.partition = door.partition
        self.ledger = Ledger(door.partition, settings.dedup_window_ms, settings.settled_max)
        self._door = door
        self._events = events
        self._settings = settings
        self._identity = identity
        self._still_ours = still_ours
        self._stopped = stopped
        self._applier = Applier(self.ledger, self._changed, events.outcome)
        self._visible: dict[str, list[asyncio.Future[None]]] = {}
        self._claim = ""
        self._clock = LogTime(0)
        # The half topic's own: ids are void by its log clock alone, wherever the others stand.
        self._id_clock = LogTime(0)
        self._half = Appender(
            door.half, self._applier.half, lambda: self.ledger.half_position, self._append_failed
        )
        self._op = Appender(
            door.op, self._applier.op, lambda: self.ledger.op_position, self._append_failed
        )
        self._promoter = Promoter(
            door,
            self.ledger,
            targets,
            self.now_ms,
            lambda: self._claim,
            self._reclaim,
            self,
            settings.turns,
        )
        self.checks = CheckBack(
            self.ledger, self._op, runner, self.now_ms, lambda: self._claim, self.decide
        )
        self._searching = asyncio.Semaphore()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    # --- life ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the partition, replay its logs, and begin to work.

        Raises:
            Fenced: the partition is another proxy's by now.
            LogTruncated: the topics end before what was promoted.
            KafkaUnavailable: Kafka does not answer.
        """
        pause_s = CLAIM_PAUSE_S
        while True:
            try:
                clock = await claim_and_replay(self._door, self._new_claim(), self._applier)
                break
            except Fenced:
                pause_s = await self._claim_again(pause_s)
        self._clock = clock
        self._clock.at_least(max(self.ledger.half_clock_ms, self.ledger.op_clock_ms))
        self._id_clock = LogTime(clock.now_ms())
        self._id_clock.at_least(self.ledger.half_clock_ms)
        for transaction in self.ledger:
            self.checks.touch(transaction)
        loops = (self._half.run, self._op.run, self._promoter.run, self.checks.run, self._watch)
        self._tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]
        self._promoter.wake()

    async def close(self) -> None:
        """Stop working; what is on its way may or may not be stored."""
        self._closed = True
        self.checks.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in self._visible.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(OwnerUnavailable())
        self._visible.clear()
        await self._door.close()

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
        """While idle, see what others wrote, and copy out what half's retention comes near to."""
        while True:
            await asyncio.sleep(IDLE_S)
            try:
                await self._half.catch_up()
                await self._op.catch_up()
            except KafkaUnavailable as error:
                log.warning("log not read", partition=self.partition, why=str(error))
                continue
            self._keep_old()

    def _keep_old(self) -> None:
        """At half of half's retention the bodies of what is not settled are copied out."""
        before_ms = self.now_ms() - self._settings.half_retention_ms // 2
        for transaction in self.ledger.unsettled_before(before_ms):
            if not transaction.kept and transaction.id not in self.ledger.to_keep:
                log.warning("half retention near, body copied", id=transaction.id)
                self.ledger.to_keep[transaction.id] = transaction
                self._promoter.wake()

    def _new_claim(self) -> Claim:
        self._claim = uuid.uuid4().hex
        name, url = self._identity
        return Claim(RECORD_VERSION, self._claim, name, url)

    async def _claim_again(self, pause_s: float) -> float:
        """Pause before another claim, unless the partition has moved.

        Raises:
            Fenced: it has.
        """
        await asyncio.sleep(pause_s * random.random())
        if not await self._still_ours():
            raise Fenced(f"partition {self.partition} has another owner")
        return min(pause_s * 2, CLAIM_PAUSE_MAX_S)

    async def _reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again after a lost turn, and take over what turned out to be committed.

        `unseen`: what is known to be committed already, and will be visible.
        """
        pause_s = CLAIM_PAUSE_S
        while True:
            try:
                if not await self._still_ours():
                    raise Fenced(f"partition {self.partition} has another owner")
                claimed = await self._door.claim(self._new_claim())
                kept = await read_kept(self._door)
                break
            except KafkaUnavailable as error:
                log.warning("claim failed", partition=self.partition, why=str(error))
                self._events.kafka_failed("claim")
                await asyncio.sleep(pause_s * random.random())
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            except Fenced:
                pause_s = await self._claim_again(pause_s)
        done = self.ledger.reconcile(claimed.progress, kept, unseen)
        log.info("claimed again", partition=self.partition, committed_meanwhile=len(done))
        if done:
            self.promoted(done)
        # The lost turns may have refused some.
        waited_for = [self.ledger.transactions.get(id) for id in self._visible]
        self._release_waiting([t for t in waited_for if t and t.state is not State.COMMITTED])

    # --- what changed ----------------------------------------------------------------------

    def _changed(self, transaction: Transaction) -> None:
        """A record changed this transaction."""
        self.checks.touch(transaction)
        self._clock.at_least(max(self.ledger.half_clock_ms, self.ledger.op_clock_ms))
        if transaction.state is State.COMMITTED or self.ledger.to_keep or self.ledger.to_release:
            self._promoter.wake()

    def promoted(self, transactions: list[Transaction]) -> None:
        """Tell whoever waits that these are visible."""
        self._events.promoted(transactions)
        self._release_waiting(transactions)

    def refused(self, transactions: list[Transaction]) -> None:
        """Tell whoever waits that these will not become visible by themselves."""
        self._events.refused(transactions)
        self._release_waiting(transactions)

    def turn_lost(self) -> None:
        """Count that a turn's outcome is unknown."""
        self._events.kafka_failed("turn")

    def _append_failed(self) -> None:
        self._events.kafka_failed("append")

    def _release_waiting(self, transactions: list[Transaction]) -> None:
        if self._visible:
            for transaction in transactions:
                for future in self._visible.pop(transaction.id, ()):
                    if not future.done():
                        future.set_result(None)

    # --- prepare ---------------------------------------------------------------------------

    def standing_prepare(
        self, half_id: str | None, group: str, dedup_key: str | None, messages: Sequence[Message]
    ) -> Standing | None:
        """Return the standing of a prepare that was stored before, None for a new one.

        Raises:
            IdConflict: the id or key was used for other content.
        """
        transaction = self.ledger.get(half_id) if half_id else None
        if transaction is None and dedup_key is not None:
            transaction = self.ledger.by_dedup_key(group, dedup_key)
            if transaction is not None and transaction.state in SETTLED:
                age_ms = self.id_ms() - transaction.prepared_at_ms
                if age_ms > self._settings.dedup_window_ms:
                    return None
        if transaction is None:
            return None
        if transaction.fingerprint != fingerprint(messages, group):
            raise IdConflict(id=transaction.id, state=transaction.state)
        return standing(transaction)

    async def prepare(self, half: Half, instance: str = "") -> Standing:
        """Store a half message whose target partitions are fixed.

        Raises:
            IdExpired, IdConflict, TooLarge, Overloaded: it was not stored.
            OwnerUnavailable: it may or may not be stored; the same again is safe.
        """
        age_ms = abs(self.id_ms() - parse_id(half.id).time_ms)
        if age_ms > self._settings.dedup_window_ms:
            raise IdExpired(f"the id is {age_ms // 1000} s away from Kafka's clock", id=half.id)
        self._check_room(half.id)
        outcome = await self._half.append(encode_half(half))
        self._id_clock.follow(self.ledger.half_clock_ms)
        transaction = outcome.transaction
        if outcome.effect is Effect.APPLIED and transaction is not None:
            transaction.instance = instance
            self._events.prepared(transaction)
            return standing(transaction, created=True)
        if outcome.effect is Effect.REPEATED and transaction is not None:
            return standing(transaction)
        if outcome.effect is Effect.CONFLICT and transaction is not None:
            raise IdConflict(id=transaction.id, state=transaction.state)
        if outcome.effect is Effect.EXPIRED:
            raise IdExpired(id=half.id)
        raise BadRequest(f"the half message is void: {outcome.why}", id=half.id)

    def _check_room(self, id: str) -> None:
        """Refuse a prepare that would make the partition hold more than it can.

        Raises:
            Overloaded: with what has to happen first.
        """
        ledger, settings = self.ledger, self._settings
        held = ledger.undecided_count + len(ledger.ready)
        if held >= settings.pending_max:
            raise Overloaded(
                f"partition {self.partition} holds {held} transactions that are undecided or wait "
                "to be promoted, its limit: decide some, or wait",
                id=id,
            )
        if self._promoter.full:
            raise Overloaded(
                "too many transactions wait for target partitions without a leader", id=id
            )
        # By our time, not the log's clock: that stands still while prepares are refused.
        remembered_until_ms = ledger.oldest_settled_ms() + settings.dedup_window_ms
        if ledger.settled_count >= settings.settled_max and self.id_ms() <= remembered_until_ms:
            raise Overloaded(
                f"partition {self.partition} remembers {ledger.settled_count} settled "
                "transactions of the dedup window, its limit: wait",
                id=id,
            )

    # --- decide ----------------------------------------------------------------------------

    async def get(self, id: str) -> Transaction:
        """Return a transaction, after reading half to an end asked for now if it is unknown.

        Raises:
            NotFound: there is none.
            TooOld: the log does not reach back to it.
            OwnerUnavailable: Kafka does not answer.
        """
        transaction = self.ledger.get(id)
        if transaction is None:
            try:
                await self._half.catch_up()
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=id) from None
            except (InvariantBroken, LogTruncated) as error:
                # The record that cannot be applied is behind us now: nobody else would meet it.
                self._stopped(error)
                raise OwnerUnavailable(str(error), id=id) from None
            transaction = self.ledger.get(id)
        return transaction or await self._settled_before(id)

    async def _settled_before(self, id: str) -> Transaction:
        """Find a transaction that was settled before what the ledger remembers."""
        window_ms = self._settings.dedup_window_ms
        if abs(self.id_ms() - parse_id(id).time_ms) <= window_ms:
            raise NotFound(id=id)
        if self._searching.locked():
            raise Overloaded("another transaction is being looked up in the log", id=id)
        async with self._searching:
            try:
                return await search(self._door.half, self._door.op, id, window_ms)
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=id) from None

    async def decide(self, request: DecideRequest) -> Standing:
        """Write a deciding marker; answered when the ledger has applied it.

        Raises:
            AlreadyDecided, WrongGroup, NotFound, TooOld, TooLarge, BadRequest: not written, or
                without effect.
            OwnerUnavailable: it may or may not be written; the same again is safe.
        """
        transaction = await self.get(request.id)
        self._may_decide(transaction, request)
        if transaction.decision is None:
            outcome = await self._op.append(self._deciding(transaction, request))
            if outcome.effect is Effect.APPLIED:
                self._events.decided(transaction)
            elif transaction.decision is None:
                raise OwnerUnavailable(f"the marker had no effect: {outcome.why}", id=request.id)
            self._may_decide(transaction, request)
        if request.wait and transaction.state is State.COMMITTED:
            await self._wait_visible(transaction.id)
        return standing(transaction)

    def _may_decide(self, transaction: Transaction, request: DecideRequest) -> None:
        """Raise if the request cannot be, or was not, what decides the transaction."""
        if request.group and request.group != transaction.half.group:
            raise WrongGroup(
                f"the transaction belongs to group {transaction.half.group!r}", id=request.id
            )
        if transaction.decision is None:
            return
        mark = b"" if request.messages is None else fingerprint(request.messages)
        if transaction.decision is not request.decision:
            why = f"the transaction was decided before: {transaction.decision}"
        elif mark not in (b"", transaction.contents_fingerprint):
            why = "the transaction was committed before, with other messages"
        else:
            return
        raise AlreadyDecided(
            why, id=request.id, decision=transaction.decision, state=transaction.state
        )

    def _deciding(self, transaction: Transaction, request: DecideRequest) -> list[Record]:
        contents = request.messages
        marker = Marker(
            v=RECORD_VERSION,
            kind=MarkerKind(request.decision),
            id=transaction.id,
            half=transaction.offset,
            source=request.source,
            group=request.group,
            by=request.by,
            reason=request.reason,
            round=transaction.round,
            number=transaction.number,
            claim=self._claim,
            contents=0 if contents is None else len(contents),
        )
        records = [encode_marker(marker)]
        if contents is not None:
            records.extend(encode_contents(transaction.half, contents))
        return records

    async def _wait_visible(self, id: str) -> None:
        if self._closed:
            raise OwnerUnavailable(id=id)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._visible.setdefault(id, []).append(future)
        try:
            await future
        finally:
            # Whoever gave up and asks again must not be remembered each time.
            waiting = self._visible.get(id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._visible.pop(id, None)

    async def revive(self, id: str, by: str, reason: str) -> Standing:
        """Begin a new round for a parked transaction, or try a refused one again now.

        Raises:
            NotPending: it is neither parked nor refused.
        """
        transaction = await self.get(id)
        if transaction.state not in (State.PARKED, State.REFUSED):
            raise NotPending(
                f"the transaction is {transaction.state}; only parked and refused ones are revived",
                id=id,
                state=transaction.state,
            )
        await self.checks.write(
            transaction, MarkerKind.REVIVE, source=Source.OPERATOR, by=by, reason=reason
        )
        if transaction.state is State.REFUSED:
            self._promoter.retry_refused(id)
        return standing(transaction)


def standing(transaction: Transaction, *, created: bool = False) -> Standing:
    """Return where a transaction stands."""
    return Standing(transaction.id, transaction.state, transaction.decision, created)
