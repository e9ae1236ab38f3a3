"""The load of `txbroker bench`, in a process of its own: `python -m txbroker.cli.bench.load`.

It is given a `Job` as one line of JSON on stdin, tells in lines of JSON on stdout how far it is,
and leaves a `LoadLog` of every transaction in a file. It ends when its stdin does.
"""

import asyncio
import os
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from txbroker.cli.bench.http import HttpConnection
from txbroker.cli.run import run_async
from txbroker.errors import TxbrokerError
from txbroker.sdk import CheckRequest, Decision, Limits, Message, Rollback, TransactionalProducer

TICK_S = 0.25
AFTER_ERROR_S = 0.1
"""A lane whose transaction failed waits so long, as failing may be all that it does."""
_GOLDEN = 0.618033988749895
_CHECK_AFTER_S = 1.0


class PlannedEnd(IntEnum):
    """What becomes of a transaction."""

    COMMIT = 0
    ROLLBACK = 1
    UNKNOWN = 2
    """Left undecided; the group's check commits it."""


class Job(Struct, frozen=True, kw_only=True):
    """What to do. Times in seconds, sizes in bytes; `book` is the file to write.

    Either `duration_s` or `transactions` says how long it takes, `warmup_s` comes before. Messages
    are named by their keys; with a `name_header` they have none, and it names them.
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
        """Return what becomes of a transaction; shares are kept in any stretch of numbers."""
        place = number * _GOLDEN % 1.0
        if place < self.rollback_share:
            return PlannedEnd.ROLLBACK
        return (
            PlannedEnd.UNKNOWN
            if place < self.rollback_share + self.unknown_share
            else PlannedEnd.COMMIT
        )

    def names(self, number: int) -> list[str]:
        """Return by what a transaction's messages are recognised."""
        first = number * self.messages
        return [f"{self.tag}{first + each:012x}" for each in range(self.messages)]

    def group(self, number: int) -> str:
        """Return the producer group of a transaction."""
        return f"bench-{self.tag}-{number % self.groups}"


class LoadEvent(Struct, frozen=True):
    """How far it is: `progress`, `measuring`, `measured`, `written` or `failed`.

    Attributes:
        at: monotonic seconds, comparable between processes of one machine.
        cpu_s: seconds of CPU that this process has taken.
        done: transactions that have ended well by now.
    """

    kind: str
    at: float = 0.0
    cpu_s: float = 0.0
    done: int = 0
    text: str = ""


class LoadLog(Struct, frozen=True):
    """When each transaction began, was prepared and decided: arrays of monotonic seconds, by
    number, 0 for what did not happen. `errors`: of those that failed, how often what was said."""

    began: bytes
    prepared: bytes
    decided: bytes
    errors: dict[str, int]


class Sender(Protocol):
    """Carries out transactions, one after another."""

    async def transact(self, number: int) -> tuple[float, float]:
        """Prepare and decide one; return when each was acknowledged, 0 for what is left."""
        ...


class _LeftUnknown(Exception):
    """Ends a block whose transaction is left to the check."""


class SdkSender:
    """Carries transactions out through sessions of the SDK."""

    def __init__(self, job: Job, producers: Sequence[TransactionalProducer]) -> None:
        self._job = job
        self._producers = producers
        self._body = os.urandom(job.size)

    async def transact(self, number: int) -> tuple[float, float]:
        """Prepare and decide one; return when each was acknowledged, 0 for what is left."""
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
    """Carries transactions out through plain HTTP calls on one connection."""

    def __init__(self, job: Job, connection: HttpConnection) -> None:
        self._job = job
        self._connection = connection
        self._body = os.urandom(job.size).hex()[: job.size]

    async def transact(self, number: int) -> tuple[float, float]:
        """Prepare and decide one; return when each was acknowledged."""
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
    """All lanes, each one transaction after another, and the book of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began, self._prepared, self._decided = array("d"), array("d"), array("d")
        self._errors: dict[str, int] = {}
        self._done = 0
        self._ended = 0
        self._ends_at: int | None = None
        self._all_ended = asyncio.Event()
        self._stop = False

    async def run(self, senders: Sequence[Sender]) -> None:
        """Warm up, measure, write the book; `senders` has one for each lane.

        Raises:
            TxbrokerError: already the first transaction fails.
        """
        await self._one(senders[0])
        if self._errors:
            raise TxbrokerError(next(iter(self._errors)))
        telling = asyncio.create_task(self._tell_progress())
        lanes = [asyncio.create_task(self._lane(sender)) for sender in senders]
        await asyncio.sleep(self._job.warmup_s)
        self._tell("measuring")
        if self._job.transactions is None:
            await asyncio.sleep(self._job.duration_s or 0.0)
        else:
            self._ends_at = self._ended + self._job.transactions
            await self._all_ended.wait()
        self._tell("measured")
        self._stop = True
        await asyncio.gather(*lanes)
        telling.cancel()
        arrays = (self._began.tobytes(), self._prepared.tobytes(), self._decided.tobytes())
        written = msgspec.msgpack.encode(LoadLog(*arrays, self._errors))
        await asyncio.to_thread(Path(self._job.book).write_bytes, written)
        self._tell("written")

    async def _lane(self, sender: Sender) -> None:
        while not (self._stop or self._all_ended.is_set()):
            if not await self._one(sender):
                await asyncio.sleep(AFTER_ERROR_S)

    async def _one(self, sender: Sender) -> bool:
        number = len(self._began)
        self._began.append(time.monotonic())
        self._prepared.append(0.0)
        self._decided.append(0.0)
        try:
            times = await sender.transact(number)
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

    async def _tell_progress(self) -> None:
        while True:
            self._tell("progress")
            await asyncio.sleep(TICK_S)

    def _tell(self, kind: str) -> None:
        tell(LoadEvent(kind, time.monotonic(), time.process_time(), self._done))


def tell(event: LoadEvent) -> None:
    """Write an event to stdout."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.flush()


@asynccontextmanager
async def senders_of(job: Job) -> AsyncIterator[list[Sender]]:
    """Connect, and give a sender for each lane.

    Raises:
        TxbrokerError, OSError: no connection comes about.
    """
    async with AsyncExitStack() as stack:
        if job.http:
            made: list[Sender] = []
            for _ in range(job.in_flight):
                connection = HttpConnection(
                    job.url, job.token, job.ca_file, job.client_cert_file, job.client_key_file
                )
                stack.callback(connection.close)
                made.append(HttpSender(job, connection))
            yield made
            return
        producers = [await stack.enter_async_context(_producer(job, n)) for n in range(job.groups)]
        sender = SdkSender(job, producers)
        yield [sender] * job.in_flight


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
    """Carry a job out; stay connected, so that checks are answered, until stdin ends."""
    try:
        async with senders_of(job) as senders:
            await LoadRunner(job).run(senders)
            await asyncio.to_thread(sys.stdin.buffer.read)
    except (TxbrokerError, OSError) as error:
        tell(LoadEvent("failed", text=str(error) or type(error).__name__))


if __name__ == "__main__":
    run_async(work(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)))
