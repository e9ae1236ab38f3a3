"""`txbroker demo`: its scenes, and the comparison of the database with Kafka."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from txbroker.cli.demo import consume, exactly_once, outbox
from txbroker.cli.demo.comparison import OrderComparison, compare
from txbroker.cli.demo.shop import ORDERS, PAYMENTS, ShopOrder, orders_in
from txbroker.cli.demo.stage import DemoEnvironment, Timeline, run_kafka, set_up
from txbroker.cli.main import SuggestingGroup
from txbroker.cli.run import CommandFailed, run_async
from txbroker.cli.signals import until_signal
from txbroker.kafka.tools.consumers import read_back
from txbroker.proxy.observe.logging import configure_logging

EXPECTED = {
    "A-1": "commits",
    "A-2": "rolled back by the shop",
    "B-1": "killed after the local commit",
    "B-2": "killed before the local commit",
    "C-1": "slower than the check",
}
"""Every order, with its description in the table."""

_SLOW_S = 2.5
"""Longer than the time until the first check."""


async def play(stage: DemoEnvironment) -> None:
    """Place orders and kill workers."""
    timeline = stage.timeline
    timeline.title("1. An order that commits, and one that the shop refuses")
    first, second = await asyncio.gather(stage.worker("shop-1"), stage.worker("shop-2"))
    await first.place(ShopOrder("A-1", "lamp", 40))
    await first.until("over", "A-1")
    await first.place(ShopOrder("A-2", "piano", 9000))
    await first.until("over", "A-2")
    await stage.show_new_steps()

    timeline.title("2. A process killed between its local commit and its decision")
    await first.place(ShopOrder("B-1", "chair", 120), stop_at="after the local commit")
    await first.until("after the local commit", "B-1")
    await first.kill()
    timeline.show("shop-1", "killed", "kill -9: the order exists, and has no commit")

    timeline.title("3. A process killed before its local commit")
    await second.place(ShopOrder("B-2", "table", 300), stop_at="before the local commit")
    await second.until("before the local commit", "B-2")
    await second.kill()
    timeline.show("shop-2", "killed", "kill -9: the order does not exist, and has no rollback")

    timeline.title("4. The proxy checks with a new instance, which reads the database")
    third = await stage.worker("shop-3")
    await third.place(ShopOrder("C-1", "clock", 75), stop_at="prepared")
    await third.until("prepared", "C-1")
    timeline.show("C-1", "slow", f"its local transaction starts {_SLOW_S:g} s later")
    await asyncio.sleep(_SLOW_S)
    await third.go_on()
    await third.until("over", "C-1")
    await stage.settled()
    await third.finish()


def table(lines: Sequence[OrderComparison]) -> Table:
    """Return the comparison as a table."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("order", "what happened", "in the database", "visible in Kafka", ""):
        shown.add_column(title, overflow="fold")
    for line in lines:
        shown.add_row(
            line.number,
            line.story,
            "yes" if line.exists else "no",
            "\n".join(line.messages) or "nothing",
            Text("agree", "green") if line.agree else Text("DIFFER", "bold red"),
        )
    return shown


@click.group("demo", cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Watch an order service and Kafka agree despite kills.

    Runs a real Apache Kafka, a proxy and processes of a small order service on SQLite, kills some
    of these at the worst moments, and then compares the orders in the database with the messages
    that consumers see. Exit code 1: they differ. All data is in a temporary folder. The first run
    downloads Kafka (43 MB) into your cache. `demo consume` and `demo exactly-once` show consumers,
    `demo outbox` shows relays.
    """
    if context.invoked_subcommand is None:
        _run(_show)


@command.command("consume")
def consume_command() -> None:
    """Watch one message fail for ever while all other keys continue.

    Runs a real Apache Kafka and a consumer that keeps the order of each key, writes messages with
    5,000 keys of which one always fails, and compares handled and set-aside messages with the
    topics. Then it releases the key. Exit code 1: something differs. All data is in a temporary
    folder.
    """
    _on_kafka(
        lambda kafka, _, timeline, console: consume.show(kafka, timeline, console, consume.Stock())
    )


@command.command("exactly-once")
def exactly_once_command() -> None:
    """Watch a killed consumer count every message exactly once.

    Runs a real Apache Kafka and processes that count sales in SQLite, kills them in a transaction
    and after its commit, and compares the stock in the database with the messages. Exit code 1:
    they differ. All data is in a temporary folder.
    """
    _on_kafka(exactly_once.show)


@command.command("outbox")
def outbox_command() -> None:
    """Watch killed relays deliver every committed order exactly once.

    Runs a real Apache Kafka, processes of a shop that write orders and their messages into SQLite
    in three ways, and processes of the relay that delivers the messages. Kills both again and
    again, and compares the orders in the database with the messages that consumers see. Exit code
    1: they differ. All data is in a temporary folder.
    """
    _on_kafka(outbox.show)


def _run(show: Callable[[Path, Console], Coroutine[None, None, None]]) -> None:
    configure_logging("auto", "error")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="txbroker-demo-") as folder:
        if not run_async(until_signal(show(Path(folder), console))):
            raise click.Abort


def _on_kafka(play: Callable[[str, Path, Timeline, Console], Awaitable[None]]) -> None:
    async def show(folder: Path, console: Console) -> None:
        timeline = Timeline(console)
        timeline.title("0. A real Apache Kafka starts")
        async with run_kafka(folder) as kafka:
            timeline.show("kafka", "ready", kafka)
            await play(kafka, folder, timeline, console)

    _run(show)


async def _show(folder: Path, console: Console) -> None:
    timeline = Timeline(console)
    timeline.title("0. A real Apache Kafka and a proxy start")
    async with set_up(folder, timeline) as stage:
        timeline.show("kafka", "ready", stage.kafka)
        timeline.show("proxy", "ready", f"its console shows the same: {stage.url}/")
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
    console.print(
        "`txbroker dev --sample` keeps such a shop running; `txbroker consume shop.orders` shows "
        "its messages arrive.",
        soft_wrap=True,
    )
