"""Check-back: which transactions are asked about, when, and what becomes of the answers.

The owner's side of it. Whom to ask and how is `txbroker.checkers`; when is `core.index`; what
an attempt may do is `core.transaction`. An attempt's marker is durable, and accepted by the
ledger, before the question goes out, so no crash and no second owner ever makes one too many.
The messages are in memory before the marker is written, because nothing may stand between its
acceptance and the question.
"""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from msgspec import Struct

from txbroker import tracing
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
from txbroker.core.schedule import CheckBacklog, Schedule, due_ms
from txbroker.core.transaction import Transaction, fits
from txbroker.door.protocols import Targets
from txbroker.errors import (
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
from txbroker.proxy.partition.targets import examine_final
from txbroker.tracing import carried_over

AGAIN_MS = 1000
"""What could not be done now is tried again after this."""
HANDED_OUT_MS = 60_000
"""A check that the runner holds comes back by itself; this is for one that got lost."""
HAND_OUT_MAX = 500
"""Checks that are handed out without a pause for everything else."""

log = get_logger(__name__)


class Decider(Protocol):
    """Who takes decisions: `txbroker.proxy.partition.partition_api.PartitionApi`."""

    async def decide(self, requests: Sequence[DecideRequest]) -> list[Answer]:
        """Write deciding markers; return what became of each."""
        ...


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


class _Asked(NamedTuple):
    """A check that somebody has asked for: since when it may be made, who wanted it and why."""

    at_ms: int
    by: str = ""


class _Attempt(Struct, frozen=True):
    """An attempt that is to be made, and where in its run."""

    place: int
    transaction: Transaction
    reason: CheckReason
    endpoint: str


class CheckBack:
    """The checks of one half partition: a `txbroker.checkers.runner.CheckOwner`.

    Args:
        context: what all parts of the partition share.
        op: where markers of checks are written.
        runner: carries the checks out.
        bodies: has the messages of a question in memory.
        targets: what is known of target topics, for final messages.
        decider: takes the decision that a check brought.
    """

    def __init__(
        self,
        context: PartitionContext,
        op: Appender,
        runner: Runner,
        bodies: BodyCache,
        targets: Targets,
        decider: Decider,
    ) -> None:
        self._context = context
        self._ledger = context.ledger
        self._clock = context.clock
        self._beside = headers_bytes(context.settings.installation)
        self._op = op
        self._runner = runner
        self._bodies = bodies
        self._targets = targets
        self._decider = decider
        self._schedule = Schedule()
        self._crowd = CheckBacklog()
        self._changed = asyncio.Event()
        # The checks that somebody has asked for, until they are made.
        self._asked: dict[str, _Asked] = {}
        # Those whose attempts are being written: none is parked before its question is out.
        self._making: set[str] = set()
        self._parking: set[asyncio.Task[None]] = set()
        self._surprise: BaseException | None = None

    # --- the schedule ----------------------------------------------------------------------

    def touch(self, transaction: Transaction) -> None:
        """Put a transaction to its next time, after anything that may have moved it."""
        self.changed((transaction,))

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Put transactions to their next times, after anything that may have moved them."""
        asked, crowded = self._asked, len(self._crowd)
        times: list[tuple[str, int | None]] = []
        for transaction in transactions:
            id, at_ms = transaction.half.id, due_ms(transaction)
            if crowded:
                self._crowd.remove(id)
            if at_ms is None:
                asked.pop(id, None)
            elif transaction.lost:
                # See `attempt`.
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
        """The clock has moved more than the time that passed: something may be due already."""
        self._changed.set()

    def _set(self, ids: Iterable[str], at_ms: int) -> None:
        """Put transactions to a time, those that wait for room in their group's queue, too."""
        if self._crowd:
            for id in ids:
                self._crowd.remove(id)
        if self._schedule.set_run([(id, at_ms) for id in ids]):
            self._changed.set()

    async def run(self) -> None:
        """Hand out checks and park, each at its time, until cancelled.

        Raises:
            Exception: parking came to what nobody expects; the partition cannot go on.
        """
        while True:
            if self._surprise is not None:
                raise self._surprise
            self._changed.clear()
            times_ms = [self._schedule.next_ms(), self._crowd.next_ms()]
            next_ms = min([at_ms for at_ms in times_ms if at_ms is not None], default=None)
            wait_s = None if next_ms is None else (next_ms - self._clock.now_ms()) / 1000
            if wait_s is not None and wait_s <= 0:
                self._attend(islice(self._schedule.pop_due(self._clock.now_ms()), HAND_OUT_MAX))
                for group in self._crowd.due(self._clock.now_ms()):
                    self._attend_crowd(group)
                # After an outage a hundred thousand may be due at once: others want their turn.
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _attend(self, ids: Iterable[str]) -> None:
        """Do what is due for transactions."""
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
            elif (group := transaction.half.group) in self._crowd:
                self._crowd.add(group, id)
            elif self._offer(transaction):
                taken.append(id)
            else:
                self._crowd.add(group, id)
                self._crowd.look(group, now_ms + AGAIN_MS)
        self._set(taken, now_ms + HANDED_OUT_MS)

    def _offer(self, transaction: Transaction) -> bool:
        """Hand a check out; say whether it was taken."""
        half = transaction.half
        reason = CheckReason.ASKED if half.id in self._asked else CheckReason.DUE
        return self._runner.due(self, half.id, half.group, transaction.instance, reason)

    def _attend_crowd(self, group: str) -> None:
        """Hand out what waits for room in a group's queue, until that is full again."""
        again_ms = self._clock.now_ms()
        for _ in range(HAND_OUT_MAX):
            id = self._crowd.first(group)
            if id is None:
                return
            transaction = self._pending(id)
            if transaction is None:
                self._crowd.remove(id)
            elif self._offer(transaction):
                self._set((id,), self._clock.now_ms() + HANDED_OUT_MS)
            else:
                again_ms += AGAIN_MS
                break
        self._crowd.look(group, again_ms)

    def _parked(self, task: asyncio.Task[None]) -> None:
        self._parking.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._surprise = task.exception()
            self._changed.set()

    async def _park(self, transaction: Transaction) -> None:
        try:
            marker = self._context.marker(transaction, MarkerKind.PARK, source=Source.SCHEDULE)
            outcome = await self._op.append_one(marker)
        except RequestError as error:
            log.warning("park failed", id=transaction.id, why=str(error))
            outcome = ApplyResult(Effect.VOID)
        if outcome.effect is Effect.APPLIED:
            failpoint("park.stored")
            log.warning("parked", id=transaction.id, group=transaction.half.group)
        else:
            self._set((transaction.id,), self._clock.now_ms() + AGAIN_MS)

    def close(self) -> None:
        """Hand out nothing more."""
        self._runner.forget(self)
        for task in self._parking:
            task.cancel()

    # --- asked for -------------------------------------------------------------------------

    def ask(self, transaction: Transaction, by: str = "", why: str = "") -> None:
        """Pull the next attempt forward; its marker tells who wanted that, and why.

        Raises:
            NotPending: it is decided or parked, its messages are gone, or its next attempt is the
                last of the round.
        """
        state = transaction.state
        if state is not State.PENDING:
            raise NotPending(f"the transaction is {state}", id=transaction.id, state=state)
        if transaction.lost:
            raise NotPending(
                "its messages were deleted from the half topic, so nobody is asked: decide it by "
                "hand",
                id=transaction.id,
                state=state,
            )
        if len(transaction.checks.counted_ms) + 1 >= transaction.half.policy.attempts_max:
            raise NotPending(
                "only the last attempt of the round is left, and that is never pulled forward",
                id=transaction.id,
                state=state,
            )
        due = due_ms(transaction)
        at_ms = max(self._clock.now_ms(), transaction.checks.last_check_ms + ASK_SPACING_MS)
        if due is None or at_ms < due:
            self._asked[transaction.id] = _Asked(at_ms, f"{by}: {why}" if why else by)
            self._set((transaction.id,), at_ms)

    # --- for the runner --------------------------------------------------------------------

    def in_memory(self, id: str) -> bool:
        """Say whether the messages of a question need not be read first."""
        transaction = self._ledger.index.transactions.get(id)
        return transaction is not None and transaction.has_bodies

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> list[CheckCall | TxbrokerError | None]:
        """Write the markers of next attempts; None where there is nothing to ask any more.

        A transaction whose messages are gone is not asked about: without a value a message is a
        tombstone, so the contract has no way of saying that there was one, and a group that
        decides by what it reads would decide about something else. It uses up no attempts and so
        never parks by itself; it stays pending, alarmed, until somebody decides it.

        Returns:
            Of each the question, None, or why its marker was not written: then the schedule offers
            the check again.
        """
        found: list[CheckCall | TxbrokerError | None] = [None] * len(checks)
        known = self._ledger.index.transactions
        transactions = [known[check.id] for check in checks if check.id in known]
        attempts: list[_Attempt] = []
        try:
            async with self._bodies.at_hand(transactions) as failed:
                for number, check in enumerate(checks):
                    # Whatever happened while they were read.
                    transaction = self._pending(check.id)
                    if transaction is None:
                        continue
                    if self._bodies.there(transaction):
                        reason = self._reason(transaction, check.reason)
                        if reason is not None:
                            attempts.append(_Attempt(number, transaction, reason, check.endpoint))
                    elif check.id in failed:
                        found[number] = failed[check.id]
                        self._set((check.id,), self._clock.now_ms() + AGAIN_MS)
                    else:
                        group = transaction.half.group
                        log.error("not checked, messages gone", id=check.id, group=group)
                        self.touch(transaction)
                if attempts:
                    await self._make(attempts, found)
        except RequestError as error:
            self._set([t.half.id for t in transactions], self._clock.now_ms() + AGAIN_MS)
            return [error] * len(checks)
        return found

    def _reason(self, transaction: Transaction, reason: CheckReason) -> CheckReason | None:
        """Return why the next attempt is made, None where it is too early for one."""
        id, next_ms, now_ms = transaction.half.id, transaction.next_check_ms(), self._clock.now_ms()
        if now_ms >= next_ms:
            return CheckReason.DUE
        if reason is CheckReason.DUE and now_ms < self._asked.get(id, _Asked(next_ms)).at_ms:
            self.touch(transaction)
            return None
        # Perhaps asked for while the runner held an attempt already.
        return CheckReason.ASKED

    async def _make(
        self,
        attempts: list[_Attempt],
        found: list[CheckCall | TxbrokerError | None],
    ) -> None:
        """Write the markers of attempts, and note the question of each under its number."""
        expected: list[tuple[int, int]] = []
        rows: list[MarkerRow] = []
        for attempt in attempts:
            transaction, reason = attempt.transaction, attempt.reason
            turn, number = transaction.checks.round, transaction.checks.number + 1
            expected.append((turn, number))
            asked = self._asked.get(transaction.half.id) if reason is CheckReason.ASKED else None
            before = transaction.checks.attempts
            rows.append(
                self._context.marker(
                    transaction,
                    MarkerKind.CHECK,
                    source=Source.SCHEDULE,
                    by="" if asked is None else asked.by,
                    reason=reason,
                    number=number,
                    endpoint=attempt.endpoint,
                    previous=before[-1].outcome if before else "",
                )
            )
        made: list[str] = []
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
                self._set((id,), self._clock.now_ms() + AGAIN_MS)
                found[attempt.place] = outcome
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
            made.append(id)
            found[attempt.place] = _question(transaction, attempt.reason, numbers[1])
        if made:
            failpoint("check.stored")
            # Answers may still be on their way when the next attempts would be due.
            self._set(made, self._clock.now_ms() + HANDED_OUT_MS)

    def _pending(self, id: str) -> Transaction | None:
        transaction = self._ledger.index.transactions.get(id)
        if transaction is None or transaction.state is not State.PENDING:
            return None
        return transaction

    def still_pending(self, id: str) -> bool:
        """Say whether a transaction is undecided and not parked."""
        transaction = self._ledger.index.transactions.get(id)
        return transaction is not None and transaction.state is State.PENDING

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        """Take what came of attempts."""
        touched: list[Transaction] = []
        decisions: list[tuple[AttemptResult, DecideRequest]] = []
        markers: list[tuple[AttemptResult, MarkerRow]] = []
        try:
            for told in run:
                transaction = self._ledger.index.get(told.call.id)
                if transaction is None:
                    continue
                touched.append(transaction)
                if (
                    transaction.state is not State.PENDING
                    or transaction.checks.round != told.call.round
                ):
                    # An answer in flight behind a decision or a new round is ignored; after
                    # parking the transaction is decided by hand.
                    continue
                taken = await self._take(transaction, told)
                if isinstance(taken, DecideRequest):
                    decisions.append((told, taken))
                elif taken is not None:
                    markers.append((told, taken))
            if decisions:
                decided = await self._decider.decide([request for _, request in decisions])
                for (told, _), answer in zip(decisions, decided, strict=True):
                    _see_taken(told, answer)
            if markers:
                outcomes = await self._op.append([row for _, row in markers])
                for (told, _), outcome in zip(markers, outcomes, strict=True):
                    _see_taken(told, outcome)
        finally:
            # What is decided is off the schedule since its marker was applied.
            self.changed([each for each in touched if each.state is State.PENDING])

    async def _take(
        self, transaction: Transaction, told: AttemptResult
    ) -> DecideRequest | MarkerRow | None:
        """Return what an answer comes to: a decision, a marker that gives its attempt back, or
        nothing."""
        call, endpoint, result = told.call, told.endpoint, told.result
        if isinstance(result, Answered) and result.decision is not Decision.UNKNOWN:
            try:
                objection = await self._objection(transaction, result)
            except RequestError as error:
                _see_taken(told, error)
                return None
            transaction.note_outcome(objection or result.detail)
            return None if objection else _decision(transaction, call, endpoint, result)
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

    async def _objection(self, transaction: Transaction, answer: Answered) -> str:
        """Return why an answer counts as little as an unknown one, "" where it decides.

        Once committed final messages stand, and those that no target ever takes would be refused
        for good.
        """
        messages = answer.messages
        if messages is None:
            return ""
        if not _replaces(transaction, messages):
            return f"{answer.decision} with messages for other topics"
        if answer.decision is Decision.COMMIT:
            try:
                placed = placed_like(transaction.half.messages, messages)
                await examine_final(self._targets, placed, self._clock.now_ms(), self._beside)
            except (TooLarge, BadTarget) as error:
                return shortened(f"{answer.decision}, but {error}")
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=transaction.id) from None
        return ""


def _see_taken(told: AttemptResult, answer: Answer | Applied) -> None:
    """Tell of an answer that came to nothing."""
    if isinstance(answer, RequestError):
        # Decided otherwise meanwhile, or not written: then the next attempt asks again.
        log.debug("answer not taken", id=told.call.id, endpoint=told.endpoint, why=str(answer))


def _decision(
    transaction: Transaction, call: CheckCall, endpoint: str, answer: Answered
) -> DecideRequest:
    messages = answer.messages if answer.decision is Decision.COMMIT else None
    if messages is not None:
        messages = placed_like(transaction.half.messages, messages)
        if tracing.is_on():
            messages = carried_over(call.messages, messages)
    return DecideRequest(
        id=transaction.id,
        decision=answer.decision,
        messages=messages,
        reason=answer.detail,
        source=Source.CHECK,
        by=endpoint,
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
