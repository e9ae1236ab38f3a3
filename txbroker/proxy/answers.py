"""What one half partition answers: prepare, decide and revive, each by the rules of the ledger."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import Struct

from txbroker.contract import DecideRequest, Standing
from txbroker.core.codec import encode_contents, encode_half, encode_marker
from txbroker.core.ids import parse_id
from txbroker.core.ledger import Ledger, same_contents
from txbroker.core.outcome import Effect, Outcome
from txbroker.core.records import (
    Decision,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    Source,
    State,
)
from txbroker.core.shares import Use, part_of
from txbroker.core.states import SETTLED
from txbroker.core.transaction import Transaction, fingerprint
from txbroker.door import Log, LogTruncated
from txbroker.errors import (
    AlreadyDecided,
    BadRequest,
    BodyLost,
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
from txbroker.failpoints import hit
from txbroker.proxy.appender import Appender, Lane
from txbroker.proxy.bodies import lost_cause
from txbroker.proxy.checkback import CheckBack
from txbroker.proxy.clock import LogTime
from txbroker.proxy.history import search, tell_verdict
from txbroker.proxy.promoter import Promoter

VERDICT_S = 1.0
"""Maximum time to read who decided a settled transaction, seconds; later it is shown without."""
VERDICTS_MAX = 8
"""Such readings at a time: each fetches a batch of op."""


class Bounds(Struct, frozen=True):
    """How much a half partition holds.

    Attributes:
        dedup_window_ms: for how long ids and keys are remembered.
        pending_max: transactions that are not settled.
        pending_group_max: those of one share.
        waiting_share_max: those of one share that wait for targets that do not take them now.
    """

    dedup_window_ms: int
    pending_max: int
    pending_group_max: int
    waiting_share_max: int


class AnswerEvents(Protocol):
    """Who is told what was answered; called from the event loop."""

    def prepared(self, transaction: Transaction) -> None:
        """A half message was stored by this owner."""
        ...

    def decided(self, transaction: Transaction) -> None:
        """A deciding marker took effect."""
        ...

    def outcome(self, outcome: Outcome) -> None:
        """A decision changed nothing: it is contrary to the standing one."""
        ...


class Parts(Struct, frozen=True):
    """What answers are made with: the owner's own, all of one partition.

    `half_log` and `op_log` are read for transactions that the ledger has forgotten.
    """

    ledger: Ledger
    half: Appender
    op: Appender
    half_log: Log
    op_log: Log
    id_clock: LogTime
    promoter: Promoter
    checks: CheckBack


class Visible:
    """Who waits until a transaction is visible, by its id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def release(self, transactions: Iterable[Transaction]) -> None:
        """These are visible, or will not become so by themselves."""
        if self._waiting:
            for transaction in transactions:
                for future in self._waiting.pop(transaction.id, ()):
                    if not future.done():
                        future.set_result(None)

    def close(self) -> None:
        """Nobody here will know any more."""
        self._closed = True
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(OwnerUnavailable())
        self._waiting.clear()

    async def wait(self, id: str) -> None:
        """Wait until a transaction is visible.

        Raises:
            OwnerUnavailable: this owner closes.
        """
        if self._closed:
            raise OwnerUnavailable(id=id)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id, []).append(future)
        try:
            await future
        finally:
            # Whoever gave up and asks again must not be remembered each time.
            waiting = self._waiting.get(id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(id, None)


class Answers:
    """Answers the calls for one half partition.

    Args:
        parts: what answers are made with.
        bounds: how much the partition holds.
        settled_share: how many bytes of settled transactions it may remember.
        events: told what was stored.
        claim: the name of the owner's present claim, for markers.
        record_version: the version of the records to write.
        stopped: told where a call met a log that is not what it was.
    """

    def __init__(
        self,
        parts: Parts,
        bounds: Bounds,
        settled_share: Callable[[], int],
        events: AnswerEvents,
        claim: Callable[[], str],
        record_version: Callable[[], int],
        stopped: Callable[[Exception], None],
    ) -> None:
        self.visible = Visible()
        self.suspended = False
        """Whether nobody knows whose the partition is: then nothing new is taken."""
        self._ledger = parts.ledger
        self._half = parts.half
        self._op = parts.op
        self._logs = (parts.half_log, parts.op_log)
        self._id_clock = parts.id_clock
        self._promoter = parts.promoter
        self._checks = parts.checks
        self._bounds = bounds
        self._settled_share = settled_share
        self._events = events
        self._claim = claim
        self._record_version = record_version
        self._stopped = stopped
        # On their way into the half topic, by share.
        self._preparing = Use()
        self._searching = asyncio.Semaphore()
        self._telling = asyncio.Semaphore(VERDICTS_MAX)

    def _check_open(self, id: str) -> None:
        if self.suspended:
            raise OwnerUnavailable(
                "this proxy is out of touch with the others: nobody knows now whose the "
                "partition is",
                id=id,
            )

    # --- prepare ---------------------------------------------------------------------------

    def standing_prepare(
        self, half_id: str | None, group: str, dedup_key: str | None, messages: Sequence[Message]
    ) -> Standing | None:
        """Return the standing of a prepare that was stored before, None for a new one.

        Raises:
            IdConflict: the id or key was used for other content.
            BodyLost: what was stored is gone, and the transaction is undecided.
        """
        transaction = self._ledger.get(half_id) if half_id else None
        if transaction is None and dedup_key is not None:
            transaction = self._ledger.by_dedup_key(group, dedup_key)
            if transaction is not None and transaction.state in SETTLED:
                age_ms = self._id_clock.now_ms() - transaction.prepared_at_ms
                if age_ms > self._bounds.dedup_window_ms:
                    return None
        if transaction is None:
            return None
        if not fingerprint(messages, group).startswith(transaction.fingerprint):
            raise IdConflict(id=transaction.id, state=transaction.state)
        return _repeated(transaction)

    async def prepare(self, half: Half, instance: str = "") -> Standing:
        """Store a half message whose target partitions are fixed.

        Raises:
            IdExpired: it was not stored; `now_ms` of the details is the time for another id.
            IdConflict, TooLarge, Overloaded: it was not stored.
            BodyLost: it was stored before, and is gone.
            OwnerUnavailable: it may or may not be stored; the same again is safe.
        """
        now_ms = self._id_clock.now_ms()
        age_ms = abs(now_ms - parse_id(half.id).time_ms)
        if age_ms > self._bounds.dedup_window_ms:
            why = f"the id is {age_ms // 1000} s away from Kafka's clock"
            raise IdExpired(why, id=half.id, now_ms=now_ms)
        self._check_open(half.id)
        share = self._ledger.share_of(half.group)
        self._check_room(half, share)
        self._preparing.add(share)
        try:
            records = encode_half(half, self._record_version())
            hit("prepare.received")
            outcome = await self._half.append(records, Lane.CALLS)
        finally:
            self._preparing.add(share, -1)
        self._id_clock.follow(self._ledger.half_clock_ms)
        transaction = outcome.transaction
        if outcome.effect is Effect.APPLIED and transaction is not None:
            transaction.instance = instance
            self._events.prepared(transaction)
            hit("prepare.applied")
            return standing(transaction, created=True)
        if outcome.effect is Effect.REPEATED and transaction is not None:
            return _repeated(transaction)
        if outcome.effect is Effect.CONFLICT and transaction is not None:
            raise IdConflict(id=transaction.id, state=transaction.state)
        if outcome.effect is Effect.EXPIRED:
            raise IdExpired(id=half.id, now_ms=self._id_clock.now_ms())
        raise BadRequest(f"the half message is void: {outcome.why}", id=half.id)

    def _check_room(self, half: Half, share: str) -> None:
        """Refuse a prepare that would make the partition hold more than it can, or its share more
        than the part that one may use.

        Raises:
            Overloaded: with what has to happen first.
        """
        ledger, bounds = self._ledger, self._bounds
        held = len(ledger.transactions) + self._preparing.total
        held_of = ledger.unsettled.of(share) + self._preparing.of(share)
        if held >= bounds.pending_max:
            raise Overloaded(
                f"partition {ledger.partition} holds {held} transactions that are not settled, its "
                "limit: decide some, revive refused ones, or wait",
                id=half.id,
            )
        if held_of >= bounds.pending_group_max:
            why = f"{held_of} transactions that are not settled"
            raise _too_much(half, share, ledger, why, "decide some, revive refused ones, or wait")
        if self._promoter.full:
            raise Overloaded(
                "too many transactions wait for target partitions without a leader", id=half.id
            )
        waiting = self._promoter.waiting.of(share)
        if waiting >= bounds.waiting_share_max:
            why = f"{waiting} transactions that wait for target partitions without a leader"
            raise _too_much(half, share, ledger, why, "wait until the targets take them")
        self._check_remembered(half, share)

    def _check_remembered(self, half: Half, share: str) -> None:
        """Refuse a prepare while too many settled transactions have to be remembered.

        Raises:
            Overloaded: with what has to happen first.
        """
        ledger, bounds = self._ledger, self._bounds
        # By our time, not the log's clock: that stands still while prepares are refused.
        now_ms = self._id_clock.now_ms()
        size, size_max = ledger.settled.size, self._settled_share()
        full = size >= size_max
        if full and now_ms <= ledger.oldest_settled_ms() + bounds.dedup_window_ms:
            raise Overloaded(
                f"partition {ledger.partition} remembers {ledger.settled_count} settled "
                f"transactions of the dedup window in {size} bytes, its limit: wait",
                id=half.id,
            )
        settled = ledger.settled.recent_of(share, now_ms - bounds.dedup_window_ms)
        if settled >= part_of(size_max):
            why = f"{settled} bytes of settled transactions of the dedup window"
            raise _too_much(half, share, ledger, why, "wait")

    # --- decide ----------------------------------------------------------------------------

    async def get(self, id: str) -> Transaction:
        """Return a transaction, after reading half to an end asked for now if it is unknown.

        Raises:
            NotFound: there is none.
            TooOld: the log does not reach back to it.
            OwnerUnavailable: Kafka does not answer.
        """
        transaction = self._ledger.get(id)
        if transaction is None:
            try:
                await self._half.catch_up()
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=id) from None
            except (InvariantBroken, LogTruncated) as error:
                # The record that cannot be applied is behind us now: nobody else would meet it.
                self._stopped(error)
                raise OwnerUnavailable(str(error), id=id) from None
            transaction = self._ledger.get(id)
        return transaction or await self._settled_before(id)

    async def find(self, id: str) -> Transaction:
        """Return a transaction as `get` does, with who decided it and why."""
        transaction = await self.get(id)
        with suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_S), self._telling:
                await tell_verdict(self._logs[1], transaction)
        return transaction

    async def _settled_before(self, id: str) -> Transaction:
        """Find a transaction that was settled before what the ledger remembers."""
        window_ms = self._bounds.dedup_window_ms
        if abs(self._id_clock.now_ms() - parse_id(id).time_ms) <= window_ms:
            raise NotFound(id=id)
        if self._searching.locked():
            raise Overloaded("another transaction is being looked up in the log", id=id)
        async with self._searching:
            try:
                return await search(*self._logs, id, window_ms)
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=id) from None

    async def decide(self, request: DecideRequest) -> Standing:
        """Write a deciding marker; answered when the ledger has applied it.

        Raises:
            AlreadyDecided, WrongGroup, NotFound, TooOld, TooLarge, BadRequest: not written, or
                without effect.
            BodyLost: not written, as a commit could promote nothing.
            OwnerUnavailable: it may or may not be written; the same again is safe.
        """
        self._check_open(request.id)
        transaction = await self.get(request.id)
        try:
            self._may_decide(transaction, request)
        except AlreadyDecided:
            # No marker is written that could count it.
            self._events.outcome(Outcome(Effect.CONFLICT, transaction))
            raise
        if transaction.decision is None:
            if request.decision is Decision.COMMIT and request.messages is None:
                _check_body(transaction)
            # Touch may be lost since: nobody knows when it would be written.
            self._check_open(request.id)
            hit("decide.received")
            outcome = await self._op.append(self._deciding(transaction, request), Lane.CALLS)
            if outcome.effect is Effect.APPLIED:
                self._events.decided(transaction)
                hit("decide.applied")
            elif transaction.decision is None:
                raise OwnerUnavailable(f"the marker had no effect: {outcome.why}", id=request.id)
            self._may_decide(transaction, request)
        if request.wait and transaction.state is State.COMMITTED:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.wait_s or None):
                    await self.visible.wait(transaction.id)
        return standing(transaction)

    def _may_decide(self, transaction: Transaction, request: DecideRequest) -> None:
        """Raise if the request cannot be, or was not, what decides the transaction."""
        check_group(transaction, request.group)
        if transaction.decision is None:
            return
        if transaction.decision is not request.decision:
            why = f"the transaction was decided before: {transaction.decision}"
        elif not same_contents(transaction, request.messages):
            why = "the transaction was committed before, with other messages"
        else:
            return
        raise AlreadyDecided(
            why, id=request.id, decision=transaction.decision, state=transaction.state
        )

    def _deciding(self, transaction: Transaction, request: DecideRequest) -> list[Record]:
        contents = request.messages
        marker = Marker(
            v=self._record_version(),
            kind=MarkerKind(request.decision),
            id=transaction.id,
            half=transaction.offset,
            source=request.source,
            group=request.group,
            by=request.by,
            reason=request.reason,
            round=transaction.round,
            number=transaction.number,
            claim=self._claim(),
            contents=0 if contents is None else len(contents),
        )
        records = [encode_marker(marker)]
        if contents is not None:
            records.extend(encode_contents(transaction.half, contents, marker.v))
        return records

    async def revive(self, id: str, by: str, reason: str) -> Standing:
        """Begin a new round for a parked transaction, or try a refused one again now.

        Raises:
            NotPending: it is neither parked nor refused.
        """
        self._check_open(id)
        transaction = await self.get(id)
        if transaction.state not in (State.PARKED, State.REFUSED):
            raise NotPending(
                f"the transaction is {transaction.state}; only parked and refused ones are revived",
                id=id,
                state=transaction.state,
            )
        self._check_open(id)
        await self._checks.write(
            transaction, MarkerKind.REVIVE, source=Source.OPERATOR, by=by, reason=reason
        )
        if transaction.state is State.REFUSED:
            self._promoter.retry_refused(id)
        return standing(transaction)


def _too_much(half: Half, share: str, ledger: Ledger, what: str, remedy: str) -> Overloaded:
    """Return that a share uses its part, without naming other groups of it."""
    group = f"group {half.group!r}"
    who = group if share == half.group else f"the principal of {group}, with all of its groups,"
    return Overloaded(
        f"{who} has {what} in partition {ledger.partition}, its limit: {remedy}",
        id=half.id,
        group=half.group,
    )


def check_group(transaction: Transaction, group: str) -> None:
    """Refuse a group that a transaction does not belong to; "" is any.

    Raises:
        WrongGroup: it belongs to another one.
    """
    if group and group != transaction.half.group:
        raise WrongGroup("the transaction belongs to another producer group", id=transaction.id)


def _repeated(transaction: Transaction) -> Standing:
    """Return the standing of a prepare that was stored before.

    Raises:
        BodyLost: what was stored is gone, and the transaction is undecided.
    """
    if transaction.decision is None:
        _check_body(transaction)
    return standing(transaction)


def _check_body(transaction: Transaction) -> None:
    """Raise where there is nothing to be promoted.

    Raises:
        BodyLost: the messages are gone.
    """
    if transaction.lost:
        why = lost_cause(transaction).message
        raise BodyLost(why, id=transaction.id, state=transaction.state)


def standing(transaction: Transaction, *, created: bool = False) -> Standing:
    """Return where a transaction stands."""
    return Standing(transaction.id, transaction.state, transaction.decision, created)
