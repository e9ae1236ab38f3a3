"""The HTTP calls of a load: answers in pieces, answers that never come, connections that end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from txbroker.cli.bench import http as bench_http
from txbroker.cli.bench.http import HttpConnection
from txbroker.errors import TxbrokerError

OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}'


@asynccontextmanager
async def server(answers: Callable[[int], list[bytes] | None]) -> AsyncIterator[HttpConnection]:
    """Give a connection to a server that answers its nth request in these pieces; None: it hangs
    up."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)  # the body: {}
                pieces = answers(asked)
                asked += 1
                if pieces is None:
                    return
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        connection = HttpConnection(f"http://127.0.0.1:{port}", None, None, None, None)
        try:
            yield connection
        finally:
            connection.close()


async def test_answer_in_pieces_is_parsed() -> None:
    async with server(lambda _: [OK[cut : cut + 1] for cut in range(len(OK))]) as connection:
        for _ in range(3):
            assert await connection.post("/v1/x", {}) == {"a": 1}


async def test_refusal_is_raised_as_error() -> None:
    body = b'{"error": {"code": "overloaded", "message": "too much"}}'
    refused = b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with server(lambda number: [refused] if number == 0 else [OK]) as connection:
        with pytest.raises(TxbrokerError, match=r"too much \(overloaded\)"):
            await connection.post("/v1/x", {})
        assert await connection.post("/v1/x", {}) == {"a": 1}


@pytest.mark.parametrize(
    "broken",
    [None, [b"HTTP/1.1 200 OK\r\n\r\n"], [OK[:-8] + b"no json!"], [OK.replace(b"8", b"x")]],
    ids=["hung up", "no length", "no JSON", "length is no number"],
)
async def test_invalid_answer_fails_and_next_call_reconnects(broken: list[bytes] | None) -> None:
    async with server(lambda number: broken if number == 1 else [OK]) as connection:
        assert await connection.post("/v1/x", {}) == {"a": 1}
        with pytest.raises(TxbrokerError, match="no answer to an HTTP call"):
            await connection.post("/v1/x", {})
        assert await connection.post("/v1/x", {}) == {"a": 1}


async def test_missing_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_http, "ANSWER_TIMEOUT_S", 0.05)
    async with server(lambda number: [OK] if number else [OK[:20]]) as connection:
        with pytest.raises(TxbrokerError, match="TimeoutError"):
            await connection.post("/v1/x", {})
        monkeypatch.undo()
        assert await connection.post("/v1/x", {}) == {"a": 1}


async def test_missing_proxy_raises_error() -> None:
    async with server(lambda _: [OK]) as connection:
        pass
    with pytest.raises(TxbrokerError, match="no answer to an HTTP call"):
        await connection.post("/v1/x", {})
