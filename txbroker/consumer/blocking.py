"""The consumer for code that blocks: its event loop runs in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from msgspec import Struct

from txbroker.consumer.consumer import Consumer
from txbroker.consumer.engine.workers import Handler
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.settings import ConsumerOptions
from txbroker.consumer.statistics import Statistics
from txbroker.door.consuming import HasConsumingDoor
from txbroker.errors import ConfigurationError
from txbroker.metrics import Collector

T = TypeVar("T")


class BlockingConsumer:
    """`Consumer` with the same names, for code without an event loop; handlers run in threads.

    Its methods may be called from any thread, and `stop` also from a handler or signal handler.

    Example:
        with BlockingConsumer("kafka:9092", group="stock", topics=["orders"]) as consumer:
            consumer.run(book)

    Args and errors: as `Consumer`.
    """

    def __init__(self, kafka: str | HasConsumingDoor, **options: Unpack[ConsumerOptions]) -> None:
        self._consumer = Consumer(kafka, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """As `Consumer.start`; `with` does it."""
        if self._loop is not None:
            raise ConfigurationError("the consumer is started already")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="txbroker-consumer", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._consumer.start())
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """As `Consumer.aclose`."""
        if self._loop is not None:
            try:
                self._run(self._consumer.aclose())
            finally:
                self._end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        handler: Handler,
        *,
        then: Sequence[Handler] = (),
        batch: int = 0,
        max_wait_s: float = 0.1,
    ) -> None:
        """As `Consumer.run`: returns after `stop`."""
        self._run(self._consumer.run(handler, then=then, batch=batch, max_wait_s=max_wait_s))

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages until `stop`; call `done` or `failed` of each."""
        return self._iterate(aiter(self._consumer))

    def batches(self, count: int, max_wait_s: float = 0.1) -> Iterator[list[ReceivedMessage]]:
        """As `Consumer.batches`."""
        return self._iterate(self._consumer.batches(count, max_wait_s))

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> T:
            return await anext(items)

        try:
            while True:
                try:
                    item = self._run(following())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._loop is not None and isinstance(items, AsyncGenerator):
                self._run(items.aclose())

    def stop(self) -> None:
        """As `Consumer.stop`."""
        self._consumer.stop()

    def suspend(
        self, topic: str | None = None, partition: int | None = None, key: bytes | None = None
    ) -> None:
        """As `Consumer.suspend`."""
        self._call(lambda: self._consumer.suspend(topic, partition, key))

    def resume(
        self, topic: str | None = None, partition: int | None = None, key: bytes | None = None
    ) -> None:
        """As `Consumer.resume`."""
        self._call(lambda: self._consumer.resume(topic, partition, key))

    def statistics(self) -> Statistics:
        """As `Consumer.statistics`."""
        return self._call(self._consumer.statistics)

    def collector(self) -> Collector:
        """As `Consumer.collector`."""
        return self._consumer.collector()

    # --- the thread --------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result; an interruption cancels it there."""
        if self._loop is None or threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("the consumer is not started: use `with` or `start`")
        future = asyncio.run_coroutine_threadsafe(_kept(work), self._loop)
        try:
            result = future.result()
        except BaseException:
            future.cancel()
            raise
        if isinstance(result, _Exit):
            raise result.error
        return result

    def _call(self, call: Callable[[], T]) -> T:
        async def work() -> T:
            return call()

        return self._run(work())

    def _end(self) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None
        assert thread is not None
        self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class _Exit(Struct):
    error: BaseException


async def _kept(work: Coroutine[Any, Any, T]) -> T | _Exit:
    """Return an error that would end the event loop before the caller knows of it."""
    try:
        return await work
    except (KeyboardInterrupt, SystemExit) as error:
        return _Exit(error)
