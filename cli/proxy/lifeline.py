"""What ties a worker of `txbroker proxy --workers` to its parent, also when its event loop hangs.

The parent holds the other ends of two pipes. The one that the worker reads carries the wish to
stop, and ends when the parent does, however that happened; a thread reads it, as an event loop that
hangs would not. The other is the worker's stdout, where its event loop writes an empty line every
`BEAT_S`: when these beats stop, the parent kills the worker and starts another one.
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
"""More than a proxy takes to end what is under way."""
STACKS_SIGNAL = signal.SIGUSR1
"""Has a worker write the stacks of its threads to stderr, also when its event loop hangs."""

_READ_BYTES = 1024


@contextmanager
def lifeline(pipe: int, stop: Callable[[], None]) -> Iterator[None]:
    """Obey the parent at the other end of `pipe` while the block runs, and send it beats.

    What the parent writes has `stop` called by the event loop. Its end counts like a SIGTERM, and
    ends this process after `END_TIMEOUT_S` where that does not.
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
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stop)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_TIMEOUT_S)
    os._exit(1)


async def _beat(out: int) -> None:
    os.set_blocking(out, False)  # a parent that reads nothing must not hold us up
    while True:
        with suppress(OSError):
            os.write(out, b"\n")
        await asyncio.sleep(BEAT_S)
