"""Clients that open a connection and do not send a whole request, in plain text and with TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.tls.tls_files import Authority
from tests.tls.tls_world import TlsHarness

LIMIT_S = 0.4
CLOSED_WITHIN_S = 10.0
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
DIRECT = b"POST /v1/transactions/x/commit HTTP/1.1\r\nHost: localhost\r\n\r\n"
SCHEMES = ["http", "https"]


class Raw:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ended(self) -> bytes:
        """Return what else came before the proxy closed the connection."""
        async with asyncio.timeout(CLOSED_WITHIN_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def answer(self) -> bytes:
        """Return the head of one answer, having read its body."""
        async with asyncio.timeout(CLOSED_WITHIN_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await self.reader.readexactly(length)
            return head


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@asynccontextmanager
async def dialled(url: str, authority: Authority, *, plainly: bool = False) -> AsyncIterator[Raw]:
    context = None
    if url.startswith("https") and not plainly:
        context = ssl.create_default_context(cafile=str(authority.cert))
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url), ssl=context)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def proxied(world: TlsHarness, scheme: str, limit_s: float = LIMIT_S) -> AsyncIterator[str]:
    given = world.secured if scheme == "https" else {"listen": "127.0.0.1:0"}
    async with world.running(request_timeout_s=limit_s, **given) as proxy:
        yield proxy.url


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "begun",
    [
        b"G",
        b"GET /healthz HTTP/1.1\r\nHost: loc",
        b"POS",
        b"POST /v1/transactions HTTP/1.1\r\nHost: loc",
    ],
    ids=["request line", "header", "line of a direct call", "header of a direct call"],
)
@pytest.mark.parametrize(
    "before", [b"", GET, DIRECT], ids=["first request", "second request", "after a direct call"]
)
async def test_incomplete_head_closes_the_connection(
    world: TlsHarness, scheme: str, begun: bytes, before: bytes
) -> None:
    async with proxied(world, scheme) as url, dialled(url, world.ours) as raw:
        if before:
            raw.writer.write(before)
            assert (await raw.answer()).startswith(b"HTTP/1.1 ")
        raw.writer.write(begun)
        assert await raw.ended() == b""


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_head_sent_byte_by_byte_gains_no_time(world: TlsHarness, scheme: str) -> None:
    async with proxied(world, scheme) as url, dialled(url, world.ours) as raw:
        raw.writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
        ending = asyncio.create_task(raw.ended())
        while not ending.done():
            raw.writer.write(b"a")
            await asyncio.sleep(LIMIT_S / 20)
        assert await ending == b""


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_silent_connection_ends_after_keepalive(
    world: TlsHarness, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", LIMIT_S)
    async with (
        proxied(world, scheme, limit_s=60.0) as url,
        dialled(url, world.ours) as raw,
    ):
        assert await raw.ended() == b""


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "half a hello"])
async def test_tls_handshake_times_out(world: TlsHarness, sent: bytes) -> None:
    async with (
        proxied(world, "https") as url,
        dialled(url, world.ours, plainly=True) as raw,
    ):
        raw.writer.write(sent)
        await raw.ended()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_many_requests_may_exceed_the_timeout_of_one(world: TlsHarness, scheme: str) -> None:
    async with proxied(world, scheme) as url, dialled(url, world.ours) as raw:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + 2 * LIMIT_S
        while loop.time() < ends_at:
            # In two pieces each time: a head that came whole must not be counted on.
            raw.writer.write(GET[:20])
            await raw.writer.drain()
            await asyncio.sleep(LIMIT_S / 8)
            raw.writer.write(GET[20:])
            assert b" 200 " in await raw.answer()
        await asyncio.sleep(2 * LIMIT_S)  # idle between requests: no head has begun
        raw.writer.write(GET)
        assert b" 200 " in await raw.answer()
