"""Check-backs over HTTP against every kind of server there is, good and evil."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from tests.checkers.check_server import HttpHarness, until
from tests.kit.http_answers import ASKED_ID, COMMIT, named, read_request, reset, response
from txbroker.checkers.base import Answered, CheckResult, Unclear, Unreached
from txbroker.checkers.http import HttpLimits
from txbroker.contract.signing import headers
from txbroker.core.records import Decision, Message

# --- the question ----------------------------------------------------------------------------


async def test_question_follows_contract_and_is_signed(http: HttpHarness) -> None:
    seen: list[tuple[dict[str, str], bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(response(COMMIT))
        await writer.drain()

    await http.serve(handler)
    channel = await http.channel("?token=t", secret=b"open sesame")
    result = await channel.ask(http.call, 5.0)
    channel.release()

    assert result == Answered(Decision.COMMIT, detail="commit")
    assert channel.endpoint == http.server.url  # the query may hold a token
    ((headers, body),) = seen
    assert headers["request-line"] == "POST /check?token=t HTTP/1.1"
    assert headers["host"] == f"localhost:{http.server.port}"
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "id": http.call.id,
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
    assert headers["webhook-id"] == f"{http.call.id}.2.7".lower()
    assert headers["webhook-timestamp"] == "1770091600"
    signed = f"{http.call.id}.2.7.1770091600.".encode() + body
    digest = hmac.new(b"open sesame", signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}".lower()


async def test_question_without_secret_is_unsigned(http: HttpHarness) -> None:
    seen: list[dict[str, str]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers, _ = await read_request(reader)
        seen.append(headers)
        writer.write(response(COMMIT))

    await http.serve(handler)
    await http.ask()
    assert not [name for name in seen[0] if name.startswith("webhook")]


async def test_question_reaches_socket_before_first_suspension(
    http: HttpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.reply(response(COMMIT))
    channel = await http.channel()
    sent: list[bytes] = []
    connection = channel._connection
    send = connection.send

    def recorded(data: bytes) -> None:
        sent.append(data)
        send(data)

    monkeypatch.setattr(connection, "send", recorded)
    asking = channel.ask(http.call, 5.0)
    assert len(sent) == 1
    assert sent[0].startswith(b"POST /check HTTP/1.1\r\n")
    asking.cancel()
    channel.release()


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
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
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b'29\r\n{"id": "%b", "dec\r\n11;x=y\r\nision": "commit"}\r\n0\r\n\r\n' % ASKED_ID,
            Answered(Decision.COMMIT, detail="commit"),
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\n" + response(COMMIT),
            Answered(Decision.COMMIT, detail="commit"),
        ),
        (b"HTTP/1.0 200 OK\r\n\r\n" + COMMIT, Answered(Decision.COMMIT, detail="commit")),
    ],
)
async def test_good_answers(http: HttpHarness, answer: bytes, expected: CheckResult) -> None:
    raw = answer if answer.startswith(b"HTTP") else response(named(answer))
    await http.reply(raw, then_close=True)
    assert await http.ask() == expected


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (response(b"no such\r\n\x1b[2J order", status="500 Oops"), "no such  [2J order"),
        (response(b"x" * 100_000, status="500 Oops"), "x" * 199 + "…"),
        (response(b"", status="500 Oops"), ""),
        (response(b"\xff" * 3, status="404 Not Found"), "\ufffd" * 3),
        (response(b"<html>"), "<html>"),
        (response(b'{"decision": "maybe"}'), '{"decision": "maybe"}'),
        (
            response(named(b'{"decision": "unknown", "x": 1}')),
            f'{{"id": "{ASKED_ID.decode()}", "decision": "unknown", "x": 1}}',
        ),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 9\r\n\r\nhalf", "half"),
    ],
)  # fmt: skip
async def test_answer_without_a_decision_is_kept_for_operators(
    http: HttpHarness, answer: bytes, text: str
) -> None:
    await http.reply(answer, then_close=True)
    result = await http.ask()
    assert isinstance(result, Answered | Unclear)
    assert result.text == text
    assert not text or text not in result.detail


async def test_text_of_an_error_holds_up_no_check(
    http: HttpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.checkers.http.ERROR_BODY_S", 0.0)
    await http.reply(b"HTTP/1.1 500 Oops\r\ncontent-length: 9\r\n\r\n")
    assert await http.ask() == Unclear("answered 500")


SECRET = "s3cr3t-of-the-body"


@pytest.mark.parametrize(
    ("answer", "words"),
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
    http: HttpHarness, answer: bytes, words: str
) -> None:
    await http.reply(response(named(answer)), then_close=True)
    result = await http.ask()
    assert isinstance(result, Unclear)
    assert words in result.detail
    assert SECRET not in result.detail


@pytest.mark.rule(24)
@pytest.mark.parametrize(
    ("id", "words"),
    [
        (None, "does not name the transaction"),
        ("null", "names another transaction"),
        ('"0V3R7K2M5N8P1Q4S6T9W0X2Y4A"', "names another transaction"),
        ('""', "names another transaction"),
        ("7", "names another transaction"),
        ("{}", "names another transaction"),
    ],
)
@pytest.mark.parametrize("decision", ["commit", "rollback", "unknown"])
async def test_answer_names_the_transaction(
    http: HttpHarness, id: str | None, words: str, decision: str
) -> None:
    answer = (
        f'{{"decision": "{decision}"}}'
        if id is None
        else (f'{{"id": {id}, "decision": "{decision}"}}')
    )
    await http.reply(response(answer.encode()))
    result = await http.ask()
    assert isinstance(result, Unclear)
    assert words in result.detail


SIGNING_KEY, ANSWERED_S = b"s3cret", 1_770_091_600
QUESTION_ID = f"{ASKED_ID.decode()}.2.7"


def signed(
    key: bytes = SIGNING_KEY, id: str = QUESTION_ID, at_s: int = ANSWERED_S, body: bytes = COMMIT
) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers(key, id, at_s, body))


@pytest.mark.rule(24)
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (signed(), ""),
        (signed(at_s=ANSWERED_S - 200), ""),
        ("", "no header webhook-id"),
        (signed(b"another"), "no signature matches the secret"),
        (signed(body=COMMIT.replace(b"commit", b"rollback")), "no signature matches the secret"),
        (signed(id=f"{QUESTION_ID}8"), "webhook-id is not that of the question"),
        (signed(at_s=ANSWERED_S - 400), "300 s are allowed"),
        (signed().replace("v1,", "v2,"), "no signature matches the secret"),
    ],
)
async def test_group_may_require_signed_answers(http: HttpHarness, extra: str, words: str) -> None:
    await http.reply(response(COMMIT, extra=extra))
    for required in (False, True):
        channel = await http.channel(secret=SIGNING_KEY, signed_answers=required)
        result = await channel.ask(http.call, 5.0)
        channel.release()
        if words and required:
            assert isinstance(result, Unclear)
            assert "the answer is not signed as the group requires" in result.detail
            assert words in result.detail
        else:
            assert result == Answered(Decision.COMMIT, detail="commit")


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
async def test_malformed_http_is_unclear(http: HttpHarness, raw: bytes, words: str) -> None:
    await http.reply(raw, then_close=True)
    result = await http.ask()
    assert isinstance(result, Unclear)
    assert words in result.detail


@pytest.mark.rule(22)
@pytest.mark.parametrize("status", [429, 502, 503])
async def test_not_handled_by_contract(http: HttpHarness, status: int) -> None:
    hanging = f"HTTP/1.1 {status} No\r\ncontent-length: 1000000\r\n\r\nbusy".encode()
    await http.reply(hanging)  # the status is enough; its body never ends
    assert await http.ask() == Unreached(f"answered {status}: not handled")


@pytest.mark.parametrize("status", [201, 204, 301, 302, 307, 400, 401, 403, 404, 500, 504, 599])
async def test_other_statuses_are_unclear_and_redirects_not_followed(
    http: HttpHarness, status: int
) -> None:
    await http.reply(response(COMMIT))
    elsewhere = http.server
    raw = response(COMMIT, f"{status} Other", f"location: {elsewhere.url}\r\n")
    await http.reply(raw)
    result = await http.ask()
    assert isinstance(result, Unclear)
    assert result.detail.startswith(f"answered {status}")
    assert elsewhere.connections == 0


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
async def test_endless_answers_are_cut_off(http: HttpHarness, head: bytes, piece: bytes) -> None:
    sent = [0]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        await endless(writer, sent, piece)

    await http.serve(handler)
    result = await http.ask()
    assert isinstance(result, Unclear)
    assert "large" in result.detail or "too many pieces" in result.detail
    assert sent[0] < 32 * 1024 * 1024  # the sockets' own buffers, never the whole


async def test_group_can_raise_answer_limit(http: HttpHarness) -> None:
    body = (
        b'{"decision": "commit", "messages": [{"topic": "t", "value": "' + b"v" * 300_000 + b'"}]}'
    )
    await http.reply(response(named(body)))
    assert isinstance(await http.ask(), Unclear)
    channel = await http.channel(answer_bytes_max=1_000_000)
    result = await channel.ask(http.call, 5.0)
    channel.release()
    assert isinstance(result, Answered)
    assert result.messages == (Message("t", value=b"v" * 300_000),)


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"]
)
async def test_hanging_server_times_out(http: HttpHarness, head: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        await reader.read()  # until the other side gives up

    await http.serve(handler)
    result = await http.ask(timeout_s=0.05)
    assert result == Unclear("no answer within 0.05 s")
    assert http.checks.idle_connections == 0


async def test_dripping_answer_times_out(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            writer.write(b"y")
            await writer.drain()
            await asyncio.sleep(0)

    await http.serve(handler)
    assert isinstance(await http.ask(timeout_s=0.05), Unclear)


async def test_server_that_never_reads_times_out(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        await asyncio.Event().wait()

    await http.serve(handler)
    large = structs.replace(http.call, messages=(Message("t", value=b"x" * 20_000_000),))
    assert isinstance(await http.ask(large, timeout_s=0.2), Unclear)


async def test_reset_after_request_is_unclear(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        reset(writer)

    await http.serve(handler)
    assert await http.ask() == Unclear("the connection ended before an answer")


# --- connections that are kept -----------------------------------------------------------------


async def test_connection_is_reused(http: HttpHarness) -> None:
    await http.reply(response(COMMIT))
    for _ in range(3):
        assert isinstance(await http.ask(), Answered)
    assert http.server.connections == 1
    assert http.checks.idle_connections == 1


async def test_connections_are_separate_by_group(http: HttpHarness) -> None:
    await http.reply(response(COMMIT))
    await http.ask()
    await http.ask(structs.replace(http.call, group="billing"))
    assert http.server.connections == 2


async def test_closed_idle_connection_is_not_reused(http: HttpHarness) -> None:
    await http.reply(response(COMMIT), then_close=True)
    await http.ask()
    await until(lambda: http.checks.idle_connections == 0)
    assert isinstance(await http.ask(), Answered)
    assert http.server.connections == 2


async def test_half_closed_idle_connection_is_not_reused(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(COMMIT))
        writer.write_eof()
        await reader.read()

    await http.serve(handler)
    for n in range(1, 3):
        assert isinstance(await http.ask(), Answered)
        await until(lambda: http.checks.idle_connections == 0)
        assert http.server.connections == n


@pytest.mark.parametrize(
    "raw",
    [
        response(COMMIT) + b"HTTP/1.1 408 Request Timeout\r\n\r\n",
        response(COMMIT, extra="connection: close\r\n"),
        response(b"no", "500 Internal Server Error"),
    ],
    ids=["more than the answer", "connection: close", "not read to its end"],
)
async def test_connection_with_unclear_state_is_not_kept(http: HttpHarness, raw: bytes) -> None:
    await http.reply(raw)
    await http.ask()
    assert http.checks.idle_connections == 0


async def test_idle_connection_expires(http: HttpHarness) -> None:
    await http.reply(response(COMMIT))
    http.use(limits=HttpLimits(idle_s=0.01))
    await http.ask()
    assert http.checks.idle_connections == 1
    await until(lambda: http.checks.idle_connections == 0)


async def test_unused_connection_is_kept(http: HttpHarness) -> None:
    await http.reply(response(COMMIT))
    channel = await http.channel()
    channel.release()
    channel.release()
    assert http.checks.idle_connections == 1


async def test_cancelled_question_closes_its_connection(http: HttpHarness) -> None:
    asked = asyncio.Event()
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()
        ended.set()

    await http.serve(handler)
    task = asyncio.create_task(http.ask())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)
    assert http.checks.idle_connections == 0


async def test_close_ends_idle_connections(http: HttpHarness) -> None:
    await http.reply(response(COMMIT))
    await http.ask()
    channel = await http.channel()
    await http.checks.close()
    channel.release()
    assert http.checks.idle_connections == 0


# --- certainly unreached -----------------------------------------------------------------------


async def test_connection_lost_before_request_is_unreached(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    await http.serve(handler)
    channel = await http.channel()
    await until(lambda: not channel._connection.fresh)
    result = await channel.ask(http.call, 5.0)
    channel.release()
    assert result == Unreached("the connection closed before the question was sent")


@pytest.mark.parametrize("host", ["orders..svc", "o" * 64])
async def test_invalid_host_name_is_unknown(http: HttpHarness, host: str) -> None:
    url = f"http://{host}:8080/check"
    assert await http.checks.acquire("orders", url) == Unreached(
        f"{host}:8080: the name is unknown"
    )


async def test_closed_port_is_unreached(http: HttpHarness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        port = taken.getsockname()[1]
        result = await http.checks.acquire("orders", f"http://127.0.0.1:{port}/")
    assert result == Unreached(f"127.0.0.1:{port}: connection refused")


async def test_unknown_host_is_unreached(http: HttpHarness) -> None:
    def unknown(host: str) -> Sequence[str]:
        raise socket.gaierror(-2, "Name or service not known")

    http.use(look_up=unknown)
    assert await http.unreached("http://nowhere.example/") == (
        "nowhere.example:80: the name is unknown"
    )


async def test_hanging_lookup_delays_only_its_name(http: HttpHarness) -> None:
    hang = threading.Event()
    asked: list[str] = []

    def look_up(host: str) -> Sequence[str]:
        asked.append(host)
        if host == "slow.example":
            hang.wait(10)
        return ["127.0.0.1"]

    await http.reply(response(COMMIT))
    http.use(limits=HttpLimits(connect_timeout_s=0.05), look_up=look_up)
    slow = await asyncio.gather(
        *(http.checks.acquire(f"g{n}", "http://slow.example/") for n in range(50))
    )
    assert {type(result) for result in slow} == {Unreached}
    assert "no look-up of the name within 0.05 s" in str(slow[0])
    assert asked.count("slow.example") == 1  # one thread for fifty groups
    assert isinstance(await http.ask(), Answered)
    await http.checks.close()
    hang.set()


async def test_next_address_is_tried(http: HttpHarness) -> None:
    await http.reply(response(COMMIT))
    http.use(look_up=lambda host: ["127.0.0.2", "127.0.0.1"])
    assert isinstance(await http.ask(), Answered)


@pytest.mark.parametrize(
    "url", ["ftp://x/", "http://", "http://u:p@x/", "http://x/#f", "http://x:99999/", "http://x y/"]
)
async def test_invalid_urls_are_unreached(http: HttpHarness, url: str) -> None:
    detail = await http.unreached(url)
    assert "check_url" in detail


# --- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate for `localhost`, in one file."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl makes the certificate of the TLS tests; install it"
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=DNS:localhost", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_https_with_a_trusted_certificate(http: HttpHarness, certificate: Path) -> None:
    await http.reply(response(COMMIT), tls=server_tls(certificate))
    http.use(tls=ssl.create_default_context(cafile=str(certificate)))
    assert isinstance(await http.ask(), Answered)
    assert isinstance(await http.ask(), Answered)
    assert http.server.connections == 1


async def test_https_with_untrusted_certificate_is_unreached(
    http: HttpHarness, certificate: Path
) -> None:
    await http.reply(response(COMMIT), tls=server_tls(certificate))
    detail = await http.unreached(http.server.url)
    assert "TLS: self-signed certificate" in detail


async def test_https_for_another_name(http: HttpHarness, certificate: Path) -> None:
    await http.reply(response(COMMIT), tls=server_tls(certificate))
    http.use(tls=ssl.create_default_context(cafile=str(certificate)))
    detail = await http.unreached(http.server.url.replace("localhost", "127.0.0.1"))
    assert "TLS: " in detail


async def test_https_to_a_port_without_tls(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    await http.serve(handler)
    detail = await http.unreached(http.server.url.replace("http:", "https:"))
    assert "TLS" in detail or "reset" in detail


async def test_https_to_silent_port_is_unreached(http: HttpHarness) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    await http.serve(handler)
    http.use(limits=HttpLimits(connect_timeout_s=0.05))
    detail = await http.unreached(http.server.url.replace("http:", "https:"))
    assert "no TLS handshake" in detail or "timed out" in detail.lower()
