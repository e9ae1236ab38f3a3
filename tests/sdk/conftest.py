"""What the tests of the SDK share: a fake cluster."""

from collections.abc import AsyncIterator

import pytest

from tests.sdk.fake_proxy import QUICK, FakeCluster, FakeProxy
from txbroker.sdk import TransactionalProducer


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    yield cluster
    await cluster.close()


@pytest.fixture
async def proxy(cluster: FakeCluster) -> FakeProxy:
    """A cluster's only proxy, which owns everything."""
    return await cluster.proxy()


@pytest.fixture
async def producer(proxy: FakeProxy) -> AsyncIterator[TransactionalProducer]:
    async with TransactionalProducer(proxy.url, group="g", limits=QUICK) as producer:
        yield producer
