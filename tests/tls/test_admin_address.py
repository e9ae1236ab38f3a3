"""Operators' calls at a separate address, with a separate token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tls.tls_world import ADMIN_TOKEN, BODY, TOKEN, Files, TlsHarness
from txbroker.config.settings import load_settings
from txbroker.core.records import Decision
from txbroker.errors import ConfigurationError
from txbroker.proxy.http.api import operations
from txbroker.sdk import Message

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]

PRODUCERS = {
    "prepare", "find", "commit", "rollback", "put_group", "get_group", "health", "ready", "openapi",
}  # fmt: skip
ID = "0" * 26


def filled(path: str) -> str:
    return path.replace("{id}", ID).replace("{group}", "orders")


def test_producer_calls_are_listed() -> None:
    assert {one.name for one in operations() if not one.admin} == PRODUCERS


async def test_operator_calls_are_refused_at_the_main_address(world: TlsHarness) -> None:
    async with world.proxy(**world.apart) as proxy:
        for one in operations():
            words = ["-X", one.method]
            body: dict[str, Any] | None = {} if one.changes else None
            answer = await world.curl(proxy.url + filled(one.path), *words, token=TOKEN, body=body)
            refused = answer.status == 403 and answer.error == "admin_only"
            assert refused == one.admin, (one.name, answer)
            admin = await world.curl(
                proxy.admin_url + filled(one.path),
                *words, token=ADMIN_TOKEN, body=body,
            )  # fmt: skip
            assert admin.status not in (401, 403), (one.name, admin)
        for page in ("/", "/transactions", "/static/x/y.css", "/login"):
            assert (await world.curl(proxy.url + page, token=TOKEN)).status == 403


async def test_each_token_is_valid_at_its_address_only(world: TlsHarness) -> None:
    async with world.proxy(**world.apart) as proxy:
        path = "/v1/transactions"
        for url, token in ((proxy.url, ADMIN_TOKEN), (proxy.admin_url, TOKEN)):
            answer = await world.curl(url + path, token=token, body=BODY)
            assert (answer.status, answer.error) == (401, "unauthorized")
        body = {"group": "orders", "messages": [{"topic": "test.payments", "value": "1"}]}
        prepared = await world.curl(proxy.url + path, token=TOKEN, body=body)
        assert prepared.status == 201
        # The operator sees it, and decides it.
        listed = await world.curl(proxy.admin_url + path, token=ADMIN_TOKEN)
        assert [one["id"] for one in listed.json["transactions"]] == [prepared.json["id"]]
        one = f"{proxy.admin_url}{path}/{prepared.json['id']}"
        done = await world.curl(f"{one}/rollback", token=ADMIN_TOKEN, body={"reason": "by hand"})
        assert done.status == 200


async def test_probes_answer_at_both_addresses(world: TlsHarness) -> None:
    async with world.proxy(**world.apart) as proxy:
        for url in (proxy.url, proxy.admin_url):
            for path in ("/healthz", "/readyz"):
                assert (await world.curl(url + path)).status == 200


async def test_admin_address_refuses_sessions_and_proxies(world: TlsHarness) -> None:
    async with world.proxy(**world.apart) as proxy:
        for path in ("/v1/session", "/internal/v1/sessions"):
            words = ["-H", "txb-proxy: https://other:1"]
            answer = await world.curl(proxy.admin_url + path, *words, token=ADMIN_TOKEN)
            assert answer.status == 404


async def test_single_token_is_valid_at_both_addresses(world: TlsHarness) -> None:
    async with world.proxy(**{**world.apart, "admin_token_file": None}) as proxy:
        metrics = await world.curl(f"{proxy.admin_url}/metrics", token=TOKEN)
        assert (metrics.status, "txbroker_" in metrics.body) == (200, True)


async def test_sdk_needs_no_admin_address(world: TlsHarness) -> None:
    async with world.proxy(**world.apart) as proxy:
        producer = world.producer(proxy.url, check=lambda _: Decision.COMMIT, token=TOKEN)
        async with producer:
            outcome = await producer.send_in_transaction(
                Message("test.payments", b"k", b"1"), lambda _: None, wait="promoted"
            )
        assert outcome.decision is Decision.COMMIT


async def test_overview_names_the_admin_address(world: TlsHarness) -> None:
    async with world.proxy(**world.apart) as proxy:
        overview = await world.curl(f"{proxy.admin_url}/v1/overview", token=ADMIN_TOKEN)
        (proxies,) = overview.json["proxies"]
        assert (proxies["url"], proxies["admin_url"]) == (proxy.url, proxy.admin_url)


def test_admin_address_must_be_an_address() -> None:
    with pytest.raises(ConfigurationError, match="admin_listen: 'nowhere' is not an address"):
        load_settings({"admin_listen": "nowhere"}, environ={})


def test_either_token_guards_the_admin_address(files: Files) -> None:
    for name in ("token_file", "admin_token_file"):
        given = {name: files.token, "admin_listen": "0.0.0.0:8471"}
        assert load_settings(given, environ={}).admin_listen == "0.0.0.0:8471"
