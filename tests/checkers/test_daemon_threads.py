"""Blocking calls apart from the event loop's threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from txbroker.checkers.daemon_threads import DaemonThreads, TooManyCalls

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


def test_calls_that_hang_keep_no_process_alive() -> None:
    """As one that is told to stop by SIGTERM ends its event loop, and its threads with it."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "closed\n"


async def test_a_key_is_called_once_at_a_time_and_everybody_gets_the_result() -> None:
    threads = DaemonThreads[int]("counting", 4, 4)
    go_on, called = threading.Event(), []

    def call() -> int:
        called.append(threading.current_thread().daemon)
        go_on.wait(60)
        return len(called)

    waiting = [asyncio.create_task(threads.run("key", call, f"g{n}")) for n in range(10)]
    waiting[0].cancel()  # whoever gives up takes nothing from the others
    while not called:
        await asyncio.sleep(0)
    go_on.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results[1:] == [1] * 9
    assert called == [True]
    assert await threads.run("key", call) == 2


async def test_an_asker_has_a_bound_that_ends_with_its_calls() -> None:
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


async def test_an_exception_is_raised_where_the_result_is_waited_for() -> None:
    threads = DaemonThreads[int]("failing", 1, 1)

    def call() -> int:
        raise OSError("no such thing")

    for _ in range(3):
        with pytest.raises(OSError, match="no such thing"):
            await threads.run("key", call, "one")
