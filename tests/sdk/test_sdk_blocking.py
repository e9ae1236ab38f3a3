"""The blocking twin, against a fake proxy whose event loop runs in another thread."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from tests.sdk.fake_proxy import QUICK, FakeCluster, FakeProxy, Refuse
from txbroker.contract.frames import Prepare
from txbroker.core.records import Decision, Message, State
from txbroker.core.routing import parse_id
from txbroker.errors import AlreadyDecided, BadRequest, OwnerUnavailable, TxbrokerError
from txbroker.sdk import (
    BlockingTransaction,
    BlockingTransactionalProducer,
    CheckRequest,
    ForkedTransaction,
    Outcome,
    ProducerClosed,
    Rollback,
)

M = Message("payments", key=b"42", value=b"body")
T = TypeVar("T")


class FakeThread:
    """A fake cluster with one proxy, in a separate event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.cluster: FakeCluster = self.run(self._cluster())
        self.proxy: FakeProxy = self.run(self.cluster.proxy())

    async def _cluster(self) -> FakeCluster:
        return FakeCluster()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.run(self.cluster.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def fake() -> Iterator[FakeThread]:
    fake = FakeThread()
    yield fake
    fake.close()


@pytest.fixture
def producer(fake: FakeThread) -> Iterator[BlockingTransactionalProducer]:
    with BlockingTransactionalProducer(fake.proxy.url, group="g", limits=QUICK) as producer:
        yield producer


def test_blocking_block_decides_like_the_async_one(
    fake: FakeThread, producer: BlockingTransactionalProducer
) -> None:
    with producer.transaction(M) as committed:
        assert committed.messages == (M,)
    with producer.transaction(M) as rolled_back:
        raise Rollback
    with pytest.raises(ValueError), producer.transaction(M) as unknown:
        raise ValueError
    with producer.transaction(M) as early:
        final = Message("payments", value=b"final")
        early.replace(final)
        assert early.commit("promoted").state is State.PROMOTED
        with pytest.raises(AlreadyDecided):
            early.rollback()
    stored = fake.cluster.transactions
    assert stored[committed.id].decision is Decision.COMMIT
    assert committed.outcome == Outcome(committed.id, Decision.COMMIT, State.COMMITTED)
    assert stored[rolled_back.id].decision is Decision.ROLLBACK
    assert stored[early.id].messages == (final,)
    fake.run(fake.cluster.until(lambda: stored[unknown.id].asked_early))
    assert stored[unknown.id].decision is None


def test_local_function_runs_in_callers_thread(
    fake: FakeThread, producer: BlockingTransactionalProducer
) -> None:
    threads = []

    def here(tx: BlockingTransaction) -> None:
        threads.append(threading.current_thread())

    assert producer.send_in_transaction(M, here, wait="promoted").state is State.PROMOTED
    assert threads == [threading.current_thread()]
    rolled_back = producer.send_in_transaction([M, M], lambda tx: Decision.ROLLBACK)
    assert rolled_back.state is State.ROLLED_BACK
    unknown = producer.send_in_transaction(M, lambda tx: Decision.UNKNOWN)
    assert (unknown.decision, unknown.state) == (Decision.UNKNOWN, State.PENDING)
    with pytest.raises(TypeError, match="returns a Decision or None"):
        producer.send_in_transaction(M, lambda tx: 5)  # type: ignore[arg-type, return-value]


def test_step_by_step(fake: FakeThread, producer: BlockingTransactionalProducer) -> None:
    first, second = producer.prepare(M), producer.prepare(M, order_key="k")
    assert producer.commit(first, wait="promoted").state is State.PROMOTED
    assert producer.rollback(second, reason="r").decision is Decision.ROLLBACK
    with pytest.raises(AlreadyDecided):
        producer.commit(second)


def test_twenty_threads_share_one_producer(
    fake: FakeThread, producer: BlockingTransactionalProducer
) -> None:
    def work(n: int) -> tuple[str, Decision]:
        with producer.transaction(Message("t", key=b"%d" % (n % 7), value=b"%d" % n)) as tx:
            if n % 3 == 0:
                raise Rollback
        return tx.id, tx.outcome.decision

    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(work, range(400)))
    assert len({transaction_id for transaction_id, _ in results}) == 400
    for n, (transaction_id, decision) in enumerate(results):
        stored = fake.cluster.transactions[transaction_id]
        assert stored.decision is decision
        assert decision is (Decision.ROLLBACK if n % 3 == 0 else Decision.COMMIT)
        assert stored.messages[0].value == b"%d" % n
    assert fake.proxy.opened == 1


def test_concurrent_first_use_starts_once(fake: FakeThread) -> None:
    producer = BlockingTransactionalProducer(fake.proxy.url, group="g", limits=QUICK)
    assert fake.proxy.opened == 0
    with ThreadPoolExecutor(10) as threads:
        ids = list(threads.map(lambda _: producer.prepare(M), range(10)))
    assert len(set(ids)) == 10
    assert fake.proxy.opened == 1
    assert producer.drain() is True
    with pytest.raises(ProducerClosed):
        producer.prepare(M)
    assert producer.drain() is True
    producer.close()


def test_failed_start_can_be_retried(fake: FakeThread) -> None:
    fake.run(fake.proxy.stop())
    producer = BlockingTransactionalProducer(fake.proxy.url, group="g", limits=QUICK)
    with pytest.raises(OwnerUnavailable):
        producer.start(timeout_s=0.1)
    fake.run(fake.proxy.start())
    assert producer.prepare(M)
    producer.close()


def test_invalid_arguments_are_refused_at_creation() -> None:
    with pytest.raises(BadRequest):
        BlockingTransactionalProducer("http://127.0.0.1:1", group="")


@pytest.mark.parametrize("coroutine", [False, True])
def test_checks_are_answered(fake: FakeThread, coroutine: bool) -> None:
    def plain(request: CheckRequest) -> Decision:
        return Decision.ROLLBACK

    async def asynchronous(request: CheckRequest) -> Decision:
        return Decision.ROLLBACK

    check = asynchronous if coroutine else plain
    with BlockingTransactionalProducer(
        fake.proxy.url, group="g", check=check, limits=QUICK
    ) as producer:
        with producer.transaction(M) as tx:
            running = fake.run(fake.proxy.sessions[0].check(tx.id))
        other = fake.run(fake.proxy.sessions[0].check("0" * 26))
    assert (running.decision, running.ask_again_s) == (Decision.UNKNOWN, QUICK.running_again_s)
    assert other.decision is Decision.ROLLBACK


def test_use_in_own_event_loop_is_refused(fake: FakeThread) -> None:
    errors: list[str] = []

    async def check(request: CheckRequest) -> Decision:
        try:
            producer.commit(request.id)
        except TxbrokerError as error:
            errors.append(str(error))
        return Decision.UNKNOWN

    with BlockingTransactionalProducer(
        fake.proxy.url, group="g", check=check, limits=QUICK
    ) as producer:
        fake.run(fake.proxy.sessions[0].check("0" * 26))
    assert errors == ["the blocking producer cannot be used inside its own event loop"]


def test_forked_child_opens_separate_sessions(
    fake: FakeThread, producer: BlockingTransactionalProducer
) -> None:
    reader, writer = os.pipe()
    with producer.transaction(M) as tx:
        child = os.fork()
        if child == 0:
            os.write(writer, _in_the_child(producer, tx).encode())
            os._exit(0)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reader) as output:
        first, *problems = output.read().split("\n")
    assert problems == [ForkedTransaction.__doc__]
    assert fake.cluster.transactions[first].decision is Decision.COMMIT
    assert fake.cluster.transactions[tx.id].decisions == [Decision.COMMIT]
    after = producer.prepare(M)
    assert after in fake.cluster.transactions
    # Randomness is drawn ahead: what the parent had left is not the child's.
    assert parse_id(after).randomness != parse_id(first).randomness
    assert fake.proxy.opened == 2


def _in_the_child(producer: BlockingTransactionalProducer, inherited: BlockingTransaction) -> str:
    with producer.transaction(M) as tx:
        pass
    try:
        inherited.commit()
    except ForkedTransaction as error:
        result = [tx.id, str(error)]
    else:
        result = [tx.id, "committed"]
    producer.drain()
    return "\n".join(result)


SCRIPT = """
import os, sys
from txbroker.sdk import BlockingTransactionalProducer, Message
producer = BlockingTransactionalProducer(sys.argv[1], group="g")
with producer.transaction(Message("t", value=b"v")):
    pass
if os.fork() == 0:
    sys.exit(0)
os.wait()
with producer.transaction(Message("t", value=b"v")):
    pass
print("done")
"""


def test_script_without_close_exits_silently(fake: FakeThread) -> None:
    done = subprocess.run(
        # Not -X dev: asyncio would warn about slow callbacks on a busy machine.
        [sys.executable, "-W", "default", "-c", SCRIPT, fake.proxy.url],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == ""
    assert len(fake.cluster.transactions) == 2
    assert fake.proxy.opened == 1


def test_blocking_call_is_retried(
    fake: FakeThread, producer: BlockingTransactionalProducer
) -> None:
    fake.proxy.once(Prepare, Refuse("overloaded"), times=3)
    started = time.monotonic()
    assert producer.prepare(M) in fake.cluster.transactions
    assert time.monotonic() - started < QUICK.retry_s
