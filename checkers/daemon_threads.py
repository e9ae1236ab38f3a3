"""Blocking calls that may hang, in a few daemon threads apart from the event loop's."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

WAITING_MAX = 1024
"""Calls that wait for a thread; further ones are refused."""
LATE_MAX = 8
"""Calls in progress at a time whose key was late before."""
ASIDE_MAX = 64
"""Late calls that no longer count against `threads_max`."""
LATE_FOR_S = 60.0
"""How long a key counts as late, seconds: while a name server is down, for example, all are."""
LATE_KEYS_MAX = 4096
"""Late keys that are remembered; the oldest is dropped first."""


class TooManyCalls(OSError):
    """Too many such calls are in progress: this one is not made."""


class DaemonThreads(Generic[T]):
    """Runs blocking calls that may hang, without holding up anything else.

    Such a call cannot be cancelled. The event loop's own threads are few (uvloop has four) and
    are joined when the process ends, so recovery and shutdown would wait for it. Here each call
    has a daemon thread, and at most one call per key runs: others wait for its result.

    With `late_s`, calls that hang do not starve others: a call that takes longer no longer counts
    against `threads_max`, up to `ASIDE_MAX` calls, and for `LATE_FOR_S` calls with its key share
    `LATE_MAX` threads.

    Args:
        name: of the threads.
        threads_max: calls in progress at a time, apart from late ones.
        asker_max: calls that one asker may have in progress or waiting.
        late_s: after how many seconds a call is late; None: never.
    """

    def __init__(
        self, name: str, threads_max: int, asker_max: int, *, late_s: float | None = None
    ) -> None:
        self._name = name
        self._asker_max = asker_max
        self._late_s = late_s
        self._slots = asyncio.Semaphore(threads_max)
        self._late_slots = asyncio.Semaphore(LATE_MAX)
        self._late: dict[str, float] = {}
        """When each key became late, the oldest first."""
        self._aside = 0
        self._open: dict[str, asyncio.Task[T]] = {}
        self._askers: Counter[str] = Counter()

    async def run(self, key: str, call: Callable[[], T], asker: str = "") -> T:
        """Return the result of `call`, or raise its exception.

        The caller limits the time; the call itself runs on after a timeout.

        Args:
            key: calls with the same key are one call.
            asker: the group that needs it; "" for the proxy itself, which has no limit.

        Raises:
            TooManyCalls: nothing was called.
        """
        task = self._open.get(key)
        if task is None:
            if (asker and self._askers[asker] >= self._asker_max) or len(self._open) >= WAITING_MAX:
                raise TooManyCalls("too many such calls are in progress")
            task = asyncio.get_running_loop().create_task(self._limited(key, call))
            self._open[key] = task
            self._askers[asker] += 1
            task.add_done_callback(lambda done: self._ended(key, asker, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _limited(self, key: str, call: Callable[[], T]) -> T:
        slots = self._late_slots if self._is_late(key) else self._slots
        await slots.acquire()
        aside = False
        result = _in_thread(self._name, call)
        try:
            await asyncio.wait([result], timeout=self._late_s)
            self._late.pop(key, None)
            if not result.done():
                self._remember_late(key)
                aside = slots is self._slots and self._aside < ASIDE_MAX
            if aside:
                self._aside += 1
                slots.release()
            return await result
        finally:
            result.cancel()
            if aside:
                self._aside -= 1
            else:
                slots.release()

    def _is_late(self, key: str) -> bool:
        since_s = self._late.get(key)
        now_s = asyncio.get_running_loop().time()
        return since_s is not None and now_s < since_s + LATE_FOR_S

    def _remember_late(self, key: str) -> None:
        self._late[key] = asyncio.get_running_loop().time()
        if len(self._late) > LATE_KEYS_MAX:
            del self._late[next(iter(self._late))]

    def _ended(self, key: str, asker: str, done: "asyncio.Task[T]") -> None:
        self._open.pop(key, None)
        self._askers[asker] -= 1
        if not self._askers[asker]:
            del self._askers[asker]
        if not done.cancelled():
            done.exception()  # retrieved, as there may be no waiter left


def _in_thread(name: str, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call in a daemon thread, which does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(set_result: Callable[[], None]) -> None:
        if not result.done():
            set_result()

    def run() -> None:
        try:
            value = call()
        except Exception as error:
            failure = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, lambda: result.set_exception(failure))
        else:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, lambda: result.set_result(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
