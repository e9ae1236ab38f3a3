"""Figures of relays and captures, against their aims: `python -m benchmarks.relays PART`.

Each part runs `txbroker outbox relay` or `txbroker capture run` in a separate process, with an
embedded Kafka and private database servers, whose commits are not synced; SQLite in journal mode
WAL. A rate is also given as a ratio to raw Kafka: the same number of records of 100 bytes, appended
by an idempotent producer. The exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.kafka import create_topics, running_kafka, watching
from tests.databases.places import connect
from tests.kit.database_servers import MariaServer, PostgresServer
from txbroker.config.settings import load_kafka_access
from txbroker.core.records import Record
from txbroker.databases import from_url
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.relay import Message, Outbox

_TOPIC = "orders"
_VALUE = b"x" * 100
_PIECE = 10_000
_MAPPING = """
name = "bench"
database = "{url}"
[[tables]]
table = "{table}"
topic = "orders"
"""


class Aim(NamedTuple):
    """A figure and its aim: at least, or at most."""

    what: str
    figure: float
    unit: str
    aim: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.figure >= self.aim if self.at_least else self.figure <= self.aim

    def __str__(self) -> str:
        bound = "≥" if self.at_least else "≤"
        state = "" if self.met else ": MISSED"
        return f"{self.what}: {self.figure:,.4g} {self.unit} (aim {bound} {self.aim:,g}){state}"


@contextmanager
def databases(kinds: list[str]) -> Iterator[dict[str, str]]:
    """Run servers; give the URL of a new database of each kind."""
    with (
        tempfile.TemporaryDirectory() as folder,
        PostgresServer(wal_level="logical", fsync="off") as postgres,
        MariaServer(
            log_bin="binlog", binlog_format="ROW", binlog_row_metadata="FULL",
            innodb_flush_log_at_trx_commit=2,
        ) as mariadb,
    ):  # fmt: skip
        made: dict[str, Callable[[], str]] = {
            "sqlite": lambda: f"sqlite:///{folder}/shop.db",
            "postgresql": postgres.create_database,
            "mariadb": mariadb.create_database,
        }
        yield {kind: made[kind]() for kind in kinds} | {
            "postgresql-admin": postgres.admin_url,
            "mariadb-admin": mariadb.admin_url,
        }


class Ended(NamedTuple):
    """A process that has ended: its processor time and its largest memory."""

    seconds: float
    cpu_s: float
    memory_mib: float


def txbroker(*arguments: str) -> Ended:
    """Run a command to its end, and measure it."""
    began_s = time.monotonic()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-m", "txbroker", *arguments], dict(os.environ)
    )
    _pid, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"txbroker {' '.join(arguments)} failed")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ended(time.monotonic() - began_s, cpu_s, usage.ru_maxrss / 1024)


async def raw_rate(kafka: str, count: int) -> float:
    """Return records a second of an idempotent producer."""
    door = KafkaConsumingDoor.from_access(load_kafka_access(kafka))
    await door.start()
    records = [Record(b"k%d" % n, _VALUE, timestamp_ms=1_700_000_000_000) for n in range(_PIECE)]
    began_s = time.monotonic()
    for n in range(count // _PIECE):
        await door.append("raw", n % 4, records)
    took_s = time.monotonic() - began_s
    await door.close()
    return count / took_s


# --- parts -----------------------------------------------------------------------------------


async def drain(kafka: str, rows: int) -> list[Aim]:
    """Drain waiting rows of 100 bytes, each its own transaction."""
    raw, aims = await raw_rate(kafka, 200_000), []
    with databases(["sqlite", "postgresql", "mariadb"]) as urls:
        for kind in ("sqlite", "postgresql", "mariadb"):
            url = urls[kind]
            Outbox(from_url(url, create_tables=True)).create()
            await asyncio.to_thread(fill, url, rows)
            small = await asyncio.to_thread(
                txbroker, "outbox", "relay", url, "--kafka", kafka, "--until-drained"
            )
            rate = rows / small.seconds
            aims += [
                Aim(f"drain {kind}, {rows:,} rows", rate, "messages/s", 15_000),
                Aim(f"drain {kind}, memory", small.memory_mib, "MiB", 250, at_least=False),
            ]
            print(f"  {rate / raw:.2f} x raw Kafka, {rows / small.cpu_s:,.0f} a CPU second")
    return aims


def fill(url: str, rows: int) -> None:
    """Insert rows, each as a separate unit."""
    columns = "(topic, message_key, message_value, unit)"
    with closing(connect(url)) as connection:
        cursor = connection.cursor()
        mark = "?" if url.startswith("sqlite") else "%s"
        for begin in range(0, rows, _PIECE):
            values = [
                (_TOPIC, b"k%d" % (n % 1000), _VALUE, f"u{n}") for n in range(begin, begin + _PIECE)
            ]
            cursor.executemany(
                f"INSERT INTO txbroker_outbox {columns} VALUES ({', '.join([mark] * 4)})", values
            )
        connection.commit()


async def latency(kafka: str, rows: int) -> list[Aim]:
    """Commit rows one after another, and by 64 writers; measure until each is visible."""
    aims = []
    with databases(["postgresql", "sqlite"]) as urls:
        for kind in ("sqlite", "postgresql"):
            database = from_url(urls[kind], create_tables=True)
            outbox = Outbox(database)
            outbox.create()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "txbroker", "outbox", "relay", urls[kind], "--kafka", kafka,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert process.stderr is not None
            await process.stderr.readline()
            try:
                one = await _visible_ms(kafka, outbox, urls[kind], 1, rows)
                many = await _visible_ms(kafka, outbox, urls[kind], 64, rows)
            finally:
                process.terminate()
                await process.wait()
            aims += [
                Aim(f"visible {kind}, 1 in flight, p50", one[len(one) // 2], "ms", 15, False),
                Aim(
                    f"visible {kind}, 64 in flight, p99",
                    many[len(many) * 99 // 100],
                    "ms",
                    150,
                    False,
                ),
            ]
    return aims


async def _visible_ms(kafka: str, outbox: Outbox, url: str, writers: int, rows: int) -> list[float]:
    """Return the times from commit to visible, sorted; each writer waits for its message."""
    times: list[float] = []
    guard = asyncio.Lock()  # SQLite has one writer at a time

    def write(connection: Any, key: bytes) -> None:
        if url.startswith("sqlite"):
            connection.execute("BEGIN IMMEDIATE")
        outbox.add(connection, Message(_TOPIC, key, _VALUE))
        connection.commit()

    async with watching(kafka, _TOPIC) as watcher:

        async def writer(number: int) -> None:
            with closing(_sqlite(url) if url.startswith("sqlite") else connect(url)) as own:
                for n in range(rows // writers):
                    key = f"{writers}-{number}-{n}".encode()
                    seen = watcher.expect(key)
                    if url.startswith("sqlite"):
                        async with guard:
                            write(own, key)
                    else:
                        await asyncio.to_thread(write, own, key)
                    began_s = time.monotonic()
                    times.append((await seen - began_s) * 1000)

        await asyncio.gather(*map(writer, range(writers)))
    return sorted(times)


def _sqlite(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=20)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


async def capture(kafka: str, rows: int) -> list[Aim]:
    """Capture rows of 100 bytes, in transactions of ten, that were committed before."""
    raw, aims = await raw_rate(kafka, 200_000), []
    with databases(["postgresql", "mariadb"]) as urls, tempfile.TemporaryDirectory() as folder:
        for kind, aim in (("postgresql", 20_000), ("mariadb", 8_000)):
            url = re.sub("//[^@]*@", _login(urls[f"{kind}-admin"]), urls[kind])
            database = url.rpartition("/")[2]
            table = "public.orders" if kind == "postgresql" else f"{database}.orders"
            file = Path(folder) / f"{kind}.toml"
            file.write_text(_MAPPING.format(url=url, table=table).replace("bench", f"b-{kind}"))
            with closing(connect(url)) as connection:
                connection.cursor().execute(
                    "CREATE TABLE orders (id bigint PRIMARY KEY, customer varchar(40), note text)"
                )
                connection.commit()
                await asyncio.to_thread(txbroker, "capture", "apply", str(file), "--yes")
                await asyncio.to_thread(_change, connection, rows)
            ended = await asyncio.to_thread(
                txbroker, "capture", "run", str(file), "--kafka", kafka, "--until-drained"
            )
            rate = rows / ended.seconds
            aims += [
                Aim(f"capture {kind}, {rows:,} rows", rate, "rows/s", aim),
                Aim(f"capture {kind}, memory", ended.memory_mib, "MiB", 250, at_least=False),
            ]
            print(f"  {rate / raw:.2f} x raw Kafka, {rows / ended.cpu_s:,.0f} a CPU second")
    return aims


def _login(admin: str) -> str:
    found = re.search("//[^@]*@", admin)
    assert found is not None
    return found[0]


def _change(connection: Any, rows: int) -> None:
    cursor = connection.cursor()
    for begin in range(0, rows, 10):
        values = ", ".join(f"({n}, 'customer {n}', '{'x' * 60}')" for n in range(begin, begin + 10))
        cursor.execute(f"INSERT INTO orders VALUES {values}")
        connection.commit()


PARTS: dict[str, Callable[[str, int], Awaitable[list[Aim]]]] = {
    "drain": drain,
    "latency": latency,
    "capture": capture,
}
_ROWS = {"drain": 1_000_000, "latency": 2_000, "capture": 300_000}


def main() -> int:
    """Measure, and print; return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", type=int)
    given = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder, running_kafka(Path(folder)) as kafka:
        asyncio.run(create_topics(kafka.bootstrap, [_TOPIC, "raw"]))
        for part in given.parts:
            for aim in asyncio.run(PARTS[part](kafka.bootstrap, given.rows or _ROWS[part])):
                missed += not aim.met
                print(aim, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
