"""The calls of one half partition: prepare, decide and revive, answered from the ledger."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from txbroker.contract.service import Answer, DecideRequest, PrepareRequest, TransactionStatus
from txbroker.core.encoding import HalfRow, half_row
from txbroker.core.ledger import ApplyResult, Effect, Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import (
    Decision,
    Half,
    MarkerKind,
    Place,
    Source,
    State,
)
from txbroker.core.routing import parse_id
from txbroker.core.settled import ShareUse, share_max
from txbroker.core.transaction import GROUP_OF, Transaction, fingerprint, same_contents
from txbroker.door.protocols import LogTruncated
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
    RequestError,
    WrongGroup,
)
from txbroker.failpoints import failpoint
from txbroker.proxy.partition.appender import Appender, Applied, Priority
from txbroker.proxy.partition.body_cache import lost_cause
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.history import (
    READ_BACK_S,
    Account,
    account_of,
    read_markers,
    read_targets,
    search,
)
from txbroker.proxy.partition.promoter import Promoter

READ_BACK_BYTES = 8 << 20
TRACE_S, TRACE_BYTES = 20.0, 512 << 20
"""Maximum time to read a settled transaction back, seconds, and bytes read in its targets; then it
is shown without the rest."""
_KINDS = {
    Decision.COMMIT: MarkerKind.COMMIT,
    Decision.ROLLBACK: MarkerKind.ROLLBACK,
}
READ_BACK_MAX = 8
"""Transactions that are read back at a time."""


class PartitionApi:
    """Answers the calls for one half partition."""

    def __init__(
        self, context: PartitionContext, half: Appender, op: Appender, promoter: Promoter
    ) -> None:
        self._context = context
        self._ledger = context.ledger
        self._id_clock = context.id_clock
        self._events = context.events
        self._settings = context.settings
        self._waiting_share_max = context.settings.waiting_share_max()
        self._half = half
        self._op = op
        self._logs = context.door.half, context.door.op
        self._promoter = promoter
        # Prepares in flight to the half topic, by share.
        self._preparing = ShareUse()
        self._searching = asyncio.Semaphore()
        self._reading_back = asyncio.Semaphore(READ_BACK_MAX)

    def _check_open(self, id: str) -> None:
        if not self._context.gate.is_set():
            raise OwnerUnavailable(
                "this proxy lost contact with the group coordinator; the owner of the partition "
                "is unknown: retry",
                id=id,
            )

    # --- prepare ---------------------------------------------------------------------------

    def standing_prepares(self, requests: Sequence[PrepareRequest]) -> dict[int, Answer]:
        """Return, by number, the answers to requests that were stored before.

        `IdConflict` if the id or key was used for other content; `BodyLost` if the messages no
        longer exist and the transaction is undecided.
        """
        ledger, settled = self._ledger, self._ledger.index.settled
        answers: dict[int, Answer] = {}
        for number, request in enumerate(requests):
            id = request.id
            known = None
            if id is not None:
                known = ledger.index.transactions.get(id) or settled.get(id)
            if known is None and request.dedup_key is not None:
                known = self._by_dedup_key(request.group, request.dedup_key)
            if known is None:
                continue
            if not fingerprint(request.messages, request.group).startswith(known.fingerprint):
                answers[number] = IdConflict(id=known.id, state=known.state)
            else:
                answers[number] = _repeated(known)
        return answers

    def _by_dedup_key(self, group: str, dedup_key: str) -> Transaction | None:
        transaction = self._ledger.index.by_dedup_key(group, dedup_key)
        if transaction is not None and transaction.state in SETTLED:
            age_ms = self._id_clock.now_ms() - transaction.prepared_at_ms
            if age_ms > self._settings.dedup_window_ms:
                return None
        return transaction

    async def prepare(
        self, halves: Sequence[tuple[Half, tuple[Place, ...]]], instance: str = ""
    ) -> list[Answer]:
        """Store half messages with fixed target partitions.

        Args:
            halves: of one group, each with the places of its messages.
            instance: the SDK process that prepares them.

        Returns:
            For each its status, or an error: `IdExpired` (not stored; `now_ms` in the details is
            the time for a new id), `IdConflict`, `TooLarge`, `Overloaded`; `BodyLost` (stored
            before, but its messages no longer exist); `OwnerUnavailable` (it may or may not be
            stored; a retry is safe).
        """
        version, now_ms = self._context.proxy.record_version, self._id_clock.now_ms()
        window_ms = self._settings.dedup_window_ms
        share = self._ledger.index.share_of(halves[0][0].group)
        answers: list[Answer | None] = [None] * len(halves)
        rows: list[HalfRow] = []
        numbers: list[int] = []
        room = 0
        for number, (half, where) in enumerate(halves):
            try:
                age_ms = abs(now_ms - parse_id(half.id).time_ms)
                if age_ms > window_ms:
                    why = f"the id is {age_ms // 1000} s away from Kafka's clock: use a new id"
                    raise IdExpired(why, id=half.id, now_ms=now_ms)
                if len(rows) >= room:
                    self._check_open(half.id)
                    room = len(rows) + self._check_room(half, share, len(rows))
            except RequestError as error:
                answers[number] = error
                continue
            mark = fingerprint(half.messages, half.group)
            rows.append(half_row(half, version, mark, where))
            numbers.append(number)
        if rows:
            await self._store(rows, numbers, share, instance, answers)
        return [answer for answer in answers if answer is not None]

    async def _store(
        self,
        rows: list[HalfRow],
        numbers: list[int],
        share: str,
        instance: str,
        answers: list[Answer | None],
    ) -> None:
        """Append half messages, and set the answer of each at its number."""
        left = len(rows)

        def on_results(count: int) -> None:
            # At once: stored transactions of a long run are in the ledger, and would count twice.
            nonlocal left
            left -= count
            self._preparing.add(share, -count)

        self._preparing.add(share, left)
        try:
            failpoint("prepare.received")
            outcomes = await self._half.append(rows, Priority.CALLS, on_results)
        finally:
            self._preparing.add(share, -left)
        if any(isinstance(outcome, ApplyResult) for outcome in outcomes):
            # Otherwise nothing was applied, and the log clock is not current.
            self._id_clock.follow(self._ledger.half_clock_ms)
        stored: list[Transaction] = []
        for number, row, outcome in zip(numbers, rows, outcomes, strict=True):
            if isinstance(outcome, ApplyResult) and outcome.effect is Effect.APPLIED:
                transaction = outcome.transaction
                assert transaction is not None
                transaction.instance = instance
                stored.append(transaction)
                answers[number] = TransactionStatus(row.half.id, transaction.state, None, True)
            else:
                answers[number] = self._not_stored(row.half, outcome)
        if stored:
            rates = self._context.rates
            rates.prepared += len(stored)
            rates.prepared_by.extend(map(GROUP_OF, stored))
            self._events.prepared(stored)
            failpoint("prepare.applied")

    def _not_stored(self, half: Half, outcome: Applied) -> Answer:
        if isinstance(outcome, RequestError):
            return outcome
        transaction = outcome.transaction
        if outcome.effect is Effect.REPEATED and transaction is not None:
            return _repeated(transaction)
        if outcome.effect is Effect.CONFLICT and transaction is not None:
            return IdConflict(id=transaction.id, state=transaction.state)
        if outcome.effect is Effect.EXPIRED:
            return IdExpired(id=half.id, now_ms=self._id_clock.now_ms())
        return BadRequest(f"the half message is void: {outcome.why}", id=half.id)

    def _check_room(self, half: Half, share: str, ahead: int) -> int:
        """Return how many prepares, this one included, fit the limits of partition and share."""
        ledger, settings = self._ledger, self._settings
        held = len(ledger.index.transactions) + self._preparing.total + ahead
        held_of = ledger.index.unsettled.of(share) + self._preparing.of(share) + ahead
        if held >= settings.pending_max:
            raise Overloaded(
                f"partition {ledger.partition} holds {held} unsettled transactions, its limit: "
                "decide some, revive refused ones, or wait",
                id=half.id,
            )
        if held_of >= settings.pending_group_max:
            why = f"{held_of} unsettled transactions"
            raise _share_full(half, share, ledger, why, "decide some, revive refused ones, or wait")
        if self._promoter.full:
            raise Overloaded(
                "too many transactions wait for target partitions without a leader: retry later",
                id=half.id,
            )
        waiting = self._promoter.waiting.of(share)
        if waiting >= self._waiting_share_max:
            why = f"{waiting} transactions that wait for target partitions without a leader"
            raise _share_full(half, share, ledger, why, "wait until the targets are available")
        self._check_remembered(half, share)
        return min(settings.pending_max - held, settings.pending_group_max - held_of)

    def _check_remembered(self, half: Half, share: str) -> None:
        """Refuse a prepare while the settled transactions of the dedup window fill the memory."""
        ledger, window_ms = self._ledger, self._settings.dedup_window_ms
        # By our time, not the log's clock: that stands still while prepares are refused.
        now_ms = self._id_clock.now_ms()
        size, size_max = ledger.index.settled.size, self._context.proxy.settled_share()
        full = size >= size_max
        if full and now_ms <= ledger.index.settled.oldest_ms() + window_ms:
            raise Overloaded(
                f"partition {ledger.partition} remembers {len(ledger.index.settled)} settled "
                f"transactions of the dedup window in {size} bytes, its limit: wait",
                id=half.id,
            )
        settled = ledger.index.settled.recent_of(share, now_ms - window_ms)
        if settled >= share_max(size_max):
            why = f"{settled} bytes of settled transactions of the dedup window"
            raise _share_full(half, share, ledger, why, "wait")

    # --- decide ----------------------------------------------------------------------------

    async def get(self, id: str) -> Transaction:
        """Return a transaction; if unknown, read half to an end requested now first.

        Raises:
            NotFound: it does not exist.
            TooOld: the log no longer reaches back to it.
            OwnerUnavailable: Kafka does not answer.
        """
        transaction = self._ledger.index.get(id)
        if transaction is None:
            try:
                await self._half.catch_up()
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=id) from None
            except (InvariantBroken, LogTruncated) as error:
                # The log was read past the record that cannot be applied: stop here.
                self._context.stopped(error)
                raise OwnerUnavailable(str(error), id=id) from None
            transaction = self._ledger.index.get(id)
        return transaction or await self._settled_before(id)

    async def find(self, id: str, *, trace: bool = False, brief: bool = False) -> Account:
        """Return a transaction as `get` does, with what its records show beyond memory.

        Args:
            trace: read the offsets of its markers, and read for longer.
            brief: read nothing back.
        """
        account = account_of(await self.get(id))
        if brief or (account.is_whole and not trace):
            return account
        limit_s = TRACE_S if trace else READ_BACK_S
        try:
            async with asyncio.timeout(limit_s), self._reading_back:
                await read_markers(account, *self._logs, self._settings.dedup_window_ms)
                if account.transaction.state is State.PROMOTED:
                    await read_targets(
                        account, self._context.targets, TRACE_BYTES if trace else READ_BACK_BYTES
                    )
        except TimeoutError:
            more = "" if trace else "; `txbroker tx trace` reads longer"
            account.gaps.append(f"facts that were not read within {limit_s:g} s{more}")
        except (KafkaUnavailable, InvariantBroken) as error:
            account.gaps.append(f"facts that Kafka does not return now: {error}")
        return account

    async def _settled_before(self, id: str) -> Transaction:
        """Find a settled transaction that the ledger has forgotten in the logs."""
        window_ms = self._settings.dedup_window_ms
        if abs(self._id_clock.now_ms() - parse_id(id).time_ms) <= window_ms:
            raise NotFound(id=id)
        if self._searching.locked():
            raise Overloaded("another transaction is being looked up in the log: retry", id=id)
        async with self._searching:
            try:
                return await search(*self._logs, id, window_ms)
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=id) from None

    async def decide(self, requests: Sequence[DecideRequest]) -> list[Answer]:
        """Write deciding markers; return when the ledger has applied them.

        Returns:
            For each its status, or an error: `AlreadyDecided`, `WrongGroup`, `NotFound`, `TooOld`,
            `TooLarge`, `BadRequest` (not written, or without effect); `BodyLost` (not written:
            there is nothing to promote); `OwnerUnavailable` (it may or may not be written; a retry
            is safe).
        """
        ledger, suspended = self._ledger, not self._context.gate.is_set()
        answers: list[Answer | None] = [None] * len(requests)
        undecided: list[tuple[int, DecideRequest, Transaction]] = []
        for number, request in enumerate(requests):
            id = request.id
            try:
                if suspended:
                    self._check_open(id)
                transaction = ledger.index.transactions.get(id) or await self.get(id)
                if transaction.verdict.decision is not None:
                    self._check_repeated(transaction, request)
                    answers[number] = standing(transaction)
                    continue
                if request.group and request.group != transaction.half.group:
                    check_group(transaction, request.group)
                if (
                    transaction.lost
                    and request.messages is None
                    and request.decision is Decision.COMMIT
                ):
                    # There is nothing to promote.
                    raise _body_lost(transaction)
            except RequestError as error:
                answers[number] = error
            else:
                undecided.append((number, request, transaction))
        if undecided:
            await self._mark(undecided, answers)
        return [answer for answer in answers if answer is not None]

    async def _mark(
        self,
        undecided: list[tuple[int, DecideRequest, Transaction]],
        answers: list[Answer | None],
    ) -> None:
        """Append deciding markers, and set the answer of each at its number."""
        if not self._context.gate.is_set():
            # Suspended since: the markers would wait for an unknown time.
            for number, request, _ in undecided:
                try:
                    self._check_open(request.id)
                except RequestError as error:
                    answers[number] = error
            return
        failpoint("decide.received")
        rows = [
            self._context.marker(
                transaction,
                _KINDS[request.decision],
                source=request.source,
                group=request.group,
                by=request.by,
                reason=request.reason,
                contents=request.messages,
            )
            for _, request, transaction in undecided
        ]
        outcomes = await self._op.append(rows, Priority.CALLS)
        decided: list[Transaction] = []
        for (number, request, transaction), outcome in zip(undecided, outcomes, strict=True):
            if isinstance(outcome, ApplyResult) and outcome.effect is Effect.APPLIED:
                decided.append(transaction)
                answers[number] = TransactionStatus(request.id, transaction.state, request.decision)
            else:
                answers[number] = self._not_marked(transaction, request, outcome)
        if decided:
            rates = self._context.rates
            rates.decided += len(decided)
            rates.decided_by.extend(map(GROUP_OF, decided))
            self._events.decided(decided)
            failpoint("decide.applied")

    def _not_marked(
        self, transaction: Transaction, request: DecideRequest, outcome: Applied
    ) -> Answer:
        if isinstance(outcome, RequestError):
            return outcome
        if transaction.verdict.decision is None:
            return OwnerUnavailable(
                f"the marker had no effect ({outcome.why}): retry", id=request.id
            )
        try:
            _check_same(transaction, request)
        except AlreadyDecided as error:
            return error
        return standing(transaction)

    def _check_repeated(self, transaction: Transaction, request: DecideRequest) -> None:
        """Raise unless a request repeats the decision of the transaction."""
        check_group(transaction, request.group)
        try:
            _check_same(transaction, request)
        except AlreadyDecided:
            # Counted here: no marker is written.
            self._events.outcome(ApplyResult(Effect.CONFLICT, transaction))
            raise

    async def visible_by(self, request: DecideRequest, answer: Answer) -> Answer:
        """Return the status of a transaction when its messages are visible, or on timeout."""
        if isinstance(answer, RequestError) or answer.state is not State.COMMITTED:
            return answer
        transaction = await self.get(request.id)
        if transaction.state is State.COMMITTED:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.wait_s or None):
                    await self._context.visible.wait(request.id)
        return standing(transaction)

    async def revive(self, id: str, by: str, reason: str) -> TransactionStatus:
        """Start a new round of checks for a parked transaction, or retry a refused one now."""
        self._check_open(id)
        transaction = await self.get(id)
        if transaction.state not in (State.PARKED, State.REFUSED):
            raise NotPending(
                f"the transaction is {transaction.state}; only parked and refused ones are revived",
                id=id,
                state=transaction.state,
            )
        self._check_open(id)
        marker = self._context.marker(
            transaction, MarkerKind.REVIVE, source=Source.OPERATOR, by=by, reason=reason
        )
        await self._op.append_one(marker)
        if transaction.state is State.REFUSED:
            self._promoter.retry_refused(id)
        return standing(transaction)


def _check_same(transaction: Transaction, request: DecideRequest) -> None:
    """Raise `AlreadyDecided` unless a request equals the decision of the transaction."""
    if transaction.verdict.decision is not request.decision:
        why = f"the transaction was already decided: {transaction.verdict.decision}"
    elif not same_contents(transaction, request.messages):
        why = "the transaction was already committed, with other messages"
    else:
        return
    raise AlreadyDecided(
        why, id=request.id, decision=transaction.verdict.decision, state=transaction.state
    )


def _share_full(half: Half, share: str, ledger: Ledger, what: str, remedy: str) -> Overloaded:
    """Return the error of a share at its limit, without naming its other groups."""
    group = f"group {half.group!r}"
    who = group if share == half.group else f"the principal of {group}, with all of its groups,"
    return Overloaded(
        f"{who} has {what} in partition {ledger.partition}, its limit: {remedy}",
        id=half.id,
        group=half.group,
    )


def check_group(transaction: Transaction, group: str) -> None:
    """Raise `WrongGroup` if a transaction belongs to another group; "" matches any."""
    if group and group != transaction.half.group:
        raise WrongGroup("the transaction belongs to another producer group", id=transaction.id)


def _repeated(transaction: Transaction) -> Answer:
    if transaction.verdict.decision is None and transaction.lost:
        return _body_lost(transaction)
    return standing(transaction)


def _body_lost(transaction: Transaction) -> BodyLost:
    """Return the error of a transaction without messages to promote."""
    why = lost_cause(transaction).message
    return BodyLost(why, id=transaction.id, state=transaction.state)


def standing(transaction: Transaction, *, created: bool = False) -> TransactionStatus:
    return TransactionStatus(
        transaction.id, transaction.state, transaction.verdict.decision, created
    )
