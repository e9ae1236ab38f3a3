"""`txbroker dev`: everything that it takes, in one process and one Java beside it."""

import asyncio
from pathlib import Path
from typing import Any

import click

from txbroker.addresses import Address
from txbroker.cli.instance import named
from txbroker.cli.run import Failed, run_async
from txbroker.cli.serving import owns_all, serve, until_signal, why_not_free
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.config import Settings
from txbroker.embedded import DEFAULT_VERSION, BarProgress, EmbeddedKafka
from txbroker.proxy.logging import configure_logging

_OF_OTHERS = (*KAFKA_SETTINGS, "wait_for_kafka_s", "workers")
"""What is about another Kafka, or several proxies."""
DEV_SETTINGS = tuple(name for name in Settings.model_fields if name not in _OF_OTHERS)


@click.command("dev")
@click.option(
    "--kafka-version",
    default=DEFAULT_VERSION,
    show_default=True,
    metavar="VERSION",
    envvar="TXBROKER_KAFKA_VERSION",
    help="The version of Apache Kafka to run.",
)
@setting_options(DEV_SETTINGS)
def command(kafka_version: str, config: Path | None, **options: Any) -> None:
    """Run a proxy with a real Apache Kafka of its own, until SIGINT or SIGTERM.

    Prints `ready URL kafka SERVERS` on stdout once transactions can begin. Data stays in
    --data-dir for the next time. Target topics are created when a transaction for them is
    prepared. The first start downloads Kafka (43 MB) into your cache.
    """
    settings = settings_from(config, options)
    if "create_target_topics" not in settings.model_fields_set:
        settings = settings.model_copy(update={"create_target_topics": True})
    configure_logging(settings.log_format, settings.log_level)
    require_free(settings.listen_address)
    with named(settings) as settings:
        kafka = EmbeddedKafka(
            settings.data_dir / "kafka", version=kafka_version, progress=BarProgress()
        )
        run_async(until_signal(develop(kafka, settings)))


def require_free(address: Address) -> None:
    """Refuse an address that cannot be listened on before anything is started for it.

    Raises:
        Failed: it is taken, or not this machine's.
    """
    if reason := why_not_free(address):
        raise Failed(
            f"cannot listen on {address.host}:{address.port}: {reason}. "
            "Choose another address with --listen"
        )


async def develop(kafka: EmbeddedKafka, settings: Settings) -> None:
    """Run Kafka, and a proxy on it, until this is cancelled.

    Raises:
        EmbeddedKafkaError, KafkaUnavailable, ConfigurationError: they cannot start.
        Failed: Kafka has ended by itself.
    """
    try:
        await asyncio.to_thread(kafka.start)

        def lost() -> str | None:
            if kafka.running:
                return None
            return f"the embedded Kafka has ended; {kafka.log_path} says why. Start again to go on"

        await serve(settings.model_copy(update={"kafka": kafka.bootstrap}), owns_all, lost)
    finally:
        await asyncio.to_thread(kafka.stop)
