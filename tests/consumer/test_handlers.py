"""Handlers of every kind, also hostile ones; hooks; the pull form."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.consumer_world import Handler, World, counted, text, texts
from tests.kit.until import until
from txbroker.consumer import HandlerTimeout, ReceivedMessage
from txbroker.consumer.engine import workers as consumer_workers
from txbroker.errors import ConfigurationError

BUG = ValueError("bug")


def handlers(seen: list[str]) -> dict[str, Callable[..., Any]]:
    async def coroutine(message: ReceivedMessage) -> None:
        seen.append(text(message))

    def plain(message: ReceivedMessage) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.append(text(message))

    class Callables:
        def __call__(self, message: ReceivedMessage) -> None:
            plain(message)

        async def method(self, message: ReceivedMessage) -> None:
            await coroutine(message)

    class Async:
        async def __call__(self, message: ReceivedMessage, extra: int = 0) -> None:
            await coroutine(message)

    async def two(_first: int, message: ReceivedMessage) -> None:
        await coroutine(message)

    return {
        "coroutine": coroutine,
        "plain": plain,
        "object": Callables(),
        "method": Callables().method,
        "async object": Async(),
        "partial": functools.partial(two, 1),
        "lambda that returns a coroutine": lambda message: coroutine(message),
    }


@pytest.mark.parametrize("kind", handlers([]))
async def test_kinds_of_handlers(world: World, kind: str) -> None:
    seen: list[str] = []
    world.produce("1", "2")
    async with world.running(handlers(seen)[kind], order="partition"):
        await until(lambda: seen == ["1", "2"])
        await world.commits(2)


async def _two(one: int, other: int) -> None: ...


async def _generator(message: ReceivedMessage) -> Any:
    yield message


def _plain_generator(message: ReceivedMessage) -> Any:
    yield message


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (None, "cannot be called: pass a function"),
        ("handle", "cannot be called: pass a function"),
        (_two, "cannot be called with one argument"),
        (lambda: None, "cannot be called with one argument"),
        (_generator, "contains `yield`"),
        (_plain_generator, "contains `yield`"),
    ],
)
async def test_handlers_of_the_wrong_shape(world: World, handler: Any, says: str) -> None:
    async with world.consumer() as consumer:
        with pytest.raises(ConfigurationError, match=says):
            await consumer.run(handler)


@pytest.mark.parametrize(
    ("option", "value"), [("batch", "x"), ("batch", -1), ("batch", 1.5), ("then", print)]
)
async def test_options_of_the_wrong_type(world: World, option: str, value: Any) -> None:
    async with world.consumer() as consumer:
        with pytest.raises(ConfigurationError, match=f"{option} is .*: it is a"):
            await consumer.run(_raising(Odd(), threads=False), **{option: value})


class Odd(BaseException):
    pass


def _raising(error: BaseException, *, threads: bool) -> Callable[..., Any]:
    failed: list[str] = []

    def once(message: ReceivedMessage) -> None:
        failed.append(text(message))
        if len(failed) == 1:
            raise error

    async def in_loop(message: ReceivedMessage) -> None:
        once(message)

    return once if threads else in_loop


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), StopIteration(), StopAsyncIteration(), GeneratorExit()]
)
async def test_odd_errors_are_failures(world: World, error: BaseException, threads: bool) -> None:
    if isinstance(error, GeneratorExit):
        error = RuntimeError("as any other")
    world.produce("1", "2")
    async with world.running(_raising(error, threads=threads)) as consumer:
        await world.commits(2)
        assert counted(consumer, "failed") == 1


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Odd("odd")])
async def test_fatal_errors_end_run(world: World, error: BaseException, threads: bool) -> None:
    world.produce("1", "2")
    async with world.consumer() as consumer:
        with pytest.raises(type(error)):
            await consumer.run(_raising(error, threads=threads))
    assert world.committed()[0] == 0, "the message is not done"


async def test_handler_that_swallows_cancellation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_workers, "_CANCELLED_S", 0.1)
    world.produce("1", "2")
    free = asyncio.Event()

    async def stubborn(_message: ReceivedMessage) -> None:
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    async with world.consumer(drain_s=0.1) as consumer:
        task = asyncio.create_task(consumer.run(stubborn))
        await until(lambda: consumer.statistics().in_flight == 1)
        consumer.stop()
        await asyncio.wait_for(task, 5)
    assert world.committed()[0] == 0
    free.set()
    await asyncio.sleep(0.01)
    assert world.committed()[0] == 0


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once"])
async def test_cancelled_run_gives_back_what_was_in_flight(world: World, mode: str) -> None:
    world.produce("1", "2", "3")
    started = asyncio.Event()

    async def stuck(_message: ReceivedMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    async with world.consumer(mode=mode) as consumer:
        task = asyncio.create_task(consumer.run(stuck))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        handler = Handler()
        task = asyncio.create_task(consumer.run(handler))
        await handler.does(*(["1", "2", "3"] if mode == "at-least-once" else ["2", "3"]))
        consumer.stop()
        await task
    assert world.committed()[0] == 3


@pytest.mark.parametrize("batch", [0, 2])
async def test_timeout_of_coroutines(world: World, batch: int) -> None:
    world.produce("1", "2")
    errors: list[BaseException | None] = []
    calls = 0

    async def slow(_argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()

    def after(_message: ReceivedMessage, error: BaseException | None) -> None:
        errors.append(error)

    async with world.running(
        slow, run={"batch": batch}, handler_timeout_s=0.05, after=after
    ) as consumer:
        await world.commits(2)
        assert counted(consumer, "failed") == (0 if batch else 1), "a batch is divided"
    assert isinstance(errors[0], asyncio.CancelledError)
    assert errors[-1] is None


async def test_timeout_leaves_threads_alone(world: World) -> None:
    world.produce("1", "2")
    seen: list[str] = []

    def slow(message: ReceivedMessage) -> None:
        seen.append(text(message))
        time.sleep(0.1)

    async with world.running(slow, handler_timeout_s=0.02) as consumer:
        await world.commits(2)
        assert counted(consumer, "failed") == 0
    assert seen == ["1", "2"]


def test_timeout_is_a_timeout() -> None:
    assert issubclass(HandlerTimeout, TimeoutError)


@pytest.mark.parametrize("threads", [False, True])
async def test_stop_from_the_handler(world: World, threads: bool) -> None:
    world.produce(*(str(number) for number in range(50)))
    seen: list[str] = []
    async with world.consumer() as consumer:

        def handle(message: ReceivedMessage) -> None:
            seen.append(text(message))
            if len(seen) == 5:
                consumer.stop()

        async def in_loop(message: ReceivedMessage) -> None:
            handle(message)

        await consumer.run(handle if threads else in_loop)
    assert seen == ["0", "1", "2", "3", "4"]
    assert world.committed()[0] == 5, "messages in flight are finished"


async def test_stop_from_another_thread_and_before_start(world: World) -> None:
    consumer = world.consumer()
    async with consumer:
        task = asyncio.create_task(consumer.run(Handler()))
        await asyncio.to_thread(consumer.stop)
        await asyncio.wait_for(task, 5)
    early = world.consumer()
    early.stop()
    async with early:
        await asyncio.wait_for(early.run(Handler()), 5)


async def test_close_while_running_waits_for_handlers(world: World) -> None:
    world.produce("1")
    handler = Handler()

    async def slow(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.05)
        await handler(message)

    consumer = world.consumer()
    await consumer.start()
    task = asyncio.create_task(consumer.run(slow))
    await until(lambda: consumer.statistics().in_flight)
    await consumer.aclose()
    await task
    assert world.committed()[0] == 1


# --- hooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 3])
async def test_hooks_see_each_message_with_its_result(world: World, batch: int) -> None:
    world.produce("1", "2", "3")
    events: list[tuple[str, str]] = []

    async def before(message: ReceivedMessage) -> None:
        events.append(("before", text(message)))

    def after(message: ReceivedMessage, error: BaseException | None) -> None:
        events.append(("failed" if error else "done", text(message)))
        raise RuntimeError("a hook that fails changes no result")

    async def handle(argument: Any) -> None:
        for message in argument if batch else [argument]:
            events.append(("handle", text(message)))
            if text(message) == "2" and message.attempt == 1:
                if not batch:
                    raise BUG
                message.failed(BUG)

    async with world.running(
        handle, order="none", in_flight_max=1, before=before, after=after, run={"batch": batch}
    ):
        await world.commits(3)
    for value in "123":
        mine = [event for event, seen in events if seen == value]
        once = ["before", "handle", "done"]
        assert mine == (["before", "handle", "failed", *once] if value == "2" else once)


async def test_hook_before_that_fails_fails_the_message(world: World) -> None:
    world.produce("1")
    handler = Handler()
    failures = [BUG]

    def before(_message: ReceivedMessage) -> None:
        if failures:
            raise failures.pop()

    async with world.running(handler, before=before):
        await handler.does("1")
    assert handler.messages[0].attempt == 2


# --- pulled messages -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["none", "partition", "key"])
async def test_pull(world: World, order: str) -> None:
    world.produce("a=1", "a=2", "b=3")
    seen: list[str] = []
    async with world.consumer(order=order) as consumer:
        async for message in consumer:
            seen.append(text(message))
            if text(message) == "2" and message.attempt == 1:
                message.failed(BUG)
                message.done()
            else:
                message.done()
                message.failed(BUG)
            if len(seen) == 4:
                consumer.stop()
    assert sorted(seen) == ["1", "2", "2", "3"]
    assert world.committed()[0] == 3
    message.done()  # after the close


async def test_batches(world: World) -> None:
    world.produce(*(f"{number % 3}={number}" for number in range(10)))
    batches: list[list[str]] = []
    async with world.consumer(order="key") as consumer:
        async for messages in consumer.batches(4, max_wait_s=0.01):
            batches.append(texts(messages))
            for message in reversed(messages):
                message.done()
            if sum(map(len, batches)) == 10:
                break
    assert max(map(len, batches)) == 4
    assert [value for batch in batches for value in batch] == [str(n) for n in range(10)]
    assert world.committed()[0] == 10


async def test_messages_that_were_pulled_and_not_done_are_repeated(world: World) -> None:
    world.produce("a=1", "b=2")
    async with world.consumer(order="key", drain_s=30) as consumer:
        async for message in consumer:
            if text(message) == "2":
                message.done()
                break
    handler = Handler()
    async with world.running(handler, order="key"):
        await handler.does("1")


async def test_cancelled_pull_loses_nothing(world: World) -> None:
    world.produce("1", "2")
    async with world.consumer(order="none") as consumer:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer.batches(5, max_wait_s=60)), 0.2)
        assert consumer.statistics().in_flight == 0
        (batch,) = [await anext(consumer.batches(2))]
        assert sorted(texts(batch)) == ["1", "2"]
        for message in batch:
            message.done()


async def test_in_flight_max_bounds_pulled_messages(world: World) -> None:
    world.produce(*(str(number) for number in range(10)))
    async with world.consumer(order="none", in_flight_max=3) as consumer:
        pulled = aiter(consumer)
        messages = [await anext(pulled) for _ in range(3)]
        following = asyncio.ensure_future(anext(pulled))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not following.done()
        messages[1].done()
        messages.append(await following)
        assert sorted(texts(messages)) == ["0", "1", "2", "3"]


async def test_done_from_another_thread(world: World) -> None:
    world.produce("1", "2")
    async with world.consumer() as consumer:
        async for message in consumer:
            await asyncio.to_thread(message.done)
            if text(message) == "2":
                break
        await world.commits(2)


async def test_two_consumers_in_one_loop(world: World) -> None:
    world.produce(*(str(number) for number in range(10)))
    one, other = Handler(), Handler()
    async with world.running(one), world.running(other, group="mail"):
        await one.does(*(str(number) for number in range(10)))
        await other.does(*(str(number) for number in range(10)))


async def test_use_before_start_and_after_close(world: World) -> None:
    consumer = world.consumer()
    for use in (consumer.suspend, consumer.resume, consumer.statistics, consumer.collector):
        with pytest.raises(ConfigurationError, match="not started"):
            use()
    with pytest.raises(ConfigurationError, match="not started"):
        await consumer.run(Handler())
    await consumer.aclose()
    consumer = world.consumer()
    async with consumer:
        with pytest.raises(ConfigurationError, match="starts once"):
            await consumer.start()
        task = asyncio.create_task(consumer.run(Handler()))
        await asyncio.sleep(0)
        with pytest.raises(ConfigurationError, match="run is active already"):
            await consumer.run(Handler())
    await task
    with pytest.raises(ConfigurationError, match="starts once"):
        await consumer.start()


async def test_asyncio_debug_mode(world: World) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        world.produce("1", "2")
        handler = Handler()
        async with world.running(handler, order="key"):
            await handler.does("1", "2")
    finally:
        loop.set_debug(False)


async def test_later_stage_does_not_begin_after_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread goes on when its call is cancelled; the next stage does not follow it."""
    begun, go = threading.Event(), threading.Event()
    later: list[str] = []

    def handle(_message: ReceivedMessage) -> None:
        begun.set()
        go.wait(10)

    world.produce("a", partition=0)
    run = {"then": [lambda message: later.append(text(message))]}
    async with world.running(handle, run=run, order="key") as consumer:
        await asyncio.to_thread(begun.wait)
        monkeypatch.setattr(type(consumer._readers[0][1]), "deadline_s", 0.0)
        await until(lambda: counted(consumer, "fenced"))
        go.set()
        await until(lambda: not consumer._engine.calls)
        assert later == []
        monkeypatch.undo()
        await until(lambda: later == ["a"])


async def test_reports_count_although_another_partition_was_lost(world: World) -> None:
    """The first stage of a batch in a thread, whose first message's partition goes meanwhile."""
    begun, go = threading.Event(), threading.Event()
    first: list[list[str]] = []
    later: list[str] = []

    def handle(messages: list[ReceivedMessage]) -> None:
        first.append(texts(messages))
        if not begun.is_set():
            begun.set()
            go.wait(10)
            for message in messages:
                message.failed(ValueError("not yet"))

    world.produce("a", partition=0)
    world.produce("b", partition=1)
    run = {"then": [lambda given: later.extend(texts(given))], "batch": 2, "max_wait_s": 0.5}
    async with world.running(handle, run=run, order="key", in_flight_max=1) as consumer:
        await asyncio.to_thread(begun.wait)
        reader = consumer._readers[0][0]
        kept, (gone,) = first[0][1], [{"a": 0, "b": 1}[first[0][0]]]
        reader._drop(reader._partitions["orders", gone])
        go.set()
        await until(lambda: kept in later)
    assert [kept] in first
