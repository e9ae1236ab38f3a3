"""What relays and captures cost in which nothing happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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
_CPU_MORE_S = 0.6
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

    def __str__(self) -> str:
        return (
            f"{shown(self.statements)} statements, {shown(self.requests)} requests to Kafka; "
            f"CPU s: relay {self.relay_cpu_s:.2f}, server {self.server_cpu_s:.2f}, "
            f"start {self.start_cpu_s:.2f}; {self.memory_mib:.0f} MiB"
        )

    @property
    def cpu_s(self) -> float:
        return self.relay_cpu_s + self.server_cpu_s


async def idle(kafka: str, tables: int) -> list[Figure]:
    """Measure idle captures of one table and of many, and idle relays of outboxes."""
    found = []
    with places(log_statement="all") as place:
        for kind in ("sqlite", "postgresql", "mariadb"):
            url = place.database(kind)
            Outbox(from_url(url, create_tables=True)).create()
            cost = await _measure(place, kind, kafka, "outbox", "relay", url)
            found.append(
                Figure(f"idle relay, {kind}", cost.cpu_s, "CPU s a minute", note=str(cost))
            )
        for kind in ("postgresql", "mariadb"):
            one, many = [await _captured(place, kind, kafka, count) for count in (1, tables)]
            what = f"{tables:,} idle tables, {kind}"
            found += [
                Figure(f"1 idle table, {kind}", one.cpu_s, "CPU s a minute", note=str(one)),
                Figure(what, many.cpu_s, "CPU s a minute", note=str(many)),
                Figure(
                    f"{what}, more than 1: processor time of relay and server",
                    many.cpu_s - one.cpu_s,
                    "CPU s a minute",
                    _CPU_MORE_S,
                    at_least=False,
                ),
                Figure(
                    f"{what}, more than 1: memory",
                    many.memory_mib - one.memory_mib,
                    "MiB",
                    _MEMORY_MORE_MIB,
                    at_least=False,
                ),
            ]
    return found


async def _captured(place: Places, kind: str, kafka: str, count: int) -> Idle:
    url = place.as_admin(kind, place.database(kind))
    names = [f"t{number}" for number in range(count)]
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
            yield lambda: _questions(connection)


def _logged(log: Path) -> int:
    content = log.read_bytes()
    return content.count(b"LOG:  statement: ") + content.count(b"LOG:  execute ")


def _questions(connection: Any) -> int:
    with closing(connection.cursor()) as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(cursor.fetchone()[1])
