"""Ties a worker of `txbroker proxy --workers` to its parent, even when its event loop hangs.

The parent holds the other ends of two pipes. The worker's stdin carries the request to stop, and
ends when the parent does; a thread reads it, because a hanging event loop would not. On its stdout
the worker's event loop writes a heartbeat, an empty line, every `BEAT_S`: when heartbeats stop, the
parent replaces the worker.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

WORKER_MODULE = "txbroker.cli.proxy.worker"
BEAT_S = 1.0
END_TIMEOUT_S = 40.0
"""Longer than a proxy takes to finish the calls in flight."""
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to stderr, even when its event loop hangs."""

_READ_BYTES = 1024


@contextmanager
def lifeline(pipe: int, stop: Callable[[], None]) -> Iterator[None]:
    """Send heartbeats and obey the parent at the other end of `pipe` while the block runs.

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
