"""`txbroker outbox relay`: deliver the rows of an outbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from txbroker.cli.options import FILE, SectionedCommand
from txbroker.cli.relay.running import read_secret, run_relay, running_options, security_of
from txbroker.cli.run import usage_errors
from txbroker.cli.setting_options import settings_from
from txbroker.databases.urls import from_url

_OPTIONS = ("take_position", "check_url", "check_after_s", "retries_max", "keep_s", "shards")
"""Passed on to `Relay`."""


@click.command("relay", cls=SectionedCommand)
@click.argument("url", envvar="TXBROKER_DATABASE_URL")
@running_options
@click.option("--check-url", metavar="URL", help="Ask this URL about rows that stay undecided.")
@click.option(
    "--check-secret-file", type=FILE, metavar="FILE", help="The secret that signs these calls."
)
@click.option("--check-after-s", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="How long rows may be undecided before.")  # fmt: skip
@click.option("--retries-max", type=int, default=10, show_default=True, metavar="N",
              help="How often Kafka may refuse a message before its row is a MESSAGE_ERROR; a row "
              "whose topic is missing or may not be written waits.")  # fmt: skip
@click.option("--keep-s", type=float, default=86400.0, show_default=True, metavar="SECONDS",
              help="How long finished rows are kept; 0: a delivered one is deleted.")  # fmt: skip
@click.option("--shards", type=int, metavar="N",
              help="How many relays can work at the same time: 1, 2, 4, 8 or 16. It is stored; "
              "without this option the stored number counts.")  # fmt: skip
def command(
    url: str,
    config: Path | None,
    until_drained: bool,
    metrics_listen: str | None,
    check_secret_file: Path | None,
    **options: Any,
) -> None:
    """Deliver the rows of an outbox to Kafka, exactly once, until SIGINT or SIGTERM.

    URL is that of the database, as of `txbroker databases create`. Start it several times for
    failover, and with --shards to divide the work.
    """
    from txbroker.proxy.observe.logging import configure_logging
    from txbroker.relay import Outbox, Relay

    of_relay = {name: options.pop(name) for name in _OPTIONS}
    settings = settings_from(config, options)
    configure_logging(settings.log_format, settings.log_level)
    with usage_errors():
        relay = Relay(
            Outbox(from_url(url)),
            settings.kafka,
            check_secret=read_secret(check_secret_file),
            topic_prefix=settings.topic_prefix,
            security=security_of(settings),
            **of_relay,
        )

    async def start() -> Relay:
        await relay.start()
        return relay

    run_relay(start, "relay", until_drained=until_drained, metrics_listen=metrics_listen)
