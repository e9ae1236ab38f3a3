"""What relays and captures cost in which nothing happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.relays.counted import SIZE, counters
from benchmarks.relays.figures import Figure, shown
from benchmarks.relays.places import Places, cpu_s, memory_mib, places, running, txbroker
from tests.databases.places import connect
from txbroker.databases import from_url
from txbroker.relay import Outbox

_TABLES = 1_000
_REST_S, _MEASURED_S = 12.0, 30.0
"""The first covers what a start does later: counting rows, statistics of connections."""
_CPU_MORE_S = 0.1
"""Of a minute: 1 % of a core, which is less than runs differ by."""
_MEMORY_MORE_MIB = 16


class Idle(NamedTuple):
    """The cost of a process without work; of a minute unless noted."""

    start_s: float
    start_cpu_s: float
    memory_mib: float
    relay_cpu_s: float
    server_cpu_s: float
    statements: float
    requests: float

    @property
    def cpu_s(self) -> float:
        return self.relay_cpu_s + self.server_cpu_s

    def figure(self, what: str) -> Figure:
        """Return its processor time as a figure, with all else as a note."""
        note = (
            f"{shown(self.statements)} statements, {shown(self.requests)} requests to Kafka; "
            f"CPU s: relay {self.relay_cpu_s:.2f}, server {self.server_cpu_s:.2f}; start "
            f"{self.start_s:.1f} s, CPU {self.start_cpu_s:.2f}; {self.memory_mib:.0f} MiB"
        )
        return Figure(f"{what}: CPU of relay and server", self.cpu_s, "s a minute", note=note)


async def idle(kafka: str, tables: int) -> AsyncIterator[Figure]:
    """Measure idle captures of one table and of many, and idle relays of outboxes."""
    with places(log_statement="all") as place:
        for kind in ("sqlite", "postgresql", "mariadb"):
            url = place.database(kind)
            Outbox(from_url(url, create_tables=True)).create()
            cost = await _measure(place, kind, kafka, "outbox", "relay", url)
            yield cost.figure(f"idle relay, {kind}")
        for kind in ("postgresql", "mariadb"):
            one = await _captured(place, kind, kafka, 1)
            yield one.figure(f"1 idle table, {kind}")
            many = await _captured(place, kind, kafka, tables)
            what = f"{tables:,} idle tables, {kind}"
            yield many.figure(what)
            more_cpu_s = round(many.cpu_s - one.cpu_s, 2)
            more_mib = many.memory_mib - one.memory_mib
            what = f"{what}, more than 1"
            yield Figure(f"{what}: CPU", more_cpu_s, "s a minute", _CPU_MORE_S, at_least=False)
            yield Figure(f"{what}: memory", more_mib, "MiB", _MEMORY_MORE_MIB, at_least=False)


async def _captured(place: Places, kind: str, kafka: str, tables: int) -> Idle:
    url = place.as_admin(kind, place.database(kind))
    names = [f"t{number}" for number in range(tables)]
    with closing(connect(url)) as connection:
        for name in names:
            connection.cursor().execute(
                f"CREATE TABLE {name} (id bigint PRIMARY KEY, customer varchar(40), note text)"
            )
        connection.commit()
    file = place.mapping(kind, url, names)
    await asyncio.to_thread(txbroker, "capture", "apply", file, "--yes")
    return await _measure(place, kind, kafka, "capture", "run", file)


async def _measure(place: Places, kind: str, kafka: str, *command: str) -> Idle:
    """Run a command without work, and measure it."""
    file = place.folder / "counts"
    file.write_bytes(bytes(SIZE))
    counts = counters(file)
    server = 0 if kind == "sqlite" else place.servers[kind].pid
    began_s = time.monotonic()
    with _statements(place, kind, counts) as statements:
        arguments = (str(file), *command, "--kafka", kafka)
        async with running("benchmarks.relays.counted", *arguments) as pid:
            start_s, start_cpu_s = time.monotonic() - began_s, cpu_s(pid)
            await asyncio.sleep(_REST_S)

            def sample() -> list[float]:
                times = [cpu_s(pid), cpu_s(server) if server else 0.0]
                return [*times, statements(), counts[0]]

            before = sample()
            await asyncio.sleep(_MEASURED_S)
            after = sample()
            minute = [
                (late - early) * 60 / _MEASURED_S for early, late in zip(before, after, strict=True)
            ]
            return Idle(start_s, start_cpu_s, memory_mib(pid), *minute)


@contextmanager
def _statements(place: Places, kind: str, counts: memoryview) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many statements there were."""
    if kind == "sqlite":
        yield lambda: counts[1]
    elif kind == "postgresql":
        yield lambda: _logged(place.servers[kind].folder / "log")
    else:
        with closing(connect(place.servers[kind].admin_url)) as connection:
            own = count(1)
            yield lambda: _questions(connection) - next(own)


def _logged(log: Path) -> int:
    content = log.read_bytes()
    return content.count(b"LOG:  statement: ") + content.count(b"LOG:  execute ")


def _questions(connection: Any) -> int:
    with closing(connection.cursor()) as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(cursor.fetchone()[1])
