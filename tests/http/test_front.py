"""Connections that carry calls out themselves, in front of the router."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing

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


def post(path: str, body: bytes, headers: bytes = HOST + TYPE, version: bytes = b"1.1") -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"POST " + path.encode() + b" HTTP/" + version + b"\r\n" + headers + length + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[list[bytes], bytes]:
    """Return the lines of an answer's head, and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"Content-Length: ")[2].split()[0])
    return head.split(b"\r\n"), await reader.readexactly(length)


async def test_answers_keep_the_order_of_requests(api: Api) -> None:
    id = await api.prepare(dedup_key="k")
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    with closing(writer):
        writer.write(
            post("/v1/transactions", PREPARE)
            + b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
            + post(f"/v1/transactions/{id}/commit", b"{}")
            + post("/v1/transactions?", PREPARE)
            + post("/v1/transactions", PREPARE)
        )  # fmt: skip
        async with asyncio.timeout(10):
            answers = [(await read_answer(reader))[1] for _ in range(5)]
    found = [json.loads(answer).get("state") for answer in answers]
    assert found == ["pending", None, "committed", "committed", "committed"]


async def test_body_may_arrive_in_pieces_and_after_100_continue(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    with closing(writer):
        raw = post("/v1/transactions", PREPARE, HOST + TYPE + b"Expect: 100-continue\r\n")
        writer.write(raw[: -len(PREPARE)])
        async with asyncio.timeout(10):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(PREPARE)
            assert (await read_answer(reader))[0][0] == b"HTTP/1.1 201 Created"
            raw = post("/v1/transactions", PREPARE)
            for piece in (raw[:20], raw[20:-5]):
                writer.write(piece)
                await api.call("GET", "/healthz")  # the piece before it was read by now
            writer.write(raw[-5:])
            assert (await read_answer(reader))[0][0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("action", ["commit", "rollback"])
async def test_other_methods_get_an_allow_header(api: Api, action: str) -> None:
    url = f"{api.url}/v1/transactions/{UNKNOWN_ID}/{action}"
    async with api.client.get(url) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


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


async def dialled(api: Api) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", api.port)


@pytest.mark.parametrize(
    "raw",
    [
        post("/v1/transactions", PREPARE),
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
    reader, writer = await dialled(api)
    with closing(writer):
        async with asyncio.timeout(10):
            for piece in (raw, raw + raw, raw[:30], raw[30:]):
                writer.write(piece)
                await asyncio.sleep(0.01)
            for _ in range(4):
                await read_answer(reader)
            [front] = fronts
            assert front.transport is not None
            writer.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n" + raw)
            assert (await read_answer(reader))[0][0] == b"HTTP/1.1 200 OK"
            await read_answer(reader)
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
            _, writer = await dialled(api)
            stack.callback(writer.close)
        await until(lambda: len(fronts) == 8)
        for front in fronts:  # as one turn of the loop reads them
            front.data_received(post("/v1/transactions", PREPARE))
        await until(lambda: bool(counts))
    assert counts == [8]


async def test_calls_in_flight_are_answered_at_shutdown() -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        gate = api.service.gate = asyncio.Event()
        busy, writer = await dialled(api)
        idle, other = await dialled(api)
        writer.write(post("/v1/transactions", PREPARE) * 2)
        await until(lambda: bool(api.service.requests))
        stopping = asyncio.create_task(stack.aclose())
        async with asyncio.timeout(4):
            assert await idle.read() == b""
            assert not stopping.done()
            gate.set()
            assert (await read_answer(busy))[0][0] == b"HTTP/1.1 201 Created"
            assert await busy.read() == b""  # no further one is begun
            await stopping
        assert len(api.service.requests) == 1
        for each in (writer, other):
            each.close()


async def test_shutdown_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.SHUTDOWN_S", 0.1)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        api.service.gate = asyncio.Event()
        reader, writer = await dialled(api)
        writer.write(post("/v1/transactions", PREPARE))
        await until(lambda: bool(api.service.requests))
        async with asyncio.timeout(4):
            await stack.aclose()
            assert await reader.read() == b""
        writer.close()
        api.service.gate.set()


async def test_gone_client_releases_its_bytes(api: Api, fronts: list[DirectConnection]) -> None:
    gate = api.service.gate = asyncio.Event()
    _, writer = await dialled(api)
    writer.write(post("/v1/transactions", PREPARE))
    await until(lambda: bool(api.service.requests))
    assert api.in_flight() > len(PREPARE)
    writer.transport.abort()
    await until(lambda: fronts[0].transport is None)
    gate.set()
    await until(lambda: api.in_flight() == 0)
    assert len(api.service.views) == 1  # the call went on


async def test_cancelled_call_closes_its_connection(api: Api) -> None:
    api.service.failure = asyncio.CancelledError()
    reader, writer = await dialled(api)
    with closing(writer):
        writer.write(post("/v1/transactions", PREPARE))
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    assert api.in_flight() == 0


async def test_read_ahead_is_bounded(api: Api, fronts: list[DirectConnection]) -> None:
    gate = api.service.gate = asyncio.Event()
    raw, count = post("/v1/transactions", PREPARE), 5_000
    reader, writer = await dialled(api)
    with closing(writer):
        writer.write(raw * count)
        await until(lambda: len(fronts[0]._held) > HELD_BYTES_MAX)
        await asyncio.sleep(0.05)
        assert len(fronts[0]._held) <= HELD_BYTES_MAX + 256 * 1024  # what one read brings
        gate.set()
        async with asyncio.timeout(30):
            for number in range(count):
                lines, _ = await read_answer(reader)
                assert lines[0] == b"HTTP/1.1 20%d %s" % (
                    (1, b"Created") if not number else (0, b"OK")
                )
    assert fronts[0]._held == b""


@pytest.mark.parametrize("answered", [False, True])
async def test_idle_connection_is_closed(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.2)
    async with running_api() as api:
        reader, writer = await dialled(api)
        with closing(writer):
            async with asyncio.timeout(10):
                if answered:
                    gate = api.service.gate = asyncio.Event()
                    writer.write(post("/v1/transactions", PREPARE))
                    await asyncio.sleep(0.5)  # a call is no idle time
                    gate.set()
                    assert (await read_answer(reader))[0][0] == b"HTTP/1.1 201 Created"
                assert await reader.read() == b""


async def test_incomplete_request_is_not_idle(
    fronts: list[DirectConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.2)
    monkeypatch.setattr("txbroker.proxy.http.server.HELD_S", 10.0)
    async with running_api() as api:
        reader, writer = await dialled(api)
        with closing(writer):
            raw = post("/v1/transactions", PREPARE)
            writer.write(raw[:-5])
            await until(lambda: fronts[0]._is_unfinished)
            await asyncio.sleep(0.5)
            writer.write(raw[-5:])
            async with asyncio.timeout(10):
                assert (await read_answer(reader))[0][0] == b"HTTP/1.1 201 Created"


@pytest.mark.parametrize("path", ["/v1/transactions", "/v1/transactions?"])
async def test_unencodable_error_is_answered(
    api: Api, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        raise OwnerUnavailable("the proxy answered \udcff")

    monkeypatch.setattr(api.service, "runs", runs)
    reader, writer = await dialled(api)
    with closing(writer):
        writer.write(post(path, PREPARE))
        async with asyncio.timeout(10):
            head, body = await read_answer(reader)
    assert head[0] == b"HTTP/1.1 500 Internal Server Error"
    assert json.loads(body)["error"]["code"] == "failed"


async def test_overload_is_answered_and_counted() -> None:
    async with running_api(in_flight_bytes_max=100_000) as api:
        api.service.gate = asyncio.Event()
        writers = [await dialled(api) for _ in range(6)]
        for _, writer in writers:
            writer.write(post("/v1/transactions", PREPARE))
        refused = [asyncio.create_task(read_answer(reader)) for reader, _ in writers]
        async with asyncio.timeout(10):
            done, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
            api.service.gate.set()
            await asyncio.gather(*refused)
        lines = done.pop().result()[0]
        assert lines[0] == b"HTTP/1.1 429 Too Many Requests"
        assert b"Retry-After: 1" in lines
        assert b'overloaded_total{operation="prepare"}' in api.metrics.text()
        for _, writer in writers:
            writer.close()
