"""Most of a run's load: correct services on the SDK in a separate process, so that they do not
wait for the relays, nor these for them.

`bulk_load.py SPEC HISTORY` writes a line to its stdout when its producers are there, works until
one comes on its stdin, then only answers check-backs until its stdin is closed, and leaves its
history as a pickle. `BulkLoad` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from tests.faults.judge import History
from tests.kit.workload import Lane, Recorder, Shop, answering
from txbroker.sdk import Limits, TransactionalProducer

GROUPS = ("orders", "orders", "bills")
_REPORT_EVERY_S = 20.0
_BEGIN_S = 60.0
_END_S = 120.0


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


async def _lines() -> AsyncIterator[bytes]:
    """Yield the lines of stdin until it is closed."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line


async def _work(spec: Spec, history: Path) -> None:
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
                    limits=Limits(answer_timeout_s=3, heartbeat_s=3),
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


class BulkLoad:
    """The process.

    Args:
        folder: for its history.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec = spec
        self._file = folder / "bulk.pickle"
        self._process: asyncio.subprocess.Process | None = None

    async def launch(self) -> None:
        """Start it, and wait until its producers are there: without a proxy none would start."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __spec__.name,
            json.dumps(asdict(self._spec)),
            str(self._file),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        begun = await asyncio.wait_for(self._process.stdout.readline(), _BEGIN_S)
        assert begun, "the load has not begun"

    def no_more(self) -> None:
        """Let it begin nothing new; it still answers check-backs."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ended(self) -> History:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        code = await asyncio.wait_for(process.wait(), _END_S)
        assert code == 0, f"the load ended with {code}"
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


if __name__ == "__main__":
    uvloop.run(_work(Spec(**json.loads(sys.argv[1])), Path(sys.argv[2])))
