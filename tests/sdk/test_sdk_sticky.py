"""Where a producer prepares what no key ties to a half partition."""

import pytest

from tests.sdk.fake_proxy import QUICK, FakeCluster
from tests.sdk.test_sdk_cluster import KEYLESS, keyed
from txbroker import batching as sticky
from txbroker.core.routing import parse_id
from txbroker.sdk import TransactionalProducer


async def test_choice_stays_until_partition_moves(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sticky, "SECONDS", 3600.0)
    proxy = await cluster.proxy()

    async def where(producer: TransactionalProducer) -> int:
        return parse_id(await producer.prepare(KEYLESS)).partition

    async with TransactionalProducer(proxy.url, group="g", limits=QUICK) as producer:
        first = await where(producer)
        assert {await where(producer) for _ in range(20)} == {first}
        await cluster.own(*[None if partition == first else proxy for partition in range(4)])
        # Its answer arrives after the news.
        await producer.prepare(keyed((first + 1) % 4))
        second = await where(producer)
        assert second != first
        assert {await where(producer) for _ in range(20)} == {second}


async def test_choice_moves_when_proxy_dies(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sticky, "SECONDS", 3600.0)
    proxies = [await cluster.proxy() for _ in range(2)]
    await cluster.own(*proxies)
    async with TransactionalProducer(
        [proxy.url for proxy in proxies], group="g", limits=QUICK
    ) as producer:
        for partition in range(2):  # now both are connected
            await producer.prepare(keyed(partition))
        chosen = proxies[parse_id(await producer.prepare(KEYLESS)).partition % 2]
        await chosen.stop()
        ids = [await producer.prepare(KEYLESS) for _ in range(20)]
        # Until it is known whose its partitions are, the other one's own will do.
        (left,) = set(proxies) - {chosen}
        assert {proxies[parse_id(id).partition % 2] for id in ids} == {left}
