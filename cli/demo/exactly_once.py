"""`txbroker demo exactly-once`: a stock count whose consumer is killed, and the comparison.

A service subtracts sold items from a stock in SQLite. A message that is counted twice, or never,
shows as a wrong number.
"""

import asyncio
import contextlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from txbroker.cli.demo.stage import Timeline, event, running
from txbroker.cli.demo.stock import AFTER_COMMIT, IN_TRANSACTION, PARTITIONS
from txbroker.cli.run import CommandFailed
from txbroker.config.settings import load_kafka_access
from txbroker.core.records import Record
from txbroker.databases import SQLite
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.tools.consumers import Seen, read_back

TOPIC, GROUP = "shop.sold", "stock"
ITEMS, MESSAGES, IN_STOCK = 50, 3000, 1000
KILLS = (
    (IN_TRANSACTION, 400, "kill -9: SQLite rolls the count and the position back"),
    (AFTER_COMMIT, 700, "kill -9: the count and the position are stored, nothing else is"),
    (IN_TRANSACTION, 1, "kill -9: at the first message after the restart"),
)
"""Where the process is killed, after how many messages, and what follows."""


class ItemComparison(NamedTuple):
    """One item: how many the messages leave, and how many the database has."""

    item: str
    expected: int
    counted: int


def sold() -> list[dict[str, str | int]]:
    """Return the sales."""
    chance = random.Random(5)
    return [
        {"item": f"item-{chance.randrange(ITEMS):02}", "n": chance.randint(1, 5)}
        for _ in range(MESSAGES)
    ]


def create_stock(database: Path) -> None:
    """Create the database, with the tables of txbroker."""
    SQLite(database, create_tables=True).prepare()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, n INTEGER NOT NULL)")
        rows = [(f"item-{number:02}", IN_STOCK) for number in range(ITEMS)]
        connection.executemany("INSERT INTO stock VALUES (?, ?)", rows)


def stock_in(database: Path) -> dict[str, int]:
    """Return the number of each item."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute("SELECT item, n FROM stock"))


def compare(seen: Sequence[Seen], stock: Mapping[str, int]) -> list[ItemComparison]:
    """Return the items, as the messages and the database have them."""
    left = dict.fromkeys(stock, IN_STOCK)
    for one in seen:
        order = json.loads(one.record.value or b"")
        left[order["item"]] = left.get(order["item"], IN_STOCK) - order["n"]
    return [ItemComparison(item, left[item], stock.get(item, 0)) for item in sorted(left)]


async def show(kafka: str, folder: Path, timeline: Timeline, console: Console) -> None:
    """Play all scenes.

    Raises:
        CommandFailed: the database and the topic differ.
    """
    database = folder / "stock.db"
    create_stock(database)
    timeline.title(f"1. {MESSAGES:,} sales of {ITEMS} items, of which {IN_STOCK:,} are in stock")
    await _send(kafka, timeline)
    timeline.title("2. A process counts them in SQLite, and is killed at bad moments")
    for stop_at, after, outcome in KILLS:
        async with _counting(kafka, database, stop_at, after, timeline) as process:
            stopped = await event(process, stop_at)
            timeline.show("stock", "paused", f"{stop_at} of message {stopped['message']}")
            process.kill()
            timeline.show("stock", "killed", outcome)
    timeline.title("3. A new process counts the rest")
    async with _counting(kafka, database, "", 0, timeline) as process:
        await event(process, "counted")
    lines = compare(await read_back(kafka, (TOPIC,)), stock_in(database))
    console.print(table(lines))
    if any(line.expected != line.counted for line in lines):
        raise CommandFailed("the stock and the messages differ: see the table above")
    console.print(Text("Every message was counted exactly once.", "bold green"))


async def _send(kafka: str, timeline: Timeline) -> None:
    access = load_kafka_access(kafka, environ={})
    door = KafkaConsumingDoor.from_access(access, "txbroker-demo")
    await door.start()
    try:
        await door.create([TopicSpec(TOPIC, PARTITIONS, -1, {})])
        records: dict[int, list[Record]] = {number: [] for number in range(PARTITIONS)}
        for one in sold():
            key = str(one["item"]).encode()
            records[key[-1] % PARTITIONS].append(Record(key, json.dumps(one).encode()))
        for number, some in records.items():
            await door.append(TOPIC, number, some)
    finally:
        await door.close()
    timeline.show("shop", "sold", f"{MESSAGES:,} messages in {PARTITIONS} partitions of {TOPIC}")


@contextlib.asynccontextmanager
async def _counting(
    kafka: str, database: Path, stop_at: str, after: int, timeline: Timeline
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process of the service; it is killed at the end."""
    where = (kafka, TOPIC, GROUP, str(database))
    async with running("txbroker.cli.demo.stock", *where, stop_at, str(after)) as process:
        await event(process, "ready")
        timeline.show("stock", "started", f"process {process.pid}, consumer group {GROUP}")
        yield process


def table(lines: Sequence[ItemComparison]) -> Table:
    """Return the comparison as a table: the sums, and each item that differs."""
    wrong = [line for line in lines if line.expected != line.counted]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for title in ("left by the messages", "in the database"):
        shown.add_column(title, justify="right")
    shown.add_column("")
    total = ItemComparison(
        f"all {len(lines)} items",
        sum(line.expected for line in lines),
        sum(line.counted for line in lines),
    )
    for line in (total, *wrong):
        agree = line.expected == line.counted
        verdict = Text("agree", "green") if agree else Text("DIFFER", "bold red")
        shown.add_row(line.item, f"{line.expected:,}", f"{line.counted:,}", verdict)
    return shown
