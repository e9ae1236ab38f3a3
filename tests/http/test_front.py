"""Connections that carry calls out themselves, in front of the router."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing

import pytest

from tests.kit.http_api import Api, running_api, transaction
from tests.kit.until import until
from txbroker.contract.service import DecideRequest, PrepareRequest, Run
from txbroker.errors import OwnerUnavailable
from txbroker.proxy.http.front import HELD_BYTES_MAX, DirectConnection

UNKNOWN_ID = "00" * 13
HOST = b"Host: localhost\r\n"
TYPE = b"Content-Type: application/json\r\n"
PREPARE = json.dumps(transaction(dedup_key="k")).encode()
NO_TOPIC = json.dumps(transaction(messages=[{"topic": "missing", "value": "1"}])).encode()


def post(path: str, body: bytes, headers: bytes = HOST + TYPE) -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"POST " + path.encode() + b" HTTP/1.1\r\n" + headers + length + body


PREPARING = post("/v1/transactions", PREPARE)


class Line:
    """A client's end of a connection; it waits for each answer for a bounded time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.write = writer.write
        self.transport = writer.transport

    async def head(self) -> list[bytes]:
        async with asyncio.timeout(30):
            return (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")

    async def answer(self) -> tuple[list[bytes], bytes]:
        """Return the lines of an answer's head, and its body."""
        head = await self.head()
        (length,) = [line for line in head if line.startswith(b"Content-Length: ")]
        return head, await self._reader.readexactly(int(length.split()[1]))

    async def status(self) -> bytes:
        """Return the status line of the next answer, without the version."""
        return (await self.answer())[0][0].removeprefix(b"HTTP/1.1 ")

    async def rest(self) -> bytes:
        """Return all bytes until the proxy closes the connection."""
        async with asyncio.timeout(10):
            return await self._reader.read()


@asynccontextmanager
async def dialled(api: Api) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    with closing(writer):
        yield Line(reader, writer)


async def test_answers_keep_the_order_of_requests(api: Api) -> None:
    id = await api.prepare(dedup_key="k")
    async with dialled(api) as line:
        line.write(
            PREPARING
            + b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
            + post(f"/v1/transactions/{id}/commit", b"{}")
            + post("/v1/transactions?", PREPARE)
            + PREPARING
        )  # fmt: skip
        answers = [(await line.answer())[1] for _ in range(5)]
    found = [json.loads(answer).get("state") for answer in answers]
    assert found == ["pending", None, "committed", "committed", "committed"]


async def test_body_may_arrive_in_pieces_and_after_100_continue(api: Api) -> None:
    async with dialled(api) as line:
        raw = post("/v1/transactions", PREPARE, HOST + TYPE + b"Expect: 100-continue\r\n")
        line.write(raw[: -len(PREPARE)])
        assert await line.head() == [b"HTTP/1.1 100 Continue", b"", b""]
        line.write(PREPARE)
        assert await line.status() == b"201 Created"
        for piece in (PREPARING[:20], PREPARING[20:-5]):
            line.write(piece)
            await api.call("GET", "/healthz")  # the piece before it was read by now
        line.write(PREPARING[-5:])
        assert await line.status() == b"200 OK"


async def test_client_that_reads_no_answers_is_dropped() -> None:
    many = post("/v1/transactions/x/commit", b"{}") * 500

    async def flood(client: socket.socket) -> None:
        async with asyncio.timeout(20):
            while True:
                await asyncio.get_running_loop().sock_sendall(client, many)

    async with running_api(request_timeout_s=0.2) as api:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", api.port))
            with pytest.raises(ConnectionError):
                await flood(client)
        assert (await api.call("GET", "/healthz"))[0] == 200


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> list[DirectConnection]:
    """Return the connections that were made, in order."""
    made: list[DirectConnection] = []
    begin = DirectConnection.connection_made

    def connection_made(self: DirectConnection, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        begin(self, transport)

    monkeypatch.setattr(DirectConnection, "connection_made", connection_made)
    return made


@pytest.mark.parametrize(
    "raw",
    [
        PREPARING,
        post(f"/v1/transactions/{UNKNOWN_ID}/commit", b"{}"),
        post(f"/v1/transactions/{UNKNOWN_ID}/rollback", b""),
        post("/v1/transactions", b"{"),
        post("/v1/transactions", NO_TOPIC),
        post("/v1/transactions", PREPARE, b"Host: evil\r\n" + TYPE),
    ],
)
async def test_only_direct_calls_stay_in_front(
    api: Api, fronts: list[DirectConnection], raw: bytes
) -> None:
    async with dialled(api) as line:
        for piece in (raw, raw + raw, raw[:30], raw[30:]):
            line.write(piece)
            await asyncio.sleep(0.01)
        for _ in range(4):
            await line.answer()
        [front] = fronts
        assert front.transport is not None
        line.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n" + raw)
        assert await line.status() == b"200 OK"
        await line.answer()
        assert front.transport is None


async def test_calls_of_many_connections_make_one_run(
    api: Api, fronts: list[DirectConnection]
) -> None:
    counts: list[int] = []
    runs = api.service.runs

    def counted(requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        counts.append(len(requests))
        return runs(requests)

    api.service.runs = counted  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(dialled(api))
        await until(lambda: len(fronts) == 8)
        for front in fronts:  # as one turn of the loop reads them
            front.data_received(PREPARING)
        await until(lambda: bool(counts))
    assert counts == [8]


async def test_calls_in_flight_are_answered_at_shutdown() -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        gate = api.service.gate = asyncio.Event()
        async with dialled(api) as busy, dialled(api) as idle:
            busy.write(PREPARING * 2)
            await until(lambda: bool(api.service.requests))
            stopping = asyncio.create_task(stack.aclose())
            async with asyncio.timeout(4):
                assert await idle.rest() == b""
                assert not stopping.done()
                gate.set()
                assert await busy.status() == b"201 Created"
                assert await busy.rest() == b""  # no further one is begun
                await stopping
        assert len(api.service.requests) == 1


async def test_shutdown_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.SHUTDOWN_S", 0.1)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        api.service.gate = asyncio.Event()
        async with dialled(api) as line:
            line.write(PREPARING)
            await until(lambda: bool(api.service.requests))
            async with asyncio.timeout(4):
                await stack.aclose()
                assert await line.rest() == b""
        api.service.gate.set()


async def test_gone_client_releases_its_bytes(api: Api, fronts: list[DirectConnection]) -> None:
    gate = api.service.gate = asyncio.Event()
    async with dialled(api) as line:
        line.write(PREPARING)
        await until(lambda: bool(api.service.requests))
        assert api.in_flight() > len(PREPARE)
        line.transport.abort()
        await until(lambda: fronts[0].transport is None)
    gate.set()
    await until(lambda: api.in_flight() == 0)
    assert len(api.service.views) == 1  # the call went on


async def test_cancelled_call_closes_its_connection(api: Api) -> None:
    api.service.failure = asyncio.CancelledError()
    async with dialled(api) as line:
        line.write(PREPARING)
        assert await line.rest() == b""
    assert api.in_flight() == 0


async def test_read_ahead_is_bounded(api: Api, fronts: list[DirectConnection]) -> None:
    gate = api.service.gate = asyncio.Event()
    count = 5_000
    async with dialled(api) as line:
        line.write(PREPARING * count)
        await until(lambda: len(fronts[0]._held) > HELD_BYTES_MAX)
        await asyncio.sleep(0.05)
        assert len(fronts[0]._held) <= HELD_BYTES_MAX + 256 * 1024  # what one read brings
        gate.set()
        assert await line.status() == b"201 Created"
        for _ in range(count - 1):
            assert await line.status() == b"200 OK"
    assert fronts[0]._held == b""


@pytest.mark.parametrize("answered", [False, True])
async def test_idle_connection_is_closed(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.2)
    async with running_api() as api, dialled(api) as line:
        if answered:
            gate = api.service.gate = asyncio.Event()
            line.write(PREPARING)
            await asyncio.sleep(0.5)  # a call is no idle time
            gate.set()
            assert await line.status() == b"201 Created"
        assert await line.rest() == b""


async def test_incomplete_request_is_not_idle(
    fronts: list[DirectConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.2)
    monkeypatch.setattr("txbroker.proxy.http.server.HELD_S", 10.0)
    async with running_api() as api, dialled(api) as line:
        line.write(PREPARING[:-5])
        await until(lambda: fronts[0]._is_unfinished)
        await asyncio.sleep(0.5)
        line.write(PREPARING[-5:])
        assert await line.status() == b"201 Created"


@pytest.mark.parametrize("path", ["/v1/transactions", "/v1/transactions?"])
async def test_unencodable_error_is_answered(
    api: Api, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        raise OwnerUnavailable("the proxy answered \udcff")

    monkeypatch.setattr(api.service, "runs", runs)
    async with dialled(api) as line:
        line.write(post(path, PREPARE))
        head, body = await line.answer()
    assert head[0] == b"HTTP/1.1 500 Internal Server Error"
    assert json.loads(body)["error"]["code"] == "failed"
