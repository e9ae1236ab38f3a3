"""Running a proxy in the foreground."""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from txbroker.cli.proxy.instance import named
from txbroker.cli.run import run_async
from txbroker.cli.signals import until_signal
from txbroker.config.addresses import Address
from txbroker.config.settings import Settings
from txbroker.kafka.door.door import KafkaDoor
from txbroker.proxy.observe.logging import configure_logging
from txbroker.proxy.process import Proxy, run_proxy

WORKER_MODULE = "txbroker.cli.proxy.workers"
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to stderr, even when its event loop hangs."""


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
