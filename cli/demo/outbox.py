"""`txbroker demo outbox`: orders and their messages in one database, relays that are killed, and
the comparison."""

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from txbroker.cli.demo.comparison import OrderComparison, compare
from txbroker.cli.demo.outbox_shop import COMMITTED, PREPARED, order_of
from txbroker.cli.demo.shop import CREDIT, ORDERS, PAYMENTS, create_tables, orders_in
from txbroker.cli.demo.stage import Timeline, event, running
from txbroker.cli.run import CommandFailed
from txbroker.config.settings import load_kafka_access
from txbroker.databases import SQLite
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.tools.consumers import read_back
from txbroker.relay import Outbox

SHOPS = (
    (1, 200, PREPARED, "kill -9: no order, and undecided messages"),
    (201, 401, COMMITTED, "kill -9: an order, and undecided messages"),
    (402, 600, "", ""),
)
"""First and last order of each process of the shop, where it is killed, and the result."""
_STOPPED = {last: stop_at for _first, last, stop_at, _left in SHOPS if stop_at}
_KILL_WITHIN_S = 0.3
_TIMEOUT_S = 60.0
_POLL_S = 0.05


class StoryComparison(NamedTuple):
    """The orders to which the same happened: how many, how many the database has, and how many
    messages are visible."""

    story: str
    orders: int
    stored: int
    visible: int
    agree: bool


def stories() -> dict[str, str]:
    """Return what happens to each order by its number."""
    found = {}
    for number in range(SHOPS[0][0], SHOPS[-1][1] + 1):
        order, scheme = order_of(number)
        if number in _STOPPED:
            what = f"killed {_STOPPED[number]}"
        else:
            what = "refused by the shop" if order.amount > CREDIT else "commits"
        found[order.number] = f"{scheme}: {what}"
    return found


def by_story(orders: Sequence[OrderComparison]) -> list[StoryComparison]:
    """Return sums of orders by what happened to them."""
    groups: dict[str, list[OrderComparison]] = {}
    for order in orders:
        groups.setdefault(order.story, []).append(order)
    return [
        StoryComparison(
            story,
            len(some),
            sum(order.exists for order in some),
            sum(len(order.messages) for order in some),
            all(order.agree for order in some),
        )
        for story, some in sorted(groups.items())
    ]


async def show(kafka: str, folder: Path, timeline: Timeline, console: Console) -> None:
    """Play all scenes.

    Raises:
        CommandFailed: the database and the topics differ.
    """
    database = folder / "shop.db"
    create_tables(database)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # shop and relay do not wait for readers
    Outbox(SQLite(database, create_tables=True)).create()
    await _create_topics(kafka)
    timeline.title(f"1. A shop writes {SHOPS[-1][1]} orders, each with two messages, in three ways")
    selling = asyncio.create_task(_sell(database, timeline))
    try:
        await _kill_relays(kafka, database, timeline, selling)
        await selling
    finally:
        selling.cancel()
        await asyncio.gather(selling, return_exceptions=True)
    timeline.title("2. A new relay delivers the rest, and checks undecided messages")
    async with running("txbroker.cli.demo.outbox_relay", kafka, str(database)) as process:
        await _settled(database)
        timeline.show("relay", "settled", f"process {process.pid}: no row waits, none is undecided")
    seen = await read_back(kafka, (ORDERS, PAYMENTS))
    lines = by_story(compare(stories(), orders_in(database), seen))
    console.print()
    console.print(table(lines))
    if not all(line.agree for line in lines):
        raise CommandFailed("the database and Kafka differ: see the table above")
    console.print(
        Text("Every committed order is visible exactly once, no other order is.", "bold green")
    )


async def _create_topics(kafka: str) -> None:
    door = KafkaConsumingDoor.from_access(load_kafka_access(kafka, environ={}), "txbroker-demo")
    await door.start()
    try:
        await door.create([TopicSpec(topic, 2, -1, {}) for topic in (ORDERS, PAYMENTS)])
    finally:
        await door.close()


async def _sell(database: Path, timeline: Timeline) -> None:
    for first, last, stop_at, left in SHOPS:
        arguments = (str(database), str(first), str(last), stop_at)
        async with running("txbroker.cli.demo.outbox_shop", *arguments) as process:
            await event(process, "ready")
            timeline.show("shop", "started", f"process {process.pid}: orders {first} to {last}")
            await event(process, stop_at or "over")
            if stop_at:
                process.kill()
                timeline.show("shop", "killed", left)


async def _kill_relays(
    kafka: str, database: Path, timeline: Timeline, selling: asyncio.Task[None]
) -> None:
    """Start relays and kill each while it delivers, until everything is sold."""
    chance = random.Random(7)
    while not selling.done():
        async with running("txbroker.cli.demo.outbox_relay", kafka, str(database)) as process:
            delivering = asyncio.create_task(event(process, "delivering"))
            await asyncio.wait((selling, delivering), return_when=asyncio.FIRST_COMPLETED)
            if not delivering.done():
                delivering.cancel()
                await asyncio.gather(delivering, return_exceptions=True)
                return
            await delivering
            await asyncio.sleep(chance.uniform(0, _KILL_WITHIN_S))
            process.kill()
            timeline.show("relay", "killed", f"kill -9: process {process.pid}, while it delivers")


async def _settled(database: Path) -> None:
    """Wait until no row waits, and none is undecided.

    Raises:
        CommandFailed: some are after a minute.
    """
    unsettled = "SELECT COUNT(*) FROM txbroker_outbox WHERE state IN ('UNKNOWN', 'LOCAL_COMMIT')"
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + _TIMEOUT_S
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection:
        while True:
            left = connection.execute(unsettled).fetchone()[0]
            if not left:
                return
            if now_s() > end_s:
                raise CommandFailed(f"{left} messages are not settled after {_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)


def table(lines: Sequence[StoryComparison]) -> Table:
    """Return the comparison as a table."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("what happened")
    for title in ("orders", "in the database", "messages visible"):
        shown.add_column(title, justify="right")
    shown.add_column("")
    for line in lines:
        verdict = Text("agree", "green") if line.agree else Text("DIFFER", "bold red")
        counts = (line.orders, line.stored, line.visible)
        shown.add_row(line.story, *(f"{count:,}" for count in counts), verdict)
    return shown
