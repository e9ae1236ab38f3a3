"""Runs a measurement: proxy and Kafka, the load in a separate process, and the reader."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from rich import progress as bars
from rich.console import Console

from txbroker.cli.bench.figures import Figures, LoadResult, ResourceUsage, TimeWindow, figures
from txbroker.cli.bench.load import Job, LoadEvent, LoadLog
from txbroker.cli.contexts import NO_CREDENTIALS, CredentialFiles
from txbroker.cli.proxy.serving import WORKER_MODULE
from txbroker.cli.run import CommandFailed, piped_module
from txbroker.config.addresses import parse_servers
from txbroker.config.settings import Settings, load_settings
from txbroker.embedded import BarProgress, EmbeddedKafka
from txbroker.kafka.tools.consumers import (
    NAME_HEADER,
    TAG_CHARS,
    TopicConsumer,
    reading,
    topic_for_a_while,
)

END_TIMEOUT_S = 40.0
"""Longer than a producer takes to drain."""
_OURS = ("listen", "advertise", "admin_", "token_", "tls_", "peers_", "kafka", "data_", "instance",
         "workers")  # fmt: skip
"""The user's settings that a proxy started for the measurement ignores."""


class BenchPlan(Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        settings: the connection to Kafka, or the settings of a started proxy.
        url: a running proxy; None: start one, with its own Kafka.
        credentials: for the running proxy.
        topic: an existing topic; None: create one, and delete it afterwards.
        partitions: of the created topic.
        along: number of partitions read during the measurement; None: all.
        keyless: messages have no keys.
        load: the other fields of the `Job`.
    """

    settings: Settings
    url: str | None
    credentials: CredentialFiles
    topic: str | None
    partitions: int
    along: int | None
    keyless: bool
    load: Mapping[str, Any]


class MeasuredProxy(Struct, frozen=True):
    """A proxy, its credentials, and the connection to its Kafka."""

    url: str
    credentials: CredentialFiles
    settings: Settings


async def measure(plan: BenchPlan, progress: "BenchProgress") -> tuple[Figures, Job]:
    """Run one measurement, and stop everything that it started."""
    tag = secrets.token_hex(TAG_CHARS // 2)
    async with AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="txbroker-bench-", ignore_cleanup_errors=True)
            )
        )
        progress.step("starting")
        proxy = await stack.enter_async_context(_measured_proxy(plan, folder))
        topic = plan.topic or f"txbroker-bench-{tag}"
        if plan.topic is None:
            temporary = topic_for_a_while(proxy.settings, topic, plan.partitions)
            await stack.enter_async_context(temporary)
        reader = await stack.enter_async_context(reading(proxy.settings, topic, tag, plan.along))
        job = _job(plan, proxy, topic, tag, folder / "book")
        load = await stack.enter_async_context(
            _child("txbroker.cli.bench.load", msgspec.json.encode(job))
        )
        window, usage = await _follow(load, reader, _UsageMeter(proxy), progress, job)
        progress.step("reading the visible messages")
        result = LoadResult.of(job, await asyncio.to_thread(_book, Path(job.book)))
        await reader.read_rest(result.owed)
    # After everything has stopped: for millions it takes so long that connections would time out.
    return figures(result, reader.count, window, usage), job


def _job(plan: BenchPlan, proxy: MeasuredProxy, topic: str, tag: str, book: Path) -> Job:
    credentials = proxy.credentials
    token = None if credentials.token_file is None else credentials.token_file.read_text().strip()
    files: dict[str, Any] = credentials.named()
    files.pop("token_file", None)
    return Job(
        url=proxy.url,
        topic=topic,
        tag=tag,
        book=str(book),
        name_header=NAME_HEADER if plan.keyless else "",
        token=token,
        **files,
        **plan.load,
    )


def _book(path: Path) -> LoadLog:
    return msgspec.msgpack.decode(path.read_bytes(), type=LoadLog)


# --- the measured proxy ----------------------------------------------------------------------


@asynccontextmanager
async def _measured_proxy(plan: BenchPlan, folder: Path) -> AsyncIterator[MeasuredProxy]:
    if plan.url is not None:
        yield MeasuredProxy(plan.url, plan.credentials, plan.settings)
        return
    kafka = EmbeddedKafka(folder / "kafka", for_load=True, progress=BarProgress())
    try:
        await asyncio.to_thread(kafka.start)
        explicit = plan.settings.model_dump(mode="json", include=plan.settings.model_fields_set)
        config = {name: value for name, value in explicit.items() if not name.startswith(_OURS)}
        config |= {"listen": "127.0.0.1:0", "kafka": kafka.bootstrap, "instance": "bench"}
        config |= {"data_dir": str(folder / "proxy")}
        config.setdefault("log_level", "warning")
        async with _child("txbroker.cli.bench.proxy", json.dumps(config).encode()) as proxy:
            assert proxy.stdout is not None
            word, _, rest = (await proxy.stdout.readline()).decode().strip().partition(" ")
            if word != "ready":
                raise CommandFailed(
                    rest or "the proxy ended before it was ready: see its log above"
                )
            settings = load_settings({"kafka": kafka.bootstrap}, environ={})
            yield MeasuredProxy(rest.partition(" ")[0], NO_CREDENTIALS, settings)
    finally:
        kafka.kill()  # its data is deleted anyway


@asynccontextmanager
async def _child(module: str, first_line: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module in a child process, which ends when stdin or this process does."""
    process = await piped_module(module)
    assert process.stdin is not None
    try:
        process.stdin.write(first_line + b"\n")
        yield process
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError):
            process.kill()
            await process.wait()


class _UsageSample(Struct, frozen=True):
    """CPU time and memory of all processes at one moment."""

    at: float
    cpu_s: dict[str, float | None]
    memory_mib: dict[str, float | None]

    def until(self, end: "_UsageSample") -> ResourceUsage:
        """Return the usage between two samples."""
        cpu_s: dict[str, float | None] = {
            name: None if used is None or (before := self.cpu_s[name]) is None else used - before
            for name, used in end.cpu_s.items()
        }
        memory = {name: (before, end.memory_mib[name]) for name, before in self.memory_mib.items()}
        return ResourceUsage(cpu_s, memory)


class _UsageMeter:
    """Samples CPU time and memory of the processes on this machine."""

    def __init__(self, proxy: MeasuredProxy) -> None:
        parts = urlsplit(proxy.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._proxy = ListeningProcess(parts.hostname or "", port)
        addresses = parse_servers(proxy.settings.kafka)
        self._brokers = [ListeningProcess(address.host, address.port) for address in addresses]

    def read(self, event: LoadEvent) -> _UsageSample:
        """Return a sample at the time of an event of the load."""
        return _UsageSample(
            event.at,
            {
                "proxy": self._proxy.cpu_s(),
                "broker": _sum([broker.cpu_s() for broker in self._brokers]),
                "client": event.cpu_s,
                "reader": time.process_time(),
            },
            {
                "proxy": self._proxy.memory_mib(),
                "broker": _sum([broker.memory_mib() for broker in self._brokers]),
            },
        )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# --- the run ---------------------------------------------------------------------------------


async def _follow(
    load: asyncio.subprocess.Process,
    reader: TopicConsumer,
    meters: _UsageMeter,
    progress: "BenchProgress",
    job: Job,
) -> tuple[TimeWindow, ResourceUsage]:
    """Read messages until the load ends; return the measured window and its resource usage."""
    following = asyncio.create_task(reader.follow())
    start: _UsageSample | None = None
    measured: tuple[TimeWindow, ResourceUsage] | None = None
    progress.step("warming up", job.warmup_s)
    try:
        async for event in _events(load):
            if following.done():
                break
            progress.done(event)
            if event.kind == "measuring":
                start = meters.read(event)
                progress.step("measuring", job.duration_s, event.done, job.transactions)
            elif event.kind == "measured" and start is not None:
                measured = TimeWindow(start.at, event.at), start.until(meters.read(event))
                progress.step("ending")
            elif event.kind == "failed":
                raise CommandFailed(event.text)
            elif event.kind == "written":
                break
        reader.stop()
        await following
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await following
    if measured is None:
        raise CommandFailed("the load process ended early: see its error above")
    return measured


async def _events(load: asyncio.subprocess.Process) -> AsyncIterator[LoadEvent]:
    assert load.stdout is not None
    async for line in load.stdout:
        yield msgspec.json.decode(line, type=LoadEvent)


# --- progress --------------------------------------------------------------------------------


class BenchProgress:
    """A progress bar with one step at a time."""

    def __init__(self, bar: bars.Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", rate="")
        self._count: int | None = None
        self._from = 0
        self._began_s = 0.0

    def step(
        self, text: str, seconds: float | None = None, done: int = 0, count: int | None = None
    ) -> None:
        """Start a step of known duration, known count or unknown length."""
        self._bar.remove_task(self._task)
        self._count, self._from, self._began_s = count, done, time.monotonic()
        self._task = self._bar.add_task(text, total=count or seconds, rate="")

    def done(self, event: LoadEvent) -> None:
        """Move the bar."""
        passed_s = time.monotonic() - self._began_s
        done = event.done - self._from
        self._bar.update(
            self._task,
            completed=done if self._count else passed_s,
            rate=f"{done / max(passed_s, 0.25):,.0f} transactions/s",
        )


@contextmanager
def progress_bar(console: Console) -> Iterator[BenchProgress]:
    """Show the progress if the console is a terminal."""
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[rate]}"),
    )
    hidden = not console.is_terminal
    with bars.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield BenchProgress(bar)


_LISTEN = "0A"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PROC = Path("/proc")
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Positions in `_stat`: the parent's id, and user and system time."""
_ERRORS = (OSError, ValueError, IndexError)


class ListeningProcess:
    """The process that listens at an address; unknown on other machines, and for other users'
    processes."""

    def __init__(self, host: str, port: int) -> None:
        process = _process_at(port) if _is_local(host) else None
        self._processes = [] if process is None else _with_other_workers(process)

    def cpu_s(self) -> float | None:
        """Return its CPU time in seconds, None if unknown."""
        with contextlib.suppress(*_ERRORS):
            times = [_stat(process)[_USER : _SYSTEM + 1] for process in self._processes]
            return sum(int(ticks) for pair in times for ticks in pair) * _TICK_S if times else None
        return None

    def memory_mib(self) -> float | None:
        """Return its resident memory, None if unknown."""
        with contextlib.suppress(*_ERRORS):
            pages = [int((path / "statm").read_text().split()[1]) for path in self._processes]
            return round(sum(pages) * _PAGE_BYTES / 2**20, 1) if pages else None
        return None


def _stat(process: Path) -> list[str]:
    """Return the fields of `stat` after the process's name, which may contain spaces."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _with_other_workers(process: Path) -> list[Path]:
    """Return a process; for a worker its parent and the parent's workers."""
    parent = _parent_of_worker(process)
    if not parent:
        return [process]
    workers = [path for path in _PROC.glob("[0-9]*") if _parent_of_worker(path) == parent]
    return [_PROC / parent, *workers]


def _parent_of_worker(process: Path) -> str:
    """Return the id of a worker's parent, "" for another process."""
    with contextlib.suppress(*_ERRORS):
        if WORKER_MODULE.encode() in (process / "cmdline").read_bytes().split(b"\0"):
            return _stat(process)[_PARENT]
    return ""


def _is_local(host: str) -> bool:
    """Return True if a socket can be bound to the host's address."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind(address)
                return True
    return False


def _process_at(port: int) -> Path | None:
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in _PROC.glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return process
    return None


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
