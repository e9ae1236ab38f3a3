"""What a client sees of a connection is the same with and without the calls in front of aiohttp."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Sequence
from contextlib import suppress

import pytest

from tests.kit.http_api import running_api, transaction
from txbroker.proxy.http.server import _Server

HOST = b"Host: localhost\r\n"
TYPE = b"Content-Type: application/json\r\n"
LINE = b"POST /v1/transactions HTTP/1.1\r\n"
BODY = json.dumps(transaction(dedup_key="k")).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
COMMIT = b"POST /v1/transactions/" + b"00" * 13 + b"/commit HTTP/1.1\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LIMIT_S = 0.3
PAUSE_S = 0.03
_VARYING = re.compile(rb"Date: [^\r]*")


def request(
    line: bytes = LINE,
    *fields: bytes,
    body: bytes = BODY,
    host: bytes = HOST,
    kind: bytes = TYPE,
    length: bytes | None = None,
) -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if length is None else length
    return line + host + kind + length + b"".join(fields) + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


CASES = {
    "good": request(),
    "good after good": request() + request(),
    "commit without a body": request(COMMIT, body=b"", length=b"", kind=TYPE),
    "commit without a type": request(COMMIT, body=b"", length=b"", kind=b""),
    "charset": request(kind=b"content-type: Application/JSON; charset=UTF-8\r\n"),
    "other charset": request(kind=b"Content-Type: application/json; charset=latin1\r\n"),
    "form": request(kind=b"Content-Type: text/plain\r\n"),
    "spaces round values": request(LINE, b"X:   y  \t \r\n", host=b"Host:localhost \t\r\n"),
    "kept alive": request(LINE, b"Connection: Keep-Alive\r\n"),
    "closed": request(LINE, b"Connection: close\r\n") + request(),
    "other connection": request(LINE, b"Connection: keep-alive, x\r\n"),
    "foreign page": request(LINE, b"Origin: https://evil.example\r\n"),
    "own page": request(LINE, b"Origin: http://localhost\r\n"),
    "another host": request(host=b"Host: evil\r\n"),
    "no host": request(host=b""),
    "two hosts": request(LINE, b"Host: evil\r\n"),
    "host twice in other letters": request(LINE, b"hOST: localhost\r\n"),
    "two types": request(LINE, b"content-type: text/plain\r\n"),
    "two origins": request(LINE, b"Origin: http://localhost\r\nOrigin: http://evil\r\n"),
    "length twice": request(LINE, LENGTH),
    "two lengths": request(LINE, b"Content-Length: 3\r\n"),
    "lengths in a list": request(length=b"Content-Length: 3, 3\r\n"),
    "length with sign": request(length=b"Content-Length: +%d\r\n" % len(BODY)),
    "length below zero": request(length=b"Content-Length: -1\r\n"),
    "hexadecimal length": request(length=b"Content-Length: 0x10\r\n"),
    "empty length": request(length=b"Content-Length: \r\n"),
    "length in other digits": request(length="Content-Length: \u0661\r\n".encode()),
    "length of many zeros": request(length=b"Content-Length: %0*d\r\n" % (5000, len(BODY))),
    "endless length": request(length=b"Content-Length: 99999999999999999999999\r\n"),
    "too long for the proxy": request(length=b"Content-Length: 999999999\r\n"),
    "chunked": request(length=b"Transfer-Encoding: chunked\r\n", body=chunked(BODY)),
    "chunked and length": request(LINE, b"Transfer-Encoding: chunked\r\n", body=chunked(BODY)),
    "length and chunked": request(
        LINE + b"Transfer-Encoding: chunked\r\n", body=chunked(BODY)
    ),
    "not quite chunked": request(LINE, b"Transfer-Encoding: xchunked\r\n"),
    "hidden chunked": request(LINE, b"Transfer-Encoding : chunked\r\n"),
    "folded": request(LINE, b"X: a\r\n b\r\n"),
    "folded length": request(length=b"Content-Length:\r\n %d\r\n" % len(BODY)),
    "space before colon": request(LINE, b"X : a\r\n"),
    "no name": request(LINE, b": a\r\n"),
    "no colon": request(LINE, b"abc\r\n"),
    "bad name": request(LINE, b"X(y): a\r\n"),
    "null in value": request(LINE, b"X: a\0b\r\n"),
    "bare CR in value": request(LINE, b"X: a\rb\r\n"),
    "bare LF ends a line": request(LINE, b"X: a\nY: b\r\n"),
    "bare LFs end the head": LINE.replace(b"\r", b"") + b"Host: localhost\n\n",
    "head ends early": LINE + HOST + TYPE + b"\n" + LENGTH + b"\r\n" + BODY,
    "no UTF-8": request(LINE, b"X: \xff\xfe\r\n"),
    "name that is no ASCII": request(LINE, b"\xc3\xa4: 1\r\n"),
    "empty lines first": b"\r\n\r\n" + request(),
    "empty line between": request() + b"\r\n" + request(),
    "HTTP/1.0": request(LINE.replace(b"1.1", b"1.0")),
    "HTTP/1.2": request(LINE.replace(b"1.1", b"1.2")),
    "HTTP/2.0": request(LINE.replace(b"1.1", b"2.0")),
    "HTTP/0.9": b"POST /v1/transactions\r\n\r\n",
    "small letters": request(LINE.lower()),
    "two spaces": request(LINE.replace(b" /", b"  /")),
    "space at the end": request(LINE.replace(b"\r\n", b" \r\n")),
    "absolute URL": request(LINE.replace(b" /", b" http://localhost/")),
    "escaped path": request(LINE.replace(b"/v1", b"/%761")),
    "path up and down": request(LINE.replace(b"/v1", b"/x/../v1")),
    "fragment": request(LINE.replace(b" HTTP", b"#x HTTP")),
    "query": request(LINE.replace(b" HTTP", b"?group=x HTTP")),
    "slash": request(LINE.replace(b" HTTP", b"/ HTTP")),
    "another method": request(LINE.replace(b"POST", b"PUT")),
    "no such id": request(COMMIT, body=b"{}"),
    "no id": request(COMMIT.replace(b"00", b"UU"), body=b"{}"),
    "long id": request(COMMIT.replace(b"00", b"0" * 300), body=b"{}"),
    "id beyond a line": request(COMMIT.replace(b"00", b"0" * 2000), body=b"{}"),
    "long field": request(LINE, b"X: " + b"x" * 9_000 + b"\r\n"),
    "too long field": request(LINE, b"X: " + b"x" * 20_000 + b"\r\n"),
    "many fields": request(LINE, *[b"X%d: x\r\n" % n for n in range(110)]),
    "too many fields": request(LINE, *[b"X%d: x\r\n" % n for n in range(140)]),
    "expected": request(LINE, b"Expect: 100-continue\r\n"),
    "expected oddly": request(LINE, b"Expect: wonders\r\n"),
    "WebSocket": request(LINE, b"Upgrade: websocket\r\nConnection: Upgrade\r\n"),
    "HTTP/2 wished": request(LINE, b"Upgrade: h2c\r\nConnection: Upgrade, close\r\n"),
    "upgrade without connection": request(LINE, b"Upgrade: websocket\r\n"),
    "gzip": request(LINE, b"Content-Encoding: gzip\r\n", body=gzip.compress(BODY, mtime=0)),
    "unknown encoding": request(LINE, b"Content-Encoding: rot13\r\n"),
    "old WebSocket": request(LINE, b"Sec-WebSocket-Key1: x\r\n"),
    "no JSON": request(body=b"{"),
    "no UTF-8 in JSON": request(body=b'{"group":"\xff"}'),
    "unknown field": request(body=b'{"grup":"x"}'),
    "empty body": request(body=b""),
    "large body": request(body=b'{"group":"orders","messages":[{"topic":"payments","value":"%s"}],'
                          b'"dedup_key":"k"}' % (b"x" * 100_000)),
    "body over the limit": request(body=b" " * 300_000),
    "rubbish": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3,
    "like POST": b"POST /x\0\r\n\r\n",
    "cut line": LINE[:20],
    "cut head": request()[: len(LINE) + 10],
    "cut body": request()[:-10],
}  # fmt: skip
# Incomplete requests wait, in front and in aiohttp, so these are not cut into pieces.
CUT = [name for name in CASES if name.startswith("cut ")]


async def heard(port: int, pieces: Sequence[bytes]) -> bytes:
    """Return all that comes back until the connection ends; what then is left is not sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        for piece in pieces:
            writer.write(piece)
            with suppress(TimeoutError):
                async with asyncio.timeout(10 if piece is pieces[-1] else PAUSE_S):
                    while more := await reader.read(65536):
                        found += more
                    break
        assert reader.at_eof()
    except ConnectionError:
        pass  # it has closed without reading all
    finally:
        writer.transport.abort()
    return _VARYING.sub(b"Date", found)


def framework_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Server, "accept", _Server.connection)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name not in CUT])
async def test_answers_equal_those_of_aiohttp(
    name: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = CASES[name]
    size = -(-len(raw) // pieces)
    sent = [raw[at : at + size] for at in range(0, len(raw), size)]
    sent[-1] += LAST
    options = {"request_bytes_max": 200_000, "request_timeout_s": LIMIT_S}
    async with running_api(**options) as api:
        found = await heard(api.port, sent)
        assert api.in_flight() == 0
    framework_alone(monkeypatch)
    async with running_api(**options) as api:
        expected = await heard(api.port, sent)
    assert found == expected
    assert found.startswith(b"HTTP/")


@pytest.mark.parametrize("before", [[], [request()]], ids=["first", "second"])
@pytest.mark.parametrize("name", CUT)
async def test_incomplete_request_ends_as_in_aiohttp(
    name: str, before: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(request_timeout_s=LIMIT_S) as api:
        found = await heard(api.port, [*before, CASES[name]])
        assert api.in_flight() == 0
    framework_alone(monkeypatch)
    async with running_api(request_timeout_s=LIMIT_S) as api:
        assert found == await heard(api.port, [*before, CASES[name]])
    assert (b"HTTP/1.1 408 " in found) is (name == "cut body")


async def test_garbage_after_a_call_keeps_its_answer() -> None:
    async with running_api() as api:
        found = await heard(api.port, [request() + b"\0\1\2\3"])
    assert re.findall(rb"HTTP/1.. (\d+)", found) == [b"201", b"400"]


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
@pytest.mark.parametrize("line", [LINE, COMMIT, b"GET /v1/transactions HTTP/1.1\r\n"])
async def test_other_versions_of_http_change_nothing(version: bytes, line: bytes) -> None:
    async with running_api() as api:
        raw = request(line.replace(b"1.1", version), b"Connection: close\r\n")
        found = await heard(api.port, [raw])
        assert b" 505 " in found.partition(b"\r\n")[0]
        assert b"http_version" in found
        listed = await api.client.get(f"{api.url}/v1/transactions")
        assert (await listed.json())["transactions"] == []


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
async def test_broken_encoding_is_refused_in_one_line(
    encoding: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    raw = request(LINE, b"Content-Encoding: %s\r\nConnection: close\r\n" % encoding)
    async with running_api() as api:
        # Its rest arrives after the answer.
        found = await heard(api.port, [raw[:-10], raw[-10:]])
        assert found.startswith(b"HTTP/1.1 400 ")
        assert b"cannot read the body: Can not decode content-encoding" in found
    assert [each for each in caplog.records if each.exc_info] == []
    assert len(caplog.records) <= 1
