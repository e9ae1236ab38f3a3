"""How fast relays and captures deliver what waits, as processes from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

from benchmarks.relays.figures import Figure, shown
from benchmarks.relays.places import PIECE, TOPIC, VALUE, Ended, places, raw_rate, txbroker
from tests.databases.places import connect
from txbroker.databases import from_url
from txbroker.relay import Outbox

_MEMORY_MIB = 250


async def drain(kafka: str, rows: int) -> AsyncIterator[Figure]:
    """Drain waiting rows of 100 bytes, each its own transaction."""
    raw = await raw_rate(kafka)
    with places() as place:
        for kind in ("sqlite", "postgresql", "mariadb"):
            url = place.database(kind)
            Outbox(from_url(url, create_tables=True)).create()
            await asyncio.to_thread(_fill, url, rows)
            ended = await asyncio.to_thread(
                txbroker, "outbox", "relay", url, "--kafka", kafka, "--until-drained"
            )
            for figure in _figures(f"drain {kind}, {rows:,} rows", ended, rows, raw, 15_000):
                yield figure


async def capture(kafka: str, rows: int) -> AsyncIterator[Figure]:
    """Capture rows of 100 bytes, in transactions of ten, that were committed before."""
    raw = await raw_rate(kafka)
    with places() as place:
        for kind, aim in (("postgresql", 20_000), ("mariadb", 8_000)):
            url = place.as_admin(kind, place.database(kind))
            file = place.mapping(kind, url, ["orders"])
            with closing(connect(url)) as connection:
                connection.cursor().execute(
                    "CREATE TABLE orders (id bigint PRIMARY KEY, customer varchar(40), note text)"
                )
                connection.commit()
                await asyncio.to_thread(txbroker, "capture", "apply", file, "--yes")
                await asyncio.to_thread(_change, connection, rows)
            ended = await asyncio.to_thread(
                txbroker, "capture", "run", file, "--kafka", kafka, "--until-drained"
            )
            for figure in _figures(f"capture {kind}, {rows:,} rows", ended, rows, raw, aim):
                yield figure


def _figures(what: str, ended: Ended, rows: int, raw: float, aim: float) -> Iterator[Figure]:
    note = f"{shown(rows / ended.cpu_s)} a CPU second; raw Kafka {shown(raw)}"
    yield Figure(what, rows / ended.seconds, "a second", aim, raw=raw, note=note)
    yield Figure(f"{what}: memory", ended.memory_mib, "MiB", _MEMORY_MIB, at_least=False)


def _fill(url: str, rows: int) -> None:
    """Insert rows, each as a separate unit."""
    columns = "(topic, message_key, message_value, unit)"
    with closing(connect(url)) as connection:
        cursor = connection.cursor()
        mark = "?" if url.startswith("sqlite") else "%s"
        for begin in range(0, rows, PIECE):
            values = [
                (TOPIC, b"k%d" % (n % 1000), VALUE, f"u{n}") for n in range(begin, begin + PIECE)
            ]
            cursor.executemany(
                f"INSERT INTO txbroker_outbox {columns} VALUES ({', '.join([mark] * 4)})", values
            )
        connection.commit()


def _change(connection: Any, rows: int) -> None:
    cursor = connection.cursor()
    for begin in range(0, rows, 10):
        values = ", ".join(f"({n}, 'customer {n}', '{'x' * 60}')" for n in range(begin, begin + 10))
        cursor.execute(f"INSERT INTO orders VALUES {values}")
        connection.commit()
