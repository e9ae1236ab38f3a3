"""Databases with an outbox, as a test's own SQL sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.databases.places import Place, run
from txbroker.core.records import Message
from txbroker.relay.outbox import Outbox

COLUMNS = (
    "position, id, unit, state, topic, message_key, message_value, headers, partition_id, "
    "timestamp_ms, order_key, shard, timeout_at, created_at, cause"
)


class Row(NamedTuple):
    """A row of the outbox."""

    position: int
    id: str
    unit: str
    state: str
    topic: str
    key: Any
    value: Any
    headers: str
    partition: int | None
    timestamp_ms: int | None
    order_key: str | None
    shard: int
    timeout_at: int | None
    created_at: int
    cause: str


def rows(place: Place) -> list[Row]:
    """Return all rows that are committed, by position."""
    found = place.select(f"SELECT {COLUMNS} FROM txbroker_outbox ORDER BY position")
    return [Row(*row) for row in found]


def states(place: Place) -> list[tuple[str, Any]]:
    """Return state and key of each row."""
    return [(row.state, row.key) for row in rows(place)]


def orders(place: Place) -> list[str]:
    """Return the business rows."""
    return sorted(row[0] for row in place.select("SELECT id FROM orders"))


def order(connection: Any, id: str) -> None:
    """Insert a business row."""
    run(connection, f"INSERT INTO orders VALUES ('{id}')")


def message(key: str, topic: str = "payments") -> Message:
    return Message(topic, key=key, value="10 EUR")


@contextmanager
def emptied(place: Place) -> Iterator[Outbox]:
    """Lend the outbox of a place, without rows of earlier tests."""
    outbox = Outbox(place.database)
    place.database.prepare(outbox.tables)
    with place.transaction() as connection:
        for table in ("txbroker_outbox", "orders"):
            run(connection, f"DELETE FROM {table}")
    yield outbox
    # Their connections end with the outbox.
    del outbox
