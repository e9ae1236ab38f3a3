"""A service that is killed at random points and restarted.

`mortal_producer.py URLS TOPICS DATABASE HISTORY NAME` works until it is killed, or ended by
a line on its stdin, and writes down all that it does before it does it. `MortalProducer` is the
other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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

GROUP = "mortal"
LANES = 4
_PAUSE_S = 0.1
_END_S = 120.0


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


async def _work(urls: str, topics: str, database: str, history: str, name: str) -> None:
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
                await asyncio.sleep(fate.uniform(0, 2 * _PAUSE_S))

        await asyncio.gather(*[lane(number) for number in range(LANES)])


async def _connected(
    stack: contextlib.AsyncExitStack,
    urls: str,
    check: Callable[[CheckRequest], Decision | NotYet],
    over: asyncio.Event,
) -> TransactionalProducer | None:
    """Return a producer that is connected, None if all is over before. While no proxy is there it
    begins again, as a service does whose supervisor starts it whenever it has ended."""
    while not over.is_set():
        limits = Limits(answer_timeout_s=3, heartbeat_s=3)
        producer = TransactionalProducer(urls.split(","), group=GROUP, check=check, limits=limits)
        with contextlib.suppress(OwnerUnavailable):
            return await stack.enter_async_context(producer)
    return None


class MortalProducer:
    """One such service: its process, and what all its lives did.

    Args:
        folder: for its histories.
    """

    _lives = itertools.count()

    def __init__(
        self, name: str, urls: Sequence[str], topics: Sequence[str], database: Path, folder: Path
    ) -> None:
        self.name = name
        self._arguments = [",".join(urls), ",".join(topics), str(database)]
        self._folder = folder
        self._histories: list[Path] = []
        self._process: asyncio.subprocess.Process | None = None

    async def launch(self) -> None:
        life = f"{self.name}-{next(self._lives)}"
        self._histories.append(self._folder / f"{life}.jsonl")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __spec__.name,
            *self._arguments,
            str(self._histories[-1]),
            life,
            stdin=asyncio.subprocess.PIPE,
        )

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def no_more(self) -> None:
        """Let it begin nothing new, and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"\n")

    async def ended(self) -> None:
        assert self._process is not None
        code = await asyncio.wait_for(self._process.wait(), _END_S)
        assert code == 0, f"{self.name} ended with {code}"

    def history(self) -> History:
        return written(self._histories)


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
    asyncio.run(_work(*sys.argv[1:]))
