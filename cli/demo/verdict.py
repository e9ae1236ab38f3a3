"""Compares what the database says with what consumers of Kafka see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from txbroker.cli.demo.shop import Order, messages_of
from txbroker.kafka.tools.readback import Seen


@dataclass(frozen=True)
class OrderComparison:
    """One order: whether it exists, where its messages are, and whether the two agree."""

    number: str
    story: str
    exists: bool
    messages: tuple[str, ...]
    agree: bool


def compare(
    stories: Mapping[str, str], orders: Sequence[Order], seen: Sequence[Seen]
) -> list[OrderComparison]:
    """Return a line for each order that is told of, in the database, or in Kafka.

    They agree where an order that exists has each of its messages exactly once, as the shop wrote
    them, and one that does not exist has none.
    """
    by_number = {order.number: order for order in orders}
    found: dict[str, list[Seen]] = {}
    for one in seen:
        key = "" if one.record.key is None else one.record.key.decode(errors="replace")
        found.setdefault(key, []).append(one)
    numbers = sorted({*stories, *by_number, *found})
    return [
        OrderComparison(
            number,
            stories.get(number, "nobody ordered it"),
            number in by_number,
            tuple(f"{one.topic}@{one.record.offset}" for one in found.get(number, [])),
            _agree(by_number.get(number), found.get(number, [])),
        )
        for number in numbers
    ]


def _agree(order: Order | None, seen: Sequence[Seen]) -> bool:
    wanted = [] if order is None else [(m.topic, m.key, m.value) for m in messages_of(order)]
    return sorted(wanted, key=repr) == sorted(
        ((one.topic, one.record.key, one.record.value) for one in seen), key=repr
    )


def table(lines: Sequence[OrderComparison]) -> Table:
    """Return the comparison as it is shown."""
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
