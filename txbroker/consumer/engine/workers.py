"""Calls handlers: coroutines on the event loop, plain functions in threads, one message or a batch
at a time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

import structlog
from msgspec import Struct

from txbroker.consumer.engine.calls import HandlerCall, call_of
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.message import ReceivedMessage
from txbroker.errors import ConfigurationError

log = structlog.wrap_logger(logging.getLogger(__name__))

Handler: TypeAlias = Callable[..., Any]
"""A coroutine function or a plain one. Takes a `ReceivedMessage`, or with `batch` a list; exactly
once also what it stores results with."""
Before: TypeAlias = Callable[[ReceivedMessage], Awaitable[None] | None]
After: TypeAlias = Callable[[ReceivedMessage, BaseException | None], Awaitable[None] | None]

T = TypeVar("T")

_POLL_S = 0.2
"""The time between looks at timeouts."""
_CANCELLED_S = 2.0
"""How long cancelled handlers may take to end."""
_BURST_S = 0.002
"""The longest time for which handlers that never wait keep the event loop."""


class HandlerTimeout(TimeoutError):
    """The handler did not return within `handler_timeout_s`."""


class HandlerOptions(Struct, frozen=True, kw_only=True):
    """How handlers are called.

    Attributes:
        count: calls at the same time, at most.
        timeout_s: of one call, seconds; None: none.
        batch: messages in one call; 0: one message, not a list.
        max_wait_s: how long a batch waits to be full, seconds.
        before, after: called before and after each message, the latter with its error.
        then: later stages, called after the handler.
        results: stores what the handler did with the position; None: positions are stored later.
    """

    count: int
    timeout_s: float | None = None
    batch: int = 0
    max_wait_s: float = 0.0
    before: Before | None = None
    after: After | None = None
    then: Sequence[Handler] = ()
    results: ResultStore | None = None


class ResultStore(Protocol):
    """Stores the results of handlers with positions.

    Attributes:
        second_argument: what a handler receives beside its message.
    """

    second_argument: str

    def check(self, handler: Handler, *, batch: bool) -> None:
        """Raise ConfigurationError if handlers of this kind cannot be called."""

    def around(self, engine: Engine, handler: Handler) -> Call:
        """Return a function that calls the handler with messages and stores what it did.

        It raises `RolledBack`, the handler's error, or returns after everything is stored, or is
        an output of the messages' call.
        """

    async def finished(self, engine: Engine, messages: Sequence[ReceivedMessage]) -> None:
        """All stages of messages have ended."""


Call: TypeAlias = Callable[[list[ReceivedMessage], Any], Awaitable[None]]
"""Takes messages, and the handler's first argument: one of them or the list."""


class RolledBack(Exception):
    """Nothing of messages is stored, not because of an error of their handler: they are handled
    again."""


def check_handler(handler: object, second_argument: str = "") -> None:
    """Raise ConfigurationError unless `handler` can be called with its arguments."""
    if not callable(handler):
        raise ConfigurationError(
            f"the handler {handler!r} cannot be called: pass a function that takes a message"
        )
    if _is(inspect.isgeneratorfunction, handler) or _is(inspect.isasyncgenfunction, handler):
        raise ConfigurationError(
            f"the handler {handler!r} contains `yield`, so that a call does nothing: remove it"
        )
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(handler)
        try:
            signature.bind(*[None] * (2 if second_argument else 1))
        except TypeError:
            name = getattr(handler, "__name__", repr(handler))
            wanted = "one argument: it takes a message"
            if second_argument:
                wanted = f"two arguments: it takes a message and {second_argument}"
            raise ConfigurationError(
                f"the handler {name}{signature} cannot be called with {wanted}; with `batch` a "
                "list of messages"
            ) from None


async def take(
    engine: Engine, count: int, max_wait_s: float, call: HandlerCall
) -> list[ReceivedMessage]:
    """Return up to `count` messages, at least one unless the consumer stops.

    Messages whose partition is lost meanwhile are not among them.

    Args:
        max_wait_s: how long to wait for more than one, seconds.
    """
    time, until_s = engine.time, 0.0
    messages: list[ReceivedMessage] = []

    def mine() -> list[ReceivedMessage]:
        # One that was given back and taken again has its last place.
        found = [each for each in reversed(messages) if call_of(each) is call]
        return list(dict.fromkeys(found))[::-1]

    call.collecting = True
    try:
        while len(messages) < count:
            message = engine.next(call, together=True, more=bool(messages))
            if message is not None:
                if message.alone and messages:
                    engine.partitions.give_back([message])
                    break
                messages.append(message)
                if message.alone:
                    break
                messages += engine.more(call, message, count - len(messages))
                until_s = until_s or time() + max_wait_s
                continue
            # Some may have been given back, because their lease ended.
            messages = mine()
            if engine.stopping or (messages and time() >= until_s):
                break
            if messages:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(engine.wait(), until_s - time())
            else:
                until_s = 0.0
                await engine.wait()
    except BaseException:
        engine.partitions.give_back(mine())
        raise
    finally:
        call.collecting = False
    found, partitions = mine(), engine.partitions
    if found and found[0] is partitions.alone.message and not await partitions.note_alone(call):
        return await take(engine, count, max_wait_s, call)
    return found


async def iterate(
    engine: Engine, count: int, max_wait_s: float, in_flight_max: int
) -> AsyncGenerator[list[ReceivedMessage], None]:
    """Yield batches of messages until the consumer stops; the caller calls `done` or `failed`."""
    while True:
        while engine.calls >= in_flight_max and not engine.stopping:
            await engine.waiting.wait(engine.waiting.watchers)
        # One call for a batch: messages of one lane may follow each other in it.
        if messages := await take(engine, count, max_wait_s, HandlerCall()):
            yield messages
        elif engine.error is not None:
            raise engine.error
        elif engine.stopping:
            return


class Workers:
    """Tasks that call a handler. There are as many as are busy at the same time, at most `count`.

    Args:
        engine: hands out the messages.
        handler: see `Handler`.
        options: see `HandlerOptions`.
    """

    def __init__(self, engine: Engine, handler: Handler, options: HandlerOptions) -> None:
        results = options.results
        check_handler(handler, "" if results is None else results.second_argument)
        if results is not None:
            results.check(handler, batch=options.batch > 0)
        for stage in options.then:
            check_handler(stage)
        self._engine = engine
        self._options = options
        self._pool: ThreadPoolExecutor | None = None
        self._loop = asyncio.get_running_loop()
        self._threads = not all(map(is_coroutine_function, (handler, *options.then)))
        if results is None:
            handler = self._threaded(handler)
        if results is not None or options.then:
            handler = self._staged(handler)
        if options.before is not None or options.after is not None:
            handler = self._hooked(handler)
        self._handler = handler
        self._workers: list[_Worker] = []

    def _staged(self, handler: Handler) -> Handler:
        """Return a function that calls the stages that a message has not passed, in order."""
        engine, results, is_batch = self._engine, self._options.results, self._options.batch > 0
        later = [self._threaded(stage) for stage in self._options.then]
        engine.settlement.staged = bool(later)
        first = None if results is None else results.around(engine, handler)

        async def call(argument: Any) -> None:
            messages = argument if is_batch else [argument]
            if fresh := [message for message in messages if not message.stage]:
                given = fresh if is_batch else argument
                if first is not None:
                    await first(fresh, given)
                else:
                    await handler(given)
            if later:
                await run_later(messages, fresh, argument)
            passed = [each for each in messages if each.stage > len(later)]
            if passed and results is not None:
                await results.finished(engine, passed)

        async def run_later(
            messages: Sequence[ReceivedMessage], fresh: Sequence[ReceivedMessage], argument: Any
        ) -> None:
            # The partitions of some may be lost meanwhile.
            calls = map(call_of, messages)
            by = next((each for each in calls if each is not None), None)
            reports = None if by is None else by.reports
            failed = {} if reports is None else reports  # it grows while the stages run
            for message in _passed(fresh, failed) if first is None else ():
                message.stage = 1
            for number, stage in enumerate(later, 1):
                if by is not None and by.interrupted:
                    raise asyncio.CancelledError  # its lease has ended while a thread went on
                if due := [each for each in _passed(messages, failed) if each.stage == number]:
                    await stage(due if is_batch else argument)
                for message in _passed(due, failed):
                    message.stage += 1

        return call

    def _threaded(self, handler: Handler) -> Handler:
        """Return a coroutine function that calls a plain handler in a thread."""
        if is_coroutine_function(handler):
            return handler
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._options.count, "txbroker-handler")
        pool = self._pool

        def in_thread(argument: Any) -> Any:
            try:
                return handler(argument)
            except StopIteration as error:  # no future takes it
                raise RuntimeError("the handler raised StopIteration") from error

        async def call(argument: Any) -> None:
            result = await until_end(self._loop.run_in_executor(pool, in_thread, argument))
            if inspect.isawaitable(result):  # of a function that calls a coroutine function
                await result

        return call

    def _hooked(self, handler: Handler) -> Handler:
        before, after = self._options.before, self._options.after

        async def call(argument: Any) -> None:
            messages = argument if isinstance(argument, list) else [argument]
            error: BaseException | None = None
            for message in messages if before is not None else ():
                await _maybe(before, message)
            try:
                await handler(argument)
            except BaseException as raised:
                error = raised
                raise
            finally:
                for message in messages if after is not None else ():
                    assert after is not None
                    by = call_of(message)
                    reports = by.reports if by is not None else None
                    await self._after(after, message, (reports or {}).get(message, error))

        return call

    async def _after(
        self, hook: After | None, message: ReceivedMessage, error: BaseException | None
    ) -> None:
        try:
            await _maybe(hook, message, error)
        except Exception as raised:  # the handler's result stands
            self._engine.lines.note(log.error, "hook failed", error=raised, message=repr(message))

    async def run(self, drain_s: float) -> None:
        """Handle messages until the engine stops, then those in flight for up to `drain_s`.

        Raises: the error that ended the consumer.
        """
        self._workers = [_Worker(self) for _ in range(self._options.count)]
        tasks = [worker.task for worker in self._workers]
        timeout_s = self._options.timeout_s
        poll_s = _POLL_S if timeout_s is None else min(_POLL_S, timeout_s / 4)
        pending, until_s = set(tasks), math.inf
        try:
            while pending and self._loop.time() < until_s:
                done, pending = await asyncio.wait(
                    pending, timeout=poll_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                self._cancel_overdue()
                if self._engine.stopping:
                    until_s = min(until_s, self._loop.time() + drain_s)
        finally:
            await _end(tasks)
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            if worker.exit is not None:
                raise worker.exit
        if self._engine.error is not None:
            raise self._engine.error

    def _cancel_overdue(self) -> None:
        timeout_s, now_s = self._options.timeout_s, self._loop.time()
        if timeout_s is None or self._threads:
            return  # a thread cannot be cancelled
        for worker in self._workers:
            if worker.untimed or worker.since_s is None:
                continue
            if now_s - worker.since_s > timeout_s:
                worker.cancel(HandlerTimeout(f"no result within {timeout_s:g} s"))


class _Worker(HandlerCall):
    """One task.

    Attributes:
        exit: the handler wants the process to end.
    """

    def __init__(self, workers: Workers) -> None:
        self._engine = workers._engine
        self._options = workers._options
        self._handler = workers._handler
        self.exit: BaseException | None = None
        self.interrupted = False
        self._reason: BaseException | None = None
        self.task = asyncio.create_task(self._run(), name="txbroker handler")

    def cancel(self, reason: BaseException | None) -> None:
        """Cancel the handler. The messages fail for this reason, None: they are given back."""
        ended = asyncio.current_task() is self.task  # and its result was refused
        if not self.interrupted and self.since_s is not None and not ended:
            self.interrupted, self._reason = True, reason
            self.task.cancel()

    async def _run(self) -> None:
        engine, handler, batch = self._engine, self._handler, self._options.batch
        exact = self._options.results is not None
        partitions, finish = engine.partitions, engine.settlement.finish
        time = asyncio.get_running_loop().time
        began_s = time()
        while True:
            # While it waits it keeps no messages, whose partition may be lost.
            argument: Any = None
            messages: Sequence[ReceivedMessage] = ()
            error: BaseException | None = None
            # Hot path: a handler that does not wait costs no switch between tasks.
            argument = engine.next(self) if not batch else await self._take()
            if not argument:
                if engine.stopping:
                    return
                await engine.wait()
                began_s = time()
                continue
            if argument is partitions.alone.message:
                if not await partitions.note_alone(self):
                    continue
                engine.now_s = time()
            messages = argument if batch else (argument,)
            self.since_s = now_s = engine.now_s
            if exact and not batch:
                self.reports = {}  # results count once they are stored
            try:
                await handler(argument)
            except (KeyboardInterrupt, SystemExit) as raised:
                self._end_process(messages, raised)
                return
            except (Exception, asyncio.CancelledError) as raised:
                error = raised
            self.since_s = None
            if error is None and not (self.reports or self.interrupted):
                self.reports = None
                if self.outputs:
                    engine.produce(messages[0], self.outputs, self)  # a batch has none
                    self.outputs = ()
                else:
                    finish(messages, self)
            else:
                self._settle(messages, error)
            if self.task.cancelling():
                raise asyncio.CancelledError
            if now_s - began_s > _BURST_S:
                await engine.waiting.let_others_run()
                began_s = time()

    async def _take(self) -> list[ReceivedMessage]:
        self.reports = {}
        return await take(self._engine, self._options.batch, self._options.max_wait_s, self)

    def _end_process(self, messages: Sequence[ReceivedMessage], raised: BaseException) -> None:
        """The handler wants the process to end. Raised again by `Workers.run`: in a task it would
        end the event loop at once."""
        self.exit = raised
        if isinstance(raised, SystemExit):
            for message in messages:
                message.feed.partition.starts.exits = True
        self._engine.stop()

    def _settle(self, messages: Sequence[ReceivedMessage], error: BaseException | None) -> None:
        """Take the results of a call that did not simply succeed."""
        cancelled, reason = self.interrupted, self._reason
        if cancelled:
            self.interrupted, self._reason = False, None
            self.task.uncancel()
        reports, self.reports = self.reports or {}, None
        outputs, self.outputs = self.outputs, ()
        if isinstance(error, asyncio.CancelledError):
            if reason is not None:
                error = reason
            elif cancelled or self.task.cancelling():
                self._engine.cancelled(messages, self)
                return
        divided = error is not None and len(messages) > 1 and not self._engine.before
        if divided and error is not None and not isinstance(error, RolledBack):
            self._engine.lines.note(
                log.warning, "batch divided", error=error, messages=len(messages)
            )
        again: list[ReceivedMessage] = []
        failed: list[tuple[ReceivedMessage, BaseException]] = []
        for message, result in self._results(messages, error, reports, divided=divided):
            if result is None and outputs:
                self._engine.produce(message, outputs, self)
            elif result is None:
                self._engine.settlement.finish((message,), self)
            elif isinstance(result, RolledBack):
                again.append(message)
            else:
                failed.append((message, result))
        if again:
            self._engine.partitions.give_back(again)
        for message, result in failed:
            self._engine.fail_message(message, result, self)

    def _results(
        self,
        messages: Sequence[ReceivedMessage],
        error: BaseException | None,
        reports: Mapping[ReceivedMessage, BaseException | None],
        *,
        divided: bool,
    ) -> Iterator[tuple[ReceivedMessage, BaseException | None]]:
        """Yield the result of each message that the call still has; `RolledBack`: it is handled
        again. A message without a separate result has that of the call.

        The error of a call with several messages (`divided`) may be that of one of them. Those
        without a separate result are handled alone, so that no failure counts against another
        message; so are, exactly once, those that were reported as failed, as nothing of the batch
        is stored.

        After a message that failed, later ones of its lane are handled again, after it; nothing is
        with at most once.
        """
        exact, before = self._options.results is not None, self._engine.before
        lanes = set()
        for message in messages:
            if call_of(message) is not self:
                continue
            result = reports.get(message, error)
            if divided and (exact or message not in reports):
                if result is not None and not isinstance(result, RolledBack):
                    message.alone = True
                    message.attempt += 1
                result = RolledBack()
            elif result is None and (exact or isinstance(error, RolledBack)):
                result = error  # exactly once `message.done()` stores nothing
            if message.lane is not None and message.lane in lanes and not before:
                result = RolledBack()
            if result is not None and (divided or not isinstance(result, RolledBack)):
                lanes.add(message.lane)
            yield message, result


def _passed(
    messages: Sequence[ReceivedMessage], failed: Mapping[ReceivedMessage, BaseException | None]
) -> list[ReceivedMessage]:
    """Return the messages that have not failed, and follow none in its lane that has."""
    lanes, passed = set(), []
    for message in messages:
        if failed.get(message) is not None:
            lanes.add(message.lane)
        elif message.lane is None or message.lane not in lanes:
            passed.append(message)
    return passed


def is_coroutine_function(handler: object) -> bool:
    """Return whether a handler is called on the event loop."""
    return _is(inspect.iscoroutinefunction, handler)


async def until_end(future: asyncio.Future[T]) -> T:
    """Return the result of a call in a thread, which cannot be cancelled: the first attempt waits
    for it, so that its message is not handled twice at the same time."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        return await future


def _is(kind: Callable[[Any], bool], handler: object) -> bool:
    """Return whether a function, or an object that can be called, is of a kind."""
    return kind(handler) or kind(type(handler).__call__)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel workers. Handlers that go on after the second time are left alone."""
    pending = set(tasks)
    for _ in range(2):
        for task in pending:
            task.cancel()
        if pending:
            _done, pending = await asyncio.wait(pending, timeout=_CANCELLED_S)
    if pending:
        log.error("handlers do not end when cancelled", handlers=len(pending))


async def _maybe(hook: Callable[..., Awaitable[None] | None] | None, *arguments: Any) -> None:
    if hook is not None:
        result = hook(*arguments)
        if inspect.isawaitable(result):
            await result
