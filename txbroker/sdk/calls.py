"""Prepare, decide, ask: each repeated, with the same id, until it is answered or time is up.

The first try is an operation, its place in a session and a future. Only where it fails, or has to
wait, does a call need patience: that carries its id and what is known of it on.

Repeating is safe because a prepare counts once by its id and a decision is idempotent. Only
before its block has run may a transaction take another id: whatever became of the old one, its
local transaction never happened, so its check can only end in a rollback.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable
from struct import unpack
from typing import TypeVar

from msgspec import Struct, structs

from txbroker.contract.frames import AskEarly, Decide, Prepare, Status
from txbroker.core.records import Decision, Message
from txbroker.core.routing import make_id, order_hash, parse_id
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    IdExpired,
    Overloaded,
    OwnerUnavailable,
    RequestError,
)
from txbroker.sdk.limits import RETRY_SHARE_OF_WINDOW, InFlightLimit, Limits
from txbroker.sdk.local import LocalTransactions
from txbroker.sdk.messages import size_of
from txbroker.sdk.router import Router
from txbroker.sdk.session import Asked, Session, SessionLost

_log = logging.getLogger("txbroker.sdk")

ASK_RETRY_S = 15.0
"""An early check is a courtesy: the next one is due anyway, so it is not asked for for long."""
ASKING_MAX = 1000
"""Early checks being asked for at one time; further ones are left to the schedule."""

CALL_BACKOFF_MAX_S = 1.0
"""Between two tries of one call: a partition finds a new owner within seconds."""

RANDOMNESS_AT_ONCE = 256
"""Ids for which the system is asked for randomness at one time: each question costs."""

_randomness_left: list[int] = []
if hasattr(os, "register_at_fork"):  # or two processes would give the same ids
    os.register_at_fork(after_in_child=_randomness_left.clear)

T = TypeVar("T")


class Draft(Struct):
    """What is to be prepared."""

    messages: tuple[Message, ...]
    order_key: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None


class _Patience:
    """What a call needs once its first try has failed, or has to wait.

    Every wait of such a call raises `exhausted()` when the time is up.
    """

    def __init__(
        self,
        limits: Limits,
        trouble: Callable[[], OwnerUnavailable | None],
        began_s: float,
        operation: Asked | None,
    ) -> None:
        self._time_s = asyncio.get_running_loop().time
        self._limits = limits
        self._trouble = trouble
        self._began_s = began_s
        self._operation = operation
        self.until_s = began_s + limits.retry_s
        self.turn = 0
        self.choice = 0
        """Which one of the owners that views name is next: the newest after a move, for whoever
        hangs goes on to call itself the owner."""
        self.sent = False
        """An earlier try with the same id may have reached the proxy."""
        self._last: Exception | None = None

    async def wait(self, work: Awaitable[T]) -> T:
        """Return what `work` returns, unless the time is up before."""
        try:
            async with asyncio.timeout_at(self.until_s) as bound:
                return await work
        except TimeoutError:
            if not bound.expired():
                raise
            raise self.exhausted() from None

    def due_s(self, operation: Asked) -> float:
        """Return until when a try's answer must have come: a slow one's may take all the time."""
        if isinstance(operation, Decide) and operation.wait:
            return self.until_s
        return min(self.until_s, self._time_s() + self._limits.answer_timeout_s)

    def failed(self, error: SessionLost | RequestError) -> None:
        """A try failed.

        Raises:
            RequestError: repeating does not cure it.
        """
        if isinstance(error, SessionLost):
            self.sent = self.sent or error.sent
            if error.moved:
                self.choice = -1
        elif not error.retryable:
            raise error
        else:
            self.sent = True  # the proxy had it, and need not have said the last word about it
        self._last = error

    async def pause(self) -> None:
        """Wait before the next try; not before the first one after a lost session."""
        if self._time_s() >= self.until_s:
            raise self.exhausted()
        self.turn += 1
        self.choice += 1
        if not (isinstance(self._last, SessionLost) and self.turn == 1):
            pause_s = min(CALL_BACKOFF_MAX_S, self._limits.backoff_s(self.turn))
            await self.wait(asyncio.sleep(pause_s))

    def exhausted(self) -> RequestError:
        """Return the error to raise when the time is up."""
        trouble = self._trouble()
        why = str(self._last or trouble or "no owner was found")
        tried_s = self._time_s() - self._began_s
        kind: type[RequestError] = OwnerUnavailable
        if isinstance(self._last, Overloaded):
            kind = Overloaded
        elif self._last is None and trouble is not None:
            kind = type(trouble)
        operation = self._operation
        return kind(
            f"{_left_open(operation)} (tried for {tried_s:.1f} s; last: {why})",
            id=None if operation is None else operation.id,
        )


def _left_open(operation: Asked | None) -> str:
    """Return what is not known of a call whose time is up; None is a prepare, of whatever id."""
    if isinstance(operation, Decide):
        promoted = " and promoted" if operation.wait else ""
        return (
            f"whether the {operation.decision} of {operation.id} was stored{promoted} is not "
            "known; the check-back will settle it"
        )
    if isinstance(operation, AskEarly):
        return f"no early check of {operation.id} could be asked for"
    return (
        "the transaction could not be prepared and its block has not run; if it was stored after "
        "all, its check will roll it back"
    )


class Calls:
    """The operations of one producer.

    Attributes:
        number: returns the number of a new call.
    """

    def __init__(self, router: Router, book: LocalTransactions, limits: Limits) -> None:
        self._router = router
        self._book = book
        self._limits = limits
        self.number = itertools.count(1).__next__
        # Two rooms: decisions make room for prepares, so they must not queue up behind them.
        self._prepares = InFlightLimit(limits.in_flight_max, limits.in_flight_bytes_max)
        self._decisions = InFlightLimit(limits.in_flight_max, limits.in_flight_bytes_max)
        self._background: set[asyncio.Task[None]] = set()

    # --- prepare -------------------------------------------------------------------------

    async def prepare(self, draft: Draft) -> Status:
        """Store a half message; return where it stands. From then on its id is in the book.

        Raises:
            RequestError: it was refused; or time was up, and what became of it is unknown.
        """
        time_s, limits = asyncio.get_running_loop().time, self._limits
        began_s = time_s()
        first = draft.messages[0]
        order = order_hash(draft.order_key, first.topic, first.key)
        patience: _Patience | None = None
        operation: Prepare | None = None
        room, size = self._prepares, size_of(draft.messages)
        if not room.enter(size):
            patience = self._patience(began_s)
            await patience.wait(room.wait(size))
        try:
            while True:
                found = self._router.open_place(order)
                if found is None:
                    patience = patience or self._patience(began_s)
                    found = await patience.wait(self._router.place(order))
                session, partition = found
                now_s = time_s()
                until_s = now_s + session.dedup_window_s * RETRY_SHARE_OF_WINDOW
                until_s = min(until_s, patience.until_s if patience else began_s + limits.retry_s)
                operation = self._draw(draft, session, partition)
                due_s = min(until_s, now_s + limits.answer_timeout_s)
                try:
                    standing: Status | None = await session.send(operation, partition, due_s)
                except (SessionLost, RequestError) as error:
                    patience = patience or self._patience(began_s)
                    patience.until_s = until_s
                    standing = await self._again(operation, partition, patience, error)
                if standing is not None and standing.decision is None:
                    return standing
                if standing is not None and standing.decision is Decision.COMMIT:
                    raise AlreadyDecided(
                        "the transaction was committed before its block ran", id=standing.id
                    )
                # Nothing was sent, or the id is void, or a check was quicker than our retry and
                # rolled it back: the block has not run, so another id starts afresh.
                patience = patience or self._patience(began_s)
                self._abandon(operation.id, sent=patience.sent)
                operation, patience.sent = None, False
                await patience.pause()
        except BaseException as error:
            if operation is not None:
                session.forget(operation.call)
                # Cancelled, or an inner error: that does not say that nothing was stored.
                unsure = not isinstance(error, RequestError) or error.status >= 500
                sent = unsure or (patience is not None and patience.sent)
                self._abandon(operation.id, sent=sent)
            raise
        finally:
            room.leave(size)

    def _draw(self, draft: Draft, session: Session, partition: int) -> Prepare:
        """Return a draft as an operation with an id of its own, which is in the book now."""
        try:
            randomness = _randomness_left.pop()
        except IndexError:  # not looked at before: another thread may take the last one
            drawn = os.urandom(8 * RANDOMNESS_AT_ONCE)
            randomness, *rest = unpack(f"{RANDOMNESS_AT_ONCE}Q", drawn)
            _randomness_left.extend(rest)
        id = make_id(partition, session.now_ms(), randomness)
        self._book.running(id)
        return Prepare(
            self.number(),
            id,
            draft.messages,
            draft.order_key,
            draft.check_after_s,
            draft.check_interval_s,
        )

    def _abandon(self, transaction_id: str, *, sent: bool) -> None:
        """Give up an id; should it be stored after all, the answer to its check is known."""
        if sent:
            self._book.undelivered(transaction_id, Decision.ROLLBACK)
        else:
            self._book.settled(transaction_id)

    # --- decide --------------------------------------------------------------------------

    async def decide(self, operation: Decide) -> Status:
        """Commit or roll back; `wait` returns when consumers can see the messages.

        Raises:
            RequestError: it was refused; or time was up, and what became of it is unknown.
        """
        try:
            partition = parse_id(operation.id).partition
        except (ValueError, TypeError) as error:
            raise BadId(str(error)) from None
        time_s, limits = asyncio.get_running_loop().time, self._limits
        began_s = time_s()
        patience: _Patience | None = None
        room, messages = self._decisions, operation.messages
        size = size_of(messages) if messages else 0
        if not room.enter(size):
            patience = self._patience(began_s, operation)
            await patience.wait(room.wait(size))
        failure: SessionLost | RequestError | None = None
        session = self._router.open_owner(partition)
        try:
            if session is not None:
                longest_s = limits.retry_s if operation.wait else limits.answer_timeout_s
                due_s = min(began_s + limits.retry_s, time_s() + longest_s)
                try:
                    return await session.send(operation, partition, due_s)
                except (SessionLost, RequestError) as error:
                    failure = error
            patience = patience or self._patience(began_s, operation)
            standing = await self._again(operation, partition, patience, failure)
        except BaseException:
            if session is not None:
                session.forget(operation.call)
            raise
        finally:
            room.leave(size)
        assert standing is not None, "that is for prepares"
        return standing

    # --- once more -----------------------------------------------------------------------

    async def _again(
        self,
        operation: Asked,
        partition: int,
        patience: _Patience,
        failure: SessionLost | RequestError | None,
    ) -> Status | None:
        """Repeat what failed, with the same id, until it is answered; where `failure` is None, no
        session was there for the first try. Return None where a prepare must take another id, or
        may as well, as nothing was sent.

        Raises:
            RequestError: one that repeating does not cure, or the time is up.
        """
        preparing = isinstance(operation, Prepare)
        while True:
            if failure is not None:
                if preparing and isinstance(failure, IdExpired):
                    return None
                patience.failed(failure)
                if preparing and not patience.sent:
                    return None
                await patience.pause()
            session = await patience.wait(self._router.owner(partition, patience.choice))
            operation = structs.replace(operation, call=self.number())
            if preparing:
                operation = structs.replace(operation, retry=True)
            try:
                return await session.send(operation, partition, patience.due_s(operation))
            except (SessionLost, RequestError) as error:
                failure = error
            except BaseException:
                session.forget(operation.call)
                raise

    def _patience(self, began_s: float, operation: Asked | None = None) -> _Patience:
        return _Patience(self._limits, lambda: self._router.last_trouble, began_s, operation)

    # --- in the background ---------------------------------------------------------------

    def ask_early(self, transaction_id: str, reason: str) -> None:
        """Ask for a check soon; nobody waits for it and its failure changes nothing."""
        if len(self._background) < ASKING_MAX:
            self.in_background(self._ask(transaction_id, reason))

    def in_background(self, work: Awaitable[object]) -> None:
        """Finish some work for a task that was cancelled and cannot wait for it."""
        task = asyncio.ensure_future(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self) -> None:
        """Wait until nothing works in the background."""
        while self._background:
            await asyncio.wait(tuple(self._background))

    async def close(self) -> None:
        """Stop what works in the background."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _ask(self, transaction_id: str, reason: str) -> None:
        operation = AskEarly(self.number(), transaction_id, reason)
        patience = self._patience(asyncio.get_running_loop().time(), operation)
        patience.until_s -= max(0.0, self._limits.retry_s - ASK_RETRY_S)
        await self._again(operation, parse_id(transaction_id).partition, patience, None)


async def _quietly(work: Awaitable[object]) -> None:
    try:
        await work
    except RequestError as error:
        _log.info("left to the check-back: %s", error)
    except Exception:
        _log.exception("left to the check-back")
