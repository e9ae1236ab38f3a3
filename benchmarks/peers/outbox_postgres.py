"""A polled outbox on PostgreSQL: a private cluster in a temporary folder, no service.

The services are clients of `pgbench`, and the relay speaks through `psql`, so no driver is needed.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvloop

from benchmarks.peers.base import Figure, Missing, Plan, child
from benchmarks.peers.kafka import KAFKA, create_topics, running_kafka, watching
from benchmarks.peers.outbox import POLL_S, ROWS, TOPIC, Relaying, Row, figure, relaying

ACCOUNT = "postgres"
"""Whom the server runs as where we are root, which it refuses: Debian's package makes it."""
START_S = 60.0
_SETTINGS = ("listen_addresses=", "synchronous_commit=off", "max_connections=600", "port=5432")
_TABLES = """
CREATE TABLE orders (id text PRIMARY KEY, state text NOT NULL);
CREATE TABLE outbox (number bigserial PRIMARY KEY, key text NOT NULL, value text NOT NULL);
"""
# A key begins with its time of creation, from which the latency is computed.
_ORDER = """
\\set one random(1, 1000000000000)
BEGIN;
WITH made AS (
    SELECT extract(epoch FROM clock_timestamp()) || '-' || :client_id || '-' || :one AS key),
  placed AS (INSERT INTO orders SELECT key, 'placed' FROM made)
{message} FROM made;
COMMIT;
"""
_OLDEST = f"SELECT number, key, value FROM outbox ORDER BY number LIMIT {ROWS};"
_END = "--end--"


class PostgresOutbox:
    """An outbox table in PostgreSQL, polled."""

    name = "outbox-postgres"
    title = "polled outbox, PostgreSQL"
    counts = (
        "an order and its message inserted in one local transaction by pgbench, published by a "
        f"relay that polls every {POLL_S * 1000:.0f} ms, at least once; synchronous_commit off"
    )

    message = "INSERT INTO outbox (key, value) SELECT key, repeat('x', {size})"
    """SQL that stores the message of an order `made`."""
    wal_level = "replica"

    def __init__(self) -> None:
        self._folder = Path()

    def version(self) -> str:
        """Return name and version of the software.

        Raises:
            Missing: it is not installed.
        """
        folders = [*Path("/usr/lib/postgresql").glob("*/bin"), *_on_path()]
        whole = [
            one for one in folders if (one / "initdb").exists() and (one / "postgres").exists()
        ]
        if not whole or not shutil.which("pgbench") or not shutil.which("psql"):
            raise Missing("PostgreSQL's server, psql and pgbench are not installed")
        self._folder = max(whole)
        if os.getuid() == 0:
            try:
                pwd.getpwnam(ACCOUNT)
            except KeyError:
                raise Missing(f"it refuses to run as root, and there is no {ACCOUNT}") from None
        done = subprocess.run(
            [self._folder / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        return f"{done.stdout.strip()}, {KAFKA}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        """Measure on a new cluster and Kafka."""
        with (
            running_kafka(folder) as kafka,
            _cluster(self._folder, folder, self.wal_level) as sockets,
        ):
            uvloop.run(create_topics(kafka.bootstrap, [TOPIC]))
            script = folder / "order.sql"
            script.write_text(_ORDER.format(message=self.message.format(size=plan.size)))
            self.prepare(sockets)
            for in_flight in plan.in_flight:
                services = _Services(sockets, script, in_flight, folder)
                relay = self.relaying(kafka.bootstrap, sockets)
                yield uvloop.run(
                    _measure(kafka.bootstrap, plan, services, relay, lambda: self.pending(sockets))
                )

    def prepare(self, sockets: Path) -> None:
        """Create the tables."""
        psql = ["psql", "-X", "-q", "-h", sockets, "-U", ACCOUNT, "-c", _TABLES, "postgres"]
        subprocess.run(psql, check=True, capture_output=True)

    def relaying(self, kafka: str, sockets: Path) -> Relaying:
        """Publish the outbox during a block."""
        return _polling(kafka, sockets)

    async def pending(self, sockets: Path) -> bool:
        """Return whether rows wait."""
        async with _store(sockets) as other:
            return bool(await other.oldest())


class _Services:
    """Clients that place orders."""

    def __init__(self, sockets: Path, script: Path, clients: int, folder: Path) -> None:
        self.clients = clients
        self._script = script
        self._sockets = sockets
        self._folder = folder

    async def run(self, seconds: float, name: str) -> tuple[float, list[float]]:
        """Place orders for `seconds`; return the rate, and the duration of each in seconds."""
        log = self._folder / f"{name}-{self.clients}"
        # Statements are prepared once, as drivers do.
        command = ["pgbench", "-n", "-M", "prepared", "-h", str(self._sockets), "-U", ACCOUNT]
        command += ["-f", str(self._script)]
        command += ["-c", str(self.clients), "-j", str(min(2, self.clients))]
        command += ["-T", str(max(1, round(seconds))), "-l", "--log-prefix", str(log), "postgres"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            out, _ = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        match = re.search(r"^tps = ([\d.]+)", out.decode(), re.M)
        if match is None:
            raise Missing(f"pgbench failed: {out.decode().strip().splitlines()[-1]}")
        times = [
            int(line.split()[2]) / 1e6
            for file in self._folder.glob(f"{log.name}.*")
            for line in file.read_text().splitlines()
        ]
        return float(match[1]), times


class _Stamped:
    """The start time of each message, from its key."""

    def __init__(self) -> None:
        self._clock_offset_s = time.time() - time.monotonic()

    def pop(self, key: bytes, default: None) -> float:
        """Return it, as a monotonic time."""
        return float(key.partition(b"-")[0]) - self._clock_offset_s


class PsqlStore:
    """The relay's side of the database, through one psql."""

    def __init__(self, psql: asyncio.subprocess.Process) -> None:
        self._psql = psql

    async def oldest(self) -> Sequence[Row]:
        rows = []
        for line in await self._ask(_OLDEST):
            number, key, value = line.split(b"|")
            rows.append((int(number), key, value))
        return rows

    async def remove(self, rows: Sequence[Row]) -> None:
        # By their numbers: one that is smaller may be committed later.
        numbers = ",".join(str(number) for number, _, _ in rows)
        await self._ask(f"DELETE FROM outbox WHERE number IN ({numbers});")

    async def _ask(self, statement: str) -> list[bytes]:
        assert self._psql.stdin is not None
        assert self._psql.stdout is not None
        self._psql.stdin.write(f"{statement}\n\\echo {_END}\n".encode())
        lines = []
        while (line := (await self._psql.stdout.readline()).rstrip(b"\n")) != _END.encode():
            if not line:
                raise Missing("psql has ended")
            lines.append(line)
        return lines


@asynccontextmanager
async def _store(sockets: Path) -> AsyncIterator[PsqlStore]:
    command = ["psql", "-X", "-q", "-A", "-t", "-h", str(sockets), "-U", ACCOUNT, "postgres"]
    pipe = asyncio.subprocess.PIPE
    psql = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
    try:
        yield PsqlStore(psql)
    finally:
        psql.kill()
        await psql.wait()


@asynccontextmanager
async def _polling(kafka: str, sockets: Path) -> AsyncIterator[asyncio.Task[None]]:
    async with _store(sockets) as store, relaying(kafka, store) as relay:
        yield relay


async def _measure(
    kafka: str,
    plan: Plan,
    services: _Services,
    relaying: Relaying,
    pending: Callable[[], Awaitable[bool]],
) -> Figure:
    """Measure while services place orders; `relaying` as in `outbox.measure`."""
    async with watching(kafka, TOPIC) as watcher, relaying as relay:
        watcher.began = _Stamped()
        await services.run(plan.warmup_s, "warmup")
        begin = time.monotonic()
        inserted = await services.run(plan.duration_s, "measured")
        found = figure(plan, services.clients, inserted, watcher, begin)
        while not relay.done() and await pending():
            await asyncio.sleep(0.1)
    return found


@contextmanager
def _cluster(programs: Path, folder: Path, wal_level: str) -> Iterator[Path]:
    """Run a server; give the folder of its socket."""
    root = os.getuid() == 0
    account = pwd.getpwnam(ACCOUNT) if root else None
    options = {"user": ACCOUNT, "group": account.pw_gid, "extra_groups": []} if account else {}
    # Not below our own folder, which only we may enter.
    with tempfile.TemporaryDirectory(prefix="txbroker-pg-", ignore_cleanup_errors=True) as made:
        home = Path(made)
        if account is not None:
            os.chown(home, account.pw_uid, account.pw_gid)
        data = home / "data"
        initdb = [programs / "initdb", "-D", data, "-U", ACCOUNT, "-A", "trust", "-N"]
        done = subprocess.run(
            initdb, cwd=home, capture_output=True, text=True, check=False, **options
        )
        if done.returncode != 0:
            raise Missing(f"initdb failed: {done.stderr.strip()}")
        command = [programs / "postgres", "-D", data, "-k", home]
        for setting in (*_SETTINGS, f"wal_level={wal_level}"):
            command += ["-c", setting]
        with child(command, folder, "postgres", **options) as server:
            _wait(home, server)
            try:
                yield home
            finally:
                server.send_signal(signal.SIGQUIT)  # its backends end with it
                server.wait()


def _wait(home: Path, server: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_S
    ready = ["pg_isready", "-q", "-h", str(home), "-U", ACCOUNT]
    while subprocess.run(ready, check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > deadline:
            raise Missing("PostgreSQL does not start")
        time.sleep(0.1)


def _on_path() -> list[Path]:
    found = shutil.which("initdb")
    return [Path(found).parent] if found else []
