"""The demo's environment: Kafka, a proxy, the database, and workers that can be killed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from txbroker.cli.demo.shop import ShopOrder, create_tables
from txbroker.cli.proxy.serving import until_owned
from txbroker.cli.run import CommandFailed, piped_module
from txbroker.config.settings import load_settings
from txbroker.contract.service import TransactionView
from txbroker.core.records import State
from txbroker.embedded import BarProgress, EmbeddedKafka
from txbroker.errors import RequestError
from txbroker.kafka.door.door import KafkaDoor
from txbroker.proxy.process import Proxy, run_proxy

_STYLES = {
    "prepared": "cyan",
    "check": "yellow",
    "commit": "green",
    "promoted": "bold green",
    "rollback": "magenta",
    "killed": "bold red",
    "database": "blue",
    "failed": "red",
    "set aside": "yellow",
    "booked": "green",
}
_WHO_WIDTH, _EVENT_WIDTH = 7, 9


class Timeline:
    """Prints each step of each transaction once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._orders: dict[str, str] = {}
        self._shown: dict[str, set[tuple[int, str, str]]] = {}

    @property
    def ids(self) -> list[str]:
        return list(self._orders)

    def title(self, text: str) -> None:
        """Begin a scene."""
        self._console.print()
        self._console.print(Text(text, "bold"))

    def begin(self, id: str, order: str) -> None:
        """Register an order's transaction."""
        self._orders[id] = order
        self._shown[id] = set()

    def show(self, who: str, event: str, text: str, at: datetime | None = None) -> None:
        """Print one step."""
        moment = at or datetime.now()
        line = Text()
        line.append(f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}  ", "dim")
        line.append(f"{who:<{_WHO_WIDTH}} ", "bold")
        line.append(f"{event:<{_EVENT_WIDTH}} ", _STYLES.get(event, ""))
        line.append(text)
        self._console.print(line, soft_wrap=True)

    def follow(self, view: TransactionView) -> None:
        """Print the new events of a transaction."""
        shown = self._shown[view.id]
        in_flight = {check.at_ms for check in view.checks if not check.outcome}
        for event in view.timeline:
            is_check = event.event == "check"
            if is_check and event.at_ms in in_flight and view.decision is None:
                continue  # printed together with its answer
            step = (event.at_ms, event.event, "" if is_check else event.text)
            if step not in shown:
                shown.add(step)
                at = datetime.fromtimestamp(event.at_ms / 1000)
                self.show(self._orders[view.id], event.event, event.text, at)


STEP_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.05

SETTINGS = {
    "listen": "127.0.0.1:0",
    "instance": "demo",
    "partitions": 2,
    "create_target_topics": True,
    "check_after_s": 1.0,
    "check_interval_s": 1.0,
    "check_timeout_s": 3.0,
}
"""The first check comes after one second instead of six, to keep the demo short."""
_SETTLED = (State.PROMOTED, State.ROLLED_BACK)


OnEvent = Callable[[dict[str, str]], Awaitable[None]]


class Worker:
    """A process of the order service. Created by `start_worker`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, on_event: OnEvent | None
    ) -> None:
        self.name = name
        self._process = process
        self._on_event = on_event
        self._seen: set[tuple[str, str]] = set()
        self._changed = asyncio.Condition()
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def place(self, order: ShopOrder, stop_at: str = "") -> None:
        """Send it an order; it pauses at the step `stop_at`."""
        await self._write({**asdict(order), "stop_at": stop_at})

    async def go_on(self) -> None:
        await self._write({})

    async def until(self, step: str, order: str = "") -> None:
        """Wait until it reaches a step."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_TIMEOUT_S), self._changed:
                await self._changed.wait_for(
                    lambda: (order, step) in self._seen or self._listening.done()
                )
        if (order, step) not in self._seen:
            raise CommandFailed(f"{self.name} did not reach {step!r} {order}".rstrip())

    async def kill(self) -> None:
        self._process.kill()
        await self.gone()

    async def kill_if_alive(self) -> None:
        if self._process.returncode is None:
            await self.kill()

    async def finish(self) -> None:
        """Close its stdin, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self.gone()

    async def gone(self) -> None:
        """Wait for its end, and kill it after 30 s."""
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening

    async def _write(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(f"{json.dumps(command)}\n".encode())
            await self._process.stdin.drain()

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                event = json.loads(line)
                if self._on_event is not None:
                    await self._on_event(event)
                async with self._changed:
                    self._seen.add((event.get("order", ""), event["step"]))
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()


async def start_worker(
    name: str, url: str, database: Path, on_event: OnEvent | None = None
) -> Worker:
    """Start a process of the order service, connected to the proxy at `url`.

    Args:
        on_event: called with each step that it reports.
    """
    process = await piped_module("txbroker.cli.demo.worker", url, str(database), name)
    worker = Worker(name, process, on_event)
    try:
        await worker.until("ready")
    except BaseException:
        await worker.kill_if_alive()
        raise
    return worker


class DemoEnvironment:
    """All running parts. Created by `set_up`."""

    def __init__(self, folder: Path, proxy: Proxy, kafka: str, timeline: Timeline) -> None:
        self.database = folder / "shop.db"
        self.kafka = kafka
        self.url = proxy.url
        self.timeline = timeline
        self._proxy = proxy
        self._settled: set[str] = set()
        self._all_settled = asyncio.Event()
        self._workers: list[Worker] = []

    async def worker(self, name: str) -> Worker:
        """Start a process of the order service, connected to the proxy."""
        worker = await start_worker(name, self._proxy.url, self.database, self._show)
        self._workers.append(worker)
        self.timeline.show(name, "started", f"process {worker.pid}, an instance of group shop")
        return worker

    async def _show(self, event: dict[str, str]) -> None:
        order = event.get("order", "")
        if event["step"] == "prepared":
            self.timeline.begin(event["id"], order)
        await self.show_new_steps()  # earlier steps first
        if event["step"] == "before the local commit":
            self.timeline.show(order, "database", "row inserted, not committed")
        elif event["step"] == "after the local commit":
            self.timeline.show(order, "database", "committed: the order exists")

    async def follow(self) -> None:
        """Print the steps of all transactions as they happen, until cancelled."""
        while True:
            await self.show_new_steps()
            await asyncio.sleep(_POLL_S)

    async def show_new_steps(self) -> None:
        """Print the steps since the last call."""
        for id in self.timeline.ids:
            if id in self._settled:
                continue
            with contextlib.suppress(RequestError):
                view = await self._proxy.broker.find(id)
                self.timeline.follow(view)
                if view.state in _SETTLED:
                    self._settled.add(id)
        if len(self._settled) == len(self.timeline.ids):
            self._all_settled.set()
        else:
            self._all_settled.clear()

    async def settled(self) -> None:
        """Wait until every transaction is promoted or rolled back."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._all_settled.wait()
        except TimeoutError:
            left = set(self.timeline.ids) - self._settled
            raise CommandFailed(
                f"not settled after {SETTLE_TIMEOUT_S:g} s: {', '.join(left)}"
            ) from None

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill_if_alive() for worker in self._workers))


@asynccontextmanager
async def set_up(folder: Path, timeline: Timeline) -> AsyncIterator[DemoEnvironment]:
    """Run Kafka, a proxy on it, and a database."""
    async with run_kafka(folder) as bootstrap:
        settings = load_settings({**SETTINGS, "kafka": bootstrap, "data_dir": folder}, environ={})
        async with run_proxy(KafkaDoor.from_configuration(settings), settings) as proxy:
            await until_owned(proxy)
            stage = DemoEnvironment(folder, proxy, bootstrap, timeline)
            create_tables(stage.database)
            try:
                yield stage
            finally:
                await stage.close()


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process of the demo; it is killed at the end."""
    process = await piped_module(module, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def event(process: asyncio.subprocess.Process, step: str) -> dict[str, str]:
    """Return the event of a step, as `worker.report` writes it.

    Raises:
        CommandFailed: the process ended before, or did not reach it.
    """
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STEP_TIMEOUT_S):
            async for line in process.stdout:
                found: dict[str, str] = json.loads(line)
                if found["step"] == step:
                    return found
    raise CommandFailed(f"process {process.pid} of the demo did not reach {step!r}")


@asynccontextmanager
async def run_kafka(folder: Path) -> AsyncIterator[str]:
    """Run a Kafka with its data in `folder`; yield its bootstrap servers."""
    kafka = EmbeddedKafka(folder / "kafka", progress=BarProgress())
    try:
        await asyncio.to_thread(kafka.start)
        yield kafka.bootstrap
    finally:
        kafka.kill()  # its data is deleted anyway
