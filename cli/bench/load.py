"""The load of `txbroker bench`, in a separate process: `python -m txbroker.cli.bench.load`.

It reads a `Job` as one line of JSON from stdin, reports progress as lines of JSON on stdout, and
writes a `LoadLog` of every transaction to a file. It ends when stdin does.
"""

import asyncio
import os
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from txbroker.cli.bench.http import BenchConnection
from txbroker.cli.run import run_async
from txbroker.errors import TxbrokerError
from txbroker.sdk import CheckRequest, Decision, Limits, Message, Rollback, TransactionalProducer

TICK_S = 0.25
AFTER_ERROR_S = 0.1
"""Pause after a failed transaction, so that a failing proxy is not called in a tight loop."""
_GOLDEN = 0.618033988749895
_CHECK_AFTER_S = 1.0


class PlannedEnd(IntEnum):
    """How a transaction is to end."""

    COMMIT = 0
    ROLLBACK = 1
    UNKNOWN = 2
    """Left undecided; the group's check commits it."""


class Job(Struct, frozen=True, kw_only=True):
    """The load to generate. Times in seconds, sizes in bytes; `book` is the log's file.

    After `warmup_s`, either `duration_s` or `transactions` limits the measurement. A message's name
    is its key or, with `name_header`, the value of that header.
    """

    url: str
    topic: str
    tag: str
    book: str
    in_flight: int
    size: int
    messages: int
    warmup_s: float
    duration_s: float | None = None
    transactions: int | None = None
    rollback_share: float = 0.0
    unknown_share: float = 0.0
    groups: int = 1
    http: bool = False
    name_header: str = ""
    token: str | None = None
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None

    def fate(self, number: int) -> PlannedEnd:
        """Return how a transaction ends; any range of numbers has about the same shares."""
        point = number * _GOLDEN % 1.0
        if point < self.rollback_share:
            return PlannedEnd.ROLLBACK
        return (
            PlannedEnd.UNKNOWN
            if point < self.rollback_share + self.unknown_share
            else PlannedEnd.COMMIT
        )

    def names(self, number: int) -> list[str]:
        """Return the names of a transaction's messages."""
        first = number * self.messages
        return [f"{self.tag}{first + index:012x}" for index in range(self.messages)]

    def group(self, number: int) -> str:
        """Return the producer group of a transaction."""
        return f"bench-{self.tag}-{number % self.groups}"


class LoadEvent(Struct, frozen=True):
    """A report of kind `progress`, `measuring`, `measured`, `written` or `failed`.

    Attributes:
        at: monotonic seconds, comparable between processes of one machine.
        cpu_s: CPU time of this process so far, in seconds.
        done: number of successful transactions so far.
    """

    kind: str
    at: float = 0.0
    cpu_s: float = 0.0
    done: int = 0
    text: str = ""


class LoadLog(Struct, frozen=True):
    """When each transaction began, was prepared and was decided, as arrays of monotonic seconds, 0:
    never; and the number of failures by error message."""

    began: bytes
    prepared: bytes
    decided: bytes
    errors: dict[str, int]


Transact = Callable[[int], Awaitable[tuple[float, float]]]
"""Prepares and decides the transaction of a number; returns the time of each acknowledgement, 0:
none. One call at a time."""


class _LeftUnknown(Exception):
    """Leaves a transaction's block without a decision."""


class SdkSender:
    """Executes transactions through SDK sessions."""

    def __init__(self, job: Job, producers: Sequence[TransactionalProducer]) -> None:
        self._job = job
        self._producers = producers
        self._body = os.urandom(job.size)

    async def transact(self, number: int) -> tuple[float, float]:
        job = self._job
        messages = [self._message(name.encode()) for name in job.names(number)]
        producer = self._producers[number % len(self._producers)]
        fate = job.fate(number)
        try:
            async with producer.transaction(*messages):
                prepared_at = time.monotonic()
                if fate is PlannedEnd.ROLLBACK:
                    raise Rollback
                if fate is PlannedEnd.UNKNOWN:
                    raise _LeftUnknown
        except _LeftUnknown:
            return prepared_at, 0.0
        return prepared_at, time.monotonic()

    def _message(self, name: bytes) -> Message:
        job = self._job
        if job.name_header:
            return Message(job.topic, value=self._body, headers=((job.name_header, name),))
        return Message(job.topic, key=name, value=self._body)


class HttpSender:
    """Executes transactions through HTTP calls on one connection."""

    def __init__(self, job: Job, connection: BenchConnection) -> None:
        self._job = job
        self._connection = connection
        self._body = os.urandom(job.size).hex()[: job.size]

    async def transact(self, number: int) -> tuple[float, float]:
        job = self._job
        group = job.group(number)
        messages = [self._message(name) for name in job.names(number)]
        body = {"group": group, "messages": messages}
        prepared = await self._connection.post("/v1/transactions", body)
        prepared_at = time.monotonic()
        verb = "rollback" if job.fate(number) is PlannedEnd.ROLLBACK else "commit"
        await self._connection.post(f"/v1/transactions/{prepared['id']}/{verb}", {"group": group})
        return prepared_at, time.monotonic()

    def _message(self, name: str) -> dict[str, Any]:
        job = self._job
        named = {"headers": {job.name_header: name}} if job.name_header else {"key": name}
        return {"topic": job.topic, "value": self._body, **named}


class LoadRunner:
    """Runs the senders in parallel, and logs their transactions."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began, self._prepared, self._decided = array("d"), array("d"), array("d")
        self._errors: dict[str, int] = {}
        self._done = 0
        self._ended = 0
        self._ends_at: int | None = None
        self._all_ended = asyncio.Event()
        self._stop = False

    async def run(self, senders: Sequence[Transact]) -> None:
        """Warm up, measure, write the log; one task for each of `senders`."""
        await self._one(senders[0])
        if self._errors:
            raise TxbrokerError(next(iter(self._errors)))
        reporting = asyncio.create_task(self._report_progress())
        tasks = [asyncio.create_task(self._repeat(sender)) for sender in senders]
        await asyncio.sleep(self._job.warmup_s)
        self._report("measuring")
        if self._job.transactions is None:
            await asyncio.sleep(self._job.duration_s or 0.0)
        else:
            self._ends_at = self._ended + self._job.transactions
            await self._all_ended.wait()
        self._report("measured")
        self._stop = True
        await asyncio.gather(*tasks)
        reporting.cancel()
        arrays = (self._began.tobytes(), self._prepared.tobytes(), self._decided.tobytes())
        written = msgspec.msgpack.encode(LoadLog(*arrays, self._errors))
        await asyncio.to_thread(Path(self._job.book).write_bytes, written)
        self._report("written")

    async def _repeat(self, sender: Transact) -> None:
        while not (self._stop or self._all_ended.is_set()):
            if not await self._one(sender):
                await asyncio.sleep(AFTER_ERROR_S)

    async def _one(self, sender: Transact) -> bool:
        number = len(self._began)
        self._began.append(time.monotonic())
        self._prepared.append(0.0)
        self._decided.append(0.0)
        try:
            times = await sender(number)
        except (TxbrokerError, OSError) as error:
            text = str(error) or type(error).__name__
            self._errors[text] = self._errors.get(text, 0) + 1
            return False
        else:
            self._prepared[number], self._decided[number] = times
            self._done += 1
            return True
        finally:
            self._ended += 1
            if self._ended == self._ends_at:
                self._all_ended.set()

    async def _report_progress(self) -> None:
        while True:
            self._report("progress")
            await asyncio.sleep(TICK_S)

    def _report(self, kind: str) -> None:
        write_event(LoadEvent(kind, time.monotonic(), time.process_time(), self._done))


def write_event(event: LoadEvent) -> None:
    """Write an event to stdout."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.flush()


@asynccontextmanager
async def senders_of(job: Job) -> AsyncIterator[list[Transact]]:
    """Connect, and yield a sender for each transaction in flight."""
    async with AsyncExitStack() as stack:
        if job.http:
            senders: list[Transact] = []
            for _ in range(job.in_flight):
                connection = BenchConnection(
                    job.url, job.token, job.ca_file, job.client_cert_file, job.client_key_file
                )
                stack.callback(connection.close)
                senders.append(HttpSender(job, connection).transact)
            yield senders
            return
        producers = [await stack.enter_async_context(_producer(job, n)) for n in range(job.groups)]
        sender = SdkSender(job, producers)
        yield [sender.transact] * job.in_flight


def _producer(job: Job, number: int) -> TransactionalProducer:
    async def check(request: CheckRequest) -> Decision:
        return Decision.COMMIT

    return TransactionalProducer(
        job.url,
        group=job.group(number),
        check=check,
        token=job.token,
        ca_file=job.ca_file,
        client_cert_file=job.client_cert_file,
        client_key_file=job.client_key_file,
        limits=Limits(in_flight_max=max(Limits().in_flight_max, job.in_flight)),
    )


async def work(job: Job) -> None:
    """Generate the load; stay connected to answer checks until stdin ends."""
    try:
        async with senders_of(job) as senders:
            await LoadRunner(job).run(senders)
            await asyncio.to_thread(sys.stdin.buffer.read)
    except (TxbrokerError, OSError) as error:
        write_event(LoadEvent("failed", text=str(error) or type(error).__name__))


if __name__ == "__main__":
    run_async(work(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)))
