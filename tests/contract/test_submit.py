"""Prepare and decide in one request: stored once, decided as it says, each transaction alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kit.cluster import Proxies
from tests.kit.kafka import now_ms
from tests.kit.memory import MemoryHarness
from tests.kit.service import Service
from tests.kit.until import unique
from txbroker.config.settings import Settings
from txbroker.contract.service import (
    Answer,
    DecideRequest,
    PrepareRequest,
    SubmitRequest,
    TransactionStatus,
    execute,
)
from txbroker.core.records import Decision, Message, State
from txbroker.core.routing import make_id
from txbroker.errors import AlreadyDecided, BadRequest, NotPermitted, OwnerUnavailable, RequestError
from txbroker.principals import Patterns, Principal
from txbroker.proxy.admission import Admission
from txbroker.proxy.observe.metrics import Metrics

COUNT = 64
STATES = {State.COMMITTED, State.PROMOTED}
SHOP = Principal("shop", groups=Patterns(["shop"]), topics=Patterns(["known-*"]))


def submit(topic: str, value: str = "v", **fields: Any) -> SubmitRequest:
    id, group = fields.pop("id", None), fields.pop("group", "orders")
    message = Message(topic, None, value.encode())
    return SubmitRequest(PrepareRequest(group, (message,), id), **fields)


def admission(service: Service) -> Admission:
    return Admission(service.proxy.cluster, Settings(), Metrics())


async def answers(service: Service, requests: Sequence[SubmitRequest]) -> list[Answer]:
    """Submit requests as the calls of one loop iteration, and return their answers."""
    admitting = admission(service)
    futures = [admitting.submit(Principal(), each, lambda status: status) for each in requests]
    found = await asyncio.gather(*futures, return_exceptions=True)
    return [each for each in found if isinstance(each, TransactionStatus | RequestError)]


async def test_commit_is_visible_once_and_repeatable(service: Service, topic: str) -> None:
    id = make_id(0, now_ms(), 1)
    for _ in range(3):
        status = await execute(service.proxy.cluster, submit(topic, id=id, wait=True))
        assert (status.id, status.state, status.decision) == (id, State.PROMOTED, Decision.COMMIT)
    assert await service.values(topic) == [b"v"]
    with pytest.raises(AlreadyDecided):
        await execute(service.proxy.cluster, submit(topic, id=id, decision=Decision.ROLLBACK))


async def test_rollback_is_never_visible(service: Service, topic: str) -> None:
    rolled_back = submit(topic, "never", decision=Decision.ROLLBACK, reason="a rehearsal")
    status = await execute(service.proxy.cluster, rolled_back)
    assert status.state is State.ROLLED_BACK
    assert (await service.show(status.id))["reason"] == "a rehearsal"
    await execute(service.proxy.cluster, submit(topic, "later", wait=True))
    assert b"never" not in await service.values(topic)


async def test_each_of_a_run_has_its_own_answer(service: Service, topic: str) -> None:
    requests = [submit(topic, str(number)) for number in range(COUNT)]
    requests[7] = submit("nowhere", "7")
    requests[9] = submit(topic, "9", decision=Decision.ROLLBACK)
    found = await answers(service, requests)
    assert isinstance(found[7], RequestError)
    assert found[7].code == "unknown_topic"
    states = [each.state for each in found if isinstance(each, TransactionStatus)]
    assert states.pop(8) is State.ROLLED_BACK
    assert len(states) == COUNT - 2
    assert set(states) <= STATES
    seen = {record.value for record in await service.sees(topic, COUNT - 2)}
    assert seen == {str(number).encode() for number in range(COUNT) if number not in (7, 9)}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (submit("known-1", decision=Decision.UNKNOWN, group="shop"), BadRequest),
        (submit("known-1", reason="x" * 1001, group="shop"), BadRequest),
        (submit("known-1", id="nonsense", group="shop"), RequestError),
        (submit("known-1", group="bank"), NotPermitted),
        (submit("secret", group="shop"), NotPermitted),
    ],
)
async def test_both_parts_are_admitted(
    service: Service, request_: SubmitRequest, error: type[RequestError]
) -> None:
    with pytest.raises(error):
        admission(service).submit(SHOP, request_, lambda status: status)


async def test_any_proxy_takes_it(two: Proxies) -> None:
    one, other = two.running.values()
    topic = await one.topic()
    for number, service in enumerate((one, other)):
        for partition in range(two.partitions):
            id = make_id(partition, now_ms(), number)
            status = await execute(service.proxy.cluster, submit(topic, id=id))
            assert status.state in STATES
    await one.sees(topic, 2 * two.partitions)


async def test_lost_answer_names_the_id_to_retry_with(in_memory: Proxies) -> None:
    (one,) = await in_memory.add("one")
    assert isinstance(in_memory.world, MemoryHarness)
    topic, cluster = await one.topic(), one.proxy.cluster
    await execute(cluster, submit(topic, unique("first"), wait=True))
    in_memory.world.kafka.go_down()
    with pytest.raises(OwnerUnavailable) as error:
        await execute(cluster, submit(topic, "again"))
    in_memory.world.kafka.come_up()
    id = error.value.details["id"]
    status = await execute(cluster, submit(topic, "again", id=id, wait=True))
    assert (status.id, status.state) == (id, State.PROMOTED)
    assert [*await one.values(topic)].count(b"again") <= 1
    with pytest.raises(AlreadyDecided):
        await execute(cluster, DecideRequest(id, Decision.ROLLBACK))
