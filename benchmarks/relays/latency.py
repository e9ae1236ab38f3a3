"""Time from a commit until a `read_committed` consumer has the message."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from typing import Any

from benchmarks.peers.kafka import Watcher, producing, watching
from benchmarks.relays.figures import Figure, middle, shown
from benchmarks.relays.places import RAW, TOPIC, VALUE, places, running
from tests.databases.places import connect
from txbroker.databases import from_url
from txbroker.relay import Message, Outbox

_WRITERS = (1, 64)
_BATCH_BYTES = 1 << 16

Write = Callable[[bytes], Awaitable[None]]


async def latency(kafka: str, rows: int) -> AsyncIterator[Figure]:
    """Commit rows one after another, and by 64 writers; each waits until its message is visible."""
    raw = {writers: await _raw_ms(kafka, writers, rows) for writers in _WRITERS}
    with places() as place:
        for kind in ("sqlite", "postgresql"):
            url = place.database(kind)
            outbox = Outbox(from_url(url, create_tables=True))
            outbox.create()
            async with running("txbroker", "outbox", "relay", url, "--kafka", kafka):
                for writers, share, aim in ((1, 0.5, 15), (64, 0.99, 150)):
                    times = await _relayed_ms(kafka, outbox, url, writers, rows)
                    alone = middle(raw[writers], share)
                    yield Figure(
                        f"commit to visible, {kind}, {writers} in flight, p{share * 100:g}",
                        middle(times, share),
                        "ms",
                        aim,
                        at_least=False,
                        raw=alone,
                        note=f"p50 {shown(middle(times))}, p99 {shown(middle(times, 0.99))}; "
                        f"a plain record, sent to visible, {shown(alone)}",
                    )


async def _raw_ms(kafka: str, writers: int, rows: int) -> list[float]:
    """Return the times of an idempotent producer from send to visible, sorted."""
    async with producing(kafka, _BATCH_BYTES) as producer, watching(kafka, RAW) as watcher:

        async def write(key: bytes) -> None:
            await producer.send(RAW, VALUE, key)

        return await _times(watcher, [write] * writers, rows)


async def _relayed_ms(kafka: str, outbox: Outbox, url: str, writers: int, rows: int) -> list[float]:
    """Return the times from commit to visible, sorted."""
    guard = asyncio.Lock()  # SQLite has one writer at a time
    in_sqlite = url.startswith("sqlite")

    def add(connection: Any, key: bytes) -> None:
        if in_sqlite:
            connection.execute("BEGIN IMMEDIATE")
        outbox.add(connection, Message(TOPIC, key, VALUE))
        connection.commit()

    def writer(connection: Any) -> Write:
        async def write(key: bytes) -> None:
            if in_sqlite:
                async with guard:
                    add(connection, key)
            else:
                await asyncio.to_thread(add, connection, key)

        return write

    async with AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(watching(kafka, TOPIC))
        opened = [_sqlite(url) if in_sqlite else connect(url) for _ in range(writers)]
        for connection in opened:
            stack.enter_context(closing(connection))
        return await _times(watcher, [writer(connection) for connection in opened], rows)


async def _times(watcher: Watcher, writers: list[Write], rows: int) -> list[float]:
    times: list[float] = []

    async def run(number: int, write: Write) -> None:
        for n in range(rows // len(writers)):
            key = f"{len(writers)}-{number}-{n}".encode()
            seen = watcher.expect(key)
            await write(key)
            began_s = time.monotonic()
            times.append((await seen - began_s) * 1000)

    await asyncio.gather(*(run(number, write) for number, write in enumerate(writers)))
    return sorted(times)


def _sqlite(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=20)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
