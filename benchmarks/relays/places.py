"""What relays are measured on: databases, the processes of a command, and Kafka alone."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.kit.database_servers import DatabaseServer, MariaServer, PostgresServer
from txbroker.config.settings import load_kafka_access
from txbroker.core.records import Record
from txbroker.kafka.door.consuming import KafkaConsumingDoor

TOPIC, RAW = "orders", "raw"
VALUE = b"x" * 100
PIECE = 10_000
_RAW_RECORDS = 200_000
_TICKS = os.sysconf("SC_CLK_TCK")
_MAPPING = 'name = "{name}"\ndatabase = "{url}"\n'
_TABLE = '[[tables]]\ntable = "{table}"\ntopic = "orders"\n'


class Places:
    """A folder and the servers of both databases."""

    def __init__(self, folder: Path, postgres: PostgresServer, mariadb: MariaServer) -> None:
        self.folder = folder
        self.servers: dict[str, DatabaseServer] = {"postgresql": postgres, "mariadb": mariadb}

    def database(self, kind: str) -> str:
        """Create a database; return its URL."""
        if kind == "sqlite":
            return f"sqlite:///{self.folder}/{time.monotonic_ns()}.db"
        return self.servers[kind].create_database()

    def as_admin(self, kind: str, url: str) -> str:
        """Return the URL for the administrator."""
        return self.servers[kind].admin_url.rpartition("/")[0] + "/" + url.rpartition("/")[2]

    def mapping(self, kind: str, url: str, tables: list[str]) -> str:
        """Write the mapping file of a capture; return its path."""
        schema = "public" if kind == "postgresql" else url.rpartition("/")[2]
        file = self.folder / f"{kind}-{len(tables)}.toml"
        file.write_text(
            _MAPPING.format(name=f"b-{kind}-{len(tables)}", url=url)
            + "".join(_TABLE.format(table=f"{schema}.{table}") for table in tables)
        )
        return str(file)


@contextmanager
def places(**postgres_settings: str) -> Iterator[Places]:
    """Run servers, whose commits are not synced."""
    with (
        tempfile.TemporaryDirectory() as folder,
        PostgresServer(wal_level="logical", fsync="off", **postgres_settings) as postgres,
        MariaServer(
            log_bin="binlog",
            binlog_format="ROW",
            binlog_row_metadata="FULL",
            innodb_flush_log_at_trx_commit=2,
            innodb_flush_method="nosync",
            sync_frm=0,
        ) as mariadb,
    ):
        yield Places(Path(folder), postgres, mariadb)


class Ended(NamedTuple):
    """A process that has ended: its processor time and its largest memory."""

    seconds: float
    cpu_s: float
    memory_mib: float


def txbroker(*arguments: str) -> Ended:
    """Run a command to its end, and measure it."""
    began_s = time.monotonic()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "txbroker", *arguments],
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_DUP2, sys.stderr.fileno(), sys.stdout.fileno())],
    )
    _pid, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"txbroker {' '.join(arguments)} failed")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ended(time.monotonic() - began_s, cpu_s, usage.ru_maxrss / 1024)


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[int]:
    """Run a module until the block ends; yield its process id once it reports that it runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        line = await process.stderr.readline()
        if b"running" not in line:
            raise SystemExit(f"{' '.join(arguments)}: {line.decode()}")
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children, also of those that ended."""
    found = sum(_times(pid)[:4])
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"\nPPid:\t{pid}\n" in (folder / "status").read_text():
                found += sum(_times(int(folder.name))[:2])
        except OSError:  # it has ended
            continue
    return found / _TICKS


def _times(pid: int) -> list[int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]


def memory_mib(pid: int) -> float:
    """Return the memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def raw_rate(kafka: str) -> float:
    """Return records of `VALUE` a second of an idempotent producer."""
    door = KafkaConsumingDoor.from_access(load_kafka_access(kafka))
    await door.start()
    try:
        records = [Record(b"k%d" % n, VALUE, timestamp_ms=1_700_000_000_000) for n in range(PIECE)]
        began_s = time.monotonic()
        for n in range(_RAW_RECORDS // PIECE):
            await door.append(RAW, n % 4, records)
        return _RAW_RECORDS / (time.monotonic() - began_s)
    finally:
        await door.close()
