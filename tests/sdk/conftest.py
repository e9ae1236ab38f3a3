"""What the tests of the SDK share: a fake cluster."""

from collections.abc import AsyncIterator

import pytest

from tests.sdk.fake_proxy import FakeCluster, FakeProxy


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """A cluster without proxies."""
    cluster = FakeCluster()
    yield cluster
    await cluster.close()


@pytest.fixture
async def proxy(cluster: FakeCluster) -> FakeProxy:
    """A cluster's only proxy, which owns everything."""
    return await cluster.proxy()
