"""A database that hangs (SIGSTOP) delays the end of a relay for a bounded time only."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.databases.places import Place
from tests.kit.cli import TXBROKER, running
from tests.kit.database_servers import DatabaseServer, MariaServer, PostgresServer
from tests.kit.topic_reader import create_topic
from tests.kit.until import unique
from tests.relay.capture.maria_world import BINLOG
from tests.relay.world import Shop
from txbroker.embedded import EmbeddedKafka

END_S = 10.0
"""The waits of an end are 4 s together; the rest is for a busy machine."""
CAPTURE = """
name = "shop"
[[tables]]
table = "orders"
topic = "{topic}"
"""


@pytest.fixture(scope="module", params=[PostgresServer, MariaServer])
def server(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    """A server that is captured, and that may hang."""
    settings = {"wal_level": "logical"} if request.param is PostgresServer else BINLOG
    with request.param(**settings) as started:
        yield started


@contextmanager
def hanging(server: DatabaseServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


async def test_relay_ends(server: DatabaseServer, kafka: EmbeddedKafka) -> None:
    shop = Shop(Place(server.create_database()), kafka.bootstrap)
    shop.add([1])
    async with shop.relay(check=print) as relay:
        ended = asyncio.create_task(relay.run())
        await relay.drain(20)
        closing = asyncio.create_task(relay.close())
        with hanging(server):
            begun_s = time.monotonic()
            await asyncio.wait_for(closing, END_S)
            await asyncio.wait_for(ended, END_S - (time.monotonic() - begun_s))
    with hanging(server):
        starting = asyncio.create_task(shop.relay().start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, END_S)


@pytest.mark.full
@pytest.mark.parametrize("what", ["outbox", "capture"])
def test_command_ends(
    server: DatabaseServer, kafka: EmbeddedKafka, tmp_path: Path, what: str
) -> None:
    url = server.create_database()
    where = ("--kafka", kafka.bootstrap, "--topic-prefix", unique("hanging"))
    if what == "outbox":
        Shop(Place(url), kafka.bootstrap)
        command = ["outbox", "relay", url, *where]
    else:
        Place(url).execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        file = tmp_path / "capture.toml"
        topic = create_topic(kafka.bootstrap, unique("orders"))
        admin = f"{server.admin_url.rpartition('/')[0]}/{url.rpartition('/')[2]}"
        file.write_text(f'database = "{admin}"\n{CAPTURE.format(topic=topic)}')
        command = ["capture", "run", str(file), *where]
        subprocess.run([TXBROKER, "capture", "apply", file, "--yes"], check=True)
    with running(*command) as process, hanging(server):
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
