"""A relay between one proxy and Kafka that can be cut, and healed again."""

from __future__ import annotations

import asyncio
import contextlib
import struct

_SIZE = struct.Struct(">i")


class Relay:
    """Relays to one broker; replaces the broker's address in metadata by its own, of equal length.

    While it is cut no byte passes in either direction, without an error, as when a switch fails.
    Bytes sent meanwhile arrive when it heals, as TCP would retransmit them.
    """

    def __init__(self, bootstrap: str) -> None:
        self._host, port = bootstrap.split(":")
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        self.address = f"{self._host}:{self._own_port()}"
        return self

    def cut(self) -> None:
        """Let nothing through."""
        self._open.clear()

    def heal(self) -> None:
        """Let everything through that was held back, and what follows."""
        self._open.set()

    def reset(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own_port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_broker: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            from_broker, to_broker = await asyncio.open_connection(self._host, self._port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, to_broker))
                group.create_task(self._pass_on(from_broker, writer))
        except* (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, to_broker):
                if each is not None:
                    each.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = self._place(self._port)
        ours = self._place(self._own_port())
        while True:
            size = await reader.readexactly(_SIZE.size)
            frame = await reader.readexactly(_SIZE.unpack(size)[0])
            await self._open.wait()
            writer.write(size + frame.replace(address, ours))
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    def _place(self, port: int) -> bytes:
        """A broker's place in an answer of Kafka."""
        return self._host.encode() + _SIZE.pack(port)
