"""Prepare, decide, ask for a check: each is retried with the same id until answered or timed out.

The first attempt costs an operation, its place in a session and a future. Only a call that fails or
must wait needs a `_RetryState`.

Retries are safe because a prepare counts once by its id and a decision is idempotent. A transaction
may take another id only before its block has run: the local transaction of the old id never
happened, so its check can only end in a rollback.
"""

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from struct import unpack
from typing import TypeVar

from msgspec import Struct, structs

from txbroker.contract.frames import AskEarly, Decide, Prepare, Status
from txbroker.core.records import Decision, Message
from txbroker.core.routing import dedup_hash, make_id, order_hash, parse_id
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    ConfigurationError,
    IdExpired,
    Overloaded,
    OwnerUnavailable,
    RequestError,
)
from txbroker.sdk.checks import LocalTransactions
from txbroker.sdk.router import Router
from txbroker.sdk.session import AnsweredOperation, Session, SessionLost
from txbroker.sdk.types import Limits, Outcome, Repeated, TransactionOptions, backoff_s, size_of

_log = logging.getLogger("txbroker.sdk")

ASK_RETRY_S = 15.0
"""Maximum time to request an early check: the schedule makes the next one anyway."""
ASKING_MAX = 1000
"""Requests for early checks in flight; further ones are left to the schedule."""

CALL_BACKOFF_MAX_S = 1.0
"""Longest pause between attempts of a call: a partition finds a new owner within seconds."""

RANDOMNESS_AT_ONCE = 256
"""Ids per system call for randomness."""

_randomness_left: list[int] = []
if hasattr(os, "register_at_fork"):  # otherwise two processes would create the same ids
    os.register_at_fork(after_in_child=_randomness_left.clear)

RETRY_SHARE_OF_WINDOW = 0.75
"""A prepare is retried for this share of the dedup window: later its id could be void."""

T = TypeVar("T")


class InFlightLimit:
    """A limit on calls in flight and on their bytes; further calls wait in order of arrival.

    A call larger than the limit on bytes is admitted alone, so that no call waits for ever.
    """

    def __init__(self, calls_max: int, bytes_max: int) -> None:
        self._calls_max = calls_max
        self._bytes_max = bytes_max
        self._calls = 0
        self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def calls(self) -> int:
        """How many calls are in flight."""
        return self._calls

    def enter(self, size: int) -> bool:
        """Admit a call of `size` bytes; return False if it must `wait`."""
        calls, taken = self._calls, self._bytes + size
        if self._waiting or (calls and (calls >= self._calls_max or taken > self._bytes_max)):
            return False
        self._calls, self._bytes = calls + 1, taken
        return True

    def leave(self, size: int) -> None:
        """End a call of `size` bytes."""
        self._calls -= 1
        self._bytes -= size
        if self._waiting:
            self._admit()

    async def wait(self, size: int) -> None:
        """Wait until a call of `size` bytes is admitted."""
        admitted = asyncio.get_running_loop().create_future()
        entry = (size, admitted)
        self._waiting.append(entry)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.leave(size)  # it had just been admitted
            else:
                # `_admit` may have removed it already.
                with suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise

    def _admit(self) -> None:
        """Admit waiting calls, in order, while there is room."""
        waiting, self._waiting = self._waiting, deque()
        while waiting and (waiting[0][1].done() or self.enter(waiting[0][0])):
            _, admitted = waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
        self._waiting = waiting


class Draft(Struct):
    """A transaction that is not prepared yet, with the options that were given."""

    messages: tuple[Message, ...]
    options: TransactionOptions = {}


class _RetryState:
    """The state of a call whose first attempt has failed or must wait.

    Every wait of such a call raises `exhausted()` at the deadline, `until_s`.

    Attributes:
        attempt: how many attempts have failed.
        choice: index of the owner to try among those that the proxies' views name; -1, the newest,
            after a move, because a hanging proxy still calls itself the owner.
        sent: an earlier attempt with the same id may have reached the proxy.
    """

    def __init__(
        self,
        limits: Limits,
        trouble: Callable[[], OwnerUnavailable | None],
        began_s: float,
        operation: AnsweredOperation | None,
    ) -> None:
        self._time_s = asyncio.get_running_loop().time
        self._limits = limits
        self._trouble = trouble
        self._began_s = began_s
        self._operation = operation
        self.until_s = began_s + limits.retry_s
        self.attempt = 0
        self.choice = 0
        self.sent = False
        self._last: Exception | None = None

    async def wait(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise `exhausted()` at the deadline."""
        try:
            async with asyncio.timeout_at(self.until_s) as bound:
                return await work
        except TimeoutError:
            if not bound.expired():
                raise
            raise self.exhausted() from None

    def due_s(self, operation: AnsweredOperation) -> float:
        """Return the deadline of an attempt's answer; one that waits for promotion may take all the
        time."""
        if isinstance(operation, Decide) and operation.wait:
            return self.until_s
        return min(self.until_s, self._time_s() + self._limits.answer_timeout_s)

    def failed(self, error: SessionLost | RequestError) -> None:
        """Note a failed attempt; raise its error if a retry cannot succeed."""
        if isinstance(error, SessionLost):
            self.sent = self.sent or error.sent
            if error.moved:
                self.choice = -1
        elif not error.retryable:
            raise error
        else:
            self.sent = True  # the proxy received it, and may still carry it out
        self._last = error

    async def pause(self) -> None:
        """Wait before the next attempt; not before the first one after a lost session."""
        if self._time_s() >= self.until_s:
            raise self.exhausted()
        self.attempt += 1
        self.choice += 1
        if not (isinstance(self._last, SessionLost) and self.attempt == 1):
            pause_s = min(CALL_BACKOFF_MAX_S, backoff_s(self._limits, self.attempt))
            await self.wait(asyncio.sleep(pause_s))

    def exhausted(self) -> RequestError:
        """Return the error to raise at the deadline."""
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


def _left_open(operation: AnsweredOperation | None) -> str:
    """Return the unknown outcome of a call that timed out; None is a prepare without an id."""
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


def _is_another(status: Status, operation: Prepare) -> bool:
    """Return True if the answer to a prepare with a `dedup_key` is the status of an earlier
    transaction, or of its own after a check decided it: then the key is taken."""
    return status.id != operation.id or status.decision is not None


class Calls:
    """The calls of one producer; `number` returns that of a new call."""

    def __init__(
        self, group: str, router: Router, local: LocalTransactions, limits: Limits
    ) -> None:
        self._group = group
        self._router = router
        self._local = local
        self._limits = limits
        self.number = itertools.count(1).__next__
        # Separate limits: decisions end transactions, so they must not queue up after prepares.
        self._prepares = InFlightLimit(limits.in_flight_max, limits.in_flight_bytes_max)
        self._decisions = InFlightLimit(limits.in_flight_max, limits.in_flight_bytes_max)
        self._background: set[asyncio.Task[None]] = set()

    # --- prepare -------------------------------------------------------------------------

    async def prepare(self, draft: Draft) -> Status:
        """Store a half message; return its status.

        Raises:
            RequestError: it was refused; or it timed out, and its outcome is unknown.
            Repeated: another transaction has its `dedup_key`.
        """
        time_s, limits = asyncio.get_running_loop().time, self._limits
        began_s = time_s()
        first, key = draft.messages[0], draft.options.get("dedup_key")
        order_key = draft.options.get("order_key")
        order = order_hash(order_key, first.topic, first.key)
        if key is not None and order_key is None:
            order = dedup_hash(self._group, key)  # before the message's key, as proxies do
        retry: _RetryState | None = None
        operation: Prepare | None = None
        room, size = self._prepares, size_of(draft.messages)
        if not room.enter(size):
            retry = self._retry_state(began_s)
            await retry.wait(room.wait(size))
        try:
            while True:
                place = self._router.open_place(order)
                if place is None:
                    retry = retry or self._retry_state(began_s)
                    place = await retry.wait(self._router.place(order))
                session, partition = place
                if key is not None and not session.dedup_keys:
                    raise ConfigurationError(
                        "the proxy is of an earlier version, which knows no dedup_key in sessions: "
                        "upgrade the proxies"
                    )
                now_s = time_s()
                until_s = now_s + session.dedup_window_s * RETRY_SHARE_OF_WINDOW
                until_s = min(until_s, retry.until_s if retry else began_s + limits.retry_s)
                operation = self._draw(draft, session, partition)
                due_s = min(until_s, now_s + limits.answer_timeout_s)
                try:
                    status: Status | None = await session.send(operation, partition, due_s)
                except (SessionLost, RequestError) as error:
                    retry = retry or self._retry_state(began_s)
                    retry.until_s = until_s
                    status = await self._again(operation, partition, retry, error)
                if key is not None and status is not None and _is_another(status, operation):
                    self._local.settled(operation.id)
                    operation = None
                    decision = status.decision or Decision.UNKNOWN
                    raise Repeated(Outcome(status.id, decision, status.state))
                if status is not None and status.decision is None:
                    return status
                if status is not None and status.decision is Decision.COMMIT:
                    raise AlreadyDecided(
                        "the transaction was committed before its block ran", id=status.id
                    )
                # Nothing was sent, or the id is void, or a check rolled it back before the retry:
                # the block has not run, so the transaction may start again with another id.
                retry = retry or self._retry_state(began_s)
                self._abandon(operation.id, sent=retry.sent)
                operation, retry.sent = None, False
                await retry.pause()
        except BaseException as error:
            if operation is not None:
                session.forget(operation.call)
                # After a cancellation or an internal error it may be stored.
                unsure = not isinstance(error, RequestError) or error.status >= 500
                sent = unsure or (retry is not None and retry.sent)
                self._abandon(operation.id, sent=sent)
            raise
        finally:
            room.leave(size)

    def _draw(self, draft: Draft, session: Session, partition: int) -> Prepare:
        try:
            randomness = _randomness_left.pop()
        except IndexError:  # not tested before: another thread may take the last one
            drawn = os.urandom(8 * RANDOMNESS_AT_ONCE)
            randomness, *rest = unpack(f"{RANDOMNESS_AT_ONCE}Q", drawn)
            _randomness_left.extend(rest)
        id = make_id(partition, session.now_ms(), randomness)
        self._local.running(id)
        return Prepare(self.number(), id, draft.messages, **draft.options)

    def _abandon(self, transaction_id: str, *, sent: bool) -> None:
        """Give up an id; if it may be stored, remember the answer to its check."""
        if sent:
            self._local.undelivered(transaction_id, Decision.ROLLBACK)
        else:
            self._local.settled(transaction_id)

    # --- decide --------------------------------------------------------------------------

    async def decide(self, operation: Decide) -> Status:
        """Commit or roll back; with `wait`, return when consumers can see the messages.

        Raises:
            RequestError: it was refused; or it timed out, and its outcome is unknown.
        """
        try:
            partition = parse_id(operation.id).partition
        except (ValueError, TypeError) as error:
            raise BadId(str(error)) from None
        time_s, limits = asyncio.get_running_loop().time, self._limits
        began_s = time_s()
        retry: _RetryState | None = None
        room, messages = self._decisions, operation.messages
        size = size_of(messages) if messages else 0
        if not room.enter(size):
            retry = self._retry_state(began_s, operation)
            await retry.wait(room.wait(size))
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
            retry = retry or self._retry_state(began_s, operation)
            status = await self._again(operation, partition, retry, failure)
        except BaseException:
            if session is not None:
                session.forget(operation.call)
            raise
        finally:
            room.leave(size)
        assert status is not None, "only a prepare gets None"
        return status

    # --- retry ---------------------------------------------------------------------------

    async def _again(
        self,
        operation: AnsweredOperation,
        partition: int,
        retry: _RetryState,
        failure: SessionLost | RequestError | None,
    ) -> Status | None:
        """Retry an operation with the same id until it is answered. `failure` is None if there was
        no session for the first attempt. Return None if a prepare must take another id, or may, as
        nothing was sent.

        Raises:
            RequestError: a retry cannot succeed, or the call timed out.
        """
        preparing = isinstance(operation, Prepare)
        while True:
            if failure is not None:
                if preparing and isinstance(failure, IdExpired):
                    return None
                retry.failed(failure)
                if preparing and not retry.sent:
                    return None
                await retry.pause()
            session = await retry.wait(self._router.owner(partition, retry.choice))
            operation = structs.replace(operation, call=self.number())
            if preparing:
                operation = structs.replace(operation, retry=True)
            try:
                return await session.send(operation, partition, retry.due_s(operation))
            except (SessionLost, RequestError) as error:
                failure = error
            except BaseException:
                session.forget(operation.call)
                raise

    def _retry_state(
        self, began_s: float, operation: AnsweredOperation | None = None
    ) -> _RetryState:
        return _RetryState(self._limits, lambda: self._router.last_trouble, began_s, operation)

    # --- in the background ---------------------------------------------------------------

    def ask_early(self, transaction_id: str, reason: str) -> None:
        """Request an early check in the background; a failure has no effect."""
        if len(self._background) < ASKING_MAX:
            self.in_background(self._ask(transaction_id, reason))

    def in_background(self, work: Awaitable[object]) -> None:
        """Finish work of a task that was cancelled and cannot wait for it."""
        task = asyncio.ensure_future(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self) -> None:
        """Wait until the background work is done."""
        while self._background:
            await asyncio.wait(tuple(self._background))

    async def close(self) -> None:
        """Stop the background work."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _ask(self, transaction_id: str, reason: str) -> None:
        operation = AskEarly(self.number(), transaction_id, reason)
        retry = self._retry_state(asyncio.get_running_loop().time(), operation)
        retry.until_s -= max(0.0, self._limits.retry_s - ASK_RETRY_S)
        await self._again(operation, parse_id(transaction_id).partition, retry, None)


async def _quietly(work: Awaitable[object]) -> None:
    try:
        await work
    except RequestError as error:
        _log.info("left to the check-back: %s", error)
    except Exception:
        _log.exception("left to the check-back")
