"""Blocks and functions against a healthy proxy, and immediate refusals."""

import asyncio
import threading
import time

import pytest

from tests.kit.until import free_ports
from tests.sdk.fake_proxy import QUICK, AnswerAfter, FakeCluster, FakeProxy, Refuse
from txbroker.contract.frames import FRAME_OPERATIONS_MAX, AskEarly, Decide, Prepare
from txbroker.core.records import Decision, Message, State
from txbroker.core.routing import order_hash, parse_id
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    BadRequest,
    ConfigurationError,
    NotFound,
    OwnerUnavailable,
    TooLarge,
    Unauthorized,
    UnknownTopic,
    WrongGroup,
)
from txbroker.sdk import (
    BlockingTransactionalProducer,
    Limits,
    Outcome,
    ProducerClosed,
    Rollback,
    Transaction,
    TransactionalProducer,
)

M = Message("payments", key=b"42", value=b"body", headers=(("h", b"1"), ("h", None)))


async def test_leaving_the_block_commits(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    async with producer.transaction(M, check_after_s=3, check_interval_s=4.5) as tx:
        assert cluster.transactions[tx.id].state is State.PENDING
        assert tx.outcome == Outcome(tx.id, Decision.UNKNOWN, State.PENDING)
    assert tx.outcome == Outcome(tx.id, Decision.COMMIT, State.COMMITTED)
    stored = cluster.transactions[tx.id]
    assert stored.decisions == [Decision.COMMIT]
    assert stored.messages == (M,)
    assert (stored.prepare.check_after_s, stored.prepare.check_interval_s) == (3.0, 4.5)
    assert stored.prepare.retry is False


async def test_rollback_is_swallowed(cluster: FakeCluster, producer: TransactionalProducer) -> None:
    async with producer.transaction(M) as tx:
        raise Rollback("no money")
    assert cluster.transactions[tx.id].decisions == [Decision.ROLLBACK]
    assert tx.outcome.state is State.ROLLED_BACK


@pytest.mark.parametrize("error", [RuntimeError("disk full"), asyncio.CancelledError()])
async def test_exception_leaves_unknown_and_requests_check(
    cluster: FakeCluster, producer: TransactionalProducer, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        async with producer.transaction(M) as tx:
            raise error
    stored = cluster.transactions[tx.id]
    await cluster.until(lambda: stored.asked_early)
    assert stored.decision is None
    assert stored.asked_early == [f"the block ended with {type(error).__name__}"]


async def test_commit_survives_cancellation(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    gate = asyncio.Event()
    proxy.once(Decide, AnswerAfter(gate))

    async def work() -> None:
        async with producer.transaction(M):
            pass

    task = asyncio.create_task(work())
    await cluster.until(lambda: any(t.decision for t in cluster.transactions.values()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (stored,) = cluster.transactions.values()
    await cluster.until(lambda: len(stored.decisions) == 2)
    assert set(stored.decisions) == {Decision.COMMIT}
    assert stored.asked_early == []
    gate.set()


async def test_leaving_after_decision_sends_nothing(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    async with producer.transaction(M) as tx:
        assert (await tx.commit(wait="promoted")).state is State.PROMOTED
        assert (await tx.commit()).state is State.PROMOTED
        with pytest.raises(AlreadyDecided):
            await tx.rollback()
        with pytest.raises(AlreadyDecided):
            tx.replace(M)
    assert cluster.transactions[tx.id].decisions == [Decision.COMMIT]
    async with producer.transaction(M) as tx:
        await tx.rollback("because")
    assert cluster.transactions[tx.id].decisions == [Decision.ROLLBACK]


async def test_exception_after_commit_changes_nothing(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    with pytest.raises(RuntimeError):  # noqa: PT012
        async with producer.transaction(M) as tx:
            await tx.commit()
            raise RuntimeError
    with pytest.raises(AlreadyDecided):  # noqa: PT012
        async with producer.transaction(M) as late:
            await late.commit()
            raise Rollback
    await producer.drain()
    assert cluster.transactions[tx.id].asked_early == []
    assert cluster.transactions[late.id].decisions == [Decision.COMMIT]


async def test_failed_rollback_never_commits(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    async with producer.transaction(M) as tx:
        proxy.once(Decide, Refuse("failed"))
        with pytest.raises(Exception, match="refused by the test"):
            await tx.rollback()
    assert cluster.transactions[tx.id].decisions == [Decision.ROLLBACK]


async def test_replaced_messages_travel_with_the_commit(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    final = Message("payments", key=b"42", value=b"final")
    async with producer.transaction(M) as tx:
        tx.replace(final)
        assert tx.messages == (final,)
    assert cluster.transactions[tx.id].messages == (final,)
    assert cluster.transactions[tx.id].prepare.messages == (M,)
    with pytest.raises(BadRequest, match="as many"):
        async with producer.transaction(M) as tx:
            tx.replace(final, final)
    with pytest.raises(BadRequest, match="same topics"):
        async with producer.transaction(M) as tx:
            tx.replace(Message("other"))


async def test_function_result_decides(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    threads: list[threading.Thread] = []

    def plain(tx: Transaction) -> None:
        threads.append(threading.current_thread())

    async def asked_back(tx: Transaction) -> Decision:
        return Decision.UNKNOWN

    async def refused(tx: Transaction) -> Decision:
        return Decision.ROLLBACK

    async def raised(tx: Transaction) -> None:
        raise Rollback

    assert (await producer.send_in_transaction(M, plain)).decision is Decision.COMMIT
    assert threads[0] is not threading.current_thread()
    promoted = await producer.send_in_transaction([M, M], plain, wait="promoted")
    assert promoted.state is State.PROMOTED
    for function in (refused, raised):
        outcome = await producer.send_in_transaction(M, function)
        assert (outcome.decision, outcome.state) == (Decision.ROLLBACK, State.ROLLED_BACK)
    outcome = await producer.send_in_transaction(M, asked_back)
    assert (outcome.decision, outcome.state) == (Decision.UNKNOWN, State.PENDING)
    await cluster.until(lambda: cluster.transactions[outcome.id].asked_early)


async def test_failed_or_invalid_function_is_unknown(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    with pytest.raises(TypeError, match="returns a Decision or None"):
        await producer.send_in_transaction(M, lambda tx: 5)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        await producer.send_in_transaction(M, lambda tx: 1 / 0)  # type: ignore[arg-type, return-value]
    stored = list(cluster.transactions.values())
    await cluster.until(lambda: all(t.asked_early for t in stored))
    assert [t.decision for t in stored] == [None, None]


async def test_cancelled_caller_leaves_thread_and_not_yet(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    inside, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(tx: Transaction) -> None:
        loop.call_soon_threadsafe(inside.set)
        go.wait(10)

    task = asyncio.create_task(producer.send_in_transaction(M, slow))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (transaction_id,) = cluster.transactions
    answer = await proxy.sessions[0].check(transaction_id)
    assert (answer.decision, answer.ask_again_s) == (Decision.UNKNOWN, QUICK.running_again_s)
    assert cluster.transactions[transaction_id].asked_early == []
    go.set()
    await cluster.until(lambda: cluster.transactions[transaction_id].asked_early)


async def test_step_by_step(cluster: FakeCluster, producer: TransactionalProducer) -> None:
    first = await producer.prepare(M)
    second = await producer.prepare(M, order_key="customer 7")
    assert (await producer.commit(first, wait="promoted")).state is State.PROMOTED
    assert (await producer.commit(first)).decision is Decision.COMMIT
    assert (await producer.rollback(second, reason="cancelled")).state is State.ROLLED_BACK
    for id, error in ((second, AlreadyDecided), ("0" * 26, NotFound), ("nonsense", BadId)):
        with pytest.raises(error):
            await producer.commit(id)
    assert cluster.transactions[second].prepare.order_key == "customer 7"


async def test_transaction_of_other_group_is_refused(
    proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    async with TransactionalProducer(proxy.url, group="other", limits=QUICK) as other:
        with pytest.raises(WrongGroup):
            await other.commit(await producer.prepare(M))


async def test_ids_hold_partition_and_proxy_time(cluster: FakeCluster) -> None:
    proxy = await cluster.proxy(clock_ahead_ms=86_400_000)
    async with TransactionalProducer(proxy.url, group="g", limits=QUICK) as producer:
        ids = [await producer.prepare(M), await producer.prepare(M, order_key="k")]
    hashes = [order_hash(None, "payments", b"42"), order_hash("k", "payments", b"42")]
    assert [parse_id(i).partition for i in ids] == [(h or 0) % 4 for h in hashes]
    ahead = proxy.welcomed_at_ms
    assert all(0 <= parse_id(i).time_ms - ahead < 60_000 for i in ids)


@pytest.mark.parametrize(
    "message",
    [
        Message(""),
        Message("t", partition=-1),
        Message("t", timestamp_ms=2**64),
        Message("t\ud800"),
        Message("t", headers={"\ud800": b""}),
    ],
)
async def test_malformed_messages_are_refused_before_sending(
    cluster: FakeCluster, producer: TransactionalProducer, message: Message
) -> None:
    with pytest.raises(BadRequest):
        producer.transaction(message)
    assert cluster.prepares == []


async def test_malformed_options_are_refused(producer: TransactionalProducer) -> None:
    for name, value in (
        ("check_after_s", 0),
        ("check_interval_s", float("nan")),
        ("order_key", ""),
        ("order_key", "\ud800"),
        ("check_attempts_max", 0),
        ("check_timeout_s", -1),
    ):
        with pytest.raises(BadRequest, match=name):
            producer.transaction(M, **{name: value})  # type: ignore[misc]
    for name, value in (
        ("check_after_s", "1"),
        ("check_interval_s", True),
        ("order_key", b"k"),
        ("check_attempts_max", 1.5),
        ("check_timeout_s", [1]),
        ("check_attempt_max", 1),
    ):
        with pytest.raises(TypeError, match=name):
            producer.transaction(M, **{name: value})  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"a message is a txbroker\.sdk\.Message, not str"):
        producer.transaction("text")  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        producer.transaction()
    with pytest.raises(BadRequest):
        await producer.commit("0" * 26, wait="soon")  # type: ignore[arg-type]


async def test_typed_refusal_skips_the_block(
    proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    proxy.once(Prepare, Refuse("unknown_topic"))
    with pytest.raises(UnknownTopic):
        async with producer.transaction(M):
            pytest.fail("the block ran")
    proxy.once(Prepare, Refuse("of_tomorrow", "a new kind"))
    with pytest.raises(Exception, match="of_tomorrow: a new kind"):
        await producer.prepare(M)


async def test_call_larger_than_frame_is_too_large(
    proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    with pytest.raises(TooLarge):
        await producer.prepare(Message("t", value=bytes(17 * 1024 * 1024)))
    assert await producer.prepare(M)
    assert proxy.opened == 1


async def test_operations_of_one_iteration_share_frames(proxy: FakeProxy) -> None:
    count = 2 * FRAME_OPERATIONS_MAX + 20
    # With patience: on a busy machine a retry would be counted, too.
    async with TransactionalProducer(proxy.url, group="g") as producer:
        await asyncio.gather(*(producer.prepare(M) for _ in range(count)))
        frames = [each for each in proxy.sessions[0].frames if isinstance(each[0], Prepare)]
    assert sum(map(len, frames)) == count
    assert len(frames) <= 5
    assert max(map(len, frames)) == FRAME_OPERATIONS_MAX


async def test_large_operations_are_spread_over_frames(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    big = Message("t", value=bytes(7 * 1024 * 1024))
    ids = await asyncio.gather(*(producer.prepare(big) for _ in range(5)))
    assert set(ids) == set(cluster.transactions)


async def test_calls_in_flight_are_limited(cluster: FakeCluster, proxy: FakeProxy) -> None:
    limits = Limits(in_flight_max=3, retry_s=5)
    gate = asyncio.Event()
    proxy.once(Prepare, AnswerAfter(gate), times=100)
    async with TransactionalProducer(proxy.url, group="g", limits=limits) as producer:
        tasks = [asyncio.create_task(producer.prepare(M)) for _ in range(10)]
        await cluster.until(lambda: len(cluster.prepares) == 3)
        tasks[5].cancel()
        # A decision does not queue up after the prepares.
        transaction_id = next(iter(cluster.transactions))
        await asyncio.wait_for(producer.commit(transaction_id), 5)
        assert len(cluster.prepares) == 3
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(cluster.transactions) == 9
    assert sum(isinstance(r, asyncio.CancelledError) for r in results) == 1


async def test_wrong_token_is_unauthorized_at_once(cluster: FakeCluster) -> None:
    proxy = await cluster.proxy(token="right")
    with pytest.raises(Unauthorized):
        async with TransactionalProducer(proxy.url, group="g", token="wrong", limits=QUICK):
            pytest.fail("it started")
    async with TransactionalProducer(proxy.url, group="g", token="right", limits=QUICK) as good:
        assert await good.prepare(M)


async def test_unreachable_proxy_is_reported(cluster: FakeCluster) -> None:
    proxy = await cluster.proxy()
    await proxy.stop()
    producer = TransactionalProducer(proxy.url, group="g", limits=QUICK)
    with pytest.raises(OwnerUnavailable, match="no proxy can be reached"):
        await producer.start(timeout_s=0.2)


@pytest.mark.parametrize("urls", [[], "ftp://x", "127.0.0.1:8470", ["http://"]])
def test_wrong_urls_are_refused(urls: str | list[str]) -> None:
    with pytest.raises(ConfigurationError):
        TransactionalProducer(urls, group="g")


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="retry_s"):
        TransactionalProducer("http://x", group="g", limits=Limits(retry_s=0))


async def test_drain_waits_for_blocks_and_refuses_new_ones(
    cluster: FakeCluster, proxy: FakeProxy
) -> None:
    producer = TransactionalProducer(proxy.url, group="g", limits=QUICK)
    await producer.start()
    inside, go = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with producer.transaction(M):
            inside.set()
            await go.wait()

    block = asyncio.create_task(work())
    await inside.wait()
    draining = asyncio.create_task(producer.drain())
    await cluster.until(lambda: proxy.sessions[0].drained)
    with pytest.raises(ProducerClosed):
        async with producer.transaction(M):
            pytest.fail("the block ran")
    with pytest.raises(ProducerClosed):
        await producer.prepare(M)
    assert not draining.done()
    go.set()
    assert await draining is True
    await block
    (stored,) = cluster.transactions.values()
    assert stored.decision is Decision.COMMIT
    await cluster.until(lambda: not proxy.sessions)


async def test_drain_timeout_returns_false(proxy: FakeProxy) -> None:
    producer = TransactionalProducer(proxy.url, group="g", limits=QUICK)
    await producer.start()
    block = producer.transaction(M)
    await block.__aenter__()
    assert await producer.drain(timeout_s=0.05) is False
    with pytest.raises(ProducerClosed):
        await block.__aexit__(None, None, None)


async def test_drain_waits_for_the_early_check(
    cluster: FakeCluster, proxy: FakeProxy, producer: TransactionalProducer
) -> None:
    gate = asyncio.Event()
    proxy.once(AskEarly, AnswerAfter(gate))
    with pytest.raises(ValueError):
        async with producer.transaction(M) as tx:
            raise ValueError
    draining = asyncio.create_task(producer.drain())
    await cluster.until(lambda: cluster.transactions[tx.id].asked_early)
    assert not draining.done()
    gate.set()
    assert await draining is True


async def test_use_before_start_is_refused(proxy: FakeProxy) -> None:
    producer = TransactionalProducer(proxy.url, group="g", limits=QUICK)
    calls = (producer.prepare(M), producer.commit("0" * 26), producer.transaction(M).__aenter__())
    for call in calls:
        with pytest.raises(ProducerClosed, match="not started"):
            await call


async def test_options_reach_the_proxy(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    await producer.prepare(
        M, order_key="o", check_after_s=1, check_interval_s=2, check_attempts_max=3,
        check_timeout_s=4,
    )  # fmt: skip
    await producer.prepare(M, check_attempts_max=None)
    sent = [
        (
            prepare.order_key, prepare.check_after_s, prepare.check_interval_s,
            prepare.check_attempts_max, prepare.check_timeout_s,
        )
        for prepare in cluster.prepares
    ]  # fmt: skip
    assert sent == [("o", 1.0, 2.0, 3, 4.0), (None,) * 5]


async def test_swallowed_rollback_shows(producer: TransactionalProducer) -> None:
    async with producer.transaction(M) as kept:
        assert not kept.rolled_back
        assert repr(kept) == f"<Transaction {kept.id} pending>"
    async with producer.transaction(M) as tx:
        raise Rollback
    assert (kept.rolled_back, tx.rolled_back) == (False, True)
    assert repr(tx) == f"<Transaction {tx.id} rolled_back>"


def test_producer_shows_its_state_and_no_token() -> None:
    for kind in (TransactionalProducer, BlockingTransactionalProducer):
        shown = repr(kind("http://127.0.0.1:1", group="g", instance="i", token="s3cret"))
        assert shown == (
            f"<{kind.__name__} group='g' instance='i' urls=['http://127.0.0.1:1'] not started>"
        )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:{port}", "connection refused; start a proxy there, or correct the URL"),
        ("http://no-such-host.invalid:1", "its host is not known"),
        ("http://localhost:{port}", "connection refused; start a proxy there, or correct the URL"),
    ],
)
async def test_first_use_names_what_is_wrong_within_seconds(url: str, words: str) -> None:
    url = url.format(port=free_ports(1)[0])
    began_s = time.monotonic()
    with pytest.raises(OwnerUnavailable) as failed:
        async with TransactionalProducer(url, group="g"):
            pytest.fail("started without a proxy")
    assert time.monotonic() - began_s < 4
    assert str(failed.value).startswith(f"no proxy can be reached: {url}: ")
    assert words in str(failed.value)


def test_bad_token_and_limits_are_refused_at_creation() -> None:
    for token in ("a\n", "a\r\nb: c", "\xff"):
        with pytest.raises(ConfigurationError, match="no header can hold"):
            TransactionalProducer("http://h", group="g", token=token)
    with pytest.raises(TypeError, match="token is a str"):
        TransactionalProducer("http://h", group="g", token=b"t")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="retry_s must be above 0"):
        Limits(retry_s=0)
    with pytest.raises(TypeError, match="checks_max is a number, not str"):
        Limits(checks_max="9")  # type: ignore[arg-type]


async def test_dedup_key_is_refused_where_the_proxy_ignores_it(
    cluster: FakeCluster, producer: TransactionalProducer
) -> None:
    """Proxies of earlier versions would store a second transaction."""
    with pytest.raises(ConfigurationError, match="upgrade the proxies"):
        await producer.prepare(M, dedup_key="request-7")
    with pytest.raises(BadRequest, match="dedup_key must not be empty"):
        await producer.prepare(M, dedup_key="")
    assert cluster.transactions == {}
