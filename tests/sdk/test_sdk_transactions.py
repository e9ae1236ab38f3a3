"""Blocks and functions against a proxy that behaves."""

from tests.sdk.fake_proxy import QUICK, FakeCluster, FakeProxy
from txbroker.core.records import Decision, Message, State
from txbroker.sdk import Outcome, TransactionalProducer

M = Message("payments", key=b"42", value=b"body")


async def test_leaving_the_block_commits(cluster: FakeCluster, proxy: FakeProxy) -> None:
    async with TransactionalProducer(proxy.url, group="g", limits=QUICK) as producer:
        async with producer.transaction(M) as tx:
            assert cluster.transactions[tx.id].state is State.PENDING
        assert tx.outcome == Outcome(tx.id, Decision.COMMIT, State.COMMITTED)
    assert cluster.transactions[tx.id].decisions == [Decision.COMMIT]
