"""Blocking calls apart from the event loop's threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest

from txbroker.checkers import daemon_threads
from txbroker.checkers.daemon_threads import LATE_MAX, DaemonThreads, TooManyCalls

HANGING = """
import asyncio, threading
from txbroker.checkers.daemon_threads import DaemonThreads

async def main():
    threads = DaemonThreads("hanging", 4, 4)
    calls = [threads.run(str(n), threading.Event().wait) for n in range(20)]
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.1)
    await threads.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    print("closed")

asyncio.run(main())
"""


def test_hanging_calls_do_not_block_process_exit() -> None:
    """As at SIGTERM, which ends the event loop and joins its threads."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "closed\n"


async def test_concurrent_calls_with_one_key_share_the_result() -> None:
    threads = DaemonThreads[int]("counting", 4, 4)
    go_on, called = threading.Event(), []

    def call() -> int:
        called.append(threading.current_thread().daemon)
        go_on.wait(60)
        return len(called)

    waiting = [asyncio.create_task(threads.run("key", call, f"g{n}")) for n in range(10)]
    waiting[0].cancel()  # a cancelled waiter does not affect the others
    while not called:
        await asyncio.sleep(0)
    go_on.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results[1:] == [1] * 9
    assert called == [True]
    assert await threads.run("key", call) == 2


async def test_calls_per_asker_are_limited() -> None:
    threads = DaemonThreads[bool]("bounded", 8, 2)
    go_on = threading.Event()

    def call() -> bool:
        return go_on.wait(60)

    waiting = [asyncio.create_task(threads.run(f"{n}", call, "one")) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyCalls):
        await threads.run("2", call, "one")
    other = asyncio.create_task(threads.run("3", call, "other"))
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*waiting, other) == [True] * 3
    assert await threads.run("2", call, "one")


async def test_exception_is_raised_at_every_waiter() -> None:
    threads = DaemonThreads[int]("failing", 1, 1)

    def call() -> int:
        raise OSError("no such thing")

    for _ in range(3):
        with pytest.raises(OSError, match="no such thing"):
            await threads.run("key", call, "one")


class Hanging:
    """Calls that hang until they are let go."""

    def __init__(self, threads: DaemonThreads[bool]) -> None:
        self.running: list[str] = []
        self._threads = threads
        self._go_on = threading.Event()

    def begin(self, count: int) -> list[asyncio.Task[bool]]:
        self.running.clear()
        self._go_on.clear()
        keys = [f"{n}" for n in range(count)]
        return [
            asyncio.create_task(self._threads.run(key, partial(self._hang, key), f"asker {key}"))
            for key in keys
        ]

    async def wait_running(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.running) < count:
                await asyncio.sleep(0)

    async def end(self, calls: list[asyncio.Task[bool]]) -> None:
        self._go_on.set()
        assert await asyncio.gather(*calls) == [True] * len(calls)

    def _hang(self, key: str) -> bool:
        self.running.append(key)
        return self._go_on.wait(60)


async def test_late_calls_free_threads_for_others() -> None:
    """At the first time once they are late, later from the start."""
    threads = DaemonThreads[bool]("late", 1, 1, late_s=0.01)
    hanging = Hanging(threads)
    for at_once in (LATE_MAX + 2, LATE_MAX):
        late = hanging.begin(LATE_MAX + 2)
        await hanging.wait_running(at_once)
        async with asyncio.timeout(30):
            assert await threads.run("good", lambda: True)
        assert len(hanging.running) == at_once
        await hanging.end(late)
    await threads.close()


async def test_late_key_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all have failed, no call waits for ever for hanging ones."""
    threads = DaemonThreads[bool]("late", 1, 1, late_s=0.01)
    hanging = Hanging(threads)
    all_of_them = hanging.begin(LATE_MAX + 1)
    await hanging.wait_running(LATE_MAX + 1)
    async with asyncio.timeout(30):
        assert await threads.run("good", lambda: True)  # after the last of them
    await hanging.end(all_of_them)
    late = hanging.begin(LATE_MAX)
    await hanging.wait_running(LATE_MAX)
    monkeypatch.setattr(daemon_threads, "LATE_FOR_S", 0.0)
    async with asyncio.timeout(30):
        assert await threads.run(f"{LATE_MAX}", lambda: True)
    await hanging.end(late)
    await threads.close()
