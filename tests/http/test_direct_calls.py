"""The calls that pass by the router: on the wire the same as by way of it."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import closing

import pytest
from http_api import Api, running_api, transaction

from txbroker.errors import KafkaUnavailable

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


async def told(api: Api, raw: bytes) -> tuple[list[bytes], bytes, bool]:
    """Return the answer, without its date, and whether the connection is closed after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(10):
            lines, body = await read_answer(reader)
        [date] = [line for line in lines if line.startswith(b"Date: ")]
        lines[lines.index(date)] = b"Date"
        writer.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
        try:
            async with asyncio.timeout(10):
                return lines, body, await reader.read(1) == b""
        except ConnectionError:
            return lines, body, True
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "body", "headers", "version", "status"),
    [
        ("/v1/transactions", PREPARE, HOST + TYPE, b"1.1", 201),
        ("/v1/transactions", PREPARE, HOST + TYPE, b"1.0", 201),
        ("/v1/transactions", PREPARE, HOST + TYPE + b"Connection: keep-alive\r\n", b"1.0", 201),
        ("/v1/transactions", PREPARE, HOST + TYPE + b"Connection: close\r\n", b"1.1", 201),
        ("/v1/transactions", PREPARE, HOST, b"1.1", 415),
        ("/v1/transactions", PREPARE, b"Host: evil\r\n" + TYPE, b"1.1", 403),
        ("/v1/transactions", NO_TOPIC, HOST + TYPE, b"1.1", 422),
        ("/v1/transactions", b"", HOST + TYPE, b"1.1", 400),
        ("/v1/transactions", b"[1]", HOST + TYPE, b"1.1", 400),
        (f"/v1/transactions/{UNKNOWN_ID}/commit", b"{}", HOST + TYPE, b"1.1", 404),
        (f"/v1/transactions/{UNKNOWN_ID}/rollback", b"", HOST + TYPE, b"1.1", 404),
        ("/v1/transactions/x/rollback", b"{}", HOST + TYPE, b"1.1", 400),
    ],
)
async def test_answers_are_those_of_the_router(
    path: str, body: bytes, headers: bytes, version: bytes, status: int
) -> None:
    # With a query, though an empty one, the router finds the call.
    async with running_api() as one, running_api() as other:
        direct = await told(one, post(path, body, headers, version))
        routed = await told(other, post(path + "?", body, headers, version))
    assert direct[0][0].split()[1] == b"%d" % status
    assert direct == routed


async def test_refusals_carry_the_headers_of_all_refusals() -> None:
    async with running_api() as one, running_api() as other:
        for api in (one, other):
            api.service.failure = KafkaUnavailable("no broker")
        direct = await told(one, post("/v1/transactions", PREPARE))
        routed = await told(other, post("/v1/transactions?", PREPARE))
    assert direct == routed
    assert b"Retry-After: 1" in direct[0]


async def test_answers_come_in_the_order_of_their_requests(api: Api) -> None:
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


async def test_a_body_may_come_in_pieces_and_after_it_was_asked_for(api: Api) -> None:
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
async def test_other_methods_are_told_what_works(api: Api, action: str) -> None:
    url = f"{api.url}/v1/transactions/{UNKNOWN_ID}/{action}"
    async with api.client.get(url) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_a_client_that_does_not_read_its_answers_is_dropped() -> None:
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
