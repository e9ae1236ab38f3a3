"""Check-backs over HTTP against every kind of server there is, good and evil."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import cast

import pytest
from msgspec import structs

from tests.checkers.check_server import until
from tests.kit.http_answers import (
    COMMIT,
    LOOPBACK,
    Serve,
    answering,
    ask,
    read_request,
    reset,
    response,
)
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unclear, Unreached
from txbroker.checkers.http import HttpChannel, HttpChecks, HttpLimits
from txbroker.core.records import Decision, Message

# --- the question ----------------------------------------------------------------------------


async def test_question_follows_contract_and_is_signed(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    seen: list[tuple[dict[str, str], bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(response(COMMIT))
        await writer.drain()

    server = await serve(handler)
    channel = await checks.acquire("orders", server.url + "?token=t", secret=b"open sesame")
    assert isinstance(channel, HttpChannel)
    result = await channel.ask(call, 5.0)
    channel.release()

    assert result == Answered(Decision.COMMIT, detail="commit")
    assert channel.endpoint == server.url  # the query may hold a token
    ((headers, body),) = seen
    assert headers["request-line"] == "POST /check?token=t HTTP/1.1"
    assert headers["host"] == f"localhost:{server.port}"
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "id": call.id,
        "group": "orders",
        "attempt": 3,
        "attempts_max": 15,
        "reason": "due",
        "prepared_at": "2026-02-03T04:05:06.789Z",
        "messages": [
            {
                "topic": "payments",
                "key": "42",
                "value": "paid",
                "headers": [["trace", "a"], ["trace", None]],
                "partition": 0,
            },
            {
                "topic": "audit",
                "key_base64": "//4=",
                "value": None,
                "headers": [["bin", {"base64": "gA=="}]],
                "partition": 3,
                "timestamp_ms": 12,
            },
        ],
    }
    assert headers["webhook-id"] == f"{call.id}.2.7".lower()
    assert headers["webhook-timestamp"] == "1770091600"
    signed = f"{call.id}.2.7.1770091600.".encode() + body
    digest = hmac.new(b"open sesame", signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}".lower()


async def test_question_without_secret_is_unsigned(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    seen: list[dict[str, str]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers, _ = await read_request(reader)
        seen.append(headers)
        writer.write(response(COMMIT))

    server = await serve(handler)
    await ask(checks, server.url, call)
    assert not [name for name in seen[0] if name.startswith("webhook")]


async def test_question_reaches_socket_before_first_suspension(
    serve: Serve, checks: HttpChecks, call: CheckCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(answering(response(COMMIT)))
    channel = await checks.acquire("orders", server.url)
    assert isinstance(channel, HttpChannel)
    sent: list[bytes] = []
    connection = channel._connection
    send = connection.send

    def recorded(data: bytes) -> None:
        sent.append(data)
        send(data)

    monkeypatch.setattr(connection, "send", recorded)
    asking = channel.ask(call, 5.0)
    assert len(sent) == 1
    assert sent[0].startswith(b"POST /check HTTP/1.1\r\n")
    asking.cancel()
    channel.release()


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"decision": "rollback"}', Answered(Decision.ROLLBACK, detail="rollback")),
        (b'{"decision": "unknown"}', Answered(Decision.UNKNOWN, detail="unknown")),
        (
            b'{"decision": "unknown", "ask_again_s": 5}',
            Answered(Decision.UNKNOWN, 5.0, detail="not yet, again in 5 s"),
        ),
        (
            b'{"decision": "unknown", "ask_again_s": 0}',
            Answered(Decision.UNKNOWN, 1.0, detail="not yet, again in 1 s"),
        ),
        (
            b'{"decision": "unknown", "ask_again_s": -1e300}',
            Answered(Decision.UNKNOWN, 1.0, detail="not yet, again in 1 s"),
        ),
        (
            b'{"decision": "unknown", "ask_again_s": 86400}',
            Answered(Decision.UNKNOWN, 3600.0, detail="not yet, again in 3600 s"),
        ),
        (
            b'{"decision": "unknown", "ask_again_s": ' + b"9" * 1000 + b"}",
            Answered(Decision.UNKNOWN, 3600.0, detail="not yet, again in 3600 s"),
        ),
        (b'{"decision": "commit", "ask_again_s": 5}', Answered(Decision.COMMIT, detail="commit")),
        (b' {"more": [1], "decision": "commit"}\n', Answered(Decision.COMMIT, detail="commit")),
        (
            b'{"decision": "commit", "messages": [{"topic": "t", "value_json": {"a": 1.0}}]}',
            Answered(
                Decision.COMMIT, messages=(Message("t", value=b'{"a": 1.0}'),), detail="commit"
            ),
        ),
        (b'{"decision": "commit", "messages": null}', Answered(Decision.COMMIT, detail="commit")),
    ],
)
async def test_good_answers(
    serve: Serve, checks: HttpChecks, call: CheckCall, body: bytes, expected: CheckResult
) -> None:
    server = await serve(answering(response(body)))
    assert await ask(checks, server.url, call) == expected


SECRET = "s3cr3t-of-the-body"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not a JSON object"),
        (b"commit " + SECRET.encode(), "not a JSON object"),
        (b'"commit"', "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"{}", "no decision"),
        (b'{"decision": "Commit"}', "is not commit, rollback or unknown"),
        (b'{"decision": "COMMIT"}', "is not commit, rollback or unknown"),
        (f'{{"decision": "{SECRET}"}}'.encode(), "is not commit, rollback or unknown"),
        (b'{"decision": null}', "is not commit, rollback or unknown"),
        (b'{"decision": true}', "is not commit, rollback or unknown"),
        (b'{"decision": ["commit"]}', "is not commit, rollback or unknown"),
        (b'{"decision": "commit"} trailing', "not a JSON object"),
        (b'{"decision": "\xff"}', "not a JSON object"),
        (b"\xef\xbb\xbf" + COMMIT, "not a JSON object"),
        (b'{"decision": ' + b"[" * 20_000 + b"}", "not a JSON object"),
        (b'{"decision": ' + b"7" * 1000 + b"}", "is not commit, rollback or unknown"),
        (b'{"decision": ' + b"7" * 9000 + b"}", "decision of the answer is malformed"),
        (b'{"decision": "unknown", "ask_again_s": "5"}', "ask_again_s of the answer is not a num"),
        (b'{"decision": "unknown", "ask_again_s": true}', "ask_again_s of the answer is not a num"),
        (
            b'{"decision": "unknown", "ask_again_s": 1e999}',
            "ask_again_s of the answer is malformed",
        ),
        (b'{"decision": "unknown", "ask_again_s": NaN}', "not a JSON object"),
        (b'{"decision": "commit", "messages": {}}', "messages of the answer is not"),
        (
            f'{{"decision": "commit", "messages": [{{"topic": "t", "{SECRET}": 1}}]}}'.encode(),
            "messages[0] of the answer is not",
        ),
        (
            b'{"decision": "commit", "messages": [{"topic": "t", "value": 5}]}',
            "messages[0].value of the answer is not",
        ),
    ],
)
async def test_answers_outside_the_contract_are_unclear(
    serve: Serve, checks: HttpChecks, call: CheckCall, body: bytes, words: str
) -> None:
    server = await serve(answering(response(body)))
    result = await ask(checks, server.url, call)
    assert isinstance(result, Unclear)
    assert words in result.detail
    assert SECRET not in result.detail


@pytest.mark.rule(22)
@pytest.mark.parametrize("status", [429, 502, 503])
async def test_not_handled_by_contract(
    serve: Serve, checks: HttpChecks, call: CheckCall, status: int
) -> None:
    hanging = f"HTTP/1.1 {status} No\r\ncontent-length: 1000000\r\n\r\nbusy".encode()
    server = await serve(answering(hanging))  # the status is enough; its body never ends
    assert await ask(checks, server.url, call) == Unreached(f"answered {status}: not handled")


@pytest.mark.parametrize("status", [201, 204, 301, 302, 307, 400, 401, 403, 404, 500, 504, 599])
async def test_other_statuses_are_unclear_and_redirects_not_followed(
    serve: Serve, checks: HttpChecks, call: CheckCall, status: int
) -> None:
    elsewhere = await serve(answering(response(COMMIT)))
    raw = response(COMMIT, f"{status} Other", f"location: {elsewhere.url}\r\n")
    server = await serve(answering(raw))
    result = await ask(checks, server.url, call)
    assert isinstance(result, Unclear)
    assert result.detail.startswith(f"answered {status}")
    assert elsewhere.connections == 0


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b'5\r\n{"dec\r\n11;x=y\r\nision": "commit"}\r\n0\r\n\r\n',
            Answered(Decision.COMMIT, detail="commit"),
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\n" + response(COMMIT),
            Answered(Decision.COMMIT, detail="commit"),
        ),
        (b"HTTP/1.0 200 OK\r\n\r\n" + COMMIT, Answered(Decision.COMMIT, detail="commit")),
    ],
    ids=["chunked", "continue", "until the end"],
)
async def test_framings(
    serve: Serve, checks: HttpChecks, call: CheckCall, raw: bytes, expected: CheckResult
) -> None:
    server = await serve(answering(raw, then_close=True))
    assert await ask(checks, server.url, call) == expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "ended before an answer"),
        (b"\x00\x01garbage\r\n\r\n", "not HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", "cut off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\n{}", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", "too large headers"),
        (response(b"\x1f\x8b\x08", extra="content-encoding: gzip\r\n"), "compressed"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000 + response(COMMIT), "too many pieces"),
    ],
)
async def test_malformed_http_is_unclear(
    serve: Serve, checks: HttpChecks, call: CheckCall, raw: bytes, words: str
) -> None:
    server = await serve(answering(raw, then_close=True))
    result = await ask(checks, server.url, call)
    assert isinstance(result, Unclear)
    assert words in result.detail


async def endless(writer: asyncio.StreamWriter, sent: list[int], piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        sent[0] += len(piece)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 104857600\r\n\r\n", b"x" * 65536),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 10_000),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 1000),
    ],
    ids=["100 MB", "until closed", "tiny chunks", "headers", "informational"],
)
async def test_endless_answers_are_cut_off(
    serve: Serve, checks: HttpChecks, call: CheckCall, head: bytes, piece: bytes
) -> None:
    sent = [0]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        await endless(writer, sent, piece)

    server = await serve(handler)
    result = await ask(checks, server.url, call)
    assert isinstance(result, Unclear)
    assert "large" in result.detail or "too many pieces" in result.detail
    assert sent[0] < 32 * 1024 * 1024  # the sockets' own buffers, never the whole


async def test_group_can_raise_answer_limit(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    body = (
        b'{"decision": "commit", "messages": [{"topic": "t", "value": "' + b"v" * 300_000 + b'"}]}'
    )
    server = await serve(answering(response(body)))
    assert isinstance(await ask(checks, server.url, call), Unclear)
    channel = await checks.acquire("orders", server.url, answer_bytes_max=1_000_000)
    assert isinstance(channel, HttpChannel)
    result = await channel.ask(call, 5.0)
    channel.release()
    assert isinstance(result, Answered)
    assert result.messages == (Message("t", value=b"v" * 300_000),)


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"]
)
async def test_hanging_server_times_out(
    serve: Serve, checks: HttpChecks, call: CheckCall, head: bytes
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        await reader.read()  # until the other side gives up

    server = await serve(handler)
    result = await ask(checks, server.url, call, timeout_s=0.05)
    assert result == Unclear("no answer within 0.05 s")
    assert checks.idle_connections == 0


async def test_dripping_answer_times_out(serve: Serve, checks: HttpChecks, call: CheckCall) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            writer.write(b"y")
            await writer.drain()
            await asyncio.sleep(0)

    server = await serve(handler)
    assert isinstance(await ask(checks, server.url, call, timeout_s=0.05), Unclear)


async def test_server_that_never_reads_times_out(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        await asyncio.Event().wait()

    server = await serve(handler)
    large = structs.replace(call, messages=(Message("t", value=b"x" * 20_000_000),))
    assert isinstance(await ask(checks, server.url, large, timeout_s=0.2), Unclear)


async def test_reset_after_request_is_unclear(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        reset(writer)

    server = await serve(handler)
    assert await ask(checks, server.url, call) == Unclear("the connection ended before an answer")


# --- connections that are kept -----------------------------------------------------------------


async def test_connection_is_reused(serve: Serve, checks: HttpChecks, call: CheckCall) -> None:
    server = await serve(answering(response(COMMIT)))
    for _ in range(3):
        assert isinstance(await ask(checks, server.url, call), Answered)
    assert server.connections == 1
    assert checks.idle_connections == 1


async def test_connections_are_separate_by_group(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    server = await serve(answering(response(COMMIT)))
    await ask(checks, server.url, call)
    await ask(checks, server.url, structs.replace(call, group="billing"))
    assert server.connections == 2


async def test_closed_idle_connection_is_not_reused(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    server = await serve(answering(response(COMMIT), then_close=True))
    await ask(checks, server.url, call)
    await until(lambda: checks.idle_connections == 0)
    assert isinstance(await ask(checks, server.url, call), Answered)
    assert server.connections == 2


async def test_half_closed_idle_connection_is_not_reused(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(COMMIT))
        writer.write_eof()
        await reader.read()

    server = await serve(handler)
    for n in range(1, 3):
        assert isinstance(await ask(checks, server.url, call), Answered)
        await until(lambda: checks.idle_connections == 0)
        assert server.connections == n


@pytest.mark.parametrize(
    "raw",
    [
        response(COMMIT) + b"HTTP/1.1 408 Request Timeout\r\n\r\n",
        response(COMMIT, extra="connection: close\r\n"),
        response(b"no", "500 Internal Server Error"),
    ],
    ids=["more than the answer", "connection: close", "not read to its end"],
)
async def test_connection_with_unclear_state_is_not_kept(
    serve: Serve, checks: HttpChecks, call: CheckCall, raw: bytes
) -> None:
    server = await serve(answering(raw))
    await ask(checks, server.url, call)
    assert checks.idle_connections == 0


async def test_idle_connection_expires(serve: Serve, call: CheckCall) -> None:
    server = await serve(answering(response(COMMIT)))
    checks = HttpChecks(guard=LOOPBACK, limits=HttpLimits(idle_s=0.01))
    await ask(checks, server.url, call)
    assert checks.idle_connections == 1
    await until(lambda: checks.idle_connections == 0)
    await checks.close()


async def test_unused_connection_is_kept(serve: Serve, checks: HttpChecks) -> None:
    server = await serve(answering(response(COMMIT)))
    channel = await checks.acquire("orders", server.url)
    assert isinstance(channel, HttpChannel)
    channel.release()
    channel.release()
    assert checks.idle_connections == 1


async def test_cancelled_question_closes_its_connection(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    asked = asyncio.Event()
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()
        ended.set()

    server = await serve(handler)
    task = asyncio.create_task(ask(checks, server.url, call))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)
    assert checks.idle_connections == 0


async def test_close_ends_idle_connections(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    server = await serve(answering(response(COMMIT)))
    await ask(checks, server.url, call)
    channel = await checks.acquire("orders", server.url)
    assert isinstance(channel, HttpChannel)
    await checks.close()
    channel.release()
    assert checks.idle_connections == 0
