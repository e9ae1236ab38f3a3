"""Proxies that hand calls and checks on to one another over mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.kit.until import until
from tests.tls.tls_world import TOKEN, Files, TlsHarness
from txbroker.checkers.leases import PeerIdentity
from txbroker.contract.service import PrepareRequest
from txbroker.core.records import Decision
from txbroker.core.routing import parse_id
from txbroker.errors import OwnerUnavailable
from txbroker.net.tls import ClientTls, TlsFiles
from txbroker.proxy.cluster.peers import Peers, Unsent
from txbroker.proxy.process import Proxy
from txbroker.sdk import CheckRequest, Message

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


async def test_calls_and_checks_pass_through_another_proxy(world: TlsHarness) -> None:
    asked: list[str] = []

    def check(request: CheckRequest) -> Decision:
        asked.append(request.id)
        return Decision.COMMIT

    settings = {"token_file": world.files.token, "peer_names": ("proxy*",), "check_after_s": 0.3}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(world.mutual("one", **settings))
        two = await stack.enter_async_context(world.mutual("two", **settings))
        owners = await share([one, two])
        producer = world.producer(one.url, shown=world.client, check=check, token=TOKEN)
        await stack.enter_async_context(producer)
        # Its only session is with `one`, so what `two` owns is asked for through `one`.
        ids: list[str] = []
        while {owners[parse_id(id).partition].url for id in ids} != {one.url, two.url}:
            key = str(len(ids))
            message = {"topic": "test.payments", "key": key, "value": key}
            body = {"group": "orders", "messages": [message]}
            prepared = await world.curl(
                f"{one.url}/v1/transactions", shown=world.client, token=TOKEN, body=body
            )
            assert prepared.status == 201, prepared
            ids.append(prepared.json["id"])

        await until(lambda: len(world.kafka.visible("test.payments", 0)) == len(ids))
        assert sorted(asked) == sorted(ids)
        # A list is made of what both have.
        listed = await world.curl(
            f"{two.url}/v1/transactions?state=promoted", shown=world.client, token=TOKEN
        )
        assert {view["id"] for view in listed.json["transactions"]} == set(ids)


@asynccontextmanager
async def peers_with(tls: TlsFiles) -> AsyncIterator[Peers]:
    peers = Peers(PeerIdentity(lambda: "https://other:1"), tls=ClientTls(tls))
    try:
        yield peers
    finally:
        await peers.close()


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (lambda files: TlsFiles(), "is not trusted"),
        (lambda files: TlsFiles(files.others.cert, *files.proxy), "peers_ca_file"),
        (lambda files: TlsFiles(files.ours.cert, *files.stranger), "does not trust the authority"),
        (lambda files: TlsFiles(files.ours.cert), "answered 403"),
    ],
    ids=["system", "authority", "certificate", "no certificate"],
)
async def test_proxy_reports_why_a_peer_is_unreachable(
    world: TlsHarness, known: Callable[[Files], TlsFiles], expected: str
) -> None:
    async with world.mutual() as proxy, peers_with(known(world.files)) as peers:
        with pytest.raises(OwnerUnavailable, match=expected):
            await peers.overview(proxy.url)


async def test_untrusted_proxy_gets_no_call(world: TlsHarness) -> None:
    request = PrepareRequest("orders", (Message("test.payments", b"k", b"v"),))
    async with world.proxy() as proxy, peers_with(TlsFiles(world.others.cert)) as peers:
        with pytest.raises(Unsent, match="is not trusted"):
            await asyncio.wait_for(peers.prepare(proxy.url, request), 20)
