"""A relay in front of a database server that loses and delays what belongs to commits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_COMMIT = b"COMMIT"
_BYTES = 1 << 16
_ANSWER_S = 5.0
LOSE_SHARE = 0.5


class DatabaseLink:
    """Listens on a free port. Reads no protocol: a commit is what holds the word.

    Args:
        port: of the server.
    """

    def __init__(self, port: int, fate: random.Random) -> None:
        self._server_port = port
        self._fate = fate
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lose_until_s = 0.0
        self._late_until_s = 0.0
        self._late_s = 0.0
        self.port = 0

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        await self.reset()

    def lose(self, seconds: float) -> None:
        """For a time, execute commits and reset the connection in place of many answers."""
        self._lose_until_s = time.monotonic() + seconds

    def delay(self, seconds: float, late_s: float) -> None:
        """For a time, reset the connection at many commits; the server gets them later."""
        self._late_until_s = time.monotonic() + seconds
        self._late_s = late_s

    async def reset(self) -> None:
        """Break all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Task[Any]] = []
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._server_port)
            requests = asyncio.create_task(self._requests(reader, server))
            pumps = [requests, asyncio.create_task(_pass_on(answers, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            commit = requests.result() if requests.done() else None
            await _end(pumps)
            if commit is not None:
                if commit.late_s:
                    writer.transport.abort()
                    await asyncio.sleep(commit.late_s)
                server.write(commit.data)
                await asyncio.wait_for(answers.read(_BYTES), _ANSWER_S)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            await _end(pumps)
            self._tasks.discard(task)
            for each in (writer, server):
                if each is not None:
                    each.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter
    ) -> _Commit | None:
        """Pass requests on; return a commit that the client gets no answer to."""
        while data := await reader.read(_BYTES):
            if _COMMIT in data and self._fate.random() < LOSE_SHARE:
                now = time.monotonic()
                if now < self._late_until_s:
                    return _Commit(data, self._late_s)
                if now < self._lose_until_s:
                    return _Commit(data, 0.0)
            server.write(data)
            await server.drain()
        return None


class _Commit(NamedTuple):
    data: bytes
    late_s: float


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BYTES):
        writer.write(data)
        await writer.drain()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
