"""Check-back: which transactions are asked about, when, and what becomes of the answers.

The owner's side of it. Whom to ask and how is `txbroker.checkers`; when is `core.schedule`; what
an attempt may do is `core.transaction`. An attempt's marker is durable, and accepted by the
ledger, before the question goes out, so no crash and no second owner ever makes one too many.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Protocol

import structlog

from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unreached
from txbroker.contract import DecideRequest, Standing
from txbroker.core.codec import encode_marker
from txbroker.core.ledger import Effect, Ledger, Outcome, fits
from txbroker.core.records import (
    RECORD_VERSION,
    CheckReason,
    Decision,
    Marker,
    MarkerKind,
    Message,
    Source,
    State,
)
from txbroker.core.schedule import Schedule, due_ms
from txbroker.core.transaction import ASK_SPACING_MS, Transaction
from txbroker.errors import NotPending, RequestError
from txbroker.proxy.appender import Appender

AGAIN_MS = 1000
"""What could not be done now is tried again after this."""
HANDED_OUT_MS = 60_000
"""A check that the runner holds comes back by itself; this is for one that got lost."""
HAND_OUT_MAX = 500
"""Checks that are handed out without a pause for everything else."""

log = structlog.get_logger()


class Runner(Protocol):
    """Who carries out the checks: `txbroker.checkers.runner.CheckRunner`."""

    def due(
        self, owner: "CheckBack", id: str, group: str, prefer: str, reason: CheckReason
    ) -> bool:
        """Take a check; False where the group's queue is full."""
        ...

    def forget(self, owner: "CheckBack") -> None:
        """Drop what is queued for this owner."""
        ...


class CheckBack:
    """The checks of one half partition: a `txbroker.checkers.runner.CheckOwner`.

    Args:
        ledger: what is pending.
        op: where markers are written.
        runner: carries the checks out.
        now_ms: the brokers' clock.
        claim: the name of the owner's present claim.
        decide: takes the decision that a check brought.
    """

    def __init__(
        self,
        ledger: Ledger,
        op: Appender,
        runner: Runner,
        now_ms: Callable[[], int],
        claim: Callable[[], str],
        decide: Callable[[DecideRequest], Awaitable[Standing]],
    ) -> None:
        self._ledger = ledger
        self._op = op
        self._runner = runner
        self._now_ms = now_ms
        self._claim = claim
        self._decide = decide
        self._schedule = Schedule()
        self._changed = asyncio.Event()
        # Since when a check may be made that somebody has asked for, until it is.
        self._asked_ms: dict[str, int] = {}
        self._parking: set[asyncio.Task[None]] = set()

    # --- the schedule ----------------------------------------------------------------------

    def touch(self, transaction: Transaction) -> None:
        """Put a transaction to its next time, after anything that may have moved it."""
        at_ms = due_ms(transaction)
        if at_ms is None or transaction.park_ms() is not None:
            self._asked_ms.pop(transaction.id, None)
        else:
            at_ms = min(at_ms, self._asked_ms.get(transaction.id, at_ms))
        self._set(transaction.id, at_ms)

    def look_again(self) -> None:
        """The clock has moved more than the time that passed: something may be due already."""
        self._changed.set()

    def _set(self, id: str, at_ms: int | None) -> None:
        before_ms = self._schedule.next_ms()
        self._schedule.set(id, at_ms)
        if self._schedule.next_ms() != before_ms:
            self._changed.set()

    async def run(self) -> None:
        """Hand out checks and park, each at its time, until cancelled."""
        while True:
            self._changed.clear()
            next_ms = self._schedule.next_ms()
            wait_s = None if next_ms is None else (next_ms - self._now_ms()) / 1000
            if wait_s is not None and wait_s <= 0:
                for id in list(islice(self._schedule.pop_due(self._now_ms()), HAND_OUT_MAX)):
                    self._attend(id)
                # After an outage a hundred thousand may be due at once: others want their turn.
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _attend(self, id: str) -> None:
        """Do what is due for a transaction."""
        transaction = self._ledger.get(id)
        if transaction is None or transaction.state is not State.PENDING:
            self._asked_ms.pop(id, None)
            return
        if transaction.park_ms() is not None:
            task = asyncio.create_task(self._park(transaction))
            self._parking.add(task)
            task.add_done_callback(self._parking.discard)
            return
        half = transaction.half
        reason = CheckReason.ASKED if id in self._asked_ms else CheckReason.DUE
        taken = self._runner.due(self, id, half.group, transaction.instance, reason)
        self._set(id, self._now_ms() + (HANDED_OUT_MS if taken else AGAIN_MS))

    async def _park(self, transaction: Transaction) -> None:
        try:
            outcome = await self.write(transaction, MarkerKind.PARK, source=Source.SCHEDULE)
        except RequestError as error:
            log.warning("park failed", id=transaction.id, why=str(error))
            outcome = Outcome(Effect.VOID)
        if outcome.effect is Effect.APPLIED:
            log.warning("parked", id=transaction.id, group=transaction.half.group)
        else:
            self._set(transaction.id, self._now_ms() + AGAIN_MS)

    def close(self) -> None:
        """Hand out nothing more."""
        self._runner.forget(self)
        for task in self._parking:
            task.cancel()

    # --- asked for -------------------------------------------------------------------------

    def ask(self, transaction: Transaction) -> None:
        """Pull the next attempt forward.

        Raises:
            NotPending: it is decided or parked, or its next attempt is the last of the round.
        """
        state = transaction.state
        if state is not State.PENDING:
            raise NotPending(f"the transaction is {state}", id=transaction.id, state=state)
        if len(transaction.counted_ms) + 1 >= transaction.half.policy.attempts_max:
            raise NotPending(
                "only the last attempt of the round is left, and that is never pulled forward",
                id=transaction.id,
                state=state,
            )
        due = due_ms(transaction)
        at_ms = max(self._now_ms(), transaction.last_check_ms + ASK_SPACING_MS)
        if due is None or at_ms < due:
            self._asked_ms[transaction.id] = at_ms
            self._set(transaction.id, at_ms)

    # --- for the runner --------------------------------------------------------------------

    async def attempt(self, id: str, reason: CheckReason, endpoint: str) -> CheckCall | None:
        """Write the marker of the next attempt; None where there is nothing to ask any more.

        Raises:
            RequestError: it could not be written; the schedule offers the check again.
        """
        transaction = self._ledger.get(id)
        if transaction is None or transaction.state is not State.PENDING:
            return None
        next_ms = transaction.next_check_ms()
        if self._now_ms() >= next_ms:
            reason = CheckReason.DUE
        elif reason is CheckReason.DUE:
            if self._now_ms() < self._asked_ms.get(id, next_ms):
                self.touch(transaction)
                return None
            # Asked for while the runner held an attempt already.
            reason = CheckReason.ASKED
        self._set(id, self._now_ms() + HANDED_OUT_MS)
        turn, number = transaction.round, transaction.number + 1
        last = transaction.attempts[-1] if transaction.attempts else None
        try:
            outcome = await self.write(
                transaction,
                MarkerKind.CHECK,
                source=Source.SCHEDULE,
                reason=reason,
                number=number,
                endpoint=endpoint,
                previous="" if last is None else last.outcome,
            )
        except RequestError:
            self._set(id, self._now_ms() + AGAIN_MS)
            raise
        if outcome.effect is not Effect.APPLIED:
            log.info("attempt not accepted", id=id, why=outcome.why)
            self._asked_ms.pop(id, None)
            early_ms = transaction.next_check_ms() - self._ledger.op_clock_ms
            self._set(id, self._now_ms() + max(early_ms, 50))
            return None
        self._asked_ms.pop(id, None)
        if not self.still_pending(id) or (transaction.round, transaction.number) != (turn, number):
            return None
        # The answer may still be on its way when the next attempt would be due.
        self._set(id, self._now_ms() + HANDED_OUT_MS)
        policy = transaction.half.policy
        return CheckCall(
            id=id,
            group=transaction.half.group,
            attempt=len(transaction.counted_ms),
            attempts_max=policy.attempts_max,
            reason=reason,
            prepared_at_ms=transaction.prepared_at_ms,
            messages=transaction.half.messages,
            round=turn,
            number=number,
            timeout_s=policy.timeout_s,
        )

    def still_pending(self, id: str) -> bool:
        """Say whether a transaction is undecided and not parked."""
        transaction = self._ledger.get(id)
        return transaction is not None and transaction.state is State.PENDING

    async def answered(self, call: CheckCall, endpoint: str, result: CheckResult) -> None:
        """Take what came of an attempt."""
        transaction = self._ledger.get(call.id)
        if transaction is None:
            return
        try:
            await self._take(transaction, call, endpoint, result)
        except RequestError as error:
            # Decided otherwise meanwhile, or not written: then the next attempt asks again.
            log.info("answer not taken", id=call.id, endpoint=endpoint, why=str(error))
        finally:
            self.touch(transaction)

    async def _take(
        self, transaction: Transaction, call: CheckCall, endpoint: str, result: CheckResult
    ) -> None:
        number = call.number
        if transaction.state is not State.PENDING or transaction.round != call.round:
            # An answer in flight behind a decision or a new round is ignored; after parking the
            # transaction is decided by hand.
            return
        transaction.note_outcome(result.detail)
        if isinstance(result, Unreached):
            await self.write(
                transaction,
                MarkerKind.RETURNED,
                source=Source.CHECK,
                number=number,
                by=endpoint,
                previous=result.detail,
            )
        elif isinstance(result, Answered) and result.decision is not Decision.UNKNOWN:
            await self._decided(transaction, endpoint, result)
        elif isinstance(result, Answered) and result.ask_again_s is not None:
            await self.write(
                transaction,
                MarkerKind.LATER,
                source=Source.CHECK,
                number=number,
                by=endpoint,
                previous=result.detail,
                later_s=result.ask_again_s,
            )

    async def _decided(self, transaction: Transaction, endpoint: str, result: Answered) -> None:
        messages = result.messages
        if messages is not None and not _replaces(transaction, messages):
            transaction.note_outcome(f"{result.decision} with messages for other topics")
            return
        if messages is not None:
            messages = placed_like(transaction.half.messages, messages)
        await self._decide(
            DecideRequest(
                id=transaction.id,
                decision=result.decision,
                messages=messages if result.decision is Decision.COMMIT else None,
                reason=result.detail,
                source=Source.CHECK,
                by=endpoint,
            )
        )

    async def write(
        self,
        transaction: Transaction,
        kind: MarkerKind,
        *,
        source: Source,
        by: str = "",
        reason: str = "",
        number: int | None = None,
        endpoint: str = "",
        previous: str = "",
        later_s: float = 0.0,
    ) -> Outcome:
        """Append one marker of this transaction and return what it did.

        Raises:
            OwnerUnavailable: it may or may not be written.
        """
        marker = Marker(
            v=RECORD_VERSION,
            kind=kind,
            id=transaction.id,
            half=transaction.offset,
            source=source,
            by=by,
            reason=reason,
            round=transaction.round,
            number=transaction.number if number is None else number,
            claim=self._claim(),
            endpoint=endpoint,
            previous=previous,
            later_s=later_s,
        )
        return await self._op.append([encode_marker(marker)])


def placed_like(
    prepared: tuple[Message, ...], messages: tuple[Message, ...]
) -> tuple[Message, ...]:
    """Return replacing messages with the target partitions that were fixed at prepare."""
    return tuple(
        [
            Message(new.topic, new.key, new.value, new.headers, old.partition, new.timestamp_ms)
            for old, new in zip(prepared, messages, strict=True)
        ]
    )


def _replaces(transaction: Transaction, messages: tuple[Message, ...]) -> bool:
    prepared = transaction.half.messages
    return len(messages) == len(prepared) and fits(
        transaction.half, placed_like(prepared, messages)
    )
