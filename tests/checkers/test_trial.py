"""Test calls: the request, and the result of each answer."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.kit.http_answers import COMMIT, LOOPBACK, Serve, answering, read_request, response
from txbroker.checkers.group_secrets import GroupSecrets
from txbroker.checkers.http import HttpChecks, TestCallResult, try_group
from txbroker.contract.json import message_to_json
from txbroker.contract.policy import GroupPolicy
from txbroker.core.records import Message
from txbroker.errors import BadRequest
from txbroker.sdk import BadSignature, is_test_call, parse_check, verify_webhook

SECRET = b"open sesame"


@pytest.fixture
def secret_ref(tmp_path: Path) -> str:
    path = tmp_path / "orders"
    path.write_bytes(SECRET)
    return f"file:{path}"


async def test_test_call_is_signed_and_asks_nothing(
    serve: Serve, secret_ref: str, tmp_path: Path
) -> None:
    seen: list[tuple[dict[str, str], bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(response(b"", "204 No Content"))

    server = await serve(handler)
    checks = HttpChecks(guard=LOOPBACK, secrets=GroupSecrets(tmp_path))
    policy = GroupPolicy(check_url=f"{server.url}?token=t", secret_ref=secret_ref)
    tried = await try_group(checks, "orders", policy, 5.0)
    await checks.close()

    assert tried == TestCallResult(server.url, 204, "")
    ((headers, body),) = seen
    assert headers["request-line"] == "POST /check?token=t HTTP/1.1"
    assert is_test_call(headers)
    assert headers["webhook-id"].startswith("test.")
    question = json.loads(body)
    assert question.keys() == {"test", "group", "sent_at"}
    assert (question["test"], question["group"]) == (True, "orders")
    with pytest.raises(BadRequest):
        parse_check(body)


async def test_test_call_is_verified_like_a_check(
    serve: Serve, secret_ref: str, tmp_path: Path
) -> None:
    verdicts: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The header helper of these tests writes values small; the signature is base64.
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.strip().split("\r\n")[1:]
        headers = dict(line.split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["content-length"]))
        for secret in (SECRET, b"another"):
            try:
                verify_webhook(secret, headers, body, now=time.time())
                verdicts.append("right")
            except BadSignature:
                verdicts.append("wrong")
        writer.write(response(b""))

    server = await serve(handler)
    checks = HttpChecks(guard=LOOPBACK, secrets=GroupSecrets(tmp_path))
    policy = GroupPolicy(check_url=server.url, secret_ref=secret_ref)
    assert (await try_group(checks, "orders", policy, 5.0)).answered
    await checks.close()
    assert verdicts == ["right", "wrong"]


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (response(b"", "202 Accepted"), 202, ""),
        (response(COMMIT), 200, ""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\nnever ends", 200, ""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + response(b""), 200, ""),
        (response(b"s3cr3t", "400 Bad"), 400, "reached, but it does not answer test calls"),
        (response(b"s3cr3t", "401 No"), 401, "the secret the same"),
        (response(b"s3cr3t", "404 No"), 404, "nothing is at that path"),
        (response(b"s3cr3t", "302 Found", "location: http://elsewhere/\r\n"), 302, "does not answ"),
        (b"SSH-2.0-s3cr3t\r\n\r\n", None, "not HTTP"),
        (b"", None, "ended before an answer"),
    ],
)
async def test_test_call_result_by_answer(
    serve: Serve, checks: HttpChecks, raw: bytes, status: int | None, words: str
) -> None:
    server = await serve(answering(raw, then_close=True))
    tried = await try_group(checks, "orders", GroupPolicy(check_url=server.url), 5.0)
    assert tried.status == status
    assert tried.answered == (words == "")
    assert words in tried.why
    assert "s3cr3t" not in tried.why


async def test_test_call_uses_the_groups_timeout(serve: Serve, checks: HttpChecks) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await serve(silent)
    policy = GroupPolicy(check_url=server.url, timeout_s=0.1)
    tried = await try_group(checks, "orders", policy, 60.0)
    assert (tried.answered, tried.why) == (False, "no answer within 0.1 s")


async def test_test_call_without_endpoint_fails(checks: HttpChecks, tmp_path: Path) -> None:
    unreachable = GroupPolicy(check_url="http://127.0.0.1:9/check?token=t")
    tried = await try_group(checks, "orders", unreachable, 5.0)
    assert (tried.endpoint, tried.answered) == ("http://127.0.0.1:9/check", False)
    assert "connection refused" in tried.why
    none = await try_group(checks, "orders", GroupPolicy(), 5.0)
    assert none == TestCallResult(why="no check URL is registered")
    gone = GroupPolicy(check_url="http://127.0.0.1:9/", secret_ref=f"file:{tmp_path}/orders")
    assert "cannot be read" in (await try_group(checks, "orders", gone, 5.0)).why


def test_test_call_needs_header_and_value() -> None:
    assert is_test_call({"Txbroker-Test": "1"})
    assert not is_test_call({"txbroker-test": "0"})
    assert not is_test_call({"txbroker-tests": "1"})
    assert not is_test_call({})


def test_check_with_test_header_is_still_a_check() -> None:
    """A forwarded check with the header is still a check by its body."""
    asked = {"id": "i", "group": "g", "attempt": 1, "attempts_max": 2, "reason": "due"}
    messages = [message_to_json(Message("t", b"k", b"v"))]
    body = json.dumps({**asked, "prepared_at": 1.5, "messages": messages}).encode()
    assert parse_check(body).id == "i"
