"""One table of refusals, which every front of a proxy gives alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.fake_service import NOW_MS
from tests.kit.http_api import Api, running_api
from tests.kit.secret_files import secret_file
from tests.kit.ws_client import connected
from txbroker.checkers.leases import CONTENT_TYPE, PROXY_HEADER
from txbroker.contract import frames as wire
from txbroker.contract.json import message_to_json
from txbroker.contract.service import (
    DecideRequest,
    PrepareRequest,
    Request,
)
from txbroker.core.records import Decision, Message
from txbroker.core.routing import make_id
from txbroker.errors import RequestError
from txbroker.principals import Patterns, Principal, digest_of
from txbroker.proxy.cluster.forwarding import PREFIX
from txbroker.proxy.http.api import CONTEXT

ID = make_id(0, NOW_MS, 1)
MESSAGES = (Message("payments", b"k", b"v"),)
LARGE = Message("payments", value=b"x" * 4_000_000)
TOKEN = "the-token-of-the-shop"
OPERATOR = Principal()
SHOP = Principal("shop", groups=Patterns(["orders"]), topics=Patterns(["payments"]))
PRINCIPALS = f"""
[principals.shop]
role = "producer"
token_sha256 = "{digest_of(TOKEN)}"
groups = ["orders"]
topics = ["payments"]
"""

Refusal = tuple[str, str]
"""The code and the sentence."""


def prepare(**changes: Any) -> PrepareRequest:
    return msgspec.structs.replace(PrepareRequest("orders", MESSAGES, ID), **changes)


def decide(**changes: Any) -> DecideRequest:
    return msgspec.structs.replace(DecideRequest(ID, Decision.COMMIT, "orders"), **changes)


def message(**fields: Any) -> tuple[Message, ...]:
    return (Message(**{"topic": "payments", "value": b"v", **fields}),)


BAD: dict[str, tuple[Request, str, str]] = {
    "id of other characters": (
        prepare(id="0" * 25 + "U"),
        "bad_id",
        f"'{'0' * 25}U' is not Crockford",
    ),
    "id above 128 bits": (prepare(id="8" + "0" * 25), "bad_id", "a transaction id has 128 bits"),
    "id beyond ASCII": (prepare(id="ß" + "0" * 25), "bad_id", "'ß0"),
    "decision's id": (decide(id="8" + "0" * 25), "bad_id", "a transaction id has 128 bits"),
    "no message": (prepare(messages=()), "bad_request", "messages is empty: send"),
    "no topic": (prepare(messages=message(topic="")), "bad_request", "a message has no topic"),
    "partition": (prepare(messages=message(partition=-1)), "bad_request", "partition must be"),
    "timestamp": (
        prepare(messages=message(timestamp_ms=-1)),
        "bad_request",
        "timestamp_ms must be from 0 to 9200000000000000",
    ),
    "too late": (
        prepare(check_after_s=1e300),
        "bad_request",
        "check_after_s must be from 0 to 31622400 seconds",
    ),
    "too early": (prepare(check_interval_s=-1.0), "bad_request", "check_interval_s must be from"),
    "attempts": (prepare(check_attempts_max=16), "bad_request", "check_attempts_max must be from"),
    "no attempt": (prepare(check_attempts_max=0), "bad_request", "check_attempts_max must be from"),
    "timeout": (
        prepare(check_timeout_s=61.0),
        "bad_request",
        "check_timeout_s must be from 0.1 to 60 seconds",
    ),
    "order key": (prepare(order_key=""), "bad_request", "order_key must have 1 to 1000 char"),
    "dedup key": (prepare(dedup_key="x" * 1001), "bad_request", "dedup_key must have 1 to 1000"),
    "large message": (
        prepare(messages=message(value=b"x" * 4_300_000)),
        "too_large",
        "messages[0] has 4300064 bytes, more than 4194304 (message_bytes_max): send a smaller",
    ),
    "large transaction": (
        prepare(messages=(LARGE, LARGE)),
        "too_large",
        "the transaction has 8000128 bytes, more than 7340032 (transaction_bytes_max): split it",
    ),
    "many messages": (
        prepare(messages=MESSAGES * 1001),
        "too_large",
        "the transaction has 1001 messages, more than 1000 (messages_per_transaction_max): split",
    ),
    "large final message": (
        decide(messages=message(value=b"x" * 4_300_000)),
        "too_large",
        "messages[0] has 4300064 bytes",
    ),
    "long reason": (decide(reason="x" * 1001), "bad_request", "reason has at most 1000 characters"),
    "unknown": (
        decide(decision=Decision.UNKNOWN),
        "bad_request",
        "unknown is no decision: request",
    ),
}
NOT_PERMITTED: dict[str, tuple[Request, str]] = {
    "group": (prepare(group="bank"), "principal 'shop' may not act for group 'bank': use a"),
    "deciding group": (decide(group="bank"), "principal 'shop' may not act for group 'bank': use"),
    "topic": (
        prepare(messages=(*MESSAGES, *message(topic="secret"))),
        "principal 'shop' may not write topic 'secret': use a principal that may",
    ),
    "topic of a message that is too large": (
        prepare(messages=message(topic="secret", value=b"x" * 4_300_000)),
        "principal 'shop' may not write topic 'secret': use a principal that may",
    ),
}
SCHEMA = ("no topic", "partition", "timestamp", "too late", "too early", "attempts", "no attempt")
SCHEMA += ("timeout", "order key", "dedup key", "many messages", "long reason")
"""What the declared JSON refuses where it is decoded, in other words with the same code."""


async def over_http(api: Api, request: Request) -> Refusal:
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(request).items()
        if value is not None and value != ""
    }
    if request.messages is not None:
        fields["messages"] = [message_to_json(message) for message in request.messages]
    path = "/v1/transactions"
    if isinstance(request, DecideRequest):
        path += f"/{request.id}/{request.decision}"
        for name in ("id", "decision", "source", "wait", "wait_s"):
            del fields[name]
    else:
        fields.update(order_key=request.order_key)
    _, answer = await api.call("POST", path, fields, authorization=f"Bearer {TOKEN}")
    return answer["error"]["code"], answer["error"]["message"]


async def over_a_session(api: Api, request: Request) -> Refusal:
    operation: wire.FromProducer
    if isinstance(request, DecideRequest):
        operation = wire.Decide(
            1, request.id, request.decision, request.messages, request.reason, request.wait
        )
    else:
        fields = msgspec.structs.asdict(request)
        named = {name: fields[name] for name in wire.Prepare.__struct_fields__ if name in fields}
        operation = wire.Prepare(1, **named)
    token = {"authorization": f"Bearer {TOKEN}"}
    async with connected(api, headers=token) as producer:
        await producer.send(wire.Hello(1, request.group, "worker-1"))
        # A session of another group is refused as a whole.
        answer = await producer.next()
        if isinstance(answer, wire.Welcome):
            await producer.send(operation)
            answer = await producer.next()
    assert isinstance(answer, wire.Failure)
    return answer.code, answer.message


async def between_proxies(api: Api, request: Request) -> Refusal:
    call = "decide" if isinstance(request, DecideRequest) else "prepare"
    headers = {"content-type": CONTENT_TYPE, PROXY_HEADER: "http://proxy-b:8470"}
    raw = msgspec.msgpack.encode(request)
    async with api.client.post(f"{api.url}{PREFIX}/{call}", data=raw, headers=headers) as answer:
        found = msgspec.msgpack.decode(await answer.read())
    return found["code"], found["message"]


async def admitted(api: Api, request: Request, principal: Principal = OPERATOR) -> Refusal:
    with pytest.raises(RequestError) as refused:
        api.app[CONTEXT].admission.admit(principal, request)
    return refused.value.code, str(refused.value)


FRONTS: dict[str, Callable[[Api, Request], Awaitable[Refusal]]] = {
    "http": over_http,
    "session": over_a_session,
    "peers": between_proxies,
}


@pytest.mark.parametrize(
    ("front", "name"),
    # Over HTTP the path of a decision names it.
    [(front, name) for front in FRONTS for name in BAD if (front, name) != ("http", "unknown")],
)
async def test_fronts_refuse_the_same_in_the_same_words(front: str, name: str) -> None:
    request, code, sentence = BAD[name]
    async with running_api() as api:
        expected = await admitted(api, request)
        assert (expected[0], expected[1][: len(sentence)]) == (code, sentence)
        found = await FRONTS[front](api, request)
        if front == "http" and name in SCHEMA:
            assert found[0] == code
            assert found != expected, "in the same words: take it out of SCHEMA"
        else:
            assert found == expected
        assert api.service.requests == []


@pytest.mark.parametrize("front", ["http", "session"])
@pytest.mark.parametrize("name", NOT_PERMITTED)
async def test_fronts_hold_the_same_rights(front: str, name: str, tmp_path: Path) -> None:
    request, sentence = NOT_PERMITTED[name]
    principals = secret_file(tmp_path / "principals.toml", PRINCIPALS)
    async with running_api(principals_file=principals) as api:
        expected = await admitted(api, request, SHOP)
        assert (expected[0], expected[1][: len(sentence)]) == ("not_permitted", sentence)
        assert await FRONTS[front](api, request) == expected
        assert api.service.requests == []
