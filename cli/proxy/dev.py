"""`txbroker dev`: a proxy and an embedded Kafka."""

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import click

from txbroker.cli.contexts import DEFAULT_URL
from txbroker.cli.demo.sample import run_shop
from txbroker.cli.demo.shop import ORDERS
from txbroker.cli.options import SectionedCommand, env_option
from txbroker.cli.proxy.instance import named
from txbroker.cli.proxy.serving import owns_all, serve, why_not_free
from txbroker.cli.proxy.workers import run_workers
from txbroker.cli.run import CommandFailed, run_async
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.cli.signals import until_signal
from txbroker.config.addresses import Address
from txbroker.config.settings import Settings
from txbroker.embedded import DEFAULT_VERSION, BarProgress, EmbeddedKafka
from txbroker.proxy.observe.logging import configure_logging

_POLL_S = 0.5
_OF_OTHERS = (*KAFKA_SETTINGS, "wait_for_kafka_s")
"""Settings for an external Kafka."""
DEV_SETTINGS = tuple(name for name in Settings.model_fields if name not in _OF_OTHERS)


@click.command("dev", cls=SectionedCommand)
@env_option(
    "--kafka-version",
    "The version of Apache Kafka to run.",
    default=DEFAULT_VERSION,
    metavar="VERSION",
)
@env_option(
    "--kafka-port",
    "The port of Kafka on 127.0.0.1.",
    shown="that of the last start, else any free one",
    type=click.IntRange(1, 65535),
    metavar="PORT",
)
@click.option(
    "--sample",
    is_flag=True,
    help="Run a small shop, too: an order a second, some rolled back, some decided by a check.",
)
@setting_options(DEV_SETTINGS)
def command(
    kafka_version: str,
    kafka_port: int | None,
    sample: bool,
    config: Path | None,
    **options: Any,
) -> None:
    """Run a proxy with an embedded Apache Kafka, until SIGINT or SIGTERM.

    Prints `ready URL kafka SERVERS` on stdout once transactions can begin. Data stays in
    --data-dir for the next start. Target topics are created when a transaction for them is
    prepared. The first start downloads Kafka (43 MB) into your cache.
    """
    settings = settings_from(config, options)
    if sample:
        _require_open(settings)
    if "create_target_topics" not in settings.model_fields_set:
        settings = settings.model_copy(update={"create_target_topics": True})
    configure_logging(settings.log_format, settings.log_level)
    require_free(settings.listen_address)
    if kafka_port is not None and (reason := why_not_free(Address("127.0.0.1", kafka_port))):
        raise CommandFailed(
            f"Kafka cannot listen on 127.0.0.1:{kafka_port}: {reason}. Choose another --kafka-port"
        )
    # With several workers, each process takes its own name.
    with named(settings) if settings.workers == 1 else nullcontext(settings) as settings:
        kafka = EmbeddedKafka(
            settings.local_dir / "kafka",
            version=kafka_version,
            port=kafka_port,
            progress=BarProgress(),
        )
        run_async(until_signal(develop(kafka, settings, sample=sample)))


def _require_open(settings: Settings) -> None:
    """Refuse settings with which the sample shop would need a credential."""
    for name in ("token_file", "principals_file", "tls_cert_file"):
        if getattr(settings, name) is not None:
            raise click.UsageError(f"--sample calls the proxy without credentials: unset {name}")


def require_free(address: Address) -> None:
    """Check that an address can be listened on, before Kafka starts."""
    if reason := why_not_free(address):
        raise CommandFailed(
            f"cannot listen on {address.host}:{address.port}: {reason}. "
            "Choose another address with --listen"
        )


async def develop(kafka: EmbeddedKafka, settings: Settings, *, sample: bool = False) -> None:
    """Run Kafka and its proxies until this is cancelled, or one of them fails."""
    try:
        await asyncio.to_thread(kafka.start)
        settings = settings.model_copy(update={"kafka": kafka.bootstrap})
        async with asyncio.TaskGroup() as group:

            def welcome(line: str) -> None:
                url, console_url = line.split()[1], line.split()[-1 if settings.admin_listen else 1]
                if sys.stdout.isatty():
                    click.echo(_first_steps(url, console_url, settings.local_dir, sample=sample))
                if sample:
                    group.create_task(run_shop(url, settings.local_dir))

            if settings.workers > 1:
                group.create_task(run_workers(settings, welcome))
            else:
                group.create_task(serve(settings, owns_all, welcome=welcome))
            group.create_task(_watch(kafka))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await asyncio.to_thread(kafka.stop)


def _first_steps(url: str, console_url: str, data_dir: Path, *, sample: bool) -> str:
    """Return what to try next, for a person at a terminal."""
    where = "" if url == DEFAULT_URL else f" --url {url}"
    topic = ORDERS if sample else "payments"
    send = f'txbroker send payments "10 EUR" --key 42 --wait{where}'
    return "\n".join(
        (
            "",
            f"  Console    {console_url}/",
            "  Try next   " + (f"txbroker tx list --state all{where}" if sample else send),
            f"             txbroker consume {topic} --from-beginning{where}",
            "             "
            + (f"txbroker top{where}" if sample else f"txbroker tx list --state all{where}"),
            f"  Ctrl-C ends it; data stays in {data_dir}.",
            "",
        )
    )


async def _watch(kafka: EmbeddedKafka) -> NoReturn:
    while True:
        if not kafka.running:
            raise CommandFailed(
                f"the embedded Kafka has ended; see {kafka.log_path} for the reason, then start "
                "`txbroker dev` again"
            )
        await asyncio.sleep(_POLL_S)
