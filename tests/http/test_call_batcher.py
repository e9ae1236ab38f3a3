"""Calls that come in together are carried out together, and each gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context

import pytest

from txbroker.contract.service import Answer, DecideRequest, PrepareRequest, Run, TransactionStatus
from txbroker.core.records import Decision, State
from txbroker.errors import NotFound, RequestError
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.context import Batched, CallBatcher

Outcome = Callable[[Sequence[Batched]], Awaitable[Sequence[Answer]]]


class Together:
    """The runs of a `Service`: each batch is one run, answered by the test."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.handed_over: list[tuple[str, list[Batched]]] = []

    def runs(self, requests: Sequence[Batched]) -> Sequence[Run]:
        self.handed_over.append((CALLER.get(), list(requests)))
        # In another order than handed over, as a service may.
        numbers = range(len(requests))[::-1]
        return [Run(numbers, self.outcome([requests[number] for number in numbers]))]


def joint(outcome: Outcome) -> tuple[CallBatcher, Together]:
    service = Together(outcome)
    return CallBatcher(service), service  # type: ignore[arg-type]  # all that is used


def prepare(id: str, group: str = "orders") -> PrepareRequest:
    return PrepareRequest(group, (), id)


def commit(id: str) -> DecideRequest:
    return DecideRequest(id, Decision.COMMIT, "orders")


def same(standing: TransactionStatus) -> TransactionStatus:
    return standing


async def stand(requests: Sequence[Batched]) -> Sequence[Answer]:
    return [TransactionStatus(str(request.id), State.PENDING) for request in requests]


async def test_calls_of_one_iteration_form_one_batch() -> None:
    calls, service = joint(stand)
    answers = await asyncio.gather(*[calls.submit(prepare(id), same) for id in "abc"])
    assert [answer.id for answer in answers] == ["a", "b", "c"]
    assert service.handed_over == [("", [prepare("a"), prepare("b"), prepare("c")])]


async def test_calls_of_later_iterations_form_own_batches() -> None:
    calls, service = joint(stand)
    assert (await calls.submit(prepare("a"), same)).id == "a"
    assert (await calls.submit(prepare("b"), same)).id == "b"
    assert [len(requests) for _, requests in service.handed_over] == [1, 1]


async def test_kinds_groups_and_callers_form_separate_batches() -> None:
    calls, service = joint(stand)
    own, other = copy_context(), copy_context()
    own.run(CALLER.set, "alice")
    other.run(CALLER.set, "bob")
    answers = await asyncio.gather(
        own.run(calls.submit, prepare("a"), same),
        other.run(calls.submit, prepare("b"), same),
        own.run(calls.submit, prepare("c", "shipping"), same),
        own.run(calls.submit, commit("d"), same),
        own.run(calls.submit, prepare("e"), same),
    )
    assert [answer.id for answer in answers] == ["a", "b", "c", "d", "e"]
    assert service.handed_over == [
        ("alice", [prepare("a"), prepare("e")]),
        ("bob", [prepare("b")]),
        ("alice", [prepare("c", "shipping")]),
        ("alice", [commit("d")]),
    ]


async def test_each_call_gets_its_own_error() -> None:
    async def outcome(requests: Sequence[Batched]) -> Sequence[Answer]:
        found = await stand(requests)
        return [NotFound(id="b") if answer.id == "b" else answer for answer in found]  # type: ignore[union-attr]

    calls, _ = joint(outcome)
    first, second = calls.submit(prepare("a"), same), calls.submit(prepare("b"), same)
    assert (await first).id == "a"
    with pytest.raises(NotFound) as caught:
        await second
    assert caught.value.details == {"id": "b"}


@pytest.mark.parametrize("error", [RequestError("closed"), ValueError("a bug")])
async def test_failed_run_fails_all_its_calls(error: Exception) -> None:
    async def outcome(requests: Sequence[Batched]) -> Sequence[Answer]:
        raise error

    calls, _ = joint(outcome)
    asked = [calls.submit(prepare(id), same) for id in "ab"]
    assert await asyncio.gather(*asked, return_exceptions=True) == [error, error]


async def test_refused_batch_fails_its_calls() -> None:
    calls, service = joint(stand)
    error = RuntimeError("no runs")

    def runs(requests: Sequence[Batched]) -> Sequence[Run]:
        raise error

    service.runs = runs  # type: ignore[method-assign]
    asked = [calls.submit(prepare(id), same) for id in "ab"]
    assert await asyncio.gather(*asked, return_exceptions=True) == [error, error]


async def test_gone_caller_keeps_answers_of_others() -> None:
    gate = asyncio.Event()

    async def outcome(requests: Sequence[Batched]) -> Sequence[Answer]:
        await gate.wait()
        return await stand(requests)

    calls, _ = joint(outcome)
    gone, staying = calls.submit(prepare("a"), same), calls.submit(prepare("b"), same)
    gone.cancel()
    gate.set()
    assert (await staying).id == "b"
    assert gone.cancelled()


async def test_cancelled_run_cancels_its_calls() -> None:
    begun = asyncio.Event()
    task: list[asyncio.Task[object] | None] = []

    async def outcome(requests: Sequence[Batched]) -> Sequence[Answer]:
        task.append(asyncio.current_task())
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    calls, _ = joint(outcome)
    asked = calls.submit(prepare("a"), same)
    await begun.wait()
    [running] = task
    assert running is not None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
