"""A process of a shop whose messages go through an outbox: it writes orders in three ways.

It stops at an order if the demo wants to kill it there, and reports that on stdout.

Arguments: database, first and last order, where to stop at the last order.
"""

import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from txbroker.cli.demo.shop import CREDIT, ShopOrder, messages_of
from txbroker.cli.demo.worker import report, wait
from txbroker.databases import SQLite
from txbroker.relay import Decision, Outbox

SCHEMES = ("add", "transaction", "prepare, decide")
PREPARED, COMMITTED = "before the local transaction", "after the local transaction"
_ITEMS = ("lamp", "chair", "table", "clock", "piano")
_PAUSE_S = 0.005


class CreditTooSmall(Exception):
    """The customer's credit is too small."""


class OutboxShop:
    """Takes orders: each a row in the database, and two messages in its outbox.

    Args:
        at_step: called between the transactions of an order, for the demo only.
    """

    def __init__(self, database: Path, at_step: Callable[[str], None]) -> None:
        self._outbox = Outbox(SQLite(database))
        self._connection = sqlite3.connect(database, timeout=30)
        self._at_step = at_step

    def place(self, order: ShopOrder, scheme: str) -> None:
        """Take an order completely or not at all, whenever this process dies.

        Raises:
            CreditTooSmall: nothing is stored.
        """
        connection, messages = self._connection, messages_of(order)
        if scheme == "add":
            with connection:
                self._insert(order)
                self._outbox.add(connection, *messages)
        elif scheme == "transaction":
            with self._outbox.transaction(connection, *messages):
                self._insert(order)
        else:
            self._place_prepared(order)

    def _place_prepared(self, order: ShopOrder) -> None:
        """Take an order as if it were in another database than the outbox: the relay's check
        decides if this process dies in between."""
        prepared = self._outbox.prepare(*messages_of(order))
        self._at_step(PREPARED)
        decision = Decision.ROLLBACK
        try:
            with self._connection:
                self._insert(order)
            decision = Decision.COMMIT
            self._at_step(COMMITTED)
        finally:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._outbox.decide(self._connection, prepared, decision)

    def _insert(self, order: ShopOrder) -> None:
        self._connection.execute(
            "INSERT INTO orders (number, item, amount) VALUES (?, ?, ?)",
            (order.number, order.item, order.amount),
        )
        if order.amount > CREDIT:
            raise CreditTooSmall

    def close(self) -> None:
        self._connection.close()


def order_of(number: int) -> tuple[ShopOrder, str]:
    """Return an order and how it is written; every seventh one is refused."""
    amount = CREDIT + 1 if number % 7 == 0 else 10 + number % 90
    order = ShopOrder(f"order-{number:04}", _ITEMS[number % len(_ITEMS)], amount)
    return order, SCHEMES[number % len(SCHEMES)]


def main(database: str, first: str, last: str, stop_at: str) -> None:
    """Place orders."""
    final = False

    def at_step(step: str) -> None:
        if final and step == stop_at:
            report(step=step)
            wait()

    with closing(OutboxShop(Path(database), at_step)) as shop:
        report(step="ready")
        for number in range(int(first), int(last) + 1):
            final = number == int(last)
            with suppress(CreditTooSmall):
                shop.place(*order_of(number))
            time.sleep(_PAUSE_S)
    report(step="over")


if __name__ == "__main__":
    main(*sys.argv[1:])
