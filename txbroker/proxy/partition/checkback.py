"""Check-back: which transactions are asked about, when, and what becomes of the answers.

The owner's side of it. Whom to ask and how is `txbroker.checkers`; when is `core.schedule`; what
an attempt may do is `core.transaction`. An attempt's marker is durable, and accepted by the
ledger, before the question goes out, so no crash and no second owner ever makes one too many.
The messages are in memory before the marker is written, because nothing may stand between its
acceptance and the question.
"""

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from txbroker import tracing
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unreached, shortened
from txbroker.contract import Answer, DecideRequest
from txbroker.core.outcome import Effect, Outcome
from txbroker.core.records import (
    CheckReason,
    Decision,
    MarkerKind,
    Message,
    Source,
    State,
)
from txbroker.core.schedule import Schedule, due_ms
from txbroker.core.sizes import headers_bytes
from txbroker.core.trace_context import carried_over
from txbroker.core.transaction import ASK_SPACING_MS, Transaction, fits
from txbroker.door import Targets
from txbroker.errors import (
    BadTarget,
    KafkaUnavailable,
    NotPending,
    OwnerUnavailable,
    RequestError,
    TooLarge,
)
from txbroker.failpoints import hit
from txbroker.proxy.logging import get_logger
from txbroker.proxy.partition.appender import Markers
from txbroker.proxy.partition.body_cache import Bodies
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.targets import examine_final

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


class _Crowd:
    """Checks that are due while their group's queue is full, the one that waited longest first.

    They are off the schedule: a million of them are not looked at each second, only whether their
    group takes the first.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, None]] = {}
        self._group_of: dict[str, str] = {}
        self._looks = Schedule()

    def __contains__(self, group: str) -> bool:
        return group in self._ids

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, group: str, id: str) -> None:
        """Let a check wait behind the others of its group."""
        if id not in self._group_of:
            self._ids.setdefault(group, {})[id] = None
            self._group_of[id] = group

    def remove(self, id: str) -> None:
        """It waits no longer."""
        group = self._group_of.pop(id, None)
        if group is not None:
            del self._ids[group][id]
            if not self._ids[group]:
                del self._ids[group]
                self._looks.set(group, None)

    def first(self, group: str) -> str | None:
        """Return the id that has waited longest, None if none does."""
        return next(iter(self._ids.get(group, ())), None)

    def look(self, group: str, at_ms: int) -> None:
        """Look at that time whether a group that has some waiting takes one."""
        if group in self._ids:
            self._looks.set(group, at_ms)

    def next_ms(self) -> int | None:
        """Return when to look at a group next, None if none has any waiting."""
        return self._looks.next_ms()

    def due(self, now_ms: int) -> list[str]:
        """Return the groups to be looked at now, and put them off until `look`."""
        return list(self._looks.pop_due(now_ms))


class _Asked(NamedTuple):
    """A check that somebody has asked for: since when it may be made, who wanted it and why."""

    at_ms: int
    by: str = ""


class CheckBack:
    """The checks of one half partition: a `txbroker.checkers.runner.CheckOwner`.

    Args:
        context: what all parts of the partition share.
        markers: writes what becomes of checks.
        runner: carries the checks out.
        bodies: has the messages of a question in memory.
        targets: what is known of target topics, for final messages.
        decider: takes the decision that a check brought.
    """

    def __init__(
        self,
        context: PartitionContext,
        markers: Markers,
        runner: Runner,
        bodies: Bodies,
        targets: Targets,
        decider: Decider,
    ) -> None:
        self._ledger = context.ledger
        self._clock = context.clock
        self._beside = headers_bytes(context.settings.installation)
        self._markers = markers
        self._runner = runner
        self._bodies = bodies
        self._targets = targets
        self._decider = decider
        self._schedule = Schedule()
        self._crowd = _Crowd()
        self._changed = asyncio.Event()
        # The checks that somebody has asked for, until they are made.
        self._asked: dict[str, _Asked] = {}
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

    def _set(self, id: str, at_ms: int | None) -> None:
        self._crowd.remove(id)
        if self._schedule.set(id, at_ms):
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
                for id in list(islice(self._schedule.pop_due(self._clock.now_ms()), HAND_OUT_MAX)):
                    self._attend(id)
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

    def _attend(self, id: str) -> None:
        """Do what is due for a transaction."""
        transaction = self._ledger.get(id)
        if transaction is None or transaction.state is not State.PENDING:
            self._asked.pop(id, None)
            return
        if transaction.park_ms() is not None:
            task = asyncio.create_task(self._park(transaction))
            self._parking.add(task)
            task.add_done_callback(self._parked)
            return
        group = transaction.half.group
        if group in self._crowd:
            self._crowd.add(group, id)
        elif not self._offer(transaction):
            self._crowd.add(group, id)
            self._crowd.look(group, self._clock.now_ms() + AGAIN_MS)

    def _offer(self, transaction: Transaction) -> bool:
        """Hand a check out; say whether it was taken."""
        id, group = transaction.id, transaction.half.group
        reason = CheckReason.ASKED if id in self._asked else CheckReason.DUE
        taken = self._runner.due(self, id, group, transaction.instance, reason)
        if taken:
            self._set(id, self._clock.now_ms() + HANDED_OUT_MS)
        return taken

    def _attend_crowd(self, group: str) -> None:
        """Hand out what waits for room in a group's queue, until that is full again."""
        again_ms = self._clock.now_ms()
        for _ in range(HAND_OUT_MAX):
            id = self._crowd.first(group)
            if id is None:
                return
            transaction = self._ledger.get(id)
            if transaction is None or transaction.state is not State.PENDING:
                self._crowd.remove(id)
            elif not self._offer(transaction):
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
            outcome = await self._markers.write(
                transaction, MarkerKind.PARK, source=Source.SCHEDULE
            )
        except RequestError as error:
            log.warning("park failed", id=transaction.id, why=str(error))
            outcome = Outcome(Effect.VOID)
        if outcome.effect is Effect.APPLIED:
            hit("park.stored")
            log.warning("parked", id=transaction.id, group=transaction.half.group)
        else:
            self._set(transaction.id, self._clock.now_ms() + AGAIN_MS)

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
        if len(transaction.counted_ms) + 1 >= transaction.half.policy.attempts_max:
            raise NotPending(
                "only the last attempt of the round is left, and that is never pulled forward",
                id=transaction.id,
                state=state,
            )
        due = due_ms(transaction)
        at_ms = max(self._clock.now_ms(), transaction.last_check_ms + ASK_SPACING_MS)
        if due is None or at_ms < due:
            self._asked[transaction.id] = _Asked(at_ms, f"{by}: {why}" if why else by)
            self._set(transaction.id, at_ms)

    # --- for the runner --------------------------------------------------------------------

    async def attempt(self, id: str, reason: CheckReason, endpoint: str) -> CheckCall | None:
        """Write the marker of the next attempt; None where there is nothing to ask any more.

        A transaction whose messages are gone is not asked about: without a value a message is a
        tombstone, so the contract has no way of saying that there was one, and a group that
        decides by what it reads would decide about something else. It uses up no attempts and so
        never parks by itself; it stays pending, alarmed, until somebody decides it.

        Raises:
            RequestError: it could not be written; the schedule offers the check again.
        """
        transaction = self._ledger.get(id)
        if transaction is None or transaction.state is not State.PENDING:
            return None
        try:
            async with self._bodies.at_hand(transaction) as there:
                # Whatever happened while they were read.
                if not self.still_pending(id):
                    return None
                if there:
                    return await self._attempt(transaction, reason, endpoint)
        except RequestError:
            self._set(id, self._clock.now_ms() + AGAIN_MS)
            raise
        log.error("not checked, messages gone", id=id, group=transaction.half.group)
        self.touch(transaction)
        return None

    async def _attempt(
        self, transaction: Transaction, reason: CheckReason, endpoint: str
    ) -> CheckCall | None:
        id = transaction.id
        next_ms = transaction.next_check_ms()
        if self._clock.now_ms() >= next_ms:
            reason = CheckReason.DUE
        elif reason is CheckReason.DUE:
            if self._clock.now_ms() < self._asked.get(id, _Asked(next_ms)).at_ms:
                self.touch(transaction)
                return None
            # Asked for while the runner held an attempt already.
            reason = CheckReason.ASKED
        self._set(id, self._clock.now_ms() + HANDED_OUT_MS)
        by = self._asked.get(id, _Asked(next_ms)).by
        turn, number = transaction.round, transaction.number + 1
        last = transaction.attempts[-1] if transaction.attempts else None
        outcome = await self._markers.write(
            transaction,
            MarkerKind.CHECK,
            source=Source.SCHEDULE,
            by=by if reason is CheckReason.ASKED else "",
            reason=reason,
            number=number,
            endpoint=endpoint,
            previous="" if last is None else last.outcome,
        )
        if outcome.effect is not Effect.APPLIED:
            log.debug("attempt not accepted", id=id, why=outcome.why)
            self._asked.pop(id, None)
            early_ms = transaction.next_check_ms() - self._ledger.op_clock_ms
            self._set(id, self._clock.now_ms() + max(early_ms, 50))
            return None
        self._asked.pop(id, None)
        if not self.still_pending(id) or (transaction.round, transaction.number) != (turn, number):
            return None
        hit("check.stored")
        # The answer may still be on its way when the next attempt would be due.
        self._set(id, self._clock.now_ms() + HANDED_OUT_MS)
        return _question(transaction, reason, number)

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
            log.debug("answer not taken", id=call.id, endpoint=endpoint, why=str(error))
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
        if isinstance(result, Answered) and result.decision is not Decision.UNKNOWN:
            objection = await self._objection(transaction, result)
            transaction.note_outcome(objection or result.detail)
            if not objection:
                await self._decided(transaction, call, endpoint, result)
            return
        transaction.note_outcome(result.detail)
        if isinstance(result, Unreached):
            await self._markers.write(
                transaction,
                MarkerKind.RETURNED,
                source=Source.CHECK,
                number=number,
                by=endpoint,
                previous=result.detail,
            )
        elif isinstance(result, Answered) and result.ask_again_s is not None:
            await self._markers.write(
                transaction,
                MarkerKind.LATER,
                source=Source.CHECK,
                number=number,
                by=endpoint,
                previous=result.detail,
                later_s=result.ask_again_s,
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

    async def _decided(
        self, transaction: Transaction, call: CheckCall, endpoint: str, answer: Answered
    ) -> None:
        messages = answer.messages if answer.decision is Decision.COMMIT else None
        if messages is not None:
            messages = placed_like(transaction.half.messages, messages)
            if tracing.is_on():
                messages = carried_over(call.messages, messages)
        request = DecideRequest(
            id=transaction.id,
            decision=answer.decision,
            messages=messages,
            reason=answer.detail,
            source=Source.CHECK,
            by=endpoint,
        )
        [answered] = await self._decider.decide((request,))
        if isinstance(answered, RequestError):
            raise answered


def _question(transaction: Transaction, reason: CheckReason, number: int) -> CheckCall:
    policy = transaction.half.policy
    return CheckCall(
        id=transaction.id,
        group=transaction.half.group,
        attempt=len(transaction.counted_ms),
        attempts_max=policy.attempts_max,
        reason=reason,
        prepared_at_ms=transaction.prepared_at_ms,
        messages=transaction.half.messages,
        round=transaction.round,
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
