"""Whole transactions over TLS: by curl, by the SDK in both forms, and through another proxy."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.until import until
from tests.tls.tls_world import TOKEN, TlsHarness
from txbroker.core.records import Decision
from txbroker.sdk import BlockingTransactionalProducer, Message

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


async def visible(world: TlsHarness, count: int) -> list[bytes | None]:
    """Return the visible records, once there are `count`."""

    await until(lambda: len(world.kafka.visible("test.payments", 0)) >= count)
    return [record.value for record in await world.visible("test.payments")]


async def test_curl_completes_a_transaction(world: TlsHarness) -> None:
    body = {"group": "orders", "messages": [{"topic": "test.payments", "value": "42"}]}
    async with world.proxy() as proxy:
        assert proxy.url.startswith("https://")
        prepared = await world.curl(f"{proxy.url}/v1/transactions", body=body)
        assert prepared.status == 201, prepared
        path = f"/v1/transactions/{prepared.json['id']}/commit"
        done = await world.curl(proxy.url + path, body={"wait": "promoted"})
        assert (done.status, done.json["state"]) == (200, "promoted")
        assert await visible(world, 1) == [b"42"]


async def test_sdk_sends_and_is_checked_over_tls(world: TlsHarness) -> None:
    asked: list[str] = []

    def check(request: object) -> Decision:
        asked.append(str(request))
        return Decision.COMMIT

    async with world.proxy(token_file=world.files.token, check_after_s=0.2) as proxy:
        producer = world.producer(proxy.url, check=check, token=TOKEN)
        async with producer:
            async with producer.transaction(Message("test.payments", b"k", b"one")):
                pass
            # The producer does not decide this one: the check uses the same session.
            await producer.prepare(Message("test.payments", b"k", b"two"))
            assert await visible(world, 2) == [b"one", b"two"]
        assert len(asked) == 1


async def test_blocking_sdk_sends_over_mutual_tls(world: TlsHarness) -> None:
    def send(url: str) -> None:
        producer = BlockingTransactionalProducer(
            [url],
            group="orders",
            ca_file=str(world.ours.cert),
            client_cert_file=str(world.client.cert),
            client_key_file=str(world.client.key),
        )
        with producer, producer.transaction(Message("test.payments", b"k", b"one")):
            pass

    async with world.mutual() as proxy:
        await asyncio.to_thread(send, proxy.url)
        assert await visible(world, 1) == [b"one"]
