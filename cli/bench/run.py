"""A measurement carried out: what is measured, the load in a process of its own, the reader."""

import asyncio
import contextlib
import json
import secrets
import sys
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

from txbroker.cli.bench.cpu import ListeningProcess
from txbroker.cli.bench.figures import Figures, LoadResult, ResourceUsage, TimeWindow, figures
from txbroker.cli.bench.load import Job, LoadEvent, LoadLog
from txbroker.cli.contexts import NO_CREDENTIALS, CredentialFiles
from txbroker.cli.run import CommandFailed
from txbroker.config.addresses import parse_address
from txbroker.config.settings import Settings, load_settings
from txbroker.embedded import BarProgress, EmbeddedKafka
from txbroker.kafka.tools.counting import (
    NAME_HEADER,
    TAG_CHARS,
    Reader,
    reading,
    topic_for_a_while,
)

END_TIMEOUT_S = 40.0
"""More than a producer takes to drain."""
_OURS = ("listen", "advertise", "admin_", "token_", "tls_", "peers_", "kafka", "data_", "instance",
         "workers")  # fmt: skip
"""What a proxy of the measurement's own does not take from the user's settings."""


class BenchPlan(Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        settings: say where Kafka is; and for a proxy of our own, what it is told.
        url: the running proxy; None: one of our own, on a Kafka of our own.
        credentials: by which it and we know one another.
        topic: for the messages; None: one that is made, and removed afterwards.
        partitions: of the topic that is made.
        along: how many of its partitions are read along; None for all.
        keyless: whether messages have no keys.
        asked: the other fields of the `Job`.
    """

    settings: Settings
    url: str | None
    credentials: CredentialFiles
    topic: str | None
    partitions: int
    along: int | None
    keyless: bool
    asked: Mapping[str, Any]


class MeasuredProxy(Struct, frozen=True):
    """What is measured: a proxy, by what it knows us, and where its Kafka is."""

    url: str
    credentials: CredentialFiles
    settings: Settings


async def measure(plan: BenchPlan, shown: "BenchProgress") -> tuple[Figures, Job]:
    """Measure once, and take everything down again.

    Raises:
        TxbrokerError, EmbeddedKafkaError: something cannot be started or reached.
        CommandFailed: no transaction succeeds, or a process of ours has ended.
    """
    tag = secrets.token_hex(TAG_CHARS // 2)
    async with AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="txbroker-bench-", ignore_cleanup_errors=True)
            )
        )
        shown.step("starting")
        place = await stack.enter_async_context(_place(plan, folder))
        topic = plan.topic or f"txbroker-bench-{tag}"
        if plan.topic is None:
            made = topic_for_a_while(place.settings, topic, plan.partitions)
            await stack.enter_async_context(made)
        reader = await stack.enter_async_context(reading(place.settings, topic, tag, plan.along))
        job = _job(plan, place, topic, tag, folder / "book")
        load = await stack.enter_async_context(
            _child("txbroker.cli.bench.load", msgspec.json.encode(job))
        )
        window, taken = await _watched(load, reader, _UsageMeter(place), shown, job)
        shown.step("reading what consumers see")
        counted = LoadResult.of(job, await asyncio.to_thread(_book, Path(job.book)))
        await reader.read_rest(counted.owed)
    # Not before all is taken down: of millions that takes so long that connections would break.
    return figures(counted, reader.count, window, taken), job


def _job(plan: BenchPlan, place: MeasuredProxy, topic: str, tag: str, book: Path) -> Job:
    credentials = place.credentials
    token = None if credentials.token_file is None else credentials.token_file.read_text().strip()
    files: dict[str, Any] = credentials.named()
    files.pop("token_file", None)
    return Job(
        url=place.url,
        topic=topic,
        tag=tag,
        book=str(book),
        name_header=NAME_HEADER if plan.keyless else "",
        token=token,
        **files,
        **plan.asked,
    )


def _book(path: Path) -> LoadLog:
    return msgspec.msgpack.decode(path.read_bytes(), type=LoadLog)


# --- what is measured ------------------------------------------------------------------------


@asynccontextmanager
async def _place(plan: BenchPlan, folder: Path) -> AsyncIterator[MeasuredProxy]:
    if plan.url is not None:
        yield MeasuredProxy(plan.url, plan.credentials, plan.settings)
        return
    kafka = EmbeddedKafka(folder / "kafka", for_load=True, progress=BarProgress())
    try:
        await asyncio.to_thread(kafka.start)
        given = plan.settings.model_dump(mode="json", include=plan.settings.model_fields_set)
        told = {name: value for name, value in given.items() if not name.startswith(_OURS)}
        told |= {"listen": "127.0.0.1:0", "kafka": kafka.bootstrap, "instance": "bench"}
        told |= {"data_dir": str(folder / "proxy")}
        told.setdefault("log_level", "warning")
        async with _child("txbroker.cli.bench.proxy", json.dumps(told).encode()) as proxy:
            assert proxy.stdout is not None
            word, _, rest = (await proxy.stdout.readline()).decode().strip().partition(" ")
            if word != "ready":
                raise CommandFailed(rest or "the proxy has ended before it was ready")
            settings = load_settings({"kafka": kafka.bootstrap}, environ={})
            yield MeasuredProxy(rest.partition(" ")[0], NO_CREDENTIALS, settings)
    finally:
        kafka.kill()  # what is thrown away need not be closed well


@asynccontextmanager
async def _child(module: str, first_line: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module in a process of its own, which ends when its stdin does: ours, or with us."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us, who end it in order
    )
    assert process.stdin is not None
    try:
        process.stdin.write(first_line + b"\n")
        yield process
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except (TimeoutError, asyncio.CancelledError):
            process.kill()
            await process.wait()


class _UsageSample(Struct, frozen=True):
    """What those who take part have taken by a moment."""

    at: float
    cpu_s: dict[str, float | None]
    memory_mib: dict[str, float | None]

    def until(self, end: "_UsageSample") -> ResourceUsage:
        """Return what was taken between two readings."""
        cpu_s: dict[str, float | None] = {
            name: None if taken is None or (was := self.cpu_s[name]) is None else taken - was
            for name, taken in end.cpu_s.items()
        }
        memory = {name: (before, end.memory_mib[name]) for name, before in self.memory_mib.items()}
        return ResourceUsage(cpu_s, memory)


class _UsageMeter:
    """CPU time and memory of those who take part, as far as they are on this machine."""

    def __init__(self, place: MeasuredProxy) -> None:
        parts = urlsplit(place.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._proxy = ListeningProcess(parts.hostname or "", port)
        addresses = [parse_address(part.strip()) for part in place.settings.kafka.split(",")]
        self._brokers = [ListeningProcess(address.host, address.port) for address in addresses]

    def read(self, event: LoadEvent) -> _UsageSample:
        """Return what each has taken by now, when the load told this event."""
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


async def _watched(
    load: asyncio.subprocess.Process,
    reader: Reader,
    meters: _UsageMeter,
    shown: "BenchProgress",
    job: Job,
) -> tuple[TimeWindow, ResourceUsage]:
    """Read along until the load has ended; return when it was measured, and what was taken then."""
    following = asyncio.create_task(reader.follow())
    begun: _UsageSample | None = None
    measured: tuple[TimeWindow, ResourceUsage] | None = None
    shown.step("warming up", job.warmup_s)
    try:
        async for event in _events(load):
            if following.done():
                break
            shown.done(event)
            if event.kind == "measuring":
                begun = meters.read(event)
                shown.step("measuring", job.duration_s, event.done, job.transactions)
            elif event.kind == "measured" and begun is not None:
                measured = TimeWindow(begun.at, event.at), begun.until(meters.read(event))
                shown.step("ending")
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
        raise CommandFailed("the process of the load has ended early")
    return measured


async def _events(load: asyncio.subprocess.Process) -> AsyncIterator[LoadEvent]:
    assert load.stdout is not None
    async for line in load.stdout:
        yield msgspec.json.decode(line, type=LoadEvent)


# --- what is shown meanwhile -----------------------------------------------------------------


class BenchProgress:
    """A bar on stderr that tells how far it is; nothing where that is no terminal."""

    def __init__(self, bar: bars.Progress | None) -> None:
        self._bar = bar
        self._task: bars.TaskID | None = None
        self._count: int | None = None
        self._from = 0
        self._began_s = 0.0

    def step(
        self, words: str, seconds: float | None = None, done: int = 0, count: int | None = None
    ) -> None:
        """Begin a step that takes so long, or so many transactions, or nobody knows."""
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._count, self._from, self._began_s = count, done, time.monotonic()
        self._task = self._bar.add_task(words, total=count or seconds, rate="")

    def done(self, event: LoadEvent) -> None:
        """Move the bar."""
        if self._bar is None or self._task is None:
            return
        passed_s = time.monotonic() - self._began_s
        done = event.done - self._from
        self._bar.update(
            self._task,
            completed=done if self._count else passed_s,
            rate=f"{done / max(passed_s, 0.25):,.0f} transactions/s",
        )


@contextmanager
def showing(console: Console) -> Iterator[BenchProgress]:
    """Show how far it is, where the console is a terminal."""
    if not console.is_terminal:
        yield BenchProgress(None)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[rate]}"),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        yield BenchProgress(bar)
