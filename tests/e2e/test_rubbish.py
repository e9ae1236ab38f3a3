"""Bad input, end to end: a typed error with the next step, and a proxy that continues."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.kit.http_calls import error_of
from tests.kit.proxies import ProxyProcess
from tests.kit.until import unique
from txbroker.contract import frames as wire
from txbroker.core.records import Message
from txbroker.core.routing import make_id
from txbroker.sdk import TransactionalProducer

Json = dict[str, Any]
NOWHERE = "00000000000000000000000000"
GOOD: Json = {"group": "g", "messages": [{"topic": "t", "value": "v"}]}


def good(**changes: Any) -> Json:
    return {**GOOD, **changes}


def message(**changes: Any) -> Json:
    return good(messages=[{"topic": "t", "value": "v", **changes}])


def real(**changes: Any) -> Json:
    """Return a prepare for the topic that is there."""
    return message(topic="TOPIC", **changes)


PREPARE = "/v1/transactions"
# What is wrong: (body of a prepare, code, a word of the message).
BODIES: dict[str, tuple[Any, str, str]] = {
    "no JSON": (b"{", "bad_request", "JSON"),
    "bytes that are no text": (b"\xff\xfe{}", "bad_request", ""),
    "nested without end": (b"[" * 100_000, "bad_request", ""),
    "an array": ([], "bad_request", ""),
    "no group": ({"messages": GOOD["messages"]}, "bad_request", "group"),
    "an empty group": (good(group=""), "bad_request", "group"),
    "no messages": (good(messages=[]), "bad_request", "message"),
    "a field too many": (good(colour="red"), "bad_request", "colour"),
    "a number for a value": (message(value=1), "bad_request", "value"),
    "two values": (message(value_base64="AA=="), "bad_request", "value"),
    "broken base64": (message(key_base64="?"), "bad_request", "key_base64"),
    "a partition below 0": (message(partition=-1), "bad_request", "partition"),
    "an id that is none": (good(id="x" * 26), "bad_id", ""),
    "checks for years": (real() | {"check_interval_s": 86400 * 365}, "bad_schedule", ""),
    "a topic that is not there": (message(topic="no-such"), "unknown_topic", ""),
    "a topic's name that cannot be": (
        message(topic="a b/c"),
        "unknown_topic",
        "is no valid topic name",
    ),
    "a partition that is not there": (real(partition=7), "bad_target", "partition"),
    "an hour from now": (real(timestamp_ms=4_000_000_000_000), "bad_target", ""),
    "too large a message": (real(value="x" * 5_000_000), "too_large", ""),
    "too large a body": (b"x" * 17_000_000, "too_large", ""),
}
# What is wrong: (method, path, body, code, a word of the message).
CALLS: dict[str, tuple[str, str, Any, str, str]] = {
    **{what: ("POST", PREPARE, *rest) for what, rest in BODIES.items()},
    "commit of nothing": ("POST", f"{PREPARE}/NEW/commit", {}, "not_found", ""),
    "commit of an id of 1970": ("POST", f"{PREPARE}/{NOWHERE}/commit", {}, "not_found", ""),
    "commit of no id": ("POST", f"{PREPARE}/rubbish/commit", {}, "bad_id", ""),
    "another partition's id": ("POST", f"{PREPARE}/7ZZZ{NOWHERE[4:]}/commit", {}, "bad_id", ""),
    "a limit of 0": ("GET", f"{PREPARE}?limit=0", None, "bad_request", "limit"),
    "an invalid cursor": ("GET", f"{PREPARE}?cursor=x", None, "bad_request", "cursor"),
    "an unknown state": ("GET", f"{PREPARE}?state=lost", None, "bad_request", "state"),
    "another method": ("DELETE", PREPARE, None, "method_not_allowed", ""),
    "another path": ("GET", "/v2", None, "not_found", ""),
    "an unknown group": ("GET", "/v1/groups/nobody", None, "unknown_group", ""),
    "a check URL that is none": (
        "PUT", "/v1/groups/x", {"check_url": "ftp://a"}, "bad_request", "check_url"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
async def test_bad_calls_get_a_typed_error(shared: ProxyProcess, what: str, topic: str) -> None:
    method, path, body, code, word = CALLS[what]
    path = path.replace("NEW", make_id(0, time.time_ns() // 1_000_000, secrets.randbits(64)))
    if isinstance(body, dict) and body.get("messages"):
        there = [
            {**each, "topic": each["topic"].replace("TOPIC", topic)} for each in body["messages"]
        ]
        body = {**body, "messages": there}
    headers = {"content-type": "application/json"}
    options = {"data": body, "headers": headers} if isinstance(body, bytes) else {"body": body}
    status, answer = await shared.request(method, path, **options)
    assert 400 <= status < 500, answer
    error = error_of(status, answer)
    assert error.code == code, answer
    assert word in str(error)
    assert len(str(error)) > 10
    assert "Traceback" not in str(answer)
    assert await shared.is_ready()


@pytest.fixture(scope="module")
async def topic(shared: ProxyProcess) -> str:
    """A topic that is there."""
    return await shared.topic()


async def test_another_groups_transaction_cannot_be_decided(
    shared: ProxyProcess, topic: str
) -> None:
    mine, other = unique("mine"), unique("other")
    id = await shared.prepare({"topic": topic, "value": "v"}, group=mine)
    status, answer = await shared.request("POST", f"{PREPARE}/{id}/commit", {"group": other})
    assert (status, answer["error"]["code"]) == (403, "wrong_group")
    async with TransactionalProducer(shared.url, group=other) as thief:
        for deciding in (thief.commit(id), thief.rollback(id)):
            with pytest.raises(Exception, match="another producer group") as raised:
                await deciding
            assert getattr(raised.value, "code", "") == "wrong_group"
            assert mine not in str(raised.value)  # the owner's name is not disclosed
    assert (await shared.show(id))["state"] == "pending"
    await shared.act(id, "rollback", group=mine)


async def test_id_reused_for_other_content_conflicts(shared: ProxyProcess, topic: str) -> None:
    group = unique("group")
    first = {"topic": topic, "value": "first"}
    id = await shared.prepare(first, group=group, dedup_key="k")
    assert await shared.prepare(first, group=group, dedup_key="k") == id
    for given in ({"dedup_key": "k"}, {"id": id}):
        body = {"group": group, "messages": [{"topic": topic, "value": "second"}], **given}
        status, answer = await shared.request("POST", PREPARE, body)
        assert (status, answer["error"]["code"]) == (409, "id_conflict"), answer
    await shared.act(id, "rollback")


HELLO = wire.encode_frame([wire.Hello(1, "orders", "worker")])
FRAMES = {
    "no msgpack": b"\xc1\xff",
    "another operation": msgspec.msgpack.encode([["steal", 1]]),
    "wrong types": msgspec.msgpack.encode([["prepare", "one", 2, 3]]),
    "cut short": HELLO[:-3],
    "nested": b"\x91" * 200_000 + b"\xc0",
    "four thousand millions": b"\xdd\xff\xff\xff\xff",
    "hello again": HELLO,
}


@pytest.mark.parametrize("name", FRAMES)
async def test_invalid_frames_end_only_their_session(
    shared: ProxyProcess, topic: str, name: str
) -> None:
    group = unique("group")
    async with (
        TransactionalProducer(shared.url, group=group) as producer,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{shared.url}/v1/session") as socket,
    ):
        await socket.send_bytes(HELLO)
        welcome = wire.decode_from_proxy(await asyncio.wait_for(socket.receive_bytes(), 10))
        assert isinstance(welcome[0], wire.Welcome)
        await socket.send_bytes(FRAMES[name])
        (failure,) = wire.decode_from_proxy(await asyncio.wait_for(socket.receive_bytes(), 10))
        assert isinstance(failure, wire.Failure)
        assert failure.code == "bad_request"
        closing = await asyncio.wait_for(socket.receive(), 10)
        assert closing.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        # A neighbour's session has not noticed.
        id = await producer.prepare(Message(topic, value=b"v"))
        await producer.rollback(id)


async def test_smaller_target_limit_is_reported_at_prepare(shared: ProxyProcess) -> None:
    small = await shared.topic(max_message_bytes="1000")
    body = {"group": "g", "messages": [{"topic": small, "value": "x" * 2000}]}
    status, answer = await shared.request("POST", PREPARE, body)
    assert (status, answer["error"]["code"]) == (413, "too_large")
    assert small in answer["error"]["message"]
    async with TransactionalProducer(shared.url, group="g") as producer:
        with pytest.raises(Exception, match=small) as raised:
            await producer.prepare(Message(small, value=b"x" * 2000))
    assert getattr(raised.value, "code", "") == "too_large"
