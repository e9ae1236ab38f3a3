"""An event loop with virtual time and simulated processes, driven by nothing but the seed.

Every callback belongs to a process, found through its context: so a whole proxy, with all tasks
that it ever began, can be stopped at any step, go on later, or be gone for good. Within a process
callbacks run in the order in which asyncio runs them; between processes nothing is shared but
messages, and those take their time from the seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import inspect
import itertools
import logging
import os
import random
import secrets
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import structlog


class Life(Enum):
    """What a simulated process does."""

    RUNS = "runs"
    PAUSED = "paused"
    """As after SIGSTOP: time goes on, and it does not notice."""
    DEAD = "dead"
    """As after SIGKILL: nothing of it runs any more, not even what cleans up."""


class Handle:
    """A callback that waits for its turn or its time: asyncio's own costs twice as much."""

    __slots__ = ("_when", "args", "callback", "cancelled_", "context")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context,
        when: float,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.cancelled_ = False
        self._when = when

    def cancel(self) -> None:
        """Let it not happen."""
        self.cancelled_ = True

    def cancelled(self) -> bool:
        """Whether it will not happen."""
        return self.cancelled_

    def when(self) -> float:
        return self._when


class Process:
    """A simulated process: a proxy, the clients, the brokers.

    Args:
        name: of it and its successors.
        seed: of the loop's random numbers.
    """

    def __init__(self, name: str, seed: str) -> None:
        self.name = name
        self.life = Life.RUNS
        self.random = random.Random(seed)
        self.wall_ahead_s = 0.0
        """How far this machine's wall clock is off; its monotonic clock is right."""
        self.steps = 0
        self.fuse = -1
        """After this number of steps `at_fuse` is called, in the middle of any work."""
        self.at_fuse: Callable[[], None] = _nothing
        self.backlog: deque[Handle] = deque()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.life.value}>"


def _nothing() -> None:
    return None


def _refuse_files(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this run has no databases")


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("PROCESS")
"""Whose callback runs."""


class Stuck(Exception):
    """Nothing is left to be done, or far too much was."""


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on where it lies in memory."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """The loop. `steps_max` bounds what one run may do."""

    def __init__(self, steps_max: int = 2_000_000) -> None:
        super().__init__()
        self._now_s = 0.0
        self._queue: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()
        self._steps_max = steps_max
        self._over = False
        self.steps = 0
        self.tasks: list[_Task] = []
        self.troubles: list[str] = []
        self.connect: Callable[..., Any] = _refuse_files
        """Opens what would be a file of SQLite."""
        _Task._numbers = itertools.count(1)
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_trouble)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> _Task:
        task = _Task(coroutine, loop=loop, **given)
        self.tasks.append(task)
        if len(self.tasks) > 4096:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def _note_trouble(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (self._over or isinstance(error, asyncio.CancelledError)):
            self.troubles.append(f"{context.get('message')}: {error!r}")

    # --- what asyncio asks of a loop -------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual time, seconds since the run began."""
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        """Run a callback as soon as its turn comes."""
        handle = Handle(callback, args, context or contextvars.copy_context(), self._now_s)
        if not self._over:
            self._queue.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        """Run a callback after `delay` virtual seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        handle = Handle(callback, args, context or contextvars.copy_context(), when)
        if not self._over:
            heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """There are no threads: what others do in one is done a little later."""
        future = self.create_future()
        delay_s = PROCESS.get().random.random() * 0.01
        self.call_later(delay_s, _carry_out, future, function, args)
        return future

    # --- running ---------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, Any], process: Process) -> Any:
        """Run a coroutine of a process to its end, with all concurrent work.

        Raises:
            Stuck: it never ends.
        """
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main, context=process.context)
            while not task.done():
                self._step()
            return task.result()
        finally:
            self._end()
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        if not self._queue:
            self._move_on()
        handle = self._queue.popleft()
        if handle.cancelled_:
            return
        process = handle.context[PROCESS]
        if process.life is not Life.RUNS:
            if process.life is Life.PAUSED:
                process.backlog.append(handle)
            return
        self.steps += 1
        process.steps += 1
        if process.fuse >= 0:
            process.fuse -= 1
            if process.fuse < 0:
                # Before this step: it is the first one that does not happen.
                self._queue.appendleft(handle)
                process.at_fuse()
                return
        if self.steps > self._steps_max:
            raise Stuck(f"{self.steps} steps and no end")
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self.troubles.append(f"{handle.callback}: {error!r}")

    def _move_on(self) -> None:
        """Let time pass until something is to be done."""
        timers = self._timers
        while timers and timers[0][2].cancelled_:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("no scheduled event is left")
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled_:
                self._queue.append(handle)

    def resume(self, process: Process) -> None:
        """Let a paused process go on with all that has come meanwhile."""
        if process.life is Life.PAUSED:
            process.life = Life.RUNS
            self._queue.extend(process.backlog)
            process.backlog.clear()

    def _end(self) -> None:
        self._over = True
        self._queue.clear()
        self._timers.clear()
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False
                try:
                    task.get_coro().close()  # type: ignore[union-attr]
                except BaseException:
                    continue
        self.tasks.clear()


def _carry_out(
    future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)


# --- the machine: clocks, random numbers, and names that are unique by chance --------------------

START_S = 1_700_000_000.0
"""When each run begins, by a clock that is right, seconds since 1970."""


def wall_s() -> float:
    """Return the wall clock of the calling process's machine, seconds since 1970."""
    loop = asyncio.get_running_loop()
    return START_S + loop.time() + PROCESS.get().wall_ahead_s


def wall_ms() -> int:
    return int(wall_s() * 1000)


class _Time:
    """In place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        """The monotonic clock. It begins somewhere, as everywhere."""
        return 5000.0 + asyncio.get_running_loop().time()

    time = staticmethod(wall_s)

    @staticmethod
    def time_ns() -> int:
        return int(wall_s() * 1e9)


class _Random:
    """In place of the module `random`: every process has its own numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(PROCESS.get().random, name)


class _Os:
    """In place of the module `os`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def urandom(size: int) -> bytes:
        return PROCESS.get().random.randbytes(size)

    @staticmethod
    def getpid() -> int:
        return 1


class _Uuid:
    """In place of the module `uuid`."""

    @staticmethod
    def uuid4() -> uuid.UUID:
        """A name that is unique within the run."""
        return uuid.UUID(int=PROCESS.get().random.getrandbits(128), version=4)


class _Secrets:
    """In place of the module `secrets`."""

    @staticmethod
    def randbits(bits: int) -> int:
        return PROCESS.get().random.getrandbits(bits)

    @staticmethod
    def token_hex(size: int) -> str:
        return PROCESS.get().random.randbytes(size).hex()


_time, _random = _Time(), _Random()
STAND_INS: dict[Any, Any] = {
    time: _time,
    random: _random,
    uuid: _Uuid(),
    secrets: _Secrets(),
    os: _Os(),
}
"""What txbroker's modules name, and what they find instead. Other parts of the simulation add to
it."""
_FUNCTIONS: dict[Any, Any] = {
    time.monotonic: _time.monotonic,
    time.time: _time.time,
    random.random: lambda: PROCESS.get().random.random(),
}


def _replaced(value: Any, by: dict[Any, Any]) -> Any:
    """Return what stands for a value; the value itself for a foreign one."""
    kinds = (ModuleType, type, FunctionType, type(time.time), type(random.random))
    return by.get(value, value) if isinstance(value, kinds) else value


def _ours() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "txbroker" and isinstance(module, ModuleType)
    ]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType):
            yield value
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            yield from (each for each in vars(value).values() if isinstance(each, FunctionType))


@contextmanager
def simulated_machine(heard: Callable[[str], None] | None = None) -> Iterator[None]:
    """Let every module of txbroker that is imported by now take all of this from the simulation.

    Args:
        heard: called with every line that txbroker logs, if given.
    """
    undo: list[Callable[[], None]] = []
    for module in _ours():
        for name, value in list(vars(module).items()):
            instead = _replaced(value, STAND_INS)
            if instead is not value:
                setattr(module, name, instead)
                undo.append(partial(setattr, module, name, value))
        for function in _functions(module):
            undo.extend(_replace_defaults(function))
    settings, disabled = structlog.get_config(), logging.root.manager.disable
    _listen(heard)
    collects = gc.isenabled()
    # Garbage of a run is collected between runs: it is faster, and happens at no other
    # moment when the same run comes again.
    gc.disable()
    gc.freeze()
    unraisable = sys.unraisablehook
    # Objects collected in the middle of their work may raise.
    sys.unraisablehook = _ignore
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = unraisable
        gc.unfreeze()
        if collects:
            gc.enable()
        for each in undo:
            each()
        structlog.configure(**settings)
        logging.disable(disabled)


def _replace_defaults(function: FunctionType) -> Iterator[Callable[[], None]]:
    plain, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    new_plain = tuple(_replaced(value, _FUNCTIONS) for value in plain)
    new_named = {name: _replaced(value, _FUNCTIONS) for name, value in named.items()}
    for name, old, new in (
        ("__defaults__", plain, new_plain),
        ("__kwdefaults__", named, new_named),
    ):
        if new != old:
            setattr(function, name, new)
            yield partial(setattr, function, name, old)


class _Silent(structlog.BoundLoggerBase):
    """A logger that drops everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    return None


def _listen(heard: Callable[[str], None] | None) -> None:
    logging.disable(logging.CRITICAL)
    if heard is None:
        structlog.configure(wrapper_class=_Silent, cache_logger_on_first_use=False)
        return

    def record(_: Any, level: str, event: dict[str, Any]) -> Any:
        fields = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
        at_s, who = asyncio.get_running_loop().time(), PROCESS.get().name
        heard(f"{at_s:10.4f} {who}: {level}: {event.get('event')} {fields}")
        raise structlog.DropEvent

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        processors=[record],
        cache_logger_on_first_use=False,
    )
