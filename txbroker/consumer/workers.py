"""Calls handlers: coroutines on the event loop, plain functions in threads, one message or a batch
at a time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from msgspec import Struct

from txbroker.consumer.engine import Engine
from txbroker.consumer.message import ReceivedMessage
from txbroker.errors import ConfigurationError

Handler: TypeAlias = Callable[[Any], Any]
"""A coroutine function or a plain one. Takes a `ReceivedMessage`, or with `batch` a list."""
Before: TypeAlias = Callable[[ReceivedMessage], Awaitable[None] | None]
After: TypeAlias = Callable[[ReceivedMessage, BaseException | None], Awaitable[None] | None]

_POLL_S = 0.2
"""The time between looks at timeouts."""
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
    """

    count: int
    timeout_s: float | None = None
    batch: int = 0
    max_wait_s: float = 0.0
    before: Before | None = None
    after: After | None = None


def check_handler(handler: object) -> None:
    """Raise ConfigurationError unless `handler` can be called with one argument."""
    if not callable(handler):
        raise ConfigurationError(
            f"the handler {handler!r} cannot be called: pass a function that takes a message"
        )
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(handler)
        try:
            signature.bind(None)
        except TypeError:
            name = getattr(handler, "__name__", repr(handler))
            raise ConfigurationError(
                f"the handler {name}{signature} cannot be called with one argument: it takes a "
                "message, or with `batch` a list of messages"
            ) from None


async def take(
    engine: Engine, count: int, max_wait_s: float, holder: object
) -> list[ReceivedMessage]:
    """Return up to `count` messages, at least one unless the consumer stops.

    Args:
        max_wait_s: how long to wait for more than one, seconds.
    """
    loop, until_s = asyncio.get_running_loop(), 0.0
    messages: list[ReceivedMessage] = []
    while len(messages) < count:
        message = engine.next(holder, together=True)
        if message is not None:
            messages.append(message)
            until_s = until_s or loop.time() + max_wait_s
        elif engine.stopping or (messages and loop.time() >= until_s):
            break
        elif messages:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.wait(), until_s - loop.time())
        else:
            await engine.wait()
    return messages


async def iterate(
    engine: Engine, count: int, max_wait_s: float, in_flight_max: int
) -> AsyncIterator[list[ReceivedMessage]]:
    """Yield batches of messages until the consumer stops; the caller calls `done` or `failed`."""
    while True:
        while len(engine.in_flight) >= in_flight_max and not engine.stopping:
            await engine.waiting.watch()
        # One holder for a batch: messages of one lane may follow each other in it.
        if not (messages := await take(engine, count, max_wait_s, object())):
            return
        yield messages


class Workers:
    """Tasks that call a handler. There are as many as are busy at the same time, at most `count`.

    Args:
        engine: hands out the messages.
        handler: see `Handler`.
        options: see `HandlerOptions`.
    """

    def __init__(self, engine: Engine, handler: Handler, options: HandlerOptions) -> None:
        check_handler(handler)
        self._engine = engine
        self._options = options
        self._pool: ThreadPoolExecutor | None = None
        call = type(handler).__call__  # of an object that can be called
        if not (inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)):
            self._pool = ThreadPoolExecutor(options.count, "txbroker-handler")
            handler = self._threaded(handler)
        if options.before is not None or options.after is not None:
            handler = self._hooked(handler)
        self._handler = handler
        self._workers: list[_Worker] = []
        self._loop = asyncio.get_running_loop()

    def _threaded(self, handler: Handler) -> Handler:
        async def call(argument: Any) -> None:
            await self._loop.run_in_executor(self._pool, handler, argument)

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
                    await _maybe(after, message, error)

        return call

    async def run(self, drain_s: float) -> None:
        """Handle messages until the engine stops, then those in flight for up to `drain_s`.

        Raises: the error that ended the consumer.
        """
        self._engine.abandon = self._abandon
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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._give_back()
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
        if self._engine.error is not None:
            raise self._engine.error

    def _give_back(self) -> None:
        """Give back what workers had in flight when they ended."""
        in_flight = self._engine.in_flight.items()
        flying = [message for message, holder in in_flight if holder in self._workers]
        self._engine.give_back(sorted(flying, key=lambda message: message.record.offset))

    def _abandon(self, holders: Collection[object]) -> None:
        for holder in holders:
            if isinstance(holder, _Worker):
                holder.cancel(None)

    def _cancel_overdue(self) -> None:
        timeout_s, now_s = self._options.timeout_s, self._loop.time()
        if timeout_s is None or self._pool is not None:
            return  # a thread cannot be cancelled
        for worker in self._workers:
            if worker.since_s is not None and now_s - worker.since_s > timeout_s:
                worker.cancel(HandlerTimeout(f"no result within {timeout_s:g} s"))


class _Worker:
    """One task. `since_s` is when it called the handler, None if it does not run."""

    def __init__(self, workers: Workers) -> None:
        self._engine = workers._engine
        self._options = workers._options
        self._handler = workers._handler
        self.since_s: float | None = None
        self.reports: dict[ReceivedMessage, BaseException | None] | None = None
        """Results that the handler of a batch reports for single messages."""
        self._cancelled = False
        self._reason: BaseException | None = None
        self.task = asyncio.create_task(self._run(), name="txbroker handler")

    def cancel(self, reason: BaseException | None) -> None:
        """Cancel the handler. The messages fail for this reason, None: the result is ignored."""
        if not self._cancelled and self.since_s is not None:
            self._cancelled, self._reason = True, reason
            self.task.cancel()

    async def _run(self) -> None:
        engine, handler, batch = self._engine, self._handler, self._options.batch
        time = asyncio.get_running_loop().time
        began_s = time()
        while True:
            # Hot path: a handler that does not wait costs no switch between tasks.
            argument: Any = engine.next(self) if not batch else await self._take()
            if not argument:
                if engine.stopping:
                    return
                await engine.wait()
                began_s = time()
                continue
            self.since_s = now_s = time()
            error: BaseException | None = None
            try:
                await handler(argument)
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
                error = self._reason
            except Exception as raised:
                error = raised
            if self._cancelled:
                self._uncancel()
            self.since_s = None
            if batch:
                self._finish_batch(argument, error)
            else:
                engine.finish(argument, error)
            if now_s - began_s > _BURST_S:
                await asyncio.sleep(0)
                began_s = time()

    async def _take(self) -> list[ReceivedMessage]:
        self.reports = {}
        return await take(self._engine, self._options.batch, self._options.max_wait_s, self)

    def _finish_batch(
        self, messages: Sequence[ReceivedMessage], error: BaseException | None
    ) -> None:
        """Take the result of a batch: a message without a result of its own has that of the call.

        After a message that failed, later ones of its lane are handled again, after it.
        """
        reports, self.reports = self.reports or {}, None
        failed: list[tuple[ReceivedMessage, BaseException]] = []
        again: list[ReceivedMessage] = []
        lanes = set()
        for message in messages:
            result = reports.get(message, error)
            if message.lane is not None and message.lane in lanes:
                again.append(message)
            elif result is not None:
                failed.append((message, result))
                lanes.add(message.lane)
            else:
                self._engine.finish(message, None)
        self._engine.give_back(again)
        for message, result in failed:
            self._engine.finish(message, result)

    def _uncancel(self) -> None:
        self._cancelled, self._reason = False, None
        self.task.uncancel()


async def _maybe(hook: Callable[..., Awaitable[None] | None] | None, *arguments: Any) -> None:
    if hook is not None:
        result = hook(*arguments)
        if inspect.isawaitable(result):
            await result
