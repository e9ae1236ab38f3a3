"""Check-backs that come down a session."""

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.sdk.fake_proxy import (
    QUICK,
    AnswerAfter,
    FakeCluster,
    FakeProxy,
    FakeSession,
    GatedCheck,
)
from txbroker.contract.frames import CheckAnswer, Decide, Drain
from txbroker.core.records import CheckReason, Decision, Message
from txbroker.databases import DatabaseUnavailable
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.sdk import (
    Answer,
    CheckFunction,
    CheckRequest,
    Commit,
    Limits,
    NotYet,
    TransactionalProducer,
)
from txbroker.sdk.checks import UNAVAILABLE_AGAIN_S

M = Message("payments", key=b"42", value=b"body")
ID = "0" * 26


@asynccontextmanager
async def checked(
    proxy: FakeProxy, check: CheckFunction | None, limits: Limits = QUICK
) -> AsyncIterator[tuple[TransactionalProducer, FakeSession]]:
    """A producer with a check function, and the proxy's end of its session."""
    async with TransactionalProducer(proxy.url, group="g", check=check, limits=limits) as producer:
        yield producer, proxy.sessions[0]


def essence(answer: CheckAnswer) -> tuple[object, ...]:
    return answer.decision, answer.ask_again_s, answer.messages


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Decision.COMMIT, (Decision.COMMIT, None, None)),
        (Decision.ROLLBACK, (Decision.ROLLBACK, None, None)),
        (Decision.UNKNOWN, (Decision.UNKNOWN, None, None)),
        (NotYet(2.5), (Decision.UNKNOWN, 2.5, None)),
        (Commit(), (Decision.COMMIT, None, None)),
        (Commit([M]), (Decision.COMMIT, None, (M,))),
    ],
)
async def test_all_answers_of_functions_and_coroutines(
    proxy: FakeProxy, answer: Answer, expected: tuple[object, ...]
) -> None:
    async def coroutine(request: CheckRequest) -> Answer:
        return answer

    class Callable_:
        async def __call__(self, request: CheckRequest) -> Answer:
            return answer

    functions: list[CheckFunction] = [coroutine, lambda r: answer, lambda r: coroutine(r)]
    for function in (*functions, Callable_()):
        async with checked(proxy, function) as (_, session):
            assert essence(await session.check(ID, messages=(M,))) == expected


async def test_check_request_has_all_fields(proxy: FakeProxy) -> None:
    asked: list[CheckRequest] = []

    def check(request: CheckRequest) -> Decision:
        asked.append(request)
        return Decision.COMMIT

    async with checked(proxy, check) as (_, session):
        await session.check(ID, attempt=3, messages=(M,))
    assert asked == [CheckRequest(ID, "g", 3, 15, CheckReason.DUE, 1_700_000_000.5, (M,))]


async def cancelled(request: CheckRequest) -> Answer:
    """A check function of which something inside was cancelled."""
    raise asyncio.CancelledError


async def leaving(request: CheckRequest) -> Answer:
    """A check function that means to end the process."""
    sys.exit(3)


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (lambda r: None, "not NoneType"),
        (lambda r: True, "not bool"),
        (lambda r: "commit", "not str"),
        (lambda r: Commit([M, M]), "as many"),
        (lambda r: Commit([]), "at least one"),
        (lambda r: 1 / 0, "ZeroDivisionError"),
        (lambda r: next(iter(())), "StopIteration"),
        (lambda r: sys.exit(3), "SystemExit"),
        (leaving, "SystemExit"),
        (cancelled, "CancelledError"),
        (lambda r: Commit([Message("payments", value=bytes(17 * 1024 * 1024))]), "frame holds"),
    ],
)
async def test_failed_or_invalid_checks_are_unknown(
    proxy: FakeProxy, wrong: Callable[[CheckRequest], Answer], detail: str
) -> None:
    async with checked(proxy, wrong) as (_, session):
        answer = await session.check(ID, messages=(M,))
        assert essence(answer) == (Decision.UNKNOWN, None, None)
        assert detail in answer.detail
        assert (await session.check(ID, messages=(M,))).decision is Decision.UNKNOWN
    assert proxy.opened == 1


async def test_check_failure_is_logged_once(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    def check(request: CheckRequest) -> Decision:
        raise RuntimeError("database down")

    with caplog.at_level(logging.ERROR, "txbroker.sdk"):
        async with checked(proxy, check) as (_, session):
            answer = await session.check(ID)
    assert answer.detail == "the check function raised RuntimeError"
    (record,) = caplog.records
    assert ID in record.getMessage()
    assert "RuntimeError: database down" in record.getMessage()
    assert record.exc_info is None, "a trace would be seen on a terminal"


@pytest.mark.rule(23)
@pytest.mark.parametrize("suspends", [True, False])
async def test_check_without_its_database_is_given_back(proxy: FakeProxy, suspends: bool) -> None:
    def check(request: CheckRequest) -> Decision:
        raise DatabaseUnavailable("PostgreSQL shop: connection refused")

    async def suspending(request: CheckRequest) -> Decision:
        return check(request)

    async with checked(proxy, suspending if suspends else check) as (_, session):
        answer = await session.check(ID)
    assert essence(answer) == (None, UNAVAILABLE_AGAIN_S, None)
    assert answer.detail == "the database does not answer"


@pytest.mark.rule(24)
async def test_running_block_is_not_yet_without_function(
    cluster: FakeCluster, proxy: FakeProxy
) -> None:
    def check(request: CheckRequest) -> Decision:
        raise AssertionError("asked")

    async with checked(proxy, check) as (producer, session):
        async with producer.transaction(M) as tx:
            expected = (Decision.UNKNOWN, QUICK.running_again_s, None)
            assert essence(await session.check(tx.id)) == expected
        assert cluster.transactions[tx.id].decision is Decision.COMMIT


async def test_decision_in_flight_is_the_answer(cluster: FakeCluster, proxy: FakeProxy) -> None:
    final = Message("payments", value=b"final")
    async with checked(proxy, lambda r: Decision.UNKNOWN) as (producer, session):
        gate = asyncio.Event()
        proxy.once(Decide, AnswerAfter(gate))
        tx = await (block := producer.transaction(M)).__aenter__()
        tx.replace(final)
        leaving = asyncio.create_task(block.__aexit__(None, None, None))
        await cluster.until(lambda: cluster.transactions[tx.id].decision)
        assert essence(await session.check(tx.id)) == (Decision.COMMIT, None, (final,))
        gate.set()
        await leaving
        assert (await session.check(tx.id)).decision is Decision.UNKNOWN


async def test_function_is_called_after_failed_block(
    cluster: FakeCluster, proxy: FakeProxy
) -> None:
    async with checked(proxy, lambda r: Decision.ROLLBACK) as (producer, session):
        with pytest.raises(ValueError):
            async with producer.transaction(M) as tx:
                raise ValueError
        assert (await session.check(tx.id)).decision is Decision.ROLLBACK


async def test_function_is_called_for_prepare_without_block(proxy: FakeProxy) -> None:
    async with checked(proxy, lambda r: Decision.COMMIT) as (producer, session):
        transaction_id = await producer.prepare(M)
        assert (await session.check(transaction_id)).decision is Decision.COMMIT


async def test_question_is_given_back_without_function(proxy: FakeProxy) -> None:
    async with checked(proxy, None) as (_, session):
        answer = await session.check(ID)
        assert answer.decision is None
        assert "no check function" in answer.detail


@pytest.mark.parametrize("check", [None, lambda request: Decision.COMMIT])
async def test_hello_announces_the_check_function(
    proxy: FakeProxy, check: CheckFunction | None
) -> None:
    async with checked(proxy, check) as (_, session):
        assert session.hello is not None
        assert session.hello.checks is (check is not None)


async def test_non_callable_check_is_refused(proxy: FakeProxy) -> None:
    with pytest.raises(ConfigurationError, match="check is a function or None"):
        TransactionalProducer(proxy.url, group="g", check="commit")  # type: ignore[arg-type]


async def test_repeated_question_calls_function_once(proxy: FakeProxy) -> None:
    check = GatedCheck()
    async with checked(proxy, check) as (_, session):
        first, second = (asyncio.create_task(session.check(ID, attempt=n)) for n in (1, 2))
        await check.asked_times(1)
        check.go.set()
        assert (await first).decision is (await second).decision is Decision.COMMIT
    assert [request.attempt for request in check.asked] == [1]


async def test_cancelled_function_is_unknown_and_called_again(proxy: FakeProxy) -> None:
    asked: list[int] = []

    async def check(request: CheckRequest) -> Decision:
        asked.append(request.attempt)
        task = asyncio.current_task()
        if request.attempt == 1 and task is not None:
            task.cancel()
            await asyncio.sleep(0)
        return Decision.COMMIT

    async with checked(proxy, check) as (_, session):
        first = asyncio.create_task(session.check(ID, attempt=1))
        await await_count(asked, 1)
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert (await session.check(ID, attempt=2)).decision is Decision.COMMIT
        first.cancel()
    assert asked == [1, 2]


async def await_count(seen: list[int], count: int) -> None:
    async with asyncio.timeout(5):
        while len(seen) < count:
            await asyncio.sleep(0)


async def test_concurrent_checks_are_limited(proxy: FakeProxy) -> None:
    check = GatedCheck()
    async with checked(proxy, check, replace(QUICK, checks_max=2)) as (_, session):
        tasks = [asyncio.create_task(session.check(f"{n:026}")) for n in range(2)]
        await check.asked_times(2)
        answer = await session.check(f"{9:026}")
        assert answer.decision is None
        assert "busy" in answer.detail
        check.go.set()
        assert [(await task).decision for task in tasks] == [Decision.COMMIT] * 2
        assert (await session.check(f"{9:026}")).decision is Decision.COMMIT


async def test_check_threads_are_limited(proxy: FakeProxy) -> None:
    lock, go = threading.Lock(), threading.Event()
    running: list[int] = []
    most: list[int] = []

    def check(request: CheckRequest) -> Decision:
        with lock:
            running.append(1)
            most.append(len(running))
        go.wait(10)
        with lock:
            running.pop()
        return Decision.COMMIT

    limits = replace(QUICK, check_threads_max=3)
    async with checked(proxy, check, limits) as (producer, session):
        tasks = [asyncio.create_task(session.check(f"{n:026}")) for n in range(12)]
        await await_count(running, 3)
        # The event loop is not held up by functions that block.
        assert await producer.prepare(M)
        go.set()
        assert [(await task).decision for task in tasks] == [Decision.COMMIT] * 12
    assert max(most) == 3


async def test_answer_to_lost_session_is_dropped(cluster: FakeCluster, proxy: FakeProxy) -> None:
    check = GatedCheck()
    async with checked(proxy, check) as (producer, session):
        task = asyncio.create_task(session.check(ID))
        await check.asked_times(1)
        await session.drop()
        await cluster.until(lambda: session not in proxy.sessions)
        check.go.set()
        await producer.prepare(M)
        assert (await proxy.sessions[0].check(ID)).decision is Decision.COMMIT
        task.cancel()


async def test_drain_answers_running_checks_only(cluster: FakeCluster, proxy: FakeProxy) -> None:
    check = GatedCheck()
    async with checked(proxy, check) as (producer, session):
        task = asyncio.create_task(session.check(ID))
        await check.asked_times(1)
        draining = asyncio.create_task(producer.drain())
        await cluster.until(lambda: session.drained)
        late = await session.check(f"{1:026}")
        assert late.decision is None
        assert "draining" in late.detail
        check.go.set()
        assert (await task).decision is Decision.COMMIT
        assert await draining is True
    assert any(isinstance(op, Drain) for frame in session.frames for op in frame)


async def test_new_session_during_drain_gets_drain(cluster: FakeCluster, proxy: FakeProxy) -> None:
    async with checked(proxy, None) as (producer, session):
        block = producer.transaction(M)
        await block.__aenter__()
        draining = asyncio.create_task(producer.drain())
        await cluster.until(lambda: session.drained)
        await session.drop()
        await cluster.until(lambda: any(s.drained for s in proxy.sessions if s is not session))
        await block.__aexit__(None, None, None)
        assert await draining is True


def test_not_yet_is_limited() -> None:
    for wrong in (-1, 3601, float("nan"), float("inf")):
        with pytest.raises(BadRequest):
            NotYet(wrong)
