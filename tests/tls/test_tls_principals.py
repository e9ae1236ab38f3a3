"""Who shows a client certificate is the principal whose name is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tls.tls_files import Pair
from tests.tls.tls_world import TlsHarness
from txbroker.principals import Role, digest_of, format_principal
from txbroker.sdk import Message

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


async def author(world: TlsHarness, url: str, shown: Pair) -> tuple[str, str]:
    """Prepare and roll back with a certificate; return the transaction's URL and who decided."""
    body = {"group": "orders", "messages": [{"topic": "test.payments", "value": "42"}]}
    prepared = await world.curl(f"{url}/v1/transactions", shown=shown, body=body)
    assert prepared.status == 201
    one = f"{url}/v1/transactions/{prepared.json['id']}"
    done = await world.curl(f"{one}/rollback", shown=shown, body={"by": "ada"})
    assert done.status == 200
    return one, (await world.curl(one, shown=shown)).json["by"]


@pytest.mark.parametrize("name", ["orders.example.org", "client"], ids=["DNS name", "common name"])
async def test_a_certificate_identifies_its_principal(
    world: TlsHarness, tmp_path: Path, name: str
) -> None:
    async with world.mutual(principals_file=principals(tmp_path, name)) as proxy:
        one, by = await author(world, proxy.url, world.client)
        assert by == "orders-team"
        metrics = await world.curl(f"{proxy.url}/metrics", shown=world.client)
        assert metrics.error == "not_permitted"
        # The token counts where both are shown; a wrong one is refused.
        ada, eve = "the token of ada", "the token of eve"
        operator = await world.curl(f"{proxy.url}/metrics", shown=world.client, token=ada)
        assert operator.status == 200
        assert (await world.curl(one, shown=world.client, token=eve)).error == "unauthorized"
        # Sessions too.
        producer = world.producer(proxy.url, shown=world.client)
        async with producer, producer.transaction(Message("test.payments", value=b"x")):
            pass


async def test_certificate_without_principal_is_refused(world: TlsHarness, tmp_path: Path) -> None:
    async with world.mutual(principals_file=principals(tmp_path, "other.name")) as proxy:
        refused = await world.curl(f"{proxy.url}/v1/groups/orders", shown=world.client)
        assert refused.error == "unauthorized"
        assert (await world.curl(f"{proxy.url}/healthz", shown=world.client)).status == 200


async def test_certificate_is_a_principal_without_a_file(world: TlsHarness) -> None:
    async with world.mutual() as proxy:
        _, by = await author(world, proxy.url, world.client)
        assert by == "orders.example.org"


@pytest.mark.parametrize("kind", ["email:{}", "dirName:other", "otherName:1.2.3.4;UTF8:{}"])
async def test_other_kind_of_name_is_no_proxy(world: TlsHarness, kind: str) -> None:
    hosts = f"DNS:harmless.example, {kind.format('proxy@example')}\n[other]\nCN = proxy@example"
    shown = world.ours.sign(f"odd-{kind[:5]}", hosts)
    async with world.mutual(peer_names=("proxy*",)) as proxy:
        words = ["-X", "POST", "-H", f"txb-proxy: {proxy.url}"]
        answer = await world.curl(f"{proxy.url}/internal/v1/overview", *words, shown=shown)
        assert answer.error == "not_a_peer"
        _, by = await author(world, proxy.url, shown)
        assert by == "harmless.example"


async def test_client_certificate_is_no_proxy(world: TlsHarness) -> None:
    async with world.mutual(peer_names=("proxy",)) as proxy:
        words = ["-X", "POST", "-H", f"txb-proxy: {proxy.url}"]
        for shown, error in (
            (world.client, "not_a_peer"),
            # Who passes learns that this path takes no POST.
            (world.files.proxy, "method_not_allowed"),
        ):
            answer = await world.curl(f"{proxy.url}/internal/v1/overview", *words, shown=shown)
            assert answer.error == error
