"""One transaction, its block, and the decision on leaving the block."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from msgspec import structs

from txbroker import tracing
from txbroker.contract.checks import Answer, Commit, Rollback
from txbroker.contract.frames import Decide, Status
from txbroker.core.records import Decision, Message, State
from txbroker.errors import AlreadyDecided, BadRequest, BodyLost, Overloaded, OwnerUnavailable
from txbroker.sdk.calls import Calls, Draft
from txbroker.sdk.checks import LocalTransactions
from txbroker.sdk.types import Outcome, Wait, checked_replacement
from txbroker.tracing import carried_over, context_of, with_context

REASON_LENGTH_MAX = 200
"""Maximum length of an early check's reason: a sentence, not a dump."""

_WAITS = ("decided", "promoted")


class Transaction:
    """A prepared transaction; `id` identifies it everywhere, also in the barrier's row."""

    def __init__(
        self,
        transaction_id: str,
        prepared: tuple[Message, ...],
        calls: Calls,
        book: LocalTransactions,
    ) -> None:
        self.id = transaction_id
        self._prepared = prepared
        self._final: tuple[Message, ...] | None = None
        self._calls = calls
        self._local = book
        self._status: Status | None = None
        """The answer to its decision."""
        self._intent: Decision | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that a commit would publish."""
        return self._final or self._prepared

    @property
    def outcome(self) -> Outcome:
        """The status of the transaction, as known here."""
        known = self._status
        return outcome_of(known) if known else Outcome(self.id, Decision.UNKNOWN, State.PENDING)

    @property
    def rolled_back(self) -> bool:
        """True once it is rolled back; a block swallows the `Rollback` that was raised in it."""
        return self.outcome.decision is Decision.ROLLBACK

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.outcome.state}>"

    def replace(self, *messages: Message) -> None:
        """Replace the prepared messages: the same number, for the same topics.

        Raises:
            BadRequest: number or topics differ.
            AlreadyDecided: the transaction is decided.
        """
        if self._status is not None:
            raise AlreadyDecided("the transaction is decided; its messages stand", id=self.id)
        self._final = checked_replacement(self._prepared, messages)

    async def commit(self, wait: Wait = "decided") -> Outcome:
        """Commit; with `wait="promoted"`, return when consumers can see the messages or a target
        refuses them; see `Outcome.state`. If the half message was deleted from txbroker's topics,
        the commit is sent again with the messages.

        Raises:
            AlreadyDecided: it was rolled back before.
            OwnerUnavailable: no owner answered in time; the check-back will settle it.
            RequestError: it was refused for another reason.
        """
        await self._decide(Decision.COMMIT, wait=checked_wait(wait))
        return self.outcome

    async def rollback(self, reason: str = "") -> Outcome:
        """Roll back; the messages will never be visible.

        Raises: as `commit`.
        """
        await self._decide(Decision.ROLLBACK, reason=reason)
        return self.outcome

    async def _decide(self, decision: Decision, *, wait: bool = False, reason: str = "") -> None:
        if (known := self._status) is not None:
            if known.decision is not decision:
                raise AlreadyDecided(
                    f"the decision was {known.decision} before; the first one stands",
                    id=self.id,
                    decision=known.decision,
                )
            if not wait:
                return
        self._intent = decision
        final = self._final if decision is Decision.COMMIT else None
        self._local.deciding(self.id, Commit(final) if final is not None else decision)
        operation = Decide(self._calls.number(), self.id, decision, final, reason, wait)
        try:
            self._status = await decided(self._calls, operation, self._prepared)
        except BaseException as error:
            if isinstance(error, BodyLost) and decision is Decision.COMMIT and final is None:
                # Its half message was deleted, but the messages are here, and a commit may carry
                # them.
                self._final = self._prepared
                return await self._decide(decision, wait=wait, reason=reason)
            self._local.running(self.id)  # until the block is left
            raise
        self._local.settled(self.id)

    # --- leaving the block ---------------------------------------------------------------

    async def _leave(self, error: BaseException | None) -> bool:
        """Decide by how the block was left, and close it; return True if the exception is a
        `Rollback`, which ends here."""
        decision, reason = self._intent or Decision.COMMIT, ""
        try:
            if isinstance(error, Rollback):
                decision, reason = Decision.ROLLBACK, str(error)[:REASON_LENGTH_MAX]
            elif error is not None:
                self._leave_in_doubt(error)
                return False
            elif self._status is not None:
                return False
            await self._decide(decision, reason=reason)
        except BaseException as failure:
            if isinstance(failure, asyncio.CancelledError):
                # The local transaction has ended and the decision is made; only its waiter is gone.
                self._local.deciding(self.id, self._answer(decision))
                self._calls.in_background(self._decide_in_background(decision, reason))
            else:
                self._not_taken(decision, failure)
            raise
        finally:
            self._local.block_closed()
        return error is not None

    async def _decide_in_background(self, decision: Decision, reason: str) -> None:
        try:
            await self._decide(decision, reason=reason)
        except BaseException as failure:
            self._not_taken(decision, failure)
            raise

    def _answer(self, decision: Decision) -> Answer:
        if decision is Decision.COMMIT and self._final is not None:
            return Commit(self._final)
        return decision

    def _not_taken(self, decision: Decision, failure: BaseException) -> None:
        """Keep a decision that could not be delivered: its check may need it."""
        answer = self._answer(decision)
        # Messages are not kept; the check function provides final ones.
        if isinstance(failure, OwnerUnavailable | Overloaded) and not isinstance(answer, Commit):
            self._local.undelivered(self.id, answer)
        else:
            self._local.settled(self.id)

    def _leave_in_doubt(self, error: BaseException | None) -> None:
        """Leave it undecided and request an early check: an exception does not prove that the local
        transaction failed. Only the exception's type leaves this process: its text may hold data of
        the service."""
        if self._status is not None:
            return
        self._local.settled(self.id)
        reason = "the function returned unknown"
        if error is not None:
            reason = f"the block ended with {type(error).__name__}"
        self._calls.ask_early(self.id, reason[:REASON_LENGTH_MAX])


class TransactionBlock:
    """`async with producer.transaction(…) as tx`: prepares on entry, decides on leaving."""

    def __init__(self, draft: Draft, calls: Calls, local: LocalTransactions) -> None:
        self.draft = draft
        self._calls = calls
        self._local = local
        self._transaction: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        if self._transaction is not None:
            raise BadRequest("a transaction's block can be entered only once")
        self._local.block_opened()
        try:
            status = await prepared(self._calls, self.draft)
        except BaseException:
            self._local.block_closed()
            raise
        self._transaction = Transaction(status.id, self.draft.messages, self._calls, self._local)
        return self._transaction

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Coroutine[Any, Any, bool]:
        assert self._transaction is not None
        return self._transaction._leave(error)

    def leave_running(self, ended: "asyncio.Future[object]", error: BaseException) -> None:
        """Leave while the local transaction still runs in a thread: checks are answered "not yet"
        until `ended`."""
        transaction = self._transaction
        assert transaction is not None

        def left(_: object) -> None:
            transaction._leave_in_doubt(error)
            self._local.block_closed()

        ended.add_done_callback(left)


def prepared(calls: Calls, draft: Draft) -> Coroutine[Any, Any, Status]:
    """Prepare; with tracing, in a span whose context the messages carry, so that their consumers
    can continue the trace."""
    return _prepared_in_span(calls, draft) if tracing.is_on() else calls.prepare(draft)


async def _prepared_in_span(calls: Calls, draft: Draft) -> Status:
    attributes = {tracing.OPERATION_TYPE: "create"}
    with tracing.step("prepare", draft.messages, attributes, kind="producer") as step:
        if step is not None and step.context is not None:
            draft.messages = with_context(draft.messages, step.context)
        status = await calls.prepare(draft)
        if step is not None:
            step.note({tracing.ID: status.id})
    return status


def decided(
    calls: Calls, operation: Decide, prepared: tuple[Message, ...] | None = None
) -> Coroutine[Any, Any, Status]:
    """Decide; with tracing, in a span. `prepared`: the messages, if known."""
    return (
        _decided_in_span(calls, operation, prepared) if tracing.is_on() else calls.decide(operation)
    )


async def _decided_in_span(
    calls: Calls, operation: Decide, prepared: tuple[Message, ...] | None
) -> Status:
    final = operation.messages
    known = prepared or final or ()
    # The parent is the caller's span, else the prepare's.
    parent = context_of(known) if tracing.current_context() is None else None
    word = str(operation.decision)
    attributes = {tracing.ID: operation.id, tracing.DECISION: word}
    with tracing.step(word, known, attributes, kind="client", parent=parent) as step:
        if step is not None and final is not None:
            if prepared is not None:
                final = carried_over(prepared, final)
            elif step.context is not None:
                final = with_context(final, step.context)
            operation = structs.replace(operation, messages=final)
        return await calls.decide(operation)


def outcome_of(status: Status) -> Outcome:
    """Return the outcome in a proxy's answer."""
    return Outcome(status.id, status.decision or Decision.UNKNOWN, status.state)


def checked_wait(wait: str) -> bool:
    """Return True for "promoted", False for "decided"."""
    if wait not in _WAITS:
        raise BadRequest(f"wait is one of {', '.join(_WAITS)}, not {wait!r}")
    return wait == "promoted"


def checked_decision(decision: object) -> Decision | None:
    """Return the decision that a local transaction returned; raise TypeError for another value."""
    if decision is None or isinstance(decision, Decision):
        return decision
    raise TypeError(
        f"a local transaction returns a Decision or None, not {type(decision).__name__}"
    )
