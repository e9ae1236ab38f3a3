"""The WebSocket of a session against servers that answer in unusual ways."""

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.sdk.fake_proxy import QUICK
from txbroker.contract.frames import CheckAnswer, Hello, Welcome, encode_frame
from txbroker.errors import OwnerUnavailable
from txbroker.net.tls import ClientTls
from txbroker.sdk import Limits, Message, TransactionalProducer
from txbroker.sdk.session import CannotConnect, Session, open_session

WELCOME = encode_frame([Welcome(1, 0, 1, ("http://own",), "http://own", 120.0, 1 << 20)])
HELLO = Hello(1, "g", "i")
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

Handler = Callable[["Peer"], Awaitable[None]]


class Peer:
    """A server's end of one connection, which sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""

    async def upgrade(self) -> None:
        self.head = await self.reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ", 1) for line in self.head.split(b"\r\n")[1:-2])
        key = next(value for name, value in lines.items() if name.lower() == b"sec-websocket-key")
        magic = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key + magic).digest())
        self.writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )

    def send(self, opcode: int, payload: bytes, *, fin: bool = True) -> None:
        size = len(payload)
        length = bytes((size,)) if size < 126 else b"\x7e" + size.to_bytes(2, "big")
        self.writer.write(bytes((opcode | (0x80 if fin else 0),)) + length + payload)

    async def frame(self) -> tuple[int, bytes]:
        """Return the next frame's opcode and payload."""
        first, second = await self.reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            size = int.from_bytes(await self.reader.readexactly(2), "big")
        mask = await self.reader.readexactly(4)
        data = await self.reader.readexactly(size)
        return first & 0x0F, bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(Peer(reader, writer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


class Events:
    """Notes what happens to a session."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def session_lost(self, session: Session, why: str) -> None:
        self.lost.set_result(why)


async def opened(url: str, limits: Limits = QUICK) -> tuple[Session, Events]:
    events = Events()
    session = await open_session(url, "s3cret", HELLO, events, limits, ClientTls())  # type: ignore[arg-type]
    return session, events


async def until_closed(peer: Peer) -> None:
    while (await peer.frame())[0] != CLOSE:
        pass


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "no proxy of txbroker answers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "answers HTTP status 200"),
        (b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n", "answers HTTP status 426"),
        (
            b"HTTP/1.1 308 Moved\r\nLocation: https://shop/\r\nContent-Length: 0\r\n\r\n",
            "answers HTTP status 308; if https://shop/ is the proxy, use its URL",
        ),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: bm90aGluZw==\r\n\r\n",
            "no proxy of txbroker answers",
        ),
        (b"", "no proxy of txbroker answers"),
    ],
)
async def test_answer_other_than_an_upgrade_is_named(answer: bytes, words: str) -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.writer.write(answer)

    async with served(handler) as url:
        with pytest.raises(CannotConnect) as refused:
            await opened(url)
    assert str(refused.value).startswith(url)
    assert words in str(refused.value)


async def test_silent_server_is_given_up() -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.read()

    async with served(handler) as url:
        with pytest.raises(CannotConnect, match="does not answer"):
            await opened(url, Limits(connect_timeout_s=0.05))
        with pytest.raises(OwnerUnavailable, match=r"no answer within 0\.05 s; check the network"):
            await TransactionalProducer(url, group="g").start(timeout_s=0.05)


async def test_fragments_and_control_frames_are_taken() -> None:
    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(BINARY, WELCOME[:5], fin=False)
        peer.send(PING, b"between")
        peer.send(CONT, b"", fin=False)
        peer.send(CONT, WELCOME[5:])
        first = {await peer.frame(), await peer.frame()}
        assert first == {(BINARY, encode_frame([HELLO])), (PONG, b"between")}
        assert await peer.frame() == (BINARY, encode_frame([CheckAnswer(1, None)]))
        peer.send(CLOSE, (1000).to_bytes(2, "big"))
        await until_closed(peer)

    async with served(handler) as url:
        session, events = await opened(url)
        session.post(CheckAnswer(1, None))
        assert await events.lost == f"{url} ended the session"
        await session.close()


@pytest.mark.parametrize(
    ("opcode", "payload", "why"),
    [
        (TEXT, b"text", "sent a frame that is not binary"),
        (BINARY, b"\xc1", "sent a frame that cannot be read"),
        (CONT, b"alone", "broke: unexpected continuation frame"),
        (PONG | 0x40, b"", "broke: reserved bits must be 0"),
    ],
)
async def test_frame_that_no_proxy_sends_ends_the_session(
    opcode: int, payload: bytes, why: str
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(BINARY, WELCOME)
        peer.send(opcode, payload)
        await until_closed(peer)

    async with served(handler) as url:
        session, events = await opened(url)
        assert why in await events.lost
        await session.close()


async def test_proxy_that_answers_no_ping_is_left() -> None:
    pings = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(BINARY, WELCOME)
        while True:
            opcode, payload = await peer.frame()
            if opcode == PING:
                pings.append(opcode)
                if len(pings) < 3:
                    peer.send(PONG, payload)

    async with served(handler) as url:
        session, events = await opened(url, Limits(heartbeat_s=0.05))
        assert await events.lost == f"the connection to {url} broke: no answer to a ping"
        await session.close()
    assert len(pings) == 3


async def test_full_socket_holds_operations_back() -> None:
    go = asyncio.Event()
    received = bytearray()

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(BINARY, WELCOME)
        await go.wait()
        while data := await peer.reader.read(1 << 20):
            received.extend(data)

    messages = (Message("t", value=bytes(4 << 20)),)
    async with served(handler) as url:
        session, _ = await opened(url)
        for _ in range(8):
            session.post(CheckAnswer(1, None, None, messages))
        async with asyncio.timeout(10):
            while session._connection.writable:
                await asyncio.sleep(0)
        assert session._outbox
        go.set()
        await session.close()
    assert len(received) > 8 * (4 << 20)


async def test_token_is_sent_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    heads = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        heads.append(peer.head)
        peer.send(BINARY, WELCOME)
        await until_closed(peer)

    async with served(handler) as url:
        session, _ = await opened(url)
        await session.close()
    assert b"\r\nauthorization: bearer s3cret\r\n" in heads[0].lower()
    assert b"\r\nuser-agent: txbroker/" in heads[0].lower()
    assert b"sec-websocket-extensions" not in heads[0].lower()
    assert "s3cret" not in caplog.text
