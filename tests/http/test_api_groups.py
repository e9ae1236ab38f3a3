"""Registered groups over HTTP, and the calls on the proxy itself."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from tests.kit.http_api import Api, running_api
from tests.kit.secret_files import secret_file
from txbroker.contract.groups import GroupAnswer
from txbroker.contract.policy import GroupPolicy, PolicyError, check_group_name
from txbroker.contract.service import Readiness
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.http.bodies import GroupBody
from txbroker.proxy.observe.metrics import Gauges

POLICY = {"check_url": "http://127.0.0.1:9/check", "secret_ref": "env:SECRET", "attempts_max": 3}


async def test_group_is_put_shown_listed_and_removed(api: Api) -> None:
    put = await api.call("PUT", "/v1/groups/orders", POLICY)
    shown = await api.call("GET", "/v1/groups/orders")
    _, listed = await api.call("GET", "/v1/groups")
    removed = await api.call("DELETE", "/v1/groups/orders")
    gone, error = await api.call("GET", "/v1/groups/orders")
    again, _ = await api.call("DELETE", "/v1/groups/orders")

    assert put == shown == (200, {"group": "orders", "sessions": 0, **POLICY})
    assert listed == {"groups": [shown[1]]}
    assert removed == (200, {"group": "orders", "removed": True})
    assert (gone, error["error"]["code"], again) == (404, "unknown_group", 404)


async def test_put_replaces_the_whole_policy(api: Api) -> None:
    await api.call("PUT", "/v1/groups/orders", POLICY)
    status, answer = await api.call("PUT", "/v1/groups/orders", {"timeout_s": 1})
    assert (status, answer) == (200, {"group": "orders", "sessions": 0, "timeout_s": 1.0})


async def test_names_may_need_escapes(api: Api) -> None:
    status, answer = await api.call("PUT", "/v1/groups/b%C3%BCcher%20und%2Fmehr", {})
    assert (status, answer["group"]) == (200, "bücher und/mehr")
    assert (await api.call("GET", "/v1/groups/b%C3%BCcher%20und%2Fmehr"))[0] == 200


async def test_query_of_check_url_is_never_shown(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """Queries may hold tokens. A shown URL cannot be registered, which would lose them."""
    body = {"check_url": "http://127.0.0.1:9/check?token=hunter2&x=1"}
    answers = [
        await api.call("PUT", "/v1/groups/orders", body),
        await api.call("GET", "/v1/groups/orders"),
        await api.call("GET", "/v1/groups"),
        await api.call("POST", "/v1/groups/orders/test", {}),
    ]
    assert "hunter2" not in f"{answers} {caplog.text}"
    shown = answers[1][1]["check_url"]
    assert shown == "http://127.0.0.1:9/check?…"
    for url in (shown, shown.replace("…", "%E2%80%A6")):
        status, answer = await api.call("PUT", "/v1/groups/orders", {"check_url": url})
        assert (status, "the mask" in answer["error"]["message"]) == (400, True)
    assert b"hunter2" in api.store.stored["orders"]


NAMES = [
    "a/b", "/", "//", "a/", "/a", "../x", "x/..", "...", "%", "%2F", "%2e%2e", "%00", "{x}", "{",
    "}", "a?b", "a#b", "a+b", " ", "a ", "&;", "~*:@", "\\", '"', "test", "x/test", "[a]", "<a>|^`",
    "é", "日本", "A\u030a", "😀" * 249,
]  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, ".", "..", "", "a\n", "a\nb", "\0", "\u2028", "x" * 250])
async def test_group_that_can_prepare_can_be_registered(api: Api, name: str) -> None:
    """One rule for both: by the name in a URL's path, percent-encoded."""
    body = {"group": name, "messages": [{"topic": "payments", "value": "42"}]}
    prepared, _ = await api.call("POST", "/v1/transactions", body)
    assert prepared == (201 if name in NAMES else 400)
    with pytest.raises(PolicyError) if name not in NAMES else nullcontext():
        check_group_name(name)
    path = f"/v1/groups/{quote(name, safe='')}"
    if name not in NAMES:
        if name.strip("."):
            status, answer = await raw_call(api, "PUT", path)
            assert (status, answer["error"]["code"]) == (400, "bad_request")
        return
    for method in ("PUT", "GET", "DELETE"):
        status, answer = await raw_call(api, method, path)
        assert (status, answer["group"]) == (200, name)


async def raw_call(api: Api, method: str, path: str) -> tuple[int, Any]:
    """Call with the path as it is: client libraries have their own ideas of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    status_line, _, rest = (await reader.read()).partition(b"\r\n")
    writer.close()
    return int(status_line.split()[1]), json.loads(rest.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"check_url": "ftp://x"}, "check_url"),
        ({"check_url": "http://user:pw@x"}, "secret_ref"),
        ({"secret_ref": "hunter2"}, "secret_ref"),
        ({"attempts_max": 0}, "attempts_max"),
        ({"attempts_max": 1.5}, "attempts_max"),
        ({"check_ur": "http://x"}, "did you mean 'check_url'"),
    ],
)
async def test_invalid_policy_is_refused(api: Api, body: dict[str, object], word: str) -> None:
    status, answer = await api.call("PUT", "/v1/groups/orders", body)
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert word in answer["error"]["message"]
    assert "hunter2" not in answer["error"]["message"]
    assert api.store.stored == {}


async def test_proxy_secret_never_signs_group_calls(tmp_path: Path) -> None:
    own_folder = tmp_path / "orders"
    own_folder.mkdir()
    names = ("token", "password", "secret", "link")
    token, password, orders, link = (own_folder / name for name in names)
    for file in (token, password, orders):
        secret_file(file, f"the secret in {file.name}")
    link.symlink_to(password)
    own = [token, password, link]
    settings: dict[str, Any] = {
        "secrets_dir": tmp_path,
        "secret_env_allow": ("ORDERS_SECRET",),
        "token_file": token,
        "kafka_security_protocol": "SASL_PLAINTEXT",
        "kafka_sasl_username": "proxy",
        "kafka_sasl_password_file": password,
    }
    async with running_api(**settings) as api:

        async def register(ref: str) -> tuple[int, str]:
            bearer = f"Bearer {token.read_text()}"
            status, answer = await api.call(
                "PUT", "/v1/groups/orders", {"secret_ref": ref}, authorization=bearer
            )
            return status, answer.get("error", {}).get("message", "")

        for ref in ["env:TXBROKER_KAFKA_SASL_PASSWORD", *(f"file:{place}" for place in own)]:
            status, why = await register(ref)
            assert (status, "the proxy itself" in why) == (400, True), ref
        assert api.store.stored == {}
        for ref in ("env:ORDERS_SECRET", f"file:{orders}", f"file:{own_folder}/not-yet"):
            assert await register(ref) == (200, "")


async def test_unreachable_kafka_is_503(api: Api) -> None:
    api.store.failure = KafkaUnavailable("no broker answers")
    status, answer = await api.call("PUT", "/v1/groups/orders", POLICY)
    assert (status, answer["error"]["code"]) == (503, "kafka_unavailable")


def test_declared_bounds_match_the_policy() -> None:
    names = [field.name for field in msgspec.structs.fields(GroupPolicy)]
    assert [field.name for field in msgspec.structs.fields(GroupAnswer)][2:] == [*names, "problem"]
    bounds = {
        "check_after_s": (0, 604_800),
        "check_interval_s": (0.1, 604_800),
        "attempts_max": (1, 100),
        "timeout_s": (0.1, 60),
        "parallel": (1, 64),
        "answer_bytes_max": (1024, 16 * 1024 * 1024),
    }
    assert [*bounds, "signed_answers"] == names[2:]
    for name, (least, most) in bounds.items():
        for bound in (least, most):
            body = msgspec.convert({name: bound}, GroupBody)
            GroupPolicy(**msgspec.structs.asdict(body)).validate()
        for beyond in (least - 1, most + 1):
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert({name: beyond}, GroupBody)


# --- the proxy itself ------------------------------------------------------------------------


async def test_alive(api: Api) -> None:
    assert await api.call("GET", "/healthz") == (200, {"status": "alive"})


async def test_readiness_names_its_problems(api: Api) -> None:
    ready = await api.call("GET", "/readyz")
    api.service.ready = Readiness(False, {0: "replaying"}, ("Kafka does not answer",))
    not_ready = await api.call("GET", "/readyz")

    assert ready == (200, {"ready": True, "partitions": {"0": "owned"}, "problems": []})
    assert not_ready == (
        503,
        {"ready": False, "partitions": {"0": "replaying"}, "problems": ["Kafka does not answer"]},
    )


async def test_metrics_are_served(api: Api) -> None:
    api.metrics.watch(lambda: Gauges(pending={"orders": 2}))
    id = await api.prepare()
    await api.call("POST", f"/v1/transactions/{id}/commit")
    async with api.client.get(f"{api.url}/metrics") as answer:
        text = await answer.text()
        assert answer.content_type == "text/plain"
    assert 'txbroker_pending{group="orders"} 2.0' in text
    assert "txbroker_decision_latency_seconds_count 1.0" in text
    assert "txbroker_ready 1.0" in text


async def test_head_works_where_get_does(api: Api) -> None:
    async with api.client.head(f"{api.url}/healthz") as answer:
        assert answer.status == 200


async def test_test_call_needs_a_registered_group(api: Api) -> None:
    missing, error = await api.call("POST", "/v1/groups/orders/test", {})
    assert (missing, error["error"]["code"]) == (404, "unknown_group")
    await api.call("PUT", "/v1/groups/orders", {"check_url": "http://127.0.0.1:9/check?token=t"})
    status, tried = await api.call("POST", "/v1/groups/orders/test", {})
    assert (status, tried["group"], tried["answered"]) == (200, "orders", False)
    assert tried["endpoint"] == "http://127.0.0.1:9/check"
    assert "token" not in str(tried)
