"""Running a proxy in the foreground: until a signal, with everything it started taken down."""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext

import click

from txbroker.cli.proxy.lifeline import lifeline
from txbroker.config.addresses import Address
from txbroker.config.settings import Settings
from txbroker.kafka.client.wiring import door_from
from txbroker.proxy.process import Proxy, run_proxy

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.02
_COLLECT_EVERY = 20_000
"""New objects from which on Python looks for those that only refer to one another. It does so from
700 on by itself, and looks through everything that calls in flight hold each time."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's garbage collector run rarely, and pass by what is there already: a proxy makes
    next to nothing that is not freed without it."""
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
    """Give an event that the first SIGINT or SIGTERM sets; a second one ends the process at once.

    What an embedded Kafka is then left with, its own watcher ends. `parent` is a pipe from a
    parent process, which is obeyed likewise: `txbroker.cli.proxy.lifeline`.
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
    """Do `work` until it ends or a signal comes, or the parent behind a pipe says so; then it is
    cancelled, and cleans up after itself.

    Returns False where a signal came. Raises whatever `work` raises, and RuntimeError where it was
    cancelled by nobody but itself.
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
                raise RuntimeError("a task of its own was cancelled") from error
        return not stop.is_set()


async def serve(settings: Settings, ready: Callable[[Proxy], bool], *, wait_s: float = 0.0) -> None:
    """Run a proxy until this is cancelled, and say in one line of stdout when it is ready.

    A Kafka that does not answer at the start is waited for, `wait_s` seconds.

    Raises:
        KafkaUnavailable, ConfigurationError: the proxy cannot start.
    """
    with rare_collections():
        async with run_proxy(door_from(settings), settings, wait_s=wait_s) as proxy:
            while True:
                if ready(proxy):
                    break
                await asyncio.sleep(_LOOK_S)
            admin = f" admin {proxy.admin_url}" if proxy.admin_url else ""
            click.echo(f"ready {proxy.url} kafka {settings.kafka}{admin}")
            sys.stdout.flush()
            await asyncio.get_running_loop().create_future()


def why_not_free(address: Address) -> str:
    """Say why an address cannot be listened on, before anything is started for it; "" where it
    can. Whoever takes it from here on is found when the proxy listens."""
    try:
        for family, _, _, _, at in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        ):
            socket.create_server((str(at[0]), int(at[1])), family=family).close()
    except OSError as error:
        # `create_server` adds in brackets what it tried.
        return (error.strerror or str(error)).partition(" (")[0].lower()
    return ""


def owns_all(proxy: Proxy) -> bool:
    """Whether every half partition is owned by this proxy, and caught up."""
    return set(proxy.broker.readiness().partitions.values()) == {"owned"}


async def until_owned(proxy: Proxy) -> None:
    """Wait until every half partition is owned by this proxy, and caught up."""
    changed = asyncio.Event()
    proxy.broker.on_owners(changed.set)
    while not owns_all(proxy):
        changed.clear()
        await changed.wait()
