"""Running a proxy in the foreground until a signal, with an orderly shutdown."""

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress

import click

from txbroker.cli.proxy.instance import named
from txbroker.cli.run import run_async
from txbroker.config.addresses import Address
from txbroker.config.settings import Settings
from txbroker.kafka.door.door import KafkaDoor
from txbroker.proxy.observe.logging import configure_logging
from txbroker.proxy.process import Proxy, run_proxy

WORKER_MODULE = "txbroker.cli.proxy.workers"
BEAT_S = 1.0
END_TIMEOUT_S = 40.0
"""Longer than a proxy takes to finish the calls in flight."""
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to stderr, even when its event loop hangs."""

_READ_BYTES = 1024


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


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.02
_COLLECT_EVERY = 20_000
"""New objects between two garbage collections. Python's default is 700, and each collection visits
all objects of the calls in flight."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely, and never visit existing objects: a proxy creates almost no reference
    cycles."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


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


async def serve(
    settings: Settings,
    ready: Callable[[Proxy], bool],
    *,
    wait_s: float = 0.0,
    welcome: Callable[[str], None] | None = None,
) -> None:
    """Run a proxy until this is cancelled; print a line to stdout when it is ready.

    Args:
        wait_s: limits the wait for a Kafka that does not answer at the start.
        welcome: called then with this line.
    """
    with rare_collections():
        async with run_proxy(
            KafkaDoor.from_configuration(settings), settings, wait_s=wait_s
        ) as proxy:
            while True:
                if ready(proxy):
                    break
                await asyncio.sleep(_LOOK_S)
            admin = f" admin {proxy.admin_url}" if proxy.admin_url else ""
            line = f"ready {proxy.url} kafka {settings.kafka}{admin}"
            click.echo(line)
            sys.stdout.flush()
            if welcome is not None:
                welcome(line)
            await asyncio.get_running_loop().create_future()


def run_one(settings: Settings, *, worker: int = 0, parent: int | None = None) -> None:
    """Run one proxy in this process, until a signal or a byte from the `parent`'s pipe stops it."""
    with named(settings) as settings:
        configure_logging(settings.log_format, settings.log_level, worker=worker)
        run_async(
            until_signal(
                serve(
                    settings,
                    lambda proxy: proxy.broker.readiness().ready,
                    wait_s=settings.wait_for_kafka_s,
                ),
                parent,
            )
        )


def why_not_free(address: Address) -> str:
    """Return why an address cannot be listened on, "" if it can.

    Checked before anything is started; a process that takes it later makes the proxy fail.
    """
    try:
        for family, _, _, _, at in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        ):
            socket.create_server((str(at[0]), int(at[1])), family=family).close()
    except OSError as error:
        # `create_server` appends the address in brackets.
        return (error.strerror or str(error)).partition(" (")[0].lower()
    return ""


def owns_all(proxy: Proxy) -> bool:
    """Return True if this proxy owns every half partition and has caught up on it."""
    return set(proxy.broker.readiness().partitions.values()) == {"owned"}


async def until_owned(proxy: Proxy) -> None:
    """Wait until this proxy owns every half partition and has caught up on it."""
    changed = asyncio.Event()
    proxy.broker.on_owners(changed.set)
    while not owns_all(proxy):
        changed.clear()
        await changed.wait()
