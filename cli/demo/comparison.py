"""Orders in the database against their messages in Kafka."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from txbroker.cli.demo.shop import ShopOrder, messages_of
from txbroker.kafka.tools.consumers import Seen


@dataclass(frozen=True)
class OrderComparison:
    """One order in the database and in Kafka."""

    number: str
    story: str
    exists: bool
    messages: tuple[str, ...]
    agree: bool


def compare(
    stories: Mapping[str, str], orders: Sequence[ShopOrder], seen: Sequence[Seen]
) -> list[OrderComparison]:
    """Return a comparison for each order that is expected, in the database, or in Kafka.

    They agree if an existing order has each of its messages exactly once, unchanged, and a missing
    order has none.
    """
    by_number = {order.number: order for order in orders}
    messages: dict[str, list[Seen]] = {}
    for message in seen:
        key = "" if message.record.key is None else message.record.key.decode(errors="replace")
        messages.setdefault(key, []).append(message)
    numbers = sorted({*stories, *by_number, *messages})
    return [
        OrderComparison(
            number,
            stories.get(number, "not an order of this demo"),
            number in by_number,
            tuple(f"{one.topic}@{one.record.offset}" for one in messages.get(number, [])),
            _agree(by_number.get(number), messages.get(number, [])),
        )
        for number in numbers
    ]


def _agree(order: ShopOrder | None, seen: Sequence[Seen]) -> bool:
    expected = [] if order is None else [(m.topic, m.key, m.value) for m in messages_of(order)]
    return sorted(expected, key=repr) == sorted(
        ((one.topic, one.record.key, one.record.value) for one in seen), key=repr
    )
