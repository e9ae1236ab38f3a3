"""Bad input of every kind over HTTP: a typed error as JSON, never a traceback, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.kit.http_api import JSON, Api, running_api, transaction
from tests.kit.until import until

MESSAGE = {"topic": "payments", "value": "42"}
PREPARE = "/v1/transactions"


async def refused(api: Api, raw: bytes, status: int = 400, code: str = "bad_request") -> Any:
    answer = await api.call("POST", PREPARE, raw=raw)
    assert (answer[0], answer[1]["error"]["code"]) == (status, code), answer
    assert "Traceback" not in answer[1]["error"]["message"]
    assert api.service.requests == []
    return answer[1]["error"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not JSON"),
        (b"nonsense", "not JSON"),
        (b'{"group": NaN}', "not JSON"),
        (b'{"group": "a",}', "not JSON"),
        (b'{"group": "a", "messages": []} {}', "not JSON"),
        (b'{"group": "\xff"}', "not UTF-8 at byte 11"),
        (b'\xef\xbb\xbf{"group": "a"}', "not JSON"),
        ('{"group": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"group": "\\ud800", "messages": []}', "not JSON"),
        (b"[]", "expected `object`"),
        (b"null", "expected `object`"),
        (b'"text"', "expected `object`"),
        (b"1", "expected `object`"),
        (b"[" * 100_000, "expected `object`"),
        (b'{"messages": ' + b"[" * 100_000, "JSON"),
        (b'{"group":"a","messages":' + b'{"a":' * 100_000, "JSON"),
        (b'{"group": "a", "messages": [], "check_after_s": 1e999}', "out of range"),
        (b'{"group": "a"}', "`messages`"),
    ],
)
async def test_malformed_json(api: Api, raw: bytes, words: str) -> None:
    error = await refused(api, raw)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"group": 1}, "group", "expected `str`, got `int`"),
        ({"group": None}, "group", "got `null`"),
        ({"group": ""}, "group", "length >= 1"),
        ({"group": "x" * 250}, "group", "length <= 249"),
        ({"group": "a\nb"}, "group", "control characters"),
        ({"group": "a\n"}, "group", "control characters"),
        ({"messages": None}, "messages", "one message"),
        ({"messages": []}, "messages", "one message"),
        ({"messages": {}}, "messages", "list of objects"),
        ({"messages": "x"}, "messages", "list of objects"),
        ({"messages": [1]}, "messages", "list of objects"),
        ({"messages": [MESSAGE, {"value": ""}]}, "messages[1]", "no topic"),
        ({"messages": [{"topic": "a"}]}, "messages[0]", "has no value"),
        ({"messages": [{**MESSAGE, "topic": 1}]}, "messages[0].topic", "must be text"),
        ({"messages": [{**MESSAGE, "key": 1}]}, "messages[0].key", "must be text"),
        ({"messages": [{**MESSAGE, "value": {}}]}, "messages[0].value", "value_json"),
        ({"messages": [{**MESSAGE, "value_json": 1}]}, "messages[0]", "only one"),
        ({"messages": [{**MESSAGE, "key_base64": "?"}]}, "messages[0].key_base64", "base64"),
        ({"messages": [{**MESSAGE, "partition": -1}]}, "messages[0].partition", "from 0"),
        ({"messages": [{**MESSAGE, "partition": 1.5}]}, "messages[0].partition", "whole"),
        ({"messages": [{**MESSAGE, "partition": True}]}, "messages[0].partition", "whole"),
        ({"messages": [{**MESSAGE, "timestamp_ms": 2**70}]}, "messages[0].timestamp_ms", "0 to"),
        ({"messages": [{**MESSAGE, "headers": [["a"]]}]}, "messages[0].headers[0]", "pair"),
        ({"messages": [{**MESSAGE, "headers": {"a": 1}}]}, "messages[0].headers.a", "text"),
        ({"messages": [{**MESSAGE, "valeu": 1}]}, "messages[0]", "unknown field 'valeu'"),
        ({"id": 5}, "id", "got `int`"),
        ({"id": "short"}, "id", "length >= 26"),
        ({"dedup_key": ""}, "dedup_key", "length >= 1"),
        ({"order_key": ["a"]}, "order_key", "got `array`"),
        ({"check_after_s": -1}, "check_after_s", ">= 0"),
        ({"check_after_s": "soon"}, "check_after_s", "got `str`"),
        ({"check_interval_s": 1e300}, "check_interval_s", "<="),
        ({"check_attempts_max": 0}, "check_attempts_max", ">= 1"),
        ({"check_attempts_max": 16}, "check_attempts_max", "<= 15"),
        ({"check_attempts_max": 2.5}, "check_attempts_max", "got `float`"),
        ({"check_timeout_s": 0.05}, "check_timeout_s", ">= 0.1"),
        ({"check_timeout_s": 61}, "check_timeout_s", "<= 60"),
        ({"grup": "a"}, "grup", "did you mean 'group'?"),
        ({"zzz": 1}, "zzz", "known are group, messages"),
    ],
)
async def test_wrong_types_are_reported_with_their_path(
    api: Api, fields: dict[str, Any], path: str, words: str
) -> None:
    error = await refused(api, json.dumps(transaction(**fields)).encode())
    assert error["path"] == path
    assert words in error["message"]


async def test_long_unknown_names_are_shortened_in_errors(api: Api) -> None:
    error = await refused(api, json.dumps({"x" * 100_000: 1}).encode())
    assert len(error["message"]) < 300


async def test_body_is_bounded_by_length_and_by_bytes() -> None:
    small = {
        "request_bytes_max": 2000,
        "transaction_bytes_max": 1000,
        "message_bytes_max": 1000,
    }
    async with running_api(**small) as api:
        raw = b" " * 2001
        await refused(api, raw, 413, "too_large")

        async def chunks() -> Any:
            yield raw[:1500]
            yield raw[:1500]

        async with api.client.post(api.url + PREPARE, data=chunks(), headers=JSON) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "too_large")
        assert api.app is not None


async def test_too_many_bytes_in_flight() -> None:
    async with running_api(in_flight_bytes_max=40_000) as api:
        api.service.gate = asyncio.Event()
        body = transaction(messages=[{"topic": "a", "value": "x" * 2000}])
        first = asyncio.create_task(api.call("POST", PREPARE, body))
        await until(lambda: api.service.requests)
        async with api.client.post(api.url + PREPARE, json=body) as second:
            assert second.status == 429
            assert (await second.json())["error"]["code"] == "overloaded"
            assert second.headers["Retry-After"] == "1"
        assert b'overloaded_total{operation="prepare"} 1.0' in api.metrics.text()
        api.service.gate.set()
        assert (await first)[0] == 201
        assert (await api.call("POST", PREPARE, body))[0] == 201


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("transactions?state=done", "state"),
        ("transactions?state=", "state"),
        ("transactions?limit=0", ">= 1"),
        ("transactions?limit=1001", "<= 1000"),
        ("transactions?limit=many", "limit"),
        ("transactions?limit=1.5", "limit"),
        ("transactions?older_than_s=inf", "<="),
        ("transactions?older_than_s=nan", ">= 0"),
        ("transactions?older_than_s=-1", ">= 0"),
        ("transactions?group=", "length >= 1"),
        ("transactions?limit=1&limit=2", "twice"),
        ("transactions?state=null", "state has no value"),
        ("transactions?older_than_s=NULL", "older_than_s has no value"),
        ("transactions?stat=pending", "did you mean 'state'?"),
        ("transactions?bodies=1", "there is no field 'bodies'"),
        ("search?key_base64=!!", "key_base64: expected `str` in base64"),
    ],
)
async def test_bad_queries(api: Api, path: str, words: str) -> None:
    status, answer = await api.call("GET", f"/v1/{path}")
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert words in answer["error"]["message"]


async def test_calls_without_a_query_take_none(api: Api) -> None:
    assert (await api.call("GET", "/healthz?verbose=1"))[0] == 400


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/transactions/a/b/c", "/v1/groups/", "//"])
async def test_unknown_paths(api: Api, path: str) -> None:
    status, answer = await api.call("GET", path)
    assert (status, answer["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/transactions", "GET, HEAD, POST"),
        ("POST", "/v1/groups/orders", "DELETE, GET, HEAD, PUT"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
        ("GET", f"/v1/transactions/{'0' * 26}/commit", "POST"),
        ("GET", f"/v1/transactions/{'0' * 26}/rollback", "POST"),
    ],
)
async def test_unknown_methods(api: Api, method: str, path: str, allowed: str) -> None:
    async with api.client.request(method, api.url + path, headers=JSON) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, allowed)
        assert (await answer.json())["error"]["code"] == "method_not_allowed"


async def test_unexpected_error_is_logged_and_not_disclosed(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.service.failure = RuntimeError("a secret detail")
    status, answer = await api.call("POST", PREPARE, transaction())
    shown = [record.getMessage() for record in caplog.records if "txbroker" in record.name]

    assert (status, answer["error"]["code"]) == (500, "failed")
    assert "secret" not in str(answer)
    (line,) = shown
    assert "Traceback" not in line
    assert "fake_service.py" in line
    assert "\n" not in line


# --- malformed HTTP ---------------------------------------------------------------------


async def exchange(api: Api, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    try:
        writer.write(raw)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 10)
        return b""
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
    ],
)
async def test_garbage_is_answered_as_json_and_server_continues(
    api: Api, raw: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    status, error = parsed(await exchange(api, raw))
    assert (status, error["code"]) == (400, "bad_request")
    assert "Traceback" not in "".join(capfd.readouterr())
    assert (await api.call("GET", "/healthz"))[0] == 200


async def test_many_headers_are_bounded(api: Api) -> None:
    raw = b"GET /healthz HTTP/1.1\r\n" + b"X-A: b\r\n" * 200_000
    answer = await exchange(api, raw + b"Connection: close\r\n\r\n")
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert (await api.call("GET", "/healthz"))[0] == 200


POST_HEAD = (
    b"POST /v1/transactions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)


async def test_slow_body_times_out() -> None:
    async with running_api(request_timeout_s=0.05) as api:
        answer = await exchange(api, POST_HEAD + b"Content-Length: 100\r\n\r\n{")
        status, error = parsed(answer)
        assert (status, error["code"]) == (408, "too_slow")


async def test_badly_framed_body(api: Api) -> None:
    raw = POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"
    status, error = parsed(await exchange(api, raw))
    assert (status, error["code"]) == (400, "bad_request")


async def test_truncated_body_reserves_no_bytes(api: Api) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(POST_HEAD + b"Content-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await api.call("POST", PREPARE, transaction()))[0] == 201
    assert len(api.service.requests) == 1


async def test_expectations(api: Api) -> None:
    body = json.dumps(transaction()).encode()
    length = f"Content-Length: {len(body)}\r\n".encode()
    known = await exchange(api, POST_HEAD + length + b"Expect: 100-continue\r\n\r\n" + body)
    foreign = await exchange(api, POST_HEAD + length + b"Expect: miracles\r\n\r\n" + body)

    assert known.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 ")
    assert parsed(foreign)[0] == 400
