"""Class 10: rubbish over HTTP and in sessions. Every answer is typed, and the proxy serves on."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.security.installation import TABLES, TOKENS, Installation
from txbroker.contract import frames as wire
from txbroker.core.records import Decision, Message
from txbroker.core.routing import make_id
from txbroker.errors import request_errors
from txbroker.proxy.http.api import operations

CLASS = 10
SEED = 19
LONG = bool(os.environ.get("TXBROKER_TEST_LONG"))
CASES = 100_000 if LONG else 3_000
"""Of each kind."""
AT_ONCE = 32
PIECES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 1e308, "", "shop", "bank", "\x00", "\u202e", "A" * 5000, [], {}, [[]],
    {"topic": "shop.orders"}, {"topic": "txbroker.half"}, [{"topic": "shop.orders", "value": "x"}],
    "commit", "promoted", "0" * 26, {"a": {"a": {"a": {}}}}, b"\xff\xfe",
)  # fmt: skip
FIELDS = ("group", "messages", "id", "order_key", "dedup_key", "reason", "by", "wait", "check_url")


def body_of(dice: random.Random) -> bytes:
    """Return a body: JSON of odd fields, maybe cut off, or mere bytes."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(200))
    given = {field: dice.choice(PIECES) for field in dice.sample(FIELDS, dice.randrange(6))}
    if dice.random() < 0.7:
        given["group"] = dice.choice(("shop", "bank"))
    if dice.random() < 0.5:
        given["messages"] = [{"topic": "shop.orders", "value": dice.choice(("x", 7, None))}]
    raw = msgspec.json.encode({name: v for name, v in given.items() if not isinstance(v, bytes)})
    return raw[: dice.randrange(len(raw))] if dice.random() < 0.1 else raw


async def test_http(site: Installation, record_property: Any) -> None:
    dice = random.Random(SEED)
    declared = operations()
    site.allow(*(name for name in TABLES if name != "revoked"))
    own = [await site.prepared("shop") for _ in range(8)]
    theirs = [await site.prepared("bank") for _ in range(8)]
    ids = [*own, *theirs, "0" * 26, "x", "%00", make_id(3, 1, 1)]
    seen: set[str] = set()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        operation = dice.choice(declared)
        path = operation.path.format(
            id=dice.choice(ids), group=dice.choice(("shop", "bank", "%2e"))
        )
        by = dice.choice(("shop", "shop", "shop", "bank", "viewer", "revoked"))
        headers = {
            "authorization": f"Bearer {TOKENS[by]}" if dice.random() < 0.95 else "Bearer \xff",
            "content-type": "application/json" if dice.random() < 0.9 else "text/xml",
        }
        data = body_of(dice) if operation.changes else None
        url = dice.choice(site.urls)
        async with (
            gate,
            site._http.request(operation.method, url + path, data=data, headers=headers) as answer,
        ):
            raw = await answer.read()
            assert answer.status < 500 or operation.name == "ready", (operation.name, data, raw)
            if answer.status >= 400:
                error = msgspec.json.decode(raw)["error"]
                assert error["code"] in request_errors(), error
                seen.add(error["code"])

    await asyncio.gather(*(one() for _ in range(CASES)))
    # What one team may do it may do to its own; the other's is as it was.
    for id in theirs:
        view = await site.view(id)
        assert view.get("by") in (None, "", "bank"), view
    assert {"unauthorized", "not_permitted", "bad_request", "unsupported_media_type"} <= seen
    assert (await site.get("/healthz")).status == 200
    record_property("result", "typed errors, none above 499; nothing of another team was changed")


REQUEST_LINES = (
    b"", b"GET", b"GET /", b"GET / HTTP/1.1", b"POST /v1/transactions HTTP/9.9", b"\x16\x03\x01",
    b"PRI * HTTP/2.0", b"GET /v1/session HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET http:// HTTP/1.1",
)  # fmt: skip
HEADER_LINES = (
    b"Host: localhost", b"Host: evil.example", b"Content-Length: -1", b"Content-Length: 9" * 3,
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: xchunked", b"Upgrade: websocket",
    b"Connection: upgrade", b"Sec-WebSocket-Key: x", b": x", b"x", b"\x00: \x00", b"Expect: x",
    b"Authorization: Bearer the-token-of-shop", b"Content-Type: application/json",
)  # fmt: skip


async def test_bytes_on_the_socket(site: Installation, record_property: Any) -> None:
    dice = random.Random(SEED)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        lines = [dice.choice(REQUEST_LINES), *dice.choices(HEADER_LINES, k=dice.randrange(6))]
        data = b"\r\n".join(lines) + b"\r\n\r\n" + dice.randbytes(dice.randrange(64))
        address = urlsplit(dice.choice(site.urls))
        async with gate:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(30):
                    raw = await reader.read()
                assert not raw.startswith(b"HTTP/1.1 5"), (data, raw)
            except ConnectionError:
                pass  # dropped, as such a caller may be
            finally:
                writer.close()

    await asyncio.gather(*(one() for _ in range(CASES // 3)))
    assert (await site.get("/healthz")).status == 200
    record_property("result", "answered with a 4xx or dropped; the proxy serves on")


def frame_of(dice: random.Random, ids: list[str]) -> bytes:
    """Return a frame: odd operations, maybe cut off, or mere bytes."""
    if dice.random() < 0.2:
        return dice.randbytes(dice.randrange(100))
    id = dice.choice(ids)
    operations: list[Any] = [
        wire.Decide(dice.randrange(9), id, dice.choice(list(Decision))),
        wire.AskEarly(1, id, "\x00" * dice.randrange(3)),
        wire.CheckAnswer(dice.randrange(99), dice.choice([*Decision, None])),
        wire.Prepare(2, id, (Message(dice.choice(("shop.orders", "", "txbroker.op"))),)),
        wire.Prepare(3, make_id(0, 1, dice.getrandbits(32)), ()),
        wire.Hello(1, "shop", "again"),
        wire.Drain(),
        {"type": "decide", "call": "x"},
        dice.choice(PIECES[:6]),
    ]
    raw = wire.encode_frame(dice.choices(operations, k=dice.randrange(1, 5)))
    return raw[: dice.randrange(len(raw))] if dice.random() < 0.2 else raw


async def test_frames_of_sessions(site: Installation, record_property: Any) -> None:
    dice = random.Random(SEED)
    theirs = [await site.prepared("bank") for _ in range(8)]
    ids = [*theirs, "0" * 26, "", "x" * 26, make_id(999, 1, 1)]
    left = [CASES // 3]

    async def one_session() -> None:
        while left[0] > 0:
            async with site.socket("shop", dice.choice(site.urls)) as socket:
                assert isinstance(await socket.hello("shop"), wire.Welcome)
                while left[0] > 0:
                    left[0] -= 1
                    try:
                        await socket.socket.send_bytes(frame_of(dice, ids))
                    except (ConnectionError, aiohttp.ClientError):
                        break
                    if socket.socket.closed or dice.random() < 0.1:
                        break

    await asyncio.gather(*(one_session() for _ in range(AT_ONCE)))
    for id in theirs:
        view = await site.view(id)
        assert (view["state"], view.get("by")) in (("pending", None), ("pending", ""))
    async with site.socket("bank") as socket:
        assert isinstance(await socket.hello("bank"), wire.Welcome)
    record_property("result", "nothing foreign was changed; new sessions are taken")


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
async def test_a_frame_before_the_hello(
    site: Installation, size: int, record_property: Any
) -> None:
    for url in site.urls:
        async with site.socket("shop", url) as socket:
            await socket.socket.send_bytes(bytes(size))
            failure = await socket.next()
            assert isinstance(failure, wire.Failure)
            assert failure.code == "bad_request"
            assert await socket.ended()
    record_property("result", "bad_request, and the session's end")
