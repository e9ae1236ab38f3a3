"""Clients of another make: librdkafka and kcat read, plain HTTP and curl produce."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from aiohttp import web
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.kit.http_calls import listening
from tests.kit.proxies import ProxyProcess
from tests.kit.service import FakeEndpoint
from tests.kit.topic_reader import read_topics
from tests.kit.until import until
from txbroker.sdk import Message, TransactionalProducer, verify_webhook

Json = dict[str, Any]

HEADERS: tuple[tuple[str, bytes | None], ...] = (
    ("same", b"1"),
    ("other", b"\x00\xff\xfe"),
    ("same", b"2"),
    ("null", None),
    ("empty", b""),
    ("txb-id", b"the user's own"),
)


async def send_one_of_each(world: ProxyProcess) -> tuple[str, str]:
    """Promote a message with everything, and a tombstone, of one transaction; return the id."""
    topic = await world.topic(message_timestamp_type="CreateTime")
    async with TransactionalProducer(world.url, group="orders") as producer:
        id = await producer.prepare(
            Message(topic, b"k\xff", b"v\x00\xff", HEADERS, timestamp_ms=1_600_000_000_123),
            Message(topic, b"gone", None),
        )
        await producer.commit(id, wait="promoted")
    return topic, id


async def test_librdkafka_reads_messages_as_sent(shared: ProxyProcess) -> None:
    topic, id = await send_one_of_each(shared)
    first, tombstone = await shared.visible(topic)
    assert (first.key, first.value) == (b"k\xff", b"v\x00\xff")
    assert first.timestamp_ms == 1_600_000_000_123
    installation = ("txb-installation", shared.prefix.encode())
    ours = (installation, ("txb-id", id.encode()))
    assert first.headers == (*ours, ("txb-seq", b"0/2"), *HEADERS)
    assert (tombstone.key, tombstone.value) == (b"gone", None)
    assert tombstone.headers == (*ours, ("txb-seq", b"1/2"))
    decided = (await shared.show(id))["decided_at_ms"]
    assert tombstone.timestamp_ms == decided


@pytest.mark.needs_tool("kcat")
async def test_kcat_reads_messages_as_sent(shared: ProxyProcess) -> None:
    topic, id = await send_one_of_each(shared)
    line = "%t %o %T %K %k %S %s %h\\n"
    command = ["kcat", "-b", shared.bootstrap, "-C", "-t", topic, "-e", "-q", "-f", line]
    command += ["-X", "isolation.level=read_committed"]
    read = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    first, tombstone = read.stdout.splitlines()
    stamp = b"1600000000123"
    ours = f"txb-installation={shared.prefix},txb-id={id}"
    assert first.startswith(f"{topic} 0 ".encode() + stamp + b" 2 k\xff 3 v\x00\xff txb-i")
    assert f" {ours},txb-seq=0/2,same=1,".encode() in first
    assert b"same=2,null=NULL,empty=,txb-id=the user's own" in first
    # kcat shows a tombstone as a value of length -1.
    assert f" 4 gone -1  {ours},txb-seq=1/2".encode() in tombstone


AVRO = b"\x00\x00\x00\x04\xd2\x02\x08paid"
"""As a registry's serializer makes it: 0, the schema's id, the payload."""
Seen = list[tuple[int, bytes, list[tuple[str, bytes]]]]


async def read_by_aiokafka(bootstrap: str, topic: str, **isolation: str) -> Seen:
    reader = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="earliest", **isolation
    )
    await reader.start()
    try:
        partition = TopicPartition(topic, 0)
        reader.assign([partition])
        (end,) = (await reader.end_offsets([partition])).values()
        seen: Seen = []
        while await reader.position(partition) < end:
            for record in (await reader.getmany(timeout_ms=100)).get(partition, []):
                seen.append((record.offset, record.value, list(record.headers)))
        return seen
    finally:
        await reader.stop()


async def read_by_librdkafka(bootstrap: str, topic: str, **isolation: str) -> Seen:
    settings = {"bootstrap.servers": bootstrap, "group.id": "none", "enable.partition.eof": True}
    settings |= {name.replace("_", "."): value for name, value in isolation.items()}

    def read() -> Seen:
        reader = confluent_kafka.Consumer(settings)
        reader.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        seen: Seen = []
        try:
            while (record := reader.poll(60)) is not None:
                if record.error():  # the end of the partition
                    return seen
                seen.append((record.offset(), record.value(), record.headers()))
            raise AssertionError("no end within a minute")
        finally:
            reader.close()

    return await asyncio.to_thread(read)


async def read_by_kcat(bootstrap: str, topic: str, **isolation: str) -> Seen:
    command = ["kcat", "-b", bootstrap, "-C", "-t", topic, "-e", "-q", "-f", "%o %s %h\\n"]
    for name, value in isolation.items():
        command += ["-X", f"{name.replace('_', '.')}={value}"]
    read = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    seen: Seen = []
    for line in read.stdout.splitlines():
        offset, value, headers = line.split(b" ")
        pairs = [pair.partition(b"=") for pair in headers.split(b",") if pair]
        seen.append((int(offset), value, [(name.decode(), text) for name, _, text in pairs]))
    return seen


READERS = {"aiokafka": read_by_aiokafka, "librdkafka": read_by_librdkafka, "kcat": read_by_kcat}
PLAIN = Path(__file__).parents[2] / "docs/how-to/read-with-any-client.md"


@pytest.mark.needs_tool("kcat")
@pytest.mark.parametrize("client", READERS)
async def test_plain_client_reads_as_its_page_describes(shared: ProxyProcess, client: str) -> None:
    """Its default, the gaps of the offsets, the headers that name a message, bytes as sent."""
    topic = await shared.topic()
    async with TransactionalProducer(shared.url, group="orders") as producer:
        for messages in ([Message(topic, value=AVRO)], [Message(topic, value=AVRO)] * 2):
            await producer.commit(await producer.prepare(*messages), wait="promoted")
    aborting = AIOKafkaProducer(
        bootstrap_servers=shared.bootstrap, transactional_id=f"aborted-{topic}"
    )
    async with aborting:
        await aborting.begin_transaction()
        await aborting.send_and_wait(topic, b"aborted")
        await aborting.abort_transaction()

    read = READERS[client]
    committed = await read(shared.bootstrap, topic, isolation_level="read_committed")
    assert [(offset, value) for offset, value, _ in committed] == [(0, AVRO), (2, AVRO), (3, AVRO)]
    everything = await read(shared.bootstrap, topic, isolation_level="read_uncommitted")
    assert [(offset, value) for offset, value, _ in everything[3:]] == [(5, b"aborted")]
    row = next(line for line in PLAIN.read_text().splitlines() if f"| {client} " in line)
    by_default = {"committed": committed, "uncommitted": everything}[
        row.split(" | ")[-1].rstrip(" |")
    ]
    assert await read(shared.bootstrap, topic) == by_default

    (code,) = re.findall(r"```python\n(.*?)```", PLAIN.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PLAIN), "exec"), names)
    with closing(sqlite3.connect(":memory:")) as database:
        done = [names["once"](database, headers) for _, _, headers in committed * 2]
    assert done == [True] * 3 + [False] * 3


# --- a service without the SDK ---------------------------------------------------------------


@asynccontextmanager
async def service_of(answer: Callable[[web.Request, bytes], Json]) -> AsyncIterator[str]:
    """Run a web service that answers check-backs; yields its check URL."""

    async def check(request: web.Request) -> web.Response:
        return web.json_response(answer(request, await request.read()))

    app = web.Application()
    app.router.add_post("/check", check)
    async with listening(app) as url:
        yield f"{url}/check"


def signature(secret: bytes, request: web.Request, body: bytes) -> str:
    """Return the signature that Standard Webhooks specifies."""
    id, stamp = request.headers["webhook-id"], request.headers["webhook-timestamp"]
    digest = hmac.new(secret, f"{id}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


@pytest.mark.parametrize(
    ("secret_text", "key"),
    [
        ("a shared secret", b"a shared secret"),
        ("whsec_c2hhcmVkIGluIGJhc2U2NA==", b"shared in base64"),
    ],
)
async def test_http_only_service_gets_signed_checks(
    shared: ProxyProcess, secrets_dir: Path, secret_text: str, key: bytes
) -> None:
    secret = secrets_dir / "plain-http"
    secret.write_text(f"{secret_text}\n")
    asked: list[Json] = []
    signed: list[bool] = []

    def answer(request: web.Request, body: bytes) -> Json:
        question = json.loads(body)
        right = signature(key, request, body)
        verify_webhook(secret_text, request.headers, body)
        asked.append(question)
        signed.append(hmac.compare_digest(right, request.headers["webhook-signature"]))
        # First a deliberate "not yet", then the truth with the final content.
        if len(asked) == 1:
            return {"id": question["id"], "decision": "unknown", "ask_again_s": 1}
        final = [{**message, "value": "final"} for message in question["messages"]]
        return {"id": question["id"], "decision": "commit", "messages": final}

    topic = await shared.topic()
    async with service_of(answer) as url:
        group = {"check_url": url, "secret_ref": f"file:{secret}", "check_after_s": 0}
        await shared.call("PUT", "/v1/groups/plain-http", group)
        message = {"topic": topic, "key": "k", "value": "draft", "headers": {"a": "b"}}
        id = await shared.prepare(message, group="plain-http")
        shown = await shared.reaches(id, "promoted")
    assert signed == [True, True]
    assert [question["id"] for question in asked] == [id, id]
    assert (asked[0]["group"], asked[0]["attempts_max"]) == ("plain-http", 15)
    assert asked[0]["messages"][0]["value"] == "draft"
    assert (shown["source"], shown["attempts"]) == ("check", 1)
    (record,) = await shared.visible(topic)
    assert (record.key, record.value) == (b"k", b"final")
    installation = ("txb-installation", shared.prefix.encode())
    assert record.headers == (installation, ("txb-id", id.encode()), ("a", b"b"))


# --- with curl only --------------------------------------------------------------------------


class Curl:
    """Calls a proxy with curl."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, method: str, path: str, body: Json | None = None) -> tuple[int, Json]:
        """Return status and answer."""
        command = ["curl", "-sS", "-w", "\n%{http_code}", "-X", method, self._url + path]
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        run = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, check=True, timeout=60
        )
        answer, _, status = run.stdout.decode().rpartition("\n")
        return int(status), json.loads(answer)

    async def ok(self, method: str, path: str, body: Json | None = None) -> Json:
        """Return the answer of a call that succeeds."""
        status, answer = await self(method, path, body)
        assert status == 200
        return answer

    async def prepare(self, group: str, value: str, **fields: Any) -> str:
        """Prepare one message and return the id."""
        messages = [{"topic": "payments", "value": value}]
        body = {"group": group, "messages": messages, **fields}
        status, answer = await self("POST", "/v1/transactions", body)
        assert (status, answer["state"]) == (201, "pending")
        return str(answer["id"])

    async def reaches(self, id: str, state: str) -> Json:
        """Wait until a transaction is in a state."""

        async def there() -> Json | None:
            _, shown = await self("GET", f"/v1/transactions/{id}")
            return shown if shown["state"] == state else None

        return dict(await until(there))


@pytest.fixture
async def dev(tmp_path: Path) -> AsyncIterator[ProxyProcess]:
    """`txbroker dev`, as a new user starts it."""
    async with ProxyProcess("", command="dev", data_dir=tmp_path) as made:
        yield made


@pytest.mark.needs_tool("curl")
async def test_curl_completes_the_walk_through_dev(dev: ProxyProcess, desk: FakeEndpoint) -> None:

    async def ready_lines() -> list[str]:
        # The proxy answers a moment before the command prints it.
        return dev.stdout

    (line,) = await until(ready_lines)
    ready, url, kafka, servers = line.split()
    assert (ready, url, kafka) == ("ready", dev.url, "kafka")
    curl = Curl(url)
    for group, decision in (("shop", "commit"), ("mute", "unknown")):
        desk.answers[group] = [{"decision": decision}]
        check = {"check_url": f"{desk.url}/check/{group}", "check_after_s": 0.2}
        policy = {"check_interval_s": 0.1, "timeout_s": 0.5} if group == "mute" else {}
        await curl.ok("PUT", f"/v1/groups/{group}", {**check, **policy})

    id = await curl.prepare("shop", "committed", check_after_s=60)
    answer = await curl.ok("POST", f"/v1/transactions/{id}/commit", {"group": "shop"})
    assert answer["decision"] == "commit"
    await curl.ok("POST", f"/v1/transactions/{id}/commit", {"group": "shop"})
    await curl.reaches(id, "promoted")

    silent = await curl.prepare("shop", "checked")
    shown = await curl.reaches(silent, "promoted")
    assert (shown["source"], shown["attempts"]) == ("check", 1)

    never = await curl.prepare("shop", "rolled back", check_after_s=60)
    await curl.ok("POST", f"/v1/transactions/{never}/rollback", {"group": "shop"})
    status, answer = await curl("POST", f"/v1/transactions/{never}/commit", {"group": "shop"})
    assert (status, answer["error"]["code"]) == (409, "already_decided")

    unknown = await curl.prepare("mute", "parked")
    shown = await curl.reaches(unknown, "parked")
    assert (shown["attempts"], len(shown["checks"])) == (15, 15)
    page = await curl.ok("GET", "/v1/transactions?state=parked")
    assert [each["id"] for each in page["transactions"]] == [unknown]
    desk.answers["mute"] = [{"decision": "commit"}]
    await curl.ok("POST", f"/v1/transactions/{unknown}/revive", {"reason": "fixed"})
    await curl.reaches(unknown, "promoted")

    visible = await asyncio.to_thread(read_topics, servers, ["payments"])
    assert sorted(str(record.value) for record in visible) == [
        "b'checked'",
        "b'committed'",
        "b'parked'",
    ]
