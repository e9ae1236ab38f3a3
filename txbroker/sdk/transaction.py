"""One transaction as its block sees it, and what leaving the block means."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from msgspec import structs

from txbroker import tracing
from txbroker.contract.frames import Decide, Status
from txbroker.core.records import Decision, Message, State
from txbroker.core.trace_context import carried_over, context_of, with_context
from txbroker.errors import AlreadyDecided, BadRequest, BodyLost, Overloaded, OwnerUnavailable
from txbroker.sdk.calls import Calls, Draft
from txbroker.sdk.local import LocalTransactions
from txbroker.sdk.messages import checked_replacement
from txbroker.sdk.types import Answer, Commit, Outcome, Rollback, Wait

REASON_LENGTH_MAX = 200
"""Of the reason that an early check carries: enough for a sentence, too little for a dump."""

_WAITS = ("decided", "promoted")


class Transaction:
    """A prepared transaction.

    Attributes:
        id: names it everywhere; the barrier's row carries it.
    """

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
        self._book = book
        self._standing: Status | None = None
        """The answer to its decision."""
        self._intent: Decision | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as a commit would publish them."""
        return self._final or self._prepared

    @property
    def outcome(self) -> Outcome:
        """Where the transaction stands, as far as is known here."""
        known = self._standing
        return outcome_of(known) if known else Outcome(self.id, Decision.UNKNOWN, State.PENDING)

    def replace(self, *messages: Message) -> None:
        """Publish these at commit instead: as many as were prepared, for the same topics.

        Raises:
            BadRequest: they do not match the prepared ones.
            AlreadyDecided: the transaction is decided.
        """
        if self._standing is not None:
            raise AlreadyDecided("the transaction is decided; its messages stand", id=self.id)
        self._final = checked_replacement(self._prepared, messages)

    async def commit(self, wait: Wait = "decided") -> Outcome:
        """Commit; with `wait="promoted"`, return only when consumers can see the messages, or when
        a target refuses them: `Outcome.state` says which. If the half message was deleted from
        txbroker's topics, the commit is sent once more, with the messages.

        Raises:
            AlreadyDecided: it was rolled back before.
            OwnerUnavailable: nobody answered in time; the check-back will settle it.
            RequestError: it was refused otherwise.
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
        if (known := self._standing) is not None:
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
        self._book.deciding(self.id, Commit(final) if final is not None else decision)
        operation = Decide(self._calls.number(), self.id, decision, final, reason, wait)
        try:
            self._standing = await decided(self._calls, operation, self._prepared)
        except BaseException as error:
            if isinstance(error, BodyLost) and decision is Decision.COMMIT and final is None:
                # Its half message was deleted. Here the messages still are, and a commit may bring
                # them.
                self._final = self._prepared
                return await self._decide(decision, wait=wait, reason=reason)
            self._book.running(self.id)  # until the block is left, which says how it ended
            raise
        self._book.settled(self.id)

    # --- leaving the block ---------------------------------------------------------------

    async def leave(self, error: BaseException | None) -> bool:
        """Do what leaving the block with or without an exception means; return True where the
        exception has said what it had to. The block is closed then, however it ends."""
        decision, reason = self._intent or Decision.COMMIT, ""
        try:
            if isinstance(error, Rollback):
                decision, reason = Decision.ROLLBACK, str(error)[:REASON_LENGTH_MAX]
            elif error is not None:
                self.leave_in_doubt(error)
                return False
            elif self._standing is not None:
                return False
            await self._decide(decision, reason=reason)
        except BaseException as failure:
            if isinstance(failure, asyncio.CancelledError):
                # The local transaction is over and the decision made; only its waiter is gone.
                self._book.deciding(self.id, self._answer(decision))
                self._calls.in_background(self._conclude_left_behind(decision, reason))
            else:
                self._not_taken(decision, failure)
            raise
        finally:
            self._book.block_closed()
        return error is not None

    async def _conclude_left_behind(self, decision: Decision, reason: str) -> None:
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
        """Its decision was refused, or could not be delivered: the check may need it then."""
        answer = self._answer(decision)
        # Bodies are not kept; the check function brings its own final messages.
        if isinstance(failure, OwnerUnavailable | Overloaded) and not isinstance(answer, Commit):
            self._book.undelivered(self.id, answer)
        else:
            self._book.settled(self.id)

    def leave_in_doubt(self, error: BaseException | None) -> None:
        """Leave it unknown and ask for an early check: an exception does not prove that the
        local transaction failed."""
        if self._standing is not None:
            return
        self._book.settled(self.id)
        reason = "the function answered unknown"
        if error is not None:
            reason = f"the block ended with {type(error).__name__}: {error}"
        self._calls.ask_early(self.id, reason[:REASON_LENGTH_MAX])


class TransactionBlock:
    """`async with producer.transaction(…) as tx`: prepares on entry, decides on leaving."""

    def __init__(self, draft: Draft, calls: Calls, book: LocalTransactions) -> None:
        self.draft = draft
        self._calls = calls
        self._book = book
        self._transaction: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        if self._transaction is not None:
            raise BadRequest("a transaction's block can be entered only once")
        self._book.block_opened()
        try:
            standing = await prepared(self._calls, self.draft)
        except BaseException:
            self._book.block_closed()
            raise
        self._transaction = Transaction(standing.id, self.draft.messages, self._calls, self._book)
        return self._transaction

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Coroutine[Any, Any, bool]:
        assert self._transaction is not None
        return self._transaction.leave(error)

    def leave_running(self, ended: "asyncio.Future[object]", error: BaseException) -> None:
        """Leave while the local transaction still runs in a thread: it stays "not yet" until
        `ended`, and is in doubt only then."""
        transaction = self._transaction
        assert transaction is not None

        def left(_: object) -> None:
            transaction.leave_in_doubt(error)
            self._book.block_closed()

        ended.add_done_callback(left)


def prepared(calls: Calls, draft: Draft) -> Coroutine[Any, Any, Status]:
    """Prepare; where tracing is on, in a span, whose context the messages carry then, so that
    whoever gets them can continue its trace."""
    return _prepared_in_span(calls, draft) if tracing.is_on() else calls.prepare(draft)


async def _prepared_in_span(calls: Calls, draft: Draft) -> Status:
    attributes = {tracing.OPERATION_TYPE: "create"}
    with tracing.step("prepare", draft.messages, attributes, kind="producer") as step:
        if step is not None and step.context is not None:
            draft.messages = with_context(draft.messages, step.context)
        standing = await calls.prepare(draft)
        if step is not None:
            step.note({tracing.ID: standing.id})
    return standing


def decided(
    calls: Calls, operation: Decide, prepared: tuple[Message, ...] | None = None
) -> Coroutine[Any, Any, Status]:
    """Decide; where tracing is on, in a span. `prepared`: the messages, where they are known."""
    return (
        _decided_in_span(calls, operation, prepared) if tracing.is_on() else calls.decide(operation)
    )


async def _decided_in_span(
    calls: Calls, operation: Decide, prepared: tuple[Message, ...] | None
) -> Status:
    final = operation.messages
    known = prepared or final or ()
    # Below the caller's own span, else below the one that prepared.
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


def outcome_of(standing: Status) -> Outcome:
    """Return what the user is told of a proxy's answer."""
    return Outcome(standing.id, standing.decision or Decision.UNKNOWN, standing.state)


def checked_wait(wait: str) -> bool:
    """Return True for "promoted", False for "decided".

    Raises:
        BadRequest: it is another word.
    """
    if wait not in _WAITS:
        raise BadRequest(f"wait is one of {', '.join(_WAITS)}, not {wait!r}")
    return wait == "promoted"


def checked_decision(decision: object) -> Decision | None:
    """Return the decision that a local transaction returned.

    Raises:
        TypeError: it is neither a Decision nor None.
    """
    if decision is None or isinstance(decision, Decision):
        return decision
    raise TypeError(
        f"a local transaction returns a Decision or None, not {type(decision).__name__}"
    )
