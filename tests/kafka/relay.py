"""A relay between a client and a broker that reads each request's header and breaks on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from enum import Enum
from typing import Any

from txbroker.kafka.client.connection import open_connection

PRODUCE, FETCH, OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT, SYNC_GROUP = 0, 1, 8, 11, 12, 14
INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 25, 26, 28
_SIZE = struct.Struct(">i")
_HEADER = struct.Struct(">hhi")
_FLEXIBLE_FROM = {INIT_PRODUCER_ID: 2, ADD_PARTITIONS: 3, END_TXN: 3}
"""From which version on the header of an answer ends in a count of tagged fields, here none."""


class Fate(Enum):
    """What becomes of a request."""

    PASS = "pass"
    HOLD = "hold"
    """It does not reach the broker until it is released; the client waits."""
    HOLD_AND_RESET = "hold and reset"
    """The same, and the client's connection is reset at once."""
    LOSE_ANSWER = "lose answer"
    """The broker gets it, and the client's connection is reset in place of the answer."""


class Held:
    """A request on its way for as long as the test likes."""

    def __init__(
        self, frame: bytes, upstream: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        self._frame = frame
        self._upstream = upstream
        self._client = client
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def reset(self) -> None:
        """Break the client's connection; the request stays on its way."""
        self._client.transport.abort()

    def send(self) -> None:
        """Let the broker have it; its answer goes to the client, unless that has gone."""
        self._upstream.write(self._frame)

    async def release(self) -> int:
        """Let the broker have it; returns the error code of its answer to a request of the
        transaction coordinator."""
        body = await self.deliver()
        key, version, _correlation = _HEADER.unpack_from(self._frame, _SIZE.size)
        # Correlation id, throttle time, error code.
        tagged = version >= _FLEXIBLE_FROM.get(key, version + 1)
        return int(struct.unpack_from(">ixih" if tagged else ">iih", body)[2])

    async def deliver(self) -> bytes:
        """Let the broker have it; returns its answer."""
        self.send()
        await self._upstream.drain()
        async with asyncio.timeout(10):
            return await self.answer


class Relay:
    """Listens on a free port; `open` opens a broker's connection through it."""

    def __init__(self, decide: Callable[[int], Fate]) -> None:
        self.decide = decide
        self.held: list[Held] = []
        self._news = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._targets: dict[int, tuple[str, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, **settings: Any) -> Any:
        """In place of `open_connection`."""
        server = await asyncio.start_server(
            lambda r, w: self._serve(r, w, host, port), "127.0.0.1", 0
        )
        try:
            return await open_connection(
                "127.0.0.1", server.sockets[0].getsockname()[1], **settings
            )
        finally:
            server.close()

    async def caught(self, count: int = 1) -> Held:
        """Wait until `count` requests have been held; returns the last of them."""
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(lambda: len(self.held) >= count)
        return self.held[count - 1]

    async def close(self) -> None:
        """End every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            up_reader, up_writer = await asyncio.open_connection(host, port)
            await _Link(self, reader, writer, up_reader, up_writer).run()
        self._tasks.discard(task)

    async def hold(self, held: Held) -> None:
        """Keep a request, and wake its waiter."""
        async with self._news:
            self.held.append(held)
            self._news.notify_all()


class _Link:
    def __init__(
        self,
        relay: Relay,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        self._relay = relay
        self._reader, self._writer = reader, writer
        self._up_reader, self._up_writer = up_reader, up_writer
        self._held: Held | None = None
        self._lose_next = False

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests())
                group.create_task(self._answers())
        except* (OSError, EOFError):
            pass
        finally:
            self._writer.close()
            self._up_writer.close()

    async def _requests(self) -> None:
        while True:
            try:
                frame = await _frame(self._reader)
            except (OSError, EOFError):
                if self._held is not None:
                    return  # the client has gone, but its request is still on its way
                raise
            key, _version, _correlation = _HEADER.unpack_from(frame, _SIZE.size)
            fate = self._relay.decide(key)
            if fate in (Fate.HOLD, Fate.HOLD_AND_RESET):
                self._held = Held(frame, self._up_writer, self._writer)
                await self._relay.hold(self._held)
                if fate is Fate.HOLD_AND_RESET:
                    self._held.reset()
                continue
            self._lose_next = fate is Fate.LOSE_ANSWER
            self._up_writer.write(frame)
            await self._up_writer.drain()

    async def _answers(self) -> None:
        while True:
            frame = await _frame(self._up_reader)
            if self._lose_next:
                self._writer.transport.abort()
                return
            if self._held is not None and not self._held.answer.done():
                self._held.answer.set_result(frame[_SIZE.size :])
            if not self._writer.is_closing():
                self._writer.write(frame)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(_SIZE.size)
    return size + await reader.readexactly(_SIZE.unpack(size)[0])


def fates(key: int, *fates: Fate) -> Callable[[int], Fate]:
    """Requests of one kind meet these fates in turn; all others, and later ones, pass."""
    left = list(fates)

    def decide(found: int) -> Fate:
        return left.pop(0) if found == key and left else Fate.PASS

    return decide


def cancelling(key: int, task: asyncio.Task[Any]) -> Callable[[int], Fate]:
    """The first request of one kind cancels a task; like all others it passes."""

    def decide(found: int) -> Fate:
        if found == key and not task.cancelling():
            task.cancel()
        return Fate.PASS

    return decide
