"""One transaction as its block sees it, and what leaving the block means."""

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType

from txbroker import tracing
from txbroker.core.records import Decision, Message, State
from txbroker.core.trace_context import carried_over, context_of
from txbroker.errors import AlreadyDecided, BadRequest, BodyLost, Overloaded, OwnerUnavailable
from txbroker.sdk.calls import Calls, Draft
from txbroker.sdk.local import LocalBook
from txbroker.sdk.messages import checked_replacement
from txbroker.sdk.types import Answer, Commit, Outcome, Rollback, Wait
from txbroker.wire import Standing

REASON_LENGTH_MAX = 200
"""Of the reason that an early check carries: enough for a sentence, too little for a dump."""

_WAITS = ("decided", "promoted")


class Transaction:
    """A prepared transaction.

    Attributes:
        id: names it everywhere; the barrier's row carries it.
    """

    def __init__(
        self, transaction_id: str, prepared: tuple[Message, ...], calls: Calls, book: LocalBook
    ) -> None:
        self.id = transaction_id
        self._prepared = prepared
        self._final: tuple[Message, ...] | None = None
        self._calls = calls
        self._book = book
        self._outcome: Outcome | None = None
        self._intent: Decision | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as a commit would publish them."""
        return self._final or self._prepared

    @property
    def outcome(self) -> Outcome:
        """Where the transaction stands, as far as is known here."""
        return self._outcome or Outcome(self.id, Decision.UNKNOWN, State.PENDING)

    def replace(self, *messages: Message) -> None:
        """Publish these at commit instead: as many as were prepared, for the same topics.

        Raises:
            BadRequest: they do not match the prepared ones.
            AlreadyDecided: the transaction is decided.
        """
        if self._outcome is not None:
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
        return await self._decide(Decision.COMMIT, wait=checked_wait(wait))

    async def rollback(self, reason: str = "") -> Outcome:
        """Roll back; the messages will never be visible.

        Raises: as `commit`.
        """
        return await self._decide(Decision.ROLLBACK, reason=reason)

    async def _decide(self, decision: Decision, *, wait: bool = False, reason: str = "") -> Outcome:
        if self._outcome is not None and self._outcome.decision is not decision:
            raise AlreadyDecided(
                f"the decision was {self._outcome.decision} before; the first one stands",
                id=self.id,
                decision=self._outcome.decision,
            )
        if self._outcome is not None and not wait:
            return self._outcome
        self._intent = decision
        self._book.deciding(self.id, self._answer(decision))
        try:
            standing = await self._send(decision, wait, reason)
        except BaseException:
            self._book.running(self.id)  # until the block is left, which says how it ended
            raise
        self._book.settled(self.id)
        self._outcome = outcome_of(standing)
        return self._outcome

    def _answer(self, decision: Decision) -> Answer:
        if decision is Decision.COMMIT and self._final is not None:
            return Commit(self._final)
        return decision

    async def _send(self, decision: Decision, wait: bool, reason: str) -> Standing:
        final = self._final if decision is Decision.COMMIT else None
        with deciding(decision, self.id, self._prepared) as step:
            if step is not None and final is not None:
                final = carried_over(self._prepared, final)
            try:
                return await self._calls.decide(
                    self.id, decision, messages=final, reason=reason, wait=wait
                )
            except BodyLost:
                if decision is not Decision.COMMIT or self._final is not None:
                    raise
        # Its half message was deleted. Here the messages still are, and a commit may bring them.
        self._final = self._prepared
        return await self._send(decision, wait, reason)

    # --- leaving the block ---------------------------------------------------------------

    async def leave(self, error: BaseException | None) -> bool:
        """Do what leaving the block with or without an exception means; return True where the
        exception has said what it had to."""
        if error is None:
            if self._outcome is None:
                await self._conclude(self._intent or Decision.COMMIT)
            return False
        if isinstance(error, Rollback):
            await self._conclude(Decision.ROLLBACK, str(error)[:REASON_LENGTH_MAX])
            return True
        self.leave_in_doubt(error)
        return False

    async def _conclude(self, decision: Decision, reason: str = "") -> None:
        try:
            await self._decide(decision, reason=reason)
        except asyncio.CancelledError:
            # The local transaction is over and the decision made; only its waiter is gone.
            self._book.deciding(self.id, self._answer(decision))
            self._calls.in_background(self._conclude_left_behind(decision, reason))
            raise
        except (OwnerUnavailable, Overloaded):
            self._undelivered(decision)
            raise
        except BaseException:
            self._book.settled(self.id)
            raise

    async def _conclude_left_behind(self, decision: Decision, reason: str) -> None:
        try:
            await self._send(decision, False, reason)
        except (OwnerUnavailable, Overloaded):
            self._undelivered(decision)
            raise
        except BaseException:
            self._book.settled(self.id)
            raise
        self._book.settled(self.id)

    def _undelivered(self, decision: Decision) -> None:
        answer = self._answer(decision)
        if isinstance(answer, Commit):
            # Bodies are not kept; the check function brings its own final messages.
            self._book.settled(self.id)
        else:
            self._book.undelivered(self.id, answer)

    def leave_in_doubt(self, error: BaseException | None) -> None:
        """Leave it unknown and ask for an early check: an exception does not prove that the
        local transaction failed."""
        if self._outcome is not None:
            return
        self._book.settled(self.id)
        reason = "the function answered unknown"
        if error is not None:
            reason = f"the block ended with {type(error).__name__}: {error}"
        self._calls.ask_early(self.id, reason[:REASON_LENGTH_MAX])


class TransactionBlock:
    """`async with producer.transaction(…) as tx`: prepares on entry, decides on leaving."""

    def __init__(self, draft: Draft, calls: Calls, book: LocalBook) -> None:
        self._draft = draft
        self._calls = calls
        self._book = book
        self._transaction: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        if self._transaction is not None:
            raise BadRequest("a transaction's block can be entered only once")
        self._book.require_open()
        self._book.block_opened()
        try:
            with preparing(self._draft) as step:
                self._draft = self._draft.within(step)
                standing = await self._calls.prepare(self._draft)
                note_standing(step, standing)
        except BaseException:
            self._book.block_closed()
            raise
        self._transaction = Transaction(standing.id, self._draft.messages, self._calls, self._book)
        return self._transaction

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert self._transaction is not None
        try:
            return await self._transaction.leave(error)
        finally:
            self._book.block_closed()

    def leave_running(self, ended: "asyncio.Future[object]", error: BaseException) -> None:
        """Leave while the local transaction still runs in a thread: it stays "not yet" until
        `ended`, and is in doubt only then."""
        transaction = self._transaction
        assert transaction is not None

        def left(_: object) -> None:
            transaction.leave_in_doubt(error)
            self._book.block_closed()

        ended.add_done_callback(left)


def preparing(draft: Draft) -> "AbstractContextManager[tracing.Step | None]":
    """Return a span to prepare in."""
    attributes = {tracing.OPERATION_TYPE: "create"}
    return tracing.step("prepare", draft.messages, attributes, kind="producer")


def note_standing(step: tracing.Step | None, standing: Standing) -> None:
    """Name the transaction in the span that prepared it."""
    if step is not None:
        step.note({tracing.ID: standing.id})


def deciding(
    decision: Decision, transaction_id: str, prepared: tuple[Message, ...]
) -> "AbstractContextManager[tracing.Step | None]":
    """Return a span to decide in: below the caller's own, else below the one that prepared."""
    below = tracing.is_on() and tracing.current_context() is None
    parent = context_of(prepared) if below else None
    attributes = {tracing.ID: transaction_id, tracing.DECISION: str(decision)}
    return tracing.step(str(decision), prepared, attributes, kind="client", parent=parent)


def outcome_of(standing: Standing) -> Outcome:
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
