"""Measures capture from PostgreSQL without Kafka: slot, decoding, mapping and envelope.

    python -m benchmarks.relays.capture_postgres --rows 200000

A private server commits rows in transactions of several sizes; then the source reads them. Only
this process is counted as processor time, and the server uses the other core. Rows have six
columns. The Kafka client adds its own time per record.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psycopg

from tests.kit.database_servers import PostgresServer
from txbroker.databases.postgres import Postgres
from txbroker.relay.capture.changes import Change
from txbroker.relay.capture.pg.pgoutput import Decoder
from txbroker.relay.capture.pg.stream import DATA_AT, PgStream
from txbroker.relay.capture.plan import Capture, open_capture
from txbroker.relay.capture.postgres import PostgresSource

_SIZES = (1, 10, 1000, 0)
"""Rows of a transaction; 0 is all of them."""
_TABLE = """
CREATE TABLE orders (id bigserial PRIMARY KEY, customer text, amount numeric, paid bool,
created timestamptz DEFAULT now(), note text)
"""
_INSERT = """
INSERT INTO orders (customer, amount, paid, note)
SELECT 'customer-' || n, n / 100.0, n % 2 = 0, repeat('x', 60) FROM generate_series(1, {}) n
"""
_MAPPING = """
name = "bench"
database = "{url}"
[[tables]]
table = "orders"
topic = "orders"
"""


def commit(url: str, rows: int, size: int) -> None:
    """Insert rows in transactions of `size` rows."""
    size = size or rows
    with closing(psycopg.connect(url)) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.commit()
        for _ in range(rows // size):
            connection.execute(_INSERT.format(size))
            connection.commit()


async def read(source: PostgresSource, rows: int) -> tuple[int, bytes]:
    """Read until all rows were delivered; return the number of deliveries, and the position."""
    count = deliveries = 0
    while count < rows:
        delivery = await source.next()
        async for piece in delivery.pieces():
            count += len(piece)
        await source.delivered(delivery)
        deliveries += 1
    return deliveries, delivery.position


async def decode(capture: Capture, slot: str, rows: int) -> float:
    """Return how many rows are decoded in a second of processor time."""
    assert isinstance(capture.database, Postgres)
    stream = PgStream(capture.database, slot)
    await stream.open()
    await stream.start(0, slot, messages=False)
    frames: list[bytes] = []
    while sum(frame[DATA_AT] == ord("I") for frame in frames[-rows - 10 :]) < rows:
        frame = stream.take()
        if frame is None:
            await stream.readable(10)
        else:
            frames.append(frame)
            continue
    await stream.close()
    decoder = Decoder([("public", "orders")])
    began_s = time.process_time()
    found = sum(isinstance(decoder.decode(frame, DATA_AT), Change) for frame in frames)
    return found / (time.process_time() - began_s)


async def measure(rows: int) -> None:
    """Print a table."""
    with PostgresServer(wal_level="logical") as server, tempfile.TemporaryDirectory() as folder:
        url = server.create_database()
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            connection.execute(_TABLE)
        administrator = url.replace("//txbroker@", "//postgres@")
        mapping = Path(folder) / "capture.toml"
        mapping.write_text(_MAPPING.format(url=administrator))
        capture = open_capture(str(mapping))
        await capture.apply()
        source = await capture.source()
        assert isinstance(source, PostgresSource)
        position: bytes | None = None
        print("rows a transaction | rows/s | rows a CPU second | deliveries")
        for size in _SIZES:
            await asyncio.to_thread(commit, url, rows, size)
            await source.resume(position)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            deliveries, position = await read(source, rows)
            took_s = time.perf_counter() - began_s
            cpu_s = time.process_time() - began_cpu_s
            print(f"{size or rows} | {rows / took_s:,.0f} | {rows / cpu_s:,.0f} | {deliveries}")
        await source.close()
        await asyncio.to_thread(commit, url, 20_000, 0)
        decoded = await decode(capture, "txbroker_bench", 20_000)
        print(f"decoding alone: {decoded:,.0f} rows a CPU second")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description="Measure capture from PostgreSQL.")
    parser.add_argument("--rows", type=int, default=200_000)
    asyncio.run(measure(parser.parse_args().rows))


if __name__ == "__main__":
    main()
