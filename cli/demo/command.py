"""`txbroker demo`."""

import asyncio
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from txbroker.cli.demo.life import Timeline
from txbroker.cli.demo.scenes import EXPECTED, play
from txbroker.cli.demo.shop import ORDERS, PAYMENTS, orders_in
from txbroker.cli.demo.stage import DemoEnvironment, set_up
from txbroker.cli.demo.verdict import compare, table
from txbroker.cli.proxy.serving import until_signal
from txbroker.cli.run import CommandFailed, run_async
from txbroker.kafka.tools.consumers import read_back
from txbroker.proxy.observe.logging import configure_logging


@click.command("demo")
def command() -> None:
    """Watch an order service and Kafka agree despite kills.

    Runs a real Apache Kafka, a proxy and processes of a small order service on SQLite, kills some
    of these at the worst moments, and then compares the orders in the database with the messages
    that consumers see. Exit code 1: they differ. All data is in a temporary folder. The first run
    downloads Kafka (43 MB) into your cache.
    """
    configure_logging("auto", "error")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="txbroker-demo-") as folder:
        if not run_async(until_signal(_show(Path(folder), console))):
            raise click.Abort


async def _show(folder: Path, console: Console) -> None:
    timeline = Timeline(console)
    timeline.title("0. A real Apache Kafka and a proxy start")
    async with set_up(folder, timeline) as stage:
        timeline.show("kafka", "ready", stage.kafka)
        following = asyncio.create_task(stage.follow())
        try:
            await play(stage)
        finally:
            following.cancel()
        await _judge(stage, console)


async def _judge(stage: DemoEnvironment, console: Console) -> None:
    seen = await read_back(stage.kafka, (ORDERS, PAYMENTS))
    lines = compare(EXPECTED, orders_in(stage.database), seen)
    console.print()
    console.print(table(lines))
    if not all(line.agree for line in lines):
        raise CommandFailed("the database and Kafka differ: see the table above")
    console.print(Text("The database and Kafka agree, message for message.", "bold green"))
