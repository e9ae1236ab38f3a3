"""A producer's side of a session, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from tests.kit.http_api import Api
from txbroker.checkers.base import CheckCall, CheckResult
from txbroker.contract import frames as wire
from txbroker.core.records import Message

MESSAGES = (Message("payments", b"k", b"v"),)


class Producer:
    """Sends operations and takes answers one after the other."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.frames: list[list[wire.FromProxy]] = []
        self._waiting: list[wire.FromProxy] = []

    async def send(self, *operations: wire.FromProducer) -> None:
        await self.socket.send_bytes(wire.encode_frame(list(operations)))

    async def next(self) -> wire.FromProxy:
        while not self._waiting:
            frame = await self.next_frame()
            self._waiting.extend(frame)
        return self._waiting.pop(0)

    async def next_frame(self) -> list[wire.FromProxy]:
        data = await asyncio.wait_for(self.socket.receive_bytes(), 10)
        frame = wire.decode_from_proxy(data)
        self.frames.append(frame)
        return frame

    async def failure(self) -> wire.Failure:
        """Return the next operation, a failure."""
        answer = await self.next()
        assert isinstance(answer, wire.Failure), answer
        return answer

    async def question(self) -> wire.CheckQuestion:
        """Return the next operation, a check."""
        check = await self.next()
        assert isinstance(check, wire.CheckQuestion), check
        return check

    async def closed(self) -> int | None:
        """Wait for the proxy to close and return its code."""
        message = await asyncio.wait_for(self.socket.receive(), 10)
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return self.socket.close_code


def ask(api: Api, call: CheckCall, instance: str = "") -> asyncio.Future[CheckResult]:
    """Ask a session of the group "orders"; return the future of the result."""
    channel = api.sessions.acquire("orders", instance)
    assert channel is not None
    return channel.ask(call, 10.0)


@asynccontextmanager
async def connected(api: Api, **options: object) -> AsyncIterator[Producer]:
    async with api.client.ws_connect(f"{api.url}/v1/session", **options) as socket:  # type: ignore[arg-type]
        yield Producer(socket)


@asynccontextmanager
async def session(
    api: Api, group: str = "orders", instance: str = "worker-1", *, checks: bool = True
) -> AsyncIterator[Producer]:
    async with connected(api) as producer:
        await producer.send(wire.Hello(wire.SESSION_VERSION, group, instance, checks))
        welcome = await producer.next()
        assert isinstance(welcome, wire.Welcome), welcome
        yield producer


@contextlib.asynccontextmanager
async def socket_to(api: Api, first: bytes) -> AsyncIterator[asyncio.StreamWriter]:
    """Connect without a WebSocket client and send `first`; never read."""
    _, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1)
    writer.write(first)
    try:
        yield writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


UPGRADE = (
    b"GET /v1/session HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def masked(payload: bytes, *, first: int = 0x82, length: int | None = None) -> bytes:
    """Return a frame of a client, masked with zeros; `length` replaces its real one."""
    size = len(payload) if length is None else length
    return bytes((first, 0xFF)) + size.to_bytes(8, "big") + bytes(4) + payload
