"""Proxies that hand calls and checks on to one another over mutual TLS."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.kit.memory import MemoryHarness
from tests.kit.until import until
from tests.tls.tls_world import TOKEN, Files, curl, mutual, running, secured, trusting
from txbroker.checkers.leases import PeerIdentity
from txbroker.contract.service import PrepareRequest
from txbroker.core.records import Decision
from txbroker.core.routing import parse_id
from txbroker.errors import OwnerUnavailable
from txbroker.net.tls import ClientTls, TlsFiles
from txbroker.proxy.cluster.peers import Peers, Unsent
from txbroker.proxy.process import Proxy
from txbroker.sdk import CheckRequest, Message, TransactionalProducer

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


async def share(proxies: list[Proxy]) -> dict[int, Proxy]:
    """Wait until each proxy owns something and all know of it; return who owns which."""
    by_url = {proxy.url: proxy for proxy in proxies}

    async def shared() -> dict[int, Proxy] | None:
        views = {proxy.broker.owners() for proxy in proxies}
        if len(views) != 1 or set(owners := views.pop()) != set(by_url):
            return None
        return {number: by_url[url] for number, url in enumerate(owners)}

    return dict(await until(shared))


async def test_calls_and_checks_pass_through_another_proxy(
    world: MemoryHarness, files: Files
) -> None:
    asked: list[str] = []

    def check(request: CheckRequest) -> Decision:
        asked.append(request.id)
        return Decision.COMMIT

    settings = mutual(files, token_file=files.token, peer_names=("proxy*",), check_after_s=0.3)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running(world, "one", **settings))
        two = await stack.enter_async_context(running(world, "two", **settings))
        owners = await share([one, two])
        producer = TransactionalProducer(
            one.url,
            group="orders",
            check=check,
            token=TOKEN,
            ca_file=files.ours.cert,
            client_cert_file=files.client.cert,
            client_key_file=files.client.key,
        )
        await stack.enter_async_context(producer)
        # Its only session is with `one`, so what `two` owns is asked for through `one`.
        words = trusting(files, shown=files.client, token=TOKEN)
        ids: list[str] = []
        while {owners[parse_id(id).partition].url for id in ids} != {one.url, two.url}:
            key = str(len(ids))
            message = {"topic": "test.payments", "key": key, "value": key}
            body = {"group": "orders", "messages": [message]}
            prepared = await curl(f"{one.url}/v1/transactions", *words, body=body)
            assert prepared.status == 201, prepared
            ids.append(prepared.json["id"])

        async def seen() -> bool:
            return len(await world.visible("test.payments")) == len(ids)

        await until(seen)
        assert sorted(asked) == sorted(ids)
        # A list is made of what both have.
        listed = await curl(f"{two.url}/v1/transactions?state=promoted", *words)
        assert {view["id"] for view in listed.json["transactions"]} == set(ids)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (lambda files: TlsFiles(), "is not trusted"),
        (lambda files: TlsFiles(files.others.cert, *files.proxy), "peers_ca_file"),
        (lambda files: TlsFiles(files.ours.cert, *files.stranger), "does not trust the authority"),
    ],
    ids=["system", "authority", "certificate"],
)
async def test_proxy_reports_why_a_peer_is_unreachable(
    world: MemoryHarness, files: Files, known: object, expected: str
) -> None:
    assert callable(known)
    async with running(world, **mutual(files)) as proxy:
        peers = Peers(PeerIdentity(lambda: "https://other:1"), tls=ClientTls(known(files)))
        try:
            with pytest.raises(OwnerUnavailable, match=expected):
                await peers.sessions(proxy.url)
        finally:
            await peers.close()


async def test_proxy_without_a_certificate_is_refused(world: MemoryHarness, files: Files) -> None:
    async with running(world, **mutual(files)) as proxy:
        peers = Peers(
            PeerIdentity(lambda: "https://other:1"), tls=ClientTls(TlsFiles(files.ours.cert))
        )
        try:
            with pytest.raises(OwnerUnavailable, match="answered 403"):
                await peers.overview(proxy.url)
        finally:
            await peers.close()


async def test_untrusted_proxy_gets_no_call(world: MemoryHarness, files: Files) -> None:
    request = PrepareRequest("orders", (Message("test.payments", b"k", b"v"),))
    async with running(world, **secured(files)) as proxy:
        peers = Peers(
            PeerIdentity(lambda: "https://other:1"), tls=ClientTls(TlsFiles(files.others.cert))
        )
        try:
            with pytest.raises(Unsent, match="is not trusted"):
                await asyncio.wait_for(peers.prepare(proxy.url, request), 20)
        finally:
            await peers.close()
