"""A small order service: one local transaction on SQLite, two messages on Kafka, both or neither.

A service needs this code; the rest of the demo only makes it fail.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from txbroker.sdk import BlockingTransactionalProducer, Message, Rollback, SqliteBarrier

ORDERS, PAYMENTS = "shop.orders", "shop.payments"
CREDIT = 1000
"""Maximum amount of an order."""


@dataclass(frozen=True)
class ShopOrder:
    """A customer's order."""

    number: str
    item: str
    amount: int


class Shop:
    """Takes orders: each a row in the database and a message on each of two topics.

    Args:
        producer: of the group "shop", with `barrier.check` as its check function.
        barrier: in the same database file as the orders.
        at_step: called at each step, for the demo only.
    """

    def __init__(
        self,
        database: Path,
        producer: BlockingTransactionalProducer,
        barrier: SqliteBarrier,
        at_step: Callable[[ShopOrder, str, str], None],
    ) -> None:
        self._database = database
        self._producer = producer
        self._barrier = barrier
        self._at_step = at_step

    def place(self, order: ShopOrder) -> None:
        """Take an order completely or not at all, whenever this process dies."""
        with self._producer.transaction(*messages_of(order)) as tx:
            self._at_step(order, "prepared", tx.id)
            with closing(sqlite3.connect(self._database)) as connection, connection:
                # First: from now on a check and this local transaction exclude each other.
                self._barrier.record(connection, tx.id)
                connection.execute(
                    "INSERT INTO orders (number, item, amount) VALUES (?, ?, ?)",
                    (order.number, order.item, order.amount),
                )
                if order.amount > CREDIT:
                    raise Rollback(f"{order.amount} is more than the credit of {CREDIT}")
                self._at_step(order, "before the local commit", tx.id)
            self._at_step(order, "after the local commit", tx.id)
        self._at_step(order, "decided", tx.id)


def messages_of(order: ShopOrder) -> tuple[Message, Message]:
    """Return the messages of an order."""
    key = order.number.encode()
    content = {"number": order.number, "item": order.item, "amount": order.amount}
    return (
        Message(ORDERS, key=key, value=json.dumps(content).encode()),
        Message(PAYMENTS, key=key, value=str(order.amount).encode()),
    )


def create_tables(database: Path) -> None:
    """Create the table of orders unless it exists."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS orders "
            "(number TEXT PRIMARY KEY, item TEXT NOT NULL, amount INTEGER NOT NULL)"
        )


def orders_in(database: Path) -> list[ShopOrder]:
    """Return all orders in the database."""
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT number, item, amount FROM orders ORDER BY number")
        return [ShopOrder(*row) for row in rows]
