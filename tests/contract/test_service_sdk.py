"""What the SDK promises, through a whole proxy: in memory and on a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.kit.service import Service
from tests.kit.until import unique, until
from txbroker.core.records import Message
from txbroker.errors import IdConflict
from txbroker.sdk import (
    Answer,
    BlockingTransactionalProducer,
    CheckRequest,
    Commit,
    Decision,
    Limits,
    NotYet,
    Repeated,
    Rollback,
    State,
    Transaction,
)

NEVER_S = 3600.0
SOON_S = 0.01


class Checker:
    """A check function that records its requests."""

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[CheckRequest] = []
        self._answers = list(answers)

    async def __call__(self, request: CheckRequest) -> Answer:
        self.requests.append(request)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def test_raising_rollback_rolls_back(service: Service, topic: str) -> None:
    async with service.producer(unique("group")) as producer:
        async with producer.transaction(Message(topic, b"k", b"v")) as transaction:
            raise Rollback("no money")
        assert transaction.outcome.state is State.ROLLED_BACK
    assert (await service.show(transaction.id))["reason"] == "no money"
    assert await service.visible(topic) == []


async def test_exception_decides_nothing_and_checks_early(service: Service, topic: str) -> None:
    check = Checker(Decision.COMMIT)
    message = Message(topic, b"k", b"v")
    async with service.producer(unique("group"), check=check) as producer:
        with pytest.raises(OSError, match="disk full"):
            async with producer.transaction(message, check_after_s=NEVER_S) as transaction:
                raise OSError("disk full")
        await service.reaches(transaction.id, "promoted")
    (request,) = check.requests
    assert (request.id, request.attempt, request.reason) == (transaction.id, 1, "asked")
    assert request.messages == (Message(topic, b"k", b"v", partition=0),)
    assert await service.values(topic) == [b"v"]


def plainly(request: CheckRequest) -> Decision:
    return Decision.COMMIT


async def in_a_coroutine(request: CheckRequest) -> Decision:
    await asyncio.sleep(0)
    return Decision.COMMIT


@pytest.mark.parametrize("check", [plainly, in_a_coroutine])
async def test_checks_are_functions_or_coroutines(
    service: Service, topic: str, check: Callable[[CheckRequest], Answer]
) -> None:
    async with service.producer(unique("group"), check=check) as producer:
        id = await producer.prepare(Message(topic, b"k", b"v"), check_after_s=SOON_S)
        shown = await service.reaches(id, "promoted")
    assert (shown["source"], shown["attempts"]) == ("check", 1)


async def test_check_answers_not_yet_then_commits_new_content(service: Service, topic: str) -> None:
    check = Checker(NotYet(1), Commit([Message(topic, b"k", b"final")]))
    async with service.producer(unique("group"), check=check) as producer:
        id = await producer.prepare(Message(topic, b"k", b"draft"), check_after_s=SOON_S)
        shown = await service.reaches(id, "promoted")
    assert shown["attempts"] == 1
    assert [request.attempt for request in check.requests] == [1, 1]
    assert await service.values(topic) == [b"final"]


async def test_running_block_is_not_checked(service: Service, topic: str) -> None:
    check = Checker(Decision.ROLLBACK)
    producer = service.producer(unique("group"), check=check, limits=Limits(running_again_s=1.0))
    message = Message(topic, b"k", b"v")
    async with producer, producer.transaction(message, check_after_s=SOON_S) as transaction:

        async def put_off() -> bool:
            checks = (await service.show(transaction.id)).get("checks", [])
            return any(not each.get("counts", True) for each in checks)

        await until(put_off)
    assert check.requests == []
    assert (await service.reaches(transaction.id, "promoted"))["attempts"] == 0


async def test_block_replaces_content(service: Service, topic: str) -> None:
    async with (
        service.producer(unique("group")) as producer,
        producer.transaction(Message(topic, b"k", b"draft")) as transaction,
    ):
        assert await service.state(transaction.id) == "pending"
        transaction.replace(Message(topic, b"k", b"final"))
    assert transaction.outcome.decision is Decision.COMMIT
    await service.reaches(transaction.id, "promoted")
    assert await service.values(topic) == [b"final"]


async def test_wait_promoted_waits_until_visible(service: Service, topic: str) -> None:
    async with service.producer(unique("group")) as producer:
        for number in range(5):
            async with producer.transaction(Message(topic, b"k", b"%d" % number)) as transaction:
                outcome = await transaction.commit(wait="promoted")
            assert outcome.state is State.PROMOTED
            assert await service.values(topic) == [b"%d" % n for n in range(number + 1)]


@pytest.mark.parametrize(
    ("decision", "state"),
    [(None, "promoted"), (Decision.COMMIT, "promoted"), (Decision.ROLLBACK, "rolled_back")],
)
async def test_function_decides(service: Service, decision: Decision | None, state: str) -> None:
    async def local(transaction: Transaction) -> Decision | None:
        return decision

    message = Message(await service.topic(), b"k", b"v")
    async with service.producer(unique("group")) as producer:
        outcome = await producer.send_in_transaction(message, local, wait="promoted")
    assert str(outcome.state) == await service.state(outcome.id) == state


async def test_any_instance_of_a_group_answers(service: Service, topic: str) -> None:
    group, check = unique("group"), Checker(Decision.COMMIT)
    async with service.producer(group) as leaving:
        id = await leaving.prepare(Message(topic, b"k", b"v"), check_after_s=NEVER_S)
    async with service.producer(group, check=check):
        await service.act(id, "check")
        await service.reaches(id, "promoted")
    assert [request.id for request in check.requests] == [id]


async def test_instance_without_check_defers_to_others(service: Service, topic: str) -> None:
    group, check = unique("group"), Checker(Decision.COMMIT)
    message = Message(topic, b"k", b"v")
    async with service.producer(group) as web, service.producer(group, check=check):
        with pytest.raises(OSError, match="disk full"):
            async with web.transaction(message, check_after_s=NEVER_S) as transaction:
                raise OSError("disk full")
        shown = await service.reaches(transaction.id, "promoted")
    assert [request.id for request in check.requests] == [transaction.id]
    assert (shown["source"], shown["attempts"]) == ("check", 1)


async def test_instance_without_check_does_not_hide_check_url(service: Service, topic: str) -> None:
    group = await service.group({"decision": "commit"})
    message = Message(topic, b"k", b"v")
    async with service.producer(group) as web:
        with pytest.raises(OSError, match="disk full"):
            async with web.transaction(message, check_after_s=NEVER_S) as transaction:
                raise OSError("disk full")
        shown = await service.reaches(transaction.id, "promoted")
        # Another one's, too.
        id = await service.prepare(message, group=group)
        await service.reaches(id, "promoted")
    assert [call["id"] for call in service.asked(group)] == [transaction.id, id]
    assert (shown["source"], shown["attempts"]) == ("check", 1)


async def test_check_goes_to_another_instance_if_one_is_busy(service: Service, topic: str) -> None:
    group, go = unique("group"), asyncio.Event()

    async def slow(request: CheckRequest) -> Decision:
        await go.wait()
        return Decision.COMMIT

    limits, quick = Limits(checks_max=1), Checker(Decision.COMMIT)
    message = Message(topic, b"k", b"v")
    async with service.producer(group, check=slow, limits=limits) as busy:
        first = await busy.prepare(message, check_after_s=SOON_S)

        async def asked() -> bool:
            return bool((await service.show(first)).get("checks"))

        await until(asked)
        async with service.producer(group, check=quick):
            second = await busy.prepare(message, check_after_s=SOON_S)
            shown = await service.reaches(second, "promoted")
        go.set()
    assert [request.id for request in quick.requests] == [second]
    assert shown["attempts"] == 1


async def test_blocking_producer_behaves_alike(service: Service, topic: str) -> None:
    url = service.proxy.url

    def blocking() -> None:
        with BlockingTransactionalProducer(url, group=unique("group")) as producer:
            with producer.transaction(Message(topic, b"k", b"commits")) as transaction:
                transaction.commit(wait="promoted")
            with producer.transaction(Message(topic, b"k", b"rolls back")):
                raise Rollback

    await asyncio.to_thread(blocking)
    assert await service.values(topic) == [b"commits"]


async def test_concurrent_transactions_each_appear_once(service: Service) -> None:
    topic = await service.topic(partitions=3)

    async with service.producer(unique("group")) as producer:

        async def one(number: int) -> None:
            message = Message(topic, b"%d" % (number % 7), b"%d" % number)
            async with producer.transaction(message) as transaction:
                if number % 3 == 0:
                    raise Rollback
                await transaction.commit(wait="promoted")

        await asyncio.gather(*[one(number) for number in range(90)])
    values = [value for p in range(3) for value in await service.values(topic, p)]
    assert sorted(values, key=str) == sorted([b"%d" % n for n in range(90) if n % 3], key=str)


@pytest.mark.parametrize("first", [Decision.COMMIT, Decision.ROLLBACK, Decision.UNKNOWN])
async def test_repeated_request_runs_no_second_local_transaction(
    service: Service, first: Decision
) -> None:
    topic, ran = await service.topic(), list[str]()
    message = Message(topic, b"k", b"v")

    def run(tx: Transaction) -> Decision:
        ran.append(tx.id)
        return first

    names = unique("group"), unique("group")
    async with service.producer(names[0]) as producer, service.producer(names[1]) as other:
        done = await producer.send_in_transaction(message, run, dedup_key="request-7")
        assert done.decision is first
        for _ in range(2):
            with pytest.raises(Repeated) as repeated:
                await producer.send_in_transaction(message, run, dedup_key="request-7")
            outcome = repeated.value.outcome
            assert (outcome.id, outcome.decision) == (done.id, first)
        with pytest.raises(Repeated):
            async with producer.transaction(message, dedup_key="request-7"):
                raise AssertionError("the block ran")
        with pytest.raises(Repeated):
            await producer.prepare(message, dedup_key="request-7")
        # Another key, group or content is another request, or an error.
        assert await producer.send_in_transaction(message, run, dedup_key="request-8")
        assert await other.send_in_transaction(message, run, dedup_key="request-7")
        with pytest.raises(IdConflict):
            await producer.prepare(Message(topic, b"k", b"other"), dedup_key="request-7")
    assert len(set(ran)) == len(ran) == 3


async def test_repeated_request_of_a_blocking_producer(service: Service) -> None:
    topic = await service.topic()

    def requests() -> list[State]:
        with BlockingTransactionalProducer(service.proxy.url, group="blocking") as producer:
            with producer.transaction(Message(topic, value=b"v"), dedup_key="7") as tx:
                pass
            with (
                pytest.raises(Repeated) as repeated,
                producer.transaction(Message(topic, value=b"v"), dedup_key="7"),
            ):
                raise AssertionError("the block ran")
            assert repeated.value.outcome.id == tx.id
            return [tx.outcome.state, repeated.value.outcome.state]

    assert State.PENDING not in await asyncio.to_thread(requests)
