"""Deliveries of a source, read without Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec

from tests.kit.until import DEADLINE_S
from txbroker.core.encoding import ID_HEADER
from txbroker.relay.capture.plan import open_capture
from txbroker.relay.capture.snapshots.opening import open_snapshot
from txbroker.relay.source import DeliverySource


@dataclass
class Taken:
    """A delivery that was read: its records' ids, keys and values."""

    position: bytes
    ids: list[str]
    keys: list[Any]
    values: list[Any]

    @property
    def changes(self) -> list[tuple[str, Any, Any]]:
        """Operation, key and the item after each change."""
        return [
            (value["operation"], key and key["id"], (value["after"] or {}).get("item"))
            for key, value in zip(self.keys, self.values, strict=True)
        ]


async def read(source: DeliverySource, *, deliver: bool = True, empty: bool = False) -> Taken:
    """Read the next delivery that has messages.

    Args:
        deliver: acknowledge it.
        empty: take one without messages, too, which comes each second.
    """
    while True:
        async with asyncio.timeout(DEADLINE_S):
            delivery = await source.next()
            messages = [message async for piece in delivery.pieces() for message in piece]
            if deliver or not messages:
                await source.delivered(delivery)
        if messages or empty:
            return Taken(
                delivery.position,
                [(dict(each.headers)[ID_HEADER] or b"").decode() for each in messages],
                [each.key and msgspec.json.decode(each.key) for each in messages],
                [each.value and msgspec.json.decode(each.value) for each in messages],
            )


async def read_until(source: DeliverySource, count: int) -> Taken:
    """Read deliveries until they have this number of messages."""
    taken = await read(source)
    while len(taken.ids) < count:
        more = await read(source)
        taken.position = more.position
        taken.ids, taken.keys = taken.ids + more.ids, taken.keys + more.keys
        taken.values += more.values
    assert len(taken.ids) == count, taken.ids
    return taken


def rows_as_records(mapping: str, table: str) -> list[Any]:
    """Return the rows of a table with key `id` as the audit of a capture compares them, in the
    order of their keys.

    Args:
        mapping: the head of a mapping file.
    """
    with NamedTemporaryFile("w+", suffix=".toml") as file:
        file.write(f'{mapping}\n[[tables]]\ntable = "{table}"\ntopic = "t"\nkey = ["id"]\n')
        file.flush()
        capture = open_capture(file.name)
    (writer,) = capture.mapping.writers.values()
    with open_snapshot(capture.mapping, capture.database) as snapshot:
        rows = [row for piece in snapshot.pieces(writer) for row in piece]
    assert all(row.whole for row in rows)
    shown = [msgspec.json.decode(row.shown or b"") for row in rows]
    return sorted(shown, key=lambda row: row["id"])


def execute(connection: Any, statements: Sequence[str]) -> Any:
    """Execute statements, and close the connection; return the rows of the last."""
    rows: Any = []
    with closing(connection), connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
            rows = cursor.fetchall() if cursor.description else []
    return rows
