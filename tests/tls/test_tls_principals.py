"""Who shows a client certificate is the principal whose name is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.memory import MemoryHarness
from tests.tls.tls_world import BODY, Files, curl, mutual, running, trusting
from txbroker.principals import Role, digest_of, format_principal
from txbroker.sdk import Message, TransactionalProducer

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


def principals(folder: Path, *certificates: str) -> Path:
    """Write a principals file: one producer with these names, and an operator with a token."""
    path = folder / "principals.toml"
    patterns = {"groups": ["orders"], "topics": ["test.payments", "payments"]}
    path.write_text(
        format_principal(
            "orders-team", Role.PRODUCER, digest=None, certificates=certificates,
            patterns=patterns, expires=None,
        )
        + format_principal(
            "ada", Role.OPERATOR, digest=digest_of("the token of ada"), certificates=(),
            patterns={}, expires=None,
        )
    )  # fmt: skip
    return path


@pytest.mark.parametrize("name", ["orders.example.org", "client"], ids=["DNS name", "common name"])
async def test_a_certificate_identifies_its_principal(
    world: MemoryHarness, files: Files, tmp_path: Path, name: str
) -> None:
    settings = mutual(files, principals_file=principals(tmp_path, name))
    async with running(world, **settings) as proxy:
        words = trusting(files, shown=files.client)
        prepared = await curl(
            f"{proxy.url}/v1/transactions",
            *words,
            body={**BODY, "messages": [{"topic": "test.payments", "value": "42"}]},
        )
        assert prepared.status == 201
        one = f"{proxy.url}/v1/transactions/{prepared.json['id']}"
        assert (await curl(f"{one}/rollback", *words, body={"by": "ada"})).status == 200
        assert (await curl(one, *words)).json["by"] == "orders-team"
        assert (await curl(f"{proxy.url}/metrics", *words)).error == "not_permitted"
        # The token counts where both are shown; a wrong one is refused.
        operator = trusting(files, shown=files.client, token="the token of ada")
        assert (await curl(f"{proxy.url}/metrics", *operator)).status == 200
        wrong = trusting(files, shown=files.client, token="the token of eve")
        assert (await curl(one, *wrong)).error == "unauthorized"
        # Sessions too.
        producer = TransactionalProducer(
            proxy.url,
            group="orders",
            ca_file=files.ours.cert,
            client_cert_file=files.client.cert,
            client_key_file=files.client.key,
        )
        async with producer, producer.transaction(Message("test.payments", value=b"x")):
            pass


async def test_certificate_without_principal_is_refused(
    world: MemoryHarness, files: Files, tmp_path: Path
) -> None:
    settings = mutual(files, principals_file=principals(tmp_path, "other.name"))
    async with running(world, **settings) as proxy:
        words = trusting(files, shown=files.client)
        assert (await curl(f"{proxy.url}/v1/groups/orders", *words)).error == "unauthorized"
        assert (await curl(f"{proxy.url}/healthz", *words)).status == 200


async def test_certificate_is_a_principal_without_a_file(
    world: MemoryHarness, files: Files
) -> None:
    async with running(world, **mutual(files)) as proxy:
        words = trusting(files, shown=files.client)
        prepared = await curl(
            f"{proxy.url}/v1/transactions",
            *words,
            body={**BODY, "messages": [{"topic": "test.payments", "value": "42"}]},
        )
        one = f"{proxy.url}/v1/transactions/{prepared.json['id']}"
        assert (await curl(f"{one}/rollback", *words, body={"by": "ada"})).status == 200
        assert (await curl(one, *words)).json["by"] == "orders.example.org"


@pytest.mark.parametrize("kind", ["email:{}", "dirName:other", "otherName:1.2.3.4;UTF8:{}"])
async def test_other_kind_of_name_is_no_proxy(
    world: MemoryHarness, files: Files, kind: str
) -> None:
    hosts = f"DNS:harmless.example, {kind.format('proxy@example')}\n[other]\nCN = proxy@example"
    shown = files.ours.sign(f"odd-{kind[:5]}", hosts)
    async with running(world, **mutual(files, peer_names=("proxy*",))) as proxy:
        words = ["-X", "POST", "-H", f"txb-proxy: {proxy.url}", *trusting(files, shown=shown)]
        answer = await curl(f"{proxy.url}/internal/v1/overview", *words)
        assert answer.error == "not_a_peer"
        body = {**BODY, "messages": [{"topic": "test.payments", "value": "42"}]}
        words = trusting(files, shown=shown)
        prepared = await curl(f"{proxy.url}/v1/transactions", *words, body=body)
        one = f"{proxy.url}/v1/transactions/{prepared.json['id']}"
        assert (await curl(f"{one}/rollback", *words, body={"by": "ada"})).status == 200
        assert (await curl(one, *words)).json["by"] == "harmless.example"


async def test_client_certificate_is_no_proxy(world: MemoryHarness, files: Files) -> None:
    async with running(world, **mutual(files, peer_names=("proxy",))) as proxy:
        # Who passes learns that this path takes no POST.
        path, named = "/internal/v1/overview", ["-X", "POST", "-H", f"txb-proxy: {proxy.url}"]
        words = trusting(files, shown=files.client)
        assert (await curl(proxy.url + path, *words, *named)).error == "not_a_peer"
        words = trusting(files, shown=files.proxy)
        assert (await curl(proxy.url + path, *words, *named)).error == "method_not_allowed"
