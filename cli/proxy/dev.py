"""`txbroker dev`: a proxy and an embedded Kafka."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import click

from txbroker.cli.options import SectionedCommand, env_option
from txbroker.cli.proxy.instance import named
from txbroker.cli.proxy.serving import owns_all, serve, until_signal, why_not_free
from txbroker.cli.proxy.workers import run_workers
from txbroker.cli.run import CommandFailed, run_async
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
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
@setting_options(DEV_SETTINGS)
def command(kafka_version: str, config: Path | None, **options: Any) -> None:
    """Run a proxy with an embedded Apache Kafka, until SIGINT or SIGTERM.

    Prints `ready URL kafka SERVERS` on stdout once transactions can begin. Data stays in
    --data-dir for the next start. Target topics are created when a transaction for them is
    prepared. The first start downloads Kafka (43 MB) into your cache.
    """
    settings = settings_from(config, options)
    if "create_target_topics" not in settings.model_fields_set:
        settings = settings.model_copy(update={"create_target_topics": True})
    configure_logging(settings.log_format, settings.log_level)
    require_free(settings.listen_address)
    # With several workers, each process takes its own name.
    with named(settings) if settings.workers == 1 else nullcontext(settings) as settings:
        kafka = EmbeddedKafka(
            settings.data_dir / "kafka", version=kafka_version, progress=BarProgress()
        )
        run_async(until_signal(develop(kafka, settings)))


def require_free(address: Address) -> None:
    """Check that an address can be listened on, before Kafka starts."""
    if reason := why_not_free(address):
        raise CommandFailed(
            f"cannot listen on {address.host}:{address.port}: {reason}. "
            "Choose another address with --listen"
        )


async def develop(kafka: EmbeddedKafka, settings: Settings) -> None:
    """Run Kafka and its proxies until this is cancelled, or one of them fails."""
    try:
        await asyncio.to_thread(kafka.start)
        settings = settings.model_copy(update={"kafka": kafka.bootstrap})
        proxies = run_workers(settings) if settings.workers > 1 else serve(settings, owns_all)
        async with asyncio.TaskGroup() as group:
            group.create_task(proxies)
            group.create_task(_watch(kafka))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await asyncio.to_thread(kafka.stop)


async def _watch(kafka: EmbeddedKafka) -> NoReturn:
    while True:
        if not kafka.running:
            raise CommandFailed(
                f"the embedded Kafka has ended; see {kafka.log_path} for the reason, then start "
                "`txbroker dev` again"
            )
        await asyncio.sleep(_POLL_S)
