"""`txbroker proxy`."""

from pathlib import Path
from typing import Any

import click

from txbroker.cli.options import SectionedCommand
from txbroker.cli.proxy.serving import run_one
from txbroker.cli.proxy.workers import run_workers
from txbroker.cli.run import run_async
from txbroker.cli.setting_options import setting_options, settings_from
from txbroker.cli.signals import until_signal
from txbroker.config.settings import Settings
from txbroker.proxy.observe.logging import configure_logging


@click.command("proxy", cls=SectionedCommand)
@setting_options(Settings.model_fields)
def command(config: Path | None, **options: Any) -> None:
    """Run a proxy on your Kafka, until SIGINT or SIGTERM.

    The proxy creates its own topics if they are missing, shares the half partitions with the other
    proxies of the same --topic-prefix, and prints `ready URL kafka SERVERS` on stdout once it
    accepts calls. Everything else goes to stderr. With --workers it runs several processes, and
    prints such a line for each once all of them accept calls.
    """
    settings = settings_from(config, options)
    if settings.workers > 1:
        configure_logging(settings.log_format, settings.log_level)
        run_async(until_signal(run_workers(settings)))
    else:
        run_one(settings)
