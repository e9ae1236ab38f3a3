"""Running a relay in the foreground, for `outbox relay` and `capture run`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from txbroker.cli.options import with_options
from txbroker.cli.run import CommandFailed, run_async
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options
from txbroker.cli.signals import until_signal
from txbroker.config.access import KafkaAccess
from txbroker.config.addresses import parse_address
from txbroker.config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = (*KAFKA_SETTINGS, "topic_prefix", "log_format", "log_level")
_DRAIN_S = 365 * 24 * 3600.0


class Running(Protocol):
    """A relay that has started."""

    async def run(self) -> None: ...

    async def drain(self, timeout_s: float) -> None: ...

    def collector(self) -> Any: ...

    async def close(self) -> None: ...


def running_options(function: F) -> F:
    """Give a command the options of a relay that runs in the foreground."""
    return with_options(
        setting_options(SETTINGS),
        click.option(
            "--until-drained", is_flag=True, help="Stop with exit code 0 once nothing waits."
        ),
        click.option(
            "--metrics-listen",
            metavar="HOST:PORT",
            help="Serve Prometheus metrics at this address.",
        ),
        click.option(
            "--take-position",
            is_flag=True,
            help="Where no record in PREFIX.relay proves to be the position of this relay, go on "
            "from the newest one of any client.",
        ),
    )(function)


def run_relay(
    start: Callable[[], Coroutine[Any, Any, Running]],
    name: str,
    *,
    until_drained: bool,
    metrics_listen: str | None,
) -> None:
    """Run a relay until a signal, until nothing waits, or until an error.

    Args:
        start: connects and begins.
        name: for messages.
    """
    run_async(until_signal(_run(start, name, until_drained, metrics_listen)))


async def _run(
    start: Callable[[], Coroutine[Any, Any, Running]],
    name: str,
    until_drained: bool,
    metrics_listen: str | None,
) -> None:
    relay = await start()
    try:
        click.echo(f"{name}: running", err=True)
        if metrics_listen is not None:
            _serve_metrics(relay, metrics_listen)
        if until_drained:
            await relay.drain(_DRAIN_S)
            click.echo(f"{name}: nothing waits", err=True)
        else:
            await relay.run()
    finally:
        await relay.close()


def _serve_metrics(relay: Running, listen: str) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=True)
    registry.register(relay.collector())
    try:
        address = parse_address(listen)
        server, _thread = start_http_server(address.port, address.host, registry)
    except (OSError, ValueError) as error:
        raise CommandFailed(
            f"cannot listen at {listen} for metrics: {error}: choose another address"
        ) from None
    url = address._replace(port=server.server_port).url_of(secure=False)
    click.echo(f"metrics at {url}/metrics", err=True)


def security_of(settings: Settings) -> dict[str, Any]:
    """Return the settings of the connection to Kafka, as `Relay` takes them."""
    return {name: getattr(settings, name) for name in KafkaAccess.model_fields if name != "kafka"}


def read_secret(path: Path | None) -> bytes | None:
    """Return the secret in a file, without a line end."""
    return None if path is None else path.read_bytes().rstrip(b"\r\n")
