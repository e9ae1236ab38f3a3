"""Raw answers of small servers, for the tests of checks over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from txbroker.checkers.base import CheckCall, CheckResult
from txbroker.checkers.http import HttpChannel, HttpChecks
from txbroker.checkers.url_guard import UrlGuard

LOOPBACK = UrlGuard(loopback=True)
"""As of a proxy that listens on loopback only: the tests' servers do."""
Serve = Callable[..., Awaitable[Any]]
ASKED_ID = b"0V3R7K2M5N8P1Q4S6T9W0X2Y4Z"
"""The id of the questions to these answers; `answering` replaces it by another one."""
COMMIT = b'{"id": "%b", "decision": "commit"}' % ASKED_ID


def named(answer: bytes) -> bytes:
    """Return the JSON of an answer, or of several, with the question's id before the decision."""
    return answer.replace(b'"decision"', b'"id": "%b", "decision"' % ASKED_ID, 1)


def answer_to(body: bytes, raw: bytes) -> bytes:
    """Return a raw answer that names the id in the body of a question."""
    if ASKED_ID not in raw:
        return raw
    id = json.loads(body).get("id", "").encode()
    return raw.replace(ASKED_ID, id) if len(id) == len(ASKED_ID) else raw


async def read_request(reader: asyncio.StreamReader) -> tuple[dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    request_line, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    headers["request-line"] = request_line
    return headers, await reader.readexactly(int(headers["content-length"]))


def response(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def answering(*raw: bytes, then_close: bool = False) -> Any:
    """Answer each request of a connection with the next of `raw`, the last one for ever."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = list(raw)
        while True:
            _, body = await read_request(reader)
            writer.write(answer_to(body, answers.pop(0) if len(answers) > 1 else answers[0]))
            await writer.drain()
            if then_close:
                return

    return handler


def reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side gets a reset, not an end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def ask(checks: HttpChecks, url: str, call: CheckCall, timeout_s: float = 5.0) -> CheckResult:
    channel = await checks.acquire(call.group, url)
    assert isinstance(channel, HttpChannel), channel
    try:
        return await channel.ask(call, timeout_s)
    finally:
        channel.release()
