"""Answers the check-backs that arrive in sessions: from what this process knows, or by the check
function."""

import asyncio
import contextvars
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from msgspec import structs

from txbroker import tracing
from txbroker.contract.checks import Answer, CheckFunction, CheckRequest, Commit, NotYet
from txbroker.contract.frames import CheckAnswer, CheckQuestion
from txbroker.core.records import Decision
from txbroker.databases import DatabaseUnavailable
from txbroker.errors import TooLarge, TxbrokerError
from txbroker.sdk.session import Session
from txbroker.sdk.types import Limits, ProducerClosed, checked_replacement
from txbroker.tracing import context_of

_log = logging.getLogger("txbroker.sdk")

DETAIL_LENGTH_MAX = 200
"""Maximum length of an answer's detail; the transaction's timeline keeps it."""


UNAVAILABLE_AGAIN_S = 5.0
"""When a check is repeated that cannot reach its database, at the earliest, seconds."""
REMEMBERED_MAX = 10_000
"""Undelivered decisions and abandoned prepares that are remembered; the oldest are dropped. Without
them a check calls the check function, which costs a query of the database."""


class LocalTransactions:
    """The transactions of this process: running blocks and recent decisions."""

    def __init__(self, running_again_s: float) -> None:
        self._not_yet = NotYet(running_again_s)
        self._open: dict[str, Answer] = {}
        self._remembered: OrderedDict[str, Answer] = OrderedDict()
        self.started = False
        self.closed = False
        """No further transaction may begin."""
        self._blocks = 0
        self._no_blocks = asyncio.Event()
        """Set when the last block ends after `closed`."""

    def require_open(self) -> None:
        """Raise ProducerClosed unless the producer is started and neither draining nor closed."""
        if self.closed:
            raise ProducerClosed("the producer is draining or closed: no new transactions")
        self.require_started()

    def require_started(self) -> None:
        """Raise ProducerClosed unless the producer is started."""
        if not self.started:
            raise ProducerClosed("the producer is not started: use `async with` or `start()`")

    def answer(self, transaction_id: str) -> Answer | None:
        """Return the answer for a transaction; None if it is not known here."""
        return self._open.get(transaction_id) or self._remembered.get(transaction_id)

    def running(self, transaction_id: str) -> None:
        """Note that its prepare or its local transaction is in progress."""
        self._open[transaction_id] = self._not_yet

    def deciding(self, transaction_id: str, answer: Answer) -> None:
        """Note that its decision is made and in flight."""
        self._open[transaction_id] = answer

    def settled(self, transaction_id: str) -> None:
        """Note that nothing of it is in progress any more."""
        self._open.pop(transaction_id, None)
        self._remembered.pop(transaction_id, None)

    def undelivered(self, transaction_id: str, answer: Answer) -> None:
        """Keep a decision that is certain but could not be delivered, for the check."""
        self._open.pop(transaction_id, None)
        self._remembered[transaction_id] = answer
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    def block_opened(self) -> None:
        """Count a transaction that begins; raises as `require_open`."""
        if self.closed or not self.started:
            self.require_open()
        self._blocks += 1

    def block_closed(self) -> None:
        """Count a transaction that ended."""
        self._blocks -= 1
        if self.closed and self._blocks == 0:
            self._no_blocks.set()

    async def no_blocks(self) -> None:
        """Wait until no transaction runs here; set `closed` before, so that none begins."""
        if self._blocks:
            await self._no_blocks.wait()


class CheckAnswerer:
    """Answers the checks of one producer.

    If this process knows the answer it is sent at once; otherwise the check function is called, at
    most `checks_max` times at a time. A check that is repeated while the function still runs gets
    the same answer.
    """

    def __init__(
        self, function: CheckFunction | None, local: LocalTransactions, limits: Limits
    ) -> None:
        self._function = function
        self._suspends = function is not None and is_coroutine_function(function)
        self._local = local
        self._limits = limits
        # By id, the sessions and questions that wait for the function's answer.
        self._asked: dict[str, list[tuple[Session, CheckQuestion]]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self.draining = False

    @property
    def has_function(self) -> bool:
        """True if this instance can be asked about other instances' transactions, too."""
        return self._function is not None

    def arrived(self, session: Session, check: CheckQuestion) -> None:
        """Answer a check, at once or when the check function has returned."""
        known = self._local.answer(check.id)
        if known is not None:
            _post(session, _in_frame(known, check, "the producer itself"))
        elif self._function is None:
            session.post(_not_taken(check, "this producer has no check function"))
        elif self.draining:
            session.post(_not_taken(check, "this producer is draining"))
        elif (waiting := self._asked.get(check.id)) is not None:
            waiting.append((session, check))
        elif len(self._asked) >= self._limits.checks_max:
            session.post(_not_taken(check, "this producer is busy with other checks"))
        else:
            self._asked[check.id] = [(session, check)]
            task = asyncio.create_task(
                self._answer(self._function, check), name=f"txbroker check {check.id}"
            )
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def settle(self) -> None:
        """Wait until every accepted check is answered."""
        while self._answering:
            await asyncio.wait(tuple(self._answering))

    async def close(self) -> None:
        """Stop answering. A plain function in a thread runs to its end."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, function: CheckFunction, check: CheckQuestion) -> None:
        """Call the function, and answer all checks that wait for it."""
        try:
            answer = await self._ask(function, check)
        finally:
            waiting = self._asked.pop(check.id)
        for session, asked in waiting:
            _post(session, structs.replace(answer, call=asked.call))

    async def _ask(self, function: CheckFunction, check: CheckQuestion) -> CheckAnswer:
        request = CheckRequest(
            check.id,
            check.group,
            check.attempt,
            check.attempts_max,
            check.reason,
            check.prepared_at_ms / 1000,
            check.messages,
        )
        try:
            with _asking(check) as step:
                answer = _in_frame(await self._run(function, request), check, "the check function")
                if step is not None:
                    step.note({tracing.DECISION: str(answer.decision)})
                return answer
        except DatabaseUnavailable as error:
            _log.warning("the check of %s is to be repeated: %s", check.id, error)
            return _not_taken(check, "the database does not answer", UNAVAILABLE_AGAIN_S)
        except (Exception, SystemExit) as error:
            return _failed(check, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _failed(check, error)  # raised by the function; this task is not cancelled

    async def _run(self, function: CheckFunction, request: CheckRequest) -> Answer:
        if self._suspends:
            result = function(request)
        else:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(
                    self._limits.check_threads_max, thread_name_prefix="txbroker-check"
                )
            loop = asyncio.get_running_loop()
            here = contextvars.copy_context()
            result = await loop.run_in_executor(self._threads, here.run, _call, function, request)
        return await result if inspect.isawaitable(result) else result


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """Return True for `async def` functions, methods and objects with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - this does not test whether it is callable
    )


def _asking(check: CheckQuestion) -> "AbstractContextManager[tracing.ActiveSpan | None]":
    """Return a span for the check function, which continues the prepare's."""
    attributes: tracing.Attributes = {
        tracing.ID: check.id,
        tracing.GROUP: check.group,
        tracing.ATTEMPT: check.attempt,
    }
    return tracing.step(
        "check",
        check.messages,
        attributes,
        kind="server",
        parent=context_of(check.messages),
        current=True,
    )


def _call(function: CheckFunction, request: CheckRequest) -> Answer | Awaitable[Answer]:
    """Call a plain function. No future can carry a StopIteration: the answer would never arrive."""
    try:
        return function(request)
    except StopIteration as error:
        raise TxbrokerError("the check function raised StopIteration") from error


def _failed(check: CheckQuestion, error: BaseException) -> CheckAnswer:
    """Return an unknown that names the error, and log it; the traceback at level `debug`.

    Only texts of txbroker's own errors leave this process: others may hold data of the service.
    """
    kind = type(error).__name__
    _log.error("the check of %s failed: answered as unknown: %s: %s", check.id, kind, error)
    _log.debug("where the check of %s failed", check.id, exc_info=error)
    detail = f"the check function raised {kind}"
    if isinstance(error, TxbrokerError):
        detail = f"{kind}: {error}"[:DETAIL_LENGTH_MAX]
    return CheckAnswer(check.call, Decision.UNKNOWN, detail=detail)


def _post(session: Session, answer: CheckAnswer) -> None:
    try:
        session.post(answer)
    except TooLarge as error:
        session.post(CheckAnswer(answer.call, Decision.UNKNOWN, detail=str(error)))


def _in_frame(answer: object, check: CheckQuestion, by: str) -> CheckAnswer:
    match answer:
        case Decision():
            return CheckAnswer(check.call, answer, detail=f"{answer} by {by}")
        case NotYet():
            return CheckAnswer(
                check.call, Decision.UNKNOWN, answer.after_s, detail=f"not yet, by {by}"
            )
        case Commit(messages=None):
            return CheckAnswer(check.call, Decision.COMMIT, detail=f"commit by {by}")
        case Commit(messages=messages):
            final = checked_replacement(check.messages, messages or ())
            return CheckAnswer(check.call, Decision.COMMIT, None, final, f"commit by {by}")
    raise TxbrokerError(
        f"a check returns a Decision, Commit or NotYet, not {type(answer).__name__}"
    )


def _not_taken(check: CheckQuestion, why: str, ask_again_s: float | None = None) -> CheckAnswer:
    return CheckAnswer(check.call, None, ask_again_s, detail=why)
