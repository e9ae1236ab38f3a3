"""Prepare, decide, ask: each repeated, with the same id, until it is answered or time is up.

Repeating is safe because a prepare counts once by its id and a decision is idempotent. Only
before its block has run may a transaction take another id: whatever became of the old one, its
local transaction never happened, so its check can only end in a rollback.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType

from txbroker import tracing
from txbroker.core.ids import make_id, parse_id
from txbroker.core.placement import order_hash
from txbroker.core.records import Decision, Message
from txbroker.core.trace_context import with_context
from txbroker.deadlines import Deadlines
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    IdExpired,
    Overloaded,
    OwnerUnavailable,
    RequestError,
)
from txbroker.sdk.limits import RETRY_SHARE_OF_WINDOW, Limits, Room
from txbroker.sdk.local import LocalBook
from txbroker.sdk.messages import size_of
from txbroker.sdk.router import Router
from txbroker.sdk.session import Session, SessionLost
from txbroker.wire import AskEarly, Decide, FromProducer, Prepare, Standing

_log = logging.getLogger("txbroker.sdk")

ASK_RETRY_S = 15.0
"""An early check is a courtesy: the next one is due anyway, so it is not asked for for long."""
ASKING_MAX = 1000
"""Early checks being asked for at one time; further ones are left to the schedule."""

CALL_BACKOFF_MAX_S = 1.0
"""Between two tries of one call: a partition finds a new owner within seconds."""

_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be prepared."""

    messages: tuple[Message, ...]
    order_key: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None

    def within(self, step: tracing.Step | None) -> "Draft":
        """Return the draft whose messages carry a span's context, so that whoever gets them can
        continue its trace."""
        if step is None or step.context is None:
            return self
        return replace(self, messages=with_context(self.messages, step.context))

    def order(self) -> int | None:
        """Return the hash that its half partition comes from; None if any will do."""
        return order_hash(self.order_key, self.messages[0].topic, self.messages[0].key)


class _Patience:
    """The tries of one call: how long yet, why the last one failed, was anything sent.

    `async with patience:` raises TimeoutError when the time is up, as `asyncio.timeout` does.
    """

    def __init__(
        self,
        deadlines: "Deadlines[_Patience]",
        limits: Limits,
        trouble: Callable[[], OwnerUnavailable | None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines = deadlines
        self._limits = limits
        self._trouble = trouble
        self._started_at = self._loop.time()
        self._until = self._started_at + limits.retry_s
        self._timeout = asyncio.timeout(None)
        self.turn = 0
        self.choice = 0
        """Which one of the owners that views name is next: the newest after a move, for whoever
        hangs goes on to call itself the owner."""
        self.sent = False
        """An earlier try with the same id may have reached the proxy."""
        self.transaction_id: str | None = None
        """The id that is being tried, or that the call is about."""
        self._last: Exception | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._deadlines.begin(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._deadlines.end(self)
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        """Whether the time was up."""
        return self._timeout.expired()

    def expire(self) -> None:
        """The time is up."""
        if not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    def shorten(self, seconds: float) -> None:
        """Be patient for at most so long from now."""
        if (until := self._loop.time() + seconds) < self._until:
            self._until = until
            self._timeout.reschedule(until)

    async def attempt(
        self, session: Session, make: Callable[[int], FromProducer], partition: int, *, slow: bool
    ) -> Standing | None:
        """Try once; return None, after a pause, where another try can do better.

        Raises:
            RequestError: one that repeating does not cure.
        """
        try:
            return await session.call(make, partition, slow=slow)
        except SessionLost as error:
            self.sent = self.sent or error.sent
            self._last = error
            if error.moved:
                self.choice = -1
        except RequestError as error:
            if not error.retryable:
                raise
            self.sent = True  # the proxy had it, and need not have said the last word about it
            self._last = error
        await self.pause()
        return None

    async def pause(self) -> None:
        """Wait before the next try; not before the first one after a lost session."""
        self.turn += 1
        self.choice += 1
        if not (isinstance(self._last, SessionLost) and self.turn == 1):
            await asyncio.sleep(min(CALL_BACKOFF_MAX_S, self._limits.backoff_s(self.turn)))

    def exhausted(self, what: str) -> RequestError:
        """Return the error to raise when the time is up."""
        trouble = self._trouble()
        why = str(self._last or trouble or "no owner was found")
        tried_s = self._loop.time() - self._started_at
        kind: type[RequestError] = OwnerUnavailable
        if isinstance(self._last, Overloaded):
            kind = Overloaded
        elif self._last is None and trouble is not None:
            kind = type(trouble)
        return kind(f"{what} (tried for {tried_s:.1f} s; last: {why})", id=self.transaction_id)


class Calls:
    """The operations of one producer."""

    def __init__(self, router: Router, book: LocalBook, limits: Limits) -> None:
        self._router = router
        self._book = book
        self._limits = limits
        # Two rooms: decisions make room for prepares, so they must not queue up behind them.
        self._prepares = Room(limits.in_flight_max, limits.in_flight_bytes_max)
        self._decisions = Room(limits.in_flight_max, limits.in_flight_bytes_max)
        self._background: set[asyncio.Task[None]] = set()
        self._deadlines: Deadlines[_Patience] | None = None
        """Made by the first call, as a producer may be made outside an event loop."""

    # --- prepare -------------------------------------------------------------------------

    async def prepare(self, draft: Draft) -> Standing:
        """Store a half message; return where it stands. From then on its id is in the book.

        Raises:
            RequestError: it was refused; or time was up, and what became of it is unknown.
        """
        patience = self._patience()
        try:
            async with patience, self._prepares.take(size_of(draft.messages)):
                return await self._prepare(draft, patience)
        except RequestError as error:
            if error.status >= 500:
                patience.sent = True  # an inner error does not say that nothing was stored
            self._abandon(patience)
            raise
        except BaseException as error:
            patience.sent = True  # cancelled or timed out while the answer was awaited
            self._abandon(patience)
            if isinstance(error, TimeoutError) and patience.expired:
                raise patience.exhausted(
                    "the transaction could not be prepared and its block has not run; if it was "
                    "stored after all, its check will roll it back"
                ) from None
            raise

    async def _prepare(self, draft: Draft, patience: _Patience) -> Standing:
        while True:
            session, partition = await self._router.place(draft.order())
            patience.transaction_id = make_id(partition, session.now_ms(), _random.getrandbits(64))
            patience.shorten(session.dedup_window_s * RETRY_SHARE_OF_WINDOW)
            self._book.running(patience.transaction_id)
            standing = await self._prepare_as(session, draft, patience)
            if standing is not None and standing.decision is None:
                return standing
            if standing is not None and standing.decision is Decision.COMMIT:
                raise AlreadyDecided(
                    "the transaction was committed before its block ran", id=standing.id
                )
            # Nothing was sent, or the id is void, or a check was quicker than our retry and
            # rolled it back: the block has not run, so another id starts afresh.
            self._abandon(patience)
            await patience.pause()

    def _abandon(self, patience: _Patience) -> None:
        """Give up an id; should it be stored after all, the answer to its check is known."""
        transaction_id, patience.transaction_id = patience.transaction_id, None
        if transaction_id is None:
            return
        if patience.sent:
            self._book.undelivered(transaction_id, Decision.ROLLBACK)
        else:
            self._book.settled(transaction_id)
        patience.sent = False

    async def _prepare_as(
        self, first: Session, draft: Draft, patience: _Patience
    ) -> Standing | None:
        """Prepare under one id; None where another id must be taken, or may as well be."""
        transaction_id = patience.transaction_id or ""
        partition = partition_of(transaction_id)
        session = first
        while True:
            retry = patience.sent

            def make(call: int, retry: bool = retry) -> Prepare:
                return Prepare(
                    call,
                    transaction_id,
                    draft.messages,
                    draft.order_key,
                    draft.check_after_s,
                    draft.check_interval_s,
                    retry,
                )

            try:
                standing = await patience.attempt(session, make, partition, slow=False)
            except IdExpired:
                return None
            if standing is not None:
                return standing
            if not patience.sent:
                return None
            session = await self._router.owner(partition, patience.choice)

    # --- decide --------------------------------------------------------------------------

    async def decide(
        self,
        transaction_id: str,
        decision: Decision,
        *,
        messages: tuple[Message, ...] | None = None,
        reason: str = "",
        wait: bool = False,
    ) -> Standing:
        """Commit or roll back; `wait` returns when consumers can see the messages.

        Raises:
            RequestError: it was refused; or time was up, and what became of it is unknown.
        """
        partition = partition_of(transaction_id)

        def make(call: int) -> Decide:
            return Decide(call, transaction_id, decision, messages, reason, wait)

        patience = self._patience()
        patience.transaction_id = transaction_id
        size = size_of(messages or ())
        try:
            async with patience, self._decisions.take(size):
                return await self._repeat(make, partition, patience, slow=wait)
        except TimeoutError:
            if not patience.expired:
                raise
            raise patience.exhausted(
                f"whether the {decision} of {transaction_id} was stored"
                f"{' and promoted' if wait else ''} is not known; the check-back will settle it"
            ) from None

    async def _repeat(
        self,
        make: Callable[[int], FromProducer],
        partition: int,
        patience: _Patience,
        *,
        slow: bool,
    ) -> Standing:
        while True:
            session = await self._router.owner(partition, patience.choice)
            standing = await patience.attempt(session, make, partition, slow=slow)
            if standing is not None:
                return standing

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
        def make(call: int) -> AskEarly:
            return AskEarly(call, transaction_id, reason)

        patience = self._patience()
        async with patience:
            patience.shorten(ASK_RETRY_S)
            await self._repeat(make, partition_of(transaction_id), patience, slow=False)

    def _patience(self) -> _Patience:
        if self._deadlines is None:
            self._deadlines = Deadlines(self._limits.retry_s, _Patience.expire)
        return _Patience(self._deadlines, self._limits, lambda: self._router.last_trouble)


def partition_of(transaction_id: str) -> int:
    """Return the half partition that an id names.

    Raises:
        BadId: it is no transaction id.
    """
    try:
        return parse_id(transaction_id).partition
    except (ValueError, TypeError) as error:
        raise BadId(str(error)) from None


async def _quietly(work: Awaitable[object]) -> None:
    try:
        await work
    except (RequestError, TimeoutError) as error:
        _log.info("left to the check-back: %s", error)
    except Exception:
        _log.exception("left to the check-back")
