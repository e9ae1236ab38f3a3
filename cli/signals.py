"""Work in the foreground until a signal, and a worker's tie to its parent."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress

BEAT_S = 1.0
END_TIMEOUT_S = 40.0
"""Longer than a proxy takes to finish the calls in flight."""

_READ_BYTES = 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def lifeline(pipe: int, stop: Callable[[], None]) -> Iterator[None]:
    """Tie a worker to its parent while the block runs, even when its event loop hangs.

    The parent holds the other ends of two pipes. `pipe` carries the request to stop, and ends when
    the parent does; a thread reads it, because a hanging event loop would not. On stdout the event
    loop writes a heartbeat, an empty line, every `BEAT_S`: when heartbeats stop, the parent
    replaces the worker.

    Each write of the parent makes the event loop call `stop`. The pipe's end acts as SIGTERM; if
    the process still runs after `END_TIMEOUT_S`, it exits.
    """
    loop = asyncio.get_running_loop()
    threading.Thread(target=_obey, args=(pipe, loop, stop), name="lifeline", daemon=True).start()
    beating = loop.create_task(_beat(sys.stdout.fileno()))
    try:
        yield
    finally:
        beating.cancel()


def _obey(pipe: int, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    with suppress(OSError):
        while os.read(pipe, _READ_BYTES):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(stop)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_TIMEOUT_S)
    os._exit(1)


async def _beat(out: int) -> None:
    os.set_blocking(out, False)  # a parent that does not read must not block the worker
    while True:
        with suppress(OSError):
            os.write(out, b"\n")
        await asyncio.sleep(BEAT_S)


@contextmanager
def stop_event(parent: int | None = None) -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; a second one kills the process.

    The watcher of an embedded Kafka then ends its Java. A `parent`'s pipe has the same effect as a
    signal, see `lifeline`.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        stop.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def on_parent() -> None:
        if not stop.is_set():
            on_signal()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        with nullcontext() if parent is None else lifeline(parent, on_parent):
            yield stop
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def until_signal(work: Coroutine[None, None, None], parent: int | None = None) -> bool:
    """Run `work` until it ends, or cancel it on a signal or on a stop by the parent.

    Return False after a signal. Raise the errors of `work`, and RuntimeError if it cancelled
    itself.
    """
    with stop_event(parent) as stop:
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            task.cancel()
        try:
            await task
        except asyncio.CancelledError as error:
            if not stop.is_set():
                raise RuntimeError("a task of the command cancelled itself") from error
        return not stop.is_set()
