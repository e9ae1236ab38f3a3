"""`txbroker demo consume`: a consumer, a key that always fails, and the comparison with Kafka.

A service books orders of 5,000 items, in order for each item. One item has no price, so its orders
fail. The consumer sets them aside; all other items continue.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from txbroker.cli.demo.stage import Timeline
from txbroker.cli.run import CommandFailed
from txbroker.config.settings import load_kafka_access
from txbroker.consumer import CommitPolicy, Consumer, ReceivedMessage
from txbroker.consumer.operations.copies import release, set_aside_keys
from txbroker.consumer.operations.groups import ConsumerGroups
from txbroker.core.consuming.copies import CLEARED_HEADER, SOURCE_HEADER, GroupTopics, parse_source
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.tools.consumers import Seen, read_back

TOPIC, GROUP, PREFIX = "shop.orders", "stock", "txbroker"
PARTITIONS = 4
ITEMS, REPEATED = 5000, 100
"""Every item is ordered once, then the first ones twice more."""
POISONED = b"item-0042"

_STEP = 1000
_POLL_S = 0.05
_TIMEOUT_S = 30.0
_BOOKING_S = 0.01


class OrderMessage(NamedTuple):
    """A message: where it is in the topic, and what it is."""

    key: bytes | None
    partition: int
    offset: int
    value: bytes | None


class Stock:
    """The service: books orders.

    Attributes:
        booked: in this order.
        mended: whether the poisoned item has a price.
    """

    def __init__(self) -> None:
        self.booked: list[OrderMessage] = []
        self.mended = False

    async def book(self, message: ReceivedMessage) -> None:
        """Book an order: the handler."""
        if message.key == POISONED and not self.mended:
            raise ValueError("this item has no price")
        await asyncio.sleep(_BOOKING_S)
        self.booked.append(
            OrderMessage(message.key, message.partition, message.offset, message.value)
        )


@dataclass(frozen=True)
class KeyComparison:
    """Some keys in the topic, in the service and in the aside topic."""

    name: str
    keys: int
    sent: int
    booked: int
    aside: int
    agree: bool


def orders_to_send() -> dict[int, list[Record]]:
    """Return the messages by partition."""
    sent: dict[int, list[Record]] = {number: [] for number in range(PARTITIONS)}
    for round_, count in enumerate((ITEMS, REPEATED, REPEATED), 1):
        for item in range(count):
            record = Record(b"item-%04d" % item, b"order %d" % round_)
            sent[item % PARTITIONS].append(record)
    return sent


def set_aside(records: Sequence[Seen]) -> list[OrderMessage]:
    """Return the messages that the aside topic holds: its copies without those that are cleared."""
    held: list[OrderMessage] = []
    for seen in records:
        record = seen.record
        name, value = record.headers[0]
        source = parse_source((value or b"").decode())
        if source is None:
            continue
        if name == SOURCE_HEADER:
            held.append(OrderMessage(record.key, source.partition, source.offset, record.value))
        elif name == CLEARED_HEADER:
            held = [one for one in held if one.key != record.key or one.offset > source.offset]
    return held


def compare(
    sent: Sequence[OrderMessage],
    booked: Sequence[OrderMessage],
    aside: Sequence[OrderMessage],
    *,
    released: bool,
) -> list[KeyComparison]:
    """Compare the topic with the booked and the set-aside messages.

    They agree if each message is booked exactly once and unchanged, in the order of its key, or,
    with the poisoned key before it is released, set aside in the same way.
    """
    lines = []
    for name, poisoned in (("all other keys", False), ("the poisoned key", True)):
        here, done, kept = (
            [one for one in orders if (one.key == POISONED) == poisoned]
            for orders in (sent, booked, aside)
        )
        expected, none = (kept, done) if poisoned and not released else (done, kept)
        agree = bool(here) and not none and _by_key(expected) == _by_key(here)
        keys = len({one.key for one in here})
        lines.append(KeyComparison(name, keys, len(here), len(done), len(kept), agree))
    return lines


def _by_key(orders: Sequence[OrderMessage]) -> dict[bytes | None, list[OrderMessage]]:
    found: dict[bytes | None, list[OrderMessage]] = {}
    for order in orders:
        found.setdefault(order.key, []).append(order)
    return found


def table(lines: Sequence[KeyComparison]) -> Table:
    """Return the comparison as a table."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for title in ("keys", "messages in the topic", "booked", "set aside"):
        shown.add_column(title, justify="right")
    shown.add_column("")
    for line in lines:
        figures = (f"{each:,}" for each in (line.keys, line.sent, line.booked, line.aside))
        verdict = Text("agree", "green") if line.agree else Text("DIFFER", "bold red")
        shown.add_row(line.name, *figures, verdict)
    return shown


async def show(
    kafka: str,
    timeline: Timeline,
    console: Console,
    stock: Stock,
    topic: str = TOPIC,
    group: str = GROUP,
) -> None:
    """Play all scenes.

    Args:
        kafka: bootstrap servers.
        stock: the service.
        topic, group: created here.

    Raises:
        CommandFailed: the service, the aside topic and the topic differ.
    """
    access = load_kafka_access(kafka, environ={})
    door = KafkaConsumingDoor.from_access(access, "txbroker-demo")
    await door.start()
    try:
        timeline.title(f"1. {ITEMS:,} items are ordered, the first {REPEATED} three times")
        await _send(door, topic, timeline)
        timeline.title("2. A service books them in order for each item; one item has no price")
        async with Consumer(
            kafka,
            group=group,
            topics=[topic],
            order="key",
            on_failure="aside",
            retry_interval_s=0.3,
            commit=CommitPolicy(max_interval_s=0.2),
            after=lambda message, error: _show_result(timeline, stock, message, error),
        ) as consumer:
            running = asyncio.create_task(consumer.run(stock.book))
            try:
                await _until(running, lambda: _is_finished(consumer), "handle all messages")
                await _judge(kafka, topic, group, stock, console, released=False)
                timeline.title(
                    f"3. The item has a price now: an operator releases {_name(POISONED)}"
                )
                stock.mended = True
                await _release(door, group)
                await _until(
                    running, lambda: not consumer.statistics().aside_keys, "handle the released key"
                )
                await _judge(kafka, topic, group, stock, console, released=True)
            finally:
                consumer.stop()
                await asyncio.gather(running, return_exceptions=True)
    finally:
        await door.close()
    console.print(Text("Every message was booked exactly once, in order.", "bold green"))


async def _send(door: KafkaConsumingDoor, topic: str, timeline: Timeline) -> None:
    await door.create([TopicSpec(topic, PARTITIONS, -1, {})])
    sent = orders_to_send()
    for number, records in sent.items():
        await door.append(topic, number, records)
    total = sum(map(len, sent.values()))
    timeline.show("shop", "ordered", f"{total:,} messages in {PARTITIONS} partitions of {topic}")


def _show_result(
    timeline: Timeline, stock: Stock, message: ReceivedMessage, error: BaseException | None
) -> None:
    if error is not None:
        text = f"{_name(message.key)}, attempt {message.attempt}: {error}"
        timeline.show("stock", "failed", text)
    elif message.key == POISONED:
        timeline.show("stock", "booked", f"{_name(message.key)}, {(message.value or b'').decode()}")
    elif len(stock.booked) % _STEP == 0:
        timeline.show("stock", "booked", f"{len(stock.booked):,} orders")


def _name(key: bytes | None) -> str:
    return (key or b"").decode()


def _is_finished(consumer: Consumer) -> bool:
    lag = consumer.statistics().lag
    return len(lag) >= PARTITIONS and not any(lag.values())


async def _until(running: asyncio.Task[None], done: Callable[[], bool], what: str) -> None:
    until_s = asyncio.get_running_loop().time() + _TIMEOUT_S
    while not done():
        if running.done():
            running.result()
        if asyncio.get_running_loop().time() > until_s:
            raise CommandFailed(f"the consumer did not {what} within {_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)


async def _release(door: KafkaConsumingDoor, group: str) -> None:
    """Release all set-aside keys, as `txbroker consumers release` does."""
    view = await ConsumerGroups(door, PREFIX).view(group)
    await release(door, view, await set_aside_keys(door, view), "it has a price now")


async def _judge(
    kafka: str, topic: str, group: str, stock: Stock, console: Console, *, released: bool
) -> None:
    """Read the topics with another client, and compare."""
    aside = GroupTopics.of(PREFIX, group).aside
    seen = await read_back(kafka, (topic, aside))
    sent = [
        OrderMessage(one.record.key, one.partition, one.record.offset, one.record.value)
        for one in seen
        if one.topic == topic
    ]
    held = set_aside([one for one in seen if one.topic == aside])
    lines = compare(sent, stock.booked, held, released=released)
    console.print(table(lines))
    if not all(line.agree for line in lines):
        raise CommandFailed("the service and Kafka differ: see the table above")
