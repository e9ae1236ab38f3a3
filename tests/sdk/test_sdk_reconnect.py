"""Connections that break, owners that move, proxies that misbehave: nothing lost or doubled."""

import asyncio
from dataclasses import replace

import pytest

from tests.sdk.fake_proxy import (
    QUICK,
    Action,
    AnswerAfter,
    DropAfter,
    DropBefore,
    FakeCluster,
    FakeProxy,
    Ignore,
    Refuse,
    SendRaw,
)
from txbroker.contract.frames import AskEarly, Decide, FromProducer, Prepare, encode_frame
from txbroker.core.records import Decision, Message, State
from txbroker.core.routing import parse_id
from txbroker.errors import IdConflict, Overloaded, OwnerUnavailable
from txbroker.sdk import TransactionalProducer

M = Message("payments", key=b"42", value=b"body")
KEYLESS = Message("payments", value=b"body")


def committed_once(cluster: FakeCluster, transaction_id: str) -> bool:
    stored = cluster.transactions[transaction_id]
    return stored.decision is Decision.COMMIT and set(stored.decisions) == {Decision.COMMIT}


@pytest.mark.parametrize("action", [DropBefore(), DropAfter(), SendRaw(b"\xc1nonsense")])
async def test_prepare_is_retried_with_its_id(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer, action: Action
) -> None:
    proxy.once(Prepare, action, times=2)
    async with producer.transaction(M) as tx:
        pass
    assert [p.id for p in cluster.prepares] == [tx.id] * 3
    assert [p.retry for p in cluster.prepares] == [False, True, True]
    assert list(cluster.transactions) == [tx.id]
    assert committed_once(cluster, tx.id)


@pytest.mark.parametrize("action", [DropBefore(), DropAfter(), Ignore(), Ignore(done=False)])
@pytest.mark.parametrize("decision", [Decision.COMMIT, Decision.ROLLBACK])
async def test_decision_is_retried(
    cluster: FakeCluster,
    proxy: FakeProxy,
    producer: TransactionalProducer,
    action: Action,
    decision: Decision,
) -> None:
    transaction_id = await producer.prepare(M)
    proxy.once(Decide, action)
    outcome = await (
        producer.commit(transaction_id)
        if decision is Decision.COMMIT
        else producer.rollback(transaction_id)
    )
    assert outcome.decision is decision
    assert set(cluster.transactions[transaction_id].decisions) == {decision}


async def test_early_check_request_is_retried(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    proxy.once(AskEarly, DropBefore())
    with pytest.raises(ValueError):
        async with producer.transaction(M) as tx:
            raise ValueError
    await cluster.until(lambda: cluster.transactions[tx.id].asked_early)


@pytest.mark.parametrize("code", ["overloaded", "owner_unavailable"])
async def test_retryable_errors_are_retried(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer, code: str
) -> None:
    proxy.once(Prepare, Refuse(code), times=3)
    proxy.once(Decide, Refuse(code), times=3)
    async with producer.transaction(KEYLESS) as tx:
        pass
    assert {p.id for p in cluster.prepares} == {tx.id}
    assert committed_once(cluster, tx.id)


async def test_timeout_is_a_typed_error_with_the_next_step(
    cluster: FakeCluster, proxy: FakeProxy
) -> None:
    limits = replace(QUICK, retry_s=0.2)
    async with TransactionalProducer(proxy.url, group="g", limits=limits) as producer:
        transaction_id = await producer.prepare(M)
        proxy.rules.append(lambda operation: Ignore(done=False))
        with pytest.raises(OwnerUnavailable, match="check-back will settle it") as commit:
            await producer.commit(transaction_id)
        assert commit.value.details["id"] == transaction_id
        with pytest.raises(OwnerUnavailable, match="its block has not run"):
            async with producer.transaction(M):
                pytest.fail("the block ran")
        proxy.rules[:] = [lambda operation: Refuse("overloaded", "too many")]
        with pytest.raises(Overloaded, match="too many"):
            await producer.prepare(M)


async def test_prepare_is_retried_within_dedup_window_only(
    cluster: FakeCluster, proxy: FakeProxy
) -> None:
    """After the dedup window the same id might count as new."""
    proxy.dedup_window_s = 0.4
    proxy.rules.append(lambda operation: Ignore(done=False))
    loop = asyncio.get_running_loop()
    limits = replace(QUICK, retry_s=60.0, answer_timeout_s=60.0)
    async with TransactionalProducer(proxy.url, group="g", limits=limits) as producer:
        began = loop.time()
        with pytest.raises(OwnerUnavailable, match="its block has not run"):
            await producer.prepare(M)
        assert 0.25 < loop.time() - began < limits.retry_s / 2


async def test_undelivered_commit_answers_its_check(cluster: FakeCluster, proxy: FakeProxy) -> None:
    async with TransactionalProducer(
        proxy.url, group="g", limits=replace(QUICK, retry_s=0.2)
    ) as producer:
        block = producer.transaction(M)
        tx = await block.__aenter__()
        proxy.rules.append(lambda operation: Ignore(done=False))
        with pytest.raises(OwnerUnavailable):
            await block.__aexit__(None, None, None)
        assert (await proxy.sessions[0].check(tx.id)).decision is Decision.COMMIT
        with pytest.raises(OwnerUnavailable):
            await producer.transaction(M).__aenter__()
        given_up = cluster.prepares[-1].id
        assert (await proxy.sessions[0].check(given_up)).decision is Decision.ROLLBACK


async def test_waits_for_room_and_owner_time_out(cluster: FakeCluster, proxy: FakeProxy) -> None:
    limits = replace(QUICK, retry_s=0.2, answer_timeout_s=60.0, in_flight_max=1)
    async with TransactionalProducer(proxy.url, group="g", limits=limits) as producer:
        proxy.rules.append(lambda operation: Ignore(done=False))
        calls = [producer.prepare(M) for _ in range(3)]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in failures] == [OwnerUnavailable] * 3
        proxy.rules.clear()
        transaction_id = await producer.prepare(M)
        await cluster.own(None)
        with pytest.raises(OwnerUnavailable, match="check-back will settle it"):
            await producer.commit(transaction_id)
        await cluster.own(proxy)
        assert (await producer.commit(transaction_id)).decision is Decision.COMMIT


async def test_cancelled_prepare_is_rolled_back_by_its_check(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    gate = asyncio.Event()
    proxy.once(Prepare, AnswerAfter(gate))
    waiting = asyncio.create_task(producer.prepare(M))
    await cluster.until(lambda: cluster.transactions)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    (transaction_id,) = cluster.transactions
    assert (await proxy.sessions[0].check(transaction_id)).decision is Decision.ROLLBACK
    assert await producer.prepare(M) in cluster.transactions


async def test_expired_id_is_replaced(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    proxy.once(Prepare, Refuse("id_expired"))
    async with producer.transaction(M) as tx:
        pass
    first, second = cluster.prepares
    assert first.id != second.id == tx.id
    assert second.retry is False
    assert (await proxy.sessions[0].check(first.id)).decision is None


async def test_prepare_rolled_back_before_retry_gets_new_id(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    def roll_back(operation: FromProducer) -> Action | None:
        if isinstance(operation, Prepare) and not operation.retry and not cluster.transactions:
            answer = cluster.prepare(operation, "g")
            stored = cluster.transactions[operation.id]
            stored.decision, stored.state = Decision.ROLLBACK, State.ROLLED_BACK
            assert answer
            return DropBefore()
        return None

    proxy.rules.append(roll_back)
    async with producer.transaction(M) as tx:
        pass
    first, second = cluster.transactions
    assert second == tx.id
    assert cluster.transactions[first].decision is Decision.ROLLBACK
    assert committed_once(cluster, second)


async def test_other_errors_are_not_retried(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    proxy.once(Prepare, Refuse("id_conflict"))
    with pytest.raises(IdConflict):
        await producer.prepare(M)
    assert len(cluster.prepares) == 1


async def test_restarted_proxy_is_reconnected(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    await proxy.stop()
    tasks = [asyncio.create_task(producer.prepare(m)) for m in (M, KEYLESS) * 10]
    await proxy.start()
    assert set(await asyncio.gather(*tasks)) == set(cluster.transactions)


async def test_next_url_is_used_after_a_dead_one(cluster: FakeCluster) -> None:
    dead, alive = await cluster.proxy(), await cluster.proxy()
    await cluster.own(alive)
    await dead.stop()
    async with TransactionalProducer([dead.url, alive.url], group="g", limits=QUICK) as producer:
        assert await producer.prepare(M)


async def test_sessions_open_to_needed_owners(cluster: FakeCluster) -> None:
    proxies = [await cluster.proxy() for _ in range(3)]
    await cluster.own(proxies[0], proxies[1])
    async with TransactionalProducer(proxies[0].url, group="g", limits=QUICK) as producer:
        keyed = [Message("t", key=b"%d" % n) for n in range(40)]
        ids = await asyncio.gather(*(producer.prepare(m) for m in keyed))
        keyless = await asyncio.gather(*(producer.prepare(KEYLESS) for _ in range(40)))
    assert {parse_id(i).partition for i in ids} == {0, 1, 2, 3}
    assert {parse_id(i).partition for i in keyless} <= {0, 1, 2, 3}
    assert [proxy.opened for proxy in proxies] == [1, 1, 0]


async def test_moved_owners_are_followed(cluster: FakeCluster) -> None:
    a, b = await cluster.proxy(), await cluster.proxy()
    async with TransactionalProducer(a.url, group="g", limits=QUICK) as producer:
        a.rules.append(lambda op: Ignore(done=False) if isinstance(op, Prepare) else None)
        waiting = asyncio.create_task(producer.prepare(M))
        await cluster.until(lambda: cluster.prepares)
        await cluster.own(b)
        transaction_id = await waiting
    assert [p.id for p in cluster.prepares] == [transaction_id] * 2
    assert cluster.prepares[1].retry is True


async def test_call_waits_without_owner(cluster: FakeCluster, proxy: FakeProxy) -> None:
    await cluster.own(None)
    async with TransactionalProducer(proxy.url, group="g", limits=QUICK) as producer:
        tasks = [asyncio.create_task(producer.prepare(m)) for m in (M, KEYLESS)]
        await asyncio.wait(tasks, timeout=0.05)
        assert cluster.prepares == []
        await cluster.own(proxy)
        assert len(await asyncio.gather(*tasks)) == 2


async def test_stale_view_does_not_mislead(cluster: FakeCluster) -> None:
    a, b = await cluster.proxy(), await cluster.proxy()
    async with TransactionalProducer(a.url, group="g", limits=QUICK) as producer:
        await producer.prepare(M)
        # b owns everything, but a still claims to.
        await cluster.own(b, notify=False)
        waiting = asyncio.create_task(producer.prepare(M))
        await cluster.until(lambda: len(cluster.prepares) >= 3)
        assert not waiting.done()
        await cluster.own(b)
        assert await waiting in cluster.transactions


async def test_address_of_renamed_proxy_is_remembered(cluster: FakeCluster) -> None:
    proxy = await cluster.proxy(advertise="http://proxy.invalid:8470/")
    async with TransactionalProducer(proxy.address, group="g", limits=QUICK) as producer:
        await producer.prepare(M)
        await proxy.sessions[0].drop()
        await producer.prepare(M)
    assert proxy.opened == 2
    assert len(cluster.transactions) == 2


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode_frame([["standing", 1]]),
        encode_frame([["welcome", 1, 0, 4, ["x"], "u", 1.0, 1]]),
        encode_frame([["later", 1]]),
        encode_frame([["failure", 0, "overloaded", "full"]]),
    ],
)
async def test_invalid_welcome_opens_no_session(cluster: FakeCluster, frame: bytes) -> None:
    proxy = await cluster.proxy(greeting=frame)
    producer = TransactionalProducer(proxy.url, group="g", limits=QUICK)
    with pytest.raises(OwnerUnavailable, match="no proxy can be reached"):
        await producer.start(timeout_s=0.1)


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame([["welcome", 1, 0, 4, ["x"] * 4, "u", 1.0, 1]]),
        encode_frame([["owners", []]]),
        encode_frame({"not": "a list"}),
        b"",
    ],
)
async def test_invalid_frame_ends_only_its_session(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer, frame: bytes
) -> None:
    proxy.once(Prepare, SendRaw(frame))
    assert await producer.prepare(M) in cluster.transactions
    assert proxy.opened == 2


async def test_text_frame_ends_session_and_stray_answer_is_ignored(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    await proxy.sessions[0].send(["standing", 999, "0" * 26, "pending", None])
    await proxy.sessions[0].send(["failure", 0, "overloaded", "unknown call", {}])
    await producer.prepare(M)
    assert proxy.opened == 1
    await proxy.sessions[0].socket.send_str("hello")
    await cluster.until(lambda: not proxy.sessions)
    await producer.prepare(M)
    assert proxy.opened == 2


async def test_answer_of_lost_session_is_not_mismatched(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    gate = asyncio.Event()
    proxy.once(Decide, AnswerAfter(gate))
    transaction_id = await producer.prepare(M)
    task = asyncio.create_task(producer.commit(transaction_id))
    await cluster.until(lambda: cluster.transactions[transaction_id].decisions)
    await proxy.sessions[0].drop()
    assert (await task).decision is Decision.COMMIT
    gate.set()
    assert await producer.prepare(M)
