"""The services of a soak on the SDK, in separate processes.

The bulk of the load, so that it does not wait for the relays nor these for it, and producers that
are killed and started again. `services.py bulk SPEC HISTORY` writes a line to its stdout when its
producers are there, works until one comes on its stdin, then only answers check-backs until its
stdin is closed, and leaves its history as a pickle. `services.py mortal URLS TOPICS DATABASE
HISTORY NAME` works until it is killed, or ended by a line on its stdin, and records each step
before it takes it. `BulkLoad` and `MortalProducer` are the other ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import pickle
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from tests.faults.judge import Call, History, lines_of, read_lines
from tests.kit.workload import Lane, Recorder, Shop, answering
from txbroker.errors import OwnerUnavailable
from txbroker.sdk import (
    CheckRequest,
    Decision,
    Limits,
    Message,
    NotYet,
    TransactionalProducer,
)

GROUPS = ("orders", "orders", "bills")
GROUP = "mortal"
MORTAL_LANES = 4
LIMITS = Limits(answer_timeout_s=3, heartbeat_s=3)
_MORTAL_PAUSE_S = 0.1
_REPORT_EVERY_S = 20.0
_BEGIN_S = 60.0
_END_S = 120.0


class ServiceProcess:
    """One such process."""

    def __init__(self, *role: str) -> None:
        self._role = role
        self._process: asyncio.subprocess.Process | None = None

    async def _start(
        self, *arguments: str, stdout: int | None = None
    ) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __spec__.name,
            *self._role,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
        )
        return self._process

    def no_more(self) -> None:
        """Let it begin nothing new."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"\n")

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ended(self) -> None:
        assert self._process is not None
        code = await asyncio.wait_for(self._process.wait(), _END_S)
        assert code == 0, f"{self._role[0]} ended with {code}"


# --- the bulk of the load ----------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """The task of the process.

    Attributes:
        urls: of the proxies.
        topics: the targets.
        database: of the business, its own.
        lanes: transactions in flight at the same time.
        pause_s: of a lane between two transactions, on average.
        seed: of the random choices.
    """

    urls: list[str]
    topics: list[str]
    database: str
    lanes: int
    pause_s: float
    seed: int


class BulkLoad(ServiceProcess):
    """The process.

    Args:
        folder: for its history.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec = spec
        self._file = folder / "bulk.pickle"
        super().__init__("bulk", json.dumps(asdict(spec)), str(self._file))

    async def launch(self) -> None:
        """Start it, and wait until its producers are there: without a proxy none would start."""
        process = await self._start(stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        begun = await asyncio.wait_for(process.stdout.readline(), _BEGIN_S)
        assert begun, "the load has not begun"

    async def ended(self) -> History:
        """End it and return its history."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._ended()
        with self._file.open("rb") as file:
            found = pickle.load(file)
        self._file.unlink()
        assert isinstance(found, History)
        return found

    def rows(self) -> list[str]:
        shop = Shop(Path(self._spec.database))
        try:
            return shop.rows()
        finally:
            shop.close()


async def _lines() -> AsyncIterator[bytes]:
    """Yield the lines of stdin until it is closed."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line


async def _bulk(spec: Spec, history: Path) -> None:
    recorder = Recorder()
    shop = Shop(Path(spec.database))
    over = asyncio.Event()

    async def lane(number: int, producer: TransactionalProducer) -> None:
        fate = random.Random(f"{spec.seed}/lane-{number}")
        work = Lane(f"lane-{number}", producer, shop, recorder, spec.topics, fate)
        while not over.is_set():
            await work.run(1)
            await asyncio.sleep(fate.uniform(0, 2 * spec.pause_s))

    async with contextlib.AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                TransactionalProducer(
                    [*spec.urls[number:], *spec.urls[:number]],
                    group=group,
                    check=answering(shop, recorder),
                    limits=LIMITS,
                )
            )
            for number, group in enumerate(GROUPS)
        ]
        print(flush=True)
        watching = asyncio.create_task(_watch(recorder))
        async with asyncio.TaskGroup() as group:
            for number in range(spec.lanes):
                group.create_task(lane(number, producers[number % len(producers)]))
            lines = _lines()
            await anext(lines, b"")
            over.set()
        async for _ in lines:
            pass
        watching.cancel()
    shop.close()
    with history.open("wb") as file:
        pickle.dump(recorder.history, file, pickle.HIGHEST_PROTOCOL)


async def _watch(recorder: Recorder) -> None:
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        # A history only grows: collecting garbage is useless.
        gc.freeze()
        print(f"         load: {recorder.finished} transactions tried", file=sys.stderr, flush=True)


# --- producers that are killed -----------------------------------------------------------------


class MortalProducer(ServiceProcess):
    """One such service: its process, and what all its lives did.

    Args:
        folder: for its histories.
    """

    _lives = itertools.count()

    def __init__(
        self, name: str, urls: Sequence[str], topics: Sequence[str], database: Path, folder: Path
    ) -> None:
        super().__init__("mortal", ",".join(urls), ",".join(topics), str(database))
        self.name = name
        self._folder = folder
        self._histories: list[Path] = []

    async def launch(self) -> None:
        life = f"{self.name}-{next(self._lives)}"
        self._histories.append(self._folder / f"{life}.jsonl")
        await self._start(str(self._histories[-1]), life)

    async def ended(self) -> None:
        """Wait until it has ended in order."""
        await self._ended()

    def history(self) -> History:
        return written(self._histories)


class WrittenDown(Recorder):
    """Writes every event into a file immediately, because a killed process writes nothing later.

    Args:
        file: is made.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._numbers = itertools.count()

    def means(self, token: str, messages: Sequence[Message], *, business: bool) -> None:
        super().means(token, messages, business=business)
        meant = {token: self.history.sent.pop(token)}
        self._write(lines_of(History(sent=meant, business={token} if business else set())))

    @contextmanager
    def call(self, what: str, token: str, id: str = "") -> Iterator[Call]:
        number = next(self._numbers)
        calls: list[Call] = []
        try:
            with super().call(what, token, id) as call:
                calls.append(call)
                self.history.calls.clear()
                self._write_call(number, call)
                yield call
        finally:
            # How it ended is known only here.
            for call in calls:
                self._write_call(number, call, answer_only=True)

    def asked(self, request: CheckRequest, answer: Decision | NotYet) -> None:
        super().asked(request, answer)
        self._write(lines_of(History(asked=[self.history.asked.pop()])))

    def _write_call(self, number: int, call: Call, *, answer_only: bool = False) -> None:
        lines = [json.loads(line) for line in lines_of(History(calls=[call]))]
        if answer_only:
            lines = [line for line in lines if line["event"] != "invoke"]
        self._write([json.dumps({**line, "call": number}) for line in lines])

    def _write(self, lines: Sequence[str]) -> None:
        os.write(self._out, "".join(f"{line}\n" for line in lines).encode())


async def _mortal(urls: str, topics: str, database: str, history: str, name: str) -> None:
    recorder = WrittenDown(Path(history))
    shop = Shop(Path(database))
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(sys.stdin.fileno())
        over.set()

    loop.add_reader(sys.stdin.fileno(), ended)
    async with contextlib.AsyncExitStack() as stack:
        producer = await _connected(stack, urls, answering(shop, recorder), over)
        if producer is None:
            return

        async def lane(number: int) -> None:
            fate = random.Random(f"{name}/{number}")
            called = f"{name}-{number}"
            work = Lane(called, producer, shop, recorder, topics.split(","), fate)
            while not over.is_set():
                await work.run(1)
                await asyncio.sleep(fate.uniform(0, 2 * _MORTAL_PAUSE_S))

        await asyncio.gather(*[lane(number) for number in range(MORTAL_LANES)])


async def _connected(
    stack: contextlib.AsyncExitStack,
    urls: str,
    check: Callable[[CheckRequest], Decision | NotYet],
    over: asyncio.Event,
) -> TransactionalProducer | None:
    """Return a producer that is connected, None if all is over before. While no proxy is there it
    begins again, as a service does whose supervisor starts it whenever it has ended."""
    while not over.is_set():
        producer = TransactionalProducer(urls.split(","), group=GROUP, check=check, limits=LIMITS)
        with contextlib.suppress(OwnerUnavailable):
            return await stack.enter_async_context(producer)
    return None


def written(files: Iterable[Path]) -> History:
    """Read the histories, one file for each life. A line that was being written when its
    writer was killed is none."""
    history = History()
    for file in files:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        add(history, read_lines(line for line in lines if line.endswith("\n")))
    return history


def add(history: History, other: History) -> None:
    """Put what others did into a history."""
    history.sent.update(other.sent)
    history.business |= other.business
    history.calls += other.calls
    history.asked += other.asked
    history.notes += other.notes


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "bulk":
        uvloop.run(_bulk(Spec(**json.loads(given[0])), Path(given[1])))
    else:
        asyncio.run(_mortal(*given))
