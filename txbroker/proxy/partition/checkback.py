"""Check-back, the owner's side: which transactions are checked, when, and what answers do.

`txbroker.checkers` asks the groups; `core.index` schedules; `core.transaction` counts attempts.
The marker of an attempt is durable, and accepted by the ledger, before the question is sent, so
neither a crash nor a second owner makes one too many. The messages are loaded before the marker is
written, because nothing may delay the question after its acceptance.
"""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from msgspec import Struct

from txbroker.checkers.base import (
    Answered,
    AttemptRequest,
    AttemptResult,
    CheckCall,
    Unreached,
    shortened,
)
from txbroker.contract.service import Answer, DecideRequest
from txbroker.core.encoding import MarkerRow, headers_bytes
from txbroker.core.index import CheckBacklog, Schedule, due_ms
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.lifecycle import ASK_SPACING_MS
from txbroker.core.records import (
    CheckReason,
    Decision,
    MarkerKind,
    Message,
    Source,
    State,
)
from txbroker.core.transaction import Transaction
from txbroker.errors import (
    BadRequest,
    BadTarget,
    KafkaUnavailable,
    NotPending,
    OwnerUnavailable,
    RequestError,
    TooLarge,
    TxbrokerError,
)
from txbroker.failpoints import failpoint
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.appender import Appender, Applied
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.targets import accept_replacement, place_like

RETRY_MS = 1000
"""Pause before a failed step is retried."""
HANDED_OUT_MS = 60_000
"""After this a check that the runner took, and never finished, is offered again."""
HAND_OUT_MAX = 500
"""Checks that are handed out before the event loop gets control again."""

log = get_logger(__name__)


class Decider(Protocol):
    """Takes decisions: `txbroker.proxy.partition.partition_api.PartitionApi`."""

    async def decide(self, requests: Sequence[DecideRequest]) -> list[Answer]:
        """Write deciding markers; return the answer to each."""


class Runner(Protocol):
    """Carries out checks: `txbroker.checkers.runner.CheckRunner`."""

    def due(
        self, owner: "CheckBack", id: str, group: str, prefer: str, reason: CheckReason
    ) -> bool:
        """Take a check; return False if the group's queue is full."""

    def forget(self, owner: "CheckBack") -> None:
        """Drop the queued checks of this owner."""


class _Asked(NamedTuple):
    """A requested check: its earliest time, by which client and why it was requested."""

    at_ms: int
    by: str = ""
    source: Source = Source.OPERATOR


class _Attempt(Struct, frozen=True):
    """An attempt to make, and its number in the run."""

    number: int
    transaction: Transaction
    reason: CheckReason
    endpoint: str


class CheckBack:
    """The checks of one half partition: a `txbroker.checkers.runner.CheckOwner`."""

    def __init__(
        self,
        context: PartitionContext,
        op: Appender,
        runner: Runner,
        bodies: BodyCache,
        decider: Decider,
    ) -> None:
        self._context = context
        self._ledger = context.ledger
        self._clock = context.clock
        self._overhead_bytes = headers_bytes(context.settings.installation)
        self._op = op
        self._runner = runner
        self._bodies = bodies
        self._decider = decider
        self._schedule = Schedule()
        self._backlog = CheckBacklog()
        self._changed = asyncio.Event()
        # Requested checks, until their attempts are made.
        self._asked: dict[str, _Asked] = {}
        # Transactions whose attempts are being written: not parked before the question is sent.
        self._making: set[str] = set()
        self._parking: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    # --- the schedule ----------------------------------------------------------------------

    def touch(self, transaction: Transaction) -> None:
        self.changed((transaction,))

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Reschedule transactions after changes that may have moved their next checks."""
        asked, crowded = self._asked, len(self._backlog)
        times: list[tuple[str, int | None]] = []
        for transaction in transactions:
            id, at_ms = transaction.half.id, due_ms(transaction)
            if crowded:
                self._backlog.remove(id)
            if at_ms is None:
                asked.pop(id, None)
            elif transaction.lost:
                # Not checked; see `attempt`.
                at_ms = None
            elif id in asked:
                if transaction.park_ms() is None:
                    at_ms = min(at_ms, asked[id].at_ms)
                else:
                    del asked[id]
            times.append((id, at_ms))
        if self._schedule.set_run(times):
            self._changed.set()

    def look_again(self) -> None:
        """Look for due checks: the clock was put forward."""
        self._changed.set()

    def _set(self, ids: Iterable[str], at_ms: int) -> None:
        """Schedule transactions, including those that wait for room in their group's queue."""
        if self._backlog:
            for id in ids:
                self._backlog.remove(id)
        if self._schedule.set_run([(id, at_ms) for id in ids]):
            self._changed.set()

    async def run(self) -> None:
        """Hand out checks and park, each at its time, until cancelled."""
        while True:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            times_ms = [self._schedule.next_ms(), self._backlog.next_ms()]
            next_ms = min([at_ms for at_ms in times_ms if at_ms is not None], default=None)
            wait_s = None if next_ms is None else (next_ms - self._clock.now_ms()) / 1000
            if wait_s is not None and wait_s <= 0:
                self._attend(islice(self._schedule.pop_due(self._clock.now_ms()), HAND_OUT_MAX))
                for group in self._backlog.due(self._clock.now_ms()):
                    self._attend_backlog(group)
                # After an outage a hundred thousand may be due at once: give way to other tasks.
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _attend(self, ids: Iterable[str]) -> None:
        taken: list[str] = []
        now_ms = self._clock.now_ms()
        for id in list(ids):
            transaction = self._pending(id)
            if transaction is None:
                self._asked.pop(id, None)
            elif id in self._making:
                taken.append(id)
            elif (park_ms := transaction.park_ms()) is not None and park_ms > now_ms:
                # The last attempt may still be answered.
                self._set((id,), park_ms)
            elif park_ms is not None:
                task = asyncio.create_task(self._park(transaction))
                self._parking.add(task)
                task.add_done_callback(self._parked)
            elif (group := transaction.half.group) in self._backlog:
                self._backlog.add(group, id)
            elif self._offer(transaction):
                taken.append(id)
            else:
                self._backlog.add(group, id)
                self._backlog.look(group, now_ms + RETRY_MS)
        self._set(taken, now_ms + HANDED_OUT_MS)

    def _offer(self, transaction: Transaction) -> bool:
        """Hand out a check; return whether the runner took it."""
        half = transaction.half
        reason = CheckReason.ASKED if half.id in self._asked else CheckReason.DUE
        return self._runner.due(self, half.id, half.group, transaction.instance, reason)

    def _attend_backlog(self, group: str) -> None:
        """Hand out checks that wait for room in a group's queue, until it is full again."""
        again_ms = self._clock.now_ms()
        for _ in range(HAND_OUT_MAX):
            id = self._backlog.first(group)
            if id is None:
                return
            transaction = self._pending(id)
            if transaction is None:
                self._backlog.remove(id)
            elif self._offer(transaction):
                self._set((id,), self._clock.now_ms() + HANDED_OUT_MS)
            else:
                again_ms += RETRY_MS
                break
        self._backlog.look(group, again_ms)

    def _parked(self, task: asyncio.Task[None]) -> None:
        self._parking.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._changed.set()

    async def _park(self, transaction: Transaction) -> None:
        try:
            marker = self._context.marker(
                transaction,
                MarkerKind.PARK,
                source=Source.SCHEDULE,
                previous=transaction.checks.attempts[-1].outcome,
            )
            outcome = await self._op.append_one(marker)
        except RequestError as error:
            log.warning("park failed", id=transaction.id, why=str(error))
            outcome = ApplyResult(Effect.VOID)
        if outcome.effect is Effect.APPLIED:
            failpoint("park.stored")
            log.warning("parked", id=transaction.id, group=transaction.half.group)
        else:
            self._set((transaction.id,), self._clock.now_ms() + RETRY_MS)

    def close(self) -> None:
        self._runner.forget(self)
        for task in self._parking:
            task.cancel()

    # --- requests --------------------------------------------------------------------------

    def ask(
        self,
        transaction: Transaction,
        by: str = "",
        why: str = "",
        source: Source = Source.OPERATOR,
    ) -> None:
        """Pull the next attempt forward; its marker records who requested it, and why.

        Raises:
            NotPending: it is decided or parked, its messages no longer exist, or its next attempt
                is the last of the round.
        """
        state = transaction.state
        if state is not State.PENDING:
            raise NotPending(f"the transaction is {state}", id=transaction.id, state=state)
        if transaction.lost:
            raise NotPending(
                "its messages were deleted from the half topic, so its group cannot be asked: "
                "decide it by hand",
                id=transaction.id,
                state=state,
            )
        if len(transaction.checks.counted_ms) + 1 >= transaction.half.policy.attempts_max:
            raise NotPending(
                "only the last attempt of the round is left, which is never pulled forward: wait, "
                "or decide it by hand",
                id=transaction.id,
                state=state,
            )
        due = due_ms(transaction)
        at_ms = max(self._clock.now_ms(), transaction.checks.last_check_ms + ASK_SPACING_MS)
        if due is None or at_ms < due:
            self._asked[transaction.id] = _Asked(at_ms, f"{by}: {why}" if why else by, source)
            self._set((transaction.id,), at_ms)

    # --- for the runner --------------------------------------------------------------------

    def in_memory(self, id: str) -> bool:
        transaction = self._ledger.index.transactions.get(id)
        return transaction is not None and transaction.has_bodies

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> list[CheckCall | TxbrokerError | None]:
        """Write the markers of the next attempts.

        A transaction whose messages no longer exist is not checked: a message without a value is a
        tombstone, so the contract cannot express the loss, and a group that decides by content
        would decide about something else. It uses up no attempt and never parks automatically; it
        stays pending, and raises an alert, until a client or operator decides it.

        Returns:
            For each the question; None if there is nothing to ask any more; or why its marker was
            not written: then the schedule offers the check again.
        """
        questions: list[CheckCall | TxbrokerError | None] = [None] * len(checks)
        known = self._ledger.index.transactions
        transactions = [known[check.id] for check in checks if check.id in known]
        attempts: list[_Attempt] = []
        try:
            async with self._bodies.at_hand(transactions) as failed:
                for number, check in enumerate(checks):
                    # It may have been decided while messages were read.
                    transaction = self._pending(check.id)
                    if transaction is None:
                        continue
                    if self._bodies.there(transaction):
                        reason = self._reason(transaction, check.reason)
                        if reason is not None:
                            attempts.append(_Attempt(number, transaction, reason, check.endpoint))
                    elif check.id in failed:
                        questions[number] = failed[check.id]
                        self._set((check.id,), self._clock.now_ms() + RETRY_MS)
                    else:
                        group = transaction.half.group
                        log.error("not checked, messages gone", id=check.id, group=group)
                        self.touch(transaction)
                if attempts:
                    await self._make(attempts, questions)
        except RequestError as error:
            self._set([t.half.id for t in transactions], self._clock.now_ms() + RETRY_MS)
            return [error] * len(checks)
        return questions

    def _reason(self, transaction: Transaction, reason: CheckReason) -> CheckReason | None:
        """Return the reason of the next attempt; None if it is too early for one."""
        id, next_ms, now_ms = transaction.half.id, transaction.next_check_ms(), self._clock.now_ms()
        if now_ms >= next_ms:
            return CheckReason.DUE
        if reason is CheckReason.DUE and now_ms < self._asked.get(id, _Asked(next_ms)).at_ms:
            self.touch(transaction)
            return None
        # Perhaps requested while the runner already had the check.
        return CheckReason.ASKED

    async def _make(
        self,
        attempts: list[_Attempt],
        questions: list[CheckCall | TxbrokerError | None],
    ) -> None:
        """Write the markers of attempts, and set the question of each at its number."""
        expected: list[tuple[int, int]] = []
        rows: list[MarkerRow] = []
        for attempt in attempts:
            transaction, reason = attempt.transaction, attempt.reason
            number = transaction.checks.number + 1
            expected.append((transaction.checks.round, number))
            asked = self._asked.get(transaction.half.id) if reason is CheckReason.ASKED else None
            before = transaction.checks.attempts
            rows.append(
                self._context.marker(
                    transaction,
                    MarkerKind.CHECK,
                    source=Source.SCHEDULE if asked is None else asked.source,
                    by="" if asked is None else asked.by,
                    reason=reason,
                    number=number,
                    endpoint=attempt.endpoint,
                    previous=before[-1].outcome if before else "",
                )
            )
        accepted: list[str] = []
        ids = [attempt.transaction.half.id for attempt in attempts]
        self._making.update(ids)
        try:
            # A long run takes several batches.
            outcomes = await self._op.append(rows)
        finally:
            self._making.difference_update(ids)
        for attempt, outcome, numbers in zip(attempts, outcomes, expected, strict=True):
            transaction, id = attempt.transaction, attempt.transaction.half.id
            if isinstance(outcome, RequestError):
                self._set((id,), self._clock.now_ms() + RETRY_MS)
                questions[attempt.number] = outcome
                continue
            self._asked.pop(id, None)
            if outcome.effect is not Effect.APPLIED:
                log.debug("attempt not accepted", id=id, why=outcome.why)
                early_ms = transaction.next_check_ms() - self._ledger.op_clock_ms
                self._set((id,), self._clock.now_ms() + max(early_ms, 50))
                continue
            if (
                not self.still_pending(id)
                or (transaction.checks.round, transaction.checks.number) != numbers
            ):
                self.touch(transaction)
                continue
            accepted.append(id)
            questions[attempt.number] = _question(transaction, attempt.reason, numbers[1])
        if accepted:
            failpoint("check.stored")
            # Answers may still be in flight when the next attempts would be due.
            self._set(accepted, self._clock.now_ms() + HANDED_OUT_MS)

    def _pending(self, id: str) -> Transaction | None:
        transaction = self._ledger.index.transactions.get(id)
        if transaction is None or transaction.state is not State.PENDING:
            return None
        return transaction

    def still_pending(self, id: str) -> bool:
        return self._pending(id) is not None

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        touched: list[Transaction] = []
        decisions: list[tuple[AttemptResult, DecideRequest]] = []
        markers: list[tuple[AttemptResult, MarkerRow]] = []
        try:
            for attempt in run:
                call = attempt.call
                transaction = self._ledger.index.get(call.id)
                if transaction is None:
                    continue
                touched.append(transaction)
                if transaction.state is not State.PENDING or transaction.checks.round != call.round:
                    # An answer after a decision, or of an earlier round, is ignored; a parked
                    # transaction is decided by hand.
                    continue
                effect = await self._take(transaction, attempt)
                if isinstance(effect, DecideRequest):
                    decisions.append((attempt, effect))
                elif effect is not None:
                    markers.append((attempt, effect))
            if decisions:
                answers = await self._decider.decide([request for _, request in decisions])
                for (attempt, _), answer in zip(decisions, answers, strict=True):
                    _log_failed(attempt, answer)
            if markers:
                outcomes = await self._op.append([row for _, row in markers])
                for (attempt, _), outcome in zip(markers, outcomes, strict=True):
                    _log_failed(attempt, outcome)
        finally:
            # Decided transactions left the schedule when their markers were applied.
            self.changed([one for one in touched if one.state is State.PENDING])

    async def _take(
        self, transaction: Transaction, attempt: AttemptResult
    ) -> DecideRequest | MarkerRow | None:
        """Return the effect of an answer: decision, returning marker, or None."""
        call, endpoint, result = attempt.call, attempt.endpoint, attempt.result
        if isinstance(result, Answered) and result.decision is not Decision.UNKNOWN:
            try:
                messages = await self._final_messages(call, result)
            except RequestError as error:
                _log_failed(attempt, error)
                return None
            if isinstance(messages, str):
                transaction.note_outcome(messages)
                return None
            transaction.note_outcome(result.detail)
            return DecideRequest(
                id=transaction.id,
                decision=result.decision,
                messages=messages,
                reason=result.detail,
                source=Source.CHECK,
                by=endpoint,
            )
        transaction.note_outcome(result.detail)
        kind, later_s = MarkerKind.RETURNED, 0.0
        if isinstance(result, Answered) and result.ask_again_s is not None:
            kind, later_s = MarkerKind.LATER, result.ask_again_s
        elif not isinstance(result, Unreached):
            return None
        return self._context.marker(
            transaction,
            kind,
            source=Source.CHECK,
            number=call.number,
            by=endpoint,
            previous=result.detail,
            later_s=later_s,
        )

    async def _final_messages(
        self, call: CheckCall, answer: Answered
    ) -> tuple[Message, ...] | str | None:
        """Return the final messages of an answer, None without any, or why it decides nothing.

        Once committed they cannot be changed; ones that no target accepts would be refused for
        good.
        """
        decision, final = answer.decision, answer.messages
        if final is None:
            return None
        now_ms = self._clock.now_ms()
        try:
            if decision is Decision.COMMIT:
                return await accept_replacement(
                    call.messages, final, self._context.targets, now_ms, self._overhead_bytes
                )
            place_like(call.messages, final)
        except (TooLarge, BadTarget) as error:
            return shortened(f"{decision}, but {error}")
        except BadRequest:
            return f"{decision} with messages for other topics"
        except KafkaUnavailable as error:
            raise OwnerUnavailable(str(error), id=call.id) from None
        return None


def _log_failed(attempt: AttemptResult, answer: Answer | Applied) -> None:
    if isinstance(answer, RequestError):
        log.debug(
            "answer not taken", id=attempt.call.id, endpoint=attempt.endpoint, why=str(answer)
        )


def _question(transaction: Transaction, reason: CheckReason, number: int) -> CheckCall:
    policy = transaction.half.policy
    return CheckCall(
        id=transaction.id,
        group=transaction.half.group,
        attempt=len(transaction.checks.counted_ms),
        attempts_max=policy.attempts_max,
        reason=reason,
        prepared_at_ms=transaction.prepared_at_ms,
        messages=transaction.half.messages,
        round=transaction.checks.round,
        number=number,
        timeout_s=policy.timeout_s,
    )
